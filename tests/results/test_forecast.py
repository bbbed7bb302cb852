"""Forecasts for longer budgets: laws that are known are found again, intervals hold what they say, noise is no trend."""

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from tunediff.results.forecast import LEAST, Runs, Scale, common, crossing, forecast, trend

LOG = Scale("logarithm")
FRACTIONS = np.array([0.25, 0.5, 0.75, 1.0])
ROOT = Path(__file__).parents[2]


def power_law(end, exponent, budget_s=20.0, fractions=FRACTIONS, noise=0.0, rng=None):
    """y = end · fraction^(−exponent), times noise."""
    factor = np.exp(noise * rng.normal(size=len(fractions))) if noise else 1.0
    return list(zip(budget_s * fractions, end * fractions**-exponent * factor, strict=True))


def shared_by(*curves, **more):
    return common([Runs((curve,), **more) for curve in curves], LOG)


def test_a_power_law_goes_on_with_the_common_slope():
    """Exponents 0.25 and 0.75: the common one is 0.5, whose standard deviation is that of two."""
    low, high = power_law(3.0, 0.25), power_law(5.0, 0.75)
    shared = shared_by(low, high)
    assert (shared.slope, shared.scatter) == pytest.approx((-0.5, math.sqrt(0.125)))
    assert shared.noise == pytest.approx(0.0, abs=1e-9)
    told = trend(Runs((low,)), shared).at(80.0)
    assert told.mean == pytest.approx(3.0 * 4**-0.5)
    half = 3.0777 * math.log(4) * math.sqrt(0.125 * 1.5)  # Student's t with one degree of freedom: tan(0.4 π)
    assert math.log(told.high / told.mean) == pytest.approx(half, rel=1e-4)
    alone, _ = forecast([low], 80.0)
    assert alone.mean == pytest.approx(3.0 * 4**-0.25)
    alike = shared_by(*[power_law(3.0, 0.5)] * 5)
    assert alike.scatter == pytest.approx(LEAST * 0.5)  # common slopes change as well


def test_intervals_hold_what_they_promise():
    """Six configurations whose slopes scatter, with one run or three each, and noise of 5 %: 80 % lie within, whatever
    is drawn."""
    rng, inside = np.random.default_rng(0), []
    for _ in range(600):
        seeds, runs = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        known = []
        for exponent in rng.normal(0.6, 0.3, size=6):
            known.append(Runs(tuple(power_law(3.0, exponent, noise=0.05, rng=rng) for _ in range(seeds))))
        shared = common(known, LOG)
        truth = 3.0 * 4 ** -rng.normal(0.6, 0.3) * math.exp(np.mean(0.05 * rng.normal(size=runs)))
        inside.append(trend(known[0], shared).at(80.0, runs).holds(truth))
    assert 0.77 < np.mean(inside) < 0.87  # a little more than 0.8: slopes scatter by the noise of their points as well


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
    dense = power_law(3.0, 0.5, fractions=np.arange(1, 17) / 16, noise=0.05, rng=rng)
    assert width([dense[::-4][::-1]]) > width([dense])  # three points instead of nine
    others = [Runs((power_law(4.0, 0.5, noise=0.05, rng=rng),)) for _ in range(6)]
    assert width(curves[:1]) > width(curves[:1], others=others)


@pytest.mark.parametrize(
    ("curves", "why"),
    [
        ([], "none of its runs ended"),
        ([[(10.0, 3.0), (20.0, 2.0)]], "its curve has 2 points in its second half, and needs 3"),
        ([[(1.0, 9.0), (2.0, 8.0), (10.0, math.nan), (20.0, 2.0)]], "its curve has 1 point in its second half"),
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
    rising = [(t, 7 + 2 * math.log(t) + 0.1 * rng.normal()) for t in (5.0, 10.0, 15.0, 20.0)]
    up, _ = forecast([rising], 80.0, ratios=False, falls=False)
    down, _ = forecast([[(t, -100 * y) for t, y in rising]], 80.0, ratios=False)
    assert up.mean > rising[-1][1]
    assert (down.mean, down.low, down.high) == pytest.approx(tuple(-100 * y for y in (up.mean, up.high, up.low)))


def test_an_accuracy_never_passes_one():
    """Its errors fall as a distance does; a perfect score counts as half of the smallest error seen."""
    errors = power_law(0.05, 0.5)
    told, _ = forecast([[(t, 1 - y) for t, y in errors]], 80.0, ratios=False, falls=False)
    same, _ = forecast([errors], 80.0)
    assert (told.mean, told.low, told.high) == pytest.approx((1 - same.mean, 1 - same.high, 1 - same.low))
    done, _ = forecast([[(5.0, 0.9), (10.0, 0.96), (15.0, 0.98), (20.0, 1.0)]], 320.0, ratios=False, falls=False)
    assert 0 <= done.low < 0.98 < done.mean < done.high < 1


def test_the_slope_of_a_falling_learning_rate_is_not_a_trend():
    """A curve that drops at its end because the learning rate does; the others fall evenly."""
    annealed = [(5.0, 6.0), (10.0, 5.0), (15.0, 3.0), (20.0, 2.0)]
    steady = [Runs((power_law(3.0, exponent),)) for exponent in (0.3, 0.4, 0.5)]
    shared = common([Runs((annealed,), anneals=True), *steady], LOG)
    assert shared.slope == pytest.approx(-0.4)
    assert shared.configurations == 3
    assert trend(Runs((annealed,), anneals=True), shared).at(80.0).mean == pytest.approx(2.0 * 4**-0.4)
    alone = common([Runs((annealed,), anneals=True)], LOG)
    assert alone.slope < -0.5  # there is no other


def test_curves_cross_where_their_forecasts_are_equal():
    """Each by its own slope: of curves that share one, none passes another."""
    slow, fast, far = (
        trend(Runs((power_law(end, by),)), shared_by(power_law(end, by)))
        for end, by in ((2, 0.4), (2.5, 0.6), (9, 0.6))
    )
    found = crossing(slow, fast)
    assert found.budget_s == pytest.approx(20.0 * (2.5 / 2) ** (1 / 0.2))
    assert slow.at(found.budget_s).mean == pytest.approx(fast.at(found.budget_s).mean)
    assert 20.0 < found.open_s < found.budget_s
    assert crossing(fast, slow) == found
    assert crossing(slow, far).budget_s is None  # beyond 16 budgets
    assert crossing(slow, far, farthest=1.05) is None
    assert crossing(fast, far).budget_s is None  # parallel


def test_an_order_is_open_from_where_the_difference_may_be_nothing():
    """By its interval, drawn: 80 % of the differences of two runs at that budget lie on one side of 0 and beyond it."""
    rng = np.random.default_rng(3)
    runs = [Runs((power_law(3.0, by, noise=0.01, rng=rng),)) for by in np.linspace(0.3, 0.7, 40)]
    shared = common(runs, LOG)
    one = trend(Runs((power_law(2.0, 0.5),)), shared)
    other = trend(Runs((power_law(2.5, 0.5),)), shared)
    at = crossing(one, other).open_s
    x, noise = math.log(at / 20.0), shared.noise * math.sqrt(2)
    drawn = [one.value + rng.normal(0, noise, 20000) + x * rng.normal(shared.slope, shared.scatter, 20000) for one in
             (one, other)]  # fmt: skip
    assert np.mean(drawn[0] > drawn[1]) == pytest.approx(0.1, abs=0.015)
    assert crossing(one, trend(Runs((power_law(2.01, 0.5),)), shared)).open_s == pytest.approx(20.0)


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("forecasts", ROOT / "benchmarks" / "forecast.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["forecasts"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_forecasts_held_on_measured_trainings(benchmark):
    """Three workloads, each with four times its budget: 80 % were promised; and no easier guess would have done."""
    tables = benchmark.read(sorted((ROOT / "ray_results" / "reference" / "forecast-cpu").glob("*.csv")))
    assert set(tables) == {"digits", "cifar10", "digits_classifier"}
    for name, table in tables.items():
        found = benchmark.cases(table, 1, 4)
        assert len(found) >= 12
        assert np.mean([case.holds() for case in found]) >= 0.75, name
        ours = benchmark.error(found, lambda case: case.told()[0])
        for other in (lambda case: case.so_far, benchmark.own_slope, benchmark.offset_power_law):
            assert ours < 0.75 * benchmark.error(found, other), name
    assert "| cifar10 " in benchmark.report(tables)
