"""The shapes of a search file's sections: which keys there are, and what they take."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, TypeAdapter

from tunediff.config import ConfigError, Knob
from tunediff.config.schema import Bool, Float, Int, Str, knobs_of, section
from tunediff.space.model import MAX_SEEDS, Manner, refuse

Lines = dict[str, Any]
COSTS = ("peak_memory_mib", "worker_s")
"""What a second objective may be, kept small: memory of the device, or training seconds times workers (GPU-seconds)."""
T = TypeVar("T")
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def _seconds(value: Any) -> float:
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or not any(match.groups()):
        raise ValueError("is not a duration; allowed: a number with its unit, e.g. 90s, 10m, 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    if not (total := 3600 * hours + 60 * minutes + seconds) > 0:
        raise ValueError("is empty; allowed: a duration above 0, e.g. 90s")
    return total


def duration_s(value: Any, where: str) -> float:
    """Seconds of a duration such as 90s, 10m, 1h30m; above 0. Raises `ConfigError`."""
    try:
        return _seconds(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {value!r} {error}") from None


Duration = Annotated[float, BeforeValidator(_seconds)]


@section
class File(Manner):
    """A search file; None: a key that is not there."""

    workload: Str | None = None
    base: Str | None = None
    objective: Any = None
    budget: Lines = dataclasses.field(default_factory=dict)
    seeds: Annotated[Int, Ge(2), Le(MAX_SEEDS)] | None = None
    fixed: Lines = dataclasses.field(default_factory=dict)
    baseline: Lines = dataclasses.field(default_factory=dict)
    search: Lines | None = None
    grid: Lines | None = None
    trials: list[Lines] | None = None
    """points, e.g. - {precision.amp: bf16}"""
    ladder: dict[str, Lines] | None = None
    first: list[Lines] | None = None
    """points, e.g. - {}"""
    study: Any = None
    confirm: Lines | None = None


@section
class Budget:
    """`budget:`"""

    per_trial: Duration
    """training seconds of one trial, e.g. 10m"""
    trials: Annotated[Int, Ge(1)] | None = None
    total: Duration | None = None
    compile: Literal["charged", "free"] | None = None
    deadline: Duration | None = None


@section
class Objective:
    """`objective:`"""

    metric: Str | None = None
    mode: Literal["min", "max"] | None = None
    cost: Literal["peak_memory_mib", "worker_s"] | None = None


@section
class Spec:
    """What a searched knob may be: one of several values, or a number in between."""

    choice: list[Any] | None = None
    """choices"""
    low: Any = None
    high: Any = None
    step: Annotated[Float, Gt(0.0)] | None = None
    log: Bool = False
    when: Lines = dataclasses.field(default_factory=dict)


def checked(shape: type[T], content: Any, where: str) -> T:
    """A section of that shape. Raises `ConfigError`, one line for each key, its value and what is allowed."""
    try:
        found = TypeAdapter(shape).validate_python(content)
    except pydantic.ValidationError as error:
        keys = {knob.name: dataclasses.replace(knob, optional=False) for knob in knobs_of(shape)}
        raise ConfigError("\n".join(_explain(detail, keys, where) for detail in error.errors())) from None
    for key, value in content.items():
        refuse(value is None, f"{where}: {key}: None is not allowed; allowed: a value, or no such line")
    return found


def _explain(detail: Any, keys: Mapping[str, Knob], where: str) -> str:
    """One line for one pydantic error."""
    path, value, kind = detail["loc"], detail["input"], detail["type"]
    place = where + "".join(f"[{part}]" if isinstance(part, int) else f": {part}" for part in path)
    if path[-1:] == ("[key]",):
        return f"{where}: {path[0]}: {value!r} is not allowed as a key; allowed: a word"
    if kind == "unexpected_keyword_argument":
        return f"{place}: no such key; allowed: {', '.join(keys)}"
    if kind in ("dict_type", "dataclass_type"):
        return f"{place}: needs `key: value` lines, found {value!r}"
    if kind == "value_error":
        return f"{place}: {value!r} {detail['ctx']['error']}"
    knob = keys[path[0]]
    if kind == "missing":
        return f"{place}: is missing; {knob.description}"
    if kind == "list_type":
        return f"{place}: needs a list of {knob.description}, found {value!r}"
    return f"{place}: {value!r} is not allowed; allowed: {knob.allowed}{knob.yaml_hint(value)}"
