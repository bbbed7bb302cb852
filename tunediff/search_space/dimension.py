"""One searched knob, and what follows from several: draws, points, combinations, their number."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Values
from tunediff.config.knobs import refuse

SHOWN = 20
"""Most choices of a knob that are shown."""


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One searched knob: choices or a range of numbers, and the condition for which it applies."""

    name: str
    choices: tuple[Any, ...] | None = None
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    integer: bool = False
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def active(self, values: Mapping[str, Any]) -> bool:
        """Return whether it applies, by the values of the knobs before it."""
        return all(name in values and values[name] in allowed for name, allowed in self.when)

    def contains(self, value: Any) -> bool:
        """Return whether `value` can be drawn."""
        if self.choices is not None:
            return (type(value), as_param(value)) in self._drawn
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and self.low <= value <= self.high):
            return False
        step = self.step or int(self.integer)
        return not step or abs((steps := (value - self.low) / step) - round(steps)) < 1e-9

    @functools.cached_property
    def _drawn(self) -> set[tuple[type, Any]]:
        """Return the choices as a set: a thousand points may be checked against a thousand."""
        return {(type(choice), as_param(choice)) for choice in self.choices or ()}

    @functools.cached_property
    def conditions(self) -> frozenset[tuple[str, frozenset[Any]]]:
        """Return the conditions of `when` with values as Optuna stores them: hashable."""
        return frozenset((name, frozenset(map(as_param, allowed))) for name, allowed in self.when)

    @property
    def size(self) -> float:
        """Return how many values can be drawn; infinite for real numbers without steps."""
        step = self.step or int(self.integer)
        spaced = round((self.high - self.low) / step) + 1 if step else math.inf
        return spaced if self.choices is None else len(self.choices)

    def suggest(self, trial: Any) -> Any:
        """Draw a value with an Optuna trial."""
        if self.choices is not None:
            labels = {as_param(choice): choice for choice in self.choices}
            return labels[trial.suggest_categorical(self.name, list(labels))]
        if not self.integer:
            ends = self.low, self.high
            value = trial.suggest_float(self.name, *ends, step=self.step, log=self.log)
            if self.step is None:
                return value
            low, step = Decimal(str(self.low)), Decimal(str(self.step))
            # 0.3, as a file lists it: Optuna's sum is 0.30000000000000004.
            return min(self.high, float(low + round((value - self.low) / self.step) * step))
        bounds = int(self.low), int(self.high)
        return trial.suggest_int(self.name, *bounds, step=int(self.step or 1), log=self.log)

    @property
    def condition(self) -> str:
        """Return in words when it applies; '' for always."""
        return " and ".join(
            f"{name} is {' or '.join(map(str, allowed))}" for name, allowed in self.when
        )

    def __str__(self) -> str:
        when = f" when {self.condition}" if self.when else ""
        if self.choices is not None:
            more = f", … ({len(self.choices):,} in all)" * (len(self.choices) > SHOWN)
            return f"[{', '.join(map(str, self.choices[:SHOWN]))}{more}]{when}"
        step = f" in steps of {self.step:g}" if self.step else ""
        return f"{self.low:g} … {self.high:g}{step}{' (log)' if self.log else ''}{when}"


def as_param(value: Any) -> Any:
    """Return a value as Optuna stores it: lists as their JSON text, because Optuna has no lists."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def to_params(values: Mapping[str, Any]) -> Values:
    """Return knob values as Optuna stores them."""
    return {name: as_param(value) for name, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Draw:
    """The define-by-run function of the space; a class, because Ray Tune pickles it."""

    dimensions: tuple[Dimension, ...]

    def __call__(self, trial: Any) -> Values:
        """Draw a value for every dimension that applies, in the order of the file."""
        values: Values = {}
        for dimension in self.dimensions:
            if dimension.active(values):
                values[dimension.name] = dimension.suggest(trial)
        return values


def complete(
    dimensions: Sequence[Dimension], baseline: Any, point: Mapping[str, Any], where: str
) -> Values:
    """Return a value for every dimension that applies: the point's, baseline's or member's.

    Else Optuna would draw missing values. Raises `ConfigError` for a value outside the space.
    """
    values = cfg.flat(cfg.override(baseline, point, where=where, check=False))
    full: Values = {}
    for dimension in dimensions:
        name = dimension.name
        if not dimension.active(full):
            applies = f"applies only when {dimension.condition}"
            refuse(name in point, f"{where}: {name}: {point.get(name)!r} {applies}")
            continue
        # Format only on error: there may be thousands of points and choices
        if not dimension.contains(value := values.get(name)):
            whose, hint = "", ""
            if name not in point:
                whose = ", the baseline's value,"
                hint = " (add it to the space, or give another under baseline:)"
            outside = f"{value!r}{whose} lies outside the space; allowed: {dimension}{hint}"
            raise ConfigError(f"{where}: {name}: {outside}")
        full[name] = value
    for name in point:
        why = f"{where}: {name}: {point[name]!r} is not searched; put it under fixed:"
        refuse(name not in full, why)
    return full


def combinations(dimensions: Sequence[Dimension]) -> list[Values]:
    """Return every point of a grid, last knob fastest, without knobs that do not apply."""
    points: list[Values] = [{}]
    for dimension in dimensions:
        drawn: list[Values] = [{dimension.name: choice} for choice in dimension.choices or ()]
        points = [
            point | choice
            for point in points
            for choice in (drawn if dimension.active(point) else [{}])
        ]
    return points


def count(dimensions: Sequence[Dimension]) -> float:
    """Return how many points there are; infinite with a real-valued range."""

    @functools.cache
    def points(i: int, met: frozenset[Any]) -> float:
        """Count the points of dimensions i, i + 1, …, of whose conditions those in `met` hold."""
        if i == len(dimensions):
            return 1
        head, later = dimensions[i], dimensions[i + 1 :]
        conditions = {condition for dimension in later for condition in dimension.conditions}
        if not met.issuperset(head.conditions):
            return points(i + 1, met & conditions)
        # Values that meet the same conditions count alike, as does a range without conditions
        matching = [condition for condition in conditions if condition[0] == head.name]
        named = {value for _, allowed in matching for value in allowed}
        values = named if head.choices is None else {as_param(choice) for choice in head.choices}
        counts: dict[frozenset[Any], float] = {frozenset(): head.size - len(values)}
        for value in values:
            new = frozenset(condition for condition in matching if value in condition[1])
            counts[new] = counts.get(new, 0) + 1
        return sum(
            times * points(i + 1, met & conditions | new) for new, times in counts.items() if times
        )

    return points(0, frozenset())
