"""How many times sooner: from noisy curves, without a bias for either."""

import math

import numpy as np
import pytest
from sklearn.isotonic import isotonic_regression

from tunediff.analysis import reach


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
