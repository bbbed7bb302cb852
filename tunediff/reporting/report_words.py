"""How the report writes numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from tunediff.cli import number


def shown(value: Any) -> str:
    """A knob's value: `true`, `[8, 16]`, `0.00123`."""
    return json.dumps(value) if isinstance(value, bool) or value is None else number(value)


def rounded(value: float | None) -> str:
    """`4,013`, `0.661`; '' when not known."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else number(float(value))


def times(ratio: float | None) -> str:
    """`1.61×`; '' when not known."""
    return "" if ratio is None or math.isnan(ratio) else f"{ratio:.2f}×" if ratio < 100 else f"{ratio:,.0f}×"


def percent(share: float) -> str:
    """`38 %`, `0.4 %`; its space does not break."""
    digits = 0 if abs(share) >= 0.095 or share == 0 else 1
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"


def secs(value: float) -> str:
    """`12.4 s`; its space does not break."""
    return f"{number(float(value))}\N{NO-BREAK SPACE}s"


def duration(value: float) -> str:
    """`47 s`, `2 min`, `12 min 30 s`, `3 h 5 min`; its spaces do not break."""
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if value < 59.5:
        words = f"{number(float(round(value, 1)))} s" if value == 0 or value >= 0.1 else "< 0.1 s"
    elif hours:
        words = f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"
    else:
        words = f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return words.replace(" ", "\N{NO-BREAK SPACE}")


def with_sd(values: Sequence[float]) -> str:
    """`1.44 ± 0.12`: mean and standard deviation, to as many digits as 3 significant ones of the mean have."""
    if not values:
        return ""
    mean = sum(values) / len(values)
    if len(values) < 2 or mean == 0:
        return number(mean)
    sd = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    digits = max(0, 2 - math.floor(math.log10(abs(mean))))
    return f"{mean:,.{digits}f} ± {sd:,.{digits}f}"


def some(count: int, one: str, many: str = "") -> str:
    """`1 trial`, `1,000 trials`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def cut(words: str, most: int) -> str:
    """At most so many characters."""
    return words if len(words) <= most else f"{words[: most - 1]}…"


def is_known(value: Any) -> bool:
    """Whether a cell of a table is filled: pandas writes NaN for what is missing."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))
