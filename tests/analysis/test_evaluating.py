"""What judging costs, told before it is done."""

import pickle
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import pytest

from tests import searches
from tests.helpers import CPU, tiny
from tests.users import plain
from tunediff import config as cfg
from tunediff import search_space
from tunediff.analysis import evaluating
from tunediff.api import search_setup
from tunediff.api.options import SearchOptions
from tunediff.config import ConfigError
from tunediff.core import progress
from tunediff.core.trial_record import NotFiniteError
from tunediff.data import images as data
from tunediff.evaluation import judge
from tunediff.inspector import probe, rehearsal
from tunediff.training import number_formats
from tunediff.tuning import experiment
from tunediff.workloads.diffusion.knobs import evaluation_protocol

FULL = {"evaluation.images": 5000, "evaluation.sampler": "ddpm"}
pytestmark = pytest.mark.usefixtures("timed")


def test_a_measurement_that_fails_costs_nothing_but_the_estimate(tmp_path, monkeypatch, capfd):
    """Such as one that finds no memory left on the GPU: a line, no pages."""
    monkeypatch.setattr(rehearsal, "measured", mock.Mock(side_effect=RuntimeError("out of memory")))
    connection = mock.Mock()
    rehearsal.answer(connection, (pickle.dumps(tiny()), True, {}))
    connection.send.assert_called_once_with({})
    said = "WARNING: what a trial costs could not be measured: RuntimeError: out of memory\n"
    assert capfd.readouterr() == ("", said)


@pytest.mark.nightly  # trains the classifier that judges
def test_what_judging_needs_once_is_prepared_before_the_search(tmp_path, monkeypatch):
    """Decoded images, classifier, reference: the first trial finds them in the cache folder."""
    monkeypatch.setenv("TUNEDIFF_CACHE", str(tmp_path))
    data.load_source.cache_clear()
    heard = []
    with progress.subscribe(lambda work: heard.append(work.what)):
        found = rehearsal.measured(tiny(), CPU, evaluates=True)
    assert {"training the classifier that judges", "features of real images (classifier)"} <= set(heard)
    assert sorted({path.name.partition("-")[0] for path in tmp_path.glob("*z")}) == ["reference"]
    assert found["data"] == ["data: 64 images at 8×8 (digits)"]
    assert found["parameters"] > 0
    assert found["evaluation_s"] > 0
    data.load_source.cache_clear()


def test_data_that_cannot_be_used_are_refused_before_the_search(capfd):
    gone = cfg.override(cfg.baseline("images"), {"data.path": "/nowhere"}, check=False)
    with pytest.raises(ConfigError, match="^data.path: '/nowhere' is not allowed: there is no such file"):
        probe.before_search(gone, evaluates=True)
    assert capfd.readouterr() == ("", "")


def test_cost_of_a_search_follows_from_one_evaluation():
    content = searches.FILE | {"confirm": {"of": 2, "seeds": 4, "final": FULL}}
    wanted = search_space.parse(content, "night.yaml")
    cost = evaluating.Cost.of(wanted, {"evaluation_s": 25.06, "confirming_final_s": 5013.06})
    assert (cost.evaluation_s, cost.final_s, cost.confirming_final_s) == (25.06, 0.0, 5013.06)
    parts = cost.parts(slots=2)
    assert parts["training"] == 8 * 20 / 2
    assert parts["evaluation"] == pytest.approx(8 * 4 * 25.06 / 2)
    assert parts["confirmation"] == pytest.approx(12 * (20 + 4 * 25.06 + 5013.06 + evaluating.RUN_S))
    assert parts["start_up"] == pytest.approx(evaluating.START_S + 4 * evaluating.RUN_S)
    assert parts["wall_clock"] == pytest.approx(sum(parts.values()) / 2)
    for total, expected_s in (("10m", 600), ("2m", evaluating.START_S + cost.trial_s)):  # one trial runs in any case
        limited = search_space.parse(content | {"budget": {**content["budget"], "total": total}}, "night.yaml")
        short = evaluating.Cost.of(limited, {"evaluation_s": 25.06}).parts(slots=1)
        assert short["wall_clock"] == pytest.approx(expected_s), "the limit bounds confirming runs too"
    unknown = evaluating.Cost.of(wanted, {})
    assert (unknown.evaluation_s, unknown.confirming_final_s, unknown.judging_s) == (None, None, 0.0)


def test_plan_with_more_slots_than_trials_takes_as_long_as_one_trial():
    cost = evaluating.Cost.of(search_space.parse(searches.FILE, "night.yaml"), {"evaluation_s": 2.0})
    assert cost.parts(slots=16) == cost.parts(slots=8)
    assert cost.parts(slots=8)["wall_clock"] == pytest.approx(evaluating.START_S + cost.trial_s)
    assert cost.parts(slots=3)["training"] == 3 * 20, "8 trials"


def test_long_evaluation_is_timed_by_its_progress(clock):
    """5 s before it tells how far it is, then 10 s for each of 100 parts: it ends early, after the first part."""
    parts = []

    def evaluate():
        clock.s += 5.0
        with progress.Progress("sampling", 100) as work:
            for part in range(100):
                clock.s += 10.0
                parts.append(part)
                work.step()

    assert rehearsal.seconds_of(evaluate) == 5.0 + 100 * 10.0
    assert len(parts) == 1


def test_evaluation_of_diverging_model_is_timed(clock):
    def evaluate():
        clock.s += 2.0
        raise NotFiniteError("frechet is nan")

    assert rehearsal.seconds_of(evaluate) == 2.0


def test_every_protocol_is_timed_once(monkeypatch):
    timed = []

    def evaluation_s(config, *_):
        timed.append(config.evaluation.images)
        return float(len(timed))

    monkeypatch.setattr(rehearsal, "evaluation_s", evaluation_s)
    finals = {"confirming_final_s": {"evaluation.images": 128}}
    found = rehearsal.measured(tiny(evaluation__images=64), CPU, True, finals)
    assert timed == [64, 128]
    assert (found["evaluation_s"], found["confirming_final_s"]) == (1.0, 2.0)


def test_the_format_of_evaluations_is_chosen_before_a_search_and_is_that_of_all_its_runs(tmp_path, monkeypatch):
    """The lines of a GPU on a CPU: a network of a few steps is judged in two formats."""
    found = {"evaluation_format": {"precision": "bf16", "seconds": {"fp32": 1.0}, "shifts": {"fp32": 0.0}}}
    for owner, name, replaced in (
        (number_formats, "formats", lambda device: ("bf16", "fp32")),
        (rehearsal, "FIRST_STEPS", 2),
        (judge, "SHARE", 1e9),
    ):
        monkeypatch.setattr(owner, name, replaced)
    config = cfg.override(tiny(), {"evaluation.extractor": "random"})
    finals = {"final_s": {"evaluation.images": 24}}
    measured = rehearsal.measured(config, CPU, True, finals)
    choice = measured["evaluation_format"]
    assert choice["precision"] == min(choice["seconds"], key=choice["seconds"].__getitem__)
    assert {*choice["shifts"]} == {"bf16", "fp32"}
    assert measured["evaluation_s"] > 0 < measured["final_s"]

    space, said = search_space.parse(searches.FILE, "night.yaml"), []
    request = search_setup.SearchRequest(tmp_path / "night", space, searches.FILE)
    known = Future()
    known.set_result(found)
    search_setup.create(request, SearchOptions(words=[]), said.append, known)
    again = experiment.reopen(tmp_path / "night").baseline
    assert again.evaluation.precision == "bf16"
    assert "in bfloat16" in evaluation_protocol(again)
    assert said[-1] in (tmp_path / "night" / "baseline.yaml").read_text()
    assert number_formats.pinned(space.baseline, None).evaluation.precision == "fp32"


def test_timing_ends_after_a_limit(monkeypatch, tmp_path, capfd):
    """What is known without it is used: the data, the parameters."""
    text = (Path(plain.__file__)).read_text()
    (tmp_path / "hangs.py").write_text(text.replace("judge(net))\n", "__import__('time').sleep(600))\n"))
    monkeypatch.setattr(probe, "PROBE_S", 0.2)
    found = probe.before_search(cfg.baseline(str(tmp_path / "hangs.py")), evaluates=True, prepare=False)
    assert found == {"data": []}
    assert "WARNING: one evaluation could not be timed" in capfd.readouterr().err


@pytest.mark.parametrize(("workers", "expected_s"), [(1, 12.0), (3, 4.0)])
def test_workers_divide_an_evaluation_among_them(monkeypatch, workers, expected_s):
    """It is timed in one process."""
    monkeypatch.setattr(rehearsal, "seconds_of", lambda *_: 12.0)
    session = mock.Mock(config=mock.Mock(parallel=mock.Mock(processes=workers)))
    program = rehearsal.Rehearse()
    assert program.begin(session) is False
    assert program.seconds == expected_s
