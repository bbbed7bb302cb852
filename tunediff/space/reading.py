"""A search file: found, read, and checked as a whole before anything starts.

One of four forms: `search:` is drawn by Optuna, `grid:` is every combination, `trials:` is a list run in order,
`ladder:` is a list of named changes, tried one on top of the other and each alone. All become the same thing: ordered
dimensions and candidates to try first. `seeds: N` repeats the candidates of all but a search with N seeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff import study as studies
from tunediff.config import ConfigError, Metric
from tunediff.space.candidates import planned, repeated
from tunediff.space.model import RATE, Confirm, SearchBudget, SearchSpace
from tunediff.space.sections import COSTS, FORMS, Budget, File, Objective, checked

_PACKAGE = Path(__file__).resolve().parents[1]
# In a checkout the search files lie beside the package; an installed wheel carries them inside it.
SHIPPED = next((d for d in (_PACKAGE.parent / "search_spaces", _PACKAGE / "search_spaces") if d.is_dir()), _PACKAGE)
DEFAULT = "digits.yaml"


def find(name: str | None) -> Path:
    """The search file a user means: a path, or the name of a shipped one (`cifar10`, `digits.yaml`)."""
    if name is None:
        return SHIPPED / DEFAULT
    for path in (Path(name), SHIPPED / name, SHIPPED / f"{name}.yaml"):
        if path.is_file():
            return path
    shipped = ", ".join(sorted(str(p.relative_to(SHIPPED)) for p in SHIPPED.rglob("*.yaml")))
    raise ConfigError(f"{name}: no such search file; shipped: {shipped}")


def of_search(folder: Path) -> Path:
    """The search file kept in the folder of a search. Raises `ConfigError` if it is none, naming those there are."""
    if not (folder / "search.yaml").is_file():
        found = sorted(path.parent.name for path in folder.parent.glob("*/search.yaml"))
        raise ConfigError(f"{folder.name}: no such search in {folder.parent}; there are: {', '.join(found) or 'none'}")
    return folder / "search.yaml"


def load(path: Path, words: Sequence[str] = (), budget: Mapping[str, Any] | None = None) -> SearchSpace:
    """Read and check a search file. `words` (`knob=value`) go on top of `fixed:`, `budget` on top of `budget:`."""
    return parse(read(path), str(path), path.parent, words, budget)


def read(path: Path, world_sizes: Sequence[int] = (1,)) -> dict[str, Any]:
    """The content of a search file; `parallel.workers: all` in a grid becomes `world_sizes`, those that fit here."""
    content = cfg.read_yaml(path)
    grid = content.get("grid")
    if isinstance(grid, dict) and grid.get("parallel.workers") == "all":
        if not world_sizes:
            raise ConfigError(
                f"{path}: grid: parallel.workers: 'all' is not allowed with --address: what a cluster has is not known "
                "beforehand; allowed: a list of world sizes, e.g. [1, 2, 4]"
            )
        content["grid"] = {**grid, "parallel.workers": list(world_sizes)}
    return content


def parse(
    content: Mapping[str, Any],
    source: str,
    folder: Path = Path(),
    words: Sequence[str] = (),
    budget: Mapping[str, Any] | None = None,
) -> SearchSpace:
    """Check the content of a search file. Raises `ConfigError` naming file, key, value and what is allowed."""
    file = checked(File, dict(content), source)
    kind = _kind(file, source)
    baseline = _baseline(file, kind, source, folder, words)
    objective, cost = _objective(file.objective, cfg.of(baseline).objective, f"{source}: objective")
    _check_together(file, kind, cost, source)
    space = SearchSpace(
        source, baseline, objective, kind, _budget({**file.budget, **(budget or {})}, source, kind, objective),
        cost=cost, early_stopping=file.early_stopping, seed=file.seed, fresh=file.fresh, operations=file.operations,
        alone=file.alone, warm_start=file.warm_start,
    )  # fmt: skip
    confirm = None
    if file.confirm is not None:
        confirm = checked(Confirm, file.confirm, f"{source}: confirm")
        _check_final(confirm.final, f"{source}: confirm: final", space)
    _check_final(file.final, f"{source}: final", space)
    study = None
    if file.study is not None:
        study = studies.parse(file.study, source, kind == "ladder", file.operations)
    seeds = tuple(range(baseline.seed, baseline.seed + (file.seeds or 1)))
    cfg.override(baseline, {"seed": seeds[-1]}, where=f"{source}: seeds", check=False)

    space = repeated(planned(space, file), seeds)
    trials = space.budget.trials if kind == "search" else min(space.budget.trials, len(space.candidates))
    limits = dataclasses.replace(space.budget, trials=trials)
    candidates = space.candidates[:trials]
    return dataclasses.replace(
        space, candidates=candidates, budget=limits, confirm=confirm, final=file.final, study=study
    )


def _kind(file: File, source: str) -> str:
    """Which of the four forms it is."""
    forms = [form for form in FORMS if getattr(file, form) is not None]
    if len(forms) != 1:
        needed = "exactly one of search:, grid:, trials: and ladder: is needed"
        raise ConfigError(f"{source}: {needed}, found {forms or 'none'}")
    return forms[0]


def _check_together(file: File, kind: str, cost: str | None, source: str) -> None:
    """Keys that contradict each other."""
    stopping = f"early_stopping: {file.early_stopping!r} is not allowed"
    if kind != "search" and file.first is not None:
        raise ConfigError(f"{source}: first: belongs to search:; {kind}: runs its points in order")
    if kind != "search" and file.warm_start is not None:
        why = f"it belongs to search:; {kind}: draws nothing"
        raise ConfigError(f"{source}: warm_start: {file.warm_start!r} is not allowed; {why}")
    if cost is not None and file.early_stopping != "none":
        why = "a trial that is bad in one may be the best in the other"
        raise ConfigError(f"{source}: {stopping} with two objectives: {why}; allowed: none")
    if file.seeds is None:
        return
    if kind == "search":
        why = "belongs to grid:, trials: and ladder:, which repeat each of their points; search: does not"
        raise ConfigError(f"{source}: seeds: {why}")
    if file.early_stopping != "none":
        raise ConfigError(f"{source}: seeds: {stopping}: only whole runs can be compared")
    if file.confirm is not None:
        raise ConfigError(f"{source}: confirm: belongs to searches of one seed; seeds: repeats every point already")


def _baseline(file: File, kind: str, source: str, folder: Path, words: Sequence[str]) -> Any:
    """The configuration that a search starts from."""
    if (file.workload is None) == (file.base is None):
        names = ", ".join(cfg.baseline_names())
        raise ConfigError(f"{source}: exactly one of workload: ({names}) and base: (a file) is needed")
    base = cfg.load(folder / str(file.base)) if file.workload is None else cfg.baseline(file.workload, source)
    overrides = cfg.parse_overrides(list(words), base.schema)
    fixed, starting = cfg.flatten(file.fixed), cfg.flatten(file.baseline)
    searched = file.search or file.grid or {}
    for name in [*fixed, *overrides]:
        if name in searched:
            where = f"{source}: fixed" if name in fixed else "command line"
            raise ConfigError(
                f"{where}: {name}: is searched in this file as well; take it out of one of the two, or give the "
                "baseline's value of a searched knob under baseline:"
            )
    for name in starting:
        if name not in searched:
            raise ConfigError(f"{source}: baseline: {name}: is not searched; put it under fixed:")
    base = cfg.override(base, fixed, where=f"{source}: fixed", check=not (starting or overrides))
    base = cfg.override(base, starting, where=f"{source}: baseline", check=not overrides)
    return cfg.with_absolute_paths(cfg.override(base, overrides, where="command line"))


def _objective(given: Any, own: Metric, where: str) -> tuple[Metric, str | None]:
    """What is searched for, and the second objective if there is one."""
    known, cost = {own.name: own, RATE.name: RATE}, None
    names = ", ".join(known)
    if given is None:
        return own, None
    if isinstance(given, list):
        if len(given) != 2 or given[0] not in list(known) or given[1] not in COSTS:
            allowed = f"one of {names}, or a list of one of these and one of {', '.join(COSTS)}"
            raise ConfigError(f"{where}: {given!r} is not allowed; allowed: {allowed}")
        given, cost = given
    asked = checked(Objective, {"metric": given} if isinstance(given, str) else given, where)
    if (found := known.get(asked.metric or own.name)) is None:
        raise ConfigError(f"{where}: metric: {asked.metric!r} is not allowed; allowed: {names}")
    if asked.mode not in (None, found.mode):
        raise ConfigError(f"{where}: mode: {asked.mode!r} is not allowed for {found.name}; allowed: {found.mode}")
    return found, cost


def _budget(given: Mapping[str, Any], source: str, kind: str, objective: Metric) -> SearchBudget:
    where = f"{source}: budget"
    limits = checked(Budget, given, where)
    if limits.trials is None and kind == "search":
        raise ConfigError(f"{where}: trials: is missing; how many trials to run, e.g. 40")
    per_trial = f"per_trial = {given['per_trial']!r}"
    if limits.deadline is not None and limits.deadline <= limits.per_trial:
        raise ConfigError(f"{where}: deadline: {given['deadline']!r} is not above {per_trial}")
    if limits.total is not None and limits.total < limits.per_trial:
        raise ConfigError(f"{where}: total: {given['total']!r} is less than {per_trial}")
    if objective == RATE and limits.compile == "charged":
        raise ConfigError(f"{where}: compile: 'charged' is not allowed for {RATE.name}, a rate; allowed: free")
    charged = objective != RATE and limits.compile != "free"
    trials = limits.trials if limits.trials is not None else 10**9
    return SearchBudget(limits.per_trial, trials, limits.total, charged, limits.deadline)


def _check_final(given: Mapping[str, Any], where: str, space: SearchSpace) -> None:
    """Knobs of `evaluation.` that define another protocol than the search's, on the same ruler."""
    own = cfg.of(space.baseline).objective.name
    if given and not space.evaluates:
        raise ConfigError(f"{where}: {space.metric} is no judgement of a model; it belongs to searches by {own}")
    knobs = space.schema.knobs.values()
    allowed = [knob.name for knob in knobs if knob.name.startswith("evaluation.") and not knob.ruler]
    for name in given:
        if name not in allowed:
            raise ConfigError(f"{where}: {name}: is not allowed; allowed: {', '.join(allowed) or 'no knob'}")
    cfg.override(space.baseline, given, where=where)
