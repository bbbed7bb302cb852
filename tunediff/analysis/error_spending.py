"""How large a difference must be at each interim analysis for the error of all together to be as
given.

The error is spent over the interim analyses, α·(rounds / max_rounds)^power until each (K. K. G.
Lan, D. L. DeMets, Biometrika 70 (1983), 659–663; K. Kim, D. L. DeMets, Biometrika 74 (1987),
149–154): little on the first, whose estimate of the noise is worth little. Student's t with few
degrees of freedom does not depend on the noise if there is no difference: the bounds are simulated
from it.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from tunediff.analysis.statistics import quantile
from tunediff.experiment.model import LEAST_PAIRS

FIRST = LEAST_PAIRS
"""Rounds before the first analysis: two say next to nothing about their own noise."""
DRAWN = 2_400_000
"""Simulated rounds of twelve comparisons behind the bounds: their error is accurate to 2 %."""


LEAST_PATHS = 100
"""Simulated comparisons that have to exceed the bounds for these to be known."""
EVERY, GROWTH = 100, 20
"""Rounds up to which there is an analysis after each; of more there is one when they have grown by
1/20, so that neither the bounds nor what an analysis costs grow with their number."""


class Plan(NamedTuple):
    """How a comparison spends its error, and when it gives up."""

    power: int
    """Power of the share of rounds: higher ones find large differences later, small ones more."""
    allowance: float
    """Standard errors that a difference may be too small by now and still become significant."""


EARLY, LATE = Plan(2, 1.0), Plan(4, 1.5)
"""The usual plan, and that of several challengers, each of which has a smaller share of the error,
in few rounds: it finds 2 sd of a run, of one in three, in 93 % (`benchmarks/believe`), not in 88
%."""
FEW = 12
"""Rounds that are few."""


def first_analysis(max_rounds: int) -> int:
    """Return the number of rounds before the first analysis."""
    return max(2, min(FIRST, max_rounds))


@functools.lru_cache(maxsize=64)
def analyses(max_rounds: int) -> tuple[int, ...]:
    """Return the numbers of rounds after which there is an analysis, from 1 to `max_rounds`."""
    numbers, growth = [1], GROWTH if max_rounds > EVERY else max_rounds
    while numbers[-1] < max_rounds:
        numbers.append(min(max_rounds, numbers[-1] + max(1, numbers[-1] // growth)))
    return tuple(numbers)


def last_analysis(rounds: int, max_rounds: int) -> int:
    """Return after how many of so many rounds the last analysis was."""
    return max((number for number in analyses(max_rounds) if number <= rounds), default=0)


@functools.lru_cache(maxsize=64)
def bounds(
    level: float, max_rounds: int, power: int, one_sided: bool = False, fixed: bool = False
) -> tuple[float, ...]:
    """Return for 1 to `max_rounds` rounds how large |t| of a challenger's differences must be for
    it to differ, or for `one_sided` how large t must be for it to be better.

    A challenger that equals the baseline exceeds its bound at any interim analysis with probability
    `level`. The bounds are simulated: at each of `analyses`, the paths with the largest |t|
    leave, as many as spend the error that is due until then. An analysis whose share is less than a
    path has no bound. `fixed` ones, and those of too small a level, have one for the last analysis
    only, the quantile of Student's t."""
    paths = DRAWN // min(max_rounds, 60)
    if fixed or level * paths < LEAST_PATHS:
        last = quantile(1 - (level if one_sided else level / 2), max_rounds - 1)
        return (*[math.inf] * (max_rounds - 1), last)
    numbers, generator = np.array(analyses(max_rounds)), np.random.default_rng(0)
    added = np.diff(numbers, prepend=0)
    drawn = generator.standard_normal((paths, len(numbers))) * np.sqrt(added)
    means, squares = drawn.cumsum(axis=1) / numbers, drawn**2 / added
    several = added > 1  # the rest of the squares of several rounds has a distribution of its own
    squares[:, several] += generator.chisquare(added[several] - 1, (paths, int(several.sum())))
    squares = squares.cumsum(axis=1) - numbers * means**2
    with np.errstate(divide="ignore", invalid="ignore"):  # after one round the error is 0/0
        t = (means if one_sided else np.abs(means)) / np.sqrt(squares / (numbers - 1) / numbers)
    limits, remaining, spent = [math.inf] * max_rounds, np.ones(paths, bool), 0
    for i, number in enumerate(numbers.tolist()):
        due = int(paths * level * (number / max_rounds) ** power) - spent
        if number >= first_analysis(max_rounds) and due > 0:
            limits[number - 1] = limit = float(np.partition(t[remaining, i], -due)[-due])
            spent, remaining = spent + due, remaining & (t[:, i] < limit)
    return tuple(limits)


@functools.lru_cache(maxsize=64)
def sign_bounds(
    level: float, max_rounds: int, power: float, one_sided: bool = False, start: int = 0
) -> tuple[float, ...]:
    """Return for 1 to `max_rounds` pairs that differ by how many more of them a side must be ahead.

    Of equal sides each is ahead in a pair with probability 1/2: the bounds are exact. start: pairs
    up to which another test has spent its error.
    """
    chances, spent, limits = np.zeros(2 * max_rounds + 1), 0.0, list[float]()
    chances[max_rounds] = 1.0  # of a lead of 0; the least is -max_rounds
    for number in range(1, max_rounds + 1):
        chances = (np.roll(chances, 1) + np.roll(chances, -1)) / 2
        due = level * ((number / max_rounds) ** power - (start / max_rounds) ** power) - spent
        ahead, behind = chances[max_rounds:], chances[max_rounds::-1]
        tails = (ahead if one_sided else ahead + behind)[::-1].cumsum()[::-1]
        limit = max(1, int((tails > due).sum()))
        limits.append(limit if limit <= number and number > start else math.inf)
        if math.isfinite(limits[-1]):
            spent += float(tails[limit])
            ahead[limit:] = 0.0
            if not one_sided:
                behind[limit:] = 0.0
    return tuple(limits)
