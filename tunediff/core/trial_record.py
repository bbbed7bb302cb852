"""What one trial left behind: an append-only JSONL journal, and the `TrialRecord` read from it.

The journal in the experiment folder is the truth that `--resume`, the report and the export read. A line is written,
flushed and synced before anybody is told about it, so a kill at any moment loses nothing that was measured. Lines:
`start` (once per attempt), `worker` (who trains it), `about` (data and model), `restarted` (it begins at its first step
although an earlier attempt had come further, with the reason; `anew` in older journals), `unread` (knobs that its
training never looked at), `point` (one evaluation), `final` (one more of the finished model, at full protocol), `end`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Values, code
from tunediff.core.clock import UNITS, UnitName
from tunediff.core.point import Point

STATUSES = ("ok", "pruned", "oom", "nan", "timeout", "error", "skipped")
"""How a trial ends. `pruned`: stopped early by the scheduler; `oom`: out of device or host memory; `nan`: loss or
weights not finite; `timeout`: past its deadline; `error`: anything else, with its reason; `skipped`: never run, since
another trial has shown that it would fail."""

JOURNAL, CHECKPOINT = "journal.jsonl", "checkpoint.pt"
RESTARTED = ("restarted", "anew")
"""Names of the event of a restart: today's, and that of older journals."""
LINE_KEYS = ("event", "time")
"""What every line of a journal holds."""
Line = dict[str, Any]
"""A line of a journal, or a part of one."""


class NotFiniteError(ValueError):
    """A training that diverged: its loss, or what it has learned, is NaN or infinite. The status `nan`."""


# ------------------------------------------------------------------------------------------------------------- records
@dataclasses.dataclass(frozen=True)
class End:
    """How a trial ended, and what it took."""

    status: str
    """One of `STATUSES`."""
    reason: str = ""
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of the worker's clock, by its parts."""
    steps: int = 0
    peak: dict[str, float] = dataclasses.field(default_factory=dict)
    """Peak memory in MiB, by the names of `Point`."""
    memory: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of a trial that ran out of memory, in MiB of that memory as it did: `total_mib`, `demand_mib` (what the trial
    held and asked for) and `others_mib` (what other processes held). Empty: not known."""

    @property
    def crowded_out(self) -> bool:
        """Whether a trial ran out of memory because other processes held it, which says nothing of its configuration.

        They held over a quarter of the memory, and over half as much as the trial held and asked for.
        """
        total, demand, others = (self.memory.get(name, 0.0) for name in ("total_mib", "demand_mib", "others_mib"))
        return others > 0.25 * total and others > 0.5 * demand


@dataclasses.dataclass
class TrialRecord:
    """One trial as its journal tells it."""

    name: str
    """`t0007`: its place in the search."""
    number: int
    config: Values
    """Every knob by dotted name, and the workload."""
    drawn: Values
    """The knobs the search chose, by dotted name."""
    fingerprint: str
    budget_s: float | None = None
    unit: UnitName = "wall"  # what its search counts budgets in; `budget_s` are training seconds of its own
    attempts: int = 0
    points: list[Point] = dataclasses.field(default_factory=list)
    """The curve, in order."""
    end: End | None = None
    """None: unfinished."""
    environment: Line = dataclasses.field(default_factory=dict)
    not_effective: dict[str, str] = dataclasses.field(default_factory=dict)
    """Knobs that change nothing on this hardware or beside the others, with the reason."""
    started: float = 0.0
    """Unix time of the first attempt."""
    ended: float = 0.0
    heard: float = 0.0
    """Unix time of the last line of its journal."""
    restarts: list[str] = dataclasses.field(default_factory=list)
    """Why its training started from the beginning after it had come further, each time."""

    @property
    def status(self) -> str | None:
        """One of `STATUSES`; None: unfinished."""
        return self.end.status if self.end is not None else None

    @property
    def reason(self) -> str:
        """Why it ended so."""
        return self.end.reason if self.end is not None else ""

    @property
    def remarks(self) -> str:
        """Why it ended so, and why its training started from the beginning after it had come further."""
        restarts = [f"started from the beginning: {reason or 'no checkpoint'}" for reason in self.restarts]
        return "; ".join([*([self.reason] if self.reason else []), *restarts])

    @property
    def finished(self) -> bool:
        """Whether it will not be run again."""
        return self.end is not None

    @property
    def configuration(self) -> Any:
        """What it trained. Raises `ConfigError` if that is no configuration any more."""
        return cfg.from_dict(cfg.nest(self.config), self.name, check=False)

    @property
    def along(self) -> str:
        """The quantity along which its curve is compared with others: training seconds, or device-seconds."""
        return UNITS[self.unit].along

    @property
    def effective(self) -> Values:
        """`config` with every knob that changed nothing here at one value: equal for two that trained alike.

        Of a workload that is gone, or knobs that are no configuration any more: `config` as it is.
        """
        try:
            return cfg.flat(cfg.neutral(self.configuration, self.not_effective))
        except ConfigError:
            return dict(self.config)

    def value(self, metric: str) -> float | None:
        """The metric at the budget, if the trial ended ok."""
        if self.status != "ok" or not self.points:
            return None
        value = self.points[-1].get(metric)
        return float(value) if value is not None and math.isfinite(value) else None


# ------------------------------------------------------------------------------------------------------------ reading
def events(folder: Path) -> Iterator[Line]:
    """The lines of a trial's journal; torn lines are passed over."""
    path = folder / JOURNAL
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            yield event


def was_lost(folder: Path) -> Line | None:
    """The last line of a journal where that tells of a lost node: nobody has taken up the trial in `folder` since."""
    told = list(events(folder))
    ended = any(event["event"] == "end" for event in told)  # workers may outlive their node by seconds, and end it
    return told[-1] if told and told[-1]["event"] == "lost" and not ended else None


def disk_fault(folder: Path) -> str | None:
    """Why the trial in `folder` could not be written, where its journal's last line says so; None: it does not."""
    last = next(reversed(list(events(folder))), None)
    return str(last["reason"]) if last is not None and last["event"] == "unwritable" else None


def read_trial(folder: Path) -> TrialRecord | None:
    """The record of the trial in `folder`; None when its journal has not begun.

    Raises `ConfigError` for whole lines that are no journal's; torn ones are passed over.
    """
    try:
        with open(folder / JOURNAL, "rb") as file:
            about = os.fstat(file.fileno())  # NFS caches what it knows of a path, and asks anew when a file is opened
    except OSError:
        return None
    try:
        record = _read_trial(folder, about.st_mtime_ns, about.st_size)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{folder / JOURNAL}: is damaged: {type(error).__name__}: {error}") from None
    return record and dataclasses.replace(record, points=list(record.points))


@functools.lru_cache(maxsize=512)  # 12 KiB each, in every process
def _read_trial(folder: Path, mtime_ns: int, size: int) -> TrialRecord | None:
    """A journal only grows: what was read at this size is read once, however often a long search is looked at."""
    record: TrialRecord | None = None
    points: dict[int, Point] = {}
    final: Line = {}
    for event in events(folder):
        kind, when = event.pop("event"), event.pop("time")
        if record is not None:
            record.heard = when
        if kind == "start":
            if record is None:
                fields = ("name", "number", "config", "drawn", "fingerprint", "budget_s")
                own, unit = {field: event[field] for field in fields}, event.get("unit", "wall")
                record = TrialRecord(**own, unit=unit, started=when, heard=when)
                record.config["workload"] = code.near(str(record.config.get("workload")), folder)
            record.environment = event.get("environment", {})
            record.attempts += 1
        elif record is None:
            continue
        elif kind == "worker":
            where = {"device": event["device"], "threads": event["threads"]}
            record.environment |= event.get("environment", {}) | where
            record.not_effective = event.get("not_effective", {})
        elif kind == "point":  # a resumed trial may measure a point again: the later line is what training went on from
            points = {index: point for index, point in points.items() if index < event["index"]}
            points[event["index"]] = Point.of(event)
        elif kind == "unread":
            record.not_effective |= dict.fromkeys(event["knobs"], "train(trial) never reads it")
        elif kind in RESTARTED:
            points, final = {}, {}
            record.restarts.append(event.get("reason", ""))
        elif kind == "final":
            final = event
        elif kind == "end":
            record.end, record.ended = End(**event), when
    if record is not None:
        record.points = [points[index] for index in sorted(points)]
        if record.points and record.points[-1].steps == final.pop("steps", None):
            last, found = record.points[-1], {f"final_{key}": value for key, value in final.items()}
            record.points[-1] = dataclasses.replace(last, found=last.found | found)
    return record


def by_number(name: str) -> tuple[int, str]:
    """The key that sorts names of trials by their numbers: t9999 comes before t10000."""
    return len(name), name


def read_trials(experiment: Path) -> list[TrialRecord]:
    """All trials of an experiment folder, in order of their numbers."""
    folders = sorted((experiment / "trials").glob("t*"), key=lambda folder: by_number(folder.name))
    found = [(folder.name, record) for folder in folders if (record := read_trial(folder)) is not None]
    # Names become paths, so the folder's counts: a line of a foreign journal cannot point elsewhere.
    return [dataclasses.replace(record, name=name) for name, record in found]
