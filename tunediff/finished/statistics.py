"""Tests of finished runs: unpaired, paired, against a number, and what they could have found.

Nothing decided here when a run was made, so no error is spent over looks; `p_if_repeated` says
what a p-value is worth if somebody tested after every run.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special  # scipy.stats takes seconds to import: only ranks need it

from tunediff.analysis.statistics import Scale, printed_step, quantile
from tunediff.report.result import Test

POWER = 0.8
"""Probability with which `detectable` and `runs_needed` mean that a difference is found."""
FIRST_TEST, SIMULATIONS, RESAMPLES = 3, 20_000, 4_000
"""Runs before which nobody tests; simulated series of tests; resamples of a bootstrap."""
MOST_RUNS, MOST_DRAWN, BLOCK = 100_000, 20_000_000, 1_000_000
"""Runs that anybody makes; values that simulations draw of a set, in all (fewer series of long
ones) and at a time."""
Values = NDArray[np.float64]


def _mean_error(values: Values, step: float) -> float:
    """Return the standard error of a mean. Values that repeat themselves are rounded to `step`,
    whose error (uniform, step/√12) is the least noise they have."""
    return max(float(values.std(ddof=1)), step / math.sqrt(12)) / math.sqrt(len(values))


def _test(
    method: str, offset: float, error: float, freedom: float, level: float, one_sided: bool,
    bound: float = 0.0, sign: float = 1.0, ratios: bool = False,
) -> Test:  # fmt: skip
    """Return the t-test (freedom = ∞: z-test) of an offset against `bound`: whether it is smaller,
    or for the sign −1 whether its negative is. Its interval is of 1 − level, of a one-sided test of
    1 − 2 × level."""
    t = (sign * offset - bound) / error
    p = float(special.stdtr(freedom, t if one_sided else -abs(t))) * (1 if one_sided else 2)
    half, scale = quantile(1 - level / (1 if one_sided else 2), freedom) * error, Scale(ratios)
    return Test(
        kind="ratio" if scale.ratios else "difference", value=scale.back(offset),
        low=scale.back(offset - half), high=scale.back(offset + half),
        resolution=scale.size(detectable(error, freedom, level, one_sided)),
        p=p, method=method, shown=p < level, ahead=t < 0,
    )  # fmt: skip


def compare(
    a: Values, b: Values, level: float, one_sided: bool = False, *, ratios: bool = False,
    paired: bool = False, bound: float = 0.0, sign: float = 1.0,
) -> Test:  # fmt: skip
    """Test whether B's mean differs from A's: Welch's t-test, of pairs Student's.

    a, b: values of at least two runs each; infinite ones, which are worse than any, are compared by
    ranks (Mann–Whitney), pairs by their signs. ratios: of geometric means, for positive values.
    bound: the difference that a one-sided test shows B to be below. sign: −1 where larger values
    are better. Source of the degrees of freedom: B. L. Welch, Biometrika 34 (1947), 28–35.
    """
    both = np.concatenate([a, b])
    if not np.isfinite(both).all():
        return _by_ranks(sign * a, sign * b - bound, level, one_sided, paired)
    scale, step = Scale(ratios), printed_step(both)
    x, y = scale.to_model(a), scale.to_model(b)
    steps = [step / float(side.mean()) if ratios else step for side in (a, b)]
    samples = [(y - x, math.hypot(*steps))] if paired else [(x, steps[0]), (y, steps[1])]
    errors = [_mean_error(*sample) for sample in samples]
    error = math.hypot(*errors)
    freedom = 1 / sum(
        (part / error) ** 4 / (len(values) - 1)
        for part, (values, _) in zip(errors, samples, strict=True)
    )
    offset, method = float(y.mean() - x.mean()), "paired_t" if paired else "welch"
    return _test(method, offset, error, freedom, level, one_sided, bound, sign, ratios)


def _by_ranks(a: Values, b: Values, level: float, one_sided: bool, paired: bool) -> Test:
    from scipy import stats

    sides = (b, a) if paired else (b[:, None], a)
    lower, higher = int(np.less(*sides).sum()), int(np.greater(*sides).sum())
    if paired:
        other = "greater" if one_sided else "two-sided"
        p = stats.binomtest(lower, max(1, lower + higher), 0.5, other).pvalue
    else:
        # The normal approximation, which ties would need, is too small for few runs
        p = stats.mannwhitneyu(
            b, a, alternative="less" if one_sided else "two-sided",
            method=stats.PermutationMethod(n_resamples=SIMULATIONS)
            if math.comb(len(a) + len(b), len(a)) <= SIMULATIONS
            else "auto",
        ).pvalue  # fmt: skip
    return Test(
        kind="difference", p=float(p), method="sign" if paired else "rank_sum",
        shown=bool(p < level), ahead=lower > higher,
    )  # fmt: skip


def against(
    values: Values, number: float, level: float, sd: float | None = None, sign: float = 1.0
) -> Test:
    """Test whether a mean is below a number (above it for the sign −1): Student's t-test, or a
    z-test with the given standard deviation of a run. An infinite mean never is."""
    if not np.isfinite(values).all():
        return Test(kind="difference", p=1.0, method="one_sample_t", shown=False, ahead=False)
    method, freedom = "one_sample_t", len(values) - 1.0
    error = _mean_error(values, printed_step(values))
    if sd is not None:
        method, freedom, error = "z", math.inf, sd / math.sqrt(len(values))
    return _test(method, float(values.mean()) - number, error, freedom, level, True, sign=sign)


# ---- power
def power_of(shift: float, error: float, freedom: float, level: float, one_sided: bool) -> float:
    """Return the probability that a t-test finds a true difference of `shift`.

    Of the other side of a two-sided test nothing counts: that would be the wrong verdict.
    """
    limit = quantile(1 - level / (1 if one_sided else 2), freedom)
    return float(1 - special.nctdtr(freedom, shift / error, limit))


def detectable(error: float, freedom: float, level: float, one_sided: bool) -> float:
    """Return the true difference that a test of this standard error finds with `POWER`."""
    freedom = min(freedom, 1e6)  # from there Student's distribution is the normal one
    limit = quantile(1 - level / (1 if one_sided else 2), freedom)
    return float(special.nctdtrinc(freedom, 1 - POWER, limit)) * error


def runs_needed(
    margin: float, sd: float, level: float, one_sided: bool, sets: int = 2
) -> int | None:
    """Return how many runs (of each of two sets, or of one) find `margin` with `POWER`; None: more
    than `MOST_RUNS`. sd: of a run."""

    def finds(runs: int) -> bool:
        error, freedom = sd * math.sqrt(sets / runs), float(sets * (runs - 1))
        return power_of(margin, error, freedom, level, one_sided) >= POWER

    runs = 2 + bisect.bisect_left(range(2, MOST_RUNS), True, key=finds)
    return runs if runs < MOST_RUNS else None


# ---- what looking does
def p_if_repeated(p: float, counts: Sequence[int], one_sided: bool) -> float:
    """Return how often equal runs reach `p` if a t-test is made after each run from the third on.

    counts: of runs, of one set (against a number) or of two. Simulated with normal values, in
    blocks: memory does not grow with the runs.
    """
    draw, longest = np.random.default_rng(0), max(counts)
    series, block = min(SIMULATIONS, MOST_DRAWN // longest), max(1, BLOCK // longest)
    return sum(
        _reached(p, counts, one_sided, min(block, series - begin), draw)
        for begin in range(0, series, block)
    ) / series  # fmt: skip


def _reached(
    p: float, counts: Sequence[int], one_sided: bool, series: int, draw: np.random.Generator
) -> int:
    """Return how many of so many simulated series reach `p` in one of their tests."""
    longest = max(counts)
    offset, variance, parts = (np.zeros((series, 1)) for _ in range(3))
    for sign, count in zip((1, -1), counts, strict=False):
        values, number = draw.standard_normal((series, count)), np.arange(1, count + 1)
        means = values.cumsum(axis=1) / number
        squares = (values**2).cumsum(axis=1) - number * means**2
        # Tests [series, number of runs]; the shorter set has all of its runs in the last ones
        at = np.minimum(np.arange(min(FIRST_TEST, longest), longest + 1), count) - 1
        error = (squares[:, at] / np.maximum(at, 1)) / (at + 1)
        offset, variance = offset + sign * means[:, at], variance + error
        parts = parts + error**2 / np.maximum(at, 1)
    t = offset / np.sqrt(variance)
    t, tail = (t, p) if one_sided else (-np.abs(t), p / 2)
    # Student's distribution is slow to compute, and has wider tails than the normal one
    near = t <= (special.ndtri(tail) if tail < 0.5 else math.inf)
    reached = np.zeros_like(near)
    reached[near] = special.stdtr((variance**2 / parts)[near], t[near]) <= tail
    return int(reached.any(axis=1).sum())


# ---- ranks
def ranks(
    sets: Sequence[Values], score: Callable[..., Any]
) -> list[tuple[list[int], float | None]]:
    """Return of each set its place and the ends of the places in 95 % of resamples, the smallest
    first; and in which share of them it is before the next one, None: of the last.

    score: `np.mean` or `np.median` of the runs. Resamples are those of a bootstrap: the runs of each
    set are drawn again, with replacement.
    """
    draw = np.random.default_rng(0)
    drawn = np.stack([
        score(draw.choice(values, (RESAMPLES, len(values))), axis=1) for values in sets
    ])  # fmt: skip
    places = 1 + drawn.argsort(axis=0, kind="stable").argsort(axis=0)
    ends = np.quantile(places, [0.025, 0.975], axis=1, method="nearest").T.astype(int).tolist()
    order = np.argsort([score(values) for values in sets], kind="stable").tolist()
    ahead = {
        one: float((drawn[one] < drawn[behind]).mean()) for one, behind in itertools.pairwise(order)
    }
    return [
        ([1 + order.index(index), *interval], ahead.get(index))
        for index, interval in enumerate(ends)
    ]
