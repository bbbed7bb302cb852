"""Forecasts of curves' ends, what continuing is worth, and the rule that asks for both; no Ray."""

import math

import numpy as np
import pytest

from tests.tuning.test_allocation import SPACE, trial
from tunediff.tuning.allocation import Decision, ForecastRule, default_rule
from tunediff.tuning.curve_model import CurveModel

POINTS = SPACE.baseline.evaluation.points
BASELINE = trial(0, 1.0, 0.7, 0.6, 0.5, status="ok", seed=7)


def curves(known, moves, seed=0, many=40):
    """Curves whose ends differ by 1 and of which the first point shows the share `known` of the variance."""
    rng = np.random.default_rng(seed)
    starts = rng.normal(0, math.sqrt(known), many)
    steps = rng.normal(0, math.sqrt((1 - known) / (POINTS - 1)), (many, POINTS - 1)) * moves
    return np.cumsum(np.column_stack([starts, steps]), 1)


def test_forecast_finds_a_linear_relation_between_points():
    rng = np.random.default_rng(0)
    first = rng.normal(0, 1, 200)
    drawn = np.column_stack([first, 0.5 * first + 1, 0.5 * first + 2, 0.25 * first])
    model = CurveModel.fit(drawn.tolist(), POINTS)
    assert model.end([1.0]) == pytest.approx(0.25, abs=0.02)
    assert model.end([1.0, 1.5, 2.5]) == pytest.approx(0.25, abs=0.02)
    assert model.end([1.0, 1.5, 2.5, 0.3]) == 0.3


def test_moves_tell_how_much_is_still_open():
    crossing, parallel = (CurveModel.fit(curves(known, 1.0).tolist(), POINTS) for known in (0.1, 0.99))
    assert math.sqrt((crossing.moves**2).sum()) == pytest.approx(0.95, abs=0.2)
    assert math.sqrt((parallel.moves**2).sum()) < 0.2


def test_a_new_curve_beats_a_paused_middling_one_only_where_first_points_tell():
    for known, new_is_better in ((0.99, True), (0.05, False)):
        drawn = curves(known, 1.0)
        model = CurveModel.fit(drawn.tolist(), POINTS)
        (worth,), new = model.worth([[float(np.median(drawn[:, 0]))]], best=-1.0)
        assert (new > worth) == new_is_better


def test_worth_falls_with_the_value_and_rises_with_what_is_paid():
    model = CurveModel.fit(curves(0.6, 1.0).tolist(), POINTS)
    worth, _ = model.worth([[-2.0], [-1.0], [0.0], [-1.0, -1.0, -1.5]], best=-1.0)
    assert worth[0] > worth[1] > worth[2]
    assert worth[3] > worth[1]
    assert model.worth([[9.0]], best=-1.0)[0][0] == -1.0


def test_diverged_curves_do_not_widen_the_forecasts():
    drawn = curves(0.9, 1.0).tolist()
    plain, with_failures = CurveModel.fit(drawn, POINTS), CurveModel.fit([*drawn, [1e9] * 3, [math.inf]], POINTS)
    assert with_failures.end([0.5]) == pytest.approx(plain.end([0.5]), abs=0.2)
    assert np.isfinite(with_failures.first).all()


def test_first_configurations_get_one_point_each_and_then_the_best_goes_on():
    rule, trials = ForecastRule(SPACE), [BASELINE]
    for number, value in enumerate((0.9, 1.2, 0.3, 1.1, 1.0), 1):
        assert rule.next_trial(trials, True) is None
        trials.append(trial(number, value, paused=False))
        assert rule.after_point(trials[-1], trials) is Decision.PAUSE
        trials[-1].paused = True
    trials.append(trial(6, 1.3))
    assert rule.next_trial(trials, True) == "t0003"
    best = trials[3]
    best.paused = False
    best.points += trial(3, 0.3, 0.25).points[1:]
    assert rule.after_point(best, trials) is Decision.GO_ON


def test_pauses_a_trial_that_disappoints():
    trials = [BASELINE, *(trial(number, value) for number, value in enumerate((0.9, 1.2, 0.4, 1.1, 1.0), 1))]
    trials.append(trial(6, 0.3, 5.0, paused=False))
    assert ForecastRule(SPACE).after_point(trials[-1], trials) is Decision.PAUSE


def test_ends_where_no_trial_can_be_drawn_or_improve():
    paused = [trial(number, value) for number, value in enumerate((0.9, 1.2, 0.4, 1.1, 1.0, 1.0), 1)]
    rule = default_rule(SPACE)
    assert rule.next_trial([BASELINE, *paused], False) == "t0003"
    excellent = trial(0, *[1e-6] * SPACE.baseline.evaluation.points, status="ok", seed=7)
    assert rule.next_trial([excellent, *paused], False) is None
    assert rule.next_trial([excellent], False) is None
