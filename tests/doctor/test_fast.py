"""Part B: what is measured is said, and what is slower than it should be is weak."""

import pytest

from tests.helpers import CPU
from tunediff.doctor import fast, trainings
from tunediff.doctor.finding import Site
from tunediff.training import hardware, judging


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(fast, "alone", lambda: CPU)
    return Site(tmp_path, "cpu")


def rung(rate, share=0.6):
    return {"images_per_s": rate, "peak_share": share}


def test_a_peak_that_is_another_one_twice_is_weak(site, monkeypatch):
    monkeypatch.setattr(hardware, "peak_flops_per_s", lambda *of: 2e12)
    found = fast.peak(site)
    assert (found.state, found.found) == ("ok", "float32 2, bf16 2 TFLOP/s")
    looks = iter([1e12, 2e12, 3e12, 3e12])
    monkeypatch.setattr(hardware, "peak_flops_per_s", lambda *of: next(looks))
    found = fast.peak(site)
    assert found.state == "weak"
    assert "not the same twice: float32" in found.found


@pytest.mark.parametrize(
    ("rungs", "gpu", "state", "words"),
    [
        (
            {"float32": rung(100.0, 0.2), "bf16": rung(250.0)},
            True,
            "ok",
            "250 images/s up to bf16, 2.5 × float32, 60% of",
        ),
        ({"float32": rung(100.0, 0.2), "bf16": rung(250.0, 0.4)}, True, "weak", "tunediff.profile says why"),
        ({"float32": rung(100.0, 0.2), "bf16": rung(250.0, 0.4)}, False, "ok", "2.5 × float32"),
        ({"float32": rung(100.0), "bf16": rung(90.0)}, False, "weak", "nothing beats plain float32"),
        ({"float32": {"oom": 1.0}, "bf16": {"oom": 1.0}}, True, "missing", "out of memory"),
    ],
)
def test_the_ladder_in_words(rungs, gpu, state, words):
    answer = fast.climbed({128: rungs}, gpu)
    assert answer.state == state
    assert words in f"{answer.found} {answer.means}"


@pytest.mark.slow
def test_the_ladder_is_climbed_and_a_rung_without_memory_is_noted(site, monkeypatch):
    """Really trained on the first rung; on the second memory runs out, on the third something else breaks."""
    monkeypatch.setattr(hardware, "peak_flops_per_s", lambda *of: 1e12)
    short, tried = fast.short, []

    def limited(config, world, steps):
        tried.append((config.precision.amp, config.memory.channels_last))
        if config.memory.channels_last:
            raise RuntimeError(broken)
        return short(config, world, 8)

    monkeypatch.setattr(fast, "short", limited)
    broken = "CUDA out of memory"
    with trainings.one_thread():
        found = fast.climb(fast.network(site), 8, fast.CPU_RUNGS, CPU)
    assert tried == [("none", False), ("bf16", False), ("bf16", True)]
    assert found["memory.channels_last=True"] == {"oom": 1.0}
    assert found["float32"]["images_per_s"] > 0
    assert 0 < found["float32"]["peak_share"] < 1
    broken = "illegal memory access"
    with pytest.raises(RuntimeError, match="illegal"):
        fast.climb(fast.network(site), 8, (3,), CPU)


def test_the_full_network_is_that_of_the_flagship(site):
    assert fast.network(Site(site.storage, "cuda")).knobs.model.channels == 128


def test_an_evaluation_that_takes_long_is_weak(site, monkeypatch):
    config = fast.network(site)
    images, steps = config.evaluation.images, config.evaluation.steps
    for each, state in ((1.0 / images / steps, "ok"), (100.0 / images / steps, "weak")):
        monkeypatch.setattr(
            judging, "pass_s", lambda config, world, s=each: {"network": s, "features": 0.0, "distance": 0.0}
        )
        assert fast.evaluation(site).state == state
    monkeypatch.setattr(judging, "pass_s", lambda config, world: None)
    assert fast.evaluation(site).state == "missing"
