"""How many times sooner: from noisy curves, without a bias for either."""

import math

import numpy as np
import pytest
from sklearn.isotonic import isotonic_regression

from tunediff.analysis import reach, speed
from tunediff.core.trial_record import TrialRecord


def test_a_smooth_curve_is_the_isotonic_regression():
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = np.linspace(3, 1, 8) + rng.normal(0, 0.5, 8)
        levels = [level for _, level in reach.smooth([(float(at), value) for at, value in enumerate(values)])]
        assert levels == pytest.approx(isotonic_regression(values, increasing=False))


@pytest.mark.parametrize(
    ("target", "seconds"), [(3.0, 15.0), (4.0, 10.0), (8.0, 5.0), (9.0, 5.0), (2.0, 20.0), (1.0, None)]
)
def test_a_curve_is_as_good_when_it_crosses_the_target(target, seconds):
    curve = [(5.0, 8.0), (10.0, 4.0), (20.0, 2.0)]
    assert reach.seconds_to(curve, target) == seconds, "straight between evaluations, no claim before the first"


def test_a_point_that_is_as_good_by_luck_is_not_there_yet():
    base = [(5.0, 4.0), (10.0, 3.0), (15.0, 2.2), (20.0, 2.0)]
    lucky = [(5.0, 1.9), (10.0, 3.0), (15.0, 2.3), (20.0, 2.0)]
    assert reach.time_to_target_speedup(base, lucky) == 1.0, "and not four times as fast"
    assert reach.time_to_target_speedup(base, [(at / 2, value) for at, value in base]) == 2.0
    assert reach.time_to_target_speedup(base, base) == 1.0
    assert reach.time_to_target_speedup(base, []) is None


def noisy(rng, speed, sd, points):
    at = np.arange(1, points + 1) / points
    return list(zip(at.tolist(), (-0.3 * np.log(speed * at) + rng.normal(0, sd, points)).tolist(), strict=True))


@pytest.mark.parametrize("points", [4, 20])
@pytest.mark.parametrize("sd", [0.05, 0.2])
def test_equal_noisy_curves_are_as_fast_on_average(points, sd):
    """First crossings, where there are any, make equal curves 1.18 to 2.2 times as fast as each other."""
    rng, ratios, first = np.random.default_rng(0), [], []
    for _ in range(1500):
        base, other = (noisy(rng, 1.0, sd, points) for _ in range(2))
        ratios.append(math.log(reach.time_to_target_speedup(base, other)))
        assert ratios[-1] == pytest.approx(-math.log(reach.time_to_target_speedup(other, base)))
        if (reached := reach.seconds_to(other, base[-1][1])) is not None:
            first.append(-math.log(reached))
    error = np.std(ratios) / math.sqrt(len(ratios))
    assert abs(np.mean(ratios)) < 3 * error
    assert 1.15 < math.exp(np.mean(first)) < 2.5


# --------------------------------------------------------------------------------- speed and learning per sample add up
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
