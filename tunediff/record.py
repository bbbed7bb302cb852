"""What one trial left behind: an append-only JSONL journal, and the `TrialRecord` read from it.

The journal in the experiment folder is the truth that `--resume`, the report and the export read. A line is written,
flushed and synced before anybody is told about it, so a kill at any moment loses nothing that was measured. Lines:
`start` (once per attempt), `worker` (who trains it), `point` (one evaluation), `final` (one more of the finished model,
at full protocol), `end`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import importlib.metadata
import json
import math
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tunediff.config import ConfigError

STATUSES = ("ok", "pruned", "oom", "nan", "timeout", "error")
"""How a trial ends. `pruned`: stopped early by the scheduler; `oom`: out of device or host memory; `nan`: loss or
weights not finite; `timeout`: past its deadline; `error`: anything else, with its reason."""

JOURNAL = "journal.jsonl"


@dataclasses.dataclass
class TrialRecord:
    """One trial as its journal tells it."""

    name: str
    """`t0007`: its place in the search."""
    number: int
    config: dict[str, Any]
    """Every knob by dotted name."""
    drawn: dict[str, Any]
    """The knobs the search chose, by dotted name."""
    fingerprint: str
    budget_s: float | None = None
    attempts: int = 0
    status: str | None = None
    """One of `STATUSES`; None: unfinished."""
    reason: str = ""
    points: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """The curve: train_s, images, frechet, images_per_s, … of every evaluation, in order."""
    end: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Seconds per part, wall seconds, peak memory, steps, as of the end."""
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    not_effective: dict[str, str] = dataclasses.field(default_factory=dict)
    """Knobs that change nothing on this hardware or beside the others, with the reason."""
    started: float = 0.0
    """Unix time of the first attempt."""
    ended: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether it will not be run again."""
        return self.status is not None

    def value(self, metric: str) -> float | None:
        """The metric at the budget, if the trial ended ok."""
        if self.status != "ok" or not self.points:
            return None
        value = self.points[-1].get(metric)
        return float(value) if value is not None and math.isfinite(value) else None


class Journal:
    """Appends to the journal of one trial; every line is on disk before `write` returns."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / JOURNAL

    def write(self, event: str, **content: Any) -> None:
        """Append one line. Raises `OSError` when the disk is full."""
        line = json.dumps({"event": event, "time": time.time(), **content}, allow_nan=False, default=_plain) + "\n"
        with open(self.path, "ab") as file:
            if file.tell() and not _ends_with_newline(self.path):
                line = "\n" + line  # a kill tore the last line; it must not swallow this one
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} cannot be written to a journal")


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def events(folder: Path) -> Iterator[dict[str, Any]]:
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


def is_recorded(folder: Path, point: dict[str, Any]) -> bool:
    """Whether the journal holds this very measurement, not merely another one of the same index."""
    same = ("index", "train_s")
    return any(
        event["event"] == "point" and all(event.get(key) == point[key] for key in same) for event in events(folder)
    )


def read_trial(folder: Path) -> TrialRecord | None:
    """The record of the trial in `folder`; None when its journal has not begun.

    Raises `ConfigError` for whole lines that are no journal's; torn ones are passed over.
    """
    try:
        about = (folder / JOURNAL).stat()
    except OSError:
        return None
    try:
        record = _read_trial(folder, about.st_mtime_ns, about.st_size)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{folder / JOURNAL}: is damaged: {type(error).__name__}: {error}") from None
    return record and dataclasses.replace(record, points=list(record.points))


@functools.lru_cache(maxsize=4096)
def _read_trial(folder: Path, mtime_ns: int, size: int) -> TrialRecord | None:
    """A journal only grows: what was read at this size is read once, however often a long search is looked at."""
    record: TrialRecord | None = None
    points: dict[int, dict[str, Any]] = {}
    final: dict[str, Any] = {}
    for event in events(folder):
        kind = event["event"]
        if kind == "start":
            if record is None:
                fields = ("name", "number", "config", "drawn", "fingerprint", "budget_s")
                record = TrialRecord(**{field: event[field] for field in fields}, started=event["time"])
            record.environment = event.get("environment", {})
            record.attempts += 1
        elif record is None:
            continue
        elif kind == "worker":
            record.environment |= {"device": event["device"], "threads": event["threads"]}
            record.not_effective = event.get("not_effective", {})
        elif kind == "point":  # a resumed trial may measure a point again: the later line is what training went on from
            points = {index: point for index, point in points.items() if index < event["index"]}
            points[event["index"]] = event
        elif kind == "final":
            final = event
        elif kind == "end":
            record.status, record.reason, record.ended = event["status"], event.get("reason", ""), event["time"]
            record.end = event
    if record is not None:
        record.points = [points[index] for index in sorted(points)]
        if record.points and record.points[-1]["train_s"] == final.get("train_s"):
            found = {key: value for key, value in final.items() if key not in ("event", "time", "train_s")}
            record.points[-1] = {**record.points[-1], **{f"final_{key}": value for key, value in found.items()}}
    return record


def read_trials(experiment: Path) -> list[TrialRecord]:
    """All trials of an experiment folder, in order of their numbers."""
    folders = sorted((experiment / "trials").glob("t*")) if (experiment / "trials").is_dir() else []
    found = [(folder.name, record) for folder in folders if (record := read_trial(folder)) is not None]
    # Names become paths, so the folder's counts: a line of a foreign journal cannot point elsewhere.
    return [dataclasses.replace(record, name=name) for name, record in found]


DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors that say nothing about the configuration that met them."""


def unwritable(folder: Path) -> str | None:
    """Why nothing of use can be written to the folder; None: it can. A disk with under 8 MiB left counts as full."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        with open(probe, "wb") as file:
            file.write(bytes(8 * 2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


# ------------------------------------------------------------------------------------------------------ derived values
def seconds_to(points: list[dict[str, Any]], metric: str, target: float) -> float | None:
    """Training seconds at which a falling curve first reaches `target`; None if it never does.

    Straight lines between evaluations; a curve that is below at its first evaluation counts that evaluation's seconds.
    """
    before: tuple[float, float] | None = None
    for point in points:
        seconds, value = point["train_s"], point.get(metric)
        if value is None:
            continue
        if value <= target:
            if before is None or before[1] <= value:
                return float(seconds)
            share = (before[1] - target) / (before[1] - value)
            return float(before[0] + share * (seconds - before[0]))
        before = (seconds, value)
    return None


def speedup(points: list[dict[str, Any]], baseline: list[dict[str, Any]], metric: str = "frechet") -> float | None:
    """Training seconds of the baseline over those this curve needs to reach the baseline's last value."""
    if not points or not baseline or baseline[-1].get(metric) is None:
        return None
    needed = seconds_to(points, metric, baseline[-1][metric])
    return float(baseline[-1]["train_s"]) / needed if needed else None


# ---------------------------------------------------------------------------------------------------------- environment
@functools.lru_cache(maxsize=1)
def environment() -> dict[str, Any]:
    """Hardware and versions that a measurement depends on."""
    packages = ("tunediff", "torch", "torchvision", "ray", "optuna", "torch-fidelity", "numpy")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "versions": versions,
    }


def _cpu_name() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or "unknown"
