"""The curve of one run: which of its values become points."""

from __future__ import annotations

import dataclasses

from tunediff.core.point import Point

POINTS = 20
"""Points of a curve at most, at equal shares of the budget."""
GROWTH = 1.05
"""Least growth of the seconds from point to point where no budget ends the run."""


class Curve:
    """Takes every value as it comes, and gives out the points that are complete.

    With a limit its seconds have `POINTS` equal shares: the last value in a share is its point, so
    that curves of several runs have points at the same indices. Without one the points thin out
    with time. In both the last value of a run is its last point.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._pending: Point | None = None
        self._ready: list[Point] = []
        self.last_s = 0.0
        """Seconds of the last point that was complete."""
        self.latest: Point | None = None

    def resume(self, latest: Point | None, last_s: float) -> None:
        """Go on where an earlier process had this value and this last complete point."""
        self.latest, self.last_s = latest, last_s
        self._pending = latest if latest is not None and latest.train_s > last_s else None

    def add(self, point: Point) -> None:
        """Take the next value, as a point whose index and fraction are set here."""
        index, fraction = point.steps, 1.0
        if self._limit_s is not None:
            index = min(POINTS, 1 + int(point.train_s / self._limit_s * POINTS))
            fraction = index / POINTS
        if self._pending is not None and self._pending.index != index:
            self._complete()
        self._pending = self.latest = dataclasses.replace(point, index=index, fraction=fraction)

    def _complete(self) -> None:
        point, self._pending = self._pending, None
        assert point is not None
        if self._limit_s is not None or point.train_s >= GROWTH * self.last_s:
            self._ready.append(point)
            self.last_s = point.train_s

    def take(self, elapsed_s: float) -> list[Point]:
        """Return the points to whose share nothing can be added any more, each once."""
        point = self._pending
        if point is not None and self._limit_s is not None and point.index < POINTS:
            share_ends_s = point.fraction * self._limit_s
            if elapsed_s >= share_ends_s:
                self._complete()
        ready, self._ready = self._ready, []
        return ready

    def last(self) -> Point | None:
        """Return the last value as the point at the end of the run; None: there was no value."""
        if self.latest is None or self._limit_s is None:
            return self.latest
        return dataclasses.replace(self.latest, index=POINTS, fraction=1.0)
