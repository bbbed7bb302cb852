"""Forecasts for longer budgets: laws that are known are found again, intervals hold what they say, noise is no trend."""

import math
from pathlib import Path

import numpy as np
import pytest

from tunediff.results.forecast import Law, Runs, common, crossing, forecast, trend

FRACTIONS = np.array([0.25, 0.5, 0.75, 1.0])
KEPT = Path(__file__).parents[2] / "ray_results" / "reference" / "forecast-cpu"


def power_law(end, exponent, budget_s=20.0, fractions=FRACTIONS, noise=0.0, rng=None):
    """y = end · fraction^(−exponent), times noise."""
    factor = np.exp(noise * rng.normal(size=len(fractions))) if noise else 1.0
    return list(zip(budget_s * fractions, end * fractions**-exponent * factor, strict=True))


def shared_by(*curves, **more):
    return common([Runs((curve,), **more) for curve in curves], ratios=True)


def test_a_power_law_goes_on_as_the_law_of_slopes_says():
    """Two curves of exponents 0.4 and 0.6: the common one is 0.5, of which `later` stays, and `own` of what is one's
    own."""
    low, high = power_law(3.0, 0.4), power_law(5.0, 0.6)
    shared = shared_by(low, high)
    assert shared.slope == pytest.approx(-0.5)
    assert shared.noise == pytest.approx(0.0, abs=1e-9)
    told = trend(Runs((low,)), shared, Law(later=0.8, own=0.5, spread=0.0)).at(80.0)
    assert told.mean == pytest.approx(3.0 * 4 ** -(0.8 * 0.5 - 0.5 * 0.1))
    assert told.low < told.mean < told.high  # the common slope is that of two configurations only
    assert trend(Runs((low,)), shared, Law(1.0, 1.0, 0.0)).at(80.0).mean == pytest.approx(3.0 * 4**-0.4)


def test_intervals_hold_what_they_promise():
    """Configurations whose slopes scatter by a quarter, each with a seed or three, noise of 5 %: 80 % lie within."""
    rng, law, inside = np.random.default_rng(0), Law(later=1.0, own=0.0, spread=0.25), []
    for _ in range(250):
        seeds, runs = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        known = []
        for _ in range(6):
            curves = [power_law(3.0, 0.5, noise=0.05, rng=rng) for _ in range(seeds)]
            known.append(Runs(tuple(curves)))
        truth = 3.0 * 4 ** -(0.5 * (1 + 0.25 * rng.normal()))
        measured = truth * math.exp(np.mean(0.05 * rng.normal(size=runs)))
        inside.append(trend(known[0], common(known, ratios=True), law).at(80.0, runs).holds(measured))
    assert 0.74 < np.mean(inside) < 0.86


def width(curves, budget_s=80.0, **more):
    told, why = forecast(curves, budget_s, **more)
    assert why == ""
    return math.log(told.high / told.low)


def test_intervals_widen_with_the_budget_and_where_less_is_known():
    rng = np.random.default_rng(1)
    curves = [power_law(3.0, 0.5, noise=0.05, rng=rng) for _ in range(3)]
    widths = [width(curves, seconds) for seconds in (20.0, 40.0, 80.0, 320.0)]
    assert widths == sorted(widths)
    assert widths[-1] > 1.5 * widths[0] > 0
    assert width(curves[:1]) > width(curves)
    assert width(curves) > width(curves, runs=3)
    assert width([curves[0][1:]]) > width([curves[0]])  # three points instead of four
    others = [Runs((power_law(4.0, 0.5, noise=0.05, rng=rng),)) for _ in range(6)]
    assert width(curves[:1]) > width(curves[:1], others=others)


@pytest.mark.parametrize(
    ("curves", "why"),
    [
        ([], "none of its runs ended"),
        ([[(10.0, 3.0), (20.0, 2.0)]], "its curve has 2 points after the first quarter, and needs 3"),
        ([[(1.0, 9.0), (2.0, 8.0), (10.0, math.nan), (20.0, 2.0)]], "its curve has 1 points after the first quarter"),
        ([[(5.0, 3.0), (10.0, 0.0), (15.0, 2.0), (20.0, 1.0)]], "a value that is not positive has no logarithm"),
    ],
)
def test_where_little_is_known_nothing_is_forecast(curves, why):
    told, said = forecast(curves, 80.0)
    assert told is None
    assert said.startswith(why)


def test_units_do_not_matter():
    """Seconds or samples, an FD or ten times it, an accuracy or percents of errors: the same forecast."""
    rng = np.random.default_rng(2)
    curve = power_law(3.0, 0.5, noise=0.05, rng=rng)
    told, _ = forecast([curve], 80.0)
    scaled, _ = forecast([[(1000 * t, 10 * y) for t, y in curve]], 80_000.0)
    assert (scaled.mean, scaled.low, scaled.high) == pytest.approx((10 * told.mean, 10 * told.low, 10 * told.high))
    rising = [(t, 0.5 + 0.1 * math.log(t) + 0.01 * rng.normal()) for t in (5.0, 10.0, 15.0, 20.0)]
    up, _ = forecast([rising], 80.0, ratios=False)
    down, _ = forecast([[(t, 100 * (1 - y)) for t, y in rising]], 80.0, ratios=False)
    assert up.mean > rising[-1][1]
    assert (down.mean, down.low, down.high) == pytest.approx(tuple(100 * (1 - y) for y in (up.mean, up.high, up.low)))


def test_the_slope_of_a_falling_learning_rate_is_not_a_trend():
    """A curve that drops at its end because the learning rate does; the others fall evenly."""
    annealed = [(5.0, 6.0), (10.0, 5.0), (15.0, 3.0), (20.0, 2.0)]
    steady = [Runs((power_law(3.0, exponent),)) for exponent in (0.3, 0.4, 0.5)]
    shared = common([Runs((annealed,), anneals=True), *steady], ratios=True)
    assert shared.slope == pytest.approx(-0.4)
    assert trend(Runs((annealed,), anneals=True), shared).slope == trend(steady[1], shared).slope
    alone = common([Runs((annealed,), anneals=True)], ratios=True)
    assert alone.slope < -0.5  # there is no other


def test_curves_cross_where_their_forecasts_are_equal():
    shared = shared_by(power_law(3.0, 0.4), power_law(3.0, 0.5), power_law(3.0, 0.6))
    law = Law(later=1.0, own=1.0, spread=0.0)
    slow, fast, far = (trend(Runs((power_law(end, by),)), shared, law) for end, by in ((2, 0.4), (2.5, 0.6), (9, 0.6)))
    found = crossing(slow, fast)
    assert found.budget_s == pytest.approx(20.0 * (2.5 / 2) ** (1 / 0.2))
    assert slow.at(found.budget_s).mean == pytest.approx(fast.at(found.budget_s).mean)
    assert crossing(fast, slow) == found
    assert crossing(slow, far) is None  # beyond 16 budgets
    assert crossing(fast, far) is None  # parallel
    assert crossing(slow, slow) is None
    assert not found.overlap
    rng = np.random.default_rng(3)
    near, by = power_law(2.0, 0.4, noise=0.1, rng=rng), power_law(2.1, 0.6, noise=0.1, rng=rng)
    pair = [trend(Runs((curve,)), shared_by(near, by), Law(1.0, 1.0, 0.3)) for curve in (near, by)]
    assert crossing(*pair).overlap
