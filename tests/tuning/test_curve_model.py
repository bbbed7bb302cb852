"""A model of curves that draws new configurations, without Ray."""

import dataclasses
import math

import numpy as np
import optuna
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Kernel

from tests.helpers import point
from tests.tuning.test_experiment import loaded
from tunediff.core.trial_record import End, TrialRecord
from tunediff.search_space.model import Dimension
from tunediff.tuning import curve_model
from tunediff.tuning.curve_model import CurveModel, comparable, propose

LR = Dimension("optimizer.lr", low=1e-3, high=1e-1, log=True)
SIZE = Dimension("loader.batch_size", choices=(32, 64, 128))
NAME = Dimension("weighting.name", choices=("constant", "min_snr"))
GAMMA = Dimension("weighting.gamma", low=1.0, high=20.0, log=True, when=(("weighting.name", ("min_snr",)),))
POINTS = 4
base = loaded()
SPACE = dataclasses.replace(
    base,
    dimensions=(LR, SIZE, NAME, GAMMA),
    baseline=dataclasses.replace(
        base.baseline, evaluation=dataclasses.replace(base.baseline.evaluation, points=POINTS)
    ),
)


def knobs(lr=1e-2, size=64, gamma=None):
    named = {"weighting.name": "constant"} if gamma is None else {"weighting.name": "min_snr", "weighting.gamma": gamma}
    return {"optimizer.lr": lr, "loader.batch_size": size, **named}


def trial(number, values, status=None, **drawn):
    points = [point(i, 2.0 * i, **{SPACE.metric: value}) for i, value in enumerate(values, 1)]
    status = status or ("ok" if len(values) == POINTS else None)
    return TrialRecord(
        f"t{number:04d}", number, {}, knobs(**drawn), "", points=points, end=End(status) if status else None,
        paused=status is None,
    )  # fmt: skip


def curve(end, points=POINTS):
    """Values that fall to `end`."""
    return [end * (1 + (POINTS - i) / i) for i in range(1, points + 1)]


def by_lr(lr):
    """The loss at the end: best at 0.02."""
    return 1 + 2 * math.log10(lr / 0.02) ** 2


def chosen(trials, times=5):
    """What is proposed as the trials 100, 101, …"""
    return [propose(SPACE, trials, number) for number in range(100, 100 + times)]


# ------------------------------------------------------------------------------------------------------------- posterior
def test_forecasts_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    seen = [knobs(10 ** rng.uniform(-3, -1), int(rng.choice([32, 64, 128]))) for _ in range(12)]
    runs, at = [i for i in range(12) for _ in range(3)], [1, 2, 4] * 12
    values = rng.standard_normal(36)
    model = CurveModel((LR, SIZE), POINTS).fit([seen[run] for run in runs], runs, at, values)
    sd, decay, run_sd, run_decay, noise, growth, *lengths = model.parameters
    new = [knobs(3e-3), knobs(5e-2, 128)]

    def rows(configurations, runs, at):
        lr = [math.log10(one["optimizer.lr"]) / 2 for one in configurations]
        size = [[32, 64, 128].index(one["loader.batch_size"]) / 2 for one in configurations]
        return np.column_stack([lr, size, runs, np.log2(at)])

    class Curves(Kernel):
        def __init__(self):
            pass

        def __call__(self, a, b=None, eval_gradient=False):
            b = a if b is None else b
            difference = (a[:, None] - b) ** 2
            gap, grow = abs(a[:, None, 3] - b[:, 3]), np.exp(growth) ** (a[:, None, 3] + b[:, 3] - 4)
            by_knobs = np.exp(-0.5 * difference[..., 0] / np.exp(lengths[0]) ** 2)
            by_knobs *= np.exp(-0.5 * difference[..., 1] / np.exp(lengths[1]) ** 2)
            own = np.exp(2 * run_sd) * (difference[..., 2] == 0) * np.exp(-gap / np.exp(run_decay))
            return 2 + 2 * np.exp(-gap / 3) + grow * (np.exp(2 * sd) * by_knobs * np.exp(-gap / np.exp(decay)) + own)

        def diag(self, a):
            return np.diag(self(a))

        def is_stationary(self):
            return False

    reference = GaussianProcessRegressor(Curves(), alpha=np.exp(2 * noise) + 1e-8, optimizer=None)
    reference.fit(rows([seen[run] for run in runs], runs, at), values)
    mean, spread = reference.predict(rows(new, [100, 101], [4, 4]), return_std=True)
    forecast, own_spread = model.forecast(new)
    assert forecast == pytest.approx(mean, abs=1e-6)
    assert own_spread == pytest.approx(np.sqrt(spread**2 + np.exp(2 * noise)), abs=1e-6)


def test_gradient_is_that_of_finite_differences():
    rng = np.random.default_rng(1)
    seen = [knobs(10 ** rng.uniform(-3, -1), 64, rng.choice([None, 2.0, 9.0])) for _ in range(8)]
    model = CurveModel(SPACE.dimensions, POINTS).fit(seen, range(8), [1, 2, 4, 4] * 2, rng.standard_normal(8))
    observed, at = model._observed(np.arange(8)), model.parameters + 0.1
    _, gradient = model.negative_log_posterior(at, *observed)
    for place, slope in enumerate(gradient):
        step = np.eye(len(at))[place] * 1e-6
        ahead, behind = (model.negative_log_posterior(at + sign * step, *observed)[0] for sign in (1, -1))
        assert slope == pytest.approx((ahead - behind) / 2e-6, abs=1e-4)


# ------------------------------------------------------------------------------------------------------------- decisions
LRS = (0.001, 0.003, 0.008, 0.03, 0.06, 0.1)


def test_no_model_before_four_trials_nor_without_a_finished_one():
    trials = [trial(i, curve(by_lr(lr)), lr=lr) for i, lr in enumerate(LRS)]
    assert propose(SPACE, trials[:3], 4) is None
    assert propose(SPACE, [trial(i, curve(1.0, 2)) for i in range(6)], 6) is None
    assert propose(SPACE, trials[:4], 4) is not None


def test_new_configurations_lie_where_curves_end_low():
    trials = [trial(i, curve(by_lr(lr)), lr=lr) for i, lr in enumerate(LRS)]
    drawn = [point["optimizer.lr"] for point in chosen(trials)]
    assert all(0.008 < lr < 0.06 for lr in drawn)


def test_paused_trials_teach_where_curves_do_not_cross():
    ended = [trial(i, curve(by_lr(lr)), lr=lr) for i, lr in enumerate((0.001, 0.003, 0.1))]
    lrs = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08)
    paused = [trial(i, curve(by_lr(lr), 1), lr=lr) for i, lr in enumerate(lrs, 10)]
    by_ends, by_all = (
        np.median([point["optimizer.lr"] for point in chosen(of)]) for of in ([*ended, trial(9, [9.0])], ended + paused)
    )
    assert by_ends > 0.06, "the best end is that of the largest rate"
    assert 0.01 < by_all < 0.04


@pytest.mark.parametrize("fall", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("spread", [0.5, 0.03])
def test_a_steep_fall_of_all_curves_does_not_hide_what_ends_differ_by(fall, spread):
    """Logarithms of the losses fall by `fall` in all curves, and ends differ by `spread`."""
    rng, trials, space = np.random.default_rng(0), [], dataclasses.replace(SPACE, dimensions=(LR,))
    for number in range(16):
        lr, until_end = 10 ** rng.uniform(-3, -1), 1 - np.log2(range(1, POINTS + 1 if number < 6 else 2)) / 2
        noise = 0.1 * rng.standard_normal() + 0.03 * rng.standard_normal(len(until_end))
        values = np.exp(fall * until_end + spread * (math.log10(lr / 0.02) ** 2 + noise))
        trials.append(dataclasses.replace(trial(number, values), drawn={"optimizer.lr": lr}))
    drawn = [propose(space, trials, number)["optimizer.lr"] for number in range(100, 105)]
    assert np.median(abs(np.log10(np.array(drawn) / 0.02))) < 0.2


def test_trials_that_end_alike_are_no_random_draws():
    """Accuracies of rates near 0.02 are all 1 in the end."""
    space, trials = dataclasses.replace(SPACE, mode="max"), []
    for number, lr in enumerate((0.0012, 0.01, 0.015, 0.02, 0.03, 0.1)):
        reached = 1.25 - 0.5 * abs(math.log10(lr / 0.02))
        values = [min(1.0, reached - 0.3 / i) for i in range(1, POINTS)] + [min(1.0, reached)]
        trials.append(trial(number, values, lr=lr))
    drawn = [propose(space, trials, number)["optimizer.lr"] for number in range(100, 109)]
    assert sum(0.005 < lr < 0.06 for lr in drawn) > 6


def test_a_model_that_cannot_be_computed_leaves_the_draw_to_the_study(monkeypatch):
    def singular(self, *columns):
        raise np.linalg.LinAlgError

    monkeypatch.setattr(CurveModel, "fit", singular)
    assert propose(SPACE, [trial(i, curve(by_lr(lr)), lr=lr) for i, lr in enumerate(LRS)], 6) is None


def test_first_points_count_for_little_where_curves_cross():
    """Small rates lead at the first point, and large ones in the end."""
    trials = []
    for i, lr in enumerate((0.001, 0.002, 0.004, 0.01, 0.03, 0.06, 0.1)):
        place = math.log10(lr / 0.001)
        trials.append(trial(i, [4 + place, 3.5 + 0.2 * place, 3 - 0.4 * place, 2.5 - place], lr=lr))
    trials += [trial(i, [4 + math.log10(lr / 0.001)], lr=lr) for i, lr in enumerate((0.0012, 0.0015, 0.05, 0.08), 10)]
    assert all(point["optimizer.lr"] > 0.02 for point in chosen(trials))


def test_failures_are_not_drawn_again():
    trials = [trial(i, curve(2 - 0.1 * i), lr=lr) for i, lr in enumerate(LRS)]  # larger rates are better …
    failed = [trial(10 + i, [], "nan", lr=lr) for i, lr in enumerate((0.07, 0.08, 0.085, 0.09))]  # … until they diverge
    before, after = (
        np.median([point["optimizer.lr"] for point in chosen(of)]) for of in (trials, trials[:-1] + failed)
    )
    assert before > 0.07 > after


@pytest.mark.parametrize(
    "end",
    [
        End("error", "its driver died", process_died=True),
        End("oom", memory={"total_mib": 80_000.0, "demand_mib": 20_000.0, "others_mib": 70_000.0}),
    ],
)
def test_failures_that_are_not_the_configurations_are_left_out(end):
    trials = [trial(i, curve(2 - 0.1 * i), lr=lr) for i, lr in enumerate(LRS)]
    failed = [trial(10 + i, [], "error", lr=lr) for i, lr in enumerate((0.07, 0.08, 0.085, 0.09))]
    assert chosen([*trials, *(dataclasses.replace(one, end=end) for one in failed)]) == chosen(trials)


def test_fit_reads_every_point_however_many_trials_there_are(monkeypatch):
    """Each of 70 trials has three points in a row."""
    fitted, original = [], CurveModel.negative_log_posterior

    def noted(self, parameters, distances, same, levels, values):
        fitted.append(levels)
        return original(self, parameters, distances, same, levels, values)

    monkeypatch.setattr(CurveModel, "negative_log_posterior", noted)
    propose(SPACE, [trial(i, curve(by_lr(lr)), lr=lr) for i, lr in enumerate(np.geomspace(0.001, 0.1, 70))], 100)
    assert [(fitted[0] == level).sum() > 20 for level in (0, 1, 2)] == [True] * 3
    assert len(fitted[0]) == curve_model.FITTED


def test_choices_of_numbers_are_ordered_by_value_wherever_the_file_lists_them():
    sizes = Dimension("loader.batch_size", choices=(128, 32, 64))
    configurations = [knobs(size=size) for size in (32, 64, 128)]
    assert curve_model._distances([sizes], configurations[:1], configurations)[0, 0] == pytest.approx([0, 0.25, 1])


def test_draws_of_a_range_with_steps_are_the_values_that_a_file_lists():
    steps, listed = Dimension("optimizer.lr", low=0.1, high=0.7, step=0.1), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for draws in ([curve_model._Random(str(seed)) for seed in range(100)], [study.ask() for _ in range(100)]):
        assert sorted({steps.suggest(draw) for draw in draws}) == listed
    space = dataclasses.replace(SPACE, dimensions=(steps,))
    trials = [
        dataclasses.replace(trial(i, curve(abs(lr - 0.3) + 1)), drawn={"optimizer.lr": lr})
        for i, lr in enumerate(listed[:-1])
    ]
    assert propose(space, trials, 6) == {"optimizer.lr": 0.7}


def test_knobs_under_a_condition_are_drawn_and_compared_where_they_apply():
    ends = {None: 2.0, 2.0: 1.2, 4.0: 1.0, 16.0: 1.8}
    trials = [
        trial(i, curve(ends[gamma]), lr=lr, gamma=gamma)
        for i, (gamma, lr) in enumerate((gamma, lr) for gamma in ends for lr in (0.003, 0.03))
    ]
    drawn = chosen(trials)
    assert all(point["weighting.name"] == "min_snr" and point["weighting.gamma"] < 12 for point in drawn)
    assert all(SPACE.dimensions[3].active(point) == ("weighting.gamma" in point) for point in drawn)


def test_same_trials_get_the_same_proposal_and_other_numbers_others():
    trials = [trial(i, curve(by_lr(lr)), lr=lr) for i, lr in enumerate(LRS)]
    assert propose(SPACE, trials, 6) == propose(SPACE, list(trials), 6) != propose(SPACE, trials, 7)


def test_a_space_that_was_tried_has_no_proposal():
    small = dataclasses.replace(SPACE, dimensions=(SIZE,))
    trials = [trial(i, curve(1.0 + i)) for i in range(5)]
    trials = [
        dataclasses.replace(one, drawn={"loader.batch_size": (32, 64, 128)[i % 3]}) for i, one in enumerate(trials)
    ]
    assert propose(small, trials, 5) is None


def test_two_objectives_are_left_to_the_sampler():
    trials = [trial(i, curve(by_lr(lr)), lr=lr) for i, lr in enumerate(LRS)]
    assert propose(dataclasses.replace(SPACE, cost="train_s"), trials, 6) is None


# ------------------------------------------------------------------------------------------------------------ comparable
def test_comparable_losses_keep_their_order_and_draw_poor_ones_in():
    losses = np.array([1.0, 2.0, 3.0, 1e9])
    at_end, finished = np.full(4, POINTS), np.full(4, True)
    values = comparable(losses, at_end, finished, "min")
    assert list(np.argsort(values)) == [0, 1, 2, 3]
    assert values[3] - values[2] < 10 * (values[2] - values[1])
    accuracies = comparable(np.array([-0.9, -0.8, -0.7, -0.1]), at_end, finished, "max")
    assert list(np.argsort(accuracies)) == [0, 1, 2, 3]


def test_comparable_losses_are_without_the_curve_that_all_share():
    """The paused trials, here the worse ones, do not tell what is shared."""
    ends = np.array([1.0, 1.1, 1.2, 2.0])
    runs, at = np.repeat(np.arange(4), 3)[:10], np.tile([1, 2, 4], 4)[:10]  # the last trial has its first point only
    flat, falling = (comparable(ends[runs] * fall, at, runs < 3, "min") for fall in (1.0, np.exp(3.0 / at)))
    assert falling == pytest.approx(flat)
    assert list(falling[3:6]) == pytest.approx([0, 0, 0]), "the middle one of those that have ended"


@pytest.mark.parametrize(
    "losses",
    [
        [0, 0, 0, 0, 0, 0, -0.2, -0.3, -0.4, -0.6],  # two finished trials, the first points all equal
        [-0.4, -0.5, -0.1, -0.2, -0.3, -0.4, -0.6, -0.7, -1.0, -1.0],
        [-0.5] * 10,
    ],
)
def test_equal_losses_do_not_blow_up_the_scale(losses):
    at, finished = np.array([1] * 6 + [2, 2, 4, 4]), np.array([True] * 2 + [False] * 4 + [True] * 4)
    assert abs(comparable(np.array(losses, float), at, finished, "max")).max() < 20


def test_poor_losses_stay_behind_where_the_better_half_is_equal():
    values = comparable(np.array([-1.0, -1.0, -1.0, -0.7, -0.5]), np.full(5, POINTS), np.full(5, True), "max")
    assert values[4] > values[3] > values[0] + 0.5


def test_fit_knows_its_limits():
    """More points than are fitted: the model still reads all up to its limit."""
    many = [
        trial(i, curve(by_lr(lr), 1), lr=lr) for i, lr in enumerate(np.geomspace(0.001, 0.1, curve_model.KNOWN + 50), 1)
    ]
    drawn = chosen([trial(0, curve(by_lr(0.1)), lr=0.1), *many], 2)
    assert all(0.005 < point["optimizer.lr"] < 0.08 for point in drawn)
