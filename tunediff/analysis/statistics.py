"""Separate differences from noise: intervals, paired comparisons, Holm's correction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray
from scipy import special  # scipy.stats takes seconds to import

from tunediff.analysis.divergence import Divergence
from tunediff.core.outcomes import Verdict

LEVEL = 0.05
"""Upper bound on the probability that any verdict of a comparison is wrong if nothing differs."""
ROUGH_FREEDOM = 8
"""Degrees of freedom below which the 95 % interval of a deviation exceeds twice its value."""
FEW_DIGITS = 8
"""Significant digits up to which values may repeat themselves by chance, such as an accuracy."""
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
    names = dict.fromkeys(name for block in blocks for name in block if block[name] is not None)
    return {name: sum(block.get(name) or 0.0 for block in blocks) for name in names}


def sd(values: Sequence[float]) -> float | None:
    """Return the standard deviation of a sample; None for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval; `low` and `high` are None for a single run."""

    mean: float
    low: float | None
    high: float | None
    at_least: bool = False
    """Whether only a lower bound is known, `bound`."""

    @property
    def bound(self) -> float | None:
        """Return the lower bound if there is no upper one: the low end, or one run's value."""
        if not self.at_least:
            return None
        return self.mean if self.low is None else self.low


def estimate(
    values: Sequence[float], ratios: bool = False, errors: bool = False
) -> Estimate | None:
    """Return the mean (geometric for `ratios`) with its 95 % interval, or standard `errors`."""
    if not values:
        return None
    sample = np.log(values) if ratios else np.asarray(values, dtype=float)
    middle, back = float(sample.mean()), math.exp if ratios else float
    if len(values) < 2:
        return Estimate(back(middle), None, None)
    half = float(sample.std(ddof=1)) / math.sqrt(len(values))
    half *= 1.0 if errors else quantile(1 - LEVEL / 2, len(values) - 1)
    return Estimate(back(middle), back(middle - half), back(middle + half))


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of one configuration from the baseline."""

    estimate: float | None = None
    """Ratio of geometric means, or difference of means if a value is not positive, or None."""
    low: float | None = None
    """Lower end of its own 95 % confidence interval; None: fewer than two common seeds."""
    high: float | None = None
    p: float | None = None
    """Two-sided p-value of this comparison alone."""
    p_holm: float | None = None
    """The p-value after Holm's correction over all configurations compared with the baseline."""
    verdict: Verdict = Verdict.TOO_FEW
    """`better` or `worse` where `p_holm` is below 0.05, else `no_difference`; `fails` where a run
    failed, whose configuration is not tested."""
    sd: float | None = None
    """Standard deviation of two runs' difference on one seed: ratio − 1, or in units."""
    resolution: float | None = None
    """The smallest difference that would be significant now: a ratio − 1 or in units."""
    diverged: Divergence = dataclasses.field(default_factory=Divergence)
    """Runs that diverged to numbers, which decide by their count."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """The scale on which values are compared: logarithms if differences are ratios.

    Noise and effects of distances and rates are proportional to them, so they are compared by
    ratios where all values are positive.
    """

    ratios: bool

    @classmethod
    def of(cls, values: NDArray[np.float64], ratios: bool) -> Scale:
        """Return the scale of values, NaN for missing ones; `ratios`: whether these are allowed."""
        return cls(ratios and bool((values[np.isfinite(values)] > 0).all()))

    def to_model(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log(values) if self.ratios else values

    def back(self, offset: float) -> float:
        """Return a difference on this scale as a ratio, or as it is."""
        return math.exp(min(offset, 700.0)) if self.ratios else float(offset)

    def size(self, offset: float) -> float:
        """Return the size of a difference as a ratio − 1, or in units."""
        return math.expm1(min(offset, 700.0)) if self.ratios else float(offset)

    def difference(self, offset: float, half: float = math.nan) -> Difference:
        """Return a difference on this scale, with an interval of ± `half`; NaN: not known."""
        middle, low, high = (
            self.back(end) if math.isfinite(end) else None
            for end in (offset, offset - half, offset + half)
        )
        return Difference(middle, low, high)


def differences(
    values: NDArray[np.float64], lower_is_better: bool = True, ratios: bool = True
) -> tuple[list[Difference], bool]:
    """Test each row of `values` [configurations, seeds] against row 0, the baseline; NaN: no run.

    Returns one `Difference` per row but the first; and whether estimates are ratios, which they are
    if `ratios` are allowed and all values are positive.

    Configurations may differ in noise, so each is compared by a paired t-test of its own, over the
    common seeds. Holm's correction: S. Holm, Scand. J. Statist. 6 (1979), 65–70.
    """
    scale, step = Scale.of(values, ratios), value_step(values)
    base, *rows = scale.to_model(values)
    tests, p_values = list[tuple[float, float, int]](), list[float | None]()
    for row in rows:
        pair = np.stack([base, row])[:, np.isfinite(base) & np.isfinite(row)]
        seeds, offset, error, p = pair.shape[1], math.nan, math.nan, None
        if seeds:
            offset = float((pair[1] - pair[0]).mean())
        if seeds > 1:
            error = float(paired_sds(pair, step, scale.ratios)[0]) / math.sqrt(seeds)
            p = float(offset == 0)  # of values that repeat exactly
            if error > 0:
                p = float(2 * special.stdtr(seeds - 1, -abs(offset) / error))
        tests.append((offset, error, seeds - 1))
        p_values.append(p)

    # A difference must exceed the quantile of the first step of Holm's correction
    first = 1 - LEVEL / 2 / max(1, sum(p is not None for p in p_values))
    results = []
    for (offset, error, freedom), p, p_holm in zip(tests, p_values, holm(p_values), strict=True):
        if p is None or p_holm is None:
            results.append(scale.difference(offset))
            continue
        verdict = Verdict.BETTER if (offset < 0) == lower_is_better else Verdict.WORSE
        result = dataclasses.replace(
            scale.difference(offset, quantile(1 - LEVEL / 2, freedom) * error),
            p=p,
            p_holm=p_holm,
            verdict=verdict if p_holm < LEVEL else Verdict.NO_DIFFERENCE,
            sd=scale.size(error * math.sqrt(freedom + 1)),
            resolution=scale.size(quantile(first, freedom) * error),
        )
        results.append(result)
    return results, scale.ratios


def paired_sds(y: NDArray[np.float64], step: float, ratios: bool) -> NDArray[np.float64]:
    """Return the standard deviation of the difference of each row from row 0 on one seed.

    `y` [configurations, seeds], at least two seeds, all finite, logarithms for `ratios`. It has a
    floor, the rounding of both values to multiples of `step`, each with step/√12: equal differences
    of a coarse metric do not show that there is no noise.
    """
    rounding = step / math.sqrt(12) / (np.exp(y.mean(axis=1)) if ratios else np.ones(len(y)))
    return np.asarray(
        np.maximum((y[1:] - y[0]).std(axis=1, ddof=1), np.hypot(rounding[1:], rounding[0]))
    )


def value_step(values: NDArray[np.float64]) -> float:
    """Return the step of values that are whole multiples of one, 1/n for n items; else 0.

    NaN: missing. Values may be rounded to single precision.
    """
    distinct = np.unique(values[np.isfinite(values)])
    tolerance = 1e-6 * float(np.abs(distinct).max(initial=0.0))
    spacings = np.diff(distinct)
    if not (spacings > tolerance).any():
        return 0.0
    off, smallest = distinct - distinct[0], float(spacings[spacings > tolerance].min())
    # No two values may be neighbours: try parts of the smallest spacing.
    for parts in range(1, 13):
        counts = np.rint(off * parts / smallest)
        step = float(off @ counts / (counts @ counts))
        if np.abs(off - counts * step).max() <= tolerance:
            return step
    return 0.0


def printed_step(values: NDArray[np.float64]) -> float:
    """Return the step to which values are rounded: that of `value_step`, or of their decimals."""
    finite = values[np.isfinite(values)].tolist()
    decimals = [-int(Decimal(repr(value)).normalize().as_tuple().exponent) for value in finite]
    return max(value_step(values), 10.0 ** -max(0, *decimals, 0)) if finite else 0.0


def quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t distribution."""
    return float(special.stdtrit(freedom, probability))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Correct p-values by Holm's method: the smallest times m, the next m−1, …, never falling."""
    ranked = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    least = 0.0
    for rank, (p, place) in enumerate(ranked):
        least = max(least, min(1.0, p * (len(ranked) - rank)))
        adjusted[place] = least
    return adjusted


def has_many_digits(value: float | None) -> bool:
    """Return whether a value cannot be the same twice by chance."""
    return value is not None and len(repr(value).strip("-0.").replace(".", "")) > FEW_DIGITS
