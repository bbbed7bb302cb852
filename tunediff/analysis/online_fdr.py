"""Spend one error budget over an open chain of comparisons: online false discovery control.

Who tries a hundred changes at a level of 5 % keeps two or three that change nothing. Here each
comparison gets a level of its own, so that at any time at most a share of `budget` of all changes
that were kept is expected to be none. The rule is LORD++: A. Ramdas, F. Yang, M. J. Wainwright,
M. I. Jordan, Online control of the false discovery rate with decaying memory, NeurIPS 2017. Every
kept change earns level for the next ones; a long series without any makes them stricter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RULE = "LORD++"
POWER = 1.6
"""The share of the budget that is spent j comparisons later falls as j^−1.6, the sequence that A.
Ramdas et al. use for SAFFRON (ICML 2018): most of it is spent soon."""
ZETA = 2.2857656886
"""Riemann's zeta function of `POWER`: the shares sum to 1."""
FIRST = 0.5
"""Share of the budget that is there before anything was kept."""


def level_of(kept: Sequence[bool], budget: float) -> float:
    """Return the level of the next comparison; `kept`: whether each earlier one was better."""
    now, wealth = len(kept) + 1, FIRST * budget
    discoveries = [number for number, better in enumerate(kept, 1) if better]
    level = wealth * _share(now)
    for order, number in enumerate(discoveries):
        earned = budget - wealth if order == 0 else budget
        level += earned * _share(now - number)
    return float(level)


def _share(distance: int) -> float:
    return float(np.power(float(distance), -POWER)) / ZETA
