"""How much of the budget is spent, and when the clock is read."""

import pytest
import torch

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


def test_it_reads_the_clock_rarely_and_stops_on_a_reading():
    now, reads = [0.0], [0]
    clock, pace = paced(Budget(seconds=100.0), now, reads)
    with clock.part("train"):
        for stop in (0.5, 1.0):
            pace.aim(stop)
            while not pace.reached:
                now[0] += 0.01
                before = pace.progress
                pace.step(8)
                assert pace.progress >= before
    assert pace.steps == pytest.approx(10_000, abs=5)
    assert 100.0 <= clock.train_s < 100.1
    assert reads[0] < 400


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


@pytest.mark.parametrize(("device", "readings"), [("cpu", 112), ("cuda", 28)])
def test_a_short_budget_of_seconds_does_not_make_a_gpu_wait_at_every_step(device, readings):
    """8 s of steps of 72 ms, which is 1 % of them: at most half a second between two readings, and it stops on time."""
    now, reads = [0.0], [0]
    clock, pace = paced(Budget(seconds=8.0), now, reads, World(0, 1, torch.device(device)))
    with clock.part("train"):
        for stop in (0.5, 1.0):
            pace.aim(stop)
            while not pace.reached:
                now[0] += 0.072
                pace.step(8)
            assert stop * 8.0 <= clock.train_s < stop * 8.0 + 0.072
    assert reads[0] == pytest.approx(readings, rel=0.15)


def test_between_two_readings_progress_is_extrapolated_but_never_beyond_the_stop():
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
        pace._stop = pace.progress
        pace.step(8)
        assert pace.progress == pace._stop


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
    assert (pace.schedule, pace.progress, pace.train_s) == pytest.approx((1.0, 1.0, 10.0))
    assert (seen, pace.schedule) == (sorted(seen), 1.0)


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


def test_a_budget_that_compiling_used_up_is_a_schedule_at_its_end():
    now = [0.0]
    clock, pace = paced(Budget(seconds=10.0), now)
    with clock.part("compile"):
        now[0] += 12.0
    with clock.part("train"):
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


@pytest.mark.parametrize("burst", [1, 4, 128])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pace_passes_no_stop_by_more_than_one_slow_step(burst, device):
    """Fast steps before slow ones, at the start and after every point: what a loader has ready is trained at once."""
    now = [0.0]
    clock, pace = paced(Budget(seconds=60.0), now, world=World(0, 1, torch.device(device)))
    with clock.part("train"):
        for stop in (0.25, 0.5, 0.75, 1.0):
            pace.aim(stop)
            steps = 0
            while not pace.reached:
                now[0] += 0.001 if steps < burst else 0.3
                steps += 1
                pace.step(8)
            assert 60.0 * stop <= clock.train_s <= 60.0 * stop + 0.3 + 1e-9


def test_pace_notices_steps_that_slow_down_tenfold():
    now, seen = [0.0], []
    clock, pace = paced(Budget(seconds=60.0), now)
    with clock.part("train"):
        for stop in (0.25, 0.5, 0.75, 1.0):
            pace.aim(stop)
            while not pace.reached:
                now[0] += 0.02 if now[0] < 30.0 else 0.2
                pace.step(8)
                seen.append(abs(pace.progress - now[0] / 60.0))
            assert clock.train_s <= 60.0 * stop + 0.2 + 1e-9
    assert max(seen) < 0.02, "schedules follow the clock, not the rate that was"


@pytest.mark.parametrize("slow_from_s", [29.6, 29.8, 29.9, 29.97])
def test_pace_stops_within_one_step_where_steps_slow_down_just_before_the_stop(slow_from_s):
    """The steps until the stop were planned at the old speed; the seconds until the stop end the plan."""
    now = [0.0]
    clock, pace = paced(Budget(seconds=60.0), now)
    with clock.part("train"):
        pace.aim(0.5)
        while not pace.reached:
            now[0] += 0.01 if now[0] < slow_from_s else 0.06
            pace.step(8)
    assert 30.0 <= clock.train_s <= 30.0 + 0.06 + 1e-9


@pytest.mark.parametrize("burst", [1, 4, 128])
def test_pace_of_several_ranks_at_most_doubles_the_steps_between_readings(burst):
    """Each rank has its own clock, so readings are planned: after n fast steps at most n pass unread."""
    now, unread, longest = [0.0], 0, 0
    clock, pace = paced(Budget(seconds=600.0), now, world=Ranks(0, 2, torch.device("cpu")))
    with clock.part("train"):
        pace.aim(1.0)
        for step in range(burst + 300):
            now[0] += 0.001 if step < burst else 0.3
            pace.step(8)
            unread = 0 if pace.checked else unread + 1
            longest = max(longest, unread)
    assert longest <= burst


@pytest.mark.parametrize("fast_s", [0.001, 0.005, 0.02])
@pytest.mark.parametrize("slow_from_s", [14.0, 27.0, 29.5, 29.9, 29.99])
def test_pace_of_several_ranks_passes_no_stop_by_more_than_two_percent_where_steps_slow_down(fast_s, slow_from_s):
    """Tenfold and twentyfold, at any time before the stop; readings stay rare."""
    for slowdown in (10, 20):
        now, reads = [0.0], [0]
        clock, pace = paced(Budget(seconds=30.0), now, reads, Ranks(0, 2, torch.device("cpu")))
        with clock.part("train"):
            for stop in (0.5, 1.0):
                pace.aim(stop)
                while not pace.reached:
                    now[0] += fast_s if now[0] < slow_from_s else slowdown * fast_s
                    pace.step(8)
                assert clock.train_s <= 30.0 * stop + max(0.02 * 30.0, slowdown * fast_s) + 1e-6
        assert reads[0] < 250


class Ranks(World):
    """Several ranks, of which this is the first: what it says holds for all."""

    def agree(self, value):
        return value
