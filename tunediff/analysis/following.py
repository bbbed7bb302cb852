"""Read the journals of a running search again and again; the cost does not grow with its trials."""

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
"""Number of trials up to which everything that is shown is computed again at every event."""
SHARE = 0.05
"""Greatest share of the time for computations that grow with the number of trials."""


class Following:
    """The trials of a search; one that has ended is read once, so that thousands stay cheap."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the folder of the search."""
        self._place, self._running = folder / "trials", set[str]()
        self.records: dict[str, TrialRecord] = {}
        """Records by name."""

    @property
    def ended(self) -> int:
        return len(self.records) - len(self._running)

    @property
    def trials(self) -> list[TrialRecord]:
        return [self.records[name] for name in sorted(self.records, key=trial_record.by_number)]

    def read(self) -> list[TrialRecord]:
        """Read again and return the trials that have ended since the last call."""
        names = os.listdir(self._place) if self._place.is_dir() else []
        new = (name for name in names if name.startswith("t") and name not in self.records)
        ended = list[TrialRecord]()
        for name in sorted({*new, *self._running}, key=trial_record.by_number):
            if (trial := trial_record.read_trial(self._place / name)) is None:
                continue
            # Names become paths: a foreign journal must not choose one.
            self.records[name] = dataclasses.replace(trial, name=name)
            self._running.add(name)
            if trial.finished:
                self._running.remove(name)
                ended.append(self.records[name])
        return ended


class Throttle:
    """Limit how often something slow is computed: it takes at most `SHARE` of the time."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._free_at = now, 0.0

    def due(self, trials: int) -> bool:
        """Return whether to compute it now, with so many trials."""
        return trials <= MANY or self._now() >= self._free_at

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the time of the computation inside."""
        begin = self._now()
        yield
        self._free_at = self._now() + (self._now() - begin) / SHARE
