"""Format numbers, intervals and tables for people; `core.text` has the more general functions."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tunediff.analysis.outcome import Outcome, failure_note
from tunediff.analysis.speed import ITSELF
from tunediff.analysis.statistics import Difference, Estimate, is_wide, mean, sd
from tunediff.core import text
from tunediff.core.outcomes import Verdict
from tunediff.core.text import number

SPACE = "\N{NO-BREAK SPACE}"
OPEN = "not determined"


def has_value(value: object) -> bool:
    """Whether a table cell has a value: pandas stores missing values as NaN."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def rounded(value: float | None) -> str:
    """Return a number with at most four digits: `4,013`, `0.661`; '' if it is None or NaN."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else number(float(value))


def _ratio(value: float) -> str:
    """Return `0.53`, or three digits where two decimals would both be 0: `0.00412`."""
    return number(value) if 0 < abs(value) < 0.01 else f"{value:.2f}"


def times(ratio: float | None) -> str:
    """Return a ratio: `1.61×`; '' if it is None or NaN."""
    if ratio is None or math.isnan(ratio):
        return ""
    return f"{_ratio(ratio)}×" if ratio < 100 else f"{ratio:,.0f}×"


def signed(value: float) -> str:
    """Return a number with its sign: `+0.012`, `−3`."""
    return f"{'−' if value < 0 else '+'}{number(abs(float(value)))}"


def versus(value: float | None, ratios: bool) -> str:
    """Format a value of `Results.versus`: `0.53`, `+0.012`; '' if it is None or NaN."""
    if value is None or math.isnan(value):
        return ""
    return _ratio(value) if ratios else signed(value)


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


def duration(value: float) -> str:
    """Return `47 s`, `2 min`, `12 min 30 s` or `3 h 5 min`, with no-break spaces."""
    if value < 59.5:
        return secs(round(value, 1)) if value == 0 or value >= 0.1 else f"<{SPACE}0.1{SPACE}s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min")) if hours else ((minutes, "min"), (rest, "s"))
    return SPACE.join(f"{count:,}{SPACE}{unit}" for count, unit in parts if count)


def with_sd(values: Sequence[float]) -> str:
    """Return mean and standard deviation: `1.44 ± 0.12`; of one value the value, of none ''.

    Both have the decimals of three significant digits of the mean and two of the deviation.
    """
    middle, spread = mean(values), sd(values)
    if middle is None or spread is None or middle == spread == 0:
        return "" if middle is None else number(middle)
    if abs(middle) <= 1e-9 * spread:  # a mean of 0, up to rounding
        middle = 0.0
    digits = max(0, 2 - math.floor(math.log10(abs(middle)))) if middle else 0
    if spread > 1e-9 * abs(middle):  # less is an error of rounding
        digits = max(digits, 1 - math.floor(math.log10(spread)))
    return f"{middle:,.{digits}f} ± {spread:,.{digits}f}"


def noted(value: str, outcome: Outcome) -> str:
    """Add a configuration's failures to its value: `1.44 ± 0.12, failed on 2 of 5 seeds`."""
    return ", ".join(filter(None, [value, outcome.failure_note]))


def between(estimate: Estimate) -> str:
    """Return the interval of an estimate: `1.85 … 1.86`; '' for a single run."""
    complete = estimate.low is not None and estimate.high is not None
    return f"{number(estimate.low)} … {number(estimate.high)}" if complete else ""


def speedup(value: Estimate | str, cell: bool = False) -> str:
    """Return `1.85 (1.61 … 2.12)`, `at least 4`, or `not determined: REASON`.

    value: the estimate, or the reason why there is none. cell: leave the reason out, and return ''
    for the baseline.
    """
    if isinstance(value, str):
        if cell:
            return "" if value == ITSELF else OPEN
        return f"{OPEN}: {value}"
    if value.bound is not None:
        return f"at least {number(value.bound)}"
    ends = between(value)
    return f"{number(value.mean)} ({ends})" if ends else number(value.mean)


def _decimals(value: float, significant: int) -> int:
    """Return how many decimals show so many significant digits, at least three."""
    return max(3, significant - 1 - math.floor(math.log10(value))) if value > 0 else 3


def interval(difference: Difference, ratios: bool) -> str:
    """Return a ratio as `0.503 (0.471 … 0.537)` or a difference as `+0.01 (−0.02 … +0.04)`.

    A ratio has as many decimals as its interval needs. Without an interval: the estimate alone, or
    ''. If the interval of a ratio is too wide to be useful: the bound on the side of 1, such as
    `below 0.874`, or `not determined` if 1 lies in it.
    """
    middle, low, high = difference.estimate, difference.low, difference.high
    if ratios and is_wide(low, high):
        if high is not None and high < 1:
            return f"below {high:.{_decimals(high, 3)}f}"
        return f"above {low:.3f}" if low is not None and low > 1 else OPEN
    if middle is None:
        return ""
    values = [middle] if low is None or high is None else [middle, low, high]
    width = max(values) - min(values)
    # A smaller width is an error of rounding.
    digits = _decimals(width, 2) if width > 1e-9 * middle else _decimals(middle, 3)
    shown = [f"{value:.{digits}f}" if ratios else signed(value) for value in values]
    return shown[0] if len(shown) == 1 else f"{shown[0]} ({shown[1]} … {shown[2]})"


VERDICTS = {
    **{verdict: verdict.replace("_", " ") for verdict in Verdict},
    Verdict.NO_DIFFERENCE: "no significant difference",
    Verdict.FAILS: "fails on some seeds",
    Verdict.OPEN: "not decided yet",
}
"""The words for people of each verdict."""


def verdict(difference: Difference) -> str:
    """Return the words of a verdict."""
    return VERDICTS[difference.verdict]


# ---- names and tables that fit
def short(name: str, limit: int) -> str:
    """Shorten a name to `limit` characters by its middle, because names differ at their ends."""
    if len(name) <= limit:
        return name
    head = max(1, limit) // 2
    return f"{name[:head]}…{name[len(name) - max(0, limit - head - 1) :]}"


def fitted(knobs: str, limit: int) -> str:
    """Shorten `text.knobs`: first drop sections, then the middle of names, values last."""
    if len(knobs) <= limit:
        return knobs
    # Drop the sections of all names: `optimizer.lr=0.1` becomes `lr=0.1`.
    words = [word.rpartition("=") for word in knobs.split(" ")]
    parts = [(name.rpartition(".")[2], equals, value) for name, equals, value in words]
    # Shorten names to `room` characters and values to twice as many, at least 8.
    shortened = knobs
    for room in range(max(len(name) for name, _, _ in parts), 1, -1):
        shortened = " ".join(
            f"{short(name, room)}{equals}{short(value, max(8, 2 * room))}"
            for name, equals, value in parts
        )
        if len(shortened) <= limit:
            break
    return short(shortened, limit)


def _aligned(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Pad every cell to the width of its column."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]


def columns() -> int | None:
    """Return the width of the terminal; None for a file or a pipe, where nothing is cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


NARROW = 16
"""Minimum width of the column that may be shortened, in characters."""


def plain_table(lines: Sequence[Sequence[str]], width: int | None = None, knobs: int = 0) -> str:
    """Return a table for a terminal of `width` columns (None: unlimited).

    If it does not fit, column `knobs` is shortened. If that is not enough, every row becomes a
    block with one line per cell, because a terminal would break long lines at arbitrary places.
    """
    cells = _aligned(lines)
    if width is None or (excess := len("  ".join(cells[0])) - width) <= 0:
        return "\n".join("  ".join(line).rstrip() for line in cells)
    if (limit := len(cells[0][knobs]) - excess) >= NARROW:
        column = knobs % len(cells[0])
        shorter = [
            [fitted(cell, limit) if i == column else cell for i, cell in enumerate(line)]
            for line in lines
        ]
        return plain_table(shorter)
    wrapped = []
    for row in lines[1:]:
        named = [f"{name}: {cell}" for name, cell in zip(lines[0], row, strict=True) if cell]
        for i, line in enumerate(named):
            wrapped.append(textwrap.fill("  " * bool(i) + line, width, subsequent_indent="    "))
    return "\n".join(wrapped)


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; the first line holds the headings."""
    head, *rows = _aligned(lines)
    rule = "|" + "|".join("-" * (len(name) + 2) for name in head) + "|"
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


EFFECTS = ("ratio", "ratio_low", "ratio_high", "difference", "difference_low", "difference_high")


def effects(difference: Difference, ratios: bool) -> dict[str, Any]:
    """Return the effect as a ratio or as a difference, with its interval.

    The keys of the other form are None; so are a ratio's if its interval is too wide.
    """
    ends = (difference.estimate, difference.low, difference.high)
    if ratios and is_wide(difference.low, difference.high):
        ends = (None, None, None)
    values = dict(zip(EFFECTS[:3] if ratios else EFFECTS[3:], ends, strict=True))
    return {name: values.get(name) for name in EFFECTS}


def plain(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result's lines of text: nothing null, means with their sd and failures."""
    lines = dict[str, Any]()
    for name, value in result.items():
        if value is None or isinstance(value, list) or name.endswith(("_sd", "_failures")):
            continue
        if isinstance(value, bool):
            lines[name] = "yes" if value else "no"
        elif isinstance(value, float) and "ratio" in name:
            lines[name] = f"{value:.4g}"  # as close to 1 as its interval may end
        elif isinstance(value, dict):
            lines[name] = text.knobs(value)
        elif (values := result.get(f"{name}s")) is not None:
            failures = result.get(f"{name.removesuffix('value')}failures", 0)
            notes = [with_sd(values), failure_note(failures, len(values))]
            lines[name] = ", ".join(filter(None, notes))
        else:
            lines[name] = value
    return lines
