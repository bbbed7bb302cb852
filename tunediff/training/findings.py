"""What a workload's evaluation returned, as a point of the curve, a journal and a checkpoint can hold it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from tunediff.config.code import WorkloadError
from tunediff.core import text
from tunediff.core.journal import to_json
from tunediff.core.point import Point
from tunediff.core.trial_record import LINE_KEYS

_TAKEN = Point.__dataclass_fields__.keys() | set(LINE_KEYS)
_PHASE = re.compile(r"step_\w+_s")
"""Names under which a point has the parts of its mean step."""


def plain(findings: Any, hook: str, title: str) -> dict[str, Any]:
    """Return an evaluation's findings in JSON's types; numbers that are NaN or infinite are left to the caller.

    `hook`: the method that was given the function. Raises `WorkloadError` naming the key that cannot be recorded.
    """
    where = f"{title}: {hook}"
    if not isinstance(findings, Mapping):
        raise WorkloadError(f"{where}: its function returned {findings!r}; it needs a dictionary of numbers")
    for name in findings:
        if not isinstance(name, str):
            raise WorkloadError(f"{where}: the key {name!r} is not allowed; allowed: a name")
        if name in _TAKEN or _PHASE.fullmatch(name):
            other = f"validation_{name}"
            raise WorkloadError(f'{where}: "{name}" has a meaning of its own; choose another name, "{other}"')
    return {name: _value(value, f'{where}: "{name}"') for name, value in findings.items()}


def finite(findings: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the numbers that are NaN or infinite."""
    return {name: value for name, value in findings.items() if not isinstance(value, float) or math.isfinite(value)}


def _value(value: Any, where: str) -> Any:
    number = _scalar(value)
    if isinstance(number, float) and not math.isfinite(number):
        return float(number)
    try:
        return json.loads(to_json(number))
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers raises the last
        message, allowed = (
            text.truncate(" ".join(repr(value).split()), 60),
            "a number, a word, None, or finite ones in lists",
        )
        raise WorkloadError(f"{where} is {message}; allowed: {allowed} and dictionaries") from None


def _scalar(value: Any) -> Any:
    """Return the number inside a tensor or an array that holds one; anything else as it is."""
    numel = getattr(value, "numel", None) or (lambda: getattr(value, "size", 0))
    return value.item() if hasattr(value, "item") and numel() == 1 else value
