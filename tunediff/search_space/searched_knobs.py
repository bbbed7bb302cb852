"""Read the knobs that a file searches: of each, the dimension that its line describes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from tunediff import config as cfg
from tunediff.config import Knob, Lines, Schema
from tunediff.config.knobs import refuse
from tunediff.search_space.dimension import Dimension
from tunediff.search_space.sections import DimensionSection, checked

MOST_CHOICES = 1000
"""Limit: beyond it, reading a file takes minutes."""
When = dict[str, tuple[Any, ...]]


def same_everywhere(name: str) -> str:
    """Return why a knob cannot be searched, and what to do instead."""
    hint = "; to run every point with several seeds, write seeds: 3" if name == "seed" else ""
    protocol = ", as part of the evaluation protocol" if name.startswith("evaluation.") else ""
    return f"must be the same in every trial{protocol}; put it under fixed:{hint}"


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


@dataclasses.dataclass
class SearchedKnobs:
    """Reads the knobs of `search:` or `grid:` in their order."""

    content: Lines
    baseline: Any
    where: str
    ranges: bool
    dimensions: dict[str, Dimension] = dataclasses.field(default_factory=dict)
    """Those read so far, by name."""

    def read(self) -> tuple[Dimension, ...]:
        for name, spec in self.content.items():
            for applicable in self.of_this_member(spec, f"{self.where}: {name}: when"):
                self.dimensions[name] = self.dimension(name, applicable, f"{self.where}: {name}")
        return tuple(self.dimensions.values())

    def of_this_member(self, spec: Any, where: str) -> list[Any]:
        """Return [spec] without conditions on fixed unions; [] if such a condition does not
        hold."""
        schema, chosen = self.baseline.schema, cfg.flat(self.baseline)
        when = spec.get("when") if isinstance(spec, dict) else None
        conditions: Lines = when if isinstance(when, dict) else {}
        fixed = [name for name in conditions if name in schema.members and name not in self.content]
        for union in fixed:
            named = conditions[union]
            members = named if isinstance(named, list) else [named]
            for member in members:
                cfg.override(self.baseline, {union: member}, where=where, check=False)
            if chosen[union] not in members:
                return []
        left = {name: allowed for name, allowed in conditions.items() if name not in fixed}
        return [{**spec, "when": left} if fixed else spec]

    def dimension(self, name: str, spec: Any, where: str) -> Dimension:
        """Return the dimension that `spec` describes. Raises `ConfigError`."""
        knob: Knob = self.baseline.schema.knob(name, self.where)
        refuse(not knob.searchable, f"{where}: cannot be searched: it {same_everywhere(name)}")
        # `lr:` without a value is searched in the space that the knob declares
        spec = knob.space if spec is None and knob.space is not None else spec
        if isinstance(spec, list):
            spec = {"choice": spec}
        space = "a list of choices, or {low: …, high: …}"
        refuse(not isinstance(spec, dict), f"{where}: {spec!r} is not a space; allowed: {space}")
        fields = checked(DimensionSection, spec, where)
        when = self.when(knob, fields.when, where)
        # Choices
        if fields.choice is not None:
            for key in ("low", "high", "step", "log"):
                refuse(key in spec, f"{where}: {key}: belongs to a range, not to a choice")
            count, least = len(fields.choice), f"allowed: {knob.allowed}"
            refuse(count == 0, f"{where}: [] is not a list of choices; {least}")
            most = f"allowed: at most {MOST_CHOICES:,}, or a range {{low: …, high: …}}"
            refuse(count > MOST_CHOICES, f"{where}: has {count:,} choices; {most}")
            choices = tuple(self.value(knob, choice, when, where) for choice in fields.choice)
            twice = any(a == b for a, b in itertools.combinations(choices, 2))
            refuse(twice, f"{where}: {fields.choice!r} names a choice twice")
            return Dimension(name, choices, when=tuple(when.items()))
        # A range
        refuse(not self.ranges, f"{where}: a grid needs a list of choices, not a range")
        number = f"a range needs a number; {name} is {knob.allowed}: list the choices"
        refuse(knob.kind not in ("int", "float"), f"{where}: {number}")
        for key in ("low", "high"):
            missing = "is missing; a range is {low: …, high: …} with optional step or log"
            refuse(key not in spec, f"{where}: {key}: {missing}")
        return self.range(knob, spec, fields, when, where)

    def range(
        self, knob: Knob, spec: Lines, fields: DimensionSection, when: When, where: str
    ) -> Dimension:
        """Return the dimension of a range. `fields`: `spec` after checks. Raises `ConfigError`."""
        low, high = (
            self.value(knob, spec[end], when, f"{where}: {end}") for end in ("low", "high")
        )
        integer, step = knob.kind == "int", spec.get("step")
        refuse(not low < high, f"{where}: low {low} is not below high {high}")
        if step is not None:
            slip = integer and not isinstance(step, int)
            refuse(slip, f"{where}: step: {step!r} is not allowed; allowed: a whole number above 0")
            refuse(fields.log, f"{where}: step and log exclude each other")
            away = abs((steps := (high - low) / step) - round(steps)) > 1e-9
            refuse(away, f"{where}: step: {step} does not lead from {low} to {high}")
        refuse(fields.log and not low > 0, f"{where}: log: needs a low above 0, not {low}")
        return Dimension(knob.name, None, low, high, step, fields.log, integer, tuple(when.items()))

    def value(self, knob: Knob, value: Any, when: When, where: str) -> Any:
        """Return a value as a configuration stores it; also checks its type and range."""
        chosen = {name: allowed[0] for name, allowed in when.items()}
        config = cfg.override(self.baseline, {**chosen, knob.name: value}, where=where, check=False)
        return cfg.flat(config)[knob.name]

    def when(self, knob: Knob, conditions: Lines, where: str) -> When:
        """Return a knob's conditions: those in the file, and that its union has a member with this
        knob.

        Raises `ConfigError`.
        """
        when = {
            name: tuple(allowed) if isinstance(allowed, list) else (allowed,)
            for name, allowed in conditions.items()
        }
        for name, allowed in when.items():
            at, above = f"{where}: when: {name}", "must be a knob searched further up in the file"
            refuse(name not in self.dimensions, f"{at}: {above}")
            drawn = self.dimensions[name]
            refuse(not allowed, f"{at}: [] is not allowed; allowed: {drawn}")
            for value in allowed:
                never = f"{value!r} is never drawn; allowed: {drawn}"
                refuse(not drawn.contains(value), f"{at}: {never}")
        # The condition of a union's knob
        union, owners = owners_of(self.baseline.schema, knob)
        belongs = f"{where}: belongs to {union} = {' or '.join(owners)}"
        if union in when:
            for value in when[union]:
                why = f"{value!r} has no such knob; allowed: {', '.join(owners)}"
                refuse(value not in owners, f"{where}: when: {union}: {why}")
        elif union in self.dimensions:
            when[union] = tuple(owner for owner in owners if self.dimensions[union].contains(owner))
            never = f"which is never drawn; allowed: {self.dimensions[union]}"
            refuse(not when[union], f"{belongs}, {never}")
        elif union:
            refuse(union in self.content, f"{belongs}; {union} must stand above it in the file")
            chosen = cfg.flat(self.baseline)[union]
            refuse(chosen not in owners, f"{belongs}, but {union} is {chosen} here")
        return when
