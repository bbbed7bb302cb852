"""Pool the effects that several machines have measured, by a model of random effects.

Each machine measures the same effect with an error of its own, and machines may differ in the
effect itself: an optimizer's fused kernel gains more on one GPU than on another. The mean over
machines, with the variance between them, is that of R. DerSimonian and N. Laird, Controlled Clin.
Trials 7 (1986), 177–188; its interval is that of G. Knapp and J. Hartung, Stat. Med. 22 (2003),
2693–2710, by Student's t with one degree of freedom less than there are machines, and never
narrower than DerSimonian and Laird's variance makes it (C. Röver et al., BMC Med. Res. Methodol. 15
(2015), 99). Nothing that tunediff depends on has it; statsmodels' `combine_effects` has the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tunediff.analysis.statistics import LEVEL, quantile


@dataclasses.dataclass(frozen=True)
class PooledEffect:
    """The mean effect over machines, on the scale of the effects that were pooled."""

    mean: float
    low: float
    high: float
    """Its interval."""
    error: float
    """Standard error of DerSimonian and Laird."""
    between_sd: float
    """Standard deviation of the effect between machines."""
    heterogeneity: float
    """Share of the variance of the effects that machines make (I²), 0 to 1."""


def pool(effects: Sequence[float], errors: Sequence[float], level: float = LEVEL) -> PooledEffect:
    """Return the mean of at least two effects, whose standard errors are above 0.

    The interval holds with probability 1 − `level`.
    """
    y, v = np.asarray(effects, float), np.asarray(errors, float) ** 2
    freedom = len(y) - 1

    # Cochran's Q of the mean with fixed effects, and the variance between machines by its moment
    fixed = 1 / v
    spread = float((fixed * (y - (fixed * y).sum() / fixed.sum()) ** 2).sum())
    scale = float(fixed.sum() - (fixed**2).sum() / fixed.sum())
    between = max(0.0, (spread - freedom) / scale)

    weights = 1 / (v + between)
    mean = float((weights * y).sum() / weights.sum())
    error = math.sqrt(1 / float(weights.sum()))
    adjustment = max(1.0, float((weights * (y - mean) ** 2).sum()) / freedom)
    half = quantile(1 - level / 2, freedom) * error * math.sqrt(adjustment)
    heterogeneity = max(0.0, 1 - freedom / spread) if spread > 0 else 0.0
    return PooledEffect(mean, mean - half, mean + half, error, math.sqrt(between), heterogeneity)
