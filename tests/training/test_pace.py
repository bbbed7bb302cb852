"""How much of the budget is spent, and when the clock is read."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import CPU
from tunediff.core.clock import Budget, Clock
from tunediff.distributed import World
from tunediff.training.pace import Pace


def paced(budget, now, reads=None, world=CPU):
    """A pace on a clock moved by hand, `now[0]` seconds; `reads[0]` counts how often the device is waited for."""

    def synchronize():
        if reads is not None:
            reads[0] += 1

    clock = Clock(budget, synchronize, lambda: now[0])
    return clock, Pace(budget, clock, world)


@pytest.mark.parametrize(("device", "readings"), [("cpu", 130), ("cuda", 26)])
def test_few_steps_are_counted_without_waiting_for_a_gpu_at_each(device, readings):
    """120 steps of 30 ms in 4 points: half a second between two readings, and one at every stop."""
    now, reads = [0.0], [0]
    clock, pace = paced(Budget(steps=120), now, reads, World(0, 1, torch.device(device)))
    with clock.part("train"):
        for stop in (0.25, 0.5, 0.75, 1.0):
            pace.aim(stop)
            while not pace.reached:
                now[0] += 0.03
                pace.step(8)
            assert pace.steps == 120 * stop
    assert reads[0] == pytest.approx(readings, rel=0.1)


def test_between_two_readings_progress_is_extrapolated():
    now = [0.0]
    clock, pace = paced(Budget(seconds=100.0), now)
    with clock.part("train"):
        pace.aim(0.5)
        while pace.steps < 20 or not pace.checked:
            now[0] += 0.1
            pace.step(8)
        now[0] += 0.1
        pace.step(8)
        assert pace.progress == pytest.approx(now[0] / 100, abs=1e-9)
        assert not pace.reached


def test_images_are_counted_and_not_extrapolated():
    now = [0.0]
    clock, pace = paced(Budget(samples=100), now)
    with clock.part("train"):
        pace.aim(1.0)
        for done in range(1, 10):
            now[0] += 1e-4
            pace.step(10)
            assert pace.progress == pace.schedule == pytest.approx(done / 10)
    assert not pace.reached
    pace.step(10)
    assert pace.reached


@pytest.mark.parametrize(("charged", "start"), [(True, 0.4), (False, 0.0)])
def test_the_schedule_leaves_out_charged_compile_seconds(charged, start):
    """They shorten the training; they must not skip its warm-up."""
    now = [0.0]
    clock, pace = paced(Budget(seconds=10.0, compile_charged=charged), now)
    with clock.part("compile"):
        now[0] += 4.0
    seen = []
    with clock.part("train"):
        for stop in (0.7, 1.0):  # the second segment begins where the first ended, not anew
            pace.aim(stop)
            while not pace.reached:
                seen.append(pace.schedule)
                now[0] += 0.5
                pace.step(8)
    steps = round((1 - start) / 0.05)
    assert seen == pytest.approx([k / steps for k in range(steps)])
    assert (pace.schedule, pace.progress, pace.train_s) == (1.0, pytest.approx(1.0), pytest.approx(10.0))


@pytest.mark.parametrize(("charged", "start"), [(True, 0.4), (False, 0.0)])
def test_after_a_restore_progress_is_where_it_was(charged, start):
    """From the first moment on, and not only from the next reading of the clock."""
    now = [0.0]
    clock, pace = paced(Budget(seconds=10.0, compile_charged=charged), now)
    with clock.part("compile"):
        now[0] += 4.0
    with clock.part("train"):
        pace.aim(0.85)
        while not pace.reached:
            now[0] += 0.5
            pace.step(8)
    other, again = paced(Budget(seconds=10.0, compile_charged=charged), [0.0])
    other.load_state_dict(clock.state_dict())
    again.load_state_dict(pace.state_dict())
    assert again.position() == pace.position()
    assert (again.progress, again.schedule) == pytest.approx((0.85, (0.85 - start) / (1 - start)))
    again.aim(1.0)
    assert (again.progress, again.train_s) == pytest.approx((pace.progress, pace.train_s))


def test_capture_leaves_the_schedule_where_it_is_until_compiling_has_used_up_the_budget():
    now = [0.0]
    clock, pace = paced(Budget(seconds=10.0), now)
    with clock.part("train"):
        now[0] += 2.0
        with pace.left_out_of_schedule(), clock.part("compile"):
            now[0] += 4.0
        assert (pace.schedule, pace.progress) == pytest.approx((0.2, 0.6))
        with clock.part("compile"):
            now[0] += 6.0
        pace.aim(0.5)
    assert (pace.schedule, pace.reached) == (1.0, True)


def test_rates_are_those_between_readings():
    now = [0.0]
    clock, pace = paced(Budget(seconds=10.0), now)
    with clock.part("train"):
        pace.aim(1.0)
        for seconds in (1.0, 2.0, 1.0):
            now[0] += seconds
            pace.step(8)
    assert pace.rates == [8.0, 4.0, 8.0]
    assert pace.position() == {"train_s": 4.0, "samples": 24, "steps": 3}


# ----------------------------------------------------------------------------------------- steps of any length, two paces
class Ranks(World):
    """Several ranks, of which this is the first: what it says holds for all."""

    def agree(self, value):
        return value


SPEEDS = st.lists(st.tuples(st.integers(1, 300), st.sampled_from([0.002, 0.01, 0.05, 0.3])), min_size=1, max_size=8)
"""How many steps take how many seconds; the last of them go on."""


def stops_of(world, speeds, budget_s=10.0):
    """Train to four points; yields the step's seconds where each stop was reached, the clock, and readings so far."""
    now, reads = [0.0], [0]
    clock, pace = paced(Budget(seconds=budget_s), now, reads, world)
    lengths = itertools.chain.from_iterable(itertools.repeat(seconds, count) for count, seconds in speeds)
    lengths = itertools.chain(lengths, itertools.repeat(speeds[-1][1]))
    with clock.part("train"):
        for stop in (0.25, 0.5, 0.75, 1.0):
            pace.aim(stop)
            step_s = 0.0
            while not pace.reached:
                step_s, before = next(lengths), pace.progress
                now[0] += step_s
                pace.step(8)
                assert before <= pace.progress <= stop or pace.checked, "it goes back, or beyond the stop, at a reading"
            yield stop * budget_s, step_s, clock.train_s, reads[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(speeds=SPEEDS)
def test_pace_stops_within_a_step_of_every_point_and_reads_the_clock_rarely(device, speeds):
    """Fast steps before slow ones, at any time: what a loader has ready is trained at once."""
    for stop_s, step_s, train_s, reads in stops_of(World(0, 1, torch.device(device)), speeds):
        assert stop_s - 1e-6 <= train_s <= stop_s + step_s + 1e-6
        assert reads < 500


@settings(max_examples=25, deadline=None, derandomize=True)
@given(fast_s=st.sampled_from([0.002, 0.005, 0.02]), slowdown=st.sampled_from([2, 10, 20]), at_s=st.floats(0.3, 9.9))
def test_pace_of_several_ranks_passes_no_stop_by_more_than_two_percent(fast_s, slowdown, at_s):
    """Ranks read their clocks at planned steps; steps that slow down at any time pass a stop by little."""
    speeds = [(max(1, round(at_s / fast_s)), fast_s), (1, slowdown * fast_s)]
    for stop_s, _, train_s, reads in stops_of(Ranks(0, 2, torch.device("cpu")), speeds):
        assert stop_s - 1e-6 <= train_s <= stop_s + max(0.02 * 10.0, slowdown * fast_s) + 1e-6
        assert reads < 500
