"""What binds a step, its share of the measured peak and the knob to try, by parts computed by hand."""

import pytest
import torch

from tests.helpers import CPU, tiny, train
from tunediff.core.point import Point
from tunediff.profiling.binding import KNOBS, DeviceUse, StepParts, binding, first_possible, of_point
from tunediff.profiling.trace import device_use
from tunediff.profiling.traffic import TrafficCounter, step_bytes

PEAK = 100e12


def busy(busy_s, moved_bytes=None):
    """Of a device that copies 1 TB/s."""
    return DeviceUse(busy_s, moved_bytes, 1e12)


CASES = {
    # 100 ms, of which 40 ms of computing and 2 of waiting: 58 for the host; 1 TFLOP of 10 possible
    "host": (StepParts(0.1, 0.002, 1e12, PEAK, busy(0.04)), "host", 0.58, 0.1),
    "loader": (StepParts(0.1, 0.03, 1e12, PEAK, busy(0.065)), "loader", 0.3, 0.1),
    "a loader, and a little of the host": (StepParts(0.1, 0.06, 1e12, PEAK, busy(0.03)), "loader", 0.6, 0.1),
    "arithmetic": (StepParts(0.1, 0.0, 4e12, PEAK, busy(0.095)), "arithmetic", 0.95, 0.4),
    "below what products reach": (StepParts(0.1, 0.0, 1e12, PEAK, busy(0.095)), "memory", 0.95, 0.1),
    "traffic": (StepParts(0.1, 0.0, 4e12, PEAK, busy(0.095, 0.06e12)), "memory", 0.95, 0.6),
    "traffic from caches": (StepParts(0.1, 0.0, 4e12, PEAK, busy(0.095, 0.2e12)), "memory", 0.95, 1.0),
    "little of both, but more arithmetic": (StepParts(0.1, 0.0, 2e12, PEAK, busy(0.095, 0.01e12)), "arithmetic", 0.95, 0.2),
    "a CPU": (StepParts(0.1, 0.02, 5e12, PEAK), "loader", 0.2, 0.5),
    "traffic of a CPU, whose arithmetic is unknown": (StepParts(0.1, use=busy(None, 0.05e12)), "memory", 1.0, 0.5),
    "nothing measured": (StepParts(0.1), "device", 1.0, None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_binds_a_step_and_its_share_of_the_peak(name):
    parts, part, share, peak_share = CASES[name]
    bound = binding(parts)
    assert (bound.part, bound.share) == (part, pytest.approx(share))
    assert bound.peak_share == (None if peak_share is None else pytest.approx(peak_share))
    assert bound.of == ("bandwidth" if name.startswith("traffic") else "peak")


def test_the_sentence_names_share_and_a_knob_that_the_configuration_allows():
    point = Point(index=1, train_s=1.0, samples=160, steps=10, step_s=0.1, samples_per_s=160.0,
        phases_s={"data_wait": 0.001, "host_to_device": 0.001, "forward": 0.05},
        flops_per_sample=1e12 / 16, peak_flops_per_s=100e12)  # fmt: skip
    config = tiny(optimizer__implementation="fused")
    assert of_point(point, config, "cuda", busy(0.04)) == (
        "the step is bound by the host: the device waits for it 58 % of the time, at 10 % of the measured peak;"
        " try compile.capture=step"
    )
    assert of_point(point, config, "cuda", busy(0.09, 0.05e12)) == (
        "the step is bound by memory traffic, at 50 % of the measured bandwidth; try memory.channels_last=True"
    )
    captured = tiny(optimizer__implementation="fused", compile__capture="step")
    assert "capture" not in of_point(point, captured, "cuda", busy(0.04))
    assert first_possible(KNOBS["host"], config, "cpu") is None, "on a CPU nothing is captured"
    assert first_possible(KNOBS["loader"], tiny(loader__resident=True), "cuda", {"loader.workers"}) is None


def moved(call):
    with TrafficCounter() as counter:
        call()
    return counter.moved_bytes


def test_traffic_of_operators_is_what_they_read_and_write():
    a, b, out = torch.ones(10, 100), torch.ones(10, 100), torch.empty(10, 100)
    assert moved(lambda: a + b) == 12_000, "two read, one written, of 1,000 numbers of 4 bytes"
    assert moved(lambda: a.add_(b)) == 12_000
    assert moved(lambda: out.copy_(a)) == 8_000
    assert moved(lambda: out.zero_()) == 4_000
    assert moved(lambda: torch.empty_like(a).view(-1)[:50].t()) == 0, "nothing is moved"
    assert moved(lambda: a + b[:1].expand(10, 100)) == 4_000 + 4_000 + 4_000, "all of its storage is counted, once"
    assert moved(lambda: a * a) == 8_000, "read once"
    assert moved(lambda: torch.mm(a, b.t())) == 8_000 + 400
    assert moved(lambda: torch.cat([a, b])) == 16_000


def test_traffic_of_a_step_is_that_of_all_its_passes():
    once, twice = (step_bytes(tiny(loader__accumulation=passes), CPU) for passes in (1, 2))
    assert 0 < once < twice < 2 * once, "the optimizer's part comes once"
    assert step_bytes(tiny(compile__mode="default"), CPU) is None
    assert step_bytes(tiny(compile__capture="step"), CPU) == once


def test_what_a_step_asks_of_a_cpu_makes_a_sentence():
    """On a GPU the search writes it after its baseline, and the doctor says it."""
    config, use = tiny(), device_use(tiny(), CPU)
    assert use.busy_s is None, "only a GPU is busy by itself"
    assert use.copy_bytes_per_s > 0
    assert use.moved_bytes > 16 * 64 * 4, "a batch at least"
    point = train(config, samples=160, evaluates=False).points[-1]
    assert of_point(point, config, "cpu", use).startswith("the step is bound by ")
