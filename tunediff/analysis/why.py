"""Explain why the winner is ahead: by speed, or by learning per sample."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from tunediff.core.trial_record import TrialRecord


@dataclasses.dataclass(frozen=True)
class Why:
    """The winner compared with the baseline."""

    seconds: float
    """Seconds, in the unit of the budgets, at which both are compared."""
    at_seconds: tuple[float, float]
    """Objective of (baseline, winner) at these seconds."""
    samples: tuple[int, int]
    """Samples that both have seen by then."""
    equal_samples: int
    """The smaller of these numbers."""
    at_samples: tuple[float, float] | None
    """Objective of both after `equal_samples`; None: one of them was not evaluated early enough."""
    mode: str = "min"
    """Whether a smaller (`min`) or a larger (`max`) objective is better."""
    ratios: bool = True
    """Whether `total` and its parts are logarithms of ratios; else they are differences."""

    @property
    def learning(self) -> float | None:
        """Return the part of `total` that is present at equal samples."""
        return self._gain(self.at_samples) if self.at_samples is not None else None

    @property
    def total(self) -> float:
        """Return log(winner / baseline), or winner − baseline, at equal seconds; < 0: better."""
        return self._gain(self.at_seconds)

    @property
    def throughput(self) -> float | None:
        """Return the rest: the effect of samples that the winner saw more or less."""
        return self.total - self.learning if self.learning is not None else None

    def _gain(self, values: tuple[float, float]) -> float:
        base, winner = map(math.log, values) if self.ratios else values
        return base - winner if self.mode == "max" else winner - base


def why(
    baseline: TrialRecord, winner: TrialRecord, metric: str, mode: str = "min", ratios: bool = True
) -> Why | None:
    """Return the decomposition; None unless both have values, which must be positive for `ratios`.

    Curves are interpolated between evaluations: linearly in seconds or samples, and for `ratios`
    with the objective on a logarithmic scale.
    """
    curves = [_curve(trial, metric, ratios) for trial in (baseline, winner)]
    if not all(map(len, curves)):
        return None
    # Trainings exceed their budget by a part of a step: such ends count as the same second.
    ends = [float(curve[-1, 0]) for curve in curves]
    seconds = min(ends)
    if max(ends) > 1.02 * seconds:
        ends = [seconds, seconds]
    base, won = (_at(curve, 0, end) for curve, end in zip(curves, ends, strict=True))
    if base is None or won is None:
        return None
    fewer = min(base[1], won[1])
    equal_base, equal_won = (
        row if row[1] == fewer else _at(curve, 1, fewer)
        for row, curve in zip((base, won), curves, strict=True)
    )
    back, at_samples = math.exp if ratios else float, None
    if equal_base is not None and equal_won is not None:
        at_samples = (back(equal_base[2]), back(equal_won[2]))
    values, samples = (back(base[2]), back(won[2])), (round(base[1]), round(won[1]))
    return Why(seconds, values, samples, round(fewer), at_samples, mode, ratios)


def _curve(trial: TrialRecord, metric: str, ratios: bool) -> NDArray[np.float64]:
    """Return (seconds, samples, objective) of every evaluation; for `ratios` its logarithm."""
    points = [p for p in trial.points if metric in p and (not ratios or p[metric] > 0)]
    scale = math.log if ratios else float
    rows = [(point[trial.along], point["samples"], scale(point[metric])) for point in points]
    return np.array(rows, dtype=float)


def _at(
    curve: NDArray[np.float64], column: int, position: float
) -> tuple[float, float, float] | None:
    """Return a curve's row where a column reaches `position`, interpolated; None outside."""
    if not curve[0, column] <= position <= curve[-1, column]:
        return None
    seconds, samples, value = (
        float(np.interp(position, curve[:, column], values)) for values in curve.T
    )
    return seconds, samples, value
