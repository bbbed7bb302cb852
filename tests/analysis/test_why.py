"""Speed and learning per sample add up."""

import math

import pytest

from tunediff.analysis import speed
from tunediff.core.trial_record import TrialRecord


def curve_of(points):
    return [{"train_s": s, "samples": n, "frechet": f, "index": i} for i, (s, n, f) in enumerate(points, 1)]


def why_of(baseline, winner):
    trials = [TrialRecord(f"t000{i}", i, {}, {}, "", points=curve_of(c)) for i, c in enumerate((baseline, winner))]
    return speed.why(*trials, "frechet")


def test_speed_and_learning_add_up():
    told = why_of([(5, 100, 8.0), (10, 200, 4.0)], [(5, 150, 4.0), (10, 300, 1.0)])
    assert (told.seconds, told.equal_samples, told.samples) == (10, 200, (200, 300))
    # Straight in samples, logarithmic in the distance: a third of the way from 4 to 1.
    assert told.at_samples == pytest.approx((4.0, 4.0 * (1 / 4) ** (1 / 3)))
    assert told.learning + told.throughput == pytest.approx(told.total) == pytest.approx(math.log(1 / 4))
    assert told.learning / told.total == pytest.approx(1 / 3)


def test_a_slower_winner_is_read_off_the_baselines_curve():
    told = why_of([(5, 100, 8.0), (10, 200, 2.0)], [(5, 75, 4.0), (10, 150, 1.0)])
    assert told.at_samples == pytest.approx((4.0, 1.0))
    assert told.throughput > 0 > told.learning


def test_runs_of_different_length_are_compared_where_both_are_known():
    told = why_of([(5, 100, 8.0), (10, 200, 4.0)], [(5, 100, 4.0)])
    assert (told.seconds, told.at_seconds, told.samples) == (5, pytest.approx((8.0, 4.0)), (100, 100))
    assert why_of([(5, 100, 8.0)], []) is None
    assert why_of([(5, 100, 0.0)], [(5, 100, 1.0)]) is None, "an exact zero has no logarithm"
    assert why_of([(10, 200, 4.0)], [(5, 100, 4.0)]) is None, "the baseline was not evaluated so early"
