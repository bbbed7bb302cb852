"""Part B: what is measured is said, and what is slower than it should be is weak."""

import pytest
import torch

from tests.helpers import CPU
from tunediff.doctor import fast, trainings
from tunediff.doctor.finding import Site
from tunediff.profiling.trace import Idle
from tunediff.training import hardware, judging


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(fast, "alone", lambda: CPU)
    return Site(tmp_path, "cpu")


def rung(rate, share=0.6):
    return {"images_per_s": rate, "peak_share": share}


def test_a_peak_that_is_another_one_twice_is_weak(site, monkeypatch):
    """bf16 is told as it is, also where it is slower than float32; a second look may be slower than the first."""
    rates = {torch.float32: 2e12, torch.bfloat16: 1e12}
    monkeypatch.setattr(hardware, "fastest_product", lambda device, dtype: rates[dtype])
    found = fast.peak(site)
    assert (found.state, found.found) == ("ok", "float32 2, bf16 1 TFLOP/s")
    looks = iter([2e12, 3e12, 1e12, 3e12])
    monkeypatch.setattr(hardware, "fastest_product", lambda *of: next(looks))
    found = fast.peak(site)
    assert found.state == "weak"
    assert "not the same twice: float32" in found.found
    assert found.numbers == {"float32_tflops": [2.0, 1.0], "bf16_tflops": [3.0, 3.0]}
    matmul = []
    monkeypatch.setattr(
        hardware, "fastest_product", lambda *of: matmul.append(torch.get_float32_matmul_precision()) or 1e12
    )
    fast.peak(Site(site.storage, "cuda"))
    assert matmul == ["highest", "high", "highest"] * 2
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("rungs", "gpu", "state", "words"),
    [
        ({"float32": rung(100.0, 0.2), "bf16": rung(250.0)}, True, "ok", "float32 100 (20%), bf16 250 (60%)"),
        ({"float32": rung(100.0, 0.2), "bf16": rung(250.0)}, True, "ok", "up to 2.5 times as fast as float32"),
        ({"float32": rung(100.0, 0.2), "bf16": rung(250.0, 0.4)}, True, "weak", "tunediff.profile says why"),
        ({"float32": rung(100.0, 0.2), "bf16": rung(250.0, 0.4)}, False, "ok", "2.5 times"),
        ({"float32": rung(100.0), "bf16": rung(90.0)}, False, "weak", "nothing beats plain float32"),
        ({"float32": {"oom": 1.0}, "bf16": rung(250.0)}, True, "missing", "float32 out of memory, bf16 250"),
        ({"float32": {"oom": 1.0}, "bf16": {"oom": 1.0}}, True, "missing", "not even the smallest"),
        ({"float32": rung(100.0)}, True, "weak", "bf16 not measured, for want of time"),
        ({"float32": rung(100.0), "bf16": {"failed": 1.0}}, True, "wrong", "float32 100 (60%), bf16 failed"),
    ],
)
def test_the_ladder_in_words(rungs, gpu, state, words):
    answer = fast.climbed({128: rungs}, ("float32", "bf16"), gpu)
    assert answer.state == state
    assert words in f"{answer.found} {answer.means}"


def test_the_first_rung_is_ieee_float32_and_the_others_come_on_top():
    """Stock PyTorch computes convolutions in TF32."""
    config, formats = fast.network("cuda"), []
    assert config.knobs.model.channels == 128
    assert config.precision.conv_tf32
    for one in fast.RUNGS.values():
        config = fast.cfg.override(config, one)
        tf32 = config.precision.conv_tf32, config.precision.matmul == "high"
        own = config.precision.amp, config.memory.channels_last, config.knobs.model.norm, config.compile.mode
        formats.append((*tf32, *own))
    assert formats == [
        (False, False, "none", False, "torch", "none"), (True, True, "none", False, "torch", "none"),
        (True, True, "bf16", False, "torch", "none"), (True, True, "bf16", True, "torch", "none"),
        (True, True, "bf16", True, "triton", "none"), (True, True, "bf16", True, "triton", "default"),
        (True, True, "bf16", True, "triton", "max-autotune"),
    ]  # fmt: skip


def test_what_compiles_for_minutes_is_measured_once_before_it_is_again():
    assert fast.in_turn(("float32", "compiled", "max-autotune"), (128, 256, 512)) == [
        ("float32", 128), ("float32", 256), ("float32", 512), ("compiled", 256), ("max-autotune", 256),
        ("compiled", 128), ("compiled", 512), ("max-autotune", 128), ("max-autotune", 512),
    ]  # fmt: skip
    assert fast.in_turn(("compiled",), (8,)) == [("compiled", 8)]


@pytest.mark.parametrize(
    ("gains", "device", "rungs"),
    [
        ({}, "cpu", ["float32", "channels_last"]), ({"bf16": 3.0}, "cpu", ["float32", "bf16", "channels_last"]),
        ({"fp16": 3.0}, "cuda", ["float32", "channels_last", "triton", "compiled", "max-autotune"]),
        ({"bf16": 8.0, "tf32": 4.0}, "cuda", list(fast.RUNGS)),
    ],
)  # fmt: skip
def test_rungs_that_the_device_has_units_for(site, monkeypatch, gains, device, rungs):
    climbed = []
    monkeypatch.setattr(fast.software, "gains", lambda: gains)
    monkeypatch.setattr(fast, "climb", lambda base, batches, rungs, world: climbed.extend(rungs) or {})
    fast.ladder(Site(site.storage, device))
    assert climbed == rungs


def test_a_batch_that_only_fits_in_half_the_memory_is_no_loss():
    whole = {"float32": rung(100.0), "bf16": rung(250.0)}
    assert (
        fast.climbed({128: whole, 1024: {"float32": {"oom": 1.0}, "bf16": rung(260.0)}}, tuple(whole), True).state
        == "ok"
    )


@pytest.mark.slow
def test_the_ladder_is_climbed_and_a_rung_without_memory_is_noted(site, monkeypatch, capsys):
    """Really trained on the first rung; on the second memory runs out, on the third something else breaks."""
    monkeypatch.setattr(hardware, "peak_flops_per_s", lambda *of: 1e12)
    speed, tried = fast.speed, []

    def limited(config, world):
        tried.append((config.loader.batch_size, config.precision.amp, config.memory.channels_last))
        if config.precision.amp == "bf16":
            raise RuntimeError(broken)
        return speed(config, world)

    monkeypatch.setattr(fast, "speed", limited)
    broken = "CUDA out of memory"
    with trainings.one_thread():
        found = fast.climb(fast.network("cpu"), (2, 4), ("float32", "bf16"), CPU)
    assert tried == [(2, "none", False), (4, "none", False), (2, "bf16", False), (4, "bf16", False)]
    assert found[4]["bf16"] == {"oom": 1.0}
    assert found[4]["float32"]["images_per_s"] > 0
    assert 0 < found[4]["float32"]["peak_share"] < 1
    broken = "illegal memory access"
    assert fast.climb(fast.network("cpu"), (2,), ("bf16",), CPU) == {2: {"bf16": {"failed": 1.0}}}
    assert "ladder: bf16, batch 2: RuntimeError: illegal memory access" in capsys.readouterr().err
    monkeypatch.setattr(fast, "LADDER_S", {"cpu": -1.0})
    assert fast.climb(fast.network("cpu"), (2,), ("float32",), CPU) == {2: {}}


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        (Idle(0.96, 0.04, 0.0, 0.0), "ok", "idle for 4.0% of an eager step in bf16: 4.0% waiting for the host"),
        (Idle(1.5, 0.4, 0.0, 0.1), "weak", "20.0% waiting for the host, 0.0% for another kernel, 5.0% other"),
        (Idle(1.5, 0.4, 0.0, 0.1), "weak", "larger batches"),
        (Idle(0.8, 0.05, 0.1, 0.05), "weak", "has the trace"),
        (None, "missing", "no kernel"),
    ],
)
def test_idle_time_in_words(found, state, words):
    answer = fast.waited(found)
    assert answer.state == state
    assert words in f"{answer.found} {answer.means}"


def test_a_few_steps_are_traced(site, monkeypatch):
    """Here without kernels: a CPU is not idle for want of a host."""
    monkeypatch.setattr(hardware, "peak_flops_per_s", lambda *of: 1e12)
    steps, short = [], fast.short
    monkeypatch.setattr(
        fast, "short", lambda *of, after_step: short(*of, after_step=lambda: steps.append(1) or after_step())
    )
    events = []
    monkeypatch.setattr(fast.trace, "idle", lambda found: events.extend(found))
    with trainings.one_thread():
        assert fast.traced(fast.cfg.override(fast.network("cpu"), {"loader.batch_size": 2}), CPU, steps=2) is None
    assert len(steps) == 4
    assert sum(event["name"] == "optimizer" for event in events) == 2
    assert fast.idling(site).state == "skipped"


def test_an_evaluation_that_takes_long_is_weak(site, monkeypatch):
    config = fast.network("cpu")
    images, steps = config.evaluation.images, config.evaluation.steps
    monkeypatch.setattr(judging, "rate_s", lambda run, most, world: 0.001)
    for each, state in ((1.0 / images / steps, "ok"), (100.0 / images / steps, "weak")):
        monkeypatch.setattr(
            judging, "pass_s", lambda config, world, s=each: {"network": s, "features": 0.0, "distance": 0.5}
        )
        found = fast.evaluation(site)
        assert found.state == state
        assert found.numbers["distance_s"] == 0.5
        assert f"1,000 images drawn in float32 {steps} s, bf16 {steps} s" in found.found
    monkeypatch.setattr(judging, "pass_s", lambda config, world: None)
    assert fast.evaluation(site).state == "missing"


def test_images_are_drawn_in_the_number_format_that_is_said(site, monkeypatch):
    class Product(torch.nn.Module):
        def forward(self, x, t):
            formats.append((x.flatten(1) @ x.flatten(1).T).dtype)

    formats = []
    monkeypatch.setattr(fast.unet, "network", lambda knobs: Product())
    monkeypatch.setattr(judging, "rate_s", lambda run, most, world: run(2) or 1.0)
    fast.drawn_s(fast.network("cpu"), CPU, fast.formats(site))
    assert formats == [torch.float32, torch.bfloat16]
