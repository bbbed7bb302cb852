"""A search's sessions: when they ran (`sessions.jsonl`), and `StoppedError`."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunediff.analysis import is_number, journals
from tunediff.core import environment
from tunediff.core.errors import TunediffError
from tunediff.core.listeners import Listener
from tunediff.experiment import model

SESSIONS = "sessions.jsonl"
ASKED = "tunediff.open_study"
"""Begins the command of sessions whose trials were run by whoever asked for them."""


class StoppedError(TunediffError, RuntimeError):
    """The search stopped for a cause outside of it, such as a full disk; it can resume."""


class NotStartedError(StoppedError):
    """Ray did not start on this machine."""


def spent_s(folder: Path) -> float:
    """Return the commands' wall-clock in seconds; a killed one lasted to its last line."""
    outside = (
        float(line["seconds"])
        for line in journals.lines(folder / SESSIONS)
        if line.get("event") == journals.OUTSIDE and is_number(line.get("seconds"))
    )
    return sum(outside) + sum(period.spent_s or 0.0 for period in journals.sessions(folder))


def confirming_folders(folder: Path) -> list[Path]:
    """Return the folders of all confirming runs of a search."""
    return sorted(path for path in folder.glob("confirm*/") if model.is_search(path))


def all_spent_s(folder: Path) -> float:
    """Return the wall-clock of a search's commands so far, confirming runs included."""
    return sum(map(spent_s, [folder, *confirming_folders(folder)]))


class CommandTime:
    """Charges a search or comparison for what its command takes outside of sessions.

    That is all from the start of its process on: imports, checks, Ray's end, the report.
    """

    def __init__(self, folder: Path, begun: float) -> None:
        """`begun`: monotonic time at which the command began."""
        self._folder, self._begun, self._before_s = folder, begun, all_spent_s(folder)
        self._charges = True

    def dismiss(self) -> None:
        """Charge nothing from now on: the command has found nothing to run."""
        self._charges = False

    def charge(self) -> None:
        """Charge for all seconds until now that are not charged yet; no session is open."""
        if not self._charges:
            return
        charged_s = all_spent_s(self._folder) - self._before_s
        if (outside_s := time.monotonic() - self._begun - charged_s) > 0:
            with contextlib.suppress(OSError):  # the trials report a full disk
                _note(self._folder, journals.OUTSIDE, seconds=outside_s)


def alive(folder: Path) -> None:
    """Note that the session goes on, so that its duration is known to here if it is killed."""
    with contextlib.suppress(OSError):  # the trials report a full disk
        _note(folder, "alive")


class SessionNotes(Listener):
    """Notes with every event of a trial that the session goes on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, trial: str, content: Mapping[str, Any]) -> None:
        alive(self._folder)

    point = end = start


def note_time_is_up(folder: Path) -> None:
    """Note that no further trial begins because it would not end within `budget: total`."""
    with contextlib.suppress(OSError):
        _note(folder, journals.TIME_IS_UP)


def _note(folder: Path, event: str, **content: Any) -> None:
    """Append a line to `sessions.jsonl`. Raises `OSError`."""
    now = {"time": time.time(), "monotonic_s": time.monotonic()}
    with open(folder / SESSIONS, "a") as file:
        file.write(json.dumps({"event": event, **now, **content}) + "\n")


@contextlib.contextmanager
def recorded_session(
    folder: Path, command: str, over: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Note a session's begin, with its command and the hardware, and its end.

    The end is `complete` unless an exception, such as that of Ctrl-C, ends it: a limit is reached,
    or nothing is left. `over` returns whether that is so, for whoever can end a session earlier
    without an exception.
    """
    _note(folder, "begin", command=command, environment=environment.describe())
    complete = False
    try:
        yield
        complete = over()
    finally:
        with contextlib.suppress(OSError):  # the trials report a full disk
            _note(folder, "end", complete=complete)
