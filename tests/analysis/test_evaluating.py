"""What judging costs, told before it is done."""

import os
import sys
import time
from unittest import mock

import pytest
import torch

from tests import searches
from tests.helpers import CPU, shipped_toy, tiny, toy
from tunediff import analysis, search_space
from tunediff import config as cfg
from tunediff.analysis import evaluating
from tunediff.config import ConfigError
from tunediff.core import progress
from tunediff.data import images as data
from tunediff.training import judging
from tunediff.workloads.diffusion import train
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.sampling import generate
from tunediff.workloads.diffusion.validation import Validation

FULL = {"evaluation.images": 5000, "evaluation.sampler": "ddpm"}
IN_ITS_PROCESS, ROUNDS = judging.before_search, judging.ROUNDS


@pytest.fixture(autouse=True)
def _in_its_process(monkeypatch):
    """Elsewhere tests measure in their own process."""
    monkeypatch.setattr(judging, "before_search", IN_ITS_PROCESS)
    monkeypatch.setattr(judging, "ROUNDS", ROUNDS)


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_the_work_of_a_diffusion_is_what_its_evaluation_asks_of_the_network(sampler):
    config = tiny(evaluation__sampler=sampler, evaluation__images=64, evaluation__validation_images=20,
                  evaluation__batch_size=32)  # fmt: skip
    seen, process = [], Diffusion(config.process)

    def predict(x, t):
        seen.append(len(x))
        return torch.zeros_like(x)

    for _ in generate(predict, process, config.evaluation, (1, 8, 8), 64, "cpu"):
        pass
    Validation(config.data, config.evaluation, data.load(config.data), CPU)(predict, process)
    parts = evaluating.work(config)
    assert parts["network"] == pytest.approx(sum(seen), rel=0.1)  # its last batch is filled up
    assert (parts["features"], parts["distance"]) == (64, 1)
    assert evaluating.work(config, {"evaluation.images": 128})["network"] > 1.4 * parts["network"]
    assert evaluating.work(config, of="evaluation_once") == {"features": 64 + 400 * 64 * 3}


def test_the_work_of_a_classifier_are_its_held_out_images():
    assert evaluating.work(cfg.baseline("digits_classifier")) == {"": 359}  # a fifth of 1,797
    gone = cfg.override(cfg.baseline("images_classifier"), {"data.path": "/nowhere"}, check=False)
    assert evaluating.work(gone) is None


def test_a_measurement_that_fails_costs_nothing_but_the_estimate(tmp_path, monkeypatch, capfd):
    """Such as one that finds no memory left on the GPU: a line, no pages."""
    monkeypatch.setattr(judging, "measured", mock.Mock(side_effect=RuntimeError("out of memory")))
    (tmp_path / "config.yaml").write_text(cfg.dump(tiny()))
    judging._main(str(tmp_path / "config.yaml"), str(tmp_path / "answer.json"), "1")
    assert (tmp_path / "answer.json").read_text() == "{}"
    said = "WARNING: what a trial costs could not be measured: RuntimeError: out of memory\n"
    assert capfd.readouterr() == ("", said)


def test_who_measures_ends_with_who_asked(monkeypatch):
    """A search that was killed leaves no process behind."""
    monkeypatch.setattr(judging.time, "sleep", lambda _: monkeypatch.setattr(judging.os, "getppid", lambda: 1))
    monkeypatch.setattr(judging.os, "_exit", mock.Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        judging._end_with(os.getppid())


def test_a_final_evaluation_takes_what_an_evaluation_of_the_search_took_times_its_work(tmp_path):
    """Each trial was evaluated for 2 s in 2 points; 1,000 images × 20 steps and 256 × 10 bins become 5,000 × 1,000."""
    wanted = searches.make(folder := tmp_path / "night")
    searches.write(folder, wanted, 0)
    found = analysis.read(folder)
    expected = 1.0 * (5_000_000 + 2560) / (20_000 + 2560)
    assert evaluating.final_s(found.trials, FULL) == pytest.approx(expected)
    assert evaluating.allowance_s(found.trials, FULL) == pytest.approx(2 * expected)
    assert evaluating.allowance_s(found.trials, {}) == 0.0
    searches.write(folder, wanted, 1, {"loader.batch_size": 32}, curve=((20.0, 4000, 2.0),))  # 2 s for one point
    assert evaluating.final_s(analysis.read(folder).trials, FULL) == pytest.approx(2 * expected)
    assert evaluating.final_s([], FULL) is None
    with mock.patch.object(evaluating, "work", return_value={"": 0.0}):  # a workload that judges nothing
        assert evaluating.final_s(found.trials, FULL) is None


def test_what_a_search_will_spend_on_judging():
    content = searches.FILE | {"confirm": {"of": 2, "seeds": 4, "final": FULL}}
    wanted = search_space.parse(content, "night.yaml")
    each = {"network": 0.001, "features": 0.002, "distance": 0.5}
    told = evaluating.cost(wanted, each)
    assert told.evaluation_s == pytest.approx(22.56 + 2.0 + 0.5)
    assert told.confirming_final_s == pytest.approx(5002.56 + 10.0 + 0.5)
    parts = told.parts(slots=2)
    assert parts["training"] == 8 * 20 / 2
    assert parts["evaluation"] == pytest.approx(8 * 4 * 25.06 / 2)
    assert parts["confirmation"] == pytest.approx(12 * (20 + 4 * 25.06 + 5013.06 + evaluating.RUN_S))
    once_s = 0.002 * (1797 + 400 * 64 * 3)
    assert parts["start_up"] == pytest.approx(evaluating.START_S + 4 * evaluating.RUN_S + once_s)
    assert parts["wall_clock"] == pytest.approx(sum(parts.values()) / 2)
    assert evaluating.cost(wanted, each, prepared=True).once_s == 0
    limited = search_space.parse(content | {"budget": {**content["budget"], "total": "2m"}}, "night.yaml")
    short = evaluating.cost(limited, each).parts(slots=1)
    assert short["wall_clock"] == pytest.approx(120), "the limit bounds confirming runs too"
    unknown = evaluating.cost(wanted, None)
    assert (unknown.evaluation_s, unknown.confirming_final_s, unknown.judging_s) == (None, None, 0.0)
    assert evaluating.cost(wanted, None, evaluation_s=3.0).judging_s == 12.0, "as one of a user's own was timed"


def test_where_judging_takes_longer_than_training_the_knobs_that_save_most_are_named():
    """100 s a trial at 1 ms: 1,000 × 20 steps + 256 × 10 are 22.56 s a time. Half the points save half of it."""
    wanted = search_space.parse(searches.FILE, "night.yaml")
    each = {"network": 0.001, "features": 0.0, "distance": 0.0}
    first, *knobs = evaluating.advice(evaluating.cost(wanted, each), each)
    assert first == "evaluation takes 4.5 times as long as training"
    assert knobs == [
        "  evaluation.points=1: 23s instead of 1m30s per trial",
        "  evaluation.steps=5: 30s instead of 1m30s per trial",
        "  evaluation.images=250: 30s instead of 1m30s per trial",
    ]
    fast = {"network": 0.0001, "features": 0.0, "distance": 0.0}
    assert evaluating.advice(evaluating.cost(wanted, fast), fast) == []


def test_the_rate_of_a_network_is_measured(monkeypatch):
    monkeypatch.setattr(judging, "LONG_ENOUGH_S", 0.15)
    with shipped_toy():
        config = toy()
        assert judging.pass_s(config, CPU) is None
        assert evaluating.work(config) is None
        slow = mock.Mock(side_effect=lambda count: time.sleep(0.002 * count))
        with mock.patch.object(cfg.of(config).declared, "evaluation_pass", return_value=slow, create=True):
            assert judging.pass_s(config, CPU) == {"": pytest.approx(0.002, rel=0.3)}
        assert max(count for (count,), _ in slow.call_args_list) == 64
    passes = mock.Mock(side_effect=lambda count: time.sleep(0.05))
    assert judging.rate_s(passes, 64, CPU, enough_s=0.004) == pytest.approx(0.05, rel=0.3)
    assert passes.call_count == 2, "whoever waits is not kept waiting for larger batches"
    overhead = mock.Mock(side_effect=lambda count: time.sleep(0.1))
    assert judging.rate_s(overhead, 64, CPU, enough_s=0.05) == pytest.approx(0.1 / 64, rel=0.3), "a batch costs no more"
    small, large = judging.pass_s(tiny(), CPU), judging.pass_s(tiny(model__channels=64, model__blocks=3), CPU)
    assert small["network"] < large["network"]
    assert small.keys() == evaluating.work(tiny()).keys()


class _Load:
    """Other processes that use so much of the cores in each round."""

    def __init__(self, monkeypatch, *shares):
        self.rounds, shares = 0, iter(shares)
        monkeypatch.setattr(judging.hardware.Usage, "now", lambda: mock.Mock())
        monkeypatch.setattr(judging.hardware, "disturbance", lambda *_: {"other_load_share": next(shares)})
        monkeypatch.setattr(judging.time, "sleep", lambda _: None)

    def pass_s(self, each_s):
        def measured(config, world):
            self.rounds += 1
            return {"": each_s[self.rounds - 1]}

        return measured


def test_passes_are_timed_again_until_the_cores_are_free(monkeypatch):
    """Beside two others a pass takes 50 times as long; the least counts, and whose load it was measured under."""
    load = _Load(monkeypatch, 0.9, 0.7, 0.05)
    monkeypatch.setattr(judging, "pass_s", load.pass_s([0.5, 0.3, 0.01]))
    assert judging.pass_s_and_load(tiny(), CPU) == ({"": 0.01}, 0.05)
    assert load.rounds == 3


def test_passes_are_timed_once_on_a_quiet_machine(monkeypatch):
    load = _Load(monkeypatch, 0.0)
    monkeypatch.setattr(judging, "pass_s", load.pass_s([0.01]))
    assert judging.pass_s_and_load(tiny(), CPU) == ({"": 0.01}, 0.0)


def test_a_load_that_stays_is_told(monkeypatch):
    load = _Load(monkeypatch, *[0.9] * judging.ROUNDS)
    monkeypatch.setattr(judging, "pass_s", load.pass_s([0.5, 0.4, 0.3, 0.6, 0.6, 0.6]))
    found = judging.measured(tiny(), CPU, evaluates=True, prepare=False)
    assert (found["pass_s"], found["other_load_share"], found["disturbed"]) == ({"": 0.3}, 0.9, True)
    assert load.rounds == judging.ROUNDS


def test_a_pass_of_many_seconds_is_timed_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(judging.time, "perf_counter", lambda: now[0])
    slow = mock.Mock(side_effect=lambda count: now.__setitem__(0, now[0] + 20.0 * count))
    assert judging.rate_s(slow, 64, CPU) == 20.0
    assert slow.call_count == 1


def test_timing_passes_ends_after_a_limit(monkeypatch, tmp_path, capfd):
    """What is known without them is used: the data, the parameters."""
    script = "import sys, time; open(sys.argv[1], 'w').write('{\"data\": [\"4 images\"]}'); time.sleep(600)"

    def hangs(command, **options):
        return popen([sys.executable, "-c", script, command[4]], **options)

    popen = judging.subprocess.Popen
    monkeypatch.setattr(judging.subprocess, "Popen", hangs)
    monkeypatch.setattr(judging, "PROBE_S", 0.2)
    found = judging.before_search(tiny(), evaluates=True, prepare=False)
    assert found == {"data": ["4 images"], "too_long": True}
    assert "WARNING: one evaluation could not be timed" in capfd.readouterr().err


def test_what_judging_needs_once_is_prepared_before_the_search(tmp_path, monkeypatch):
    """Decoded images, classifier, reference: the first trial finds them in the cache folder."""
    monkeypatch.setenv("TUNEDIFF_CACHE", str(tmp_path))
    for function in (data._load, train.evaluator_of):
        function.cache_clear()
    heard = []
    with progress.subscribe(lambda work: heard.append(work.what)):
        found = judging.measured(tiny(), CPU, evaluates=True, prepare=True)
    assert {"training the classifier that judges", "features of real images (classifier)"} <= set(heard)
    assert sorted({path.name.partition("-")[0] for path in tmp_path.glob("*z")}) == ["reference"]
    assert found["data"] == ["data: 64 images at 8×8 (digits)"]
    assert found["parameters"] > 0
    for function in (data._load, train.evaluator_of):
        function.cache_clear()


def test_data_that_cannot_be_used_are_refused_before_the_search(capfd):
    gone = cfg.override(cfg.baseline("images"), {"data.path": "/nowhere"}, check=False)
    with pytest.raises(ConfigError, match="^data.path: '/nowhere' is not allowed: there is no such file"):
        judging.before_search(gone, evaluates=True)
    assert capfd.readouterr() == ("", "")
