"""How good a configuration will be with a longer budget: a forecast with an interval, made from its curves so far.

A value that falls and is positive is taken by its logarithm, any other as it is. From its end it goes on along the
logarithm of time with a constant slope (a power law, where logarithms are taken): γ·m + φ·(v − m), v its own slope so
far, m the mean of all configurations that ran. What may be off: the noise of runs, the mean slope, and slopes that
change, by `Law.spread` times m. The three numbers of `Law` are fitted on measured curves and checked on others by
benchmarks/forecast.py, which also has the alternatives that did no better: a power law with an offset (Domhan et al.,
IJCAI 2015), the damped trend of Gardner & McKenzie (Management Science 31, 1985), each curve's own slope.

Schedules follow the fraction of the budget, so a longer run is another run, not the continuation. Warm-up and averaged
weights scale with it: at the same samples both are as far. A learning rate that falls to zero is not: the slope of such
a curve is that of the schedule, so its own and its part in the common one are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tunediff.record import TrialRecord
from tunediff.results import curve
from tunediff.results.statistics import quantile

Curve = Sequence[tuple[float, float]]
"""(training seconds, value) of every evaluation of a run, in order; samples would do as well."""
LEVEL = 0.8
"""Probability that a measured value lies within the interval of its forecast."""
FEWEST = 3
"""Points of a curve without which there is no forecast."""
WINDOW = 4.0
"""A slope is that of the curve from a quarter of its seconds on: what comes before is the beginning."""
FARTHEST = 16.0
"""Times the budget so far, up to which forecasts were checked."""


@dataclasses.dataclass(frozen=True)
class Law:
    """How slopes go on: numbers without units, for every metric."""

    later: float = 0.8
    """γ: the common slope with a longer budget, over the one so far."""
    own: float = 0.0
    """φ: how much of the difference between its own and the common slope stays with a configuration."""
    spread: float = 0.3
    """Standard deviation of slopes with a longer budget that this does not explain, over the common one."""


LAW = Law()


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What is expected of runs with a longer budget."""

    budget_s: float
    mean: float
    """In the units of the metric; of what falls and is positive, the median."""
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


def _line(points: Curve, ratios: bool) -> _Line | str:
    """The line through the last points; in words, why there is none."""
    known = [(t, y) for t, y in points if t > 0 and math.isfinite(y)]
    if ratios and any(y <= 0 for _, y in known):
        return "a value that is not positive has no logarithm"
    end_s = known[-1][0] if known else 0.0
    usable = [(t, y) for t, y in known if t >= 0.99 * end_s / WINDOW]
    if len(usable) < FEWEST:
        return f"its curve has {len(usable)} points after the first quarter, and needs {FEWEST}"
    seconds, values = (np.asarray(side, dtype=float) for side in zip(*usable, strict=True))
    u, z = np.log(seconds / end_s), np.log(values) if ratios else values
    around = u - u.mean()
    width = float(around @ around)
    slope = float(around @ z) / width
    rest = z - z.mean() - slope * around
    return _Line(end_s, float(z[-1]), slope, float(rest @ rest), len(u) - 2, width)


def _lines(runs: Runs, ratios: bool) -> list[_Line]:
    return [line for points in runs.curves if isinstance(line := _line(points, ratios), _Line)]


@dataclasses.dataclass(frozen=True)
class Common:
    """What the configurations of a search share: the slope of their curves, and the noise of their runs."""

    ratios: bool
    slope: float
    slope_error: float
    """Standard error of it."""
    noise: float
    """Standard deviation of one run's value at its end."""
    freedom: int
    """Degrees of freedom of the noise."""


def common(known: Sequence[Runs], ratios: bool) -> Common | None:
    """From the runs of as many configurations as there are, at one budget; None without one usable curve.

    Its slope is the mean over those whose learning rate stays, or over all where every one falls. Noise is what is left
    of the curves beside their lines, and of the ends of runs beside the mean of their configuration.
    """
    fitted = [(runs.anneals, found) for runs in known if (found := _lines(runs, ratios))]
    if not fitted:
        return None
    steady = [lines for anneals, lines in fitted if not anneals] or [lines for _, lines in fitted]
    slopes = [float(np.mean([line.slope for line in lines])) for lines in steady]
    every = [line for _, lines in fitted for line in lines]
    squares = sum(line.squares for line in every) + sum(_around([line.value for line in lines]) for _, lines in fitted)
    freedom = sum(line.freedom for line in every) + sum(len(lines) - 1 for _, lines in fitted)
    noise = math.sqrt(squares / freedom)
    if len(slopes) > 1:
        error = float(np.std(slopes, ddof=1)) / math.sqrt(len(slopes))
    else:
        error = noise / math.sqrt(sum(line.width for line in steady[0]))
    return Common(ratios, float(np.mean(slopes)), error, noise, freedom)


def _around(values: Sequence[float]) -> float:
    """Sum of the squares of deviations from the mean."""
    return float(np.var(values)) * len(values)


@dataclasses.dataclass(frozen=True)
class Trend:
    """A configuration at the end of its budget, and how it goes on."""

    shared: Common
    end_s: float
    value: float
    """At its end; a logarithm where `shared.ratios`."""
    runs: int
    slope: float
    """Along the logarithm of time, from its end on."""
    slope_error: float

    def middle(self, budget_s: float) -> float:
        """The forecast, a logarithm where `shared.ratios`."""
        return self.value + self.slope * math.log(budget_s / self.end_s)

    def at(self, budget_s: float, runs: int = 1) -> Forecast:
        """The forecast for the mean of so many runs with a budget in training seconds, not below the one so far."""
        x = math.log(budget_s / self.end_s)
        middle = self.middle(budget_s)
        variance = self.shared.noise**2 * (1 / self.runs + 1 / runs) + (x * self.slope_error) ** 2
        half = quantile(0.5 + LEVEL / 2, self.shared.freedom) * math.sqrt(variance)
        return Forecast(budget_s, *map(self._back, (middle, middle - half, middle + half)))

    def _back(self, value: float) -> float:
        return math.exp(value) if self.shared.ratios else value


def trend(runs: Runs, shared: Common, law: Law = LAW) -> Trend | None:
    """How a configuration goes on; None without a usable curve (`missing` says why)."""
    if not (lines := _lines(runs, shared.ratios)):
        return None
    own = shared.slope if runs.anneals else float(np.mean([line.slope for line in lines]))
    own_error = 0.0 if runs.anneals else shared.noise / math.sqrt(sum(line.width for line in lines))
    errors = (law.spread * shared.slope, law.later * shared.slope_error, law.own * own_error)
    return Trend(
        shared,
        float(np.mean([line.end_s for line in lines])),
        float(np.mean([line.value for line in lines])),
        len(lines),
        law.later * shared.slope + law.own * (own - shared.slope),
        math.hypot(*errors),
    )


def missing(runs: Runs, ratios: bool) -> str:
    """Why there is no forecast from these runs; '' where there is one."""
    lines = [_line(points, ratios) for points in runs.curves]
    if any(isinstance(line, _Line) for line in lines):
        return ""
    return next((line for line in lines if isinstance(line, str)), "none of its runs ended")


def forecast(
    curves: Sequence[Curve], budget_s: float, *, others: Sequence[Runs] = (), ratios: bool = True,
    anneals: bool = False, runs: int = 1,
) -> tuple[Forecast | None, str]:  # fmt: skip
    """What the mean of so many `runs` with `budget_s` will be, from the `curves` of one configuration, one per seed.

    `others`: runs of other configurations at the same budget; without any, its own slope is the common one. `ratios`:
    values fall and are positive throughout (`Results.ratios`). Returns (None, why) where fewer than three points of a
    curve can be used.
    """
    mine = Runs(tuple(curves), anneals)
    shared = common([mine, *others], ratios)
    found = trend(mine, shared) if shared is not None else None
    return (None, missing(mine, ratios)) if found is None else (found.at(budget_s, runs), "")


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Where one configuration is expected to pass another."""

    budget_s: float
    overlap: bool
    """Whether the intervals of both overlap from the budget so far to the farthest: then which one is better with any
    of these budgets is not known."""


def crossing(one: Trend, other: Trend, farthest: float = FARTHEST) -> Crossing | None:
    """The budget at which two forecasts are equal; None where that is not between the budget so far and `farthest`
    times it."""
    start_s = max(one.end_s, other.end_s)
    bend = one.slope - other.slope
    ahead = math.inf if not bend else (other.middle(start_s) - one.middle(start_s)) / bend
    if not 0 < ahead <= math.log(farthest):
        return None
    pairs = [(one.at(s), other.at(s)) for s in start_s * np.geomspace(1, farthest, 33)]
    overlap = all(a.low <= b.high and b.low <= a.high for a, b in pairs)
    return Crossing(start_s * math.exp(ahead), overlap)
