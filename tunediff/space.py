"""A search file, checked against `Config` before anything starts.

One of four forms: `search:` is drawn by Optuna, `grid:` is every combination, `trials:` is a list run in order,
`ladder:` is a list of named changes, tried one on top of the other and each alone. All become the same thing: ordered
`Dimension`s and points to evaluate first. `seeds: N` repeats the points of all but a search with N seeds.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tunediff import config as cfg
from tunediff import study as studies
from tunediff.config import Config, ConfigError, Knob

_PACKAGE = Path(__file__).resolve().parent
# In a checkout the search files lie beside the package; an installed wheel carries them inside it.
SHIPPED = next((d for d in (_PACKAGE.parent / "search_spaces", _PACKAGE / "search_spaces") if d.is_dir()), _PACKAGE)
DEFAULT = "digits.yaml"

KEYS = (
    *("workload", "base", "objective", "budget", "early_stopping", "seed", "seeds"),
    *("fixed", "baseline", "search", "grid", "trials", "ladder", "first"),
    *("fresh", "alone", "operations", "study", "confirm", "final", "warm_start"),
)
FORMS = ("search", "grid", "trials", "ladder")
EARLY_STOPPING = ("none", "asha", "median")
METRICS = {"frechet": "min", "images_per_s": "max"}
COSTS = ("peak_memory_mib", "worker_s")
"""What a second objective may be, kept small: memory of the device, or training seconds times workers (GPU-seconds)."""
MAX_SEEDS = 100
MAX_OPERATIONS = 1000
"""Steps that may be profiled: a profile holds every call of every step in memory."""
DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


class Trial(Protocol):
    """What `Draw` needs of an Optuna trial."""

    def suggest_categorical(self, name: str, choices: Any) -> Any: ...
    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int: ...
    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float: ...


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One searched knob: a choice, or a range of whole or real numbers, and when it applies."""

    name: str
    choices: tuple[Any, ...] | None = None
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    whole: bool = False
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def active(self, values: Mapping[str, Any]) -> bool:
        """Whether it applies, given the knobs suggested before it."""
        return all(name in values and values[name] in allowed for name, allowed in self.when)

    def contains(self, value: Any) -> bool:
        """Whether `value` can be drawn."""
        if self.choices is not None:
            return any(value == choice and type(value) is type(choice) for choice in self.choices)
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        if self.step is None:
            return True
        steps = (value - self.low) / self.step
        return abs(steps - round(steps)) < 1e-9

    def suggest(self, trial: Trial) -> Any:
        """Ask Optuna for a value."""
        if self.choices is not None:
            labels = {_label(choice): choice for choice in self.choices}
            return labels[trial.suggest_categorical(self.name, list(labels))]
        if self.whole:
            step = int(self.step) if self.step is not None else 1
            return trial.suggest_int(self.name, int(self.low), int(self.high), step=step, log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)

    def __str__(self) -> str:
        if self.choices is not None:
            words = "[" + ", ".join(str(choice) for choice in self.choices) + "]"
        else:
            words = f"{self.low:g} … {self.high:g}" + (f" in steps of {self.step:g}" if self.step else "")
            words += " (log)" if self.log else ""
        for name, allowed in self.when:
            words += f" when {name} is {' or '.join(map(str, allowed))}"
        return words


def _label(value: Any) -> Any:
    """Optuna stores None, bool, int, float and str; a list travels as its JSON text."""
    return json.dumps(value) if isinstance(value, list) else value


def to_params(values: Mapping[str, Any]) -> dict[str, Any]:
    """Knob values as Optuna stores them."""
    return {name: _label(value) for name, value in values.items()}


class Draw:
    """The define-by-run function of the space: a module-level class, because Ray Tune pickles it."""

    def __init__(self, dimensions: tuple[Dimension, ...]) -> None:
        self.dimensions = dimensions

    def __call__(self, trial: Trial) -> dict[str, Any]:
        """Suggest every dimension that applies, in file order."""
        values: dict[str, Any] = {}
        for dimension in self.dimensions:
            if dimension.active(values):
                values[dimension.name] = dimension.suggest(trial)
        return values


@dataclasses.dataclass(frozen=True)
class SearchBudget:
    """What a search may spend."""

    per_trial_s: float
    """Training seconds per trial."""
    trials: int
    """Trials in all, the baseline included."""
    total_s: float | None = None
    """Wall-clock of the whole search: no trial starts that is not expected to end within it."""
    compile_charged: bool = True
    """Whether compile seconds count as training seconds."""
    deadline_s: float | None = None
    """Wall-clock after which a single trial is a `timeout`; None: 4 × per_trial_s + 15 minutes."""

    @property
    def trial_deadline_s(self) -> float:
        """Wall-clock after which a trial is given up."""
        return self.deadline_s if self.deadline_s is not None else 4 * self.per_trial_s + 900


@dataclasses.dataclass(frozen=True)
class Rung:
    """One named change of a ladder."""

    name: str
    knobs: dict[str, Any]
    """What it changes."""
    together: dict[str, Any]
    """The point with this change on top of all before it."""
    alone: dict[str, Any] | None
    """The point with this change only; None: it contradicts the baseline."""


@dataclasses.dataclass(frozen=True)
class Confirm:
    """How the finalists of a search are run again."""

    of: int
    """The best so many."""
    seeds: int
    """Runs of each, and of the baseline, on seeds that the search did not use."""
    final: dict[str, Any]
    """Knobs of `evaluation.` for one more evaluation of every finished run; empty: none."""


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """A checked search file."""

    source: str
    baseline: Config
    dimensions: tuple[Dimension, ...]
    points: tuple[dict[str, Any], ...]
    """Evaluated first, the baseline before all; in a grid or a list of trials these are all."""
    kind: str
    """`search`, `grid`, `trials` or `ladder`."""
    budget: SearchBudget
    metric: str = "frechet"
    mode: str = "min"
    cost: str | None = None
    """Second objective, one of `COSTS`: the search then looks for the best trade-offs, not for one winner."""
    early_stopping: str = "none"
    seed: int = 0
    seeds: int = 1
    """Runs of every point, with seeds baseline.seed, +1, …; above 1 the first dimension is the knob `seed`."""
    skipped: tuple[str, ...] = ()
    """Why combinations of a grid or rungs alone are left out: one message for each that contradicts itself."""
    rungs: tuple[Rung, ...] = ()
    """Of a ladder."""
    fresh: bool = False
    """Whether every trial runs in new worker processes."""
    operations: int = 0
    """Steps of every trial that are profiled after its training."""
    study: studies.Study | None = None
    """The table and the figure that it ends with."""
    alone: bool = False
    """Whether one trial has the machine to itself, however many GPUs there are."""
    warm_start: str | None = None
    """Folder of an earlier search whose trials this one knows from the start."""
    confirm: Confirm | None = None
    """How the finalists are run again."""
    final: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Knobs of `evaluation.` for one more evaluation of every finished trial; empty: none."""

    def config(self, values: Mapping[str, Any]) -> Config:
        """The configuration of one drawn point; raises `ConfigError` when its knobs contradict each other."""
        return cfg.override(self.baseline, values, where=self.source)

    def expand(self, point: Mapping[str, Any], where: str) -> dict[str, Any]:
        """A value for every dimension that applies, from `point`, else from the baseline, else the knob's default.

        Optuna would draw what is missing at random. Raises `ConfigError` for a value outside the space.
        """
        given = cfg.override(self.baseline, point, where=where, check=False)
        ours = cfg.flat(given)
        full: dict[str, Any] = {}
        for dimension in self.dimensions:
            if not dimension.active(full):
                if dimension.name in point:
                    needs = " and ".join(f"{n} is {' or '.join(map(str, a))}" for n, a in dimension.when)
                    raise ConfigError(f"{where}: {dimension.name}: {point[dimension.name]!r} applies only when {needs}")
                continue
            value = ours[dimension.name] if dimension.name in ours else cfg.knobs()[dimension.name].default
            if not dimension.contains(value):
                origin = "" if dimension.name in point else ", the baseline's value,"
                raise ConfigError(
                    f"{where}: {dimension.name}: {value!r}{origin} lies outside the space; allowed: {dimension}"
                    + ("" if dimension.name in point else " (add it to the space, or give another under baseline:)")
                )
            full[dimension.name] = value
        if outside := [name for name in point if name not in full]:
            raise ConfigError(f"{where}: {outside[0]}: {point[outside[0]]!r} is not searched; put it under fixed:")
        return full


# ------------------------------------------------------------------------------------------------------------- reading
def find(name: str | None) -> Path:
    """The search file a user means: a path, or the name of a shipped one (`cifar10`, `digits.yaml`)."""
    if name is None:
        return SHIPPED / DEFAULT
    candidates = [Path(name), SHIPPED / name, SHIPPED / f"{name}.yaml"]
    for path in candidates:
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


def load(
    path: Path, overrides: Mapping[str, Any] | None = None, budget: Mapping[str, Any] | None = None
) -> SearchSpace:
    """Read and check a search file. `overrides` go on top of `fixed:`, `budget` on top of `budget:`."""
    return parse(read(path), str(path), path.parent, overrides, budget)


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
    overrides: Mapping[str, Any] | None = None,
    budget: Mapping[str, Any] | None = None,
) -> SearchSpace:
    """Check the content of a search file. Raises `ConfigError` naming file, key, value and what is allowed."""
    for key in content:
        if key not in KEYS:
            raise ConfigError(f"{source}: {key}: no such key; allowed: {', '.join(KEYS)}")
    forms = [form for form in FORMS if form in content]
    if len(forms) != 1:
        raise ConfigError(
            f"{source}: exactly one of search:, grid:, trials: and ladder: is needed, found {forms or 'none'}"
        )
    kind = forms[0]
    baseline = _baseline(content, source, folder, dict(overrides or {}), kind)
    metric, mode, cost = _objective(content.get("objective", "frechet"), source)
    early_stopping = content.get("early_stopping", "none")
    if early_stopping not in EARLY_STOPPING:
        raise ConfigError(
            f"{source}: early_stopping: {early_stopping!r} is not allowed; allowed: {', '.join(EARLY_STOPPING)}"
        )
    if cost is not None and early_stopping != "none":
        raise ConfigError(
            f"{source}: early_stopping: {early_stopping!r} is not allowed with two objectives: a trial that is bad in "
            "one may be the best in the other; allowed: none"
        )
    warm_start = content.get("warm_start")
    if warm_start is not None and (not isinstance(warm_start, str) or kind != "search"):
        why = "the name of an earlier search" if kind == "search" else f"it belongs to search:; {kind}: draws nothing"
        raise ConfigError(f"{source}: warm_start: {warm_start!r} is not allowed; {why}")
    seed = content.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"{source}: seed: {seed!r} is not allowed; allowed: a whole number of at least 0")
    repeats = _repeats(content, source, kind, baseline, early_stopping)
    fresh, operations, study = _how_to_measure(content, source, kind)
    alone = content.get("alone", False)
    if not isinstance(alone, bool):
        raise ConfigError(f"{source}: alone: {alone!r} is not allowed; allowed: true, false")
    final = _final(content.get("final", {}), f"{source}: final", baseline, metric)
    confirm = _confirm(content["confirm"], f"{source}: confirm", baseline, metric) if "confirm" in content else None
    if confirm is not None and "seeds" in content:
        raise ConfigError(f"{source}: confirm: belongs to searches of one seed; seeds: repeats every point already")

    limits = {**_mapping(content.get("budget", {}), f"{source}: budget"), **(budget or {})}
    rungs: list[Rung] = []
    skipped: list[str] = []
    if kind == "trials":
        entries = content["trials"]
        if not isinstance(entries, list) or not entries:
            raise ConfigError(f"{source}: trials: needs a list of points, e.g. - {{precision.amp: bf16}}")
        points = [_point(entry, f"{source}: trials[{i}]") for i, entry in enumerate(entries)]
        named = {f"{source}: trials[{i}]": point for i, point in enumerate(points)}
        dimensions = _dimensions_of_points(named, baseline)
    elif kind == "ladder":
        rungs, skipped = _rungs(content["ladder"], baseline, f"{source}: ladder")
        points = [rung.together for rung in rungs] + [rung.alone for rung in rungs if rung.alone is not None]
        dimensions = _dimensions_of_points(
            {f"{source}: ladder: {rung.name}": rung.together for rung in rungs}, baseline
        )
    else:
        dimensions = _dimensions(content[kind], baseline, f"{source}: {kind}", ranges=kind == "search")
        points = []
        if kind == "search":
            first = content.get("first", [])
            if not isinstance(first, list):
                raise ConfigError(f"{source}: first: needs a list of points, e.g. - {{}}")
            points = [_point(entry, f"{source}: first[{i}]") for i, entry in enumerate(first)]
    if kind != "search" and "first" in content:
        raise ConfigError(f"{source}: first: belongs to search:; {kind}: runs its points in order")

    budget_ = SearchBudget(1, 1)
    space = SearchSpace(source, baseline, dimensions, (), kind, budget_, metric, mode, cost, early_stopping, seed)
    where = "first" if kind == "search" else kind
    full = [space.expand({}, f"{source}: {kind} (baseline)")]
    full += [space.expand(point, f"{source}: {where}[{i}]") for i, point in enumerate(points)]
    if kind == "grid":
        full += _combinations(dimensions)
    rungs = [
        dataclasses.replace(
            rung,
            together=space.expand(rung.together, source),
            alone=None if rung.alone is None else space.expand(rung.alone, source),
        )
        for rung in rungs
    ]
    unique = {json.dumps(point, sort_keys=True, default=list): point for point in full}
    valid = []
    for i, point in enumerate(unique.values()):
        try:
            cfg.override(baseline, point, where=f"{source}: {where}")
            valid.append(point)
        except ConfigError as error:  # a hand-written point must run; a grid may hold impossible corners
            if kind != "grid" or i == 0:
                raise
            skipped.append(str(error))
    if kind == "grid" and metric == "images_per_s":
        valid = _in_warm_order(valid, baseline)
    if len(repeats) > 1:  # seed after seed: what drifts on a shared machine then hits all points alike
        dimensions = (Dimension("seed", choices=repeats), *dimensions)
        valid = [{"seed": repeat, **point} for repeat in repeats for point in valid]
    if metric == "images_per_s" and limits.setdefault("compile", "free") == "charged":
        raise ConfigError(
            f"{source}: budget: compile: 'charged' is not allowed for images_per_s, a rate; allowed: free"
        )
    checked = _budget(limits, source, len(valid) if kind != "search" else None)
    return dataclasses.replace(
        space,
        dimensions=dimensions,
        points=tuple(valid[: checked.trials]),
        budget=checked,
        seeds=len(repeats),
        skipped=tuple(skipped),
        rungs=tuple(rungs),
        fresh=fresh,
        operations=operations,
        study=study,
        alone=alone,
        confirm=confirm,
        final=final,
        warm_start=warm_start,
    )


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: needs `key: value` lines, found {value!r}")
    return value


def _point(entry: Any, where: str) -> dict[str, Any]:
    point = cfg.flatten(_mapping(entry, where))
    for name in point:
        if name not in cfg.knobs():
            raise ConfigError(cfg.unknown_knob(name, where))
    return point


def _baseline(content: Mapping[str, Any], source: str, folder: Path, overrides: dict[str, Any], kind: str) -> Config:
    if ("workload" in content) == ("base" in content):
        raise ConfigError(
            f"{source}: exactly one of workload: ({', '.join(cfg.WORKLOADS)}) and base: (a file) is needed"
        )
    if "workload" in content:
        base = cfg.workload(str(content["workload"]), source)
    else:
        base = cfg.load(folder / str(content["base"]))
    fixed = cfg.flatten(_mapping(content.get("fixed", {}), f"{source}: fixed"))
    searched = content[kind] if isinstance(content[kind], dict) else {}
    for name in [*fixed, *overrides]:
        if name in searched:
            where = f"{source}: fixed" if name in fixed else "command line"
            raise ConfigError(
                f"{where}: {name}: is searched in this file as well; take it out of one of the two, or give the "
                "baseline's value of a searched knob under baseline:"
            )
    starting = cfg.flatten(_mapping(content.get("baseline", {}), f"{source}: baseline"))
    for name in starting:
        if name not in searched:
            raise ConfigError(f"{source}: baseline: {name}: is not searched; put it under fixed:")
    base = cfg.override(base, fixed, where=f"{source}: fixed", check=not (starting or overrides))
    base = cfg.override(base, starting, where=f"{source}: baseline", check=not overrides)
    return cfg.with_absolute_paths(cfg.override(base, overrides, where="command line"))


def _repeats(
    content: Mapping[str, Any], source: str, kind: str, baseline: Config, early_stopping: str
) -> tuple[int, ...]:
    """The seeds that every point is run with."""
    if "seeds" not in content:
        return (baseline.seed,)
    where, number = f"{source}: seeds", content["seeds"]
    if kind == "search":
        raise ConfigError(
            f"{where}: belongs to grid:, trials: and ladder:, which repeat each of their points; search: does not"
        )
    if isinstance(number, bool) or not isinstance(number, int) or not 2 <= number <= MAX_SEEDS:
        raise ConfigError(
            f"{where}: {number!r} is not allowed; allowed: a whole number of at least 2 and at most {MAX_SEEDS}"
        )
    if early_stopping != "none":
        raise ConfigError(
            f"{where}: early_stopping: {early_stopping!r} is not allowed: only whole runs can be compared"
        )
    repeats = tuple(range(baseline.seed, baseline.seed + number))
    cfg.override(baseline, {"seed": repeats[-1]}, where=where, check=False)
    return repeats


def _how_to_measure(content: Mapping[str, Any], source: str, kind: str) -> tuple[bool, int, studies.Study | None]:
    """`fresh:`, `operations:` and `study:`."""
    fresh, operations = content.get("fresh", False), content.get("operations", 0)
    if not isinstance(fresh, bool):
        raise ConfigError(f"{source}: fresh: {fresh!r} is not allowed; allowed: true, false")
    if isinstance(operations, bool) or not isinstance(operations, int) or not 0 <= operations <= MAX_OPERATIONS:
        raise ConfigError(
            f"{source}: operations: {operations!r} is not allowed; allowed: a whole number of at most {MAX_OPERATIONS} "
            "steps to profile, 0: none"
        )
    if "study" not in content:
        return fresh, operations, None
    return fresh, operations, studies.parse(content["study"], source, kind == "ladder", operations)


def _final(value: Any, where: str, baseline: Config, metric: str) -> dict[str, Any]:
    """Knobs of `evaluation.` that define another protocol than the search's."""
    given = _mapping(value, where)
    if given and metric != "frechet":
        raise ConfigError(f"{where}: {metric} is no judgement of images; it belongs to searches by frechet")
    for name in given:
        fixed = ("evaluation.extractor", "evaluation.weights_path", "evaluation.points", "evaluation.validation_images")
        if not str(name).startswith("evaluation.") or name in fixed:
            raise ConfigError(
                f"{where}: {name}: is not allowed; allowed: evaluation.images, .sampler, .steps, .skip, .eta, "
                ".batch_size, .seed"
            )
    cfg.override(baseline, given, where=where)
    return given


def _confirm(value: Any, where: str, baseline: Config, metric: str) -> Confirm:
    """`{of: 3, seeds: 3, final: {evaluation.images: 10000, evaluation.sampler: ddpm}}`"""
    given = _mapping(value, where)
    if unknown := [key for key in given if key not in ("of", "seeds", "final")]:
        raise ConfigError(f"{where}: {unknown[0]}: no such key; allowed: of, seeds, final")
    numbers = {"of": (given.get("of", 3), 1, 20), "seeds": (given.get("seeds", 3), 2, MAX_SEEDS)}
    for key, (number, low, high) in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            raise ConfigError(
                f"{where}: {key}: {number!r} is not allowed; allowed: a whole number of at least {low} and at most "
                f"{high}"
            )
    final = _final(given.get("final", {}), f"{where}: final", baseline, metric)
    return Confirm(numbers["of"][0], numbers["seeds"][0], final)


def _objective(value: Any, source: str) -> tuple[str, str, str | None]:
    """Metric, its direction, and the second objective if there is one."""
    where, cost = f"{source}: objective", None
    if isinstance(value, list):
        if len(value) != 2 or value[0] not in METRICS or value[1] not in COSTS:
            raise ConfigError(
                f"{where}: {value!r} is not allowed; allowed: one of {', '.join(METRICS)}, or a list of one of these "
                f"and one of {', '.join(COSTS)}"
            )
        value, cost = value
    if isinstance(value, str):
        value = {"metric": value}
    value = _mapping(value, where)
    if unknown := [key for key in value if key not in ("metric", "mode")]:
        raise ConfigError(f"{where}: {unknown[0]}: no such key; allowed: metric, mode")
    metric = value.get("metric", "frechet")
    if metric not in METRICS:
        raise ConfigError(f"{where}: metric: {metric!r} is not allowed; allowed: {', '.join(METRICS)}")
    if (mode := value.get("mode", METRICS[metric])) != METRICS[metric]:
        raise ConfigError(f"{where}: mode: {mode!r} is not allowed for {metric}; allowed: {METRICS[metric]}")
    return metric, METRICS[metric], cost


def duration_s(value: Any, where: str) -> float:
    """Seconds of a duration such as 90s, 10m, 1h30m; above 0."""
    match = DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or not any(match.groups()):
        raise ConfigError(
            f"{where}: {value!r} is not a duration; allowed: a number with its unit, e.g. 90s, 10m, 1h30m"
        )
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    if not (total := 3600 * hours + 60 * minutes + seconds) > 0:
        raise ConfigError(f"{where}: {value!r} is empty; allowed: a duration above 0, e.g. 90s")
    return total


def _budget(limits: Mapping[str, Any], source: str, points: int | None) -> SearchBudget:
    where = f"{source}: budget"
    known = ("per_trial", "trials", "total", "compile", "deadline")
    if unknown := [key for key in limits if key not in known]:
        raise ConfigError(f"{where}: {unknown[0]}: no such key; allowed: {', '.join(known)}")
    if "per_trial" not in limits:
        raise ConfigError(f"{where}: per_trial: is missing; training seconds of one trial, e.g. 10m")
    trials = limits.get("trials", points)
    if trials is None:
        raise ConfigError(f"{where}: trials: is missing; how many trials to run, e.g. 40")
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise ConfigError(f"{where}: trials: {trials!r} is not allowed; allowed: a whole number of at least 1")
    compile_ = limits.get("compile", "charged")
    if compile_ not in ("charged", "free"):
        raise ConfigError(f"{where}: compile: {compile_!r} is not allowed; allowed: charged, free")
    durations = {
        key: duration_s(limits[key], f"{where}: {key}") for key in ("per_trial", "total", "deadline") if key in limits
    }
    if "deadline" in durations and durations["deadline"] <= durations["per_trial"]:
        raise ConfigError(f"{where}: deadline: {limits['deadline']!r} is not above per_trial = {limits['per_trial']!r}")
    if durations.get("total", math.inf) < durations["per_trial"]:
        raise ConfigError(f"{where}: total: {limits['total']!r} is less than per_trial = {limits['per_trial']!r}")
    return SearchBudget(
        per_trial_s=durations["per_trial"],
        trials=min(trials, points) if points is not None else trials,
        total_s=durations.get("total"),
        compile_charged=compile_ == "charged",
        deadline_s=durations.get("deadline"),
    )


# ---------------------------------------------------------------------------------------------------------- dimensions
def _dimensions(content: Any, baseline: Config, where: str, ranges: bool) -> tuple[Dimension, ...]:
    found: dict[str, Dimension] = {}
    for name, spec in _mapping(content, where).items():
        found[str(name)] = _dimension(str(name), spec, baseline, f"{where}: {name}", found, ranges)
    if not found:
        raise ConfigError(f"{where}: names no knob; e.g. loader.batch_size: [64, 128, 256]")
    return tuple(found.values())


def _dimension(
    name: str, spec: Any, baseline: Config, where: str, earlier: Mapping[str, Dimension], ranges: bool
) -> Dimension:
    known = cfg.knobs()
    if name not in known:
        raise ConfigError(cfg.unknown_knob(name, where.rpartition(":")[0]))
    knob = known[name]
    if not knob.searchable:
        raise ConfigError(f"{where}: cannot be searched: it {_not_searchable(name)}")
    if isinstance(spec, list):
        spec = {"choice": spec}
    if not isinstance(spec, dict):
        raise ConfigError(f"{where}: {spec!r} is not a space; allowed: a list of choices, or {{low: …, high: …}}")
    keys = ("choice", "low", "high", "step", "log", "when")
    if unknown := [key for key in spec if key not in keys]:
        raise ConfigError(f"{where}: {unknown[0]}: no such key; allowed: {', '.join(keys)}")
    when = _when(spec.get("when", {}), where, earlier)
    _member_has_its_when(knob, dict(when), baseline, where, earlier)

    if "choice" in spec:
        if extra := [key for key in ("low", "high", "step", "log") if key in spec]:
            raise ConfigError(f"{where}: {extra[0]}: belongs to a range, not to a choice")
        choices = spec["choice"]
        if not isinstance(choices, list) or not choices:
            raise ConfigError(f"{where}: {choices!r} is not a list of choices; allowed: {knob.allowed}")
        checked = tuple(_checked(knob, choice, dict(when), baseline, where) for choice in choices)
        if any(a == b and type(a) is type(b) for a, b in itertools.combinations(checked, 2)):
            raise ConfigError(f"{where}: {choices!r} names a choice twice")
        return Dimension(name, choices=checked, when=when)

    if not ranges:
        raise ConfigError(f"{where}: a grid needs a list of choices, not a range")
    if knob.kind not in ("int", "float"):
        raise ConfigError(f"{where}: a range needs a number; {name} is {knob.allowed}: list the choices")
    for key in ("low", "high"):
        if key not in spec:
            raise ConfigError(f"{where}: {key}: is missing; a range is {{low: …, high: …}} with optional step or log")
    low, high = (_checked(knob, spec[key], dict(when), baseline, f"{where}: {key}") for key in ("low", "high"))
    step, log = spec.get("step"), spec.get("log", False)
    if not low < high:
        raise ConfigError(f"{where}: low {low} is not below high {high}")
    if not isinstance(log, bool):
        raise ConfigError(f"{where}: log: {log!r} is not allowed; allowed: true, false")
    if step is not None:
        if isinstance(step, bool) or not isinstance(step, int if knob.kind == "int" else int | float) or not step > 0:
            raise ConfigError(f"{where}: step: {step!r} is not allowed; allowed: {knob.allowed}, above 0")
        if log:
            raise ConfigError(f"{where}: step and log exclude each other")
        steps = (high - low) / step
        if abs(steps - round(steps)) > 1e-9:
            raise ConfigError(f"{where}: step: {step} does not lead from {low} to {high}")
    if log and not low > 0:
        raise ConfigError(f"{where}: log: needs a low above 0, not {low}")
    return Dimension(name, low=low, high=high, step=step, log=log, whole=knob.kind == "int", when=when)


def _not_searchable(name: str) -> str:
    hint = "; to run every point with several seeds, write seeds: 3" if name == "seed" else ""
    return f"must be the same in every trial; put it under fixed:{hint}"


def _when(spec: Any, where: str, earlier: Mapping[str, Dimension]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    conditions = []
    for name, allowed in _mapping(spec, f"{where}: when").items():
        if name not in earlier:
            raise ConfigError(f"{where}: when: {name}: must be a knob searched further up in the file")
        values = tuple(allowed) if isinstance(allowed, list) else (allowed,)
        for value in values:
            if not earlier[name].contains(value):
                raise ConfigError(f"{where}: when: {name}: {value!r} is never drawn; allowed: {earlier[name]}")
        conditions.append((str(name), values))
    return tuple(conditions)


def _having(knob: Knob) -> tuple[str, list[str]] | None:
    """(union, its members that have this knob), or None for a knob that always exists."""
    if knob.member is None:
        return None
    union = knob.member[0]
    return union, [member for member, names in cfg.members()[union].items() if knob.name in names]


def _member_has_its_when(
    knob: Knob, when: Mapping[str, tuple[Any, ...]], baseline: Config, where: str, earlier: Mapping[str, Dimension]
) -> None:
    """A knob of a union member needs a `when` that chooses the member."""
    if (having := _having(knob)) is None:
        return
    union, owners = having
    needed = f"when: {{{union}: [{', '.join(owners)}]}}"
    if union not in earlier:
        if cfg.flat(baseline)[union] not in owners:
            raise ConfigError(
                f"{where}: belongs to {union} = {' or '.join(owners)}, but {union} is {cfg.flat(baseline)[union]} here"
            )
    elif not when.get(union):
        raise ConfigError(f"{where}: belongs to {union} = {' or '.join(owners)}; add {needed}")
    elif wrong := [value for value in when[union] if value not in owners]:
        raise ConfigError(f"{where}: when: {union}: {wrong[0]!r} has no such knob; allowed: {needed}")


def _checked(knob: Knob, value: Any, when: Mapping[str, tuple[Any, ...]], baseline: Config, where: str) -> Any:
    """The value as `Config` stores it; its type and range are checked by `Config` itself."""
    chosen = {name: allowed[0] for name, allowed in when.items()}
    config = cfg.override(baseline, {**chosen, knob.name: value}, where=where, check=False)
    return cfg.flat(config)[knob.name]


def _dimensions_of_points(points: Mapping[str, Mapping[str, Any]], baseline: Config) -> tuple[Dimension, ...]:
    """The smallest space that holds some points: for every knob they name, the values they name.

    The keys of `points` say where each stands in the file.
    """
    configs = [cfg.flat(baseline)]
    for where, point in points.items():
        for name in point:
            if not cfg.knobs()[name].searchable:
                raise ConfigError(f"{where}: {name}: {_not_searchable(name)}")
        configs.append(cfg.flat(cfg.override(baseline, point, where=where)))
    named, unions = dict.fromkeys(name for point in points.values() for name in point), cfg.members()
    dimensions = []
    for name in sorted(named, key=lambda name: name not in unions):  # unions before their members' knobs
        # A point that does not name it has the baseline's value, or the default of its own union member.
        choices = tuple({_label(config[name]): config[name] for config in configs if name in config}.values())
        having = _having(cfg.knobs()[name])
        when = ((having[0], tuple(having[1])),) if having is not None and having[0] in named else ()
        dimensions.append(Dimension(name, choices=choices, when=when))
    return tuple(dimensions)


def _rungs(content: Any, baseline: Config, where: str) -> tuple[list[Rung], list[str]]:
    """The rungs of a ladder, and why some of them cannot stand alone. Points hold only what the rungs name."""
    rungs: list[Rung] = []
    skipped: list[str] = []
    together: dict[str, Any] = {}
    for name, entry in _mapping(content, where).items():
        knobs = _point(entry, f"{where}: {name}")
        if not knobs:
            raise ConfigError(f"{where}: {name}: changes no knob; e.g. {name}: {{precision.amp: bf16}}")
        together = {**together, **knobs}
        # What is on top of the others must run; it is checked when the space is made of these points.
        alone: dict[str, Any] | None = knobs
        try:
            cfg.override(baseline, knobs, where=f"{where}: {name} alone")
        except ConfigError as error:
            alone = None
            skipped.append(str(error))
        rungs.append(Rung(str(name), knobs, together, alone))
    if not rungs:
        raise ConfigError(f"{where}: has no rung; e.g. bf16: {{precision.amp: bf16}}")
    return rungs, skipped


def _in_warm_order(points: list[dict[str, Any]], baseline: Config) -> list[dict[str, Any]]:
    """The baseline first, then by world size and uncompiled before compiled: the fewest new worker groups."""

    def group(point: dict[str, Any]) -> tuple[bool, int, bool]:
        workers = point.get("parallel.workers", baseline.parallel.workers)
        compiled = point.get("compile.mode", baseline.compile.mode) != "none"
        return workers != baseline.parallel.workers, workers, compiled

    return [points[0], *sorted(points[1:], key=group)]


def _combinations(dimensions: tuple[Dimension, ...]) -> Iterator[dict[str, Any]]:
    """Every point of a grid, the last knob varying fastest; a knob that does not apply is left out."""

    def extend(point: dict[str, Any], rest: tuple[Dimension, ...]) -> Iterator[dict[str, Any]]:
        if not rest:
            yield point
            return
        head, *tail = rest
        if not head.active(point):
            yield from extend(point, tuple(tail))
            return
        for choice in head.choices or ():
            yield from extend({**point, head.name: choice}, tuple(tail))

    yield from extend({}, dimensions)


def size(space: SearchSpace) -> float:
    """How many points the space holds; infinite with a real-valued range."""
    if space.kind != "search":
        return len(space.points)
    total = 0.0

    def count(values: dict[str, Any], rest: tuple[Dimension, ...]) -> float:
        if not rest:
            return 1.0
        head, tail = rest[0], rest[1:]
        if not head.active(values):
            return count(values, tail)
        if head.choices is not None:
            matters = any(name == head.name for dimension in tail for name, _ in dimension.when)
            if not matters:
                return len(head.choices) * count(values, tail)
            return sum(count({**values, head.name: choice}, tail) for choice in head.choices)
        if head.step is None and not head.whole:
            return math.inf
        return (round((head.high - head.low) / (head.step or 1)) + 1) * count(values, tail)

    total = count({}, space.dimensions)
    return total
