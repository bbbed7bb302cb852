"""Searches and studies from Python, without a cluster: results, errors, and what a call leaves of the process."""

import contextlib
import errno
import inspect
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import optuna
import pytest
from matplotlib.figure import Figure

import tunediff
from tests import searches
from tests.helpers import shipped_toy
from tunediff import cli, search
from tunediff import config as cfg
from tunediff.analysis import journals
from tunediff.api import calls, run, search_setup
from tunediff.api.options import SearchOptions
from tunediff.config import ConfigError
from tunediff.core import lock
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.core.progress import EventLines
from tunediff.ray_backend import connection
from tunediff.tuning.optuna_proposer import OptunaProposer
from tunediff.tuning.templates import Templates


@pytest.fixture
def night(tmp_path):
    """A finished search: the baseline, one that is better, one that is worse."""
    space = searches.make(tmp_path / "night", searches.FILE | {"budget": {"per_trial": "20s", "trials": 3}})
    for number, (point, end) in enumerate(
        (({}, 2.0), ({"precision.amp": "bf16"}, 0.8), ({"loader.batch_size": 256}, 3.0))
    ):
        curve = (5.0, 1000, 4 * end), (10.0, 2000, 2 * end), (20.0, 4000, end)
        searches.write(tmp_path / "night", space, number, point, curve)
    return tunediff.open_search("night", tmp_path)


def test_every_public_name_is_found_and_in_the_documentation():
    text = (calls.Path(__file__).parents[2] / "docs" / "how-to" / "python.md").read_text()
    for name in tunediff.__all__:
        assert getattr(tunediff, name) is not None
    for name in [name for names in tunediff._LAZY.values() for name in names if name != "Trial"]:
        assert name in text, name


def test_json_of_a_search_is_what_the_command_prints(night, capsys):
    assert search.main(["--resume", "night", "--storage", str(night.folder.parent), "--json"]) == cli.OK
    assert json.loads(capsys.readouterr().out) == night.json()


def test_results_of_a_search_are_tables_figures_and_typed_values(night, tmp_path):
    assert night.trials()["optimizer.lr"].tolist() == [1e-3] * 3
    assert night.trials()["frechet"].tolist() == [2.0, 0.8, 3.0]
    assert len(night.curves()) == 9
    assert (night.best.trial, night.best.value) == ("t0001", 0.8)
    assert night.best.configuration == {"precision.amp": "bf16"}
    assert (night.verdict.leader.values, night.verdict.best) == ([0.8], night.json()["best"])
    assert isinstance(night.figure(), Figure)
    assert night.report().read_text().startswith("<!doctype html>")
    exported = night.best.export(tmp_path / "best.yaml")
    assert "amp: bf16" in exported.read_text()


def test_every_figure_of_the_report_is_a_matplotlib_figure(night):
    with pytest.raises(tunediff.TunediffError, match="figure: 'effects' is not allowed; allowed: ") as error:
        night.figure("effects")  # of too few trials, which would draw single runs as means
    names = str(error.value).rpartition("allowed: ")[2].split(", ")
    assert {"curves", "trade_offs"} <= set(names)
    assert all(isinstance(night.figure(name), Figure) for name in names)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tunediff.run_search("nowhere.yaml"), "nowhere.yaml: no such search file; shipped:"),
        (lambda: tunediff.run_search("digits", {"optimizer.lr": "fast"}), "^optimizer.lr: 'fast' is not allowed"),
        (lambda: tunediff.run_search("digits", trials=0), "^trials: 0 is not allowed"),
        (lambda: tunediff.run_search("digits", trials="x"), "trials: 'x' is not allowed; allowed: a whole number"),
        (lambda: tunediff.open_search("gone"), "gone: no such search in"),
        (lambda: tunediff.run_comparison("digits", "digits"), "digits: A and B are identical, on the same seeds"),
        (lambda: tunediff.run_training("digits"), "run_training: needs budget or samples"),
        (lambda: tunediff.run_profile("digits", steps=1), "^steps: 1 is not allowed"),
        (lambda: tunediff.load_model("gone"), "gone: no training, search or exported file"),
    ],
)
def test_mistakes_raise_the_message_of_the_command(tmp_path, capsys, call, message, at_tmp_path):
    with pytest.raises(tunediff.TunediffError, match=message):
        call()
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_says_how_to_go_on_and_leaves_the_process_as_it_was(tmp_path, instead_of_trials, capsys):
    def interrupted(*_):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as Ray Tune takes it
        raise KeyboardInterrupt

    instead_of_trials(interrupted)
    handler, environment = signal.getsignal(signal.SIGINT), dict(os.environ)
    with pytest.raises(KeyboardInterrupt, match=r"everything measured is in .*night\nresume: tunediff search"):
        tunediff.run_search("digits", name="night", storage=tmp_path, cpus=1, progress=False)
    assert signal.getsignal(signal.SIGINT) is handler
    assert dict(os.environ) == environment
    assert capsys.readouterr() == ("", "")


def test_sigterm_ends_a_call_before_ray_starts():
    """It would end the process and leave running what it has started to measure."""
    with pytest.raises(KeyboardInterrupt), calls.called(cluster=True):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    thread = threading.Thread(target=lambda: calls.called(cluster=True).__enter__())  # it alone may handle signals
    thread.start()
    thread.join()


def test_options_are_a_command_again():
    options = SearchOptions(words=["digits", "seed=3"], name="a b", trials=3, budget=90, check=False, confirm=0)
    command = options.command_line("search", SearchOptions)
    assert shlex.split(command)[2:4] == ["digits", "seed=3"]
    assert vars(search.arguments(shlex.split(command)[2:])).items() >= vars(options).items()


def test_values_from_python_are_words_as_on_a_command_line():
    values = {
        "loader.batch_size": np.int64(64),
        "ema.half_life": np.float32(0.5),
        "model.multipliers": np.array([1, 2]),
    }
    settings = calls.words(("optimizer.lr=1e-3", values, {"optimizer.decay": "cosine"}))
    assert settings == [
        "optimizer.lr=1e-3", "loader.batch_size=64", "ema.half_life=0.5", "model.multipliers=[1, 2]",
        "optimizer.decay=cosine",
    ]  # fmt: skip
    config = cfg.with_words(cfg.baseline("digits"), settings)
    assert (config.optimizer.lr, config.loader.batch_size, config.model.multipliers) == (1e-3, 64, (1, 2))
    assert cfg.with_words(cfg.baseline("digits"), calls.words(({"optimizer.lr": "1e-3"},))).optimizer.lr == 1e-3


def test_numbers_of_numpy_are_numbers():
    options = SearchOptions(trials=np.int64(4), seed=np.int64(3), budget=np.int64(5), total="2m")
    assert (options.trials, options.seed, options.budget, options.total) == (4, 3, 5.0, 120.0)
    assert type(options.trials) is int


def test_keywords_are_those_of_the_options():
    names = inspect.signature(tunediff.run_search).parameters
    assert {"trials", "budget", "check", "progress"} < set(names)
    assert not {"resume", "dry_run", "json"} & set(names)
    assert "trials: trials in all, the baseline included" in tunediff.run_search.__doc__
    with pytest.raises(tunediff.ConfigError, match="trails: no such option"):
        tunediff.run_search("digits", trails=3)


def test_a_search_that_a_process_runs_is_running_until_that_ends(night):
    assert not night.running
    with lock.exclusive_lock(night.folder):
        assert night.running
    assert not night.running
    (night.folder / lock.LOCK).write_text(f"{lock.socket.gethostname()} {os.getpid()} 5.0")  # it was killed
    assert not night.running


def test_a_search_on_a_cluster_is_the_command_in_a_process_of_its_own(tmp_path, monkeypatch):
    started = []

    def popen(command, **how):
        started.append(command)
        return real([sys.executable, "-c", "import sys; print('error: no', file=sys.stderr); sys.exit(2)"], **how)

    real = subprocess.Popen
    for name, value in (
        ("tunediff.api.search.subprocess.Popen", popen),
        ("tunediff.core.machine.check", lambda options: None),  # there is no such cluster
    ):
        monkeypatch.setattr(name, value)
    with pytest.raises(tunediff.TunediffError, match="night ended with exit code 2: error: no"):
        tunediff.run_search("digits", budget=3, name="night", storage=tmp_path, address="a:1")
    assert started[-1][1:4] == ["-m", "tunediff", "search"]
    assert search.arguments(started[-1][4:]) == search.SearchCommandOptions(
        words=["digits"], name="night", storage=tmp_path, budget=3, address="a:1"
    )


def test_a_finished_search_leaves_its_report_and_opens_it_on_request(night, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or len(opened) > 1)
    words = ["--resume", "night", "--storage", str(night.folder.parent), "--open"]
    assert search.main(words) == cli.OK
    page = night.folder / "report.html"
    out, err = capsys.readouterr()
    assert page.is_file()
    assert f"\nreport: {page}\n" in out
    assert err.endswith(f"--open: there is no browser; the report is {page}\n")
    assert search.main(words) == cli.OK
    assert "--open" not in capsys.readouterr().err
    assert opened == [page.as_uri()] * 2


# ------------------------------------------------------------ ray starts while a new search measures what a trial costs
def test_ray_starts_while_a_trial_is_measured_and_ends_with_a_refusal(tmp_path, monkeypatch):
    events, ray_runs = list[str](), threading.Event()

    @contextlib.contextmanager
    def started(address):
        events.append("Ray starts")
        ray_runs.set()
        try:
            yield None
        finally:
            events.append("Ray ends")

    def measure(*_):
        assert ray_runs.wait(60)  # it does not wait for this
        raise ConfigError("data.path: no images")

    monkeypatch.setattr(connection, "started", started)
    monkeypatch.setattr(search_setup, "measure", measure)
    monkeypatch.setattr(Templates, "prepare", lambda *_: None)
    options = SearchOptions(words=["digits"], storage=tmp_path, name="x")
    with pytest.raises(ConfigError, match="no images"):
        run.search(search_setup.prepare(options), options, EventLines())
    assert events == ["Ray starts", "Ray ends"]
    assert not (tmp_path / "x").exists()


# ----------------------------------------------------------------------------- a search by a call from Python, with Ray
SCRIPT = """
import signal, types
from dataclasses import dataclass
from typing import Annotated
import ray, torch, tunediff

@dataclass(frozen=True)
class Knobs:
    width: Annotated[int, tunediff.Choice(4, 8, 16)] = 8
    lr: Annotated[float, tunediff.Range(1e-3, 1e-1, log=True)] = 0.01

def train(trial):
    net = trial.prepare(torch.nn.Linear(4, trial.knobs.width))
    optimizer = torch.optim.SGD(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer)
    trial.evaluate_with(lambda: {"score": trial.knobs.width + trial.knobs.lr})
    for (x,) in trial.batches((torch.ones(64, 4),)):
        trial.step(net(x).square().mean(), optimizer)

workload = types.SimpleNamespace(Knobs=Knobs, OBJECTIVE=tunediff.Metric("score", "min"), train=train)
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
fixed = {"loader.batch_size": 8, "loader.workers": 0, "precision.amp": "none"}
search = tunediff.run_search(workload, fixed, name="called", trials=3, budget=1, confirm=0, seed=7, check=False)
assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
assert not ray.is_initialized()
"""


@pytest.mark.cluster
@pytest.mark.nightly  # `tests/tuning/test_search.py` resumes by a call from Python
def test_a_call_leaves_the_process_as_it_was(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    search = tunediff.open_search("called", tmp_path / "ray_results")
    assert search.json()["search"]["statuses"]["ok"] == 3
    drawn = [tuple(row) for row in search.trials()[["trial", "width", "lr"]].to_numpy().tolist()]
    assert drawn[0] == ("t0000", 8, 0.01)
    assert len(set(drawn)) == 3


# ---------------------------------- trials that the caller runs: what is proposed, what is written, and what is refused
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


def told_all(study, value):
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
        trials = told_all(one, value)
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
            "no mean of evaluations 5 % of the time apart met error<=1",
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
