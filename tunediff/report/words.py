"""How numbers are said, beyond `cli.number`, `cli.seconds` and `cli.knobs`."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Sequence

from tunediff.analysis.comparison import ITSELF
from tunediff.analysis.statistics import SAME, Difference, Estimate, is_wide, mean, sd
from tunediff.core.text import number
from tunediff.core.text import pluralize as pluralize
from tunediff.core.text import truncate as truncate

SPACE = "\N{NO-BREAK SPACE}"
OPEN = "not determined"


def is_known(value: object) -> bool:
    """Whether a cell of a table is filled: pandas writes NaN for what is missing."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def rounded(value: float | None) -> str:
    """`4,013`, `0.661`; '' when not known."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else number(float(value))


def times(ratio: float | None) -> str:
    """`1.61×`; '' when not known."""
    return "" if ratio is None or math.isnan(ratio) else f"{ratio:.2f}×" if ratio < 100 else f"{ratio:,.0f}×"


def signed(value: float) -> str:
    """`+0.012`, `−3`."""
    return f"{'−' if value < 0 else '+'}{number(abs(float(value)))}"


def beside(versus: float | None, ratios: bool) -> str:
    """What `Results.versus` gives, in a column whose heading says what it is: `0.53`, `+0.012`; '' when not known."""
    return "" if versus is None or math.isnan(versus) else f"{versus:.2f}" if ratios else signed(versus)


def percent(share: float) -> str:
    """`38 %`, `0.4 %`; its space does not break."""
    return f"{100 * share:.{0 if abs(share) >= 0.095 or share == 0 else 1}f}{SPACE}%"


def secs(value: float) -> str:
    """`12.4 s`; its space does not break."""
    return f"{number(float(value))}{SPACE}s"


def duration(value: float) -> str:
    """`47 s`, `2 min`, `12 min 30 s`, `3 h 5 min`; its spaces do not break."""
    if value < 59.5:
        return secs(round(value, 1)) if value == 0 or value >= 0.1 else f"<{SPACE}0.1{SPACE}s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min")) if hours else ((minutes, "min"), (rest, "s"))
    return SPACE.join(f"{many:,}{SPACE}{unit}" for many, unit in parts if many)


def with_sd(values: Sequence[float]) -> str:
    """`1.44 ± 0.12`: mean and standard deviation, to as many digits as 3 significant ones of the mean have."""
    middle, spread = mean(values), sd(values)
    if middle is None or spread is None or middle == 0:
        return "" if middle is None else number(middle)
    digits = max(0, 2 - math.floor(math.log10(abs(middle))))
    return f"{middle:,.{digits}f} ± {spread:,.{digits}f}"


def speedup(known: Estimate | str, cell: bool = False) -> str:
    """`1.85 (1.61 … 2.12)`, or `not determined: WHY`; in a `cell` without the reason, and '' for the baseline."""
    if isinstance(known, Estimate):
        return estimated(known)
    return "" if cell and known == ITSELF else OPEN if cell else f"{OPEN}: {known}"


def between(estimate: Estimate) -> str:
    """`1.85 … 1.86`: its interval; '' of a single run."""
    known = estimate.low is not None and estimate.high is not None
    return f"{number(estimate.low)} … {number(estimate.high)}" if known else ""


def estimated(estimate: Estimate | None) -> str:
    """`1.85 (1.85 … 1.86)`, or `at least 1.85`."""
    if estimate is None:
        return ""
    if (bound := estimate.bound) is not None:
        return f"at least {number(bound)}"
    return f"{number(estimate.mean)} ({ends})" if (ends := between(estimate)) else number(estimate.mean)


def interval(difference: Difference, ratios: bool) -> str:
    """`0.503 (0.471 … 0.537)`, or `+0.01 (−0.02 … +0.04)`; without its interval `0.503`, or ''.

    Of a ratio `not determined` where the interval is so wide that it tells nothing.
    """
    if ratios and is_wide(difference.low, difference.high):
        return OPEN
    said = "{:.3f}".format if ratios else signed
    if difference.estimate is None or difference.low is None or difference.high is None:
        return "" if difference.estimate is None else said(difference.estimate)
    return f"{said(difference.estimate)} ({said(difference.low)} … {said(difference.high)})"


def verdict(difference: Difference) -> str:
    """Short enough for a terminal."""
    return "no significant difference" if difference.verdict == SAME else difference.verdict


def short(words: str, most: int) -> str:
    """At most so many characters; what is left out is in the middle: names often differ at their ends."""
    head = max(1, most) // 2
    return words if len(words) <= most else f"{words[:head]}…{words[len(words) - max(0, most - head - 1) :]}"


def fitted(said: str, most: int) -> str:
    """`cli.knobs` in at most so many characters: sections go first, then the middle of names; values stay longest."""
    if len(said) <= most:
        return said
    parts = [
        (name.rpartition(".")[2], way, value) for name, way, value in (one.rpartition("=") for one in said.split(" "))
    ]
    tried = said
    for room in range(max(len(name) for name, _, _ in parts), 1, -1):
        tried = " ".join(f"{short(name, room)}{way}{short(value, max(8, 2 * room))}" for name, way, value in parts)
        if len(tried) <= most:
            break
    return short(tried, most)


def aligned(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Cells padded to the width of their column."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]


def columns() -> int | None:
    """Of the terminal that is written to; None: it is a file or a pipe, where nothing is cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


NARROW = 16
"""Characters that the column of a table which may be cut keeps."""


def plain_table(lines: Sequence[Sequence[str]], width: int | None = None, words: int = 0) -> str:
    """A table for a terminal of `width` columns (None: any).

    Where it does not fit, the knobs in column `words` are shortened. If that does not do, every row becomes a block
    with a line for each cell, rather than lines that a terminal breaks anywhere.
    """
    cells = aligned(lines)
    if width is None or (over := len("  ".join(cells[0])) - width) <= 0:
        return "\n".join("  ".join(line).rstrip() for line in cells)
    if (most := len(cells[0][words]) - over) >= NARROW:
        return plain_table(
            [[fitted(c, most) if place == words % len(line) else c for place, c in enumerate(line)] for line in lines]
        )
    blocks = [[f"{name}: {cell}" for name, cell in zip(lines[0], row, strict=True) if cell] for row in lines[1:]]
    said = [f"{'  ' if place else ''}{line}" for block in blocks for place, line in enumerate(block)]
    return "\n".join(textwrap.fill(line, width, subsequent_indent="    ") for line in said)


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first line holds its headings."""
    head, *rows = aligned(lines)
    rule = "|" + "|".join("-" * (len(name) + 2) for name in head) + "|"
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])
