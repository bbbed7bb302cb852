"""Separate differences from noise: means with intervals, paired comparisons over seeds, Holm's correction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special  # scipy.stats takes seconds to import

LEVEL = 0.05
"""Upper bound on the probability that any verdict of a comparison is wrong if nothing differs."""
BETTER, WORSE, SAME = "better", "worse", "no difference larger than the noise"
BASELINE, TOO_FEW = "baseline", "too few runs"
ROUGH_FREEDOM = 8
"""Degrees of freedom below which a standard deviation is rough: its 95 % interval, sd·√(freedom/χ²), reaches
beyond twice its value."""
WIDEST = 10.0
"""Largest ratio of the ends of an interval of a ratio: a wider one is no result."""


def is_wide(low: float | None, high: float | None) -> bool:
    """Return whether an interval of ratios is too wide to say anything."""
    return low is not None and high is not None and high > WIDEST * low


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None without values."""
    return float(np.mean(values)) if values else None


def totals(blocks: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the sum of each number over all blocks that have it."""
    sums: dict[str, float] = {}
    for block in blocks:
        for name, value in block.items():
            if value is not None:
                sums[name] = sums.get(name, 0.0) + value
    return sums


def sd(values: Sequence[float]) -> float | None:
    """Return the standard deviation of a sample; None for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean with its interval; `low` and `high` are None for a single run."""

    mean: float
    low: float | None
    high: float | None
    runs: int
    at_least: bool = False
    """Whether only a lower bound is known, `bound`; then `high` is None."""

    @property
    def bound(self) -> float | None:
        """Return the lower bound if there is no upper one: the low end, or the value of a single run; else None."""
        if not self.at_least:
            return None
        return self.mean if self.low is None else self.low


def estimate(values: Sequence[float], ratios: bool = False, errors: bool = False) -> Estimate | None:
    """Return the mean (geometric for `ratios`) with its 95 % interval, or for `errors` ± one standard error."""
    if not values:
        return None
    sample = np.log(values) if ratios else np.asarray(values, dtype=float)
    middle, back = float(sample.mean()), math.exp if ratios else float
    if len(values) < 2:
        return Estimate(back(middle), None, None, 1)
    half = float(sample.std(ddof=1)) / math.sqrt(len(values))
    half *= 1.0 if errors else quantile(1 - LEVEL / 2, len(values) - 1)
    return Estimate(back(middle), back(middle - half), back(middle + half), len(values))


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of one configuration from the baseline."""

    estimate: float | None = None
    """Ratio of the geometric means, or difference of the means if a value is not positive; None: no common seed."""
    low: float | None = None
    """Lower end of its 95 % confidence interval, for this comparison alone; None: fewer than two common seeds, or a
    few with equal differences."""
    high: float | None = None
    p: float | None = None
    """Two-sided p-value of this comparison alone."""
    p_holm: float | None = None
    """The p-value after Holm's correction over all configurations compared with the baseline."""
    verdict: str = TOO_FEW
    """`better` or `worse` where `p_holm` is below 0.05, else `no difference larger than the noise`."""


def differences(
    values: NDArray[np.float64], lower_is_better: bool = True, ratios: bool = True
) -> tuple[list[Difference], float | None, bool]:
    """Test each row of `values` [configurations, seeds] against row 0, the baseline; NaN: the run is missing.

    Returns one `Difference` per row but the first; the smallest difference that would be significant in
    Holm's first step, as a ratio − 1 or in the metric's units (None: not known); and whether estimates are
    ratios. They are if `ratios` are allowed and all values are positive: the model is then one of
    logarithms, since noise and effects of distances and rates are proportional.

    Configurations that have every seed of the baseline are fitted together by value = configuration + seed
    + noise, a randomised block design. The variance of the noise is that of the residuals, with (G−1)(S−1)
    degrees of freedom for G configurations and S seeds; a difference has twice its S-th part. A
    configuration that lacks a seed is compared by a paired t-test on its own. Holm's correction: S. Holm,
    Scand. J. Statist. 6 (1979), 65–70.
    """
    # Seeds of the baseline, and the pooled standard error of a difference
    ratios = ratios and bool((values[np.isfinite(values)] > 0).all())
    y = np.log(values) if ratios else values
    y = y[:, np.isfinite(y[0])]
    seeds = y.shape[1]
    complete = np.isfinite(y).sum(axis=1) == seeds
    pooled, freedom = math.nan, (int(complete.sum()) - 1) * (seeds - 1)
    if freedom > 0:
        pooled = block_sd(y[complete]) / math.sqrt(seeds)

    # One test per configuration
    tested: list[tuple[float, float, int] | None] = []  # difference, its standard error, degrees of freedom
    for row, whole in zip(y[1:], complete[1:], strict=True):
        pairs = (row - y[0])[np.isfinite(row)]
        if len(pairs) == 0:
            tested.append(None)
        elif whole and freedom > 0:
            tested.append((float(pairs.mean()), pooled, freedom))
        elif len(pairs) > 1:
            tested.append((float(pairs.mean()), float(pairs.std(ddof=1)) / math.sqrt(len(pairs)), len(pairs) - 1))
        else:
            tested.append((float(pairs[0]), math.nan, 0))
    # Holm's correction and verdicts
    raw = [None if test is None or _is_untestable(*test) else _p_value(*test) for test in tested]
    judged = zip(tested, raw, holm(raw), strict=True)
    results = [_judged(test, p, p_holm, ratios, lower_is_better) for test, p, p_holm in judged]
    # The smallest difference that would be significant
    many = sum(p is not None for p in raw)
    if not many or freedom <= 0 or _repeats_exactly(max(abs(test[0]) for test in tested if test), pooled, freedom):
        return results, None, ratios
    least = quantile(1 - LEVEL / 2 / many, freedom) * pooled
    return results, math.expm1(least) if ratios else least, ratios


def block_sd(values: NDArray[np.float64]) -> float:
    """Return the standard deviation of the difference of two configurations on one seed, in a randomised block design.

    `values` [configurations, seeds], at least two of each, all finite. The residuals of value = configuration + seed +
    noise have (configurations − 1)(seeds − 1) degrees of freedom; a difference has twice their variance.
    """
    configurations, seeds = values.shape
    residuals = values - values.mean(axis=1, keepdims=True) - values.mean(axis=0) + values.mean()
    return math.sqrt(2 * float((residuals**2).sum()) / ((configurations - 1) * (seeds - 1)))


def _judged(
    test: tuple[float, float, int] | None, p: float | None, p_holm: float | None, ratios: bool, lower_is_better: bool
) -> Difference:
    """Return the result of a test (difference, its standard error, degrees of freedom)."""
    if test is None:
        return Difference()
    back = math.exp if ratios else float
    if p is None or p_holm is None:
        return Difference(back(test[0]))
    half = quantile(1 - LEVEL / 2, test[2]) * test[1]
    verdict = SAME if p_holm >= LEVEL else BETTER if (test[0] < 0) == lower_is_better else WORSE
    return Difference(back(test[0]), back(test[0] - half), back(test[0] + half), p, p_holm, verdict)


def _repeats_exactly(difference: float, error: float, freedom: int) -> bool:
    """Return whether a few differences are equal up to rounding, which does not show that there is no noise.

    Accuracies of a small test set often differ by the same number of items on two or three seeds by chance.
    """
    return freedom < ROUGH_FREEDOM and error <= 1e-9 * abs(difference)


def _is_untestable(difference: float, error: float, freedom: int) -> bool:
    """Return whether the noise of a difference other than 0 is not known."""
    return freedom == 0 or (difference != 0 and _repeats_exactly(difference, error, freedom))


def _p_value(difference: float, error: float, freedom: int) -> float:
    """Return the two-sided p-value of a t-test."""
    if error == 0:  # values that repeat exactly
        return 1.0 if difference == 0 else 0.0
    return float(2 * special.stdtr(freedom, -abs(difference) / error))


def quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t distribution."""
    return float(special.stdtrit(freedom, probability))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Correct p-values by Holm's method: the smallest times m, the next times m−1, …, not falling."""
    ranked = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    least = 0.0
    for rank, (p, place) in enumerate(ranked):
        least = max(least, min(1.0, p * (len(ranked) - rank)))
        adjusted[place] = least
    return adjusted


def anova(samples: Sequence[Sequence[float]]) -> float | None:
    """Return the p-value of the F test over groups of at least two values; None: not possible."""
    groups = [np.asarray(sample) for sample in samples if len(sample) > 1]
    everything = np.concatenate(groups) if groups else np.empty(0)
    between, within = len(groups) - 1, len(everything) - len(groups)
    if between < 1:
        return None
    explained = sum(len(group) * float(group.mean() - everything.mean()) ** 2 for group in groups)
    left = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    if left <= 0:  # values that repeat exactly
        return 0.0 if explained > 0 else 1.0
    return float(special.fdtrc(between, within, (explained / between) / (left / within)))
