"""One searched knob, read from its line of a search file, and what follows from several: draws,
points, combinations, their number."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Knob, Lines, Schema, Values
from tunediff.config.knobs import refuse, validated
from tunediff.search_space.sections import DimensionSection

MOST_CHOICES = 1000
"""Limit: beyond it, reading a file takes minutes."""
When = dict[str, tuple[Any, ...]]


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

    def suggest(self, trial: Any) -> Any:
        """Draw a value with an Optuna trial."""
        if self.choices is not None:
            labels = {as_param(choice): choice for choice in self.choices}
            return labels[trial.suggest_categorical(self.name, list(labels))]
        if not self.integer:
            ends = self.low, self.high
            value = trial.suggest_float(self.name, *ends, step=self.step, log=self.log)
            # 0.3, as a file lists it: Optuna's sum is 0.30000000000000004.
            return value if self.step is None else float(f"{value:.12g}")
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
            return f"[{', '.join(map(str, self.choices))}]{when}"
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


def combinations(dimensions: Sequence[Dimension], point: Values) -> Iterator[Values]:
    """Yield every point of a grid, last knob fastest, without knobs that do not apply.

    `point`: the values of the knobs before.
    """
    if not dimensions:
        yield point
        return
    first, *others = dimensions
    drawn: list[Values] = [{first.name: choice} for choice in first.choices or ()]
    for choice in drawn if first.active(point) else [{}]:
        yield from combinations(others, point | choice)


# ---- reading
def same_everywhere(name: str) -> str:
    """Return why a knob cannot be searched, and what to do instead."""
    protocol = ", as part of the evaluation protocol" if name.startswith("evaluation.") else ""
    return f"must be the same in every trial{protocol}; put it under fixed:"


def spread(content: Lines, where: str) -> Lines:
    """Return knobs by dotted name: `loader: {batch_size: [64, 128]}` → `loader.batch_size: [64,
    128]`.

    Raises `ConfigError` for a knob that is given twice.
    """
    of_a_dimension = vars(DimensionSection()).keys()

    def is_section(spec: object) -> bool:
        return isinstance(spec, dict) and bool(spec) and not spec.keys() & of_a_dimension

    return cfg.flatten(content, where, is_section=is_section)


def owners_of(schema: Schema, knob: Knob) -> tuple[str, tuple[str, ...]]:
    """Return the union a knob belongs to and its members that have it; ('', ()) without one."""
    union = knob.member[0] if knob.member is not None else ""
    return union, tuple(
        member for member, names in schema.members.get(union, {}).items() if knob.name in names
    )


def listed(value: Any) -> list[Any]:
    """Return the values that a condition allows: a list, or one value."""
    return value if isinstance(value, list) else [value]


class SearchedKnobs:
    """Reads the knobs of `search:` or `grid:` in their order."""

    def __init__(self, content: Lines, baseline: Any, where: str, ranges: bool) -> None:
        """`content`: their lines, by dotted names; `ranges`: whether ranges are allowed."""
        self._content, self._baseline, self._where, self._ranges = content, baseline, where, ranges
        self._schema: Schema = baseline.schema
        self._chosen = cfg.flat(baseline)
        self.dimensions: dict[str, Dimension] = {}
        """Those that have been read, by name."""
        self.idle: set[str] = set()
        """Knobs whose condition never holds: that on a knob which is not searched does not."""
        for name, spec in content.items():
            where = f"{self._where}: {name}"
            knob = self._schema.knob(name, self._where)
            refuse(not knob.searchable, f"{where}: cannot be searched: it {same_everywhere(name)}")
            # `lr:` without a value is searched in the space that the knob declares
            spec = knob.space if spec is None and knob.space is not None else spec
            spec = {"choice": spec} if isinstance(spec, list) else spec
            space = "a list of choices, or {low: …, high: …}"
            refuse(
                not isinstance(spec, dict), f"{where}: {spec!r} is not a space; allowed: {space}"
            )
            fields = validated(DimensionSection, spec, where)
            if (when := self._when(knob, fields.when, where)) is None:
                self.idle.add(name)
                continue
            make = self._range if fields.choice is None else self._choice
            self.dimensions[name] = make(knob, spec, fields, when, where)

    def _choice(
        self, knob: Knob, spec: Lines, fields: DimensionSection, when: When, where: str
    ) -> Dimension:
        """Return the dimension of a list of choices. Raises `ConfigError`."""
        given = fields.choice or []
        for key in ("low", "high", "step", "log"):
            refuse(key in spec, f"{where}: {key}: belongs to a range, not to a choice")
        refuse(not given, f"{where}: [] is not a list of choices; allowed: {knob.allowed}")
        most = f"allowed: at most {MOST_CHOICES:,}, or a range {{low: …, high: …}}"
        refuse(len(given) > MOST_CHOICES, f"{where}: has {len(given):,} choices; {most}")
        choices = tuple(self._value(knob, choice, when, where) for choice in given)
        return Dimension(knob.name, choices, when=tuple(when.items()))

    def _range(
        self, knob: Knob, spec: Lines, fields: DimensionSection, when: When, where: str
    ) -> Dimension:
        """Return the dimension of a range of numbers. Raises `ConfigError`."""
        refuse(not self._ranges, f"{where}: a grid needs a list of choices, not a range")
        number = f"a range needs a number; {knob.name} is {knob.allowed}: list the choices"
        refuse(knob.kind not in ("int", "float"), f"{where}: {number}")
        ends = []
        for key in ("low", "high"):
            missing = "is missing; a range is {low: …, high: …} with optional step or log"
            refuse(key not in spec, f"{where}: {key}: {missing}")
            ends.append(self._value(knob, spec[key], when, f"{where}: {key}"))
        (low, high), integer, step = ends, knob.kind == "int", spec.get("step")
        refuse(not low < high, f"{where}: low {low} is not below high {high}")
        if step is not None:
            slip = integer and not isinstance(step, int)
            refuse(slip, f"{where}: step: {step!r} is not allowed; allowed: a whole number above 0")
            refuse(fields.log, f"{where}: step and log exclude each other")
            away = abs((steps := (high - low) / step) - round(steps)) > 1e-9
            refuse(away, f"{where}: step: {step} does not lead from {low} to {high}")
        refuse(fields.log and not low > 0, f"{where}: log: needs a low above 0, not {low}")
        return Dimension(knob.name, None, low, high, step, fields.log, integer, tuple(when.items()))

    def _value(self, knob: Knob, value: Any, when: When, where: str) -> Any:
        """Return a value as a configuration stores it; also checks its type and range."""
        chosen = {name: allowed[0] for name, allowed in when.items()}
        values = {**chosen, knob.name: value}
        return cfg.flat(cfg.override(self._baseline, values, where=where, check=False))[knob.name]

    def _when(self, knob: Knob, conditions: Lines, where: str) -> When | None:
        """Return a knob's conditions on searched knobs: those in the file, and that its union has a
        member with this knob; None: one on another knob does not hold. Raises `ConfigError`."""
        when: When = {}
        for name, named in conditions.items():
            at, allowed = f"{where}: when: {name}", tuple(listed(named))
            if name in self.dimensions:
                drawn = self.dimensions[name]
                refuse(not allowed, f"{at}: [] is not allowed; allowed: {drawn}")
                for value in allowed:
                    never = f"{value!r} is never drawn; allowed: {drawn}"
                    refuse(not drawn.contains(value), f"{at}: {never}")
                when[name] = allowed
                continue
            further_up = name in self._content and name not in self.idle
            refuse(further_up, f"{at}: must be a knob searched further up in the file")
            other = self._schema.knob(name, at)
            for value in allowed if other.member is None else ():
                self._value(other, value, {}, f"{where}: when")
            if name in self.idle or self._chosen.get(name) not in allowed:
                return None
        # The condition of a union's knob
        union, owners = owners_of(self._schema, knob)
        belongs = f"{where}: belongs to {union} = {' or '.join(owners)}"
        if union in when:
            for value in when[union]:
                why = f"{value!r} has no such knob; allowed: {', '.join(owners)}"
                refuse(value not in owners, f"{where}: when: {union}: {why}")
        elif union in self.dimensions:
            drawn = self.dimensions[union]
            when[union] = tuple(owner for owner in owners if drawn.contains(owner))
            refuse(not when[union], f"{belongs}, which is never drawn; allowed: {drawn}")
        elif union:
            refuse(union in self._content, f"{belongs}; {union} must stand above it in the file")
            chosen = self._chosen[union]
            refuse(chosen not in owners, f"{belongs}, but {union} is {chosen} here")
        return when
