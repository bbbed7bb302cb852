"""The mean effect over several machines, with values that others have computed."""

import math

import pytest

from tunediff.analysis.pooling import pool

BCG_EFFECTS = [
    -0.8893, -1.5854, -1.3481, -1.4416, -0.2175, -0.7861, -1.6209, 0.0120, -0.4694, -1.3713, -0.3394, 0.4459, -0.0173,
]  # fmt: skip
BCG_VARIANCES = [
    0.3256, 0.1946, 0.4154, 0.0200, 0.0512, 0.0069, 0.2230, 0.0040, 0.0564, 0.0730, 0.0124, 0.5325, 0.0714,
]  # fmt: skip
"""Log risk ratios of thirteen trials of the BCG vaccine (Colditz et al., JAMA 271 (1994), 698), with their variances, a
common example of meta-analyses: metafor's `rma(method="DL")` gives −0.7141 ± 0.1787, τ² = 0.3088, I² = 92.12 %."""


def test_random_effects_of_a_published_example():
    pooled = pool(BCG_EFFECTS, [math.sqrt(variance) for variance in BCG_VARIANCES])
    assert pooled.mean == pytest.approx(-0.7141, abs=5e-4)
    assert pooled.error == pytest.approx(0.1787, abs=5e-4)
    assert pooled.between_sd**2 == pytest.approx(0.3088, abs=1e-3)
    assert pooled.heterogeneity == pytest.approx(0.9212, abs=1e-3)
    assert pooled.low < pooled.mean - 2.17 * pooled.error, "Student's t with twelve degrees of freedom"


def test_machines_that_agree_too_well_do_not_narrow_the_interval():
    pooled = pool([-0.1, -0.1, -0.1], [0.02, 0.02, 0.02])
    half = 4.3027 * 0.02 / math.sqrt(3)  # t of two degrees of freedom, 97.5 %
    assert (pooled.low, pooled.high) == pytest.approx((-0.1 - half, -0.1 + half), abs=1e-5)
    assert (pooled.between_sd, pooled.heterogeneity) == (0, 0)
