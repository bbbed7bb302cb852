"""Trials that the caller runs: what is proposed, what is written, and what is refused."""

import errno
import os

import numpy as np
import optuna
import pytest

import tunediff
from tests import searches
from tests.helpers import shipped_toy
from tunediff import cli, search
from tunediff.analysis import journals
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.tuning.optuna_proposer import OptunaProposer

FILE = """
workload: toy
budget: {per_trial: 20s, trials: 6}
seed: 7
search:
  width: [4, 8, 16]
  lr: {low: 0.001, high: 0.1, log: true}
"""


@pytest.fixture
def study(tmp_path):
    """Opens a study of the toy workload, or the same one again."""
    (tmp_path / "toy.yaml").write_text(FILE)
    opened = []

    def study(more="", **options):
        (tmp_path / "toy.yaml").write_text(FILE + more)
        words = () if (tmp_path / "night").exists() else (tmp_path / "toy.yaml",)
        opened.append(tunediff.open_study(*words, name="night", storage=tmp_path, **options))
        return opened[-1]

    with shipped_toy():
        yield study
        for one in opened:
            one.close()


def run(study, value):
    """Run all trials."""
    trials = []
    while (trial := study.ask()) is not None:
        trial.report(2 * value(trial.knobs), time_s=10)
        study.tell(trial, value(trial.knobs), time_s=20)
        trials.append(trial)
    return trials


def test_an_asked_search_is_a_search_with_the_proposals_of_its_seed(study, tmp_path):
    def value(knobs):
        return knobs.width * knobs.lr

    with study() as one:
        trials = run(one, value)
        assert [trial.number for trial in trials] == list(range(6))
        assert (trials[0].knobs.width, trials[0].knobs.lr, trials[0].budget_s) == (8, 0.05, 20.0)
        assert trials[0].config.loader.batch_size == 8
    night = tunediff.open_search("night", tmp_path)
    assert night.trials()["error"].tolist() == [value(trial.knobs) for trial in trials]
    assert len(night.curves()) == 12
    assert night.json()["device_s"] == 6 * 20.0
    best = min(trials, key=lambda trial: value(trial.knobs))
    assert (night.best.trial, night.best.value) == (best.name, value(best.knobs))
    assert night.verdict.confirmations == []
    page = night.report().read_text()
    assert page.count("tunediff.open_study(name=") == 1
    assert "optimizer steps" not in page, "none were reported"
    # The engine's own proposer, told the same values, draws the same points
    (tmp_path / "again" / "trials").mkdir(parents=True)
    proposer = OptunaProposer(one.space, tmp_path / "again")
    for trial in trials:
        spec = proposer.ask()
        assert record.read_begun(spec.folder).drawn == trial.drawn
        told = {"curve": ((10, 0, 2.0), (20, 0, value(trial.knobs))), "drawn": trial.drawn, "rate": 1.0}
        folder = searches.write(tmp_path / "again", one.space, spec.number, **told)
        proposer.tell(spec, record.read_trial(folder), 1.0)


def test_seconds_to_a_target_are_the_objective_of_what_reports_its_metric(study, tmp_path):
    """By the mean of reports as `compare` does; who never meets it has failed, which Optuna takes for worse than all."""
    with study("objective: {target: error<=1}\n") as one:
        base, missed, faster = (one.ask() for _ in range(3))
        assert not base.report(1.5, time_s=10)
        assert not base.report(1.5, time_s=20)
        assert base.report(-3.0, time_s=30)
        one.tell(base)
        one.tell(missed, 2.0, time_s=20)
        assert not faster.report(0.5, time_s=2), "one value may be luck, but for that of a trial that has ended"
        one.tell(faster, 0.5, time_s=4)
        table = one.search.trials()
        assert table["time_to_target_s"].tolist()[::2] == pytest.approx([15 + 5 * 0.5 / 1.5, 4.0])
        assert table["error"].tolist() == [-3.0, 2.0, 0.5]
        assert table["reason"].tolist() == [
            "",
            "the target error<=1 was not reached by values 5 % of the time apart",
            "",
        ]
        result = one.search.json()
        assert (result["objective"], result["target"]) == ("time_to_target_s", "error<=1")
        assert (result["candidates"][-1]["trial"], result["candidates"][-1]["value"]) == ("t0002", 4.0)
        axes = one.search.figure().axes[0]
        assert (axes.get_ylabel(), axes.lines[-1].get_label()) == ("error, lower is better", "target error<=1")
    told = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path}/night/study.db").trials
    assert told[1].value > max(told[0].value, told[2].value)


def test_a_closed_study_asks_for_nothing(study):
    with study() as one:
        one.ask()
    with study() as again:
        with pytest.raises(tunediff.TunediffError, match=r"night: the study was closed; .* goes on with it"):
            one.ask()
        assert again.ask().name == "t0000"


def test_a_study_that_was_closed_asks_again_for_what_it_was_not_told(study, tmp_path):
    with study() as one:
        one.tell(one.ask(), 3.0)
        lost = one.ask()
        lost.report(1.0, time_s=5)
    with pytest.raises(tunediff.TunediffError, match="t0001: does not run: it has ended, or its study was closed"):
        lost.report(1.0)
    with study() as one:
        trial = one.ask()
        assert (trial.name, trial.drawn) == ("t0001", lost.drawn)
        with pytest.raises(tunediff.TunediffError, match="t0001: error is missing: an objective of the search"):
            one.tell(trial)
        one.tell(trial, 0.5)
        assert one.ask().number == 2
    trial_record = record.read_trial(tmp_path / "night" / "trials" / "t0001")
    assert (trial_record.value("error"), trial_record.attempts, len(trial_record.restarts)) == (0.5, 2, 1)


def test_session_of_a_study_is_complete_only_at_its_end(study, tmp_path):
    """Else the report would call an interrupted one ended."""

    def complete():
        return [session.complete for session in journals.sessions(tmp_path / "night")]

    with pytest.raises(KeyboardInterrupt), study() as one:
        one.tell(one.ask(), 3.0)
        raise KeyboardInterrupt
    with study() as one:
        one.tell(one.ask(), 3.0)
    with study() as one:
        for _ in range(4):  # all that are left, without another `ask`
            one.tell(one.ask(), 2.0)
    with study() as one:
        assert one.ask() is None
    assert complete() == [False, False, True, True]


def test_trials_end_in_any_order_and_by_any_status(study):
    with study() as one:
        first, second, third, fourth = (one.ask() for _ in range(4))
        one.tell(third, float("nan"))
        one.tell(second, status="oom", reason="24 GiB")
        fourth.report(2.0, time_s=3)
        one.tell(fourth, 2.0)  # the same again is no further evaluation
        one.tell(first, 1.0, peak_memory_mib=100, samples=50, time_s=10)
        trials = one.search.trials()
        assert trials["status"].tolist() == ["ok", "oom", "nan", "ok"]
        assert len(one.search.curves()) == 2
        assert trials["samples_per_s"].tolist()[0] == 5.0
        for call, message in (
            (lambda: one.tell(first, 1.0), "t0000: does not run"),
            (lambda: one.tell(one.ask(), status="skipped"), "status: 'skipped' is not allowed; allowed: ok, pruned"),
            (lambda: one.ask().report(float("inf")), "value: inf is not allowed; allowed: a finite number"),
        ):
            with pytest.raises(tunediff.TunediffError, match=message):
                call()
        assert one.ask() is None  # six trials are all


def test_reports_say_when_early_stopping_would_end_a_trial(study):
    with study("early_stopping: asha\n") as one:
        trials = [one.ask() for _ in range(6)]
        for number, trial in enumerate(trials):  # more reports than a search has evaluations
            assert not any(trial.report(float(number), time_s=time_s) for time_s in range(1, 10))
        stops = [trial.report(float(number), time_s=10) for number, trial in enumerate(trials)]
        assert not any(stops[:2])  # the baseline, and the first one behind it
        stopped = stops.index(True)
        one.tell(trials[stopped], status="pruned")
        assert one.search.trials()["status"].tolist()[stopped] == "pruned"


def test_early_stopping_judges_a_trial_that_begins_again_from_its_first_report(study):
    """Its void reports reached further, and were better."""
    with study("early_stopping: asha\n") as one:
        trials = [one.ask() for _ in range(5)]
        for number, trial in enumerate(trials):
            one.tell(trial, float(number), time_s=10)
        assert not one.ask().report(0.0, time_s=15)
    with study("early_stopping: asha\n") as one:
        assert one.ask().report(9.0, time_s=10)


def test_a_result_is_a_finite_number_of_any_library(study):
    with study() as one:
        trial = one.ask()
        trial.report(0.4)
        with pytest.raises(tunediff.TunediffError, match="value: nan is not allowed; allowed: a finite number"):
            one.tell(trial, float("nan"), status="ok")
        with pytest.raises(tunediff.TunediffError, match="value: '0.5' is not allowed; allowed: a finite number"):
            one.tell(trial, "0.5")
        one.tell(trial, np.float32(0.5), loss=np.int64(3))
        assert one.search.trials()["error"].tolist() == [0.5]


def test_a_study_and_a_search_do_not_go_on_with_each_other(study, tmp_path, capsys):
    with study() as one:
        assert one.search.running
        with pytest.raises(tunediff.TunediffError, match="night is running in another process"):
            study()
    assert search.main(["--resume", "night", "--storage", str(tmp_path)]) == cli.BAD_INPUT
    assert "whoever asks for its trials runs them: tunediff.open_study(name='night') goes on" in capsys.readouterr().err
    searches.night(tmp_path / "trained")
    with pytest.raises(tunediff.TunediffError, match=r"trained: is a search that runs its trials itself.*--resume"):
        tunediff.open_study(name="trained", storage=tmp_path)


def test_a_workload_without_a_search_file_has_its_own_knobs_searched(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom typing import Annotated\nfrom tunediff import Metric, Range\n\n"
        "@dataclass(frozen=True)\nclass Knobs:\n    lr: Annotated[float, Range(0.1, 1.0)] = 0.5\n\n"
        "OBJECTIVE = Metric('loss', 'min')\n\ndef train(trial): ...\n"
    )
    with tunediff.open_study(tmp_path / "mine.py", name="mine", storage=tmp_path, seed=3) as one:
        assert [dimension.name for dimension in one.space.dimensions] == ["lr"]
        assert one.space.seed == 3
        assert one.ask().drawn == {"lr": 0.5}


@pytest.mark.parametrize(("full_at", "time_s"), [("point", None), ("end", 4.0)])
def test_value_is_kept_that_is_told_again_after_a_full_disk(study, tmp_path, monkeypatch, full_at, time_s):
    write, full = Journal.write, [True]

    def write_unless_full(journal, event, **content):
        if event == full_at and full:
            full.clear()  # room is made after that
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(journal, event, **content)

    monkeypatch.setattr(Journal, "write", write_unless_full)
    with study() as one:
        trial = one.ask()
        with pytest.raises(OSError, match="No space left"):
            one.tell(trial, 0.5, time_s=time_s)
        one.tell(trial, 0.5, time_s=time_s)
    assert one.search.curves()["error"].tolist() == [0.5]
    told = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path}/night/study.db").trials[0]
    assert (told.values, told.user_attrs.get("penalty")) == ([0.5], None)


@pytest.mark.parametrize("name", ["time", "label", "error", "train_s", "fraction", "seconds"])
def test_measurement_with_a_name_that_points_use_is_refused(study, name):
    with study() as one:
        trial = one.ask()
        with pytest.raises(tunediff.TunediffError, match=f"measured: '{name}' is not allowed; allowed: "):
            trial.report(0.5, **{name: 12.0})
        one.tell(trial, 0.5, my_loss=12.0)
        assert (len(one.search.curves()), one.search.json()["candidates"][-1]["value"]) == (1, 0.5)
