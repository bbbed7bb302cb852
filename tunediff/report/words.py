"""Format numbers, intervals and plain tables for the report; `core.text` has the more general
functions."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Sequence

from tunediff.analysis.comparison import ITSELF
from tunediff.analysis.outcome import Outcome
from tunediff.analysis.statistics import SAME, Difference, Estimate, is_wide, mean, sd
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


def times(ratio: float | None) -> str:
    """Return a ratio: `1.61×`; '' if it is None or NaN."""
    return (
        ""
        if ratio is None or math.isnan(ratio)
        else f"{_ratio(ratio)}×"
        if ratio < 100
        else f"{ratio:,.0f}×"
    )


def _ratio(value: float) -> str:
    """Return a ratio with two decimals, or if these were both 0 with three digits: `0.53`,
    `0.00412`."""
    return number(value) if 0 < abs(value) < 0.01 else f"{value:.2f}"


def signed(value: float) -> str:
    """Return a number with its sign: `+0.012`, `−3`."""
    return f"{'−' if value < 0 else '+'}{number(abs(float(value)))}"


def beside(versus: float | None, ratios: bool) -> str:
    """Format a value of `Results.versus` for a table column: `0.53`, `+0.012`; '' if it is None or
    NaN."""
    return (
        "" if versus is None or math.isnan(versus) else _ratio(versus) if ratios else signed(versus)
    )


def percent(share: float) -> str:
    """Return a share as percent: `38 %`, `0.4 %`, `0.04 %`, with a no-break space."""
    if 0 < abs(share) < 0.00095:
        return f"{100 * share:.1g}{SPACE}%"
    return f"{100 * share:.{0 if abs(share) >= 0.095 or share == 0 else 1}f}{SPACE}%"


def secs(value: float) -> str:
    """Return seconds: `12.4 s`, with a no-break space."""
    return f"{number(float(value))}{SPACE}s"


def duration(value: float) -> str:
    """Return a duration in seconds as `47 s`, `2 min`, `12 min 30 s` or `3 h 5 min`, with no-break
    spaces."""
    if value < 59.5:
        return secs(round(value, 1)) if value == 0 or value >= 0.1 else f"<{SPACE}0.1{SPACE}s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min")) if hours else ((minutes, "min"), (rest, "s"))
    return SPACE.join(f"{many:,}{SPACE}{unit}" for many, unit in parts if many)


def with_sd(values: Sequence[float]) -> str:
    """Return mean and standard deviation: `1.44 ± 0.12`.

    Both have as many decimals as three significant digits of the mean and two of the standard
    deviation need. Without a standard deviation the mean alone; '' without values.
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


def speedup(value: Estimate | str, cell: bool = False) -> str:
    """Return a speed-up with its interval: `1.85 (1.61 … 2.12)`, or `not determined: REASON`.

    value: the estimate, or the reason why there is none. cell: leave the reason out, and return ''
    for the baseline.
    """
    if isinstance(value, Estimate):
        return estimated(value)
    return "" if cell and value == ITSELF else OPEN if cell else f"{OPEN}: {value}"


def between(estimate: Estimate) -> str:
    """Return the interval of an estimate: `1.85 … 1.86`; '' for a single run."""
    complete = estimate.low is not None and estimate.high is not None
    return f"{number(estimate.low)} … {number(estimate.high)}" if complete else ""


def estimated(estimate: Estimate | None) -> str:
    """Return an estimate with its interval: `1.85 (1.85 … 1.86)`, or its lower bound: `at least
    1.85`."""
    if estimate is None:
        return ""
    if (bound := estimate.bound) is not None:
        return f"at least {number(bound)}"
    return (
        f"{number(estimate.mean)} ({ends})"
        if (ends := between(estimate))
        else number(estimate.mean)
    )


def _decimals(size: float, significant: int) -> int:
    """Return how many decimals show so many significant digits of a size, at least three."""
    return max(3, significant - 1 - math.floor(math.log10(size))) if size > 0 else 3


def interval(difference: Difference, ratios: bool) -> str:
    """Return a ratio as `0.503 (0.471 … 0.537)` or a difference as `+0.01 (−0.02 … +0.04)`.

    A ratio has as many decimals as its interval needs. Without an interval the estimate alone, or
    ''. If the interval of a ratio is too wide to be useful, the bound on the side of 1, such as
    `below 0.874`; `not determined` if 1 lies in it.
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
    digits = (
        _decimals(width, 2) if width > 1e-9 * middle else _decimals(middle, 3)
    )  # less is an error of rounding
    shown = [f"{value:.{digits}f}" if ratios else signed(value) for value in values]
    return shown[0] if len(shown) == 1 else f"{shown[0]} ({shown[1]} … {shown[2]})"


def noted(value: str, outcome: Outcome) -> str:
    """Return the text of a configuration's value with its failures: `1.44 ± 0.12, failed on 2 of 5
    seeds`."""
    return ", ".join(filter(None, [value, outcome.failure_note]))


def verdict(difference: Difference) -> str:
    """Return a verdict that is short enough for a terminal."""
    return "no significant difference" if difference.verdict == SAME else difference.verdict


def short(words: str, most: int) -> str:
    """Shorten text to `most` characters by leaving out its middle, because names often differ at
    their ends."""
    head = max(1, most) // 2
    return (
        words
        if len(words) <= most
        else f"{words[:head]}…{words[len(words) - max(0, most - head - 1) :]}"
    )


def fitted(text: str, most: int) -> str:
    """Shorten `text.knobs` to `most` characters: first drop sections, then the middle of names,
    values last."""
    if len(text) <= most:
        return text
    # Drop the sections of all names: `optimizer.lr=0.1` becomes `lr=0.1`.
    parts = [
        (name.rpartition(".")[2], way, value)
        for name, way, value in (part.rpartition("=") for part in text.split(" "))
    ]
    shortened = text
    # Shorten names to `room` characters and values to twice as many, at least 8, until all of it
    # fits.
    for room in range(max(len(name) for name, _, _ in parts), 1, -1):
        shortened = " ".join(
            f"{short(name, room)}{way}{short(value, max(8, 2 * room))}"
            for name, way, value in parts
        )
        if len(shortened) <= most:
            break
    return short(shortened, most)


def aligned(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Pad every cell to the width of its column."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]


def columns() -> int | None:
    """Return the width of the terminal; None if output goes to a file or a pipe, where nothing is
    cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


NARROW = 16
"""Minimum width of the column that may be shortened, in characters."""


def plain_table(lines: Sequence[Sequence[str]], width: int | None = None, words: int = 0) -> str:
    """Return a table for a terminal of `width` columns (None: unlimited).

    If it does not fit, the knobs in column `words` are shortened. If that is not enough, every row
    becomes a block with one line per cell, because a terminal would break long lines at arbitrary
    places.
    """
    cells = aligned(lines)
    if width is None or (over := len("  ".join(cells[0])) - width) <= 0:
        return "\n".join("  ".join(line).rstrip() for line in cells)
    if (most := len(cells[0][words]) - over) >= NARROW:
        return plain_table(
            [
                [
                    fitted(cell, most) if i == words % len(line) else cell
                    for i, cell in enumerate(line)
                ]
                for line in lines
            ]
        )
    blocks = [
        [f"{name}: {cell}" for name, cell in zip(lines[0], row, strict=True) if cell]
        for row in lines[1:]
    ]
    text_lines = [
        f"{'  ' if place else ''}{line}" for block in blocks for place, line in enumerate(block)
    ]
    return "\n".join(textwrap.fill(line, width, subsequent_indent="    ") for line in text_lines)


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; the first line holds the headings."""
    head, *rows = aligned(lines)
    rule = "|" + "|".join("-" * (len(name) + 2) for name in head) + "|"
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])
