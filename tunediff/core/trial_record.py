"""Read what one trial left behind: its journal, as a `TrialRecord`.

The journal in the experiment folder is the truth that `--resume`, the report and the export read.
`journal.py` writes it, one JSON line per event:

- `start`: an attempt begins, with configuration, seed, role, drawn knobs, budget and environment.
  The line of a further attempt has none of these.
- `worker`: device and threads of the worker that trains the trial.
- `about`: data and model.
- `restarted`: the training begins at its first step although an earlier attempt had come
  further, or had ended for a reason outside of the trial, with the reason.
- `resumed`: a command goes on from its checkpoint; points of more values than there are void.
- `unread`: knobs that the training never read.
- `loaded`: the fingerprint, once the modules have been loaded that a file imports by name.
- `point`: one evaluation.
- `decision`: what early stopping decided of the trial, and what it compared: `Decision`. With
  `rule: capture`: whether its step is replayed, `captured`, or `refused` for a `reason`.
- `lost`: a node of the trial is gone; it goes on elsewhere.
- `fault`: an attempt ended by an error that says nothing about the trial, a `Failure`; its `kind` is
  `process`, after which the trial is tried again, or `disk`: then the search ends.
- `checkpoint`, `clock`: of a command, what it left, and which seconds counted (`CommandClock`), with
  the unit of its values.
- `final`: one more evaluation of the finished model, by the full protocol.
- `end`: status, reason and what the trial took.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from tunediff.core.clock import UNITS, UnitName
from tunediff.core.errors import ConfigError, TunediffError
from tunediff.core.files import CODE, FORMAT, check_format, naming_file
from tunediff.core.outcomes import Ruling, Status
from tunediff.core.point import Point
from tunediff.core.target import TIME_TO_TARGET

NEVER_READ = "train(trial) never reads it"
"""Why a knob of a user's workload has no effect."""
Role = Literal["draw", "repeat", "confirm", "side"]
"""Why a run exists. `draw`: the search file lists its configuration, or the search has drawn it;
`repeat`: a configuration of the search on another seed, for the noise or because it leads;
`confirm`: a finalist or the baseline on a seed that had no part in choosing it; `side`: one side of
a comparison. A run is a configuration, a seed and a role."""
JOURNAL, CHECKPOINT = "journal.jsonl", "checkpoint.pt"
CAPTURED, REFUSED = "captured", "refused: "
"""A point's `capture`; where its step was not captured, the reason follows the second."""
LINE_KEYS = ("event", "time")
"""Keys that every line of a journal has."""
RESERVED = Point.__dataclass_fields__.keys() | {*LINE_KEYS, "trial", TIME_TO_TARGET}
"""Names that points, journals and tables use themselves, not for evaluated quantities."""
WORDS = ("label", "final_label", "event", "validation_split")
"""Values of a point that are not numbers."""
Line = dict[str, Any]
"""A line of a journal, or a part of one."""
Values = dict[str, Any]
"""Knobs by dotted name."""


class NotFiniteError(TunediffError, ValueError):
    """The training diverged: loss or weights are NaN or infinite. Becomes the status `nan`."""


# ---- records
@dataclasses.dataclass(frozen=True)
class End:
    """How a trial ended, and the time and memory that it took."""

    status: Status
    reason: str = ""
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of the worker's clock, by part."""
    steps: int = 0
    peak: dict[str, float] = dataclasses.field(default_factory=dict)
    """Peak memory in MiB, by the field names of `Point`."""
    process_died: bool = False
    """Whether a process of the trial died, which need not be its configuration's fault."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """What early stopping decided of a trial at one point, and the numbers that it compared."""

    rule: str
    outcome: Ruling
    value: float
    """The trial's objective."""
    fraction: float
    """The share of its budget that it had used, after `train_s` seconds of training."""
    train_s: float
    median: float
    """Of the values of those that had come as far before it."""
    others: list[str]
    """The names of these trials."""
    best: float | None = None
    """The best value of all trials at this point of the curve."""
    limit: float | None = None
    """The worst value that is within the noise of it; while that is unknown, within a margin."""
    limit_of: str = "noise"
    """Which of both: `noise` or `margin`."""


@dataclasses.dataclass
class TrialRecord:
    """One run, as its journal describes it."""

    name: str
    """`t0007`: the trial's number in the search."""
    number: int
    config: Values
    """Every knob by dotted name, and the workload."""
    drawn: Values
    """What the search chose, by dotted name: knobs, and the seed of a run on a seed of its own."""
    fingerprint: str
    budget_s: float | None = None
    """Training seconds of this trial."""
    unit: UnitName = "wall"
    """Unit of the search's budgets."""
    attempts: int = 0
    points: list[Point] = dataclasses.field(default_factory=list)
    """All evaluations, in order."""
    end: End | None = None
    """None: not finished."""
    environment: Line = dataclasses.field(default_factory=dict)
    not_effective: dict[str, str] = dataclasses.field(default_factory=dict)
    """Knobs that have no effect on this hardware or with the other knobs, with the reason."""
    started: float = 0.0
    """Unix time of the first attempt."""
    ended: float = 0.0
    last_written: float = 0.0
    """Unix time of the last line of the journal."""
    restarts: list[str] = dataclasses.field(default_factory=list)
    """The reason of every restart from the first step after an attempt had come further."""
    role: Role = "draw"
    decision: Decision | None = None
    """What early stopping decided of it last; None: it was not judged."""
    not_captured: str = ""
    """Why its step was refused to be captured; "" if it was not."""
    clock: Line = dataclasses.field(default_factory=dict)
    """Which seconds counted in the run of a command: `kind`, `process_s`, `start_up_s` and
    `unit`; empty for a workload, whose clock is that of the training."""

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def knobs(self) -> Values:
        """Return the drawn knobs without the seed: equal for all runs of a configuration."""
        return {name: value for name, value in self.drawn.items() if name != "seed"}

    @property
    def status(self) -> Status | None:
        """Return how it ended; None: not finished."""
        return self.end.status if self.end is not None else None

    @property
    def reason(self) -> str:
        """Return the reason for which it ended; '' without one."""
        return self.end.reason if self.end is not None else ""

    @property
    def finished(self) -> bool:
        """Return whether it will not be run again."""
        return self.end is not None

    @property
    def external_cause(self) -> bool:
        """Return whether it failed for a reason outside of its configuration."""
        return self.end is not None and self.end.process_died

    @property
    def along(self) -> str:
        """Return the axis of its curve: training seconds or device-seconds."""
        return UNITS[self.unit].along

    def value(self, metric: str) -> float | None:
        """Return the metric at the end of the budget; None unless the trial ended ok with one."""
        if self.status != Status.OK or not self.points:
            return None
        value = self.points[-1].get(metric)
        return None if value is None else float(value)


# ---- reading
def events(folder: Path) -> Iterator[Line]:
    """Yield the lines of a trial's journal; incomplete lines are skipped."""
    path = folder / JOURNAL
    if not path.exists():
        return
    with naming_file(path):  # an error of reading names no file
        content = path.read_bytes()
    for line in content.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            yield event


def was_lost(folder: Path) -> Line | None:
    """Return the journal's `lost` line if a node was lost and nothing followed; else None.

    Workers may outlive their node by seconds and still end the trial; then it is not lost.
    """
    lines, ended = list(events(folder)), False
    for line in lines:
        ended = line["event"] == "end" or (ended and line["event"] != "restarted")
    return lines[-1] if lines and lines[-1]["event"] == "lost" and not ended else None


def read_trial(folder: Path) -> TrialRecord | None:
    """Return the record of the trial in `folder`; None if its journal has no `start` yet.

    Raises `ConfigError` for complete lines that are not a journal's; incomplete lines are skipped.
    """
    try:
        # NFS caches the status of a path, but not that of an open file
        with open(folder / JOURNAL, "rb") as file:
            status = os.fstat(file.fileno())
    except OSError:
        return None
    try:
        record = _read_trial(folder, status.st_mtime_ns, status.st_size)
    except (KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{folder / JOURNAL}: is damaged: {why}") from None
    return record and dataclasses.replace(record, points=list(record.points))


def read_begun(folder: Path) -> TrialRecord:
    """Return the record of a trial whose journal has begun; see `read_trial`."""
    record = read_trial(folder)
    assert record is not None, f"{folder}: no journal has begun"
    return record


@functools.lru_cache(maxsize=4096)  # 12 KiB for each entry, in every process
def _read_trial(folder: Path, mtime_ns: int, size: int) -> TrialRecord | None:
    """Read a journal. It only grows: time and size in the cache key read each state once."""
    record: TrialRecord | None = None
    points: dict[int, Point] = {}
    final: Line = {}
    for event in events(folder):
        kind, when = event.pop("event"), event.pop("time")
        if kind == "start":
            check_format(event.get("format", FORMAT), f"{folder / JOURNAL}: format")
            if record is None:
                record = _begun(event, when, folder)
            # Once a worker has been named, it may still train the trial
            if "device" not in record.environment:
                record.environment = event.get("environment", record.environment)
            record.attempts += 1
            # A training by `tunediff train` goes on after an end such as `oom`.
            record.end, record.ended = None, 0.0
        if record is None:
            continue  # a line before the first start belongs to no trial
        record.last_written = when
        # Worker and environment
        if kind == "worker":
            worker = {"device": event["device"], "threads": event["threads"]}
            record.environment |= event.get("environment", {}) | worker
            record.not_effective = event.get("not_effective", {})
        elif kind == "unread":
            record.not_effective |= dict.fromkeys(event["knobs"], NEVER_READ)
        # A resumed trial may measure a point again, and training continued from the later line.
        elif kind == "point":
            points = {index: point for index, point in points.items() if index < event["index"]}
            points[event["index"]] = Point.of(event)
        elif kind == "resumed":
            points = {i: point for i, point in points.items() if point.steps <= event["steps"]}
        elif kind == "restarted":
            points, final, record.decision = {}, {}, None
            record.end, record.ended = None, 0.0
            record.restarts.append(event.get("reason", ""))
        elif kind == "decision" and event["rule"] == "capture":
            record.not_captured = event["reason"]
            if record.not_captured:
                record.not_effective |= {"compile.capture": REFUSED + record.not_captured}
        elif kind == "decision":
            record.decision = Decision(**{**event, "outcome": Ruling(event["outcome"])})
        # Final evaluation and end
        elif kind == "final":
            final = event
        elif kind == "clock":
            record.clock = event
        elif kind == "end":
            record.end = End(**{**event, "status": Status(event["status"])})
            record.ended = when
    if record is not None:
        record.points = _with_final([points[index] for index in sorted(points)], final)
    return record


def _begun(start: Line, when: float, folder: Path) -> TrialRecord:
    """Return the record that the first `start` line of a journal begins."""
    fields = ("name", "number", "config", "drawn", "fingerprint", "budget_s")
    record = TrialRecord(
        **{field: start[field] for field in fields},
        unit=start.get("unit", "wall"),
        started=when,
        role=start["role"],
    )
    # The folder of the search, with its copy of the workload, may have moved
    workload = str(record.config.get("workload"))
    record.config["workload"] = _own_copy(workload, folder)
    return record


def _own_copy(workload: str, folder: Path) -> str:
    """Return the workload of a journal in `folder`, which may have moved with the copy that its
    search, comparison or training has."""
    parts = Path(workload).parts
    if CODE not in parts:
        return workload
    start = len(parts) - 1 - parts[::-1].index(CODE)
    inside = [Path(*parts[first:]) for first in (start, start - 1)]  # of a comparison: A/workload/
    places = (root / one for root in (folder, *folder.parents[:2]) for one in inside)
    return str(next((file.absolute() for file in places if file.is_file()), workload))


def _with_final(points: list[Point], final: Line) -> list[Point]:
    """Return the points, the last one with the final evaluation unless training went on."""
    if not points or points[-1].steps != final.get("steps"):
        return points
    values = {f"final_{key}": value for key, value in final.items() if key != "steps"}
    return [*points[:-1], Point.of(points[-1].flat | values)]


def by_number(name: str) -> tuple[int, str]:
    """Return the key that sorts trial names by number: t9999 before t10000."""
    return len(name), name


def read_trials(experiment: Path) -> list[TrialRecord]:
    """Return all trials of an experiment folder, in the order of their numbers."""
    folders = sorted((experiment / "trials").glob("t*"), key=lambda folder: by_number(folder.name))
    records = [
        (folder.name, record) for folder in folders if (record := read_trial(folder)) is not None
    ]
    # Names become paths: a foreign journal must not choose one
    return [dataclasses.replace(record, name=name) for name, record in records]
