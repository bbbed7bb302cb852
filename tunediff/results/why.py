"""Why the winner is ahead: how much of it is speed, and how much is learning per sample."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from tunediff.record import TrialRecord


@dataclasses.dataclass(frozen=True)
class Why:
    """The winner beside the baseline."""

    seconds: float
    """Training seconds at which both are compared."""
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

    @property
    def learning(self) -> float | None:
        """The part of `total` that is there at equal samples already."""
        return self._log(self.at_samples) if self.at_samples is not None else None

    @property
    def total(self) -> float:
        """log(winner / baseline) at equal seconds, turned so that below 0 the winner is better."""
        return self._log(self.at_seconds)

    @property
    def throughput(self) -> float | None:
        """The rest: what the winner made of its further samples, or lacks for having seen fewer."""
        return self.total - self.learning if self.learning is not None else None

    def _log(self, values: tuple[float, float]) -> float:
        return math.log(values[1] / values[0]) * (-1.0 if self.mode == "max" else 1.0)


def why(baseline: TrialRecord, winner: TrialRecord, metric: str, mode: str = "min") -> Why | None:
    """The decomposition; None without positive values of both.

    Curves are read between their evaluations: straight in training seconds or samples, the objective on a logarithmic
    scale.
    """
    curves = [_curve(trial, metric) for trial in (baseline, winner)]
    if not all(map(len, curves)):
        return None
    # Trainings overshoot their budget by a part of a step: that close, their ends count as the same second.
    ends = [float(curve[-1, 0]) for curve in curves]
    seconds, alike = min(ends), max(ends) <= 1.02 * min(ends)
    then = [_read(curve, 0, end if alike else seconds) for curve, end in zip(curves, ends, strict=True)]
    known = [row for row in then if row is not None]
    if len(known) < 2:
        return None
    (_, of_base, base), (_, samples, value) = known
    fewer = min(of_base, samples)
    earlier = [row if row[1] == fewer else _read(curve, 1, fewer) for row, curve in zip(known, curves, strict=True)]
    same = (earlier[0][2], earlier[1][2]) if earlier[0] is not None and earlier[1] is not None else None
    return Why(seconds, (base, value), (round(of_base), round(samples)), round(fewer), same, mode)


def _curve(trial: TrialRecord, metric: str) -> NDArray[np.float64]:
    """(seconds, samples, logarithm of the objective) of every evaluation where that is positive."""
    known = [point for point in trial.points if (point.get(metric) or 0.0) > 0]
    return np.array([(point["train_s"], point["samples"], math.log(point[metric])) for point in known], dtype=float)


def _read(curve: NDArray[np.float64], column: int, place: float) -> tuple[float, float, float] | None:
    """(seconds, samples, objective) where a column is at `place`; None outside of the evaluations."""
    if not curve[0, column] <= place <= curve[-1, column]:
        return None
    seconds, samples, log = (float(np.interp(place, curve[:, column], values)) for values in curve.T)
    return seconds, samples, math.exp(log)
