"""Read runs that have ended from their logs: text, CSV, JSON, exports of Weights & Biases.

A folder or a pattern of names holds a file a run; a single CSV or JSON-lines file a row a run.
"""

from __future__ import annotations

import bisect
import csv
import dataclasses
import glob
import io
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tunediff.command.metrics import MetricPattern, Reduction, as_number, parsed, value_in
from tunediff.core.errors import ConfigError
from tunediff.core.target import Target

TEXTS, TABLES = (".txt", ".log", ".out", ".err", ".md", ""), (".csv", ".jsonl", ".ndjson", ".json")
NAMES = ("name", "run", "run_name", "id", "run_id", "seed")
"""Columns that name a run in a table with a row a run, in any case."""
LENGTH = re.compile(
    r"\b(?:global_?)?(?:step|iter|iteration|epoch)s?\s*[:=/ ]\s*(\d+)", re.IGNORECASE
)
LENGTHS = ("global_step", "_step", "step", "iteration", "iter", "epoch")
PER_SECOND = {"ms": 1e3, "us": 1e6, "µs": 1e6, "m": 1 / 60, "min": 1 / 60, "h": 1 / 3600}
_UNIT = re.compile(r"\s?(ms|us|µs|min|m|h)(?!\w)")
SHOWN_LINES = 3


class Evaluation(NamedTuple):
    """A value of the objective in the log of a run."""

    value: float
    """NaN where it is no number."""
    seconds: float | None
    length: float | None
    """Steps or epochs so far."""


class FinishedRun(NamedTuple):
    """What the log of a run says."""

    name: str
    value: float | None
    """The value that counts; None: the log has none; NaN or infinite: it diverged."""
    seconds: float | None
    """Of the whole run, or until its target; None: not read, or never met."""
    evaluations: int
    length: float | None


@dataclasses.dataclass(frozen=True)
class RunReader:
    """What is read of each run, and how."""

    objective: str
    mode: str
    pattern: str | None = None
    """A regular expression with one group, for logs of text."""
    time: str | None = None
    """The same for seconds, or the name of a column or key."""
    reduce: str = "last"
    until: Target | None = None
    """The target until which seconds count; None: those of the whole run."""

    def read(self, source: str) -> list[FinishedRun]:
        """Return the runs of a folder, a pattern of file names, or a file. Raises `ConfigError`."""
        files = [Path(name) for name in sorted(glob.glob(source, recursive=True))]
        if len(files) == 1 and files[0].is_dir():
            found = sorted(path for path in files[0].rglob("*") if path.is_file())
            files = [path for path in found if path.suffix in (*TEXTS, *TABLES)]
        files = [path for path in files if path.is_file()]
        if not files:
            raise ConfigError(f"{source}: has no logs; allowed: a folder, a glob, a file")
        if len(files) == 1 and files[0].suffix in TABLES:
            runs = list(self._rows_as_runs(files[0]))
        else:
            root = Path(os.path.commonpath([path.parent for path in files]))
            runs = [self._run(str(path.relative_to(root)), self._curve(path)) for path in files]
        if all(run.value is None for run in runs):
            raise ConfigError(self._not_understood(files[0]))
        return runs

    def _run(self, name: str, curve: Sequence[Evaluation]) -> FinishedRun:
        if not curve:
            return FinishedRun(name, None, None, 0, None)
        if self.time is not None and all(one.seconds is None for one in curve):
            raise ConfigError(f"{name}: has no seconds; tried: --time {self.time!r}")
        reduction = Reduction(self.reduce, "--reduce")
        for evaluation in curve:
            reduction.add(evaluation.value)
        last, seconds = curve[-1], curve[-1].seconds
        if self.until is not None:  # the first evaluation that meets it, as protocols have it
            seconds = next((e.seconds for e in curve if self.until.met(e.value)), None)
        return FinishedRun(name, reduction.value, seconds, len(curve), last.length)

    # ---- one file a run
    def _curve(self, path: Path) -> list[Evaluation]:
        text = path.read_text(errors="replace")
        if path.suffix not in TABLES:
            return self._of_text(text)
        try:
            records = _records(text, path.suffix)
        except ValueError:
            return []
        return [one for record in records if (one := self._of_record(record)) is not None]

    def _of_record(self, record: Mapping[str, Any]) -> Evaluation | None:
        if (value := value_in(record, self.objective)) is None:
            return None
        seconds = value_in(record, self.time) if self.time is not None else None
        length = next(filter(None, (value_in(record, name) for name in LENGTHS)), None)
        return Evaluation(value, seconds, length)

    def _of_text(self, text: str) -> list[Evaluation]:
        """Return the values of a log: the last one in each line, with the seconds that stand there
        or were printed last before it."""
        metric = MetricPattern(self.objective, self.pattern, "--pattern")
        found = [
            (start, line, reading.value)
            for start, line in self._lines(text)
            if (reading := metric.read(line)) is not None
        ]
        seconds = self._seconds(text, [start + len(line) for start, line, _ in found])
        lengths = [LENGTH.search(line) for _, line, _ in found]
        return [
            Evaluation(value, at_s, float(length[1]) if length else None)
            for (_, _, value), at_s, length in zip(found, seconds, lengths, strict=True)
        ]

    def _lines(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield the lines in which a value may be, with their places."""
        places: Iterator[int]
        if self.pattern is not None:
            places = (match.start() for match in re.finditer(self.pattern, text, re.MULTILINE))
        elif self.objective in text:
            places = _places(text, self.objective)
        else:
            places = _places(text.lower(), self.objective.lower())
        known = -1
        for place in places:
            start = text.rfind("\n", 0, place) + 1
            if start != known:
                known = start
                end = text.find("\n", place)
                yield start, text[start : end if end >= 0 else len(text)]

    def _seconds(self, text: str, ends: Sequence[int]) -> list[float | None]:
        """Return the seconds printed last before each place, which is the end of a line."""
        if self.time is None or not ends:
            return [None] * len(ends)
        pattern, begin = re.compile(self.time), 0
        # Most logs have both in one line: what stands between these is searched only where not
        times = list[tuple[int, float]]()
        for end in ends:
            line = text.rfind("\n", 0, end - 1) + 1
            matches = [*pattern.finditer(text, line, end)] or [*pattern.finditer(text, begin, end)]
            times += [(match.start(), _seconds_in(text, match)) for match in matches[-1:]]
            begin = end
        starts = [start for start, _ in times]
        known = (bisect.bisect_right(starts, end) for end in ends)
        return [times[at - 1][1] if at else None for at in known]

    # ---- one file, a row or a column a run
    def _rows_as_runs(self, path: Path) -> Iterator[FinishedRun]:
        try:
            records = _records(path.read_text(errors="replace"), path.suffix)
        except ValueError as error:
            raise ConfigError(f"{path}: is not readable: {error}") from None
        names = list(records[0]) if records else []
        if columns := [name for name in names if name.endswith(f" - {self.objective}")]:
            yield from self._columns_as_runs(records, names[0], columns)
            return
        label = next((name for name in names if name.lower() in NAMES), None)
        for number, record in enumerate(records, 1):
            name = str(record[label]) if label and record.get(label) else f"row {number}"
            one = self._of_record(record)
            yield self._run(name, [] if one is None else [one])

    def _columns_as_runs(
        self, records: Sequence[Mapping[str, Any]], along: str, columns: Sequence[str]
    ) -> Iterator[FinishedRun]:
        """Yield the runs of a chart of Weights & Biases: a column a run, first the step or time."""
        for column in columns:
            curve = [
                Evaluation(
                    as_number(record[column]),
                    as_number(record[along]) if "time" in along.lower() else None,
                    as_number(record[along]),
                )
                for record in records
                if record.get(column) not in (None, "")
            ]
            yield self._run(column.removesuffix(f" - {self.objective}"), curve)

    def _not_understood(self, path: Path) -> str:
        with path.open(errors="replace") as file:
            lines = [line.rstrip()[:120] for line in itertools.islice(file, SHOWN_LINES)]
        tried = f"--pattern {self.pattern!r}" if self.pattern else f"{self.objective!r} by its name"
        shown = "".join(f"\n  | {line}" for line in lines)
        named = MetricPattern.named_in(path, self.objective)
        return f"{path}: has no value of {self.objective}; tried: {tried}{named}; it begins:{shown}"


def _records(text: str, suffix: str) -> list[Mapping[str, Any]]:
    """Return the rows of a table. Raises `ValueError` for a text that is none."""
    if suffix == ".csv":
        return list(csv.DictReader(io.StringIO(text)))
    if suffix == ".json":
        content = json.loads(text)
        return content if isinstance(content, list) else [content]
    return parsed(text, 0, suffix)


def _places(text: str, word: str) -> Iterator[int]:
    place = text.find(word)
    while place >= 0:
        yield place
        place = text.find(word, place + len(word))


def _seconds_in(text: str, match: re.Match[str]) -> float:
    unit = _UNIT.match(text, match.end(1))
    return as_number(match[1]) / PER_SECOND.get(unit[1] if unit else "", 1.0)


def is_diverged(run: FinishedRun) -> bool:
    """Return whether a run ended at no number or an infinite one."""
    return run.value is not None and not math.isfinite(run.value)
