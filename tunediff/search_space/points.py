"""List what is tried first or at all: points, combinations, rungs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Lines, Schema, Values
from tunediff.config.knobs import refuse
from tunediff.core import text
from tunediff.search_space.dimension import Dimension, as_param, combinations, complete, count
from tunediff.search_space.model import Rung
from tunediff.search_space.searched_knobs import SearchedKnobs, owners_of, same_everywhere
from tunediff.search_space.sections import SearchFile

MOST_POINTS = 10_000
"""Limit: beyond it, reading a file takes minutes and running it a lifetime."""


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
    if kind in ("search", "grid"):
        dimensions = SearchedKnobs(getattr(file, kind), baseline, where, kind == "search").read()
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
    at = place if kind == "search" else where
    candidates, contradictions = _allowed(values, baseline, at, can_skip=kind == "grid")
    skipped += contradictions
    if kind == "grid" and not evaluates:
        candidates[1:] = sorted(candidates[1:], key=lambda point: _group(point, baseline))
    # Seed after seed: a drift of a shared machine's speed then affects all points equally
    if len(seeds) > 1:
        dimensions = (Dimension("seed", choices=tuple(seeds)), *dimensions)
        candidates = [{"seed": seed, **point} for seed in seeds for point in candidates]
    skipped = [f"skipped a combination that contradicts itself: {why}" for why in skipped]
    return ListedRuns(dimensions, candidates, rungs, skipped)


def _allowed(
    values: Sequence[Values], baseline: Any, where: str, can_skip: bool
) -> tuple[list[Values], list[str]]:
    """Return different points once, and why others contradict themselves, after the baseline."""
    allowed, contradictions = list[Values](), list[str]()
    for point in {json.dumps(point, sort_keys=True): point for point in values}.values():
        try:
            cfg.override(baseline, point, where=where)
            allowed.append(point)
        except ConfigError as error:
            if not (can_skip and allowed):
                raise
            contradictions.append(str(error))
    return allowed, contradictions


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
            refuse(not schema.knobs[name].searchable, f"{where}: {name}: {same_everywhere(name)}")
        configs.append(cfg.flat(cfg.override(baseline, point, where=where)))
    named = dict.fromkeys(name for point in points.values() for name in point)
    dimensions = []
    # Unions before their members' knobs
    for name in sorted(named, key=lambda name: name not in schema.members):
        # A point that does not name it has the baseline's value, or the default of its union member
        values = [config[name] for config in configs if name in config]
        choices = {as_param(value): value for value in values}
        union, owners = owners_of(schema, schema.knobs[name])
        when = ((union, owners),) if union in named else ()
        dimensions.append(Dimension(name, tuple(choices.values()), when=when))
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


# ---- how many of them run
TRIALS_WITH_NOISE = 6
"""Trials from which a search runs its baseline twice, unless its file says otherwise."""


def listed_fields(
    file: SearchFile,
    kind: str,
    source: str,
    runs: ListedRuns,
    trials: int,
    seed: int,
) -> dict[str, Any]:
    """Return the fields of a space that say what runs, the runs of the baseline first."""
    noise = _noise(file.noise, kind, trials, source)
    first, *others = runs.candidates
    repeats = [{**first, "seed": seed + number} for number in range(1, noise)]
    candidates = (first, *repeats, *others)[:trials]
    skipped = list(runs.skipped)
    if kind == "search" and len(others) > (left := trials - noise):
        run = f"only {left} of {text.pluralize(len(others), 'point')} run"
        of_all = f"{text.pluralize(trials, 'trial')}, {noise} of them the baseline"
        skipped.append(f"{source}: first: {run}: {of_all}; allowed: more trials")
    return {
        "dimensions": runs.dimensions,
        "candidates": candidates,
        "rungs": runs.rungs,
        "skipped": tuple(skipped),
        "noise": noise,
    }


def _noise(runs: int | None, kind: str, trials: int, source: str) -> int:
    """Return the number of runs of the baseline in a search. `runs`: the value in the file."""
    if runs is None:
        return 2 if kind == "search" and trials >= TRIALS_WITH_NOISE else 1
    where = f"{source}: noise"
    refuse(
        kind != "search", f"{where}: belongs to search:; {kind}: repeats every point with seeds:"
    )
    none_left = f"{where}: {runs} runs of the baseline leave none of {trials} trials to search"
    allowed = f"allowed: at most {max(1, trials - 1)}, or more trials"
    refuse(1 < runs >= trials, f"{none_left}; {allowed}")
    return runs
