"""Reading the journals of a search again and again while it runs, whatever the number of its trials."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tunediff.core import trial_record
from tunediff.core.trial_record import TrialRecord

MANY = 500
"""Trials up to which all that is shown is made anew at every event."""
SHARE = 0.05
"""Of the time, at most, that is then spent on what takes longer with every trial."""


class Following:
    """The trials of a search; one that has ended is read once, so that a look costs no more after thousands."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the search."""
        self._place, self._running = folder / "trials", set[str]()
        self.known: dict[str, TrialRecord] = {}
        """By name."""

    @property
    def ended(self) -> int:
        """How many have ended."""
        return len(self.known) - len(self._running)

    @property
    def trials(self) -> list[TrialRecord]:
        """In order of their numbers."""
        return [self.known[name] for name in sorted(self.known, key=trial_record.by_number)]

    def read(self) -> list[TrialRecord]:
        """Look again; those that have ended since the last time."""
        names = os.listdir(self._place) if self._place.is_dir() else []
        new, ended = (name for name in names if name.startswith("t") and name not in self.known), list[TrialRecord]()
        for name in sorted({*new, *self._running}, key=trial_record.by_number):
            if (trial := trial_record.read_trial(self._place / name)) is None:
                continue
            self.known[name] = dataclasses.replace(trial, name=name)  # a line of a foreign journal names no path
            self._running.add(name)
            if trial.finished:
                self._running.remove(name)
                ended.append(self.known[name])
        return ended


class Throttle:
    """When to do again what takes longer the more there is: so that it takes `SHARE` of the time at most."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._free_at = now, 0.0

    def due(self, trials: int) -> bool:
        """Whether it is time, with so many trials."""
        return trials <= MANY or self._now() >= self._free_at

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """What is done inside counts."""
        begin = self._now()
        yield
        self._free_at = self._now() + (self._now() - begin) / SHARE
