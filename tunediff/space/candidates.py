"""What a search tries first, or altogether: points that are listed, every combination, the rungs of a ladder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.space import dimensions as knobs
from tunediff.space.model import Dimension, Rung, SearchSpace, as_param, combinations
from tunediff.space.sections import File

Point = dict[str, Any]


def planned(space: SearchSpace, file: File) -> SearchSpace:
    """The space with its dimensions and candidates, the baseline first. Raises `ConfigError`."""
    where, rungs, skipped = f"{space.source}: {space.kind}", [], []
    points = _points(file.first or (), f"{space.source}: first", space)
    if space.kind == "trials":
        points = _points(file.trials or (), where, space)
        if not points:
            raise ConfigError(f"{where}: needs a list of points, e.g. - {{precision.amp: bf16}}")
        dimensions = _of_points(points, space.baseline)
    elif space.kind == "ladder":
        rungs, skipped = _rungs(file.ladder or {}, space, where)
        dimensions = _of_points({f"{where}: {rung.name}": rung.together for rung in rungs}, space.baseline)
    else:
        content = file.search if file.search is not None else file.grid or {}
        dimensions = knobs.read(content, space.baseline, where, ranges=space.kind == "search")
    space = dataclasses.replace(space, dimensions=dimensions)

    base = space.expand({}, f"{where} (baseline)")
    found = [base, *(space.expand(point, place) for place, point in points.items())]
    rungs = [_full(rung, space) for rung in rungs]
    found += [rung.together for rung in rungs] + [rung.alone for rung in rungs if rung.alone is not None]
    if space.kind == "grid":
        found += combinations(dimensions)
    valid = []
    for point in {json.dumps(point, sort_keys=True): point for point in found}.values():
        try:
            cfg.override(space.baseline, point, where=f"{space.source}: first" if space.kind == "search" else where)
            valid.append(point)
        except ConfigError as error:  # a hand-written point must run; a grid may hold impossible corners
            if space.kind != "grid" or point == base:
                raise
            skipped.append(str(error))
    if space.kind == "grid" and not space.evaluates:
        valid = _in_warm_order(valid, space.baseline)
    return dataclasses.replace(space, candidates=tuple(valid), rungs=tuple(rungs), skipped=tuple(skipped))


def repeated(space: SearchSpace, seeds: Sequence[int]) -> SearchSpace:
    """Every candidate with every seed, seed after seed: what drifts on a shared machine then hits all alike."""
    if len(seeds) == 1:
        return space
    candidates = tuple({"seed": seed, **point} for seed in seeds for point in space.candidates)
    dimensions = (Dimension("seed", choices=tuple(seeds)), *space.dimensions)
    return dataclasses.replace(space, dimensions=dimensions, candidates=candidates, seeds=len(seeds))


def _point(entry: Mapping[str, Any], where: str, space: SearchSpace) -> Point:
    point = cfg.flatten(entry)
    for name in point:
        if name not in space.schema.knobs:
            raise ConfigError(space.schema.unknown_knob(name, where))
    return point


def _points(entries: Sequence[Mapping[str, Any]], where: str, space: SearchSpace) -> dict[str, Point]:
    """Listed points, by where they stand in the file."""
    return {f"{where}[{i}]": _point(entry, f"{where}[{i}]", space) for i, entry in enumerate(entries)}


def _of_points(points: Mapping[str, Point], baseline: Any) -> tuple[Dimension, ...]:
    """The smallest space that holds some points: for every knob they name, the values they name."""
    schema, configs = baseline.schema, [cfg.flat(baseline)]
    for where, point in points.items():
        for name in point:
            if not schema.knobs[name].searchable:
                raise ConfigError(f"{where}: {name}: {knobs.not_searchable(name)}")
        configs.append(cfg.flat(cfg.override(baseline, point, where=where)))
    named = dict.fromkeys(name for point in points.values() for name in point)
    dimensions = []
    for name in sorted(named, key=lambda name: name not in schema.members):  # unions before their members' knobs
        # A point that does not name it has the baseline's value, or the default of its own union member.
        choices = tuple({as_param(config[name]): config[name] for config in configs if name in config}.values())
        owned = knobs.having(schema, schema.knobs[name])
        dimensions.append(Dimension(name, choices, when=(owned,) if owned is not None and owned[0] in named else ()))
    return tuple(dimensions)


def _rungs(content: Mapping[str, Mapping[str, Any]], space: SearchSpace, where: str) -> tuple[list[Rung], list[str]]:
    """The rungs of a ladder, their points as written, and why some of them cannot stand alone."""
    rungs: list[Rung] = []
    skipped: list[str] = []
    together: Point = {}
    for name, entry in content.items():
        changes = _point(entry, f"{where}: {name}", space)
        if not changes:
            raise ConfigError(f"{where}: {name}: changes no knob; e.g. {name}: {{precision.amp: bf16}}")
        together = {**together, **changes}
        alone: Point | None = changes
        try:  # what is on top of the others must run; that is checked with the other candidates
            cfg.override(space.baseline, changes, where=f"{where}: {name} alone")
        except ConfigError as error:
            alone = None
            skipped.append(str(error))
        rungs.append(Rung(name, changes, together, alone))
    if not rungs:
        raise ConfigError(f"{where}: has no rung; e.g. bf16: {{precision.amp: bf16}}")
    return rungs, skipped


def _full(rung: Rung, space: SearchSpace) -> Rung:
    where = f"{space.source}: ladder: {rung.name}"
    alone = None if rung.alone is None else space.expand(rung.alone, where)
    return dataclasses.replace(rung, together=space.expand(rung.together, where), alone=alone)


def _in_warm_order(points: list[Point], baseline: Any) -> list[Point]:
    """The baseline first, then by world size and uncompiled before compiled: the fewest new worker groups."""

    def group(point: Point) -> tuple[bool, int, bool]:
        workers = point.get("parallel.workers", baseline.parallel.workers)
        compiled = point.get("compile.mode", baseline.compile.mode) != "none"
        return workers != baseline.parallel.workers, workers, compiled

    return [points[0], *sorted(points[1:], key=group)]
