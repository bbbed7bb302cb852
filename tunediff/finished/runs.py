"""Read runs that have ended from their logs: text, CSV, JSON, exports of Weights & Biases.

A folder or a pattern of names holds a file a run; a single CSV or JSON-lines file a row a run.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tunediff.command.metrics import (
    MetricPattern,
    Reduction,
    as_number,
    expression,
    parsed,
    value_in,
)
from tunediff.core.errors import ConfigError
from tunediff.core.options import REQUIRED, Section, allow, option
from tunediff.core.target import Target

TEXTS, TABLES = (".txt", ".log", ".out", ".err", ".md", ""), (".csv", ".jsonl", ".ndjson", ".json")
NAMES = ("name", "run", "run_name", "id", "run_id", "seed")
"""Columns that name a run in a table with a row a run, in any case."""
LENGTH = re.compile(
    r"\b(?:global_?)?(?:step|iter|iteration|epoch)s?\s*[:=/ ]\s*(\d+)", re.IGNORECASE
)
LENGTHS = ("global_step", "_step", "step", "Step", "iteration", "iter", "epoch")
PER_SECOND = {"ms": 1e3, "us": 1e6, "µs": 1e6, "m": 1 / 60, "min": 1 / 60, "h": 1 / 3600}
_UNIT = re.compile(r"\s?(ms|us|µs|min|m|h)(?!\w)")
SHOWN_LINES = 3
Record = Mapping[str, Any]
"""A row of a table, or what a line of a log says."""
UNIT = " unit"
"""Key of a record of a log: no column has this name."""


class FinishedRun(NamedTuple):
    """What the log of a run says."""

    name: str
    value: float | None = None
    """The value that counts; None: the log has none; NaN or infinite: it diverged."""
    seconds: float | None = None
    """Of the whole run, or until its target; None: not read, or never met."""
    evaluations: int = 0
    length: float | None = None
    """Steps or epochs."""
    unit: str = ""
    """Behind its value, such as MB; '': none."""


class LogFormat(Section):
    """What is read of each run."""

    objective: str = option(REQUIRED, "the metric that decides, as logs name it", metavar="NAME")
    pattern: str | None = option(
        None, "a regular expression that finds the metric; its one group is the number"
    )
    time: str | None = option(
        None, "seconds in logs, e.g. train_time:(\\d+)ms, or the name of a column or key"
    )
    reduce: str = option("last", "last (default), mean:K, min or max of its values")


class RunReader(LogFormat):
    """Reads runs."""

    until: Target | None = None
    """The target until which seconds count; None: those of the whole run."""

    def read(self, source: str) -> list[FinishedRun]:
        """Return the runs of a folder, a pattern of file names, or a file. Raises `ConfigError`."""
        files = [Path(name) for name in sorted(glob.glob(source, recursive=True))]
        if len(files) == 1 and files[0].is_dir():
            files = [
                path for path in sorted(files[0].rglob("*")) if path.suffix in (*TEXTS, *TABLES)
            ]
        files = [path for path in files if path.is_file()]
        if not files:
            raise ConfigError(f"{source}: has no logs; allowed: a folder, a glob, a file")
        if len(files) == 1 and files[0].suffix in TABLES:
            runs = self._table(files[0])
        else:
            root = Path(os.path.commonpath([path.parent for path in files]))
            runs = [
                self._run(path, str(path.relative_to(root)), self._records(path)) for path in files
            ]
        if all(run.value is None for run in runs):
            raise ConfigError(self._not_understood(files[0]))
        return runs

    def _run(self, path: Path, name: str, records: Sequence[Record]) -> FinishedRun:
        curve = [
            (value, record)
            for record in records
            if (value := value_in(record, self.objective)) is not None
        ]
        if not curve:
            return FinishedRun(name)
        for value, record in curve:
            if math.isnan(value):
                cell = str(record.get(self.objective, value)).strip()
                is_known = cell.lower().lstrip("+-") == "nan"
                allow(is_known, f"{path}: {name}: {self.objective}", cell, "a number, or nan")
        reduction, last = Reduction(self.reduce, "--reduce"), curve[-1][1]
        for value, _ in curve:
            reduction.add(value)
        # Until a target: to the first evaluation that meets it, as protocols have it
        met = [at for value, at in curve if self.until is None or self.until.met(value)]
        seconds = None
        if self.time is not None and met:
            seconds = value_in(last if self.until is None else met[0], self.time)
            if seconds is None or not math.isfinite(seconds):
                raise ConfigError(f"{path}: {name} has no seconds; tried: --time {self.time!r}")
        length = next(filter(None, (value_in(last, key) for key in LENGTHS)), None)
        units = dict.fromkeys(record.get(UNIT, "") for _, record in curve)
        allow(len(units) < 2, f"{path}: {self.objective}", " and ".join(units), "one unit")
        return FinishedRun(name, reduction.value, seconds, len(curve), length, *units)

    def _table(self, path: Path) -> list[FinishedRun]:
        """Return the runs of a table: a row a run, or of a chart of Weights & Biases a column."""
        records = self._records(path)
        names = list(records[0]) if records else []
        end = f" - {self.objective}"
        if columns := [name for name in names if name.endswith(end)]:
            return [
                self._run(
                    path,
                    name.removesuffix(end),
                    [{**row, self.objective: row[name]} for row in records],
                )
                for name in columns
            ]
        label = next((name for name in names if name.lower() in NAMES), "")
        return [
            self._run(path, str(row.get(label) or f"row {number}"), [row])
            for number, row in enumerate(records, 1)
        ]

    def _records(self, path: Path) -> list[Record]:
        """Return the records of a file, of a log those of its lines; none of a damaged one."""
        text = path.read_text(errors="replace")
        if path.suffix not in TABLES:
            return list(self._of_text(path, text))
        try:
            content = json.loads(text) if path.suffix == ".json" else parsed(text, 0, path.suffix)
        except ValueError:
            return []
        rows = content if isinstance(content, list) else [content]
        for number, row in enumerate(rows, 1):  # a decimal comma makes two cells of one
            allow(
                not isinstance(row, Mapping) or None not in row,
                f"{path}: row {number}", row, "as many cells as there are columns",
            )  # fmt: skip
        return [row for row in rows if isinstance(row, Mapping)]

    def _of_text(self, path: Path, text: str) -> Iterator[Record]:
        """Yield a record for each line with a value: the last one in it, with the seconds that
        stand there or were printed last before it."""
        metric, name = MetricPattern(self.objective, self.pattern, "--pattern"), self.objective
        clock = expression(self.time, "--time", groups=1) if self.time is not None else None
        # Nearly all lines have no value, and looking for its first word takes hardly any time
        folds = re.NOFLAG if self.pattern or name in text else re.IGNORECASE
        since, end, seconds = 0, -1, None
        for match in re.finditer(self.pattern or re.escape(name), text, re.MULTILINE | folds):
            if match.start() <= end:  # in the line before
                continue
            begin = text.rfind("\n", 0, match.start()) + 1
            end = text.find("\n", begin) % (len(text) + 1)  # -1: the last line
            line = text[begin:end]
            if (reading := metric.read(line)) is None:
                continue
            allow(
                not reading.unclear, f"{path}: {name}", reading.unclear,
                "a clear number, such as 1234.5 or 1,234.5",
            )  # fmt: skip
            if clock is not None:
                times = [*clock.finditer(line)] or [*clock.finditer(text[since:begin])]
                seconds = _seconds_in(times[-1]) if times else seconds
            since, length = begin, LENGTH.search(line)
            yield {name: reading.value, self.time or "": seconds, "step": length and length[1],
                   UNIT: reading.unit}  # fmt: skip

    def _not_understood(self, path: Path) -> str:
        tried = f"--pattern {self.pattern!r}" if self.pattern else f"{self.objective!r} by its name"
        tried += MetricPattern.named_in(path, self.objective)
        lines = path.read_text(errors="replace").splitlines()[:SHOWN_LINES]
        said = f"{path}: has no value of {self.objective}; tried: {tried}; it begins:"
        return "\n  | ".join([said, *(line[:120] for line in lines)])


def _seconds_in(match: re.Match[str]) -> float:
    unit = _UNIT.match(match.string, match.end(1))
    return as_number(match[1]) / PER_SECOND.get(unit[1] if unit else "", 1.0)
