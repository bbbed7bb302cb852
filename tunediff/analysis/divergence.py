"""Count runs that diverged to numbers, and test whether one side diverges more often.

A run whose loss ends at 10⁶ has failed as one that ends at NaN has: it says nothing about the noise
of its configuration, and it blinds a t-test, whose estimate of the noise it determines. So such
runs are counted. The counts are tested by the exact binomial distribution: k of n runs of one side
diverged and none of the other's is evidence where a configuration that diverges on at most `SOUND`
of its seeds would show it with a small probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

Values = NDArray[np.float64]
FACTOR = 100.0
"""How many times as large as the median of a side, the smaller of both, a diverged value is. The
learning rate finders of fastai and Lightning end at a loss of four times the best one; a value that
counts in a verdict has to be worse than any noise."""
SOUND = 0.05
"""Share of seeds on which a configuration may diverge that is no worse than one that does not."""
SHARE = 0.2
"""Share of a comparison's error on each side that the test of the counts may have; a comparison of
runs of which some diverged has this error in place of the t-test's, which sees only noise there."""


class Divergence(NamedTuple):
    """How many runs of the baseline and of a challenger diverged, of the rounds that both have."""

    baseline: int = 0
    challenger: int = 0
    rounds: int = 0

    def decided(self, level: float) -> bool:
        """Return whether one side diverges more often; `level`: chance of any wrong verdict."""
        return self._of_one_side >= _needed(self.rounds, level)

    def undecided(self, level: float, max_rounds: int) -> bool:
        """Return whether further rounds would decide it if the same share of runs diverges."""
        expected = (
            (rounds, int(self._of_one_side * rounds / self.rounds))
            for rounds in range(self.rounds + 1, max_rounds + 1)
        )
        return any(count >= _needed(rounds, level) for rounds, count in expected)

    @property
    def _of_one_side(self) -> int:
        """Return the diverged runs of one side; 0 if both have some."""
        return (
            max(self.baseline, self.challenger) if min(self.baseline, self.challenger) == 0 else 0
        )


def diverged(sides: Sequence[Values], lower_is_better: bool) -> list[NDArray[np.bool_]]:
    """Return which values of each side are those of runs that diverged."""
    # Of an even number the lower one of the two in the middle: half of them may have diverged
    usual = min(np.quantile(np.abs(side), 0.5, method="lower") for side in sides)
    return [((side if lower_is_better else -side) > FACTOR * usual) & (usual > 0) for side in sides]


def divergence(baseline: Values, challenger: Values, lower_is_better: bool) -> Divergence:
    """Count the diverged runs of two sides with the same seeds, all values finite."""
    of_baseline, of_challenger = diverged([baseline, challenger], lower_is_better)
    return Divergence(int(of_baseline.sum()), int(of_challenger.sum()), len(baseline))


def _needed(rounds: int, level: float) -> int:
    """Return how many of so many runs have to diverge, and none of the other side's: the least
    number with a binomial probability within the test's error."""
    counts = np.arange(1, rounds + 1)
    unlikely = special.bdtrc(counts - 1, rounds, SOUND) <= SHARE * level
    return int(counts[unlikely][0]) if unlikely.any() else rounds + 1
