"""Declare the sections of a search file: their keys and the values that these take.

A field's docstring describes allowed values in an error message where the type does not say enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

import pydantic
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BeforeValidator, Field, TypeAdapter

from tunediff.config import ConfigError, Knob, Lines, Values
from tunediff.config.knobs import Bool, Float, Int, Str, knobs_of, nearest, refuse, section
from tunediff.core import text
from tunediff.experiment.model import EarlyStopping, seconds_of

MAX_SEEDS = 100
MOST_FINALISTS = 20
Service = Literal["wandb", "mlflow", "trackio", "tensorboard"]
Sampler = Literal[
    "TPESampler",
    "GPSampler",
    "RandomSampler",
    "QMCSampler",
    "CmaEsSampler",
    "NSGAIISampler",
    "BruteForceSampler",
]
"""Samplers of Optuna that a search can draw with."""
Cost = Literal["peak_memory_mib", "device_s", "price"]
EARLY_STOPPING: tuple[str, ...] = get_args(EarlyStopping)
COSTS: tuple[str, ...] = get_args(Cost)
"""Allowed second objectives, which are minimized: device memory, seconds × devices and
price."""
T = TypeVar("T")


class Seconds(float):
    """A duration that has been parsed; its text is what options and files take."""

    def __str__(self) -> str:
        return text.format_exact(self)


def _seconds(value: Any) -> float:
    """Return the seconds of a duration in a file, which has its unit. Raises `ValueError`."""
    if isinstance(value, Seconds):
        return value
    if not isinstance(value, str):
        raise ValueError("is not a duration; allowed: a number with its unit, e.g. 90s, 10m, 1h30m")
    return seconds_of(value)


def duration_s(value: str | float, where: str) -> Seconds:
    """Return the seconds of a duration above 0, such as 90s, 10m, 1h30m, or of a number of them.

    Raises `ConfigError`.
    """
    try:
        return Seconds(seconds_of(value))
    except ValueError as error:
        raise ConfigError(f"{where}: {value!r} {error}") from None


Duration = Annotated[float, BeforeValidator(_seconds)]


@section
class Confirm:
    """`confirm:`: how the finalists of a search run again."""

    of: Annotated[Int, Ge(1), Le(MOST_FINALISTS)] = 3  # the best so many
    # at most: runs of each and of the baseline, on seeds new to it
    seeds: Annotated[Int, Ge(2), Le(MAX_SEEDS)] = 12
    # as in `RunOptions`, of every finished run
    final: Values = dataclasses.field(default_factory=dict)
    parallel: Bool | None = None
    # whether all equal devices of this machine have a run at a time; absent: if they are GPUs


@section
class RunOptions:
    """Keys of a search file that set directly how trials run."""

    early_stopping: EarlyStopping = "none"
    sampler: Sampler = "TPESampler"  # of Optuna, which draws the points of search:
    seed: Annotated[Int, Ge(0), Lt(2**32)] = 0  # of the search; a training's own is the knob `seed`
    trials_per_gpu: Annotated[Int, Ge(1), Le(16)] = 1  # trials of one worker that share each GPU
    at_once: Annotated[Int, Ge(1), Le(1024)] = 1  # confirming runs, on equal devices of one machine
    operations: Annotated[Int, Ge(0), Le(1000)] = 0  # steps that are profiled after a training
    track: Service | None = None  # the service that shows every trial as a run
    final: Values = dataclasses.field(default_factory=dict)
    # knobs of `evaluation.` for one more evaluation of every finished trial; empty: none


@section
class SearchFile(RunOptions):
    """A search file; None: the key is absent."""

    workload: Str | None = None
    warm_start: Str | None = None  # an earlier search, whose best points are tried first
    base: Str | None = None
    objective: Any = None
    budget: Lines = dataclasses.field(default_factory=dict)
    seeds: Annotated[Int, Ge(2), Le(MAX_SEEDS)] | None = None
    noise: Annotated[Int, Ge(1), Le(MAX_SEEDS)] | None = None
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
class BudgetSection:
    """`budget:`"""

    per_trial: Duration
    """training seconds of one trial, e.g. 10m"""
    unit: Literal["wall", "device"] = "wall"
    price_per_device_hour: Annotated[Float, Gt(0.0)] | None = None
    """a number above 0, in any currency"""
    trials: Annotated[Int, Ge(1)] | None = None
    total: Duration | None = None
    compile: Literal["charged", "free"] | None = None
    setup: Literal["charged", "free"] = "free"
    """whether what a workload does before its first batch counts as training"""
    deadline: Duration | None = None


@section
class ObjectiveSection:
    """`objective:`"""

    metric: Str | None = None
    mode: Literal["min", "max"] | None = None
    cost: Cost | None = None
    target: Str | None = None  # what the metric is to reach in the least time, e.g. val_loss<=3.28


@section
class DimensionSection:
    """The space of a searched knob: a choice of values, or a range of numbers."""

    choice: list[Any] | None = None
    """choices"""
    low: Any = None
    high: Any = None
    step: Annotated[Float, Gt(0.0)] | None = None
    log: Bool = False
    when: Lines = dataclasses.field(default_factory=dict)


@section
class StudySection:
    """`study:`"""

    title: Str = ""
    """words"""
    columns: Annotated[tuple[Str, ...], MinLen(1)] = Field(default=None, validate_default=True)
    """a list of knobs and quantities"""
    x: Str | None = None
    """one name"""
    y: Annotated[tuple[Str, ...], BeforeValidator(lambda y: (y,) if isinstance(y, str) else y)] = ()
    """a name, or several"""


def checked(shape: type[T], content: Any, where: str) -> T:
    """Return the content as a section of that shape. Raises `ConfigError` with one line per key."""
    try:
        section = TypeAdapter(shape).validate_python(content)
    except pydantic.ValidationError as error:
        keys = {knob.name: dataclasses.replace(knob, optional=False) for knob in knobs_of(shape)}
        lines = dict.fromkeys(_explain(detail, keys, content, where) for detail in error.errors())
        raise ConfigError("\n".join(lines)) from None
    for key, value in content.items():
        refuse(
            value is None, f"{where}: {key}: None is not allowed; allowed: a value, or no such line"
        )
    return section


def _explain(detail: Any, keys: Mapping[str, Knob], content: Any, where: str) -> str:
    """Return one line for one pydantic error."""
    path, value, kind = detail["loc"], detail["input"], detail["type"]
    place = where + "".join(f"[{part}]" if isinstance(part, int) else f": {part}" for part in path)
    if path[-1:] == ("[key]",):
        return f"{where}: {path[0]}: {value!r} is not allowed as a key; allowed: a word"
    if kind in ("unexpected_keyword_argument", "invalid_key"):
        # last, as files begin with other keys
        names = sorted(keys, key=RunOptions.__dataclass_fields__.__contains__)
        return f"{where}: {path[0]}: no such key; {nearest(str(path[0]), names)}"
    if kind in ("dict_type", "dataclass_type"):
        return f"{place}: needs `key: value` lines, found {value!r}"
    if kind == "value_error":
        return f"{place}: {value!r} {detail['ctx']['error']}"
    knob = keys[path[0]]
    if kind == "missing":
        return f"{place}: is missing; {knob.description}"
    if kind == "list_type":
        return f"{place}: needs a list of {knob.description}, found {value!r}"
    if knob.description:
        return (
            f"{where}: {knob.name}: {content.get(knob.name)!r} is not allowed; allowed:"
            f" {knob.description}"
        )
    return f"{place}: {value!r} is not allowed; allowed: {knob.allowed}"
