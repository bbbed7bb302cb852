"""The protocol of what runs trials: processes on devices, started, listened to and stopped.

It has three implementations: `local.LocalBackend` on this machine without Ray, `CommandBackend` for
commands (`command/trial.py`), and `ray_backend.RayBackend` on a Ray cluster. Imports neither
torch nor Ray.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from tunediff.core.errors import Failure
from tunediff.core.listeners import Listener
from tunediff.core.point import Point
from tunediff.core.trial_record import End
from tunediff.search_space import SearchSpace
from tunediff.tuning.resources import Pool
from tunediff.tuning.trial_spec import TrialSpec

Event = Point | End | Failure
"""What a job reports; an `End` is the last, or the `Failure` of which its processes died."""


Reported = dict[str, Any]
"""A point as listeners, and Tune's scheduler and pages, have it: its content by flat names."""


class Interrupted(BaseException):
    """Raised in the thread of a run by `check`: the loop that has started it has ended."""


class Slot(Protocol):
    """Runs one job at a time, which is an attempt at a trial."""

    def start(self, job: TrialSpec) -> str:
        """Start a job and return its serial; the job of a driver that was restarted runs on."""

    def event(self, serial: str, cursor: int) -> Event | None:
        """Return event number `cursor` of the job; None if it does not happen within seconds."""

    def go_on(self, serial: str, index: int) -> None:
        """Let the trial train on after point `index`."""

    def stop(self, reason: str) -> None:
        """End the job and its processes at once."""

    def missing_s(self) -> float:
        """Return for how many seconds the workers have been starting; 0: they have started."""

    def gone(self, nodes: Sequence[str]) -> list[str]:
        """Return those of these nodes that are not alive any more."""


class Backend(abc.ABC):
    """The devices of a session, and what runs trials on them."""

    devices: Pool
    device = "cpu"
    """What trials train on: "cuda" or "cpu"."""
    interrupt_s = 0.0
    """Seconds that a run has to end by itself in after `check` has raised `Interrupted`."""

    @abc.abstractmethod
    def run(self, spec: TrialSpec, check: Callable[[], bool]) -> Iterator[Reported]:
        """Run a trial that has its devices, and yield its points; its journal has its end then.

        Calls `check` again and again, which returns False, or raises `Interrupted`.
        """

    def release(self, spec: TrialSpec) -> None:  # noqa: B027
        """Note that a trial is over: what is left of it, such as a stopped one, ends."""

    def say_through(self, say: Callable[[str], None]) -> None:  # noqa: B027
        """Call `say` with what changes on the machines."""

    def show(self, slot: int, line: str) -> None:  # noqa: B027
        """Show what happens on a slot, where the backend has pages for that."""

    def listeners(self, folder: Path, space: SearchSpace) -> Sequence[Listener]:
        """Return what shows the trials of a search on these pages."""
        return ()
