"""What a search file means: ordered dimensions, configurations to try first, and what may be spent."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Protocol

from annotated_types import Ge, Le

from tunediff import config as cfg
from tunediff import study as studies
from tunediff.config import ConfigError, Metric, Schema, Workload
from tunediff.config.schema import Int, section

MAX_SEEDS = 100
RATE = Metric("images_per_s", "max", "images/s")
"""What any workload can be searched by besides its own objective: it needs no evaluation."""


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
            labels = {as_param(choice): choice for choice in self.choices}
            return labels[trial.suggest_categorical(self.name, list(labels))]
        if self.whole:
            step = int(self.step) if self.step is not None else 1
            return trial.suggest_int(self.name, int(self.low), int(self.high), step=step, log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)

    @property
    def condition(self) -> str:
        """When it applies, in words; '' for always."""
        return " and ".join(f"{name} is {' or '.join(map(str, allowed))}" for name, allowed in self.when)

    def __str__(self) -> str:
        if self.choices is not None:
            words = "[" + ", ".join(str(choice) for choice in self.choices) + "]"
        else:
            words = f"{self.low:g} … {self.high:g}" + (f" in steps of {self.step:g}" if self.step else "")
            words += " (log)" if self.log else ""
        return words + (f" when {self.condition}" if self.when else "")


def as_param(value: Any) -> Any:
    """A value as Optuna stores it. Optuna stores None, bool, int, float and str; a list travels as its JSON text."""
    return json.dumps(value) if isinstance(value, list) else value


def to_params(values: Mapping[str, Any]) -> dict[str, Any]:
    """Knob values as Optuna stores them."""
    return {name: as_param(value) for name, value in values.items()}


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
    """The candidate with this change on top of all before it."""
    alone: dict[str, Any] | None
    """The candidate with this change only; None: it contradicts the baseline."""


@section
class Confirm:
    """How the finalists of a search are run again: `confirm:` of a search file."""

    of: Annotated[Int, Ge(1), Le(20)] = 3
    """The best so many."""
    seeds: Annotated[Int, Ge(2), Le(MAX_SEEDS)] = 3
    """Runs of each, and of the baseline, on seeds that the search did not use."""
    final: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Knobs of `evaluation.` for one more evaluation of every finished run; empty: none."""


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """A checked search file."""

    source: str
    baseline: Any
    """The configuration that everything is compared with; of the workload's own type."""
    objective: Metric
    kind: str
    """`search`, `grid`, `trials` or `ladder`."""
    budget: SearchBudget
    dimensions: tuple[Dimension, ...] = ()
    candidates: tuple[dict[str, Any], ...] = ()
    """Tried first, the baseline before all; all there are unless it is a `search`. Values of all dimensions that apply."""
    cost: str | None = None
    """Second objective: the search then looks for the best trade-offs, not for one winner."""
    early_stopping: str = "none"
    seed: int = 0
    seeds: int = 1
    """Runs of every candidate, with seeds baseline.seed, +1, …; above 1 the first dimension is the knob `seed`."""
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

    @property
    def workload(self) -> Workload:
        """What is trained."""
        return cfg.of(self.baseline)

    @property
    def schema(self) -> Schema:
        """The knobs there are."""
        return cfg.of(self.baseline).schema

    @property
    def metric(self) -> str:
        """Name of what is searched for, as the points of a trial have it."""
        return self.objective.name

    @property
    def mode(self) -> str:
        """`min` or `max`."""
        return self.objective.mode

    @property
    def label(self) -> str:
        """What the metric is called."""
        return self.objective.label or self.objective.name

    @property
    def evaluates(self) -> bool:
        """Whether models are judged, not only their speed."""
        return self.objective != RATE

    def config(self, values: Mapping[str, Any]) -> Any:
        """The configuration of drawn values; raises `ConfigError` when its knobs contradict each other."""
        return cfg.override(self.baseline, values, where=self.source)

    def changed(self, of: Mapping[str, Any] | cfg.Configuration) -> dict[str, Any]:
        """Knobs that differ from the baseline, by dotted name.

        Of a configuration, of drawn values, or of a whole configuration by dotted names, as a record keeps it.
        """
        if isinstance(of, Mapping):
            of = self.config({name: value for name, value in of.items() if name != "workload"})
        return cfg.differences(of, self.baseline)

    def expand(self, point: Mapping[str, Any], where: str) -> dict[str, Any]:
        """A value for every dimension that applies, from `point`, else from the baseline or its union member's default.

        Optuna would draw what is missing at random. Raises `ConfigError` for a value outside the space.
        """
        ours = cfg.flat(cfg.override(self.baseline, point, where=where, check=False))
        full: dict[str, Any] = {}
        for dimension in self.dimensions:
            name, given = dimension.name, dimension.name in point
            if not dimension.active(full):
                if given:
                    raise ConfigError(f"{where}: {name}: {point[name]!r} applies only when {dimension.condition}")
                continue
            value = ours[name]
            if not dimension.contains(value):
                origin = "" if given else ", the baseline's value,"
                hint = "" if given else " (add it to the space, or give another under baseline:)"
                raise ConfigError(f"{where}: {name}: {value!r}{origin} lies outside the space; allowed: {dimension}{hint}")
            full[name] = value
        if outside := [name for name in point if name not in full]:
            raise ConfigError(f"{where}: {outside[0]}: {point[outside[0]]!r} is not searched; put it under fixed:")
        return full


def combinations(dimensions: Sequence[Dimension], values: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Every point of a grid, the last knob varying fastest; a knob that does not apply is left out."""
    values = dict(values or {})
    if not dimensions:
        yield values
        return
    head, *tail = dimensions
    if not head.active(values):
        yield from combinations(tail, values)
        return
    for choice in head.choices or ():
        yield from combinations(tail, {**values, head.name: choice})


def size(space: SearchSpace) -> float:
    """How many points the space holds; infinite with a real-valued range."""
    if space.kind != "search":
        return len(space.candidates)

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

    return count({}, space.dimensions)
