"""Test whether configurations differ from a baseline, after every round of seeds, with known error rates.

A test after every pair of runs that stops when p falls below 5 % is wrong far more often than in 5 % of
all cases. Here the error is spent in equal parts over the looks (K. K. G. Lan, D. L. DeMets, Biometrika 70
(1983), 659–663; K. Kim, D. L. DeMets, Biometrika 74 (1987), 149–154), and over all rivals at once (C. W.
Dunnett, J. Am. Stat. Assoc. 50 (1955), 1096–1121). A round is a block: all configurations on one seed,
which decides initial weights, order of the data and everything drawn; with one rival that is the paired
t-test. The statistics are Student's t with few degrees of freedom, whose distribution under equality does
not depend on the noise: the bounds are simulated from it. No kept library does that: scipy.stats.dunnett
looks once and has no blocks, and methods that are valid without an end (confidence sequences, e-values)
are for bounded values or need more runs (`benchmarks/believe`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tunediff.analysis.statistics import BETTER, LEVEL, SAME, WORSE, Difference, block_sd
from tunediff.search_space.model import FIRST_VERDICT

FIRST = FIRST_VERDICT
"""Rounds before the first look: two say next to nothing about their own noise."""
PATHS = 100_000
"""Simulated comparisons behind the bounds: the error over all looks is accurate to 0.1 %."""

State = Literal["open", "decided", "equal", "hopeless", "spent"]
Values = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Look:
    """The result of the test after the rounds so far."""

    differences: list[Difference]
    """The difference of each rival; the intervals hold in 95 % of all comparisons, for all rivals and looks at once."""
    rounds: int
    """Rounds that count: those that the baseline and all remaining rivals have completed."""
    most: int
    state: State
    """`open`: more rounds are needed; `decided`: one rival is better, or all are worse; `equal`: no
    difference is larger than the given one; `hopeless`: more rounds would show only a difference that is
    unlikely by the measurements so far; `spent`: there are no more rounds."""
    ratios: bool
    """Whether differences are ratios to the baseline."""
    sd: float | None = None
    """Standard deviation of the difference of two single runs on one seed, a ratio − 1 or in units."""
    resolution: float | None = None
    """Half the width of the interval: the smallest difference that would be significant now, a ratio − 1 or
    in units."""

    @property
    def over(self) -> bool:
        """Return whether no further round should run."""
        return self.state != "open"


def first_look(most: int) -> int:
    """Return the number of rounds before the first look."""
    return max(2, min(FIRST, most))


@functools.lru_cache(maxsize=64)
def bounds(rivals: int, most: int) -> tuple[float, ...]:
    """Return for 1 to `most` rounds how large |t| must be for any of `rivals` rivals to differ from the baseline.

    If all are equal, any of them exceeds its bound at any look with probability `LEVEL`. The bounds are
    simulated: at each look, the paths with the largest |t| leave, as many as spend the error that is due
    until then.
    """
    rng, first = np.random.default_rng(0), first_look(most)
    # The largest |t| over all rivals, for every simulated comparison and round
    largest = np.empty((PATHS, most))
    many = max(1, 4_000_000 // (most * (rivals + 1)))  # paths at once, to limit memory
    for start in range(0, PATHS, many):
        drawn = rng.standard_normal((min(many, PATHS - start), rivals + 1, most))
        largest[start : start + many] = np.abs(_statistics(drawn)).max(axis=1)
    # Spend the error in equal parts over the looks
    limits, going, spent = [math.inf] * most, np.ones(PATHS, bool), 0
    for place in range(first - 1, most):
        due = round(PATHS * LEVEL * (place + 2 - first) / (most + 1 - first)) - spent
        limits[place] = float(np.sort(largest[going, place])[-due])
        out = going & (largest[:, place] >= limits[place])
        spent, going = spent + int(out.sum()), going & ~out
    return tuple(limits)


def _statistics(drawn: Values) -> Values:
    """Return t of every rival after every round, [paths, rivals, rounds], of values [paths, 1 + rivals, rounds]."""
    rounds = np.arange(1, drawn.shape[2] + 1)
    drawn = drawn - drawn.mean(axis=1, keepdims=True)  # remove the effect of the round (block)
    means = drawn.cumsum(axis=2) / rounds
    squares = ((drawn**2).cumsum(axis=2) - rounds * means**2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):  # after one round the error is 0/0
        error = np.sqrt(2 * squares / ((drawn.shape[1] - 1) * (rounds - 1)) / rounds)
        return np.asarray(np.nan_to_num((means[:, 1:] - means[:, :1]) / error[:, None]))


def look(
    values: Values, most: int, lower_is_better: bool = True, ratios: bool = True, within: float | None = None
) -> Look:
    """Test each row of `values` [configurations, seeds] against row 0, the baseline; NaN: the run is missing.

    `most`: rounds there can be, fixed in advance. Differences are ratios if `ratios` are allowed and all
    values are positive: noise and effects of distances and rates are proportional. `within`: a difference
    that does not matter, a ratio − 1 or in units. A rival that lacks a seed before the last one is out.
    """
    # Complete rounds of the baseline and of the rivals that are still in
    ratios = ratios and bool((values[np.isfinite(values)] > 0).all())
    y = (np.log(values) if ratios else values)[:, np.isfinite(values[0])][:, :most]
    inside = np.asarray(np.isfinite(y[:, :-1]).all(axis=1))
    z = y[inside][:, np.isfinite(y[inside]).all(axis=0)]
    rounds, back, share = z.shape[1], math.exp if ratios else float, math.expm1 if ratios else float
    off = np.full(len(values), np.nan)
    if rounds:
        off[inside] = z.mean(axis=1) - z[0].mean()
    differences = [Difference(back(offset) if math.isfinite(offset) else None) for offset in off[1:]]
    if len(z) < 2 or rounds < first_look(most):
        out = len(values) > len(z) == 1  # all rivals are out, rather than not yet begun
        return Look(differences, rounds, most, "decided" if out else "open", ratios)

    # Intervals and verdicts
    sd = block_sd(z)
    error = sd / math.sqrt(rounds)
    largest = np.abs(off[inside]).max()
    if rounds < FIRST and largest > 0 and error <= 1e-9 * largest:
        # Two equal differences do not show that there is no noise.
        return Look(differences, rounds, most, "spent", ratios)
    # The noise is estimated from the rivals that are still in: the bounds are those of as many degrees of freedom.
    reach = bounds(len(z) - 1, most)
    half = reach[rounds - 1] * error
    for place, offset in enumerate(off[1:]):
        if math.isfinite(offset):
            verdict = SAME if abs(offset) <= half else BETTER if (offset < 0) == lower_is_better else WORSE
            differences[place] = Difference(back(offset), back(offset - half), back(offset + half), verdict=verdict)
    gains = (-off if lower_is_better else off)[1:][inside[1:]]
    margin = None if within is None else math.log1p(within) if ratios else within
    state = _state(gains, half, margin, rounds, most, error, reach[-1])
    return Look(differences, rounds, most, state, ratios, share(sd), share(half))


def _state(
    gains: Values, half: float, margin: float | None, rounds: int, most: int, error: float, last: float
) -> State:
    """Return whether more rounds are needed, or why not.

    `gains`: by how much each rival is better than the baseline; `half`: half the width of their intervals.
    """
    if (gains > half).any() or (gains < -half).all():
        return "decided"
    if margin is not None and bool((np.abs(gains) + half <= margin).all()):
        return "equal"
    if rounds >= most:
        return "spent"
    # At the last look a difference is significant if it exceeds `last` standard errors of then. Stop if even the best
    # measured gain plus one standard error of now would not; with one rival, the gain of whichever of the two is ahead.
    # Stopping for that never makes a false winner.
    best = float(gains.max()) if len(gains) > 1 else abs(float(gains[0]))
    # Equal where nothing differs at all: without noise and without a difference, more rounds bring nothing.
    return "hopeless" if best + error <= last * error * math.sqrt(rounds / most) else "open"
