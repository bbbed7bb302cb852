"""The knobs of `search:` and `grid:`: what each may be, and when it applies."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Knob, Schema
from tunediff.space.model import Dimension
from tunediff.space.sections import Spec, checked

When = dict[str, tuple[Any, ...]]


def read(content: Mapping[str, Any], baseline: Any, where: str, ranges: bool) -> tuple[Dimension, ...]:
    """The dimensions in the order of the file; `ranges`: whether there may be any. Raises `ConfigError`."""
    if not content:
        raise ConfigError(f"{where}: names no knob; e.g. loader.batch_size: [64, 128, 256]")
    section = _Section(content, baseline, where, ranges)
    for name, spec in content.items():
        section.found[name] = section.dimension(name, spec)
    return tuple(section.found.values())


def not_searchable(name: str) -> str:
    """Why a knob is the same in every trial, after "it" or a colon."""
    hint = "; to run every point with several seeds, write seeds: 3" if name == "seed" else ""
    return f"must be the same in every trial; put it under fixed:{hint}"


def having(schema: Schema, knob: Knob) -> tuple[str, tuple[str, ...]] | None:
    """(union, its members that have this knob), or None for a knob that always exists."""
    if knob.member is None:
        return None
    union = knob.member[0]
    return union, tuple(member for member, names in schema.members[union].items() if knob.name in names)


class _Section:
    """A section while it is read."""

    def __init__(self, content: Mapping[str, Any], baseline: Any, where: str, ranges: bool) -> None:
        self.content, self.baseline, self.where, self.ranges = content, baseline, where, ranges
        self.schema: Schema = baseline.schema
        self.found: dict[str, Dimension] = {}

    def dimension(self, name: str, spec: Any) -> Dimension:
        """What one line says."""
        where = f"{self.where}: {name}"
        if name not in self.schema.knobs:
            raise ConfigError(self.schema.unknown_knob(name, self.where))
        knob = self.schema.knobs[name]
        if not knob.searchable:
            raise ConfigError(f"{where}: cannot be searched: it {not_searchable(name)}")
        if isinstance(spec, list):
            spec = {"choice": spec}
        if not isinstance(spec, dict):
            raise ConfigError(f"{where}: {spec!r} is not a space; allowed: a list of choices, or {{low: …, high: …}}")
        given = checked(Spec, spec, where)
        when = self.when(knob, given.when, where)
        if given.choice is not None:
            if extra := [key for key in ("low", "high", "step", "log") if key in spec]:
                raise ConfigError(f"{where}: {extra[0]}: belongs to a range, not to a choice")
            return self.choice(knob, given.choice, when, where)
        if not self.ranges:
            raise ConfigError(f"{where}: a grid needs a list of choices, not a range")
        if knob.kind not in ("int", "float"):
            raise ConfigError(f"{where}: a range needs a number; {name} is {knob.allowed}: list the choices")
        for key in ("low", "high"):
            if key not in spec:
                raise ConfigError(f"{where}: {key}: is missing; a range is {{low: …, high: …}} with optional step or log")
        if knob.kind == "int" and isinstance(spec.get("step"), float):
            raise ConfigError(f"{where}: step: {given.step} is not allowed; allowed: a whole number above 0")
        return self.range(knob, given, when, where)

    def choice(self, knob: Knob, given: list[Any], when: When, where: str) -> Dimension:
        """One of several values."""
        if not given:
            raise ConfigError(f"{where}: [] is not a list of choices; allowed: {knob.allowed}")
        choices = tuple(self.value(knob, choice, when, where) for choice in given)
        if any(a == b and type(a) is type(b) for a, b in itertools.combinations(choices, 2)):
            raise ConfigError(f"{where}: {given!r} names a choice twice")
        return Dimension(knob.name, choices=choices, when=tuple(when.items()))

    def range(self, knob: Knob, given: Spec, when: When, where: str) -> Dimension:
        """A number between two bounds."""
        low, high = (self.value(knob, getattr(given, end), when, f"{where}: {end}") for end in ("low", "high"))
        whole, step = knob.kind == "int", given.step
        if not low < high:
            raise ConfigError(f"{where}: low {low} is not below high {high}")
        if step is not None:
            step = int(step) if whole else step
            if given.log:
                raise ConfigError(f"{where}: step and log exclude each other")
            if abs((steps := (high - low) / step) - round(steps)) > 1e-9:
                raise ConfigError(f"{where}: step: {step} does not lead from {low} to {high}")
        if given.log and not low > 0:
            raise ConfigError(f"{where}: log: needs a low above 0, not {low}")
        return Dimension(knob.name, None, low, high, step, given.log, whole, tuple(when.items()))

    def value(self, knob: Knob, value: Any, when: When, where: str) -> Any:
        """The value as a configuration stores it, which also checks its type and range."""
        chosen = {name: allowed[0] for name, allowed in when.items()}
        config = cfg.override(self.baseline, {**chosen, knob.name: value}, where=where, check=False)
        return cfg.flat(config)[knob.name]

    def when(self, knob: Knob, given: Mapping[str, Any], where: str) -> When:
        """Its conditions: those that are given, and that its union is a member that has it."""
        conditions: When = {}
        for name, allowed in given.items():
            if name not in self.found:
                raise ConfigError(f"{where}: when: {name}: must be a knob searched further up in the file")
            conditions[name] = tuple(allowed) if isinstance(allowed, list) else (allowed,)
            if not conditions[name]:
                raise ConfigError(f"{where}: when: {name}: [] is not allowed; allowed: {self.found[name]}")
            for value in conditions[name]:
                if not self.found[name].contains(value):
                    raise ConfigError(f"{where}: when: {name}: {value!r} is never drawn; allowed: {self.found[name]}")
        if (owned := having(self.schema, knob)) is None:
            return conditions
        union, owners = owned
        if union in conditions:
            if wrong := [value for value in conditions[union] if value not in owners]:
                names = ", ".join(owners)
                raise ConfigError(f"{where}: when: {union}: {wrong[0]!r} has no such knob; allowed: {names}")
            return conditions
        of_members = f"{where}: belongs to {union} = {' or '.join(owners)}"
        if union in self.found:
            if not (drawn := tuple(owner for owner in owners if self.found[union].contains(owner))):
                raise ConfigError(f"{of_members}, which is never drawn; allowed: {self.found[union]}")
            return {**conditions, union: drawn}
        if union in self.content:
            raise ConfigError(f"{of_members}; {union} must stand above it in the file")
        if (fixed := cfg.flat(self.baseline)[union]) not in owners:
            raise ConfigError(f"{of_members}, but {union} is {fixed} here")
        return conditions
