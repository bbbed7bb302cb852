"""Find and read a search file, and check it as a whole before anything starts.

A search file has one of four forms: `search:` is drawn by Optuna, `grid:` is every combination,
`trials:` is a list run in order, `ladder:` is a list of named changes, each tried on top of those
before it and alone. All forms become the same thing: ordered dimensions, and candidates to try
first. `seeds: N` repeats every candidate with N seeds, in all forms but `search:`; there, `noise:
N` repeats the baseline, and `reruns: N` of the trials repeat what leads.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Lines, Metric, recorded, removed
from tunediff.config.knobs import nearest, refuse
from tunediff.core import remote, text
from tunediff.search_space import foreign, study
from tunediff.search_space.model import (
    LONGER_SEEDS,
    MOST_RUNS,
    RATE,
    SEED_OFFSET,
    SearchBudget,
    SearchSpace,
)
from tunediff.search_space.points import listed_runs, spread
from tunediff.search_space.sections import (
    COSTS,
    BudgetSection,
    Confirm,
    ObjectiveSection,
    RunOptions,
    SearchFile,
    checked,
)

_PACKAGE = Path(__file__).resolve().parents[1]
# In a checkout the search files lie beside the package; an installed wheel carries them inside it.
SHIPPED = next(
    (d for d in (_PACKAGE.parent / "search_spaces", _PACKAGE / "search_spaces") if d.is_dir()),
    _PACKAGE,
)
DEFAULT = "digits.yaml"
TRIALS_WITH_NOISE = 6
"""Trials from which a search runs its baseline twice, unless its file says otherwise."""
TRIALS_WITH_RERUNS, RERUN_SHARE = 32, 8
"""Trials from which a search spends every eighth one on reruns, unless its file says otherwise; see
docs/search.md."""
OF_A_WORKLOAD = {"budget": {"per_trial": "60s", "trials": 16}, "confirm": {"of": 2}}
"""Budget and confirmation of a search for which only a workload's file is given."""


def find(name: str | None) -> Path:
    """Return the search file that a user names: a path, or the name of a shipped one (`cifar10`,
    `digits.yaml`).

    A workload's file or module stands for a search file that contains only its name.
    """
    if name is None:
        return SHIPPED / DEFAULT
    if is_workload(Path(name)):
        return Path(name)
    for path in (Path(name), SHIPPED / name, SHIPPED / f"{name}.yaml"):
        if path.is_file():
            return path
    if Path(name).is_dir():
        inside, images = (
            Path(name) / "search.yaml",
            text.command("search", "images", f"data.path={name}"),
        )
        hint = (
            f"its search file is {inside}"
            if inside.is_file()
            else f"to learn the images in it: {images}"
        )
        raise ConfigError(f"{name}: is a folder, not a search file; {hint}")
    if Path(name).exists():  # a device: reading it says what is wrong
        return Path(name)
    hint = nearest(name.removesuffix(".yaml"), shipped()).replace("allowed:", "shipped:")
    raise ConfigError(f"{name}: no such search file; {hint}")


def shipped() -> list[str]:
    """Return the names of the shipped search files: `digits`, `studies/ladder`, …"""
    return sorted(
        str(path.relative_to(SHIPPED).with_suffix("")) for path in SHIPPED.rglob("*.yaml")
    )


def is_workload(path: Path) -> bool:
    """Return whether a path is the file or module of a workload, perhaps with a preset's name."""
    return cfg.is_users(str(path).partition(":")[0])


def folder_of(name: str, storage: Path, file: str = "search.yaml") -> Path:
    """Return the absolute folder with `file` that a user names: inside `storage`, or as a path.

    Where the storage has an address, what is new there is fetched, without weights. Raises
    `ConfigError`.
    """
    remote.pull(storage / name)
    places = (storage / name, Path(name))
    return next((place for place in places if (place / file).is_file()), places[0]).absolute()


def of_search(folder: Path) -> Path:
    """Return the search file in the folder of a search.

    Raises `ConfigError` if there is none, with a list of searches, and for a search of an earlier
    version.
    """
    if not (folder / "search.yaml").is_file():
        searches = (
            ", ".join(sorted(path.parent.name for path in folder.parent.glob("*/search.yaml")))
            or "none"
        )
        raise ConfigError(
            f"{folder.name or folder}: no such search in {folder.parent}; there are: {searches}"
        )
    base = folder / "baseline.yaml"
    why = "does not say of which workload its knobs are; use that version, or search again"
    earlier = base.is_file() and "workload" not in cfg.read_yaml(base)
    refuse(
        earlier,
        f"{folder.name}: was made by an earlier version and cannot be read: its baseline.yaml"
        f" {why}",
    )
    recorded.check_search(folder)
    return folder / "search.yaml"


def load(path: Path, words: Sequence[str] = (), budget: Lines | None = None) -> SearchSpace:
    """Read and check a search file; `words` (`knob=value`) and `budget` override what it says."""
    return parse(read(path), str(path), path.parent, words, budget)


def load_recorded(folder: Path) -> SearchSpace:
    """Return the space of the search in a folder, which may have been recorded with keys that were
    removed since.

    Raises `ConfigError`.
    """
    path = of_search(folder)
    content = cfg.read_yaml(path)
    space = parse(removed.without(content), str(path), folder)
    return dataclasses.replace(
        space, early_stopping=content.get("early_stopping", space.early_stopping)
    )


def read(
    path: Path,
    world_sizes: Sequence[int] = (1,),
    gpu: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> Lines:
    """Return the content of a search file; `say`: called with what was read as something else.

    In a grid `parallel.workers: all` becomes `world_sizes`, those that fit on this machine;
    `parallel.strategy: all` becomes the strategies that share something, `dp` only with a GPU.
    """
    content = {"workload": path.name, **OF_A_WORKLOAD} if is_workload(path) else cfg.read_yaml(path)
    content, notes = foreign.translated(content, str(path))
    for note in notes:
        say(note)
    if "command" in content:  # the package stands on this one
        commands = importlib.import_module("tunediff.command.search")
        content = commands.translated(content, str(path), Path())
    grid = content.get("grid")
    grid = spread(grid, f"{path}: grid") if isinstance(grid, dict) else {}
    strategies = ["ddp", *(["dp"] if gpu else []), "fsdp", "pipeline"]
    for name, values, example in (
        ("workers", world_sizes, "[1, 2, 4]"),
        ("strategy", strategies, "[ddp, fsdp]"),
    ):
        if grid.get(f"parallel.{name}") == "all":
            unknown = f"what a cluster has is not known beforehand; allowed: a list, e.g. {example}"
            refuse(
                not world_sizes,
                f"{path}: grid: parallel.{name}: 'all' is not allowed with --address: {unknown}",
            )
            grid = content["grid"] = {**grid, f"parallel.{name}": list(values)}
    return content


def parse(
    content: Mapping[str, Any],
    source: str,
    folder: Path = Path(),
    words: Sequence[str] = (),
    budget: Lines | None = None,
) -> SearchSpace:
    """Check the content of a search file. Raises `ConfigError` that names file, key, value and the
    allowed values.

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
    metric, cost = _objective(file.objective, workload.objective, f"{source}: objective")
    _check_together(file, kind, metric, cost, source)
    limits = {**file.budget, **(budget or {})}
    search_budget = _budget(limits, source, kind, metric, cost)

    # Dimensions and candidates, the runs of the baseline first
    seeds = tuple(range(baseline.seed, baseline.seed + (file.seeds or 1)))
    cfg.override(baseline, {"seed": seeds[-1]}, where=f"{source}: seeds", check=False)
    runs = listed_runs(file, kind, source, baseline, seeds, metric != RATE)
    most = search_budget.trials
    trials = most if kind == "search" else min(most, len(runs.candidates))
    noise = _noise(file.noise, kind, trials, source)
    first, *others = runs.candidates
    repeats = [{**first, "seed": baseline.seed + number} for number in range(1, noise)]
    candidates = (first, *repeats, *others)[:trials]
    # The baseline's runs and the points under first: have trials that no rerun takes
    reruns = _reruns(file.reruns, kind, cost, trials, trials - len(candidates), source)
    if kind == "search" and len(others) > (left := trials - noise):
        run = f"only {left} of {text.pluralize(len(others), 'point')} run"
        of_all = f"{text.pluralize(trials, 'trial')}, {noise} of them the baseline"
        runs.skipped.append(f"{source}: first: {run}: {of_all}; allowed: more trials")

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
        label=metric.label or metric.name,
        budget=dataclasses.replace(search_budget, trials=trials),
        dimensions=runs.dimensions,
        candidates=candidates,
        rungs=runs.rungs,
        skipped=tuple(runs.skipped),
        seeds=len(seeds),
        noise=noise,
        reruns=reruns,
        confirm=confirm,
        study=table,
    )
    _check_shared(space)
    _check_final(space.final, f"{source}: final", space)
    if space.confirm is not None:
        _check_longer(space.confirm, space)
        _check_final(space.confirm.final, f"{source}: confirm: final", space)
    _check_limits(space, limits, f"{source}: budget")
    _check_seeds(space)
    return space


def _check_seeds(space: SearchSpace) -> None:
    """Raise `ConfigError` unless the seeds of further runs of a configuration are allowed too."""
    last = {"noise": max(space.noise, MOST_RUNS if space.reruns else 1) - 1}
    if space.confirm is not None:
        last["confirm"] = SEED_OFFSET + max(space.confirm.seeds, LONGER_SEEDS) - 1
    for key, distance in last.items():
        seed = space.baseline.seed + distance
        cfg.override(space.baseline, {"seed": seed}, where=f"{space.source}: {key}", check=False)


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


def _reruns(
    value: int | None, kind: str, cost: str | None, trials: int, most: int, source: str
) -> int:
    """Return how many trials of a search repeat what leads, of `most`. `value`: in the file."""
    if value is None:
        drawn = kind == "search" and cost is None
        return min(trials // RERUN_SHARE, most) if drawn and trials >= TRIALS_WITH_RERUNS else 0
    where = f"{source}: reruns: {value} is not allowed"
    refuse(kind != "search", f"{where}: it belongs to search:; allowed: no such line")
    single = "two objectives have no single best"
    refuse(value > 0 and cost is not None, f"{where}: {single}; allowed: 0")
    refuse(value > most, f"{where} with {trials} trials; allowed: 0 to {most}")
    return value


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
    of_file = file.workload is not None and cfg.is_users(file.workload.partition(":")[0])
    more = (
        " (search: may be left out where the workload's Knobs have a Range or a Choice)"
        if of_file
        else ""
    )
    needed = "exactly one of search:, grid:, trials: and ladder: is needed"
    refuse(len(kinds) != 1, f"{source}: {needed}{more}, found {kinds or 'none'}")
    refuse(not getattr(file, kinds[0]), f"{source}: {kinds[0]}: {empty[kinds[0]]}")
    return kinds[0]


def _check_together(
    file: SearchFile, kind: str, metric: Metric, cost: str | None, source: str
) -> None:
    """Raise `ConfigError` for keys that contradict each other."""
    drawn, stops = kind == "search", file.early_stopping != "none"
    stopping, warm = (
        f"early_stopping: {file.early_stopping!r} is not allowed",
        f"{file.warm_start!r} is not allowed",
    )
    rules = {
        f"first: belongs to search:; {kind}: runs its points in order": file.first is not None
        and not drawn,
        f"sampler: {file.sampler!r} is not allowed; {kind}: draws nothing": not drawn
        and file.sampler != "TPESampler",
        f"warm_start: {warm}; it belongs to search:; {kind}: draws nothing": file.warm_start
        is not None
        and not drawn,
        f"{stopping} with two objectives: a trial that is bad in one may be the best in the other;"
        " allowed: none": cost is not None and stops,
        "seeds: belongs to grid:, trials: and ladder:, which repeat each of their points; search:"
        " does not": file.seeds is not None and drawn,
        f"seeds: {stopping}: only whole runs can be compared": file.seeds is not None and stops,
        "confirm: belongs to searches of one seed; seeds: repeats every point already": file.seeds
        is not None
        and file.confirm is not None,
    }
    for why, broken in rules.items():
        refuse(broken, f"{source}: {why}")


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


def _objective(content: Any, own: Metric, where: str) -> tuple[Metric, str | None]:
    """Return the objective, and the name of the second one. Raises `ConfigError`."""
    metrics = {own.name: own, RATE.name: RATE}
    names, costs = ", ".join(metrics), ", ".join(COSTS)
    if isinstance(content, list):
        pair = f"one of {names}, or a list of one of these and one of {costs}"
        fits = len(content) == 2 and content[0] in list(metrics) and content[1] in COSTS
        refuse(not fits, f"{where}: {content!r} is not allowed; allowed: {pair}")
        content = {"metric": content[0], "cost": content[1]}
    if isinstance(content, str):
        content = {"metric": content}
    section = checked(ObjectiveSection, {} if content is None else content, where)
    name = own.name if section.metric is None else section.metric
    refuse(name not in metrics, f"{where}: metric: {name!r} is not allowed; allowed: {names}")
    mode = metrics[name].mode
    refuse(
        section.mode not in (None, mode),
        f"{where}: mode: {section.mode!r} is not allowed for {name}; allowed: {mode}",
    )
    return metrics[name], section.cost


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


def _check_limits(space: SearchSpace, content: Lines, where: str) -> None:
    """Raise `ConfigError` for limits within which no trial could end."""
    limits, per_trial = space.budget, f"per_trial = {content.get('per_trial')!r}"
    per_trial += f", {space.longest_s:g} s for a trial" if limits.unit == "device" else ""
    deadline, total = limits.deadline_s or math.inf, limits.total_s or math.inf
    refuse(
        deadline <= space.longest_s,
        f"{where}: deadline: {content.get('deadline')!r} is not above {per_trial}",
    )
    refuse(
        total < space.longest_s,
        f"{where}: total: {content.get('total')!r} is less than {per_trial}",
    )


def _check_longer(confirm: Confirm, space: SearchSpace) -> None:
    """Raise `ConfigError` unless budgets rise from 1x, and longer ones can be judged."""
    budgets, place = (
        [int(times[:-1]) for times in confirm.budgets],
        f"{space.source}: confirm: budgets",
    )
    rising = budgets[:1] == [1] and budgets == sorted(set(budgets))
    refuse(
        not rising,
        f"{place}: {budgets!r} is not allowed; allowed: rising ones, the first 1x, e.g. [1x, 4x]",
    )
    endless = f"{space.metric} has no curve that goes on; allowed: [1x]"
    refuse(len(budgets) > 1 and not space.evaluates, f"{place}: {endless}")


def _check_shared(space: SearchSpace) -> None:
    """Raise `ConfigError` for seconds and joules of a GPU that several trials share."""
    shared, device = space.trials_per_gpu > 1, space.budget.unit == "device"
    where = f"{space.source}: trials_per_gpu: {space.trials_per_gpu} is not allowed"
    refuse(shared and space.alone, f"{where} with alone: true; allowed: 1")
    priced = space.budget.price_per_device_hour is not None
    refuse(
        shared and (device or priced),
        f"{where} where devices are counted: budget: unit, price_per_device_hour",
    )
    counted = space.cost in ("device_s", "energy_wh", "price") or not space.evaluates
    refuse(
        shared and counted,
        f"{where} for objective: {space.cost or space.metric}: it would be that of several",
    )


def _check_final(knobs: Lines, where: str, space: SearchSpace) -> None:
    """Raise `ConfigError` unless `final:` sets knobs of `evaluation.` outside the protocol only."""
    judged = f"it belongs to searches by {space.workload.objective.name}"
    refuse(
        knobs and not space.evaluates,
        f"{where}: {space.metric} is no judgement of a model; {judged}",
    )
    evaluation = [
        knob for name, knob in space.schema.knobs.items() if name.startswith("evaluation.")
    ]
    allowed = [knob.name for knob in evaluation if not knob.protocol]
    for name in knobs:
        refuse(
            name not in allowed,
            f"{where}: {name}: is not allowed; allowed: {', '.join(allowed) or 'no knob'}",
        )
    cfg.override(space.baseline, knobs, where=where)
