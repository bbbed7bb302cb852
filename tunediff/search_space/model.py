"""Define what a search file means: ordered dimensions, candidates to try first, and the budget."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, cast

from tunediff import config as cfg
from tunediff.config import ConfigError, Lines, Metric, Schema, Values, Workload
from tunediff.config.knobs import refuse
from tunediff.core import text
from tunediff.core.clock import UNITS, Budget, Unit, UnitName, own_s
from tunediff.search_space.sections import Confirm, RunOptions
from tunediff.search_space.study import Study

SHOWN = 20
"""Most choices of a knob that are shown."""
LONGER_SEEDS = 3
"""Runs of each configuration with a longer budget."""
SEED_OFFSET = 1000
"""Offset from the baseline's seed to the first confirming seed, and from there to that of each
further confirmation: no trial of the search may have used these seeds."""
PAIR_SEED_OFFSET = SEED_OFFSET // 2
"""Offset to the first seed of a comparison of two configurations, which may be confirmed ones."""
FIRST_VERDICT = 3
"""Number of seeds after which the confirming runs are tested for the first time."""
MOST_RUNS = 3
"""Runs of a configuration that leads a search, the first included, before finalists are chosen."""
RATE = Metric("samples_per_s", "max", "samples/s")
"""The objective that every workload has besides its own: it needs no evaluation."""


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One searched knob: choices, or a range of numbers, and the condition under which it
    applies."""

    name: str
    choices: tuple[Any, ...] | None = None
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    whole: bool = False
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def active(self, values: Mapping[str, Any]) -> bool:
        """Return whether it applies, by the values of the knobs before it."""
        return all(name in values and values[name] in allowed for name, allowed in self.when)

    def contains(self, value: Any) -> bool:
        """Return whether `value` can be drawn."""
        if self.choices is not None:
            return (type(value), as_param(value)) in self._drawn
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not self.low <= value <= self.high
        ):
            return False
        step = self.step or int(self.whole)
        return not step or abs((steps := (value - self.low) / step) - round(steps)) < 1e-9

    @functools.cached_property
    def _drawn(self) -> set[tuple[type, Any]]:
        """Return the choices as a set: a thousand points may be checked against a thousand."""
        return {(type(choice), as_param(choice)) for choice in self.choices or ()}

    @functools.cached_property
    def conditions(self) -> frozenset[tuple[str, frozenset[Any]]]:
        """Return the conditions of `when` with values as Optuna stores them: hashable."""
        return frozenset((name, frozenset(map(as_param, allowed))) for name, allowed in self.when)

    @property
    def size(self) -> float:
        """Return how many values can be drawn; infinite for real numbers without steps."""
        step = self.step or int(self.whole)
        spaced = round((self.high - self.low) / step) + 1 if step else math.inf
        return spaced if self.choices is None else len(self.choices)

    def suggest(self, trial: Any) -> Any:
        """Draw a value with an Optuna trial."""
        if self.choices is not None:
            labels = {as_param(choice): choice for choice in self.choices}
            return labels[trial.suggest_categorical(self.name, list(labels))]
        if not self.whole:
            value = trial.suggest_float(
                self.name, self.low, self.high, step=self.step, log=self.log
            )
            if self.step is None:
                return value
            low, step = Decimal(str(self.low)), Decimal(str(self.step))
            # 0.3, as a file lists it: Optuna's sum is 0.30000000000000004.
            return min(self.high, float(low + round((value - self.low) / self.step) * step))
        return trial.suggest_int(
            self.name, int(self.low), int(self.high), step=int(self.step or 1), log=self.log
        )

    @property
    def condition(self) -> str:
        """Return in words when it applies; '' for always."""
        return " and ".join(
            f"{name} is {' or '.join(map(str, allowed))}" for name, allowed in self.when
        )

    def __str__(self) -> str:
        when = f" when {self.condition}" if self.when else ""
        if self.choices is not None:
            more = f", … ({len(self.choices):,} in all)" * (len(self.choices) > SHOWN)
            return f"[{', '.join(map(str, self.choices[:SHOWN]))}{more}]{when}"
        step = f" in steps of {self.step:g}" if self.step else ""
        return f"{self.low:g} … {self.high:g}{step}{' (log)' if self.log else ''}{when}"


def as_param(value: Any) -> Any:
    """Return a value as Optuna stores it: lists as their JSON text, because Optuna has no lists."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def to_params(values: Mapping[str, Any]) -> Values:
    """Return knob values as Optuna stores them."""
    return {name: as_param(value) for name, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Draw:
    """The define-by-run function of the space; a class, because Ray Tune pickles it."""

    dimensions: tuple[Dimension, ...]

    def __call__(self, trial: Any) -> Values:
        """Draw a value for every dimension that applies, in the order of the file."""
        values: Values = {}
        for dimension in self.dimensions:
            if dimension.active(values):
                values[dimension.name] = dimension.suggest(trial)
        return values


LONGEST_BY_SAMPLES_S = 30 * 86400.0
"""Deadline of a trial whose samples end it."""


@dataclasses.dataclass(frozen=True)
class SearchBudget:
    """The budget of a search: seconds per trial, number of trials, wall-clock."""

    per_trial_s: float
    """Seconds per trial, in `unit`."""
    trials: int
    """Trials in all, the baseline included."""
    total_s: float | None = None
    """Wall-clock of the whole search, confirming runs included: a run starts only if it is expected
    to end in time."""
    compile_charged: bool = True
    """Whether compile seconds count as training seconds."""
    deadline_s: float | None = None
    """Wall-clock after which a trial ends as `timeout`; None: 4 × per_trial_s + 15 minutes, and
    evaluations do not count."""
    unit: UnitName = "wall"
    """Unit of `per_trial_s`: training seconds, or training seconds × devices of the trial."""
    price_per_device_hour: float | None = None
    """Price of one hour of one device, in any currency; None: not known."""
    setup_charged: bool = False
    """Whether what a workload does before its first batch counts as training seconds."""
    samples: int | None = None
    """Training samples of a trial, in the place of seconds, for comparisons at equal steps."""

    @property
    def clock(self) -> Unit:
        """Return the unit along which curves are compared."""
        return UNITS[self.unit]

    @property
    def lines(self) -> Lines:
        """Return the section `budget:` of a search file."""
        seconds = {
            "per_trial": self.per_trial_s,
            "total": self.total_s,
            "deadline": self.deadline_s,
        }
        limits = {
            name: text.format_exact(value) for name, value in seconds.items() if value is not None
        }
        charged = "charged" if self.compile_charged else "free"
        setup = {"setup": "charged"} if self.setup_charged else {}
        priced = (
            {"price_per_device_hour": self.price_per_device_hour}
            if self.price_per_device_hour
            else {}
        )
        return {
            **limits,
            "trials": self.trials,
            "compile": charged,
            **setup,
            "unit": self.unit,
            **priced,
        }

    def of(self, devices: int) -> Budget:
        """Return the budget of one trial on `devices` devices."""
        return Budget(
            own_s(self.per_trial_s, self.unit, devices) if self.samples is None else None,
            self.samples,
            compile_charged=self.compile_charged,
            setup_charged=self.setup_charged,
            price_per_device_hour=self.price_per_device_hour,
        )

    @property
    def trial_deadline_s(self) -> float:
        """Return the wall-clock after which a trial is stopped; by samples it takes what it
        takes."""
        if self.samples is not None:
            return LONGEST_BY_SAMPLES_S
        return self.deadline_s if self.deadline_s is not None else 4 * self.per_trial_s + 900


@dataclasses.dataclass(frozen=True)
class Rung:
    """One named change of a ladder."""

    name: str
    knobs: Values
    """The knobs that it changes."""
    together: Values
    """The candidate with this change and all changes before it."""
    alone: Values | None
    """The candidate with only this change; None: it contradicts the baseline."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSpace(RunOptions):
    """A search file after all checks."""

    source: str
    baseline: Any
    """The configuration with which all others are compared, of the workload's own type."""
    kind: str
    """`search`, `grid`, `trials` or `ladder`."""
    budget: SearchBudget
    metric: str
    """The objective, by its name in the points of a trial."""
    mode: Literal["min", "max"]
    label: str
    """Label of the metric."""
    cost: str | None = None
    """Second objective: the search then returns the best trade-offs instead of one winner."""
    dimensions: tuple[Dimension, ...] = ()
    candidates: tuple[Values, ...] = ()
    """Drawn values to try first, the baseline's before others; all of them but in a `search`."""
    seeds: int = 1
    """Runs of every candidate, with seeds baseline.seed, +1, …; above 1 the first dimension is the
    knob `seed`."""
    noise: int = 1
    """Runs of the baseline in a `search`: candidates 1, 2, … repeat it with seeds baseline.seed+1,
    +2, …; no dimension draws the seed. The differences between these runs give the noise of one
    run."""
    reruns: int = 0
    """Trials of a `search`, its last ones, that run leading configurations again on other seeds."""
    skipped: tuple[str, ...] = ()
    """What does not run, and why: combinations of a grid, single rungs, points beyond the
    trials."""
    rungs: tuple[Rung, ...] = ()
    """The rungs of a ladder."""
    study: Study | None = None
    """The table and the figure at its end."""
    confirm: Confirm | None = None
    """How the finalists run again."""

    @property
    def schema(self) -> Schema:
        return cast(Schema, self.baseline.schema)

    @property
    def workload(self) -> Workload:
        return cfg.of(self.baseline)

    @property
    def longest_s(self) -> float:
        """Return the most training seconds of a trial: those on the fewest devices."""
        fewest = int(self.baseline.devices)
        for dimension in self.dimensions:
            if dimension.name != "parallel.workers":
                continue
            fewest = min(fewest, *map(int, dimension.choices or [dimension.low]))
        return own_s(self.budget.per_trial_s, self.budget.unit, fewest)

    @property
    def finalists(self) -> int:
        """Return the most configurations that are confirmed besides the baseline."""
        return (
            0
            if self.confirm is None
            else max(0, min(self.confirm.of, self.budget.trials - self.noise))
        )

    @property
    def confirming_reserve(self) -> int:
        """Return the confirming runs for which `budget: total` has room: those of a first
        verdict."""
        return (self.finalists + 1) * FIRST_VERDICT if self.finalists else 0

    @property
    def again(self) -> list[tuple[int, float]]:
        """Return the most confirming runs and the seconds of each, for every budget of `confirm:`.

        The search's own budget comes first, then the longer ones.
        """
        if (confirm := self.confirm) is None or not self.finalists:
            return []
        runs = [confirm.seeds, *[LONGER_SEEDS] * (len(confirm.budgets) - 1)]
        times = [int(budget.removesuffix("x")) for budget in confirm.budgets]
        each_s = self.budget.per_trial_s
        return [
            ((self.finalists + 1) * seeds, each_s * more)
            for seeds, more in zip(runs, times, strict=True)
        ]

    @property
    def evaluates(self) -> bool:
        """Return whether models are evaluated, rather than only timed."""
        return self.metric != RATE.name

    def config(self, values: Mapping[str, Any]) -> Any:
        """Return the configuration of drawn values. Raises `ConfigError` if they contradict."""
        return cfg.override(self.baseline, values, where=self.source)

    def changed(self, of: Mapping[str, Any] | cfg.Configuration) -> Values:
        """Return the knobs, of a configuration or dotted values, that differ from the baseline."""
        return cfg.differences(of, self.baseline)

    def is_baseline(self, drawn: Mapping[str, Any]) -> bool:
        """Return whether drawn values are the baseline's, on any seed."""
        return not self.changed({name: drawn[name] for name in drawn if name != "seed"})

    def expand(self, point: Mapping[str, Any], where: str) -> Values:
        """Return a value for every dimension that applies; see `complete`."""
        return complete(self.dimensions, self.baseline, point, where)


def complete(
    dimensions: Sequence[Dimension], baseline: Any, point: Mapping[str, Any], where: str
) -> Values:
    """Return a value for every dimension that applies: of `point`, the baseline, or the union
    member's default.

    Without that, Optuna would draw missing values at random. Raises `ConfigError` for a value
    outside the space.
    """
    values = cfg.flat(cfg.override(baseline, point, where=where, check=False))
    full: Values = {}
    for dimension in dimensions:
        name = dimension.name
        if not dimension.active(full):
            applies = f"applies only when {dimension.condition}"
            refuse(name in point, f"{where}: {name}: {point.get(name)!r} {applies}")
            continue
        # Format only on error: there may be thousands of points and choices
        if not dimension.contains(value := values.get(name)):
            whose, hint = "", ""
            if name not in point:
                whose = ", the baseline's value,"
                hint = " (add it to the space, or give another under baseline:)"
            outside = f"{value!r}{whose} lies outside the space; allowed: {dimension}{hint}"
            raise ConfigError(f"{where}: {name}: {outside}")
        full[name] = value
    for name in point:
        why = f"{where}: {name}: {point[name]!r} is not searched; put it under fixed:"
        refuse(name not in full, why)
    return full


def combinations(dimensions: Sequence[Dimension]) -> list[Values]:
    """Return every point of a grid, the last knob varying fastest, without knobs that do not
    apply."""
    points: list[Values] = [{}]
    for dimension in dimensions:
        drawn: list[Values] = [{dimension.name: choice} for choice in dimension.choices or ()]
        points = [
            point | choice
            for point in points
            for choice in (drawn if dimension.active(point) else [{}])
        ]
    return points


def count(dimensions: Sequence[Dimension]) -> float:
    """Return how many points there are; infinite with a real-valued range."""

    @functools.cache
    def points(i: int, met: frozenset[Any]) -> float:
        """Count the points of dimensions i, i + 1, …, of whose conditions those in `met` hold."""
        if i == len(dimensions):
            return 1
        head, conditions = (
            dimensions[i],
            {condition for later in dimensions[i + 1 :] for condition in later.conditions},
        )
        if not met.issuperset(head.conditions):
            return points(i + 1, met & conditions)
        # Values that meet the same conditions count alike, as do all those of a range that no
        # condition names
        own = [condition for condition in conditions if condition[0] == head.name]
        named = {value for _, allowed in own for value in allowed}
        values = named if head.choices is None else {as_param(choice) for choice in head.choices}
        counts: dict[frozenset[Any], float] = {frozenset(): head.size - len(values)}
        for value in values:
            new = frozenset(condition for condition in own if value in condition[1])
            counts[new] = counts.get(new, 0) + 1
        return sum(
            times * points(i + 1, met & conditions | new) for new, times in counts.items() if times
        )

    return points(0, frozenset())


def size(space: SearchSpace) -> float:
    """Return how many points the space holds; infinite with a real-valued range."""
    return count(space.dimensions) if space.kind == "search" else len(space.candidates)
