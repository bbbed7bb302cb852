"""Define what a search file means: its budget, and the space with the candidates to try first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from tunediff import config as cfg
from tunediff.config import Lines, Metric, Schema, Values, Workload
from tunediff.config.knobs import refuse
from tunediff.core import text
from tunediff.core.clock import UNITS, Budget, Unit, UnitName, seconds_per_device
from tunediff.core.target import TIME_TO_TARGET, Target
from tunediff.experiment.model import LEAST_PAIRS
from tunediff.search_space.dimension import Dimension, complete
from tunediff.search_space.sections import Confirm, RunOptions, SearchFile, Study

SEED_OFFSET = 1000
"""Offset from the baseline's seed to the first confirming seed, and from there to that of each
further confirmation: no trial of the search may have used these seeds."""
PAIR_SEED_OFFSET = SEED_OFFSET // 2
"""Offset to the first seed of a comparison of two configurations, which may be confirmed ones."""
RATE = Metric("samples_per_s", "max", "samples/s")
"""The objective that every workload has besides its own: it needs no evaluation."""


SECONDS = Metric(TIME_TO_TARGET, "min")
"""The objective of a search with a target."""


@dataclasses.dataclass(frozen=True)
class SearchBudget:
    """The budget of a search: seconds per trial, number of trials, wall-clock."""

    per_trial_s: float
    """Seconds per trial, in `unit`."""
    trials: int
    """Trials in all, the baseline included."""
    total_s: float | None = None
    """Wall-clock of the search with its confirming runs; no run starts that would end later."""
    compile_charged: bool = True
    """Whether compile seconds count as training seconds."""
    deadline_s: float | None = None
    """Wall-clock until `timeout`, evaluations included; None: 4 × per_trial_s + an hour."""
    unit: UnitName = "wall"
    """Unit of `per_trial_s`: training seconds, or training seconds × devices of the trial."""
    price_per_device_hour: float | None = None
    """Price of one hour of one device, in any currency; None: not known."""
    setup_charged: bool = False
    """Whether what a workload does before its first batch counts as training seconds."""

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
        others = {
            "trials": self.trials,
            "compile": "charged" if self.compile_charged else "free",
            "setup": "charged" if self.setup_charged else None,
            "unit": self.unit,
            "price_per_device_hour": self.price_per_device_hour,
        }
        lines = {key: text.format_exact(limit) for key, limit in seconds.items() if limit}
        return lines | {key: value for key, value in others.items() if value is not None}

    def of(self, devices: int) -> Budget:
        """Return the budget of one trial on `devices` devices."""
        return Budget(
            seconds_per_device(self.per_trial_s, self.unit, devices),
            compile_charged=self.compile_charged,
            setup_charged=self.setup_charged,
            price_per_device_hour=self.price_per_device_hour,
        )

    @property
    def trial_deadline_s(self) -> float:
        """Return the wall-clock after which a trial is stopped."""
        return self.deadline_s if self.deadline_s is not None else 4 * self.per_trial_s + 3600


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
    target: Target | None = None
    """The target of a workload's metric: `metric` is then the seconds until it is reached."""
    dimensions: tuple[Dimension, ...] = ()
    candidates: tuple[Values, ...] = ()
    """Drawn values to try first, the baseline's before others; all of them but in a `search`."""
    seeds: int = 1
    """Runs of every candidate, on seeds baseline.seed, +1, …; above 1 the first knob is `seed`."""
    noise: int = 1
    """Runs of the baseline in a `search`: candidates 1, 2, … repeat it with seeds baseline.seed+1,
    +2, …; no dimension draws the seed. Their differences give the noise of one run."""
    skipped: tuple[str, ...] = ()
    """What does not run, and why: invalid combinations, single rungs, surplus points."""
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
        searched = [one for one in self.dimensions if one.name == "parallel.workers"]
        sizes = [int(size) for one in searched for size in one.choices or [one.low]]
        fewest = min([int(self.baseline.devices), *sizes])
        return seconds_per_device(self.budget.per_trial_s, self.budget.unit, fewest)

    @property
    def finalists(self) -> int:
        """Return the most configurations that are confirmed besides the baseline."""
        if self.confirm is None:
            return 0
        return max(0, min(self.confirm.of, self.budget.trials - self.noise))

    @property
    def confirming_reserve(self) -> int:
        """Return the confirming runs that `budget: total` leaves room for: a first verdict's."""
        return (self.finalists + 1) * LEAST_PAIRS if self.finalists else 0

    @property
    def most_confirming_runs(self) -> int:
        """Return the most confirming runs."""
        if self.confirm is None or not self.finalists:
            return 0
        return (self.finalists + 1) * self.confirm.seeds

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


# ---- keys and sections that contradict each other
def check_together(
    file: SearchFile, kind: str, metric: Metric, cost: str | None, source: str
) -> None:
    """Raise `ConfigError` for keys that contradict each other."""
    drawn, stops, seeds = kind == "search", file.early_stopping != "none", file.seeds is not None
    listed, first, warm = not drawn, file.first is not None, file.warm_start is not None
    other_sampler = file.sampler != "TPESampler"
    stopping, nothing = f"early_stopping: {file.early_stopping!r}", f"{kind}: draws nothing"
    best = "a trial that is bad in one may be the best in the other; allowed: none"
    unknown = "nothing is known before it is met; allowed: none"
    belongs = "belongs to grid:, trials: and ladder:, which repeat each of their points; search:"
    for broken, why in (
        (listed and first, f"first: belongs to search:; {kind}: runs its points in order"),
        (listed and other_sampler, f"sampler: {file.sampler!r} is not allowed; {nothing}"),
        (
            listed and warm,
            f"warm_start: {file.warm_start!r} is not allowed; it belongs to search:; {nothing}",
        ),
        (
            stops and metric == SECONDS,
            f"{stopping} is not allowed with a target, of which {unknown}",
        ),
        (stops and cost is not None, f"{stopping} is not allowed with two objectives: {best}"),
        (drawn and seeds, f"seeds: {belongs} does not"),
        (stops and seeds, f"seeds: {stopping} is not allowed: only whole runs can be compared"),
        (
            seeds and file.confirm is not None,
            "confirm: belongs to searches of one seed; seeds: repeats every point already",
        ),
    ):
        refuse(broken, f"{source}: {why}")


def check_space(space: SearchSpace, limits: Lines) -> None:
    """Raise `ConfigError` for sections that do not fit together. `limits`: what `budget:` says."""
    _check_shared(space)
    _check_final(space.final, f"{space.source}: final", space)
    if space.confirm is not None:
        _check_final(space.confirm.final, f"{space.source}: confirm: final", space)
    repeats = space.workload.unseeded and (space.confirm is not None or space.seeds > 1)
    key = "seeds" if space.confirm is None else "confirm"
    why = "without a seed every run is one, repeated: the noise of a training is not known"
    refuse(repeats, f"{space.source}: {key}: is not allowed with unseeded: true: {why}")
    _check_limits(space, limits, f"{space.source}: budget")


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


def _check_shared(space: SearchSpace) -> None:
    """Raise `ConfigError` for seconds of a GPU that several trials share."""
    shared, device = space.trials_per_gpu > 1, space.budget.unit == "device"
    where = f"{space.source}: trials_per_gpu: {space.trials_per_gpu} is not allowed"
    priced = space.budget.price_per_device_hour is not None
    refuse(
        shared and (device or priced),
        f"{where} where devices are counted: budget: unit, price_per_device_hour",
    )
    counted = space.cost in ("device_s", "price") or not space.evaluates
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
