"""Which seconds of a program count."""

import re

import pytest

from tunediff.command.clock import LINE, PROCESS, TRAINING, CommandClock


def test_without_a_line_the_clock_is_that_of_the_process():
    clock = CommandClock(100.0)
    clock.read("importing torch", 105.0)
    assert (clock.elapsed_s(110.0), clock.kind, clock.start_up_s(110.0)) == (10.0, PROCESS, None)
    assert clock.reached(10.0, 110.0)
    assert not clock.reached(10.0, 109.9)
    assert clock.remaining_s(10.0, 108.0) == pytest.approx(2.0)


@pytest.mark.parametrize("line", ["TUNEDIFF start", "step 0: compiled"])
def test_the_clock_begins_at_a_line_once(line):
    clock = CommandClock(100.0, start_line=re.compile("^step 0"))
    clock.read(line, 130.0)
    clock.read(line, 140.0)
    assert (clock.elapsed_s(141.0), clock.kind, clock.start_up_s(141.0)) == (11.0, LINE, 30.0)


def test_the_clock_stands_still_between_pause_and_go():
    clock = CommandClock(0.0)
    for line, now in (
        ("TUNEDIFF pause", 3.0),
        ("TUNEDIFF start", 5.0),
        ("TUNEDIFF pause", 7.0),
        ("TUNEDIFF pause", 8.0),
    ):
        clock.read(line, now)
    assert clock.elapsed_s(50.0) == 2.0
    clock.read("TUNEDIFF go", 60.0)
    assert (clock.elapsed_s(61.0), clock.kind) == (3.0, TRAINING)


def test_the_programs_own_seconds_count():
    clock = CommandClock(0.0, seconds_line=re.compile(r"train_time:(\d+)ms"))
    clock.read("step 1 train_time:4000ms", 5.0)
    assert (clock.elapsed_s(9.0), clock.kind) == (4.0, TRAINING)
    assert not clock.reached(4.1, 8.0)
    assert clock.reached(4.0, 8.0)
    assert clock.reached(4.1, 8.2), "a program that prints no seconds any more ends by the judge's"


def resumed(**settings):
    """Return the clock of a process that was started at 100 s and goes on from second 3."""
    return CommandClock(100.0, resumed_s=3.0, **settings)


def test_a_resumed_clock_goes_on_from_its_checkpoint():
    assert resumed().elapsed_s(101.0) == 4.0
    clock = resumed(waits=True)
    assert clock.elapsed_s(130.0) == 3.0, "its start-up does not count again"
    clock.read("TUNEDIFF start", 130.0)
    assert (clock.elapsed_s(131.0), clock.start_up_s(131.0)) == (4.0, 30.0)
    assert not clock.reached(4.5, 131.0)


@pytest.mark.parametrize(("printed", "seconds"), [("1.0", 4.0), ("3.5", 3.5)])
def test_own_seconds_go_on_whether_the_program_has_saved_its_counter_or_not(printed, seconds):
    clock = resumed(seconds_line=re.compile(r"train_time:([\d.]+)s"))
    assert clock.elapsed_s(105.0) == 3.0
    clock.read(f"train_time:{printed}s", 105.0)
    assert clock.elapsed_s(105.0) == seconds
    clock.read("train_time:5.0s", 109.0)
    assert clock.elapsed_s(109.0) == seconds + 5.0 - float(printed)
