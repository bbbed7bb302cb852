"""Read a search file, and check it as a whole before anything starts.

A search file has one of four forms: `search:` is drawn by Optuna, `grid:` is every combination,
`trials:` is a list run in order, `ladder:` is a list of named changes, each tried on top of those
before it and alone. All forms become the same thing: ordered dimensions, and candidates to try
first. `seeds: N` repeats every candidate with N seeds, in all forms but `search:`; there, `noise:
N` repeats the baseline.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tunediff import config as cfg
from tunediff.config import Lines, Metric, Schema, Workload, workload
from tunediff.config.knobs import refuse
from tunediff.core.target import Target
from tunediff.experiment.model import Experiment
from tunediff.search_space import study
from tunediff.search_space.consistency import check_space, check_together
from tunediff.search_space.files import is_workload, of_search
from tunediff.search_space.model import RATE, SECONDS, SearchBudget, SearchSpace
from tunediff.search_space.points import listed_fields, listed_runs
from tunediff.search_space.searched_knobs import owners_of, spread
from tunediff.search_space.sections import (
    COSTS,
    BudgetSection,
    Confirm,
    ObjectiveSection,
    RunOptions,
    SearchFile,
    checked,
)

OF_A_WORKLOAD = {"budget": {"per_trial": "60s", "trials": 16}, "confirm": {"of": 2}}
"""Budget and confirmation of a search for which only a workload's file is given."""


def load(path: Path, words: Sequence[str] = (), budget: Lines | None = None) -> SearchSpace:
    """Read and check a search file; `words` (`knob=value`) and `budget` override what it says."""
    return parse(read(path), str(path), path.parent, words, budget)


def load_recorded(folder: Path) -> SearchSpace:
    """Return the recorded space of a search folder. Raises `ConfigError`."""
    path = of_search(folder)
    return parse(read(path), str(path), folder)


def read(
    path: Path,
    world_sizes: Sequence[int] = (1,),
    gpu: bool = False,
) -> Lines:
    """Return the content of a search file, with lists in the place of `all` and `not`.

    `all` is every choice of a searched knob; in a grid, `parallel.workers: all` is `world_sizes`,
    those that fit on this machine, and `parallel.strategy: all` what shares something, `dp` only
    with a GPU. `when: {KNOB: {not: [VALUE]}}` is all other choices that have the searched knob. A
    point of `first:` with `all` is one point for each choice, with the knobs that apply there.
    """
    content = {"workload": path.name, **OF_A_WORKLOAD} if is_workload(path) else cfg.read_yaml(path)
    if "kind" in content:  # of a search that has been made
        return Experiment.of(content, str(path)).search_file
    if type(finalists := content.get("confirm")) is int:  # as --confirm has it
        content["confirm"] = {"of": finalists}
        if finalists == 0:
            del content["confirm"]
    if "command" in content:
        content = workload.commands.search_file(content, str(path), Path())
    strategies = ["ddp", *(["dp"] if gpu else []), "fsdp", "pipeline"]
    machine: dict[str, list[Any]] = {}  # what a cluster has is not known beforehand
    if world_sizes:
        machine = {"parallel.workers": list(world_sizes), "parallel.strategy": strategies}
    return _Derived(content, path, machine).lists()


class _Derived:
    """Writes lists in the place of `all` and `not`; see `read`."""

    def __init__(self, content: Lines, path: Path, machine: Mapping[str, list[Any]]) -> None:
        """`machine`: the choices of knobs that depend on it; {}: it is not known beforehand."""
        self.content, self.path, self.machine = content, path, machine

    @functools.cached_property
    def schema(self) -> Schema:
        named, folder = self.content.get("workload"), self.path.parent
        base = (
            cfg.baseline(str(named), str(self.path), folder)
            if named is not None
            else cfg.load(folder / str(self.content.get("base")))
        )
        return cast(Schema, base.schema)

    def lists(self) -> Lines:
        content = dict(self.content)
        for form in ("search", "grid"):
            if isinstance(knobs := content.get(form), dict):
                spaces = spread(knobs, f"{self.path}: {form}")
                content[form] = {
                    name: self._space(name, space, form) for name, space in spaces.items()
                }
        if isinstance(points := content.get("first"), list):
            searched = content.get("search") or {}
            content["first"] = [each for point in points for each in self._points(point, searched)]
        return content

    def _choices(self, name: str, form: str) -> list[Any]:
        if form == "grid" and name.startswith("parallel."):
            example = {"parallel.workers": "[1, 2, 4]"}.get(name, "[ddp, fsdp]")
            unknown = f"what a cluster has is not known beforehand; allowed: a list, e.g. {example}"
            where = f"{self.path}: grid: {name}: 'all' is not allowed with --address"
            refuse(name not in self.machine, f"{where}: {unknown}")
            return self.machine[name]
        where = f"{self.path}: {form}"
        choices = self.schema.knob(name, where).choices
        refuse(choices is None, f"{where}: {name}: 'all' is not allowed; allowed: a list of values")
        return list(choices or ())

    def _space(self, name: str, space: Any, form: str) -> Any:
        """Return the line of a searched knob with lists."""
        if space == "all":
            return self._choices(name, form)
        when = space.get("when") if isinstance(space, dict) else None
        if not isinstance(when, dict):
            return space
        lists = {}
        for on, allowed in when.items():
            if isinstance(allowed, dict) and allowed.keys() == {"not"}:
                _, owners = owners_of(self.schema, self.schema.knob(name, f"{self.path}: {form}"))
                excluded = allowed["not"] if isinstance(allowed["not"], list) else [allowed["not"]]
                allowed = [one for one in owners if one not in excluded]
            lists[on] = allowed
        return {**space, "when": lists}

    def _points(self, point: Any, searched: Lines) -> Iterator[Any]:
        """Yield a point for each of the choices that its `all` stands for."""
        flat = cfg.flatten(point, f"{self.path}: first") if isinstance(point, dict) else {}
        every = [name for name, value in flat.items() if value == "all"]
        if not every:
            yield point
            return
        for values in itertools.product(*(self._choices(name, "search") for name in every)):
            chosen = {**flat, **dict(zip(every, values, strict=True))}
            yield {
                name: value
                for name, value in chosen.items()
                if self._applies(name, chosen, searched)
            }

    def _applies(self, name: str, chosen: Lines, searched: Lines) -> bool:
        """Return whether a knob of a point applies beside the other ones."""
        union, owners = owners_of(self.schema, self.schema.knob(name, f"{self.path}: first"))
        space = searched.get(name)
        when = space.get("when", {}) if isinstance(space, dict) else {}
        conditions = {**({union: owners} if union else {}), **when}
        return all(chosen[on] in allowed for on, allowed in conditions.items() if on in chosen)


def parse(
    content: Mapping[str, Any],
    source: str,
    folder: Path = Path(),
    words: Sequence[str] = (),
    budget: Lines | None = None,
) -> SearchSpace:
    """Check the content of a search file. Raises `ConfigError` with file, key, value, allowed.

    `folder`: where `base:` is looked up; `words` and `budget` as in `load`.
    """
    search_keys = {"budget", "search", "grid", "trials", "ladder"} & content.keys()
    config = "is a configuration, not a search file; a search file names it after base:"
    refuse("workload" in content and len(content) > 1 and not search_keys, f"{source}: {config}")
    # Sections, baseline and objective
    file = checked(SearchFile, dict(content), source)
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
    cfg.override(baseline, {"seed": seeds[-1]}, where=f"{source}: seeds", check=False)
    runs = listed_runs(file, kind, source, baseline, seeds, metric != RATE)
    most = search_budget.trials
    trials = most if kind == "search" else min(most, len(runs.candidates))
    listed = listed_fields(file, kind, source, runs, trials, baseline.seed)
    confirm = table = None
    if file.confirm is not None:
        confirm = checked(Confirm, file.confirm, f"{source}: confirm")
    if file.study is not None:
        ladder = kind == "ladder"
        table = study.parse(file.study, source, workload, ladder, file.operations)
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
    more = ""
    if file.workload is not None and cfg.is_users(file.workload.partition(":")[0]):
        more = " (search: may be left out where the workload's Knobs have a Range or a Choice)"
    needed = "exactly one of search:, grid:, trials: and ladder: is needed"
    refuse(len(kinds) != 1, f"{source}: {needed}{more}, found {kinds or 'none'}")
    refuse(not getattr(file, kinds[0]), f"{source}: {kinds[0]}: {empty[kinds[0]]}")
    return kinds[0]


def _baseline(file: SearchFile, source: str, folder: Path, words: Sequence[str]) -> Any:
    """Return the configuration from which a search starts. Raises `ConfigError`."""
    needed = (
        f"exactly one of workload: ({', '.join(cfg.baseline_names())}, mine.py) and base: (a file)"
        " is needed"
    )
    refuse((file.workload is None) == (file.base is None), f"{source}: {needed}")
    named = file.workload is not None
    base = (
        cfg.baseline(str(file.workload), source, folder)
        if named
        else cfg.load(folder / str(file.base))
    )
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
    for name in starting:
        refuse(
            name not in searched,
            f"{source}: baseline: {name}: is not searched; put it under fixed:",
        )
    base = cfg.override(base, fixed, where=f"{source}: fixed", check=not (starting or overrides))
    base = cfg.override(base, starting, where=f"{source}: baseline", check=not overrides)
    return cfg.with_absolute_paths(cfg.override(base, overrides, where="command line"))


def _objective(
    content: Any, workload: Workload, where: str
) -> tuple[Metric, str | None, Target | None]:
    """Return objective, second objective, and target of a trial. Raises `ConfigError`."""
    evaluated = workload.objective
    metrics = {evaluated.name: evaluated, RATE.name: RATE}
    names, costs = ", ".join(metrics), ", ".join(COSTS)
    if isinstance(content, list):
        pair = f"one of {names}, or a list of one of these and one of {costs}"
        fits = len(content) == 2 and content[0] in list(metrics) and content[1] in COSTS
        refuse(not fits, f"{where}: {content!r} is not allowed; allowed: {pair}")
        content = {"metric": content[0], "cost": content[1]}
    if isinstance(content, str):
        content = {"metric": content}
    section = checked(ObjectiveSection, {} if content is None else content, where)
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
    limits = checked(BudgetSection, content, where)
    missing = limits.trials is None and kind == "search"
    refuse(missing, f"{where}: trials: is missing; how many trials to run, e.g. 40")
    for key in ("compile", "setup"):
        charged = (
            f"{where}: {key}: 'charged' is not allowed for {metric.name}, a rate; allowed: free"
        )
        refuse(rate and getattr(limits, key) == "charged", charged)
    shared, price = limits.unit == "device", limits.price_per_device_hour
    refuse(
        rate and shared,
        f"{where}: unit: 'device' is not allowed for {metric.name}, a rate; allowed: wall",
    )
    same = f"with budget: unit: device every trial has the same {cost}"
    refuse(
        shared and cost in ("device_s", "price"),
        f"{source}: objective: cost: {cost!r} is not allowed: {same}",
    )
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
