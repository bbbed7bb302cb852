"""Format numbers, durations, knobs, tables and commands as text."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff.core import files

SPACE = "\N{NO-BREAK SPACE}"
SCHEMA = 4
"""Version of what `--json` prints: raised when a key is renamed, removed, or changes type."""


def shown(path: Path) -> str:
    """Return a path as a user would type it in the current folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def program(module: str) -> list[str]:
    """Return the words that start a command: `tunediff search`.

    `.venv/bin/python -m tunediff search` where a shell would not find this interpreter's own
    script: it is not on the path, or only `uv run` or `uvx`, which set UV, have put it there.
    """
    is_found = "UV" not in os.environ and (
        shutil.which("tunediff") == str(Path(sys.executable).with_name("tunediff"))
    )
    return (
        ["tunediff", module]
        if is_found
        else [shown(Path(sys.executable)), "-m", "tunediff", module]
    )


def command(module: str, *words: object, storage: Path = files.STORAGE) -> str:
    """Return a command to paste: quoted words, and `--storage` unless it is the default."""
    if (place := files.address_of(storage) or shown(storage.absolute())) != str(files.STORAGE):
        words = (*words, "--storage", place)
    return shlex.join([*program(module), *map(str, words)])


def original_command(module: str, argv: Sequence[str] | None, processes: int = 1) -> str:
    """Return a command as it was typed; of several processes, as torchrun should start it."""
    torchrun = ["torchrun", "--nproc-per-node", str(processes), "-m", f"tunediff.{module}"]
    start = torchrun if processes > 1 else program(module)
    return shlex.join([*start, *(sys.argv[1:] if argv is None else argv)])


def truncate(words: str, most: int) -> str:
    """Return at most `most` characters of a text, with … where it is cut."""
    return words if len(words) <= most else f"{words[: most - 1]}…"


def number(value: Any) -> str:
    """Format a value for a line of text: 3 significant digits, no exponent for everyday sizes."""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    digits = f"{value:.3g}"
    return f"{value:.0f}" if "e" in digits else digits


def knob_value(value: Any) -> str:
    """Format a knob's value exactly: `0.9995` stays, where `number` rounds it to 1.

    Up to 12 significant digits are exact, which covers every value that somebody wrote. Longer
    values were drawn: they get 3 significant digits, or so many in their distance from 1.
    """
    exact = f"{value:.12g}" if isinstance(value, float) else str(value)
    if not isinstance(value, float) or not math.isfinite(value) or float(exact) == value:
        return exact
    digits = max(
        3, math.floor(math.log10(abs(value))) + 1, 2 - math.floor(math.log10(abs(1 - value)))
    )
    return f"{value:.{digits}g}"


def block(values: Mapping[str, Any]) -> str:
    """Format a result as lines of `key: value`; `none` for what is not known."""
    return "\n".join(
        f"{key}: {'none' if value is None else number(value)}" for key, value in values.items()
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: text aligned left in the first column, all else right."""
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True)) if rows else [0]
    return [
        "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows
    ]


def has_value(value: object) -> bool:
    """Return whether a table cell has a value: pandas stores missing values as NaN."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def rounded(value: float | None) -> str:
    """Return a number with at most four digits: `4,013`, `0.661`; '' if it is None or NaN."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else number(float(value))


def signed(value: float) -> str:
    """Return a number with its sign: `+0.012`, `−3`."""
    return f"{'−' if value < 0 else '+'}{number(abs(float(value)))}"


def versus(value: float | None, ratios: bool) -> str:
    """Return a ratio, `0.53` or `0.00412`, or else a difference, `+0.012`; '' if unknown."""
    if value is None or math.isnan(value):
        return ""
    is_small = 0 < abs(value) < 0.01
    return signed(value) if not ratios else number(value) if is_small else f"{value:,.2f}"


def times(ratio: float | None) -> str:
    """Return a ratio: `1.61×`; '' if it is None or NaN."""
    return f"{words}×" if (words := versus(ratio, ratios=True)) else ""


def percent(share: float) -> str:
    """Return a share as percent: `38 %`, `0.4 %`, `0.04 %`, with a no-break space."""
    if 0 < abs(share) < 0.00095:
        return f"{100 * share:.1g}{SPACE}%"
    return f"{100 * share:.{0 if abs(share) >= 0.095 or share == 0 else 1}f}{SPACE}%"


def size(value: float, ratios: bool) -> str:
    """Return the size of a difference: percent if values are compared by ratios."""
    return percent(value) if ratios else number(value)


def secs(value: float) -> str:
    """Return seconds: `12.4 s`, with a no-break space."""
    return f"{number(float(value))}{SPACE}s"


def with_sd(values: Sequence[float]) -> str:
    """Return mean and standard deviation: `1.44 ± 0.12`; of one value the value, of none ''.

    Both have the decimals of three significant digits of the mean and two of the deviation.
    """
    if len(values) < 2 or not any(values):
        return number(float(values[0])) if values else ""
    middle, spread = statistics.fmean(values), statistics.stdev(values)
    if abs(middle) <= 1e-9 * spread:  # a mean of 0, up to rounding
        middle = 0.0
    digits = max(0, 2 - math.floor(math.log10(abs(middle)))) if middle else 0
    if spread > 1e-9 * abs(middle):  # less is an error of rounding
        digits = max(digits, 1 - math.floor(math.log10(spread)))
    return f"{middle:,.{digits}f} ± {spread:,.{digits}f}"


def short(name: str, limit: int) -> str:
    """Shorten a name to `limit` characters by its middle, because names differ at their ends."""
    if len(name) <= limit:
        return name
    head = max(1, limit) // 2
    return f"{name[:head]}…{name[len(name) - max(0, limit - head - 1) :]}"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; the first row holds the headings."""
    head, *others = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *others])


def pluralize(count: int, singular: str, plural: str = "") -> str:
    """Return a count with its noun: `1 trial`, `1,000 trials`."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def seconds(value: float) -> str:
    """Format a duration: 47s, 12m30s, 3h05m."""
    whole = round(value)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def format_exact(value: float) -> str:
    """Format seconds without rounding, as a file or an option takes them: `3600s`."""
    return f"{value:.9f}".rstrip("0").rstrip(".") + "s"


def knobs(values: Mapping[str, Any]) -> str:
    """Format knobs as `loader.batch_size=256 precision.amp=bf16`; `baseline` for none."""
    return " ".join(f"{name}={knob_value(value)}" for name, value in values.items()) or "baseline"


def finite(value: Any) -> Any:
    """Return the same without NaN and infinity, which JSON has no words for: they are null."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def versioned(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result as `--json` prints it: with the version of its keys, without NaN."""
    return {"schema": SCHEMA, **finite(values)}
