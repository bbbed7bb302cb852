"""Test whether configurations differ from a baseline, after every round of seeds, with known error
rates.

A test after every pair of runs that stops when p falls below 5 % is wrong far more often than in 5
% of all cases. Here the error is spent over the looks, α·(rounds / max_rounds)^power until each
(K. K. G. Lan, D. L. DeMets, Biometrika 70 (1983), 659–663; K. Kim, D. L. DeMets, Biometrika 74
(1987), 149–154): little on the first, whose estimate of the noise is worth little. A round is a
block: all configurations on one seed, which decides initial weights, order of the data and
everything drawn. Configurations may differ in noise, so each rival is judged by the noise of its
own differences from the baseline, a paired t-test, at an equal share of the error (Bonferroni): how
the differences of two rivals correlate depends on the noise of all three, and no correlation makes
a false winner more likely than the sum of the shares. Student's t with few degrees of freedom does
not depend on the noise if there is no difference: the bounds are simulated from it. No kept library
does that: methods that are valid without an end (confidence sequences, e-values) are for bounded
values or need more runs (`benchmarks/believe`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from tunediff.analysis.divergence import divergence
from tunediff.analysis.statistics import (
    BETTER,
    LEVEL,
    SAME,
    WORSE,
    Difference,
    Scale,
    paired_sds,
    quantile,
    value_step,
)
from tunediff.search_space.model import FIRST_VERDICT

FIRST = FIRST_VERDICT
"""Rounds before the first look: two say next to nothing about their own noise."""
DRAWN = 2_400_000
"""Simulated rounds behind the bounds: 200,000 comparisons of twelve, whose error is accurate to 2 %
of it."""


LEAST_PATHS = 100
"""Simulated comparisons that have to exceed the bounds for these to be known."""


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


@dataclasses.dataclass(frozen=True)
class Rules:
    """How a comparison may err and when it looks, fixed before its first run."""

    level: float = LEVEL
    """Probability of any wrong verdict if nothing differs."""
    one_sided: bool = False
    """Whether all of it is spent on `better`; then nothing is called worse."""
    fixed: bool = False
    """Whether there is one look, after all rounds: Student's t-test."""


RULES = Rules()
State = Literal["open", "decided", "equal", "hopeless", "spent"]
Values = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Look:
    """The result of the test after the rounds so far."""

    differences: list[Difference]
    """The difference of each rival; the intervals hold in 1 − level of all comparisons (1 − 2 ×
    level for one-sided ones), for all rivals and looks at once."""
    rounds: int
    """Rounds that count: those that the baseline and all remaining rivals have completed."""
    max_rounds: int
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


def first_look(max_rounds: int) -> int:
    """Return the number of rounds before the first look."""
    return max(2, min(FIRST, max_rounds))


@functools.lru_cache(maxsize=64)
def bounds(
    level: float, max_rounds: int, power: int, one_sided: bool = False, fixed: bool = False
) -> tuple[float, ...]:
    """Return for 1 to `max_rounds` rounds how large |t| of a rival's differences must be for it to
    differ, or for `one_sided` how large t must be for it to be better.

    A rival that equals the baseline exceeds its bound at any look with probability `level`. The
    bounds are simulated: at each look, the paths with the largest |t| leave, as many as spend the
    error that is due until then. A look whose share is less than a path has no bound. `fixed` ones,
    and those of a level that is too small to be simulated, have one for the last look only, the
    quantile of Student's t.
    """
    if fixed or level * DRAWN < LEAST_PATHS * max_rounds:
        last = quantile(1 - (level if one_sided else level / 2), max_rounds - 1)
        return (*[math.inf] * (max_rounds - 1), last)
    paths, rounds = max(DRAWN // max_rounds, DRAWN // 60), np.arange(1, max_rounds + 1)
    drawn = np.random.default_rng(0).standard_normal((paths, max_rounds))
    means = drawn.cumsum(axis=1) / rounds
    squares = (drawn**2).cumsum(axis=1) - rounds * means**2
    with np.errstate(divide="ignore", invalid="ignore"):  # after one round the error is 0/0
        t = (means if one_sided else np.abs(means)) / np.sqrt(squares / (rounds - 1) / rounds)
    limits, remaining, spent = [math.inf] * max_rounds, np.ones(paths, bool), 0
    for i in range(first_look(max_rounds) - 1, max_rounds):
        due = int(paths * level * ((i + 1) / max_rounds) ** power) - spent
        if due > 0:
            limits[i] = float(np.partition(t[remaining, i], -due)[-due])
            spent, remaining = spent + due, remaining & (t[:, i] < limits[i])
    return tuple(limits)


def _labels(blocks: Sequence[int], values: Values) -> NDArray[np.int_]:
    """Return the block of each round; a round without one is in the last block."""
    labels = np.zeros(values.shape[1], int)
    for number in range(values.shape[1]):
        labels[number] = blocks[min(number, len(blocks) - 1)] if blocks else 0
    return labels


def _within_blocks(z: Values, labels: NDArray[np.int_]) -> tuple[Values, int]:
    """Return the rounds without what blocks add to the differences, and the degrees of freedom of
    what is left.

    Each block takes one (a two-way layout without interaction: H. Scheffé, The Analysis of
    Variance, 1959, chapter 4). Blocks that leave less than two are not told apart.
    """
    numbers, freedom = np.unique(labels), z.shape[1] - len(np.unique(labels))
    if len(numbers) < 2 or freedom < 2:
        return z, z.shape[1] - 1
    differences = z[1:] - z[0]
    means = differences.mean(axis=1, keepdims=True)
    for number in numbers:
        inside = labels == number
        differences[:, inside] += means - differences[:, inside].mean(axis=1, keepdims=True)
    return np.vstack([z[:1], z[0] + differences]), freedom


def _with_freedom(limit: float, before: int, freedom: int) -> float:
    """Return the bound on Student's t of `freedom` that is as rarely exceeded as `limit` is with
    `before` degrees of freedom."""
    if freedom == before:
        return limit
    return -quantile(float(special.stdtr(before, -limit)), freedom)


def look(
    values: Values,
    max_rounds: int,
    lower_is_better: bool = True,
    ratios: bool = True,
    margin: float | None = None,
    rules: Rules = RULES,
    blocks: Sequence[int] = (),
) -> Look:
    """Test each row of `values` [configurations, seeds] against row 0, the baseline; NaN: the run
    is missing.

    `max_rounds`: rounds there can be, fixed in advance. Differences are ratios if `ratios` are
    allowed and all values are positive: noise and effects of distances and rates are proportional.
    `margin`: a difference that does not matter, a ratio − 1 or in units. `blocks`: for each round
    the number of its block, between which the machine has drifted: noise is what is left within
    them. A rival that lacks a seed before the last one is out.
    """
    # Complete rounds of the baseline and of the rivals that are still in
    scale = Scale.of(values, ratios)
    is_counted = np.isfinite(values[0])
    counted = values[:, is_counted][:, :max_rounds]
    remaining = np.asarray(np.isfinite(counted[:, :-1]).all(axis=1))
    is_complete = np.isfinite(counted[remaining]).all(axis=0)
    complete = counted[remaining][:, is_complete]
    z = scale.to_model(complete)
    rounds, rivals = z.shape[1], len(z) - 1
    offsets = np.full(len(values), np.nan)
    if rounds:
        offsets[remaining] = z.mean(axis=1) - z[0].mean()
    differences = [scale.difference(offset) for offset in offsets[1:]]

    def result(state: State) -> Look:
        return Look(differences, rounds, max_rounds, state, scale.ratios)

    if rivals < 1 or rounds < first_look(max_rounds):
        all_out = len(values) > len(z) == 1  # rather than not yet begun
        return result("decided" if all_out else "open")
    last_look = rounds >= max_rounds
    plan = LATE if rivals > 1 and max_rounds <= FEW else EARLY
    share = rules.level / rivals
    limits = bounds(share, max_rounds, plan.power, rules.one_sided, rules.fixed)
    if math.isinf(limits[rounds - 1]):
        return result("spent" if last_look else "open")

    # Intervals and verdicts. A side that diverges more often than the other is worse, and never
    # better, whatever its other runs show.
    labels = _labels(blocks, values)[is_counted][:max_rounds][is_complete]
    within, freedom = _within_blocks(z, labels)
    sds = paired_sds(within, value_step(values), scale.ratios) * math.sqrt((rounds - 1) / freedom)
    errors = sds / math.sqrt(rounds)
    halves = _with_freedom(limits[rounds - 1], rounds - 1, freedom) * errors
    gains = (-offsets if lower_is_better else offsets)[1:][remaining[1:]]
    counts = [divergence(complete[0], rival, lower_is_better) for rival in complete[1:]]
    fewer = np.array([count.baseline - count.rival for count in counts])
    often = np.array([count.decided(share) for count in counts])
    better = ((gains > halves) & (fewer >= 0)) | (often & (fewer > 0))
    worse = ((gains < -halves) & (fewer <= 0)) | (often & (fewer < 0))
    if rules.one_sided:
        worse[:] = False
    for i, sd, half, count, won, lost in zip(
        np.flatnonzero(remaining[1:]), sds, halves, counts, better, worse, strict=True
    ):
        differences[i] = dataclasses.replace(
            scale.difference(float(offsets[1 + i]), half),
            verdict=BETTER if won else WORSE if lost else SAME,
            sd=scale.size(sd),
            resolution=scale.size(half),
            diverged=count,
        )

    # Whether to go on. With one rival, the gain of whichever of the two is ahead counts: stopping
    # for that never makes a false winner.
    if better.any() or worse.all():
        return result("decided")
    if margin is not None:
        model_margin = math.log1p(margin) if scale.ratios else margin
        if (np.abs(gains) + halves <= model_margin).all():
            return result("equal")
    if last_look:
        return result("spent")
    # What would be significant at the last look with this noise, less what the gain may be too
    # small by now. It is equal where nothing differs at all: without noise and without a
    # difference, more rounds bring nothing.
    needed = (limits[-1] * math.sqrt(rounds / max_rounds) - plan.allowance) * errors
    both_ways = rivals == 1 and not rules.one_sided
    possible = np.abs(gains) if both_ways else gains
    counting = [count for count in counts if both_ways or count.baseline]
    hopeless = (possible <= needed).all() and not any(
        count.undecided(share, max_rounds) for count in counting
    )
    return result("hopeless" if hopeless else "open")
