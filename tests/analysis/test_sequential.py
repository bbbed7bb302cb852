"""Looking after every round of seeds, without being fooled by it."""

import math

import numpy as np
import pytest
import scipy.stats
from scipy.optimize import brentq

from tunediff.analysis import sequential
from tunediff.analysis.sequential import look
from tunediff.analysis.statistics import SAME


def until_over(values, **options):
    """The look at which whoever looks after every round stops."""
    for rounds in range(1, values.shape[1] + 1):
        told = look(values[:, :rounds], values.shape[1], **options)
        if told.over:
            return told
    return told


def test_values_that_never_differ_are_hopeless_at_the_first_look():
    told = until_over(np.full((2, 12), 2.0))
    assert (told.rounds, told.state) == (sequential.FIRST, "hopeless")
    assert until_over(np.full((3, 12), 2.0)).rounds == sequential.FIRST


@pytest.mark.parametrize(("rivals", "rounds"), [(1, 3), (1, 8), (2, 3), (3, 6)])
def test_one_look_is_dunnetts_comparison(rivals, rounds, monkeypatch):
    """The bound of a single look, against the multivariate t distribution of SciPy: correlations ½."""
    monkeypatch.setattr(sequential, "FIRST", rounds)
    sequential.bounds.cache_clear()
    found = sequential.bounds(rivals, rounds)[-1]
    sequential.bounds.cache_clear()
    law = scipy.stats.multivariate_t(
        shape=np.full((rivals, rivals), 0.5) + np.eye(rivals) / 2, df=rivals * (rounds - 1), seed=0
    )

    def missing(bound):
        corner = np.full(rivals, bound)
        return law.cdf(corner, lower_limit=-corner, maxpts=100_000) - 0.95

    assert found == pytest.approx(brentq(missing, 1.0, 30.0, xtol=1e-3), rel=0.03)


def test_with_one_rival_it_is_the_paired_t_test():
    values = np.exp(np.random.default_rng(0).normal(0, 0.1, (2, 6)))
    told = look(values, 6)
    theirs = scipy.stats.ttest_rel(np.log(values[1]), np.log(values[0]))
    error = math.log(told.differences[0].estimate) / theirs.statistic
    assert math.log1p(told.sd) == pytest.approx(np.log(values[1] / values[0]).std(ddof=1))
    assert math.log1p(told.resolution) == pytest.approx(sequential.bounds(1, 6)[-1] * error)


@pytest.mark.parametrize("rivals", [1, 3])
def test_who_looks_after_every_round_is_seldom_fooled(rivals):
    rng = np.random.default_rng(1)
    told = [until_over(np.exp(rng.normal(0, 0.1, (1 + rivals, 12)))) for _ in range(600)]
    wrong = sum(any(one.verdict in ("better", "worse") for one in look.differences) for look in told)
    assert 0 < wrong <= 0.05 * 600 + 2 * math.sqrt(600 * 0.05 * 0.95)
    assert sum(look.rounds for look in told) / 600 < 6.5  # and soon stops hoping


def test_a_real_difference_is_told_with_few_rounds():
    rng = np.random.default_rng(2)
    runs = [until_over(np.exp(rng.normal(0, 0.1, (3, 12)) - [[0], [0.2], [0.2]])) for _ in range(200)]
    assert sum(any(one.verdict == "better" for one in told.differences) for told in runs) >= 190
    assert sum(told.rounds for told in runs) / 200 < 7


@pytest.mark.parametrize(
    ("values", "options", "verdict", "state"),
    [
        ([[2, 2.1, 2.2], [1, 1.06, 1.1]], {}, "better", "decided"),
        ([[2, 2.1, 2.2], [1, 1.06, 1.1]], {"lower_is_better": False}, "worse", "decided"),
        ([[0.1, -0.1, 0.0], [9.1, 8.9, 9.001]], {"lower_is_better": False}, "better", "decided"),  # no ratio
        ([[2, 2.1, 2.2], [2.0, 2.12, 2.18]], {}, "no difference larger than the noise", "hopeless"),
        ([[2, 2.1, 2.2], [2.0, 2.101, 2.201]], {"within": 0.02}, "no difference larger than the noise", "equal"),
        ([[2, 2.1, 2.2], [1, 1.06, math.nan]], {}, "too few runs", "open"),
        ([[2, 2.1], [1, 1.06]], {}, "too few runs", "open"),
        ([[1.0, 1.0, 1.0], [0.5, 0.5, 0.5]], {}, "better", "decided"),  # no noise at all
        ([[2, 2.1, 2.2, 2.1], [1, 1.06, math.nan, math.nan]], {}, "too few runs", "decided"),  # it failed: it is out
    ],
)
def test_what_a_look_says(values, options, verdict, state):
    told = look(np.array(values), 12, **options)
    assert (told.differences[0].verdict, told.state) == (verdict, state)


def test_a_rival_that_failed_does_not_hold_up_the_others():
    values = np.array([[2, 2.1, 2.2, 2.1], [1.9, math.nan, math.nan, math.nan], [1.0, 1.06, 1.1, 1.05]])
    told = look(values, 12)
    assert [one.verdict for one in told.differences] == ["too few runs", "better"]
    assert told.rounds == 4


def test_a_rival_that_failed_does_not_make_the_test_of_the_others_more_lenient():
    values = np.exp(np.random.default_rng(6).normal(0, 0.1, (2, 4)))
    failed = np.full((2, 4), math.nan)
    assert look(np.vstack([values, failed]), 4).resolution == look(values, 4).resolution


def test_equal_differences_on_two_seeds_show_nothing():
    told = look(np.array([[0.90, 0.91], [0.89, 0.90]]), 2, lower_is_better=False, ratios=False)
    assert (told.differences[0].verdict, told.resolution, told.state) == ("too few runs", None, "spent")


@pytest.mark.parametrize(("within", "state"), [(None, "spent"), (0.01, "equal")])
def test_two_seeds_without_any_difference_are_no_difference(within, state):
    """As of a knob without effect: too few runs are no reason to doubt that."""
    told = look(np.array([[0.90, 0.91], [0.90, 0.91]]), 2, ratios=False, within=within)
    (difference,) = told.differences
    assert (difference.verdict, difference.low, difference.high, told.state) == (SAME, 0.0, 0.0, state)


def test_the_last_look_has_no_more_rounds():
    rng = np.random.default_rng(5)
    told = look(np.exp(rng.normal(0, 0.1, (2, 12)) - [[0], [0.05]]), 12)
    assert told.state in ("spent", "decided")
