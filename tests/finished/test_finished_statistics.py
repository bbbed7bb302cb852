"""Tests of finished runs have the values of scipy, and err as often as they say."""

import math

import numpy as np
import pytest
from scipy import stats

from tunediff.finished import statistics

A = np.array([3.2821, 3.2802, 3.2799, 3.2811, 3.2805])
B = np.array([3.2790, 3.2815, 3.2771, 3.2802, 3.2786, 3.2795, 3.2799])
LEVEL, SERIES = 0.05, 3000
REST = [(5, 1.0), (8, 1.0), (8, 3.0), (15, 1.0), (15, 3.0)]


def test_welch_is_that_of_scipy():
    expected = stats.ttest_ind(B, A, equal_var=False)
    found = statistics.compare(A, B, LEVEL)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(expected.confidence_interval(0.95))
    ratios, logs = statistics.compare(A, B, LEVEL, ratios=True), np.log
    expected = stats.ttest_ind(logs(B), logs(A), equal_var=False)
    assert ratios.p == pytest.approx(expected.pvalue)
    assert (ratios.low, ratios.high) == pytest.approx(np.exp(expected.confidence_interval(0.95)))


def test_pairs_are_tested_by_their_differences():
    expected = stats.ttest_rel(B[:5], A)
    found = statistics.compare(A, B[:5], LEVEL, paired=True)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(expected.confidence_interval(0.95))


def test_a_margin_is_tested_as_shifted_values_are():
    expected = stats.ttest_ind(B - 0.001, A, equal_var=False, alternative="less")
    assert statistics.compare(A, B, 0.05, True, bound=0.001).p == pytest.approx(expected.pvalue)


def test_against_a_number_by_t_and_by_z():
    expected = stats.ttest_1samp(B, 3.28, alternative="less")
    assert statistics.against(B, 3.28, LEVEL).p == pytest.approx(expected.pvalue)
    z = (B.mean() - 3.28) / 0.0013 * math.sqrt(len(B))
    found = statistics.against(B, 3.28, LEVEL, sd=0.0013)
    assert (found.method, found.p) == ("z", pytest.approx(stats.norm.cdf(z)))


def test_misses_count_as_longer_than_any():
    b = np.array([5.0, 6.0, math.inf, math.inf])
    a = np.array([7.0, 8.0, 9.0, math.inf])
    expected = stats.mannwhitneyu(b, a, alternative="two-sided").pvalue
    assert statistics.compare(a, b, LEVEL).p == pytest.approx(expected)
    b[2] = 8.5
    assert statistics.compare(a, b, LEVEL, paired=True).p == pytest.approx(0.25)  # 3 of 3 signs
    assert statistics.against(b, 7.0, LEVEL).p == 1.0


def test_ranks_say_who_is_ahead_where_most_runs_of_both_sides_miss():
    a, b = np.array([5.0, 6.0, 7.0] + [math.inf] * 5), np.full(8, math.inf)
    assert not statistics.compare(a, b, LEVEL).ahead
    assert statistics.compare(b, a, LEVEL).ahead


def test_values_that_repeat_have_the_noise_of_their_rounding():
    a, b = np.full(3, 0.94), np.full(3, 0.95)
    assert statistics.compare(a, b, LEVEL).p > 0.01
    assert statistics.compare(a, a, LEVEL).p == 1.0


@pytest.mark.parametrize(
    ("count", "noise"),
    [(5, 3.0), *(pytest.param(*row, marks=pytest.mark.nightly) for row in REST)],
)
def test_equal_sets_differ_as_often_as_the_level_says(count, noise):
    draw = np.random.default_rng(count)
    found = [
        statistics.compare(
            draw.normal(10, 1, count), draw.normal(10, noise, count), LEVEL
        ).p < LEVEL
        for _ in range(SERIES)
    ]  # fmt: skip
    # plus 0.5 %, and what chance makes of 3,000 series
    assert np.mean(found) <= LEVEL + 0.005 + 2 * math.sqrt(LEVEL / SERIES)


def test_a_margin_that_is_not_met_is_shown_in_at_most_the_level():
    draw = np.random.default_rng(1)
    found = [
        statistics.compare(
            draw.normal(10, 1, 8), draw.normal(10.5, 1, 8), LEVEL, True, bound=0.5
        ).p < LEVEL
        for _ in range(SERIES)
    ]  # fmt: skip
    assert np.mean(found) <= LEVEL + 0.005 + 2 * math.sqrt(LEVEL / SERIES)


def test_power_is_that_of_the_noncentral_t():
    # a mean 0.0015 below a target at sd 0.0013, tested at 1 %: simulated in public, 29, 62, 91 %
    for count, power in ((5, 0.29), (8, 0.62), (13, 0.91)):
        found = statistics.power_of(0.0015, 0.0013 / math.sqrt(count), count - 1, 0.01, True)
        assert found == pytest.approx(power, abs=0.005)
    assert statistics.runs_needed(0.0015, 0.0013, 0.01, True, sets=1) == 11
    assert statistics.runs_needed(1e-9, 1.0, 0.05, False) is None
    least = statistics.detectable(1.0, 14.0, 0.05, False)
    assert statistics.power_of(least, 1.0, 14.0, 0.05, False) == pytest.approx(0.8)


def test_tests_after_each_run_reach_a_p_value_more_often():
    assert statistics.p_if_repeated(0.01, [3], True) == pytest.approx(0.01, abs=0.002)
    found = [statistics.p_if_repeated(0.01, [count], True) for count in (10, 20, 40)]
    assert found == pytest.approx([0.039, 0.056, 0.073], abs=0.004)
    assert statistics.p_if_repeated(0.05, [12, 12], False) > 0.1
    by_blocks = statistics.p_if_repeated(0.01, [400], True)  # as many series as fit into memory
    assert 0.1 < by_blocks < 0.2


def test_ranks_have_intervals():
    draw = np.random.default_rng(0)
    sets = [draw.normal(mean, 1, 20) for mean in (0.0, 0.1, 9.0)]
    places, ahead = zip(*statistics.ranks(sets, np.mean), strict=True)
    assert [place[1:] for place in places] == [[1, 2], [1, 2], [3, 3]]
    assert (places[2][0], ahead[2]) == (3, None)
