"""Find metrics in what a program prints or writes."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tunediff.config.knobs import ConfigError

SEPARATORS = "[,'\u2019\u00a0\u202f]"
GROUPED = rf"[1-9]\d{{0,2}}({SEPARATORS})\d{{3}}(?:\1\d{{3}})*(?:\.\d+)?"
"""Digits in groups of three: `1,234.5`, `1'234.5`."""
NUMBER = (
    rf"[-+]?(?:[1-9]\d{{0,2}}(?:{SEPARATORS}\d{{3}})+(?:\.\d+)?|\d[\d_]*\.?\d*|\.\d+)"
    r"(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)"
)
"""A number as programs print it, NaN and infinities included; for `re.IGNORECASE`."""
TORN = re.compile(rf"{SEPARATORS}\d|(?<=\d) \d{{3}}\.\d")
"""What follows the part of a number that was taken for all of it: `0,31`, `1 234.5`."""
UNIT = re.compile(
    r"\s?(%|[kKMGTP]?i?B(?:/s)?|[kKMGT]|[nuµm]?s|sec(?:ond)?s?|min(?:ute)?s?|h(?:our)?s?|it/s|s/it)"
    r"(?!\w|/|\s*[:=])"
)
"""Units in which programs print small and large values of one quantity."""
SPLIT = re.compile(
    r"(?<![A-Za-z])(train(?:ing)?|test(?:ing)?|val(?:id(?:ation)?)?|dev|eval(?:uation)?|ema)[ :]$",
    re.IGNORECASE,
)
"""A word before a metric's name that makes it another quantity: `test loss`."""
NAMED = re.compile(rf"([A-Za-z_][\w./-]*)['\"]?\s*[:=]\s*['\"]?(?:{NUMBER})(?!\w)", re.IGNORECASE)
MOST_NAMED, READ_BYTES, LONGEST_LINE = 8, 1 << 12, 400
"""Names that are said; bytes at the end of a log, and of a line, that are searched for them."""
REDUCTIONS = "last, mean:K, min, max, each, each:K"


class Reading(NamedTuple):
    """A value in a line."""

    value: float
    unit: str = ""
    """One of `UNIT`; '': none of them."""
    unclear: str = ""
    """The text of a number that cannot be read with certainty: `0,31`; '': it is clear."""
    split: str = ""
    """One of `SPLIT`; '': none of them."""


def expression(text: str, where: str, groups: int | None = None) -> re.Pattern[str]:
    """Return a regular expression, of so many groups. Raises `ConfigError`."""
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise ConfigError(f"{where}: {text!r}: {error}") from None
    if groups is not None and compiled.groups != groups:
        raise ConfigError(
            f"{where}: {text!r} has {compiled.groups} groups; allowed: one group (…) around the"
            " number"
        )
    return compiled


class MetricPattern:
    """Finds the values of one metric in lines of text.

    Without a pattern it reads `METRIC loss=0.1`, `loss: 0.1`, `loss=0.1`, JSON, the dictionaries
    that Hugging Face's and Lightning's trainers print (quoted numbers too), cells of tables, and
    `loss 0.1` where a comma or the end of the line follows: `loss 10 batches` is no value.
    """

    def __init__(self, name: str, pattern: str | None, where: str) -> None:
        """Raises `ConfigError` for a pattern that is no regular expression with one group."""
        self.name, self._is_by_name = name, pattern is None
        if pattern is None:
            border, sign = r"(?<![\w./-])", r"['\"]?\s*[:=│|\t]\s*['\"]?"
            space = rf"[ ]+(?=(?:{NUMBER})%?\s*(?:[,;|)\]]|$))"
            text = rf"{border}{re.escape(name)}(?:{sign}|{space})({NUMBER})(?!\w|\.\d)"
            self._expression = re.compile(text, re.IGNORECASE)
            return
        self._expression = expression(pattern, where, groups=1)

    def find(self, line: str) -> float | None:
        """Return the last value in a line; None: there is none. A text that is no number is NaN."""
        reading = self.read(line)
        return reading and reading.value

    def read(self, line: str) -> Reading | None:
        """Return the last value in a line with its unit; None: there is none."""
        *_, match = None, *self._expression.finditer(line)
        if match is None:
            return None
        unit, value = UNIT.match(line, match.end(1)), as_number(match[1])
        is_torn = match.end() == match.end(1) and TORN.match(line, match.end(1))
        is_unclear = is_torn or (math.isnan(value) and re.search(r"\d", match[1]))
        unclear = line[match.start(1) : match.end(1) + 8].strip() if is_unclear else ""
        split = SPLIT.search(line[: match.start()]) if self._is_by_name else None
        words = [found[1] if found else "" for found in (unit, split)]
        return Reading(math.nan if is_unclear else value, words[0], unclear, words[1].lower())

    @staticmethod
    def named_in(log: Path, wanted: str) -> str:
        """Return `; it prints values of acc, loss` by a log's end; '': none, or `wanted` too."""
        with contextlib.suppress(OSError), log.open("rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - READ_BYTES)
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()[start > 0 :]
            by_line = (NAMED.findall(line[:LONGEST_LINE]) for line in lines)
            names = dict.fromkeys(itertools.chain.from_iterable(by_line))
            if names and wanted not in names:
                return f"; it prints values of {', '.join([*names][:MOST_NAMED])}"
        return ""


def as_number(text: Any) -> float:
    """Return a printed number; NaN for anything else."""
    plain = str(text).replace("_", "").rstrip("%")
    if re.fullmatch(rf"[-+]?{GROUPED}(?:[eE][-+]?\d+)?", plain):
        plain = re.sub(SEPARATORS, "", plain)
    try:
        return float(plain)
    except ValueError:
        return math.nan


_METRIC = re.compile(rf"([A-Za-z_][\w./-]*)=({NUMBER})(?=\s|$)", re.IGNORECASE)


def declared(line: str) -> dict[str, float]:
    """Return all values of a line `METRIC name=value …`; empty for another line."""
    words = line.strip()
    if not words.startswith("METRIC "):
        return {}
    return {name: as_number(value) for name, value in _METRIC.findall(words)}


class Reduction:
    """Turns the values so far into the value that counts: `last`, `mean:K`, `min`, `max`, `each`."""

    def __init__(self, text: str, where: str) -> None:
        """`mean:K`: of the last K values; `each`: of all, the results of the runs in a process;
        `each:K`: but the first K, which warm it up. Raises `ConfigError`."""
        kind, colon, count = text.partition(":")
        whole = colon and count.isdigit() and int(count) > 0
        plain = not colon and kind in ("last", "min", "max", "each")
        if not plain and not (whole and kind in ("mean", "each")):
            raise ConfigError(f"{where}: {text!r} is not allowed; allowed: {REDUCTIONS}")
        self.kind = kind
        self.skipped = int(count) if whole and kind == "each" else 0
        """Values that do not count, of those that follow."""
        most = None if kind == "each" else int(count) if whole else 1
        self.values: deque[float] = deque(maxlen=most)

    def add(self, value: float) -> float:
        """Take the next value; return the one that counts now."""
        if self.kind in ("min", "max") and self.values:
            before = self.values[-1]
            # NaN stays: min and max of NaN would depend on the order of their arguments
            if math.isnan(before) or math.isnan(value):
                value = math.nan
            else:
                value = min(before, value) if self.kind == "min" else max(before, value)
        self.values.append(value)
        return self.value

    @property
    def value(self) -> float:
        """Return the value that counts so far; NaN before the first."""
        return math.fsum(self.values) / len(self.values) if self.values else math.nan


class MetricFile:
    """Reads metrics from a file that the program writes: JSON, JSON lines or CSV.

    What is there before the program starts is of another run, or of a process before a checkpoint,
    and is no news. A program may append to it or begin it anew.
    """

    def __init__(self, path: Path, read: int = 0, folder: Path | None = None) -> None:
        """`read`: characters that were read at the checkpoint from which the run goes on. A file in
        `folder`, that of the run, is cut back to them: a killed process may have written more."""
        self.path = path
        is_own = folder is not None and path.is_relative_to(folder)
        if is_own and path.is_file():
            if read == 0:
                path.unlink()
            elif path.suffix != ".json":
                path.write_text(path.read_text(errors="replace")[:read])
        self._state: tuple[int, int, int] | None = None
        self._text = self._news() or ""
        self._is_foreign = not is_own
        """Whether its text is what another run has left."""

    @property
    def position(self) -> int:
        """Return the characters whose records were read."""
        return len(self._text)

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the records that are new since the last call; none of a half-written file."""
        state = self._state
        text = self._news()
        is_json = self.path.suffix == ".json"
        # A program may write all of it again, and has not come to anything new then
        if text is None or (not (is_json or self._is_foreign) and self._text.startswith(text)):
            return
        is_longer = text.startswith(self._text) and text != self._text
        try:
            rows = parsed(text, len(self._text) if is_longer else 0, self.path.suffix)
        except ValueError:
            self._state = state
            return
        self._text, self._is_foreign = text, False
        yield from rows

    def _news(self) -> str | None:
        """Return the file's complete lines if it was written since the last call."""
        try:
            status = self.path.stat()
            state = status.st_mtime_ns, status.st_size, status.st_ino
            if state == self._state:
                return None
            text = self.path.read_text(errors="replace")
        except OSError:
            return None
        self._state = state
        return text if self.path.suffix == ".json" else text[: text.rfind("\n") + 1]


def parsed(text: str, known: int, suffix: str) -> list[Mapping[str, Any]]:
    """Return the records of a file behind the first `known` characters; of JSON the last one, which
    is written again. Raises `ValueError` for text that cannot be read."""
    if suffix == ".csv":
        names = text.partition("\n")[0] + "\n" if known else ""
        return list(csv.DictReader(io.StringIO(names + text[known:])))
    if suffix == ".json":
        content = json.loads(text)
        return content[-1:] if isinstance(content, list) else [content]
    return [json.loads(line) for line in text[known:].splitlines() if line.strip()]


def value_in(record: Mapping[str, Any], name: str) -> float | None:
    """Return a metric of a record, also by a dotted path into it; None: it is not in it."""
    value: Any = record
    for part in (name,) if name in record else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return None if value in (None, "") else as_number(value)
