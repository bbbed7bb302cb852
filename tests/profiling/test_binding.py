"""What binds a step, its share of the measured peak and the knob to try, by parts computed by hand."""

import pytest

from tests.helpers import CPU, tiny, train
from tunediff.core.point import Point
from tunediff.profiling.binding import KNOBS, StepParts, binding, first_possible, of_point
from tunediff.profiling.trace import busy_s

PEAK = 100e12


CASES = {
    # 100 ms, of which 40 ms of computing and 2 of waiting: 58 for the host; 1 TFLOP of 10 possible
    "host": (StepParts(0.1, 0.002, 1e12, PEAK, 0.04), "host", 0.58, 0.1),
    "loader": (StepParts(0.1, 0.03, 1e12, PEAK, 0.065), "loader", 0.3, 0.1),
    "a loader, and a little of the host": (StepParts(0.1, 0.06, 1e12, PEAK, 0.03), "loader", 0.6, 0.1),
    "arithmetic": (StepParts(0.1, 0.0, 4e12, PEAK, 0.095), "arithmetic", 0.95, 0.4),
    "below what products reach": (StepParts(0.1, 0.0, 1e12, PEAK, 0.095), "memory", 0.95, 0.1),
    "a CPU": (StepParts(0.1, 0.02, 5e12, PEAK), "loader", 0.2, 0.5),
    "nothing measured": (StepParts(0.1), "device", 1.0, None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_binds_a_step_and_its_share_of_the_peak(name):
    parts, part, share, peak_share = CASES[name]
    bound = binding(parts)
    assert (bound.part, bound.share) == (part, pytest.approx(share))
    assert bound.peak_share == (None if peak_share is None else pytest.approx(peak_share))


def test_the_sentence_names_share_and_a_knob_that_the_configuration_allows():
    point = Point(index=1, train_s=1.0, samples=160, steps=10, step_s=0.1, samples_per_s=160.0,
        phases_s={"data_wait": 0.001, "host_to_device": 0.001, "forward": 0.05},
        flops_per_sample=1e12 / 16, peak_flops_per_s=100e12)  # fmt: skip
    config = tiny(optimizer__implementation="fused")
    assert of_point(point, config, "cuda", 0.04) == (
        "the step is bound by the host: the device waits for it 58 % of the time, at 10 % of the measured peak;"
        " try compile.capture=step"
    )
    assert of_point(point, config, "cuda", 0.09) == (
        "the step is bound by memory traffic and small operations, at 10 % of the measured peak;"
        " try memory.channels_last=True"
    )
    captured = tiny(optimizer__implementation="fused", compile__capture="step")
    assert "capture" not in of_point(point, captured, "cuda", 0.04)
    assert first_possible(KNOBS["host"], config, "cpu") is None, "on a CPU nothing is captured"
    assert first_possible(KNOBS["loader"], tiny(loader__resident=True), "cuda", {"loader.workers"}) is None


def test_what_a_step_asks_of_a_cpu_makes_a_sentence():
    """On a GPU the search writes it after its baseline, and the doctor says it."""
    config = tiny()
    assert (busy := busy_s(config, CPU)) is None, "only a GPU is busy by itself"
    point = train(config, samples=160, evaluates=False).points[-1]
    assert of_point(point, config, "cpu", busy).startswith("the step is bound by ")
