"""Format numbers, durations, knobs, tables and commands as text."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff.config.code import shown

STORAGE = Path("ray_results")


def command(module: str, *words: object, storage: Path = STORAGE) -> str:
    """A command as one pastes it here: its words quoted, and `--storage` where that is not the default."""
    if (place := shown(storage.absolute())) != str(STORAGE):
        words = (*words, "--storage", place)
    return shlex.join(["python", "-m", f"tunediff.{module}", *map(str, words)])


def original_command(module: str, argv: Sequence[str] | None, processes: int = 1) -> str:
    """A command as it was typed, or as it should have been for so many processes."""
    start = ["torchrun", "--nproc-per-node", str(processes)] if processes > 1 else ["python"]
    return shlex.join([*start, "-m", f"tunediff.{module}", *(sys.argv[1:] if argv is None else argv)])


def truncate(words: str, most: int) -> str:
    """At most so many characters."""
    return words if len(words) <= most else f"{words[: most - 1]}…"


def number(value: Any) -> str:
    """A value as it is read in a line: 3 significant digits, no exponent for everyday sizes."""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    digits = f"{value:.3g}"
    return f"{value:.0f}" if "e" in digits else digits


def block(values: Mapping[str, Any]) -> str:
    """A result as lines of `key: value`; what is not known is `none`."""
    return "\n".join(f"{key}: {'none' if value is None else number(value)}" for key, value in values.items())


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first column is words and the others numbers."""
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True)) if rows else [0]
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows]


def pluralize(count: int, one: str, many: str = "") -> str:
    """`1 trial`, `1,000 trials`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def graphs(made: Any, expected: Any) -> str:
    """What is odd about torch.compile's graphs, of which each different call needs one; '' where nothing is."""
    if not isinstance(made, int) or not isinstance(expected, int) or made == expected:
        return ""
    why = "the rest ran uncompiled" if made < expected else "some were compiled in pieces, or again for other inputs"
    return f"{pluralize(made, 'graph')} for {pluralize(expected, 'different call')}: {why}"


def seconds(value: float) -> str:
    """47s, 12m30s, 3h05m."""
    whole = round(value)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def format_exact(value: float) -> str:
    """Seconds as a file or an option takes them, `3600s`, however many."""
    return f"{value:.9f}".rstrip("0").rstrip(".") + "s"


def knobs(values: Mapping[str, Any]) -> str:
    """`loader.batch_size=256 precision.amp=bf16`, or `baseline` when nothing differs."""
    return " ".join(f"{name}={number(value)}" for name, value in values.items()) or "baseline"
