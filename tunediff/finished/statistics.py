"""Tests of finished runs: unpaired, paired, against a number, and what they could have found.

Nothing decided here when a run was made, so no error is spent over looks; `p_if_repeated` says
what a p-value is worth if somebody tested after every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special  # scipy.stats takes seconds to import: only ranks need it

from tunediff.analysis.statistics import printed_step, quantile

POWER = 0.8
"""Probability with which `detectable` and `runs_needed` mean that a difference is found."""
FIRST_TEST, SIMULATIONS, RESAMPLES = 3, 20_000, 4_000
"""Runs before which nobody tests; simulated series of tests; resamples of a bootstrap."""
MOST_RUNS = 100_000
Values = NDArray[np.float64]


class Test(NamedTuple):
    """The result of one test of a difference of means, or of a mean from a number."""

    method: str
    """`welch`, `paired_t`, `one_sample_t`, `z`, `rank_sum` or `sign`."""
    estimate: float
    """Difference, or ratio of geometric means; NaN: a test by ranks has none."""
    low: float
    """Its confidence interval of 1 − level; of a one-sided test 1 − 2 × level."""
    high: float
    p: float
    """Two-sided; one-sided for «is smaller» where that was asked."""
    freedom: float = math.nan
    error: float = math.nan
    """Degrees of freedom and standard error of the difference, of its logarithm for a ratio."""
    ratios: bool = False
    lead: int = 0
    """By ranks: comparisons of two runs in which B is smaller, less those in which it is larger."""


def _mean_error(values: Values, step: float) -> float:
    """Return the standard error of a mean. Values that repeat themselves are rounded to `step`,
    whose error (uniform, step/√12) is the least noise they have."""
    return max(float(values.std(ddof=1)), step / math.sqrt(12)) / math.sqrt(len(values))


def _test(
    method: str, offset: float, error: float, freedom: float, level: float, one_sided: bool,
    bound: float = 0.0,
) -> Test:  # fmt: skip
    """Return the t-test (freedom = ∞: z-test) of an offset against `bound`, which is smaller for a
    one-sided one."""
    t = (offset - bound) / error
    below = special.ndtr(t) if math.isinf(freedom) else special.stdtr(freedom, t)
    p = float(below) if one_sided else 2 * float(min(below, 1 - below))
    sides = 1 if one_sided else 2
    limit = (
        -float(special.ndtri(level / sides))
        if math.isinf(freedom)
        else quantile(1 - level / sides, freedom)
    )
    half = limit * error
    return Test(method, offset, offset - half, offset + half, min(1.0, p), freedom, error)


def compare(
    a: Values, b: Values, level: float, one_sided: bool = False, ratios: bool = False,
    paired: bool = False, bound: float = 0.0,
) -> Test:  # fmt: skip
    """Test whether B's mean differs from A's: Welch's t-test, of pairs Student's.

    a, b: values of at least two runs each; infinite ones, which are longer than any, are compared
    by ranks (Mann–Whitney), pairs by their signs. ratios: of geometric means, for positive values. bound: the
    difference, or ratio − 1, that a one-sided test shows B to be below. Source of the degrees of
    freedom: B. L. Welch, Biometrika 34 (1947), 28–35.
    """
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return _by_ranks(a, b, one_sided, paired)
    step = printed_step(np.concatenate([a, b]))
    steps = [step / float(side.mean()) if ratios else step for side in (a, b)]
    x, y = (np.log(a), np.log(b)) if ratios else (a, b)
    offset = float(y.mean() - x.mean())
    if paired:
        error, freedom = _mean_error(y - x, math.hypot(*steps)), len(x) - 1.0
    else:
        errors = [_mean_error(side, of) for side, of in zip((x, y), steps, strict=True)]
        error = math.hypot(*errors)
        parts = [e**4 / (len(side) - 1) for e, side in zip(errors, (x, y), strict=True)]
        freedom = error**4 / sum(parts) if error else len(x) + len(y) - 2.0
    error = max(error, 1e-300)
    if ratios:
        bound = math.log1p(bound)
    test = _test("paired_t" if paired else "welch", offset, error, freedom, level, one_sided, bound)
    if not ratios:
        return test
    middle, low, high = (math.exp(value) for value in test[1:4])
    return test._replace(estimate=middle, low=low, high=high, ratios=True)


def _by_ranks(a: Values, b: Values, one_sided: bool, paired: bool) -> Test:
    from scipy import stats

    nan, side = math.nan, "less" if one_sided else "two-sided"
    if paired:
        lower, higher = int((b < a).sum()), int((b > a).sum())
        other = "greater" if one_sided else "two-sided"
        p = stats.binomtest(lower, lower + higher, 0.5, other).pvalue if lower + higher else 1.0
        return Test("sign", nan, nan, nan, float(p), lead=lower - higher)
    p = stats.mannwhitneyu(b, a, alternative=side).pvalue
    lead = int((b[:, None] < a).sum()) - int((b[:, None] > a).sum())
    return Test("rank_sum", nan, nan, nan, float(p), lead=lead)


def against(
    values: Values, number: float, level: float, sd: float | None = None, one_sided: bool = True
) -> Test:
    """Test whether a mean is below a number (or differs from it): Student's t-test, or a z-test
    with the given standard deviation of a run."""
    if not np.isfinite(values).all():
        return Test("one_sample_t", math.nan, math.nan, math.nan, 1.0)
    offset, count = float(values.mean()) - number, len(values)
    if sd is not None:
        return _test("z", offset, sd / math.sqrt(count), math.inf, level, one_sided)
    error = _mean_error(values, printed_step(values))
    return _test("one_sample_t", offset, error, count - 1.0, level, one_sided)


# ---- power
def power_of(shift: float, error: float, freedom: float, level: float, one_sided: bool) -> float:
    """Return the probability that a t-test finds a true difference of `shift`.

    Of the other side of a two-sided test nothing counts: that would be the wrong verdict.
    """
    limit = quantile(1 - level / (1 if one_sided else 2), freedom)
    return float(1 - special.nctdtr(freedom, shift / error, limit))


def detectable(error: float, freedom: float, level: float, one_sided: bool) -> float:
    """Return the true difference that a t-test of this standard error finds with `POWER`."""
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

    low, high = 1, 2
    while not finds(high):
        low, high = high, 2 * high
        if high > MOST_RUNS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if finds(middle) else (middle, high)
    return high


# ---- what looking does
def p_if_repeated(p: float, counts: Sequence[int], one_sided: bool) -> float:
    """Return how often equal runs reach `p` if a t-test is made after each run from the third on.

    counts: of runs, of one set (against a number) or of two. Simulated with normal values.
    """
    draw, longest = np.random.default_rng(0), max(counts)
    sums = []
    for count in counts:
        values = draw.standard_normal((SIMULATIONS, count))
        number = np.arange(1, count + 1)
        means = values.cumsum(axis=1) / number
        squares = (values**2).cumsum(axis=1) - number * means**2
        with np.errstate(divide="ignore", invalid="ignore"):
            sums.append((means, squares / (number - 1) / number, number))
    reached = np.zeros(SIMULATIONS, dtype=bool)
    for after in range(min(FIRST_TEST, longest), longest + 1):
        at = [min(after, count) - 1 for count in counts]
        offset = sums[0][0][:, at[0]] - (sums[1][0][:, at[1]] if len(counts) > 1 else 0.0)
        variances = [of[1][:, i] for of, i in zip(sums, at, strict=True)]
        variance = np.sum(variances, axis=0)
        parts = [v**2 / max(1, i) for v, i in zip(variances, at, strict=True)]
        t = offset / np.sqrt(variance)
        below = special.stdtr(variance**2 / np.sum(parts, axis=0), t)
        reached |= (below if one_sided else 2 * np.minimum(below, 1 - below)) <= p
    return float(reached.mean())


# ---- ranks
class Rank(NamedTuple):
    """The place of one set among all, the smallest first, and what chance leaves of it."""

    rank: int
    low: int
    """Places in 95 % of resamples."""
    high: int
    ahead_of_next: float | None
    """Share of resamples in which it is before the next one; None: of the last."""


def ranks(
    sets: Sequence[Values], score: Callable[[Sequence[Values]], Values], seed: int = 0
) -> list[Rank]:
    """Return the place of each set by `score` (smaller is better, one number a set) with intervals
    by a bootstrap: the runs of each set are drawn again, with replacement."""
    draw = np.random.default_rng(seed)
    scores = score(sets)
    order = np.argsort(scores, kind="stable")
    places = np.empty((RESAMPLES, len(sets)), dtype=int)
    resampled = np.empty((RESAMPLES, len(sets)))
    for i in range(RESAMPLES):
        resampled[i] = score([draw.choice(values, len(values)) for values in sets])
        places[i, np.argsort(resampled[i], kind="stable")] = np.arange(1, len(sets) + 1)
    result: list[Rank | None] = [None] * len(sets)
    for place, index in enumerate(order):
        low, high = np.quantile(places[:, index], [0.025, 0.975], method="nearest")
        ahead = None
        if place + 1 < len(order):
            behind = resampled[:, order[place + 1]]
            ahead = float((resampled[:, index] < behind).mean())
        result[index] = Rank(place + 1, int(low), int(high), ahead)
    return [rank for rank in result if rank is not None]


def medians(sets: Sequence[Values]) -> Values:
    """Return the median of each set; misses are infinite."""
    return np.array([np.median(values) for values in sets])


def means(sets: Sequence[Values]) -> Values:
    """Return the mean of each set; infinite with a miss."""
    return np.array([values.mean() for values in sets])
