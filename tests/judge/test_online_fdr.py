"""The level of each comparison of a chain."""

import numpy as np
import pytest
from scipy import special

from tunediff.judge.ledger import ZETA, level_of


def test_levels_are_those_of_the_formula():
    assert pytest.approx(special.zeta(1.6)) == ZETA
    first = 0.5 * 0.05 / special.zeta(1.6)
    assert level_of([], 0.05) == pytest.approx(first)
    assert level_of([False], 0.05) == pytest.approx(first * 2**-1.6)
    assert level_of([True], 0.05) == pytest.approx(first * 2**-1.6 + 0.025 / special.zeta(1.6))
    third = first * 3**-1.6 + (0.025 * 2**-1.6 + 0.05) / special.zeta(1.6)
    assert level_of([True, True], 0.05) == pytest.approx(third)


def test_what_is_spent_stays_below_the_budget_for_all_that_was_kept():
    """The levels' sum is at most the budget times the number kept, or one: LORD++'s condition."""
    rng = np.random.default_rng(0)
    for share in (0.0, 0.05, 0.5):
        kept, spent = [], 0.0
        for _ in range(300):
            spent += level_of(kept, 0.05)
            kept.append(bool(rng.random() < share))
            assert spent <= 0.05 * max(1, sum(kept)) + 1e-12


def test_few_of_the_kept_changes_are_none():
    """A hundred proposals of which ten are gains of four standard errors, by one-sided tests."""
    rng, false_shares, found = np.random.default_rng(2), [], 0
    for _ in range(150):
        gains = rng.permutation([4.0] * 10 + [0.0] * 90)
        kept = []
        for gain in gains:
            kept.append(bool(special.ndtr(-gain - rng.standard_normal()) < level_of(kept, 0.05)))
        false = sum(one for one, gain in zip(kept, gains, strict=True) if not gain)
        false_shares.append(false / max(1, sum(kept)))
        found += sum(kept) - false
    assert np.mean(false_shares) < 0.06
    assert found / 150 > 6
