"""Runs that diverge to numbers decide by their count, which equal sides seldom differ in."""

import math

import numpy as np
import pytest
from scipy import stats

from tests.analysis.test_sequential import until_ended
from tunediff.analysis.divergence import SOUND, Divergence, divergence
from tunediff.analysis.sequential import Rules, analyse
from tunediff.core.outcomes import Verdict

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
