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


def test_the_programs_own_seconds_count_and_differences_are_said():
    clock = CommandClock(0.0, seconds_line=re.compile(r"train_time:(\d+)ms"))
    clock.read("step 1 train_time:4000ms", 5.0)
    assert (clock.elapsed_s(9.0), clock.kind) == (4.0, TRAINING)
    assert clock.disagreement == pytest.approx(-0.2)
    assert not clock.reached(4.1, 8.0)
    assert clock.reached(4.0, 8.0)
    assert clock.reached(4.1, 8.2), "a program that prints no seconds any more ends by the judge's"
    clock.read("step 2 train_time:9900ms", 10.0)
    assert clock.disagreement is None
