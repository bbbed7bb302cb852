"""Read a search file, and check it as a whole before anything starts.

A search file has one of four forms: `search:` is drawn by Optuna, `grid:` is every combination,
`trials:` is a list run in order, `ladder:` is a list of named changes, each tried on top of those
before it and alone. All forms become the same thing: ordered dimensions, and candidates to try
first. `seeds: N` repeats every candidate with N seeds, in all forms but `search:`; there, `noise:
N` repeats the baseline.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Lines, Metric, Schema, Values, Workload
from tunediff.config.knobs import refuse, validated
from tunediff.core import text
from tunediff.core.target import Target
from tunediff.search_space.content import read, start
from tunediff.search_space.dimension import (
    Dimension,
    SearchedKnobs,
    as_param,
    combinations,
    complete,
    owners_of,
    same_everywhere,
    spread,
)
from tunediff.search_space.model import (
    RATE,
    SECONDS,
    Rung,
    SearchBudget,
    SearchSpace,
    check_space,
    check_together,
)
from tunediff.search_space.sections import (
    COSTS,
    BudgetSection,
    Confirm,
    ObjectiveSection,
    RunOptions,
    SearchFile,
    objective_section,
    parse_study,
)


def load(path: Path, words: Sequence[str] = (), budget: Lines | None = None) -> SearchSpace:
    """Read and check a search file; `words` (`knob=value`) and `budget` override what it says."""
    return parse(read(path), str(path), path.parent, words, budget)


def parse(
    content: Mapping[str, Any],
    source: str,
    folder: Path = Path(),
    words: Sequence[str] = (),
    budget: Lines | None = None,
) -> SearchSpace:
    """Check the content of a search file. Raises `ConfigError` with file, key, value, allowed.

    `folder`: where `workload:` is looked up; `words` and `budget` as in `load`.
    """
    # Sections, baseline and objective
    file = validated(SearchFile, dict(content), source)
    for form in ("search", "grid"):
        if knobs := getattr(file, form):
            named: Lines = {form: spread(knobs, f"{source}: {form}")}
            file = dataclasses.replace(file, **named)
    kind = _kind(file, source)
    baseline = _baseline(file, source, folder, words)
    workload = cfg.of(baseline)
    metric, cost, target = _objective(file.objective, workload, f"{source}: objective")
    check_together(file, kind, metric, cost, source)
    limits = {**file.budget, **(budget or {})}
    search_budget = _budget(limits, source, kind, metric, cost)

    seeds = tuple(range(baseline.seed, baseline.seed + (file.seeds or 1)))
    runs = listed_runs(file, kind, source, baseline, seeds, metric != RATE)
    most = search_budget.trials
    trials = most if kind == "search" else min(most, len(runs[1]))
    listed = listed_fields(file, kind, source, runs, trials, baseline.seed)
    confirm = table = None
    if file.confirm is not None:
        confirm = validated(Confirm, file.confirm, f"{source}: confirm")
    if file.study is not None:
        table = parse_study(file.study, source, workload, file.operations)
    space = SearchSpace(
        **{field.name: getattr(file, field.name) for field in dataclasses.fields(RunOptions)},
        source=source,
        baseline=baseline,
        kind=kind,
        metric=metric.name,
        mode=metric.mode,
        cost=cost,
        target=target,
        label=metric.label or metric.name,
        budget=dataclasses.replace(search_budget, trials=trials),
        **listed,
        seeds=len(seeds),
        confirm=confirm,
        study=table,
    )
    check_space(space, limits)
    return space


def _kind(file: SearchFile, source: str) -> str:
    """Return which of the four forms the file has. Raises `ConfigError` unless it is one."""
    knobless = "names no knob; e.g. loader.batch_size: [64, 128, 256]"
    empty = {
        "search": knobless,
        "grid": knobless,
        "trials": "needs a list of points, e.g. - {precision.amp: bf16}",
        "ladder": "has no rung; e.g. bf16: {precision.amp: bf16}",
    }
    kinds = [kind for kind in empty if getattr(file, kind) is not None]
    needed = "exactly one of search:, grid:, trials: and ladder: is needed"
    refuse(len(kinds) != 1, f"{source}: {needed}, found {kinds or 'none'}")
    refuse(not getattr(file, kinds[0]), f"{source}: {kinds[0]}: {empty[kinds[0]]}")
    return kinds[0]


def _baseline(file: SearchFile, source: str, folder: Path, words: Sequence[str]) -> Any:
    """Return the configuration from which a search starts. Raises `ConfigError`."""
    base = start(file.workload, source, folder)
    overrides = cfg.parse_overrides(words, base.schema)
    fixed = cfg.flatten(file.fixed, f"{source}: fixed")
    starting = cfg.flatten(file.baseline, f"{source}: baseline")
    searched = file.search or file.grid or {}
    twice = (
        "is searched in this file as well; take it out of one of the two, or give the baseline's"
        " value of a "
    )
    for name in [*fixed, *overrides]:
        where = f"{source}: fixed" if name in fixed else "command line"
        refuse(name in searched, f"{where}: {name}: {twice}searched knob under baseline:")
    base = cfg.override(base, fixed, where=f"{source}: fixed", check=not (starting or overrides))
    base = cfg.override(base, starting, where=f"{source}: baseline", check=not overrides)
    return cfg.with_absolute_paths(cfg.override(base, overrides, where="command line"))


def _objective(
    content: Any, workload: Workload, where: str
) -> tuple[Metric, str | None, Target | None]:
    """Return objective, second objective, and target of a trial. Raises `ConfigError`."""
    evaluated = workload.objective
    metrics = {evaluated.name: evaluated, RATE.name: RATE}
    names = ", ".join(metrics)
    pair = f"one of {names}, or a list of one of these and one of {', '.join(COSTS)}"
    fits = not isinstance(content, list) or len(content) == 2
    refuse(not fits, f"{where}: {content!r} is not allowed; allowed: {pair}")
    section = validated(ObjectiveSection, objective_section(content), where)
    name = evaluated.name if section.metric is None else section.metric
    refuse(name not in metrics, f"{where}: metric: {name!r} is not allowed; allowed: {names}")
    mode = metrics[name].mode
    refuse(
        section.mode not in (None, mode),
        f"{where}: mode: {section.mode!r} is not allowed for {name}; allowed: {mode}",
    )
    if section.target is None:
        return metrics[name], section.cost, None
    where, value = f"{where}: target", f"{section.target!r} is not allowed"
    beside_name = "for a command; allowed: in its file, beside the name of its objective"
    refuse(cfg.is_command(workload.name), f"{where}: {value} {beside_name}")
    refuse(name == RATE.name, f"{where}: {value} for {name}; allowed: {evaluated.name}")
    target = Target.of_objective(section.target, evaluated.name, evaluated.mode, where)
    return SECONDS, section.cost, target


def _budget(
    content: Lines, source: str, kind: str, metric: Metric, cost: str | None
) -> SearchBudget:
    """Return the budget that a file's `budget:` describes. Raises `ConfigError`."""
    where, rate = f"{source}: budget", metric == RATE
    limits = validated(BudgetSection, content, where)
    missing = limits.trials is None and kind == "search"
    refuse(missing, f"{where}: trials: is missing; how many trials to run, e.g. 40")
    price = limits.price_per_device_hour
    unknown = "needs the price of a device: budget: price_per_device_hour: 2.5"
    refuse(cost == "price" and price is None, f"{source}: objective: cost: 'price' {unknown}")
    return SearchBudget(
        limits.per_trial,
        limits.trials or 10**9,  # as many as there are points
        limits.total,
        not rate and limits.compile != "free",
        limits.deadline,
        limits.unit,
        price,
        limits.setup == "charged",
    )


# ---- what is tried first or at all: points, combinations, rungs
MOST_POINTS = 10_000
"""Limit: beyond it, reading a file takes minutes and running it a lifetime."""


Listed = tuple[tuple[Dimension, ...], list[Values], tuple[Rung, ...], list[str]]
"""Dimensions; drawn values, the baseline's first, all with every seed; rungs; why some combinations
or single rungs do not run."""


def listed_runs(
    file: SearchFile, kind: str, source: str, baseline: Any, seeds: Sequence[int], evaluates: bool
) -> Listed:
    """Return what a search file searches, and what it lists to run. Raises `ConfigError`."""
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
        knobs = SearchedKnobs(getattr(file, kind), baseline, where, kind == "search")
        dimensions = tuple(knobs.dimensions.values())
        refuse(not dimensions, f"{where}: no knob is left to search: conditions never hold")
        idle = knobs.idle & cfg.flat(baseline).keys()
        points = {
            at: {name: value for name, value in point.items() if name not in idle}
            for at, point in points.items()
        }
    else:
        dimensions = _of_points(points or together, baseline)

    # Candidates: the baseline, then points, rungs or combinations
    listed = {f"{where} (baseline)": {}, **points}
    values = [complete(dimensions, baseline, point, at) for at, point in listed.items()]
    rungs, skipped = _rungs(file, rung_knobs, together, dimensions, baseline)
    values += [rung.together for rung in rungs]
    values += [rung.alone for rung in rungs if rung.alone is not None]
    if kind == "grid":
        values += itertools.islice(combinations(dimensions, {}), MOST_POINTS + 1)
        _refuse_many(where, len(values) - 1, "combinations or more", len(seeds))
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
    return dimensions, candidates, rungs, skipped


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
    listed: Listed,
    trials: int,
    seed: int,
) -> dict[str, Any]:
    """Return the fields of a space that say what runs, the runs of the baseline first."""
    noise = _noise(file.noise, kind, trials, source)
    dimensions, (first, *others), rungs, skipped = listed
    repeats = [{**first, "seed": seed + number} for number in range(1, noise)]
    candidates = (first, *repeats, *others)[:trials]
    if kind == "search" and len(others) > (left := trials - noise):
        run = f"only {left} of {text.pluralize(len(others), 'point')} run"
        of_all = f"{text.pluralize(trials, 'trial')}, {noise} of them the baseline"
        skipped.append(f"{source}: first: {run}: {of_all}; allowed: more trials")
    return {
        "dimensions": dimensions,
        "candidates": candidates,
        "rungs": rungs,
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
