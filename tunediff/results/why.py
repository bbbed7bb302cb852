"""Why the winner is ahead: how much of it is speed, and how much is learning per image."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tunediff.record import TrialRecord


@dataclasses.dataclass(frozen=True)
class Why:
    """The winner beside the baseline."""

    seconds: float
    """Training seconds at which both are compared."""
    at_seconds: tuple[float, float]
    """Objective of (baseline, winner) then."""
    images: tuple[int, int]
    """Images that they have seen by then."""
    equal_images: int
    """The smaller of the two."""
    at_images: tuple[float, float] | None
    """Objective of both when they had seen so many; None: one of them was not evaluated early enough."""
    mode: str = "min"
    """Whether a smaller (`min`) or a larger (`max`) objective is better."""

    @property
    def learning(self) -> float | None:
        """The part of `total` that is there at equal images already."""
        return self._log(self.at_images) if self.at_images is not None else None

    @property
    def total(self) -> float:
        """log(winner / baseline) at equal seconds, turned so that below 0 the winner is better."""
        return self._log(self.at_seconds)

    @property
    def throughput(self) -> float | None:
        """The rest: what the winner made of its further images, or lacks for having seen fewer."""
        return self.total - self.learning if self.learning is not None else None

    def _log(self, values: tuple[float, float]) -> float:
        return math.log(values[1] / values[0]) * (-1.0 if self.mode == "max" else 1.0)


@dataclasses.dataclass(frozen=True)
class _Curve:
    """One trial's evaluations with a positive objective, which is read on a logarithmic scale."""

    seconds: list[float]
    images: list[float]
    values: list[float]

    @property
    def logs(self) -> list[float]:
        return list(map(math.log, self.values))

    def at_seconds(self, seconds: float) -> tuple[float, float] | None:
        """(objective, images) then; None before the first evaluation, where nothing is known, and after the last."""
        if not self.seconds[0] <= seconds <= self.seconds[-1]:
            return None
        value, images = (float(np.interp(seconds, self.seconds, ys)) for ys in (self.logs, self.images))
        return self.values[-1] if seconds == self.seconds[-1] else math.exp(value), images

    def at_images(self, images: float) -> float | None:
        """The objective when so many had been seen."""
        if not self.images[0] <= images <= self.images[-1]:
            return None
        return math.exp(float(np.interp(images, self.images, self.logs)))


def why(baseline: TrialRecord, winner: TrialRecord, metric: str, mode: str = "min") -> Why | None:
    """The decomposition; None without positive values of both.

    Curves are read between their evaluations: straight in training seconds or images, the objective on a logarithmic
    scale.
    """
    curves = [_curve(trial, metric) for trial in (baseline, winner)]
    if not all(curve.seconds for curve in curves):
        return None
    # Trainings overshoot their budget by a part of a step: that close, their ends count as the same second.
    seconds = min(curve.seconds[-1] for curve in curves)
    alike = max(curve.seconds[-1] for curve in curves) <= 1.02 * seconds
    ends = [curve.at_seconds(curve.seconds[-1] if alike else seconds) for curve in curves]
    known = [end for end in ends if end is not None]
    if len(known) < 2:
        return None
    (base, of_base), (value, images) = known
    fewer = min(of_base, images)
    earlier = [
        end if seen == fewer else curve.at_images(fewer) for (end, seen), curve in zip(known, curves, strict=True)
    ]
    same = (earlier[0], earlier[1]) if earlier[0] is not None and earlier[1] is not None else None
    return Why(seconds, (base, value), (round(of_base), round(images)), round(fewer), same, mode)


def _curve(trial: TrialRecord, metric: str) -> _Curve:
    points = [point for point in trial.points if (point.get(metric) or 0.0) > 0]
    return _Curve(*([float(point[name]) for point in points] for name in ("train_s", "images", metric)))
