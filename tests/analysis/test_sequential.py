"""Looking after every round of seeds, without being fooled by it."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tunediff.analysis import confirming_runs, error_spending
from tunediff.analysis.divergence import SOUND, Divergence, divergence
from tunediff.analysis.sequential import Rules, analyse
from tunediff.analysis.statistics import value_step
from tunediff.core.outcomes import Verdict


def until_ended(values, level=0.05, one_sided=False, **options):
    """The interim analysis at which whoever tests after every round stops."""
    rules = Rules(values.shape[1], level, one_sided)
    for rounds in range(error_spending.first_analysis(values.shape[1]), values.shape[1] + 1):
        told = analyse(values[:, :rounds], rules, **options)
        if told.ended:
            return told
    return told


def test_an_interval_that_is_not_determined_is_not_hopeless():
    """Its mean is near 0 by chance: with the same noise nine pairs were better by a third."""
    three = np.exp([[0.0, 0.0, 0.0], [0.67, -0.34, -0.53]])
    assert analyse(three, Rules(12)).state == "open"
    assert analyse(three, Rules(3)).state == "spent"


def test_values_that_never_differ_are_hopeless_at_the_first_look():
    told = until_ended(np.full((2, 12), 2.0))
    assert (told.rounds, told.state) == (error_spending.FIRST, "hopeless")
    assert until_ended(np.full((3, 12), 2.0)).rounds == error_spending.FIRST


@pytest.mark.parametrize("rivals", [1, 3])
def test_the_only_look_is_a_paired_t_test_of_each_rival_by_its_own_noise(rivals):
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(0, 0.1, (1 + rivals, 3)) * np.array([1, 0.2, 1, 5])[: 1 + rivals, None])
    test = analyse(values, Rules(3))
    for row, difference in zip(np.log(values[1:]), test.differences, strict=True):
        theirs = stats.ttest_rel(row, np.log(values[0]))
        error = math.log(difference.estimate) / theirs.statistic
        half = stats.t.ppf(1 - 0.025 / rivals, 2) * error
        assert math.log1p(difference.sd) == pytest.approx((row - np.log(values[0])).std(ddof=1))
        assert math.log1p(difference.resolution) == pytest.approx(half, rel=0.02)


NIGHTLY = pytest.mark.nightly
NOISE = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "t3": lambda rng, shape: rng.standard_t(3, shape) / math.sqrt(3),
    "outliers": lambda rng, shape: rng.standard_normal(shape) * np.where(rng.random(shape) < 0.05, 6, 1),
}


def shares(sds, noise="normal", gain=0.0, times=400, level=0.05, **rules):
    """How many of so many comparisons call any rival better, and any worse; the first one is better by `gain` sd."""
    rng, better, worse = np.random.default_rng(1), 0, 0
    for off in NOISE[noise](rng, (times, 1 + len(sds), 12)) * np.array([1.0, *sds])[:, None]:
        off[1] -= gain
        verdicts = {one.verdict for one in until_ended(np.exp(0.15 * off), level=level, **rules).differences}
        better, worse = better + ("better" in verdicts), worse + ("worse" in verdicts)
    return better / times, worse / times


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("sds", [(0.2, 1, 5), pytest.param((5,), marks=NIGHTLY), pytest.param((5,) * 4, marks=NIGHTLY)])
def test_equal_configurations_are_seldom_called_better_whatever_their_noise(sds, noise):
    """At most 2.5 % of comparisons, and two standard errors of 400 of them."""
    assert shares(sds, noise)[0] <= 0.025 + 2 * math.sqrt(0.025 * 0.975 / 400)


@pytest.mark.parametrize(("rules", "level"), [({}, 0.05), ({"one_sided": True}, 0.01)], ids=str)
def test_equal_sides_differ_as_often_as_their_level_allows(level, rules):
    better, worse = shares((1,), times=400, level=level, **rules)
    due = level if "one_sided" in rules else level / 2
    assert better <= due + 3 * math.sqrt(due / 400)
    assert worse == 0 if "one_sided" in rules else worse <= due + 3 * math.sqrt(due / 400)


def test_one_look_after_all_rounds_is_students_test():
    assert error_spending.bounds(0.05, 20, 2, fixed=True)[-2:] == (math.inf, pytest.approx(2.0930, abs=1e-4))
    assert error_spending.bounds(0.05, 20, 2, one_sided=True, fixed=True)[-1] == pytest.approx(1.7291, abs=1e-4)
    values = np.random.default_rng(0).normal([[10], [99]], 1, (2, 19))
    assert analyse(values, Rules(20, fixed=True), ratios=False).state == "open"
    last = analyse(np.exp(np.random.default_rng(5).normal(0, 0.1, (2, 12)) - [[0], [0.05]]), Rules(12))
    assert last.state in ("spent", "decided"), "there are no more rounds"


def test_a_thousand_rounds_have_about_a_hundred_analyses_with_the_error_of_one():
    """Independent paths of Student's t, round by round, cross the bounds as often as the level says."""
    limits = np.array(error_spending.bounds(0.05, 1000, 2))
    assert len(error_spending.analyses(1000)) < 120
    assert error_spending.analyses(100) == tuple(range(1, 101))
    drawn, rounds = np.random.default_rng(7).standard_normal((4000, 1000)), np.arange(1, 1001)
    means = drawn.cumsum(axis=1) / rounds
    with np.errstate(divide="ignore", invalid="ignore"):
        t = means / np.sqrt(((drawn**2).cumsum(axis=1) / rounds - means**2) / (rounds - 1))
    assert (np.abs(t) >= limits).any(axis=1).mean() == pytest.approx(0.05, abs=3 * math.sqrt(0.05 * 0.95 / 4000))
    assert limits[-1] == pytest.approx(stats.norm.ppf(1 - 0.05 / 2), rel=0.2)


def test_rounds_behind_an_analysis_wait_for_the_next_one():
    values = np.exp(np.random.default_rng(3).normal(0, 0.1, (2, 102)))
    assert error_spending.last_analysis(102, 300) == 101
    assert analyse(values, Rules(300)) == analyse(values[:, :101], Rules(300))


def test_a_gain_of_two_sd_is_found():
    """In 95 % with one rival; in 92 % with three, at the level of a search's first confirmation."""
    first = confirming_runs.level(Path("confirm"))
    assert shares((1,), gain=2.0, times=200)[0] >= 0.95
    assert shares((1, 1, 1), gain=2.0, level=first, times=300)[0] >= 0.92 - 2 * math.sqrt(0.92 * 0.08 / 300)


def test_confirming_again_and_again_spends_no_more_than_one_comparison():
    names = ["confirm", *(f"confirm-{number}" for number in range(2, 50))]
    levels = [confirming_runs.level(Path(name)) for name in names]
    assert sum(levels) <= 0.05
    assert levels == sorted(levels, reverse=True)
    assert min(levels[:4]) > 0
    assert until_ended(np.exp(np.random.default_rng(0).normal(0, 0.1, (2, 12))), level=levels[-1]).state != "open"


@pytest.mark.parametrize("items", [2, 6, 10])
def test_equal_configurations_of_a_coarse_metric_are_seldom_called_different(items):
    """Accuracies of 100 items, of which so many are right by chance."""
    rng = np.random.default_rng(0)
    values = [(90 + rng.binomial(items, 0.5, (2, 12))) / 100 for _ in range(400)]
    looks = [until_ended(accuracies, ratios=False) for accuracies in values if len(set(accuracies[:, :3].flat)) > 1]
    assert sum(look.differences[0].verdict != Verdict.NO_DIFFERENCE for look in looks) <= 0.05 * 400 + 2 * math.sqrt(
        400 * 0.05 * 0.95
    )
    assert all(look.differences[0].low < look.differences[0].high for look in looks)


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([0.90, 0.91, 0.93], 0.01),
        ([0.9021, 0.9023, 0.9026], 0.0001),  # no neighbours
        (np.array([9021, 9023, 9026], np.float32) / np.float32(1e4), 0.0001),  # float32, as torch means are
        ([5.25, 5.5, math.nan, 6.0], 0.25),
        ([0.9, 0.9], 0.0),
        (np.random.default_rng(0).normal(1, 0.1, 6), 0.0),
    ],
)
def test_the_step_of_a_coarse_metric_is_found(values, step):
    assert value_step(np.array(values, float)) == pytest.approx(step, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "rules", "lower", "verdict", "state"),
    [
        ([[2, 2.1, 2.2], [1, 1.06, 1.1]], {}, True, "better", "decided"),
        ([[2, 2.1, 2.2], [1, 1.06, 1.1]], {}, False, "worse", "decided"),
        ([[0.1, -0.1, 0.0], [9.1, 8.9, 9.001]], {}, False, "better", "decided"),  # no ratio
        ([[2, 2.1, 2.2], [2.0, 2.12, 2.18]], {}, True, "no_difference", "hopeless"),
        ([[2, 2.1, 2.2], [2.0, 2.101, 2.201]], {"within": 0.02}, True, "no_difference", "equal"),
        ([[2, 2.1, 2.2], [1, 1.06, math.nan]], {}, True, "too_few_runs", "open"),
        ([[2, 2.1], [1, 1.06]], {}, True, "too_few_runs", "open"),
        ([[1.0] * 6, [0.5] * 6], {}, True, "better", "decided"),  # no noise but that of rounding
        (
            [[2, 2.1, 2.2, 2.1], [1, 1.06, math.nan, math.nan]],
            {},
            True,
            "too_few_runs",
            "decided",
        ),  # it failed: it is out
    ],
)
def test_what_an_interim_analysis_says(values, rules, lower, verdict, state):
    told = analyse(np.array(values), Rules(12, **rules), lower)
    assert (told.differences[0].verdict, told.state) == (verdict, state)


def test_a_rival_that_failed_does_not_hold_up_the_others():
    values = np.array([[2, 2.1, 2.2, 2.1], [1.9, math.nan, math.nan, math.nan], [1.0, 1.06, 1.1, 1.05]])
    told = analyse(values, Rules(12))
    assert [one.verdict for one in told.differences] == ["too_few_runs", "better"]
    assert told.rounds == 4


def test_a_rival_that_failed_does_not_make_the_test_of_the_others_more_lenient():
    values = np.exp(np.random.default_rng(6).normal(0, 0.1, (2, 4)))
    failed = np.full((2, 4), math.nan)
    assert analyse(np.vstack([values, failed]), Rules(4)).differences[0] == analyse(values, Rules(4)).differences[0]


@pytest.mark.parametrize("b", [[0.89, 0.90], [0.90, 0.91]])
def test_equal_differences_on_two_seeds_do_not_show_that_there_is_no_noise(b):
    test = analyse(np.array([[0.90, 0.91], b]), Rules(2, within=0.01), lower_is_better=False, ratios=False)
    (difference,) = test.differences
    assert (difference.verdict, test.state) == (Verdict.NO_DIFFERENCE, "spent")
    assert difference.low < -0.01 < 0.01 < difference.high


@pytest.mark.parametrize(("one_sided", "start"), [(False, 0), (True, 0), (False, 5)])
def test_signs_exceed_their_bounds_as_often_as_their_level_allows(one_sided, start):
    """All 2^12 series of signs."""
    limits = np.array(error_spending.sign_bounds(0.05, 12, 2, one_sided, start))
    leads = np.cumsum(np.array(list(itertools.product((-1, 1), repeat=12))), axis=1)
    found = ((leads if one_sided else np.abs(leads)) >= limits).any(axis=1).mean()
    assert 0.02 < found <= 0.05 * (1 - (start / 12) ** 2)
    assert np.isinf(limits[:start]).all()


def test_the_only_look_at_signs_is_a_sign_test():
    values = np.ones((2, 12))
    for ahead, expected in ((10, "better"), (9, "no_difference"), (2, "worse")):
        values[1] = np.where(np.arange(12) < ahead, 0.5, np.inf)
        assert analyse(values, Rules(12, better="time", fixed=True)).differences[0].verdict == expected
        assert (stats.binomtest(ahead, 12).pvalue <= 0.05) == (expected != "no_difference")
    assert analyse(values[:, :11], Rules(12, better="time", fixed=True)).state == "open"


@pytest.mark.parametrize(("rounds", "misses"), [(8, 0.05), (12, 0.05), (12, 0.3), (20, 0.1)])
def test_equal_sides_of_which_some_runs_miss_are_seldom_called_different(rounds, misses):
    draw, times, found = np.random.default_rng(0), 1000, 0
    for _ in range(times):
        values = np.exp(0.05 * draw.standard_normal((2, rounds)))
        values[draw.random((2, rounds)) < misses] = np.inf
        found += until_ended(values).differences[0].verdict in (Verdict.BETTER, Verdict.WORSE)
    assert found / times < 0.06


# ------------------------------- runs that diverge to numbers decide by their count, which equal sides seldom differ in
TIMM = np.array([[1.43, 1.43, 2.80], [2.36, 2487, 6.9e6]])
"""Losses of timm's train.py, and at 100 times its learning rate (docs/results/2026-11-commands.md)."""


def test_a_side_that_diverges_to_numbers_is_worse_although_a_t_test_sees_only_noise():
    assert stats.ttest_rel(*np.log(TIMM)).pvalue > 0.2
    test = analyse(TIMM, Rules(6))
    assert (test.differences[0].verdict, test.state) == ("worse", "decided")
    assert test.differences[0].diverged == (0, 2, 3)
    assert analyse(TIMM[::-1], Rules(6)).differences[0].verdict == "better", "the baseline may be the one that diverges"
    assert analyse(-TIMM, Rules(6), lower_is_better=False, ratios=False).differences[0].verdict == "worse"
    assert analyse(TIMM, Rules(6, one_sided=True)).differences[0].verdict != "worse"


def test_one_run_that_diverged_is_no_verdict_and_more_are_run_while_they_could_give_one():
    loss = np.array([[2.0, 2.1, 2.2], [2.1, 2.0, 2e5]])
    assert (analyse(loss, Rules(12)).differences[0].verdict, analyse(loss, Rules(12)).state) == (
        Verdict.NO_DIFFERENCE,
        "open",
    )
    assert Divergence(0, 1, 3).undecided(0.05, 12)
    assert not Divergence(0, 1, 4).undecided(0.05, 12), "three of twelve would be too few"
    assert not Divergence(1, 2, 3).undecided(0.05, 12)
    both = np.array([[2.0, 2e6, 2.2], [2e5, 2e5, 2.1]])
    assert analyse(both, Rules(12)).differences[0].verdict not in ("better", "worse")


def test_a_side_that_diverged_on_a_seed_is_not_better_by_its_other_runs():
    loss = np.array([[2.0, 2.1, 2.2] * 4, [0.1, 0.2, 0.1] * 4])
    assert analyse(loss, Rules(12)).differences[0].verdict == "better"
    loss[1, 5] = 1e3
    assert analyse(loss, Rules(12)).differences[0].verdict == Verdict.NO_DIFFERENCE


def test_values_near_zero_and_values_of_other_sizes_are_no_divergence():
    none = (0, 0, 3)
    assert divergence(np.zeros(3), np.ones(3), True) == none, "errors counted: 0, 0, 0 against 1, 1, 1"
    assert divergence(np.array([0.9, 0.91, 0.92]), np.full(3, 1e-4), False) == none, "an accuracy near chance"
    assert divergence(np.full(3, 2.0), np.full(3, 199.0), True) == none


@pytest.mark.parametrize(("rounds", "least"), [(2, 2), (3, 2), (4, 3), (9, 3), (10, 4), (12, 4)])
def test_how_many_runs_have_to_diverge_is_of_the_binomial_distribution(rounds, least):
    assert stats.binom.sf(least - 1, rounds, SOUND) <= 0.01 < stats.binom.sf(least - 2, rounds, SOUND)
    assert Divergence(0, least, rounds).decided(0.05)
    assert not Divergence(0, least - 1, rounds).decided(0.05)
    assert not Divergence(1, least, rounds).decided(0.05)


@pytest.mark.parametrize("share", [0.02, 0.05])
def test_equal_sides_of_which_runs_diverge_are_seldom_called_different(share):
    """At most 2.5 % each way, and two standard errors of 600 comparisons."""
    rng, verdicts = np.random.default_rng(0), []
    for _ in range(600):
        sizes = np.where(rng.random((2, 12)) < share, rng.uniform(5, 15, (2, 12)), 0)
        loss = np.exp(0.15 * rng.standard_normal((2, 12)) + sizes)
        verdicts.append(until_ended(loss).differences[0].verdict)
    for verdict in ("better", "worse"):
        assert verdicts.count(verdict) / 600 <= 0.025 + 2 * math.sqrt(0.025 * 0.975 / 600)
