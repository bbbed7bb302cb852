"""Read the sessions of a search, and its journals while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tunediff.analysis import Results
from tunediff.core import text, trial_record
from tunediff.core.trial_record import Line, TrialRecord

MANY = 500
"""Number of trials up to which everything that is shown is computed again at every event."""
SHARE = 0.05
"""Greatest share of the time for computations that grow with the number of trials."""


# ---- sessions
TIME_IS_UP = "time is up"
"""The event of `sessions.jsonl` after which no trial begins, for lack of `budget: total`."""
OUTSIDE = "outside"
"""The event of `sessions.jsonl` with seconds of a command outside of its sessions."""


@dataclasses.dataclass
class SearchSession:
    """One period for which the search ran."""

    begin: float
    """Unix time."""
    end: float | None
    """None: it is running, or was killed."""
    command: str
    environment: dict[str, object]
    complete: bool = False
    """Whether a limit was reached or nothing was left to run: it was not interrupted."""
    time_is_up: bool = False
    """Whether trials were left out because they would not have ended within `budget: total`."""
    spent_s: float | None = None
    """Wall-clock until its last line, in seconds; None: it has no line but its first."""


def sessions(folder: Path) -> list[SearchSession]:
    """Return the periods for which the search ran, as far as they were recorded."""
    periods, first = list[SearchSession](), Line()
    for line in lines(folder / "sessions.jsonl"):
        if line["event"] == "begin":
            command, environment = line.get("command", ""), line.get("environment", {})
            periods.append(SearchSession(line["time"], None, command, environment))
            first = line
        elif periods and line["event"] != OUTSIDE:
            period = periods[-1]
            # By the monotonic clock, which nobody sets; what is noted after the end spends nothing
            if period.end is None:
                period.spent_s = max(0.0, line["monotonic_s"] - first["monotonic_s"])
            period.time_is_up |= line["event"] == TIME_IS_UP
            if line["event"] == "end":
                period.end, period.complete = line["time"], line.get("complete") is True
    return periods


def over(results: Results, periods: Sequence[SearchSession]) -> bool:
    """Return whether a search has ended.

    All its trials have ended, and either its last session has ended or all planned trials exist.
    """
    ended = periods[-1].end is not None if periods else False
    enough = len(results.trials) >= results.space.budget.trials
    return (ended or enough) and all(trial.finished for trial in results.trials)


def not_begun(results: Results, periods: Sequence[SearchSession]) -> str:
    """Return how many trials an ended search left out, and why; '': none, or interrupted."""
    space, many = results.space, results.space.budget.trials - len(results.trials)
    if many <= 0 or not periods or not periods[-1].complete:
        return ""
    why = "nothing new was left to draw"
    if periods[-1].time_is_up and space.budget.total_s is not None:
        per_trial_s = space.budget.total_s / max(1, len(results.trials))
        enough = text.seconds(60.0 * math.ceil(per_trial_s * space.budget.trials / 60))
        words = ("--resume", results.folder.name, "--total", enough)
        more = text.command("search", *words, storage=results.folder.parent)
        why = (
            f"another would not end within {text.seconds(space.budget.total_s)}; to run them:"
            f" {more}"
        )
    return f"{many:,} of {text.pluralize(space.budget.trials, 'trial')}: {why}"


def lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a file, without an incomplete one; of a missing file none."""
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


# ---- a search that runs
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
