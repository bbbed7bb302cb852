"""The shapes of a search file's sections: which keys there are, and what they take."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, TypeAdapter

from tunediff.config import ConfigError, Knob
from tunediff.config.schema import Bool, Float, Int, Str, knobs_of, section
from tunediff.space.model import MAX_SEEDS

Lines = dict[str, Any]
FORMS = ("search", "grid", "trials", "ladder")
COSTS = ("peak_memory_mib", "worker_s")
"""What a second objective may be, kept small: memory of the device, or training seconds times workers (GPU-seconds)."""
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
T = TypeVar("T")


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
class File:
    """A search file. `None`: not given."""

    workload: Str | None = None
    base: Str | None = None
    objective: Any = None
    budget: Lines = dataclasses.field(default_factory=dict)
    early_stopping: Literal["none", "asha", "median"] = "none"
    seed: Annotated[Int, Ge(0)] = 0
    seeds: Annotated[Int, Ge(2), Le(MAX_SEEDS)] | None = None
    fixed: Lines = dataclasses.field(default_factory=dict)
    baseline: Lines = dataclasses.field(default_factory=dict)
    search: Lines | None = None
    grid: Lines | None = None
    trials: list[Lines] | None = None
    ladder: dict[str, Lines] | None = None
    first: list[Lines] | None = None
    fresh: Bool = False
    alone: Bool = False
    operations: Annotated[Int, Ge(0), Le(1000)] = 0
    """Steps to profile; a profile holds every call of every step in memory."""
    study: Any = None
    confirm: Lines | None = None
    final: Lines = dataclasses.field(default_factory=dict)
    warm_start: Str | None = None


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


@section
class Spec:
    """What a searched knob may be: one of several values, or a number in between."""

    choice: list[Any] | None = None
    low: Any = None
    high: Any = None
    step: Annotated[Float, Gt(0.0)] | None = None
    log: Bool = False
    when: Lines = dataclasses.field(default_factory=dict)


@functools.cache
def _adapter(shape: type[T]) -> tuple[TypeAdapter[T], dict[str, Knob]]:
    return TypeAdapter(shape), {knob.name: knob for knob in knobs_of(shape)}


def checked(shape: type[T], content: Any, where: str) -> T:
    """A section of that shape. Raises `ConfigError`, one line for each key, value and what is allowed."""
    adapter, keys = _adapter(shape)
    try:
        found = adapter.validate_python(content)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explain(detail, keys, where) for detail in error.errors())) from None
    for key, value in content.items():
        if value is None:  # stands for "not given" here: an empty line would be ignored without a word
            raise ConfigError(f"{where}: {key}: is empty; give a value or leave it out")
    return found


def _explain(detail: Any, keys: Mapping[str, Knob], where: str) -> str:
    """One line for one pydantic error."""
    path, value, kind = [part for part in detail["loc"] if part != "[key]"], detail["input"], detail["type"]
    place = where + "".join(f"[{part}]" if isinstance(part, int) else f": {part}" for part in path)
    if kind == "unexpected_keyword_argument":
        return f"{place}: no such key; allowed: {', '.join(keys)}"
    if kind == "missing":
        return f"{place}: is missing; {keys[path[0]].description}"
    if kind in ("dict_type", "dataclass_type"):
        return f"{place}: needs `key: value` lines, found {value!r}"
    if kind == "list_type":
        return f"{place}: needs a list, found {value!r}"
    if kind == "value_error":
        return f"{place}: {value!r} {detail['ctx']['error']}"
    knob = dataclasses.replace(keys[path[0]], optional=False)
    return f"{place}: {value!r} is not allowed; allowed: {knob.allowed}{knob.yaml_hint(value)}"
