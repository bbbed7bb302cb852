"""What a search file means: ordered dimensions, configurations to try first, and what may be spent."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from tunediff import config as cfg
from tunediff.config import ConfigError, Lines, Metric, Schema, Values, Workload
from tunediff.config.knobs import refuse
from tunediff.core import text
from tunediff.core.clock import UNITS, Budget, Unit, UnitName, own_s
from tunediff.search_space.sections import Confirm, RunOptions
from tunediff.search_space.study import Study

SHOWN = 20
"""Choices that are shown of a knob."""
LONGER_SEEDS = 3
"""Runs of each configuration with a longer budget."""
FIRST_VERDICT = 3
"""Seeds after which confirming runs are looked at for the first time."""
RATE = Metric("samples_per_s", "max", "samples/s")
"""What any workload can be searched by besides its own objective: it needs no evaluation."""


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
            return (type(value), as_param(value)) in self._drawn
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        return self.step is None or abs((steps := (value - self.low) / self.step) - round(steps)) < 1e-9

    @functools.cached_property
    def _drawn(self) -> set[tuple[type, Any]]:
        """The choices; a thousand points need not be compared with a thousand of them."""
        return {(type(choice), as_param(choice)) for choice in self.choices or ()}

    @property
    def size(self) -> float:
        """How many values can be drawn; infinite for real numbers without steps."""
        step = self.step or int(self.whole)
        spaced = round((self.high - self.low) / step) + 1 if step else math.inf
        return spaced if self.choices is None else len(self.choices)

    def suggest(self, trial: Any) -> Any:
        """Ask an Optuna trial for a value."""
        if self.choices is not None:
            labels = {as_param(choice): choice for choice in self.choices}
            return labels[trial.suggest_categorical(self.name, list(labels))]
        if not self.whole:
            return trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)
        return trial.suggest_int(self.name, int(self.low), int(self.high), step=int(self.step or 1), log=self.log)

    @property
    def condition(self) -> str:
        """When it applies, in words; '' for always."""
        return " and ".join(f"{name} is {' or '.join(map(str, allowed))}" for name, allowed in self.when)

    def __str__(self) -> str:
        when = f" when {self.condition}" if self.when else ""
        if self.choices is not None:
            more = f", … ({len(self.choices):,} in all)" * (len(self.choices) > SHOWN)
            return f"[{', '.join(map(str, self.choices[:SHOWN]))}{more}]{when}"
        step = f" in steps of {self.step:g}" if self.step else ""
        return f"{self.low:g} … {self.high:g}{step}{' (log)' if self.log else ''}{when}"


def as_param(value: Any) -> Any:
    """A value as Optuna stores it, which knows no lists: they travel as their JSON text."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def to_params(values: Mapping[str, Any]) -> Values:
    """Knob values as Optuna stores them."""
    return {name: as_param(value) for name, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Draw:
    """The define-by-run function of the space: a module-level class, because Ray Tune pickles it."""

    dimensions: tuple[Dimension, ...]

    def __call__(self, trial: Any) -> Values:
        """Suggest every dimension that applies, in file order."""
        values: Values = {}
        for dimension in self.dimensions:
            if dimension.active(values):
                values[dimension.name] = dimension.suggest(trial)
        return values


@dataclasses.dataclass(frozen=True)
class SearchBudget:
    """What a search may spend."""

    per_trial_s: float
    """Seconds per trial, in `unit`."""
    trials: int
    """Trials in all, the baseline included."""
    total_s: float | None = None
    """Wall-clock of the whole search, confirming runs included: no run starts that is not expected to end within it."""
    compile_charged: bool = True
    """Whether compile seconds count as training seconds."""
    deadline_s: float | None = None
    """Wall-clock after which a single trial is a `timeout`; None: 4 × per_trial_s + 15 minutes."""
    unit: UnitName = "wall"
    """What `per_trial_s` counts: training seconds, or these times the devices of the trial."""
    price_per_device_hour: float | None = None
    """In whatever currency; None: not known."""

    @property
    def clock(self) -> Unit:
        """What curves are compared along."""
        return UNITS[self.unit]

    @property
    def lines(self) -> Lines:
        """`budget:` as a search file has it."""
        seconds = {"per_trial": self.per_trial_s, "total": self.total_s, "deadline": self.deadline_s}
        limits = {name: text.format_exact(value) for name, value in seconds.items() if value is not None}
        charged = "charged" if self.compile_charged else "free"
        priced = {"price_per_device_hour": self.price_per_device_hour} if self.price_per_device_hour else {}
        return {**limits, "trials": self.trials, "compile": charged, "unit": self.unit, **priced}

    def of(self, devices: int) -> Budget:
        """What one trial on so many devices may spend."""
        return Budget(
            own_s(self.per_trial_s, self.unit, devices), compile_charged=self.compile_charged,
            price_per_device_hour=self.price_per_device_hour,
        )  # fmt: skip

    @property
    def trial_deadline_s(self) -> float:
        """Wall-clock after which a trial is given up."""
        return self.deadline_s if self.deadline_s is not None else 4 * self.per_trial_s + 900


@dataclasses.dataclass(frozen=True)
class Rung:
    """One named change of a ladder."""

    name: str
    knobs: Values
    """What it changes."""
    together: Values
    """The candidate with this change on top of all before it."""
    alone: Values | None
    """The candidate with this change only; None: it contradicts the baseline."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSpace(RunOptions):
    """A checked search file."""

    source: str
    baseline: Any
    """The configuration that everything is compared with, of the workload's own type."""
    kind: str
    """`search`, `grid`, `trials` or `ladder`."""
    budget: SearchBudget
    metric: str
    """What is searched for, as the points of a trial have it."""
    mode: Literal["min", "max"]
    label: str
    """What the metric is called."""
    cost: str | None = None
    """Second objective: the search then looks for the best trade-offs, not for one winner."""
    dimensions: tuple[Dimension, ...] = ()
    candidates: tuple[Values, ...] = ()
    """Tried first, the baseline before all; in all forms but `search` there are no others."""
    seeds: int = 1
    """Runs of every candidate, with seeds baseline.seed, +1, …; above 1 the first dimension is the knob `seed`."""
    noise: int = 1
    """Runs of the baseline in a `search`: candidates 1, 2, … repeat it with seeds baseline.seed+1, +2, …, a knob that
    no dimension draws. What they differ by is the noise of one run."""
    skipped: tuple[str, ...] = ()
    """Why combinations of a grid or rungs alone are left out: one message for each that contradicts itself."""
    rungs: tuple[Rung, ...] = ()
    """Of a ladder."""
    study: Study | None = None
    """The table and the figure that it ends with."""
    confirm: Confirm | None = None
    """How the finalists are run again."""

    @property
    def schema(self) -> Schema:
        """The knobs there are."""
        return cast(Schema, self.baseline.schema)

    @property
    def workload(self) -> Workload:
        """What is trained."""
        return cfg.of(self.baseline)

    @property
    def longest_s(self) -> float:
        """Training seconds of a trial at most: those of the fewest devices that one may have."""
        fewest = int(self.baseline.devices)
        for one in (dimension for dimension in self.dimensions if dimension.name == "parallel.workers"):
            fewest = min(fewest, *map(int, one.choices or [one.low]))
        return own_s(self.budget.per_trial_s, self.budget.unit, fewest)

    @property
    def finalists(self) -> int:
        """Configurations that run again beside the baseline, at most; 0 where there is only the baseline."""
        return 0 if self.confirm is None else max(0, min(self.confirm.of, self.budget.trials - self.noise))

    @property
    def confirming_reserve(self) -> int:
        """Confirming runs that trials leave time for within `budget: total`: those of a first verdict."""
        return (self.finalists + 1) * FIRST_VERDICT if self.finalists else 0

    @property
    def again(self) -> list[tuple[int, float]]:
        """The most confirming runs there may be, and seconds of each in the budget's unit: the search's, then more."""
        if (confirm := self.confirm) is None or not self.finalists:
            return []
        runs = [confirm.seeds, *[LONGER_SEEDS] * (len(confirm.budgets) - 1)]
        times = [int(budget.removesuffix("x")) for budget in confirm.budgets]
        each_s = self.budget.per_trial_s
        return [((self.finalists + 1) * seeds, each_s * more) for seeds, more in zip(runs, times, strict=True)]

    @property
    def evaluates(self) -> bool:
        """Whether models are judged, not only their speed."""
        return self.metric != RATE.name

    def config(self, values: Mapping[str, Any]) -> Any:
        """The configuration of drawn values; raises `ConfigError` when its knobs contradict each other."""
        return cfg.override(self.baseline, values, where=self.source)

    def changed(self, of: Mapping[str, Any] | cfg.Configuration) -> Values:
        """Which knobs of a configuration, or which of these values by dotted name, differ from the baseline."""
        return cfg.differences(of, self.baseline)

    def expand(self, point: Mapping[str, Any], where: str) -> Values:
        """A value for every dimension that applies, from `point`, else from the baseline or its union member's default.

        Optuna would draw what is missing at random. Raises `ConfigError` for a value outside the space.
        """
        ours = cfg.flat(cfg.override(self.baseline, point, where=where, check=False))
        full: Values = {}
        for dimension in self.dimensions:
            name, given, value = dimension.name, dimension.name in point, ours.get(dimension.name)
            if not dimension.active(full):
                refuse(given, f"{where}: {name}: {point.get(name)!r} applies only when {dimension.condition}")
                continue
            if not dimension.contains(value):  # only then in words: there may be thousands of points and choices
                whose = "" if given else ", the baseline's value,"
                hint = "" if given else " (add it to the space, or give another under baseline:)"
                outside = f"{value!r}{whose} lies outside the space; allowed: {dimension}{hint}"
                raise ConfigError(f"{where}: {name}: {outside}")
            full[name] = value
        for name in point:
            refuse(name not in full, f"{where}: {name}: {point[name]!r} is not searched; put it under fixed:")
        return full


def combinations(dimensions: Sequence[Dimension]) -> list[Values]:
    """Every point of a grid, the last knob varying fastest; a knob that does not apply is left out."""
    points: list[Values] = [{}]
    for dimension in dimensions:
        drawn: list[Values] = [{dimension.name: choice} for choice in dimension.choices or ()]
        points = [point | one for point in points for one in (drawn if dimension.active(point) else [{}])]
    return points


def count(dimensions: Sequence[Dimension]) -> float:
    """How many points there are, none of which is made; infinite with a real-valued range that may apply.

    Points are counted by which conditions of later dimensions they meet: all that counting needs to know of them.
    """
    counts: dict[frozenset[Any], float] = {frozenset(): 1}
    for i, head in enumerate(dimensions):
        asked = {condition for later in dimensions[i + 1 :] for condition in later.when}
        here, after = [one for one in asked if one[0] == head.name], collections.defaultdict[frozenset[Any], float](int)
        for met, points in counts.items():
            if not met.issuperset(head.when):
                after[met & asked] += points
            elif head.choices is None or not here:
                after[met & asked] += points * head.size
            else:
                for choice in head.choices:
                    after[met & asked | {one for one in here if choice in one[1]}] += points
        counts = after
    return sum(counts.values())


def size(space: SearchSpace) -> float:
    """How many points the space holds; infinite with a real-valued range."""
    return count(space.dimensions) if space.kind == "search" else len(space.candidates)
