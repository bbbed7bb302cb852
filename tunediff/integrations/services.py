"""What a tracking service is sent of a search, and the services by name."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tunediff.core.point import Point

PROJECT = "tunediff"
"""Default name of the project or experiment at a service."""
SERVICES = {
    "wandb": ("wandb", "wandb_runs.WandbRuns"),
    "mlflow": ("mlflow", "mlflow_runs.MlflowRuns"),
    "trackio": ("trackio", "trackio_runs.TrackioRuns"),
    "tensorboard": ("tensorboardX", "tensorboard_runs.TensorboardRuns"),
}
"""Package of every service, and the class that speaks to it."""
FIRST = (
    "loss",
    "train_s",
    "device_s",
    "samples",
    "samples_per_s",
    "steps",
    "index",
    "peak_memory_mib",
    "energy_wh",
)
"""What services show first, with what the evaluation returned; other numbers are a group of their
own."""
GROUP = "system"
SUCCESSES = ("ok", "pruned", "skipped")
"""Statuses that are no failure of a run."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run at a service: a trial, or the search as a whole, under which the trials are."""

    kind: str
    """`search`, `trial`, `confirming` for a confirming run, or `training` for one outside any
    search."""
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
    folder: Path
    """The folder of the search."""

    def at(self, point: Point) -> float:
        """Return the Unix time of a point at which services draw it: its training seconds after the
        start."""
        return self.started + point.train_s


@dataclasses.dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    status: str
    reason: str
    time: float
    """Unix time."""
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Numbers and texts by name."""
    files: tuple[Path, ...] = ()

    @property
    def failed(self) -> bool:
        """Return whether the service shows it as a failure."""
        return self.status not in SUCCESSES


class Service(Protocol):
    """Sends runs to one service; any exception means that it may be tried again."""

    def send(
        self, run: Run, points: Sequence[Point], pictures: Mapping[str, Path], end: RunEnd | None
    ) -> None:
        """Send the new points of a run, which is begun or continued, its pictures of now, and how
        it ended."""

    def close(self) -> None:
        """Wait until the service has everything."""


def make(name: str, folder: Path) -> Service:
    """Return the service of that name, for the search in `folder`."""
    module, _, kind = SERVICES[name][1].partition(".")
    service: Service = getattr(importlib.import_module(f"tunediff.integrations.{module}"), kind)(
        folder
    )
    return service


def numbers(point: Point) -> dict[str, float]:
    """Return the finite numbers of a point by name; what tells of the machine is named
    `system/…`."""
    first = {*FIRST, *point.metrics}
    values = {name: float(value) for name, value in point.flat.items() if is_number(value)}
    return {name if name in first else f"{GROUP}/{name}": value for name, value in values.items()}


def is_number(value: object) -> bool:
    """Return whether a service can draw a value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def project(variable: str) -> str:
    """Return the project that the service's own variable names, or the default."""
    return os.environ.get(variable) or PROJECT
