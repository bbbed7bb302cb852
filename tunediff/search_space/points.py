"""Read the searched knobs, and list what is tried first or at all: points, combinations, rungs."""

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
from tunediff.search_space.model import (
    Dimension,
    Rung,
    as_param,
    combinations,
    complete,
    count,
)
from tunediff.search_space.sections import DimensionSection, SearchFile, checked

MOST_POINTS, MOST_CHOICES = 10_000, 1000
"""Limits: beyond them, reading a file takes minutes and running it a lifetime."""
When = dict[str, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class ListedRuns:
    """What a search file searches, and what it lists to run."""

    dimensions: tuple[Dimension, ...]
    candidates: list[Values]
    """Drawn values, the baseline's first, all with every seed."""
    rungs: tuple[Rung, ...]
    skipped: list[str]
    """Why some combinations or single rungs do not run."""


def listed_runs(
    file: SearchFile, kind: str, source: str, baseline: Any, seeds: Sequence[int], evaluates: bool
) -> ListedRuns:
    """Return dimensions and candidates of a search file. Raises `ConfigError`."""
    # Points and rungs as the file lists them
    where = f"{source}: {kind}"
    for key in ("trials", "first", "ladder"):
        _refuse_many(f"{source}: {key}", len(getattr(file, key) or ()), "entries", len(seeds))
    place = where if kind == "trials" else f"{source}: first"
    entries = enumerate(file.trials or file.first or ())
    points = _points({f"{place}[{i}]": entry for i, entry in entries}, baseline.schema)
    ladder = {f"{where}: {name}": entry for name, entry in (file.ladder or {}).items()}
    rung_knobs = _points(ladder, baseline.schema)
    steps = itertools.accumulate(rung_knobs.values(), operator.or_)
    together = dict(zip(rung_knobs, steps, strict=True))
    # Dimensions
    if kind in ("search", "grid"):
        dimensions = _Searched(getattr(file, kind), baseline, where, kind == "search").read()
    else:
        dimensions = _of_points(points or together, baseline)

    # Candidates: the baseline, then points, rungs or combinations
    listed = {f"{where} (baseline)": {}, **points}
    values = [complete(dimensions, baseline, point, at) for at, point in listed.items()]
    rungs, skipped = _rungs(file, rung_knobs, together, dimensions, baseline)
    values += [rung.together for rung in rungs]
    values += [rung.alone for rung in rungs if rung.alone is not None]
    if kind == "grid":
        _refuse_many(where, count(dimensions), "combinations", len(seeds))  # before any is made
        values += combinations(dimensions)
    candidates = list[Values]()
    for point in {json.dumps(point, sort_keys=True): point for point in values}.values():
        try:
            cfg.override(baseline, point, where=place if kind == "search" else where)
            candidates.append(point)
        except ConfigError as error:
            if kind != "grid" or not candidates:
                raise
            skipped.append(str(error))
    if kind == "grid" and not evaluates:
        candidates[1:] = sorted(candidates[1:], key=lambda point: _group(point, baseline))
    # Seed after seed: a drift of a shared machine's speed then affects all points equally
    if len(seeds) > 1:
        dimensions = (Dimension("seed", choices=tuple(seeds)), *dimensions)
        candidates = [{"seed": seed, **point} for seed in seeds for point in candidates]
    skipped = [f"skipped a combination that contradicts itself: {why}" for why in skipped]
    return ListedRuns(dimensions, candidates, rungs, skipped)


def _refuse_many(where: str, points: float, noun: str, seeds: int) -> None:
    """Raise `ConfigError` for more than `MOST_POINTS` points in all."""
    times = f" × {seeds} seeds" if seeds > 1 else ""
    allowed = f"at most {MOST_POINTS:,} points in all; search: draws from as many as one likes"
    why = f"{where}: has {points:,} {noun}{times}; allowed: {allowed}"
    refuse(points * seeds > MOST_POINTS, why)


def _points(entries: Mapping[str, Lines], schema: Schema) -> dict[str, Values]:
    """Return the points by dotted names; the keys are their places in the file."""
    points = {where: cfg.flatten(entry, where) for where, entry in entries.items()}
    for where, point in points.items():
        for name in point:
            schema.knob(name, where)
    return points


def _of_points(points: Mapping[str, Values], baseline: Any) -> tuple[Dimension, ...]:
    """Return the smallest space that contains these points."""
    schema, configs = baseline.schema, [cfg.flat(baseline)]
    for where, point in points.items():
        for name in point:
            refuse(not schema.knobs[name].searchable, f"{where}: {name}: {_same_everywhere(name)}")
        configs.append(cfg.flat(cfg.override(baseline, point, where=where)))
    named = dict.fromkeys(name for point in points.values() for name in point)
    dimensions = []
    for name in sorted(
        named, key=lambda name: name not in schema.members
    ):  # unions before their members' knobs
        # A point that does not name it has the baseline's value, or the default of its own union
        # member.
        choices = tuple(
            {as_param(config[name]): config[name] for config in configs if name in config}.values()
        )
        union, owners = _owners(schema, schema.knobs[name])
        dimensions.append(
            Dimension(name, choices, when=((union, owners),) if union in named else ())
        )
    return tuple(dimensions)


def _rungs(
    file: SearchFile,
    ladder: Mapping[str, Values],
    together: Mapping[str, Values],
    dimensions: Sequence[Dimension],
    baseline: Any,
) -> tuple[tuple[Rung, ...], list[str]]:
    """Return the rungs of a ladder, and why some of them cannot be tried alone."""
    rungs: list[Rung] = []
    skipped: list[str] = []
    for name, (where, knobs) in zip(file.ladder or (), ladder.items(), strict=True):
        refuse(not knobs, f"{where}: changes no knob; e.g. {name}: {{precision.amp: bf16}}")
        alone: Values | None = None
        try:
            cfg.override(baseline, knobs, where=f"{where} alone")
            alone = complete(dimensions, baseline, knobs, where)
        except ConfigError as error:
            skipped.append(str(error))
        all_so_far = complete(dimensions, baseline, together[where], where)
        rungs.append(Rung(name, knobs, all_so_far, alone))
    return tuple(rungs), skipped


def _group(point: Values, baseline: Any) -> tuple[bool, int, bool]:
    """Return a sort key that minimizes new worker groups: the baseline's size, uncompiled first."""
    workers = point.get("parallel.workers", baseline.parallel.workers)
    return (
        workers != baseline.parallel.workers,
        workers,
        point.get("compile.mode", baseline.compile.mode) != "none",
    )


# ---- searched knobs
def _same_everywhere(name: str) -> str:
    """Return why a knob cannot be searched, and what to do instead."""
    hint = "; to run every point with several seeds, write seeds: 3" if name == "seed" else ""
    protocol = ", as part of the evaluation protocol" if name.startswith("evaluation.") else ""
    return f"must be the same in every trial{protocol}; put it under fixed:{hint}"


def spread(content: Lines, where: str) -> Lines:
    """Return knobs by dotted name: `loader: {batch_size: [64, 128]}` → `loader.batch_size: [64,
    128]`.

    Raises `ConfigError` for a knob that is given twice.
    """

    def is_section(spec: object) -> bool:
        return (
            isinstance(spec, dict)
            and bool(spec)
            and not spec.keys() & vars(DimensionSection()).keys()
        )

    return cfg.flatten(content, where, is_section=is_section)


def _owners(schema: Schema, knob: Knob) -> tuple[str, tuple[str, ...]]:
    """Return the union a knob belongs to and its members that have it; ('', ()) without one."""
    union = knob.member[0] if knob.member is not None else ""
    return union, tuple(
        member for member, names in schema.members.get(union, {}).items() if knob.name in names
    )


@dataclasses.dataclass
class _Searched:
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
            members = (
                conditions[union] if isinstance(conditions[union], list) else [conditions[union]]
            )
            for member in members:
                cfg.override(self.baseline, {union: member}, where=where, check=False)
            if chosen[union] not in members:
                return []
        left = {name: allowed for name, allowed in conditions.items() if name not in fixed}
        return [{**spec, "when": left} if fixed else spec]

    def dimension(self, name: str, spec: Any, where: str) -> Dimension:
        """Return the dimension that `spec` describes. Raises `ConfigError`."""
        knob: Knob = self.baseline.schema.knob(name, self.where)
        refuse(not knob.searchable, f"{where}: cannot be searched: it {_same_everywhere(name)}")
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
            refuse(
                not fields.choice, f"{where}: [] is not a list of choices; allowed: {knob.allowed}"
            )
            many = (
                f"{len(fields.choice):,} choices; allowed: at most {MOST_CHOICES:,}, or a range"
                " {low: …, high: …}"
            )
            refuse(len(fields.choice) > MOST_CHOICES, f"{where}: has {many}")
            choices = tuple(self.value(knob, choice, when, where) for choice in fields.choice)
            twice = any(a == b for a, b in itertools.combinations(choices, 2))
            refuse(twice, f"{where}: {fields.choice!r} names a choice twice")
            return Dimension(name, choices, when=tuple(when.items()))
        # A range
        refuse(not self.ranges, f"{where}: a grid needs a list of choices, not a range")
        is_number = knob.kind in ("int", "float")
        refuse(
            not is_number,
            f"{where}: a range needs a number; {name} is {knob.allowed}: list the choices",
        )
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
        whole, step = knob.kind == "int", spec.get("step")
        refuse(not low < high, f"{where}: low {low} is not below high {high}")
        if step is not None:
            slip = whole and not isinstance(step, int)
            refuse(slip, f"{where}: step: {step!r} is not allowed; allowed: a whole number above 0")
            refuse(fields.log, f"{where}: step and log exclude each other")
            away = abs((steps := (high - low) / step) - round(steps)) > 1e-9
            refuse(away, f"{where}: step: {step} does not lead from {low} to {high}")
        refuse(fields.log and not low > 0, f"{where}: log: needs a low above 0, not {low}")
        return Dimension(knob.name, None, low, high, step, fields.log, whole, tuple(when.items()))

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
            refuse(
                name not in self.dimensions,
                f"{where}: when: {name}: must be a knob searched further up in the file",
            )
            drawn = self.dimensions[name]
            refuse(not allowed, f"{where}: when: {name}: [] is not allowed; allowed: {drawn}")
            for value in allowed:
                refuse(
                    not drawn.contains(value),
                    f"{where}: when: {name}: {value!r} is never drawn; allowed: {drawn}",
                )
        # The condition of a union's knob
        union, owners = _owners(self.baseline.schema, knob)
        belongs = f"{where}: belongs to {union} = {' or '.join(owners)}"
        if union in when:
            for value in when[union]:
                why = f"{value!r} has no such knob; allowed: {', '.join(owners)}"
                refuse(value not in owners, f"{where}: when: {union}: {why}")
        elif union in self.dimensions:
            when[union] = tuple(owner for owner in owners if self.dimensions[union].contains(owner))
            refuse(
                not when[union],
                f"{belongs}, which is never drawn; allowed: {self.dimensions[union]}",
            )
        elif union:
            refuse(union in self.content, f"{belongs}; {union} must stand above it in the file")
            chosen = cfg.flat(self.baseline)[union]
            refuse(chosen not in owners, f"{belongs}, but {union} is {chosen} here")
        return when
