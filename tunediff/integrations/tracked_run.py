"""What a tracking service is sent of a search."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tunediff.core.point import Point

PROJECT = "tunediff"
"""Default name of the project or experiment at a service."""
_FIRST = {
    *("loss", "train_s", "device_s", "samples", "samples_per_s", "steps", "index"),
    *("peak_memory_mib", "energy_wh"),
}
"""Numbers that services show first, with the evaluation's; others: group `system`."""
_SUCCESSES = ("ok", "pruned", "skipped")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run at a service: a trial, or the search as a whole, under which the trials are."""

    kind: str
    """`search`, `trial`, `confirming` (a confirming run) or `training` outside a search."""
    name: str
    """`t0003`, `confirm/t0003`; of the search its name."""
    search: str
    id: str
    """Unique, also among searches of one name; of the characters that every service allows."""
    search_id: str
    objective: str
    config: Mapping[str, Any]
    """Knobs by dotted name."""
    started: float
    """Unix time."""

    def at(self, point: Point) -> float:
        """Return the Unix time at which a point is drawn: training seconds after the start."""
        return self.started + point.train_s


@dataclasses.dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    status: str
    reason: str
    time: float
    """Unix time."""
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: tuple[Path, ...] = ()

    @property
    def failed(self) -> bool:
        """Return whether the service shows it as a failure."""
        return self.status not in _SUCCESSES

    @property
    def values(self) -> dict[str, Any]:
        """Return status, reason and summary, without what is empty."""
        values = {"status": self.status, "reason": self.reason, **self.summary}
        return {name: value for name, value in values.items() if value not in ("", None)}


class Service(Protocol):
    """Sends runs to one service; any exception means that it may be tried again."""

    def send(
        self, run: Run, points: Sequence[Point], pictures: Mapping[str, Path], end: RunEnd | None
    ) -> None:
        """Send a run's new points, its present pictures, and how it ended."""

    def close(self) -> None:
        """Wait until the service has everything."""


def numbers(point: Point) -> dict[str, float]:
    """Return the finite numbers of a point by name; those about the machine as `system/…`."""
    first = {*_FIRST, *point.metrics}
    values = {name: float(value) for name, value in point.flat.items() if is_number(value)}
    return {name if name in first else f"system/{name}": value for name, value in values.items()}


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def project(variable: str) -> str:
    """Return the project that the service's own variable names, or the default."""
    return os.environ.get(variable) or PROJECT
