"""How good a configuration will be with a longer budget: a forecast with an interval, made from its curves so far.

A value that falls and is positive is taken by its logarithm, one that rises within 0 and 1 by that of its distance to
1, any other as it is. From its end it goes on in a straight line along the logarithm of time, a power law but for the
last kind (of error rates: Hestness et al. 2017, arXiv 1712.00409), with the mean slope m of all configurations
that ran. Slopes to come are expected to scatter around m as those of the configurations do now; beside that a value may
be off by the noise of runs and the error of m. More did no better: the slope of a curve's few points tells nothing of
its own future, and a power law with an offset (Domhan et al., IJCAI 2015) is not held by so few. benchmarks/forecast.py
has them side by side on measured curves, and what the intervals held there.

Schedules follow the fraction of the budget, so a longer run is another run, not the continuation. Warm-up and averaged
weights scale with it: at the same samples both are as far. A learning rate that falls to zero is not: the slope of such
a curve is that of the schedule, and is left out of m.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from tunediff import cli
from tunediff.record import TrialRecord
from tunediff.results import curve
from tunediff.results.statistics import quantile

Curve = Sequence[tuple[float, float]]
"""(training seconds, value) of every evaluation of a run, in order; samples would do as well."""
LEVEL = 0.8
"""Probability that a measured value lies within the interval of its forecast."""
FEWEST = 3
"""Points of a curve without which there is no forecast."""
WINDOW = 2.0
"""A slope is that of the second half of a curve: what comes before is the beginning."""
FARTHEST = 16.0
"""Times the budget so far, up to which forecasts were checked."""


SPREAD = 1.0
"""Standard deviation of slopes with a longer budget around the common one, over that of the slopes so far. Fits gave
0.4 to 0.9, but one on the digits holds too little on CIFAR-10: the scatter is taken as it is."""
LEAST = 0.4
"""Of the common slope: slopes count as scattering by as much at least, for the common one changes as well. From one
budget to four times that it changed by 8, 11, 42, 49, 64 and 78 % in the curves that were measured."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How forecasts see values."""

    kind: Literal["logarithm", "error", "plain"]
    """`error`: the logarithm of the distance to 1."""
    least: float = 0.0
    """Distances to 1 count as this at least: a perfect score has no logarithm."""

    @classmethod
    def of(cls, known: Iterable[Curve], ratios: bool = True, falls: bool = True) -> Scale:
        """`ratios`: values fall and are positive throughout, as `Results.ratios` has it."""
        if ratios:
            return cls("logarithm")
        values = [y for points in known for _, y in points if math.isfinite(y)]
        errors = [1 - y for y in values if y < 1]
        if falls or not errors or not all(0 <= y <= 1 for y in values):
            return cls("plain")
        return cls("error", min(errors) / 2)

    def to(self, value: float) -> float:
        """The value as forecasts see it."""
        if self.kind == "plain":
            return value
        return math.log(value if self.kind == "logarithm" else max(1 - value, self.least))

    def back(self, seen: float) -> float:
        """In the units of the metric."""
        if self.kind == "plain":
            return seen
        return math.exp(seen) if self.kind == "logarithm" else 1 - math.exp(min(seen, 0.0))


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What is expected of runs with a longer budget."""

    budget_s: float
    mean: float
    """In the units of the metric; where logarithms are taken, the median."""
    low: float
    high: float
    """Ends of the interval that holds what is measured with probability `LEVEL`."""

    def holds(self, value: float) -> bool:
        """Whether a measured value lies within."""
        return self.low <= value <= self.high


@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of one configuration at one budget."""

    curves: tuple[Curve, ...]
    anneals: bool = False
    """Whether the learning rate falls to zero at the end of the budget."""

    @classmethod
    def of(cls, trials: Sequence[TrialRecord], metric: str) -> Runs:
        """Of the trials that ended ok."""
        done = [trial for trial in trials if trial.value(metric) is not None]
        decays = any(trial.config.get("optimizer.decay", "constant") != "constant" for trial in done)
        return cls(tuple(curve(trial, metric) for trial in done), decays)


@dataclasses.dataclass(frozen=True)
class _Line:
    """A curve by its last points, against u = log(seconds / its last)."""

    end_s: float
    value: float
    slope: float
    squares: float
    freedom: int
    width: float
    """Σ(u − ū)²: the slope's variance is that of the noise over it."""


def _line(points: Curve, scale: Scale) -> _Line | str:
    """The line through the last points; in words, why there is none."""
    known = [(t, y) for t, y in points if t > 0 and math.isfinite(y)]
    if scale.kind == "logarithm" and any(y <= 0 for _, y in known):
        return "a value that is not positive has no logarithm"
    end_s = known[-1][0] if known else 0.0
    usable = [(t, y) for t, y in known if t >= 0.99 * end_s / WINDOW]
    if len(usable) < FEWEST:
        return f"its curve has {cli.some(len(usable), 'point')} in its second half, and needs {FEWEST}"
    seconds, values = (np.asarray(side, dtype=float) for side in zip(*usable, strict=True))
    u, z = np.log(seconds / end_s), np.asarray([scale.to(float(value)) for value in values])
    around = u - u.mean()
    width = float(around @ around)
    slope = float(around @ z) / width
    rest = z - z.mean() - slope * around
    return _Line(end_s, float(z[-1]), slope, float(rest @ rest), len(u) - 2, width)


def _lines(runs: Runs, scale: Scale) -> list[_Line]:
    return [line for points in runs.curves if isinstance(line := _line(points, scale), _Line)]


@dataclasses.dataclass(frozen=True)
class Common:
    """What the configurations of a search share: the slope of their curves, and the noise of their runs."""

    scale: Scale
    slope: float
    """Their mean, along the logarithm of time."""
    scatter: float
    """Standard deviation of the configurations' slopes; of a single one, its slope: it may as well end there."""
    configurations: int
    """How many have a slope that counts."""
    noise: float
    """Standard deviation of one run's value at its end."""
    freedom: int
    """Degrees of freedom: of the scatter, or of the noise where there is one configuration."""


def common(known: Sequence[Runs], scale: Scale) -> Common | None:
    """From the runs of as many configurations as there are, at one budget; None without one usable curve.

    Its slope is the mean over those whose learning rate stays, or over all where every one falls. Noise is what is left
    of the curves beside their lines, and of the ends of runs beside the mean of their configuration.
    """
    fitted = [(runs.anneals, found) for runs in known if (found := _lines(runs, scale))]
    if not fitted:
        return None
    steady = [lines for anneals, lines in fitted if not anneals] or [lines for _, lines in fitted]
    slopes = [float(np.mean([line.slope for line in lines])) for lines in steady]
    every = [line for _, lines in fitted for line in lines]
    squares = sum(line.squares for line in every) + sum(_around([line.value for line in lines]) for _, lines in fitted)
    freedom = sum(line.freedom for line in every) + sum(len(lines) - 1 for _, lines in fitted)
    noise = math.sqrt(squares / freedom)
    slope, many = float(np.mean(slopes)), len(slopes)
    scatter = max(float(np.std(slopes, ddof=1)), LEAST * abs(slope)) if many > 1 else abs(slope)
    return Common(scale, slope, scatter, many, noise, many - 1 if many > 1 else freedom)


def _around(values: Sequence[float]) -> float:
    """Sum of the squares of deviations from the mean."""
    return float(np.var(values)) * len(values)


@dataclasses.dataclass(frozen=True)
class Trend:
    """A configuration at the end of its budget, and how it goes on."""

    shared: Common
    end_s: float
    value: float
    """At its end; as `shared.scale` has it."""
    runs: int
    spread: float
    """`SPREAD`, or what is tried instead."""

    def middle(self, budget_s: float) -> float:
        """The forecast, as `shared.scale` has it."""
        return self.value + self.shared.slope * math.log(budget_s / self.end_s)

    def at(self, budget_s: float, runs: int = 1) -> Forecast:
        """The forecast for the mean of so many runs with a budget in training seconds, not below the one so far."""
        middle, half, back = self.middle(budget_s), self.half(budget_s, runs), self.shared.scale.back
        low, high = sorted((back(middle - half), back(middle + half)))
        return Forecast(budget_s, back(middle), low, high)

    def half(self, budget_s: float, runs: int = 1) -> float:
        """Half of its interval, as `shared.scale` has it."""
        shared, x = self.shared, math.log(budget_s / self.end_s)
        slopes = (x * self.spread * shared.scatter) ** 2 * (1 + 1 / shared.configurations)
        return _quantile(shared) * math.sqrt(shared.noise**2 * (1 / self.runs + 1 / runs) + slopes)


def _quantile(shared: Common) -> float:
    """Half of an interval of probability `LEVEL`, in standard deviations."""
    return quantile(0.5 + LEVEL / 2, shared.freedom)


def trend(runs: Runs, shared: Common, spread: float = SPREAD) -> Trend | None:
    """How a configuration goes on; None without a usable curve (`missing` says why)."""
    if not (lines := _lines(runs, shared.scale)):
        return None
    end_s, value = (float(np.mean(side)) for side in zip(*((line.end_s, line.value) for line in lines), strict=True))
    return Trend(shared, end_s, value, len(lines), spread)


def missing(runs: Runs, scale: Scale) -> str:
    """Why there is no forecast from these runs; '' where there is one."""
    lines = [_line(points, scale) for points in runs.curves]
    if any(isinstance(line, _Line) for line in lines):
        return ""
    return next((line for line in lines if isinstance(line, str)), "none of its runs ended")


def forecast(
    curves: Sequence[Curve], budget_s: float, *, others: Sequence[Runs] = (), ratios: bool = True,
    falls: bool = True, anneals: bool = False, runs: int = 1,
) -> tuple[Forecast | None, str]:  # fmt: skip
    """What the mean of so many `runs` with `budget_s` will be, from the `curves` of one configuration, one per seed.

    `others`: runs of other configurations at the same budget; without any, its own slope is the common one. `ratios`
    and `falls`: as `Results` has them. Returns (None, why) where fewer than three points of a
    curve can be used.
    """
    mine = Runs(tuple(curves), anneals)
    scale = Scale.of((points for one in (mine, *others) for points in one.curves), ratios, falls)
    shared = common([mine, *others], scale)
    found = trend(mine, shared) if shared is not None else None
    return (None, missing(mine, scale)) if found is None else (found.at(budget_s, runs), "")


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Where one configuration may pass another, in training seconds."""

    budget_s: float | None
    """Where their forecasts are equal; None: nowhere in the range, as where both have the common slope."""
    open_s: float | None
    """From where on it is open which is better: the `LEVEL` interval of their difference, by a run each, holds 0. None:
    nowhere in the range."""


def crossing(one: Trend, other: Trend, farthest: float = FARTHEST) -> Crossing | None:
    """What may happen between the budget so far and `farthest` times it; None where the order stays throughout."""
    start_s = max(one.end_s, other.end_s)
    ahead = other.middle(start_s) - one.middle(start_s)
    bend = one.shared.slope - other.shared.slope
    x = ahead / bend if bend else math.inf
    equal_s = start_s * math.exp(x) if 0 < x <= math.log(farthest) else None
    for budget_s in start_s * np.geomspace(1, farthest, 129):
        apart = abs(other.middle(budget_s) - one.middle(budget_s))
        if apart <= math.hypot(*(_own_half(trend, budget_s) for trend in (one, other))):
            return Crossing(equal_s, float(budget_s))
    return Crossing(equal_s, None) if equal_s is not None else None


def _own_half(trend: Trend, budget_s: float) -> float:
    """Half of the interval of one run, but for the error of the common slope, which all share."""
    shared, x = trend.shared, math.log(budget_s / trend.end_s)
    noise = shared.noise**2 * (1 + 1 / trend.runs)
    return _quantile(shared) * math.sqrt(noise + (x * trend.spread * shared.scatter) ** 2)
