"""Test whether configurations differ from a baseline, after every round of seeds, with known error
rates.

A test after every pair of runs that stops when p falls below 5 % is wrong far more often than in 5
% of all cases. Here the error is spent over the looks, α·(rounds / most)^power until each (K. K. G.
Lan, D. L. DeMets, Biometrika 70 (1983), 659–663; K. Kim, D. L. DeMets, Biometrika 74 (1987),
149–154): little on the first, whose estimate of the noise is worth little. A round is a block: all
configurations on one seed, which decides initial weights, order of the data and everything drawn.
Configurations may differ in noise, so each rival is judged by the noise of its own differences from
the baseline, a paired t-test, at an equal share of the error (Bonferroni): how the differences of
two rivals correlate depends on the noise of all three, and no correlation makes a false winner more
likely than the sum of the shares. Student's t with few degrees of freedom does not depend on the
noise if there is no difference: the bounds are simulated from it. No kept library does that:
methods that are valid without an end (confidence sequences, e-values) are for bounded values or
need more runs (`benchmarks/believe`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tunediff.analysis.statistics import (
    BETTER,
    LEVEL,
    SAME,
    WORSE,
    Difference,
    back_from,
    paired_sds,
    value_step,
)
from tunediff.search_space.model import FIRST_VERDICT

FIRST = FIRST_VERDICT
"""Rounds before the first look: two say next to nothing about their own noise."""
DRAWN = 2_400_000
"""Simulated rounds behind the bounds: 200,000 comparisons of twelve, whose error is accurate to 2 %
of it."""


class Plan(NamedTuple):
    """How a comparison spends its error, and when it gives up."""

    power: int
    """Of the share of rounds until which the error is spent: higher ones find large differences
    later, small ones more often."""
    allowance: float
    """Standard errors that a difference may be too small by now and still become significant."""


EARLY, LATE = Plan(2, 1.0), Plan(4, 1.5)
"""The usual plan, and that of several rivals, each of which has a smaller share of the error, in
few rounds: it finds a difference of 2 sd of a run, of one in three, in 93 % (`benchmarks/believe`),
the usual one in 88 %."""
FEW = 12
"""Rounds that are few."""

State = Literal["open", "decided", "equal", "hopeless", "spent"]
Values = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Look:
    """The result of the test after the rounds so far."""

    differences: list[Difference]
    """The difference of each rival; the intervals hold in 95 % of all comparisons, for all rivals
    and looks at once."""
    rounds: int
    """Rounds that count: those that the baseline and all remaining rivals have completed."""
    most: int
    state: State
    """`open`: more rounds are needed; `decided`: one rival is better, or all are worse; `equal`: no
    difference is larger than the given one; `hopeless`: more rounds would show only a difference
    that is unlikely by the measurements so far; `spent`: there are no more rounds."""
    ratios: bool
    """Whether differences are ratios to the baseline."""

    @property
    def over(self) -> bool:
        """Return whether no further round should run."""
        return self.state != "open"


def first_look(most: int) -> int:
    """Return the number of rounds before the first look."""
    return max(2, min(FIRST, most))


@functools.lru_cache(maxsize=64)
def bounds(level: float, most: int, power: int) -> tuple[float, ...]:
    """Return for 1 to `most` rounds how large |t| of a rival's differences must be for it to
    differ.

    A rival that equals the baseline exceeds its bound at any look with probability `level`. The
    bounds are simulated: at each look, the paths with the largest |t| leave, as many as spend the
    error that is due until then. A look whose share is less than a path has no bound.
    """
    paths, rounds = max(DRAWN // most, DRAWN // 60), np.arange(1, most + 1)
    drawn = np.random.default_rng(0).standard_normal((paths, most))
    means = drawn.cumsum(axis=1) / rounds
    squares = (drawn**2).cumsum(axis=1) - rounds * means**2
    with np.errstate(divide="ignore", invalid="ignore"):  # after one round the error is 0/0
        t = np.abs(means) / np.sqrt(squares / (rounds - 1) / rounds)
    limits, going, spent = [math.inf] * most, np.ones(paths, bool), 0
    for place in range(first_look(most) - 1, most):
        due = int(paths * level * ((place + 1) / most) ** power) - spent
        if due > 0:
            limits[place] = float(np.partition(t[going, place], -due)[-due])
            spent, going = spent + due, going & (t[:, place] < limits[place])
    return tuple(limits)


def look(
    values: Values, most: int, lower_is_better: bool = True, ratios: bool = True,
    within: float | None = None, level: float = LEVEL,
) -> Look:  # fmt: skip
    """Test each row of `values` [configurations, seeds] against row 0, the baseline; NaN: the run
    is missing.

    `most`: rounds there can be, fixed in advance. Differences are ratios if `ratios` are allowed
    and all values are positive: noise and effects of distances and rates are proportional.
    `within`: a difference that does not matter, a ratio − 1 or in units. A rival that lacks a seed
    before the last one is out. `level`: probability of any wrong verdict.
    """
    # Complete rounds of the baseline and of the rivals that are still in
    ratios = ratios and bool((values[np.isfinite(values)] > 0).all())
    y = (np.log(values) if ratios else values)[:, np.isfinite(values[0])][:, :most]
    inside = np.asarray(np.isfinite(y[:, :-1]).all(axis=1))
    z = y[inside][:, np.isfinite(y[inside]).all(axis=0)]
    rounds, (back, share) = z.shape[1], back_from(ratios)
    off = np.full(len(values), np.nan)
    if rounds:
        off[inside] = z.mean(axis=1) - z[0].mean()
    differences = [
        Difference(back(offset) if math.isfinite(offset) else None) for offset in off[1:]
    ]
    if len(z) < 2 or rounds < first_look(most):
        out = len(values) > len(z) == 1  # all rivals are out, rather than not yet begun
        return Look(differences, rounds, most, "decided" if out else "open", ratios)

    # Intervals and verdicts
    plan = LATE if len(z) > 2 and most <= FEW else EARLY
    reach = bounds(level / (len(z) - 1), most, plan.power)
    if math.isinf(reach[rounds - 1]):
        return Look(differences, rounds, most, "spent" if rounds >= most else "open", ratios)
    sds = paired_sds(z, value_step(values), ratios)
    errors = sds / math.sqrt(rounds)
    halves, places = reach[rounds - 1] * errors, np.flatnonzero(inside[1:])
    for place, sd, half in zip(places, sds, halves, strict=True):
        offset = off[1:][place]
        verdict = (
            SAME if abs(offset) <= half else BETTER if (offset < 0) == lower_is_better else WORSE
        )
        differences[place] = Difference(
            back(offset), back(offset - half), back(offset + half),
            verdict=verdict, sd=share(sd), resolution=share(half),
        )  # fmt: skip
    gains = (-off if lower_is_better else off)[1:][inside[1:]]
    margin = None if within is None else math.log1p(within) if ratios else within
    # What would be significant at the last look with this noise, less what the gain may be too
    # small by now
    needed = (reach[-1] * math.sqrt(rounds / most) - plan.allowance) * errors
    return Look(
        differences, rounds, most, _state(gains, halves, needed, margin, rounds >= most), ratios
    )


def _state(
    gains: Values, halves: Values, needed: Values, margin: float | None, spent: bool
) -> State:
    """Return whether more rounds are needed, or why not; all arrays have one entry for each rival.

    `gains`: by how much each rival is better than the baseline; `halves`: half the width of their
    intervals; `needed`: gains above which the last look may be significant; `spent`: whether this
    is the last look.
    """
    if (gains > halves).any() or (gains < -halves).all():
        return "decided"
    if margin is not None and bool((np.abs(gains) + halves <= margin).all()):
        return "equal"
    if spent:
        return "spent"
    # With one rival, the gain of whichever of the two is ahead. Stopping for that never makes a
    # false winner. Equal where nothing differs at all: without noise and without a difference, more
    # rounds bring nothing.
    return "hopeless" if ((np.abs(gains) if len(gains) == 1 else gains) <= needed).all() else "open"
