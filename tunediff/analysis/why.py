"""Why the winner is ahead: how much of it is speed, and how much is learning per sample."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from tunediff.core.trial_record import TrialRecord


@dataclasses.dataclass(frozen=True)
class Why:
    """The winner beside the baseline."""

    seconds: float
    """Seconds, in the unit of their budgets, at which both are compared."""
    at_seconds: tuple[float, float]
    """Objective of (baseline, winner) then."""
    samples: tuple[int, int]
    """Samples that they have seen by then."""
    equal_samples: int
    """The smaller of the two."""
    at_samples: tuple[float, float] | None
    """Objective of both when they had seen so many; None: one of them was not evaluated early enough."""
    mode: str = "min"
    """Whether a smaller (`min`) or a larger (`max`) objective is better."""
    ratios: bool = True
    """Whether `total` and its parts are logarithms of ratios; else they are differences."""

    @property
    def learning(self) -> float | None:
        """The part of `total` that is there at equal samples already."""
        return self._gain(self.at_samples) if self.at_samples is not None else None

    @property
    def total(self) -> float:
        """log(winner / baseline) or winner − baseline at equal seconds; below 0 the winner is better."""
        return self._gain(self.at_seconds)

    @property
    def throughput(self) -> float | None:
        """The rest: what the winner made of its further samples, or lacks for having seen fewer."""
        return self.total - self.learning if self.learning is not None else None

    def _gain(self, values: tuple[float, float]) -> float:
        base, winner = map(math.log, values) if self.ratios else values
        return base - winner if self.mode == "max" else winner - base


def why(baseline: TrialRecord, winner: TrialRecord, metric: str, mode: str = "min", ratios: bool = True) -> Why | None:
    """The decomposition; None without values of both, which count for `ratios` if they are positive.

    Curves are read between their evaluations: straight in seconds or samples, and for `ratios` the objective
    on a logarithmic scale.
    """
    curves = [_curve(trial, metric, ratios) for trial in (baseline, winner)]
    if not all(map(len, curves)):
        return None
    # Trainings overshoot their budget by a part of a step: that close, their ends count as the same second.
    ends = [float(curve[-1, 0]) for curve in curves]
    seconds, alike = min(ends), max(ends) <= 1.02 * min(ends)
    then = [_read(curve, 0, end if alike else seconds, ratios) for curve, end in zip(curves, ends, strict=True)]
    known = [row for row in then if row is not None]
    if len(known) < 2:
        return None
    (_, of_base, base), (_, samples, value) = known
    fewer = min(of_base, samples)
    pairs = zip(known, curves, strict=True)
    earlier = [row if row[1] == fewer else _read(curve, 1, fewer, ratios) for row, curve in pairs]
    same = (earlier[0][2], earlier[1][2]) if earlier[0] is not None and earlier[1] is not None else None
    return Why(seconds, (base, value), (round(of_base), round(samples)), round(fewer), same, mode, ratios)


def _curve(trial: TrialRecord, metric: str, ratios: bool) -> NDArray[np.float64]:
    """(seconds, samples, objective) of every evaluation; of `ratios` its logarithm, where it is positive."""
    known = [(point[trial.along], point["samples"], float(point[metric])) for point in trial.points if metric in point]
    logs = [(seconds, samples, math.log(value)) for seconds, samples, value in known if value > 0] if ratios else known
    return np.array(logs, dtype=float)


def _read(curve: NDArray[np.float64], column: int, place: float, ratios: bool) -> tuple[float, float, float] | None:
    """(seconds, samples, objective) where a column is at `place`; None outside of the evaluations."""
    if not curve[0, column] <= place <= curve[-1, column]:
        return None
    seconds, samples, value = (float(np.interp(place, curve[:, column], values)) for values in curve.T)
    return seconds, samples, math.exp(value) if ratios else value
