"""Rules that pause trials and choose which goes on, without Ray."""

import math

import pytest

from benchmarks.replay.strategies import BestOfGroup
from tests.helpers import point
from tests.tuning.test_experiment import loaded
from tunediff.core.trial_record import End, TrialRecord
from tunediff.tuning.allocation import Decision, Promotion, is_baseline, loss

SPACE = loaded()


def trial(number, *values, status=None, paused=None, **drawn):
    """A trial with a value of the objective at each of its points; it is paused after its first one."""
    points = [point(i, 2.0 * i, **{SPACE.metric: value}) for i, value in enumerate(values, 1)]
    paused = len(values) == 1 and status is None if paused is None else paused
    end = End(status) if status else None
    drawn = drawn or {"loader.batch_size": 64, "seed": number}
    return TrialRecord(f"t{number:04d}", number, {}, drawn, "", points=points, end=end, paused=paused)


BASELINE = trial(0, 1.0, 0.5, status="ok", seed=7)


def test_every_trial_pauses_at_its_first_point_only():
    rule = BestOfGroup(SPACE)
    answers = [rule.after_point(trial(1, *[1.0] * points), []) for points in (1, 2, 3)]
    assert answers == [Decision.PAUSE, Decision.GO_ON, Decision.GO_ON]


@pytest.mark.parametrize(
    ("trials", "may_draw", "chosen"),
    [
        ([], True, None),
        ([trial(1, 3.0), trial(2, 1.0)], True, None),
        ([trial(1, 3.0), trial(2, 1.0)], False, "t0002"),
        ([trial(1, 3.0), trial(2, 1.0), trial(3, 2.0)], True, "t0002"),
        ([trial(1, 3.0), trial(2, 1.0, paused=False), trial(3, 2.0)], True, None),
        ([trial(1, 3.0), trial(2, 1.0, 0.9, paused=False), trial(3, 2.0)], True, None),
        ([trial(1, 3.0), trial(2, 1.0, 0.9, status="ok"), trial(3, 2.0)], False, None),
        ([trial(1, 3.0), trial(2, 1.0, status="error"), trial(3, 2.0)], True, "t0003"),
        ([trial(1, 3.0), trial(2, status="oom"), trial(3, math.nan)], True, "t0001"),
        ([trial(1, status="oom"), trial(2, status="oom"), trial(3, status="oom"), trial(4, 1.0)], False, None),
        ([trial(i, float(i)) for i in (6, 5, 4, 3)] + [trial(2, 2.0, 1.0, status="ok"), trial(1, 1.0)], True, "t0004"),
    ],
    ids=[
        "none", "a part of a group", "all are fewer than a group", "the best of a group", "one still runs",
        "the best goes on", "one of a group is enough", "a failed one is replaced", "failures and NaN are not chosen",
        "those left over continue none", "groups by number",
    ],
)  # fmt: skip
def test_the_best_of_every_group_continues(trials, may_draw, chosen):
    assert BestOfGroup(SPACE, size=3).next_trial([BASELINE, *trials], may_draw) == chosen


def test_the_baseline_is_of_no_group():
    assert is_baseline(SPACE, BASELINE.drawn)
    repeated = [trial(number, 1.0, 0.5, status="ok", seed=number) for number in (1, 2)]
    trials = [BASELINE, *repeated, *(trial(number, float(number)) for number in (3, 4, 5))]
    assert BestOfGroup(SPACE, size=3).next_trial(trials, True) == "t0003"


def test_loss_is_smaller_for_the_better_trial():
    accuracy = loaded(workload="digits_classifier")
    assert (SPACE.mode, accuracy.mode) == ("min", "max")
    better, worse = trial(1, 0.5), trial(2, 0.6)
    assert loss(SPACE, better) < loss(SPACE, worse) < loss(SPACE, trial(3, math.inf)) == loss(SPACE, trial(4))
    named = [TrialRecord("t", 1, {}, {}, "", points=[point(1, 1.0, accuracy=value)]) for value in (0.9, 0.8)]
    assert loss(accuracy, named[0]) < loss(accuracy, named[1])


def test_promotion_pauses_at_its_rungs():
    rule = Promotion(SPACE)
    answers = [rule.after_point(trial(1, *[1.0] * points), []) for points in (1, 2, 3)]
    assert answers == [Decision.PAUSE, Decision.PAUSE, Decision.GO_ON]


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([trial(1, 3.0)], None),
        ([trial(1, 0.9)], "t0001"),
        ([trial(1, 3.0), trial(2, 0.9), trial(3, 2.0), trial(4, 0.8)], "t0004"),
        ([trial(1, 0.9), trial(2, 0.8, paused=False), trial(3, 2.0), trial(4, 0.7, status="nan")], None),
        ([trial(1, 0.9), trial(2, 0.8, 0.4, paused=True), trial(3, 2.0), trial(4, 0.6)], "t0002"),
        ([trial(1, 0.9), trial(2, 0.8, 0.7, paused=True), trial(3, 2.0), trial(4, math.nan)], "t0001"),
    ],
    ids=["worse than the baseline", "better", "the best first", "running and failed ones", "the highest rung", "a lower rung"],
)  # fmt: skip
def test_promotion_continues_the_better_half_of_a_rung(trials, chosen):
    assert Promotion(SPACE).next_trial([BASELINE, *trials], True) == chosen
    assert Promotion(SPACE).next_trial([BASELINE, *trials], False) == chosen
