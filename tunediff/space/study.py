"""The `study:` section of a search file, checked: which table and figure a search ends with, of which quantities.

A quantity's name is the CSV column, with its unit; its label is what headings and axes say.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Annotated

import pydantic
from annotated_types import MinLen
from pydantic import BeforeValidator, Field, TypeAdapter

from tunediff.config import ConfigError, Workload
from tunediff.config.schema import Str, section
from tunediff.record import QUANTITIES, Quantity

DERIVED: dict[str, Quantity] = {
    "compile_s": Quantity("compile", "s", "compilation and warm-up step"),
    "setup_s": Quantity("setup", "s", "reading data, building the model"),
    "epoch_s": Quantity("epoch", "s", "images of the set / images per second, without compilation"),
    "epoch_data_wait_s": Quantity("loading per epoch", "s", "epoch × share of waiting for data"),
    "versus_baseline": Quantity("vs. baseline", "×", "images/s / the baseline's"),
    "percent_of_base": Quantity("of base", "%", "100 × images/s / the baseline's"),
    "memory_percent_of_base": Quantity("memory of base", "%", "100 × memory / the baseline's"),
    "versus_previous": Quantity("vs. rung before", "×", "images/s / those of the rung before (ladder:)"),
    "speedup_over_one_worker": Quantity("vs. one worker", "×", "images/s / those of one worker, all else equal"),
    "scaling_efficiency": Quantity("efficiency", "%", "speed-up over one worker / number of workers", 100.0),
    "versus_uncompiled": Quantity("vs. uncompiled", "×", "images/s / those without compilation, all else equal"),
    "images_to_break_even": Quantity("images to break even", "", "images after which compiling has paid for itself"),
    "break_even_s": Quantity("break even after", "s", "training seconds, compilation included, until then"),
}
"""What follows from the seconds of a run, or from the measurements of one or two configurations, by name."""

WORDS: dict[str, Quantity] = {
    "configuration": Quantity("configuration", "", "what differs from the baseline, or the rung of the ladder"),
    "trial": Quantity("trial", "", "name of the trial, or of the first of several runs"),
    "status": Quantity("status", "", "how it ended"),
    "runs": Quantity("runs", "", "runs that ended ok (seeds:); the others' columns are means over them"),
}
"""Columns that hold no number of a run."""

OPERATIONS: dict[str, Quantity] = {
    "operation": Quantity("operation", "", "name as torch has it"),
    "calls": Quantity("calls", "", "calls in all profiled steps"),
    "calls_per_step": Quantity("calls/step", "", "calls in one step"),
    "self_s": Quantity(
        "self", "ms", "time in the operation itself, in all profiled steps; on a GPU the device's", 1000
    ),
    "self_s_per_step": Quantity(
        "self/step", "ms", "time in the operation itself in one step; on a GPU the device's", 1000
    ),
    "total_s": Quantity("total", "ms", "time with the operations that it calls, in all profiled steps", 1000.0),
    "share": Quantity("share", "%", "self time / self time of all operations", 100.0),
}
"""Columns of a table of operations: `operations: N` in the search file."""


@section
class _Section:
    title: Str = ""
    columns: Annotated[tuple[Str, ...], MinLen(1)] = Field(default=(), validate_default=True)
    x: Str | None = None
    y: Annotated[tuple[Str, ...], BeforeValidator(lambda y: (y,) if isinstance(y, str) else y)] = ()


@dataclasses.dataclass(frozen=True)
class Study:
    """A checked `study:` section. A ladder draws its rungs, operations themselves, the rest lines over `x`, or bars."""

    title: str
    columns: tuple[str, ...]
    """Of the table: knobs and quantities."""
    x: str | None
    """A knob with numbers, or a measured number; None: bars, one for each configuration."""
    y: tuple[str, ...]
    """Measured numbers, with a panel each; none: no figure, but for that of operations."""
    measured: Mapping[str, Quantity]
    """What a point of this workload holds."""

    @property
    def numbers(self) -> dict[str, Quantity]:
        """What is a number of a run: measured, or following from that."""
        return {**self.measured, **DERIVED}

    def quantity(self, name: str) -> Quantity:
        """The quantity of that name; a knob is a quantity without a unit."""
        return {**WORDS, **self.numbers, **OPERATIONS}.get(name, Quantity(name))

    @property
    def of_operations(self) -> bool:
        """Whether a row is an operation, not a configuration."""
        return any(column in OPERATIONS for column in self.columns)

    @property
    def has_figure(self) -> bool:
        """Whether it ends with a figure."""
        return bool(self.y) or self.of_operations


_ADAPTER = TypeAdapter(_Section)
_ALLOWED = {"title": "words", "columns": "a list of knobs and quantities", "x": "one name", "y": "a name, or several"}


def parse(content: object, source: str, workload: Workload, ladder: bool = False, operations: int = 0) -> Study:
    """Check a `study:` section. `ladder`: whether the search is one; `operations`: steps that are profiled.

    Raises `ConfigError` naming file, key, value and what is allowed.
    """
    where, knobs = f"{source}: study", workload.schema.knobs
    found = _shaped(content, where)
    study = Study(found.title, found.columns, found.x, found.y, QUANTITIES | dict(workload.quantities))
    numbers = study.numbers
    for key, kind, names, allowed in (
        ("columns", "knob or quantity", study.columns, [*WORDS, *numbers, *OPERATIONS, *knobs]),
        ("x", "knob or measured number", () if study.x is None else (study.x,), [*numbers, *knobs]),
        ("y", "measured number", study.y, [*numbers]),
    ):
        for name in names:
            if name not in allowed:
                near = difflib.get_close_matches(name, allowed, n=3, cutoff=0.5)
                hint = f"did you mean {' or '.join(near)}?" if near else f"allowed: {', '.join(allowed)}"
                raise ConfigError(f"{where}: {key}: {name!r}: no such {kind}; {hint}")
            if names.count(name) > 1:
                raise ConfigError(f"{where}: {key}: {name!r} is given twice")
    for key, names in (("columns", study.columns), ("y", study.y)):
        if study.of_operations and (odd := [name for name in names if name in numbers]):
            raise ConfigError(f"{where}: {key}: {odd[0]!r} is a quantity of a whole step, not of an operation")
    if study.of_operations and not operations:
        name = next(column for column in study.columns if column in OPERATIONS)
        raise ConfigError(f"{where}: columns: {name!r} needs operations: in the search file")
    if study.x in knobs and knobs[study.x].kind not in ("int", "float"):
        raise ConfigError(f"{where}: x: {study.x!r} holds no numbers; without x: there is a bar for each configuration")
    if study.x is not None and not study.y:
        raise ConfigError(f"{where}: x: {study.x!r} needs y: as well, e.g. y: images_per_s")
    if ladder and (study.x is not None or len(study.y) > 1):
        given = f"y: {', '.join(study.y)}" if study.x is None else f"x: {study.x}"
        raise ConfigError(f"{where}: {given}: the figure of a ladder needs one name under y:, and no x:")
    return study


def _shaped(content: object, where: str) -> _Section:
    """The section with its names as they stand there."""
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: needs `key: value` lines, found {content!r}")
    try:
        return _ADAPTER.validate_python(content)
    except pydantic.ValidationError as error:
        keys = [str(detail["loc"][0]) for detail in error.errors()]
    key = next((key for key in keys if key not in _ALLOWED), keys[0])
    if key not in _ALLOWED:
        raise ConfigError(f"{where}: {key}: no such key; allowed: {', '.join(_ALLOWED)}")
    raise ConfigError(f"{where}: {key}: {content.get(key)!r} is not allowed; allowed: {_ALLOWED[key]}")
