"""The seconds of a program: since its start, since a line that it prints, or as it counts them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from tunediff.command.metrics import as_number, value_in
from tunediff.core.clock import LINE, PROCESS, TRAINING

START, PAUSE, GO = "TUNEDIFF start", "TUNEDIFF pause", "TUNEDIFF go"


@dataclasses.dataclass
class CommandClock:
    """Counts the seconds of one run; every argument `now` is of one monotonic clock."""

    begun: float
    """When the process was started."""
    start_line: re.Pattern[str] | None = None
    """A line at which the clock begins, besides `TUNEDIFF start`."""
    seconds_line: re.Pattern[str] | None = None
    """Lines with the program's own seconds, in its one group."""
    column: str | None = None
    """The column of the file of metrics that has them."""
    resumed_s: float = 0.0
    """Seconds of the clock at the checkpoint from which the process goes on."""
    waits: bool = False
    """Whether it stands still at `resumed_s` until its start, since it had one before."""
    pauses: bool = False
    """Whether the run has printed `TUNEDIFF pause`."""
    started: float | None = None
    own_s: float | None = None
    """Seconds that the program has printed last, with those before a checkpoint."""
    fault: str = ""
    """Why its own seconds cannot be read."""
    _before_s: float | None = None
    """Seconds before the checkpoint that its own do not contain; None: it has printed none yet."""
    _paused_at: float | None = None
    _paused_s: float = 0.0

    def read(self, line: str, now: float) -> None:
        """Take note of a line that concerns the clock."""
        text = line.strip()
        begins = self.start_line is not None and self.start_line.search(line) is not None
        if self.started is None and (text == START or begins):
            self.start(now)
        elif text == PAUSE and self._paused_at is None:
            self._paused_at, self.pauses = now, True
        elif text == GO and self._paused_at is not None:
            self._paused_s += now - self._paused_at
            self._paused_at = None
        if self.seconds_line is not None and (match := self.seconds_line.search(line)):
            in_ms = "ms" in line[match.end(1) : match.end(1) + 3]
            self.count(match[1], in_ms, "a group around the seconds")

    def read_record(self, record: Mapping[str, Any], has_value: bool) -> None:
        """Take note of a record of the file of metrics, which has its seconds, or milliseconds in a
        column such as `train_time_ms`; a value has to have some."""
        own = None if self.column is None else value_in(record, self.column)
        if self.column is not None and (own is not None or (has_value and self.own_s is None)):
            allowed = f"a column of the file with its seconds: {', '.join(record)}"
            self.count(self.column if own is None else own, self.column[-3:] == "_ms", allowed)

    def count(self, own: Any, in_ms: bool, allowed: str) -> None:
        """Take the program's own seconds, or note why they are none."""
        seconds = as_number(own) / (1000.0 if in_ms else 1.0)
        if not math.isfinite(seconds):
            self.fault = f"time: {own!r} is no number; allowed: {allowed}"
            return
        if self._before_s is None:  # a counter that begins anew, or one that was saved
            self._before_s = self.resumed_s if seconds < self.resumed_s else 0.0
        self.own_s = self._before_s + seconds

    def start(self, now: float) -> None:
        """Begin to count."""
        self.started, self._paused_s, self._paused_at, self.waits = now, 0.0, None, False

    def elapsed_s(self, now: float) -> float:
        """Return the seconds that count so far: the program's own where it prints them."""
        return self.own_s or self.resumed_s if self.counts_own else self._judged_s(now)

    def _judged_s(self, now: float) -> float:
        if self.waits:
            return self.resumed_s
        until = now if self._paused_at is None else self._paused_at
        begun = self.begun if self.started is None else self.started
        return max(0.0, self.resumed_s + until - begun - self._paused_s)

    def reached(self, limit_s: float, now: float) -> bool:
        """Return whether the budget is spent, or twice the budget by the judge's clock."""
        if not self.counts_own:
            return self._judged_s(now) >= limit_s
        return self.elapsed_s(now) >= limit_s or self._judged_s(now) >= 2 * limit_s

    def remaining_s(self, limit_s: float, now: float) -> float:
        """Return the least seconds until the budget can be spent; while it pauses, all of them."""
        return max(0.0, limit_s - self._judged_s(now))

    @property
    def counts_own(self) -> bool:
        return self.seconds_line is not None or self.column is not None

    @property
    def kind(self) -> str:
        """Return what the clock counts: `process`, `from a line` or `training`."""
        if self.own_s is not None:
            return TRAINING
        if self.started is None:
            return PROCESS
        return TRAINING if self.pauses else LINE

    def start_up_s(self, now: float) -> float | None:
        """Return the seconds before the clock began; None where it began with the process."""
        return None if self.started is None else self.started - self.begun
