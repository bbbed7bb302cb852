"""Searched knobs, and what is tried first or altogether: listed points, every combination, the rungs of a ladder."""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Knob, Lines, Schema, Values
from tunediff.config.knobs import refuse
from tunediff.search_space.model import Dimension, Rung, SearchSpace, as_param, combinations, count
from tunediff.search_space.sections import File, Spec, checked

MOST_POINTS, MOST_CHOICES = 10_000, 1000
"""Beyond these reading a file takes minutes, and running it a lifetime."""
When = dict[str, tuple[Any, ...]]


def planned(space: SearchSpace, file: File, seeds: Sequence[int]) -> SearchSpace:
    """The space with its dimensions and candidates, the baseline first, all with every seed. Raises `ConfigError`."""
    kind, where = space.kind, f"{space.source}: {space.kind}"
    for key in ("trials", "first", "ladder"):
        _refuse_many(f"{space.source}: {key}", len(getattr(file, key) or ()), "entries", len(seeds))
    listed = where if kind == "trials" else f"{space.source}: first"
    points = _points({f"{listed}[{i}]": point for i, point in enumerate(file.trials or file.first or ())}, space.schema)
    ladder = _points({f"{where}: {name}": point for name, point in (file.ladder or {}).items()}, space.schema)
    together = dict(zip(ladder, itertools.accumulate(ladder.values(), operator.or_), strict=True))
    if kind in ("search", "grid"):
        dimensions = _Searched(getattr(file, kind), space.baseline, where, kind == "search").read()
    else:
        dimensions = _of_points(points or together, space.baseline)
    space = dataclasses.replace(space, dimensions=dimensions)

    found = [space.expand(point, at) for at, point in {f"{where} (baseline)": {}, **points}.items()]
    rungs, skipped = _rungs(file, ladder, together, space)
    found += [rung.together for rung in rungs] + [rung.alone for rung in rungs if rung.alone is not None]
    if kind == "grid":
        _refuse_many(where, count(dimensions), "combinations", len(seeds))  # before one of them is made
        found += combinations(dimensions)
    candidates = []
    for point in {json.dumps(point, sort_keys=True): point for point in found}.values():
        try:
            cfg.override(space.baseline, point, where=where if kind != "search" else listed)
            candidates.append(point)
        except ConfigError as error:  # a hand-written point must run; a grid may hold impossible corners
            if kind != "grid" or not candidates:
                raise
            skipped.append(str(error))
    if kind == "grid" and not space.evaluates:
        candidates[1:] = sorted(candidates[1:], key=lambda point: _group(point, space.baseline))
    if len(seeds) > 1:  # seed after seed: what drifts on a shared machine then hits all points alike
        dimensions = (Dimension("seed", choices=tuple(seeds)), *dimensions)
        candidates = [{"seed": seed, **point} for seed in seeds for point in candidates]
    return dataclasses.replace(
        space,
        dimensions=dimensions,
        candidates=tuple(candidates),
        seeds=len(seeds),
        rungs=rungs,
        skipped=tuple(skipped),
    )


def _refuse_many(where: str, points: float, what: str, seeds: int) -> None:
    times = f" × {seeds} seeds" if seeds > 1 else ""
    allowed = f"at most {MOST_POINTS:,} points in all; search: draws from as many as one likes"
    refuse(points * seeds > MOST_POINTS, f"{where}: has {points:,} {what}{times}; allowed: {allowed}")


def _points(entries: Mapping[str, Lines], schema: Schema) -> dict[str, Values]:
    """Points by dotted names; the keys say where each stands in the file."""
    points = {where: cfg.flatten(entry) for where, entry in entries.items()}
    for where, point in points.items():
        for name in point:
            schema.knob(name, where)
    return points


def _of_points(points: Mapping[str, Values], baseline: Any) -> tuple[Dimension, ...]:
    """The smallest space that holds some points: for every knob they name, the values they name."""
    schema, configs = baseline.schema, [cfg.flat(baseline)]
    for where, point in points.items():
        for name in point:
            refuse(not schema.knobs[name].searchable, f"{where}: {name}: {_same_everywhere(name)}")
        configs.append(cfg.flat(cfg.override(baseline, point, where=where)))
    named = dict.fromkeys(name for point in points.values() for name in point)
    dimensions = []
    for name in sorted(named, key=lambda name: name not in schema.members):  # unions before their members' knobs
        # A point that does not name it has the baseline's value, or the default of its own union member.
        choices = tuple({as_param(config[name]): config[name] for config in configs if name in config}.values())
        union, owners = _owners(schema, schema.knobs[name])
        dimensions.append(Dimension(name, choices, when=((union, owners),) if union in named else ()))
    return tuple(dimensions)


def _rungs(
    file: File, ladder: Mapping[str, Values], together: Mapping[str, Values], space: SearchSpace
) -> tuple[tuple[Rung, ...], list[str]]:
    """The rungs of a ladder, and why some of them cannot stand alone."""
    rungs: list[Rung] = []
    skipped: list[str] = []
    for name, (where, knobs) in zip(file.ladder or (), ladder.items(), strict=True):
        refuse(not knobs, f"{where}: changes no knob; e.g. {name}: {{precision.amp: bf16}}")
        alone: Values | None = None
        try:
            cfg.override(space.baseline, knobs, where=f"{where} alone")
            alone = space.expand(knobs, where)
        except ConfigError as error:
            skipped.append(str(error))
        rungs.append(Rung(name, knobs, space.expand(together[where], where), alone))
    return tuple(rungs), skipped


def _group(point: Values, baseline: Any) -> tuple[bool, int, bool]:
    """Sorted by it, probes need the fewest new worker groups: the baseline's first, uncompiled before compiled."""
    workers = point.get("parallel.workers", baseline.parallel.workers)
    return workers != baseline.parallel.workers, workers, point.get("compile.mode", baseline.compile.mode) != "none"


# ------------------------------------------------------------------------------------------------------ searched knobs
def _same_everywhere(name: str) -> str:
    hint = "; to run every point with several seeds, write seeds: 3" if name == "seed" else ""
    ruler = ", the ruler that all are measured with" if name.startswith("evaluation.") else ""
    return f"must be the same in every trial{ruler}; put it under fixed:{hint}"


def spread(content: Lines, prefix: str = "") -> Lines:
    """`loader: {batch_size: [64, 128]}` as `loader.batch_size: [64, 128]`, the way in which a knob is named."""
    found: Lines = {}
    for name, spec in content.items():
        inner = isinstance(spec, dict) and spec and not spec.keys() & vars(Spec())
        found |= spread(spec, f"{prefix}{name}.") if inner else {f"{prefix}{name}": spec}
    return found


def _owners(schema: Schema, knob: Knob) -> tuple[str, tuple[str, ...]]:
    """The union that a knob belongs to and its members that have it; ('', ()) for a knob that always exists."""
    union = knob.member[0] if knob.member is not None else ""
    return union, tuple(member for member, names in schema.members.get(union, {}).items() if knob.name in names)


@dataclasses.dataclass
class _Searched:
    """`search:` or `grid:` while it is read."""

    content: Lines
    baseline: Any
    where: str
    ranges: bool
    found: dict[str, Dimension] = dataclasses.field(default_factory=dict)

    def read(self) -> tuple[Dimension, ...]:
        for name, spec in self.content.items():
            for asked in self.of_this_member(spec, f"{self.where}: {name}: when"):
                self.found[name] = self.dimension(name, asked, f"{self.where}: {name}")
        return tuple(self.found.values())

    def of_this_member(self, spec: Any, where: str) -> list[Any]:
        """[spec], without the conditions on a union whose member is fixed, which hold; [] where one does not."""
        schema, chosen = self.baseline.schema, cfg.flat(self.baseline)
        given = spec.get("when") if isinstance(spec, dict) else None
        conditions: Lines = given if isinstance(given, dict) else {}
        fixed = [name for name in conditions if name in schema.members and name not in self.content]
        for union in fixed:
            members = conditions[union] if isinstance(conditions[union], list) else [conditions[union]]
            for member in members:
                cfg.override(self.baseline, {union: member}, where=where, check=False)
            if chosen[union] not in members:
                return []
        left = {name: allowed for name, allowed in conditions.items() if name not in fixed}
        return [{**spec, "when": left} if fixed else spec]

    def dimension(self, name: str, spec: Any, where: str) -> Dimension:
        knob: Knob = self.baseline.schema.knob(name, self.where)
        refuse(not knob.searchable, f"{where}: cannot be searched: it {_same_everywhere(name)}")
        spec = knob.space if spec is None and knob.space is not None else spec  # `lr:` is searched where it says itself
        if isinstance(spec, list):
            spec = {"choice": spec}
        space = "a list of choices, or {low: …, high: …}"
        refuse(not isinstance(spec, dict), f"{where}: {spec!r} is not a space; allowed: {space}")
        given = checked(Spec, spec, where)
        when = self.when(knob, given.when, where)
        if given.choice is not None:
            for key in ("low", "high", "step", "log"):
                refuse(key in spec, f"{where}: {key}: belongs to a range, not to a choice")
            refuse(not given.choice, f"{where}: [] is not a list of choices; allowed: {knob.allowed}")
            many = f"{len(given.choice):,} choices; allowed: at most {MOST_CHOICES:,}, or a range {{low: …, high: …}}"
            refuse(len(given.choice) > MOST_CHOICES, f"{where}: has {many}")
            choices = tuple(self.value(knob, choice, when, where) for choice in given.choice)
            twice = any(a == b for a, b in itertools.combinations(choices, 2))
            refuse(twice, f"{where}: {given.choice!r} names a choice twice")
            return Dimension(name, choices, when=tuple(when.items()))
        refuse(not self.ranges, f"{where}: a grid needs a list of choices, not a range")
        number = knob.kind in ("int", "float")
        refuse(not number, f"{where}: a range needs a number; {name} is {knob.allowed}: list the choices")
        for key in ("low", "high"):
            missing = "is missing; a range is {low: …, high: …} with optional step or log"
            refuse(key not in spec, f"{where}: {key}: {missing}")
        return self.range(knob, spec, given, when, where)

    def range(self, knob: Knob, spec: Lines, given: Spec, when: When, where: str) -> Dimension:
        low, high = (self.value(knob, spec[end], when, f"{where}: {end}") for end in ("low", "high"))
        whole, step = knob.kind == "int", spec.get("step")
        refuse(not low < high, f"{where}: low {low} is not below high {high}")
        if step is not None:
            slip = whole and not isinstance(step, int)
            refuse(slip, f"{where}: step: {step!r} is not allowed; allowed: a whole number above 0")
            refuse(given.log, f"{where}: step and log exclude each other")
            away = abs((steps := (high - low) / step) - round(steps)) > 1e-9
            refuse(away, f"{where}: step: {step} does not lead from {low} to {high}")
        refuse(given.log and not low > 0, f"{where}: log: needs a low above 0, not {low}")
        return Dimension(knob.name, None, low, high, step, given.log, whole, tuple(when.items()))

    def value(self, knob: Knob, value: Any, when: When, where: str) -> Any:
        """The value as a configuration stores it, which also checks its type and range."""
        chosen = {name: allowed[0] for name, allowed in when.items()}
        config = cfg.override(self.baseline, {**chosen, knob.name: value}, where=where, check=False)
        return cfg.flat(config)[knob.name]

    def when(self, knob: Knob, given: Lines, where: str) -> When:
        """Its conditions: those that are given, and that its union is one of the members that have it."""
        when = {name: tuple(allowed) if isinstance(allowed, list) else (allowed,) for name, allowed in given.items()}
        for name, allowed in when.items():
            refuse(name not in self.found, f"{where}: when: {name}: must be a knob searched further up in the file")
            drawn = self.found[name]
            refuse(not allowed, f"{where}: when: {name}: [] is not allowed; allowed: {drawn}")
            for value in allowed:
                refuse(not drawn.contains(value), f"{where}: when: {name}: {value!r} is never drawn; allowed: {drawn}")
        union, owners = _owners(self.baseline.schema, knob)
        belongs = f"{where}: belongs to {union} = {' or '.join(owners)}"
        if union in when:
            for value in when[union]:
                why = f"{value!r} has no such knob; allowed: {', '.join(owners)}"
                refuse(value not in owners, f"{where}: when: {union}: {why}")
        elif union in self.found:
            when[union] = tuple(owner for owner in owners if self.found[union].contains(owner))
            refuse(not when[union], f"{belongs}, which is never drawn; allowed: {self.found[union]}")
        elif union:
            refuse(union in self.content, f"{belongs}; {union} must stand above it in the file")
            chosen = cfg.flat(self.baseline)[union]
            refuse(chosen not in owners, f"{belongs}, but {union} is {chosen} here")
        return when
