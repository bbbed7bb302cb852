"""Read the results of a search from its folder, as numbers and pandas tables.

Needs neither torch nor ray, draws nothing, and works while the search runs. Texts and figures are
in `tunediff.report`. What makes tables imports pandas: it takes as long as all the rest, and a
comparison of commands does without.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from tunediff import config as cfg
from tunediff import search_space
from tunediff.analysis import reach
from tunediff.analysis.outcome import Outcome, by_configuration
from tunediff.analysis.reach import curve as curve
from tunediff.config import Quantity, Values
from tunediff.core import text, trial_record
from tunediff.core.clock import ClockSummary, Unit
from tunediff.core.target import TIME_TO_TARGET, Target
from tunediff.core.trial_record import NEVER_READ, TrialRecord
from tunediff.search_space import SearchSpace

if TYPE_CHECKING:
    import pandas as pd

RATE = "samples_per_s"
"""The objective of a search for speed: there is no curve, and no model is evaluated."""
_COLUMNS = ("trial", "status", "failures", "disturbed")
_MEASURED = ("train_s", "device_s", "samples", RATE)
_OF_TRAININGS = ("step_s", "data_wait_share", "peak_memory_mib")
"""What no command measures."""


class CurveQuantity(NamedTuple):
    """The quantity that the curves of a search are of."""

    name: str
    title: str
    lower_is_better: bool


@dataclasses.dataclass
class Results:
    """The trials of a search, and what follows from them."""

    folder: Path
    space: SearchSpace
    trials: list[TrialRecord]

    # ---- the objective
    @property
    def metric(self) -> str:
        """Return the name of the objective, as evaluations use it."""
        return self.space.metric

    @property
    def by_rate(self) -> bool:
        """Return whether the search optimizes speed alone."""
        return self.metric == RATE

    @property
    def by_time(self) -> bool:
        """Return whether the search optimizes the seconds until a target is met."""
        return self.metric == TIME_TO_TARGET

    @property
    def target(self) -> Target | None:
        """Return the target at which trials end; None: the budget ends them."""
        return self.space.target or self.space.workload.target

    @property
    def label(self) -> str:
        """Return the objective's label as the evaluations give it: FID only where it is one."""
        if self.by_rate or self.by_time:
            return self.metric
        return self._evaluated_label or self.space.label

    @property
    def _evaluated_label(self) -> str | None:
        points = (point for trial in self.trials for point in trial.points)
        return next((str(point["label"]) for point in points if "label" in point), None)

    @property
    def curve_quantity(self) -> CurveQuantity:
        """Return the quantity of the curves: the objective, or the metric that has a target."""
        if (target := self.target) is None:
            return CurveQuantity(self.metric, self.title, self.lower_is_better)
        label = self._evaluated_label or target.metric
        return CurveQuantity(target.metric, self.quantity(label).label, target.lower_is_better)

    @property
    def title(self) -> str:
        """Return the display name of the objective."""
        return self.quantity(self.label).label

    @property
    def unit(self) -> str:
        """Return what the samples are called: `images`, `tokens`."""
        return self.space.workload.unit

    @property
    def clock(self) -> Unit:
        """Return the unit of its budgets, along which its curves are compared."""
        return self.clocked.unit(self.space.budget.unit)

    @property
    def clocked(self) -> ClockSummary:
        """Return which seconds counted in the trials so far."""
        return ClockSummary.of((trial.clock for trial in self.trials), self.space.workload.clock)

    @property
    def lower_is_better(self) -> bool:
        return self.space.mode == "min"

    def loss(self, value: float) -> float:
        """Return a value of the objective with the sign for which smaller is better."""
        return value if self.lower_is_better else -value

    @functools.cached_property
    def ratios(self) -> bool:
        """Return whether values are compared by ratios: rates, and falling positive objectives.

        Others are compared by their differences: a zero or negative value has no ratio, and the
        ratio of two accuracies depends on whether one counts the right or the wrong answers.
        """
        if self.by_rate:
            return True
        values = (point.get(self.metric) for trial in self.trials for point in trial.points)
        return self.lower_is_better and all(value > 0 for value in values if is_number(value))

    def versus(self, value: float | None, base: float | None) -> float | None:
        """Return the ratio of two values, or their difference; None: one is missing."""
        if value is None or base is None:
            return None
        if self.ratios:
            return value / base if base else None
        return value - base

    @property
    def versus_heading(self) -> str:
        """Return the heading of a column of `versus_baseline`."""
        return "× baseline" if self.ratios else "vs. baseline"

    @property
    def judged(self) -> list[str]:
        """Return the names of the quantities that evaluations measured besides the objective."""
        names = [name for name in self.space.workload.quantities if not name.startswith("step_")]
        names = list(dict.fromkeys([self.curve_quantity.name, *names]))
        return [name for name in names if name != self.metric and self._has(name)]

    def quantity(self, name: str) -> Quantity:
        """Return the quantity of that name: label and unit of a measured number."""
        return cfg.quantities(self.space.workload).get(name, Quantity(name))

    def _has(self, name: str) -> bool:
        return any(last(trial, name) is not None for trial in self.trials)

    # ---- configurations
    def changed(self, trial: TrialRecord) -> Values:
        """Return the knobs of a trial that differ from the baseline and that it read; no seed."""
        changed, why = self.space.changed(trial.config), trial.not_effective
        return {
            name: value
            for name, value in changed.items()
            if name != "seed" and why.get(name) != NEVER_READ
        }

    def configuration_key(self, trial: TrialRecord) -> str:
        """Return a text that is equal for configurations that train equally, on any seed."""
        if (key := self._keys.get(trial.name)) is None:  # a thousand of them take a second
            knobs = {
                name: value for name, value in cfg.effective_knobs(trial).items() if name != "seed"
            }
            key = self._keys[trial.name] = json.dumps(knobs, sort_keys=True, default=str)
        return key

    @functools.cached_property
    def _keys(self) -> dict[str, str]:
        return {}

    def is_baseline(self, trial: TrialRecord) -> bool:
        """Return whether a trial trains as the baseline does, on any seed."""
        if not self.changed(trial):
            return True
        base = self.baseline
        return base is not None and self.configuration_key(trial) == self.configuration_key(base)

    @property
    def baseline(self) -> TrialRecord | None:
        """Return the trial of the baseline; with several seeds, the one with the first seed."""
        return self._with_seed(self.space.baseline.seed)

    def baseline_of(self, trial: TrialRecord) -> TrialRecord | None:
        """Return the baseline's run on the seed of a trial.

        In a search with one seed, its first run that ended ok; if none did, its first run.
        """
        if self.space.seeds > 1:
            return self._with_seed(trial.seed)
        return self.outcome_of(self.baseline).trial if self.baseline is not None else None

    def _with_seed(self, seed: int) -> TrialRecord | None:
        fingerprint = cfg.fingerprint(dataclasses.replace(self.space.baseline, seed=seed))
        return next((trial for trial in self.trials if trial.fingerprint == fingerprint), None)

    @functools.cached_property
    def outcomes(self) -> list[Outcome]:
        """Return what every configuration has shown, in the order of their first trials."""
        return [self._outcome(runs) for runs in by_configuration(self.trials)]

    def _outcome(self, runs: list[TrialRecord]) -> Outcome:
        return Outcome(runs, self.metric, self.lower_is_better, self.space.seeds)

    @functools.cached_property
    def _outcome_by_name(self) -> dict[str, Outcome]:
        return {run.name: outcome for outcome in self.outcomes for run in outcome.runs}

    def outcome_of(self, trial: TrialRecord) -> Outcome:
        """Return what a trial's configuration has shown in all its runs; unknown: in this one."""
        return self._outcome_by_name.get(trial.name) or self._outcome([trial])

    @property
    def ranked(self) -> list[Outcome]:
        """Return the configurations that have a value, the best first: see `Outcome.rank`."""
        measured = [outcome for outcome in self.outcomes if outcome.values]
        return sorted(measured, key=lambda outcome: outcome.rank)

    @property
    def leader(self) -> TrialRecord | None:
        """Return the trial with the best value; `evidence` tests whether it is better."""
        return next((outcome.trial for outcome in self.ranked), None)

    # ---- comparisons of one run with the baseline's, without regard to noise
    def versus_baseline(self, trial: TrialRecord) -> float | None:
        """Return how the objective compares with the baseline's of the same seed: see `versus`."""
        baseline = self.baseline_of(trial)
        of_base = baseline.value(self.metric) if baseline is not None else None
        return self.versus(trial.value(self.metric), of_base)

    def speedup(self, trial: TrialRecord) -> reach.SpeedUp | None:
        """Return how many times sooner a trial is as good as the baseline, or a ratio of rates."""
        if self.by_rate or self.by_time:
            ratio = self.versus_baseline(trial)
            ratio = 1 / ratio if self.by_time and ratio else ratio
            return None if ratio is None else reach.SpeedUp(ratio, at_first=False)
        baseline = self.baseline_of(trial)
        if baseline is None:
            return None
        return reach.speedup(baseline, trial, self.metric, self.space.mode)

    # ---- what was spent
    def seconds(self) -> dict[str, float]:
        """Return the seconds of the workers by part, over all trials."""
        names = ("train", "data_wait", "compile", "evaluation", "checkpoint", "setup")
        parts = dict.fromkeys(names, 0.0)
        for trial in self.trials:
            for part, value in seconds_of(trial).items():
                parts[part] = parts.get(part, 0.0) + value
        return parts

    def used(self) -> dict[str, float | None]:
        """Return device_s and price of all trainings together; None: not measured."""
        used: dict[str, float | None] = {}
        spent = [value for trial in self.trials if (value := last(trial, "price")) is not None]
        used["price"] = sum(spent) if spent else None
        used["device_s"] = sum(map(device_s, self.trials)) if self.trials else None
        if (rate := self.space.budget.price_per_device_hour) and used["device_s"] is not None:
            # The prices of points lack what failed after them
            used["price"] = used["device_s"] / 3600 * rate
        return used

    # ---- tables
    def table(self, more: Collection[str] = ()) -> pd.DataFrame:
        """Return one row per trial: status, objective, rates, and every knob by its dotted name.

        `failures`: runs, on any seed, that the trial's configuration has made fail. A knob that has
        the name of another column, of this table or of those `more` that the caller adds, is in the
        column `knobs.NAME`.
        """
        import pandas as pd

        if not self.trials:  # whoever waits for the first trial selects columns
            measured = [*_MEASURED, *_OF_TRAININGS]
            names = (*_COLUMNS, self.metric, "versus_baseline", *measured, "reason")
            return pd.DataFrame({name: [] for name in names})
        measured = [*_MEASURED, *filter(self._has, (*_OF_TRAININGS, "price")), *self.judged]
        rows = []
        for trial in self.trials:
            cells = {
                "trial": trial.name,
                "status": trial.status or "running",
                "failures": len(self.outcome_of(trial).failures),
                "disturbed": None if disturbed_count([trial]) is None else disturbed(trial),
                self.metric: last(trial, self.metric),
                "versus_baseline": self.versus_baseline(trial),
                **{name: last(trial, name) for name in measured},
                "reason": trial.reason,
            }
            knobs = {
                f"knobs.{name}" if name in cells or name in more else name: value
                for name, value in trial.config.items()
            }
            rows.append(cells | knobs)
        return pd.DataFrame(rows)

    def curves(self) -> pd.DataFrame:
        """Return one row per evaluation of every trial."""
        import pandas as pd

        rows = [{"trial": t.name, **point.flat} for t in self.trials for point in t.points]
        return pd.DataFrame(rows).drop(columns="seconds", errors="ignore")


def read(folder: Path) -> Results:
    """Read the results of a search folder. Raises `ConfigError` if it is none."""
    return Results(
        folder, search_space.load(search_space.of_search(folder)), trial_record.read_trials(folder)
    )


def last(trial: TrialRecord, name: str) -> Any:
    """Return a value of the last evaluation of a trial by name; None if there is none."""
    return trial.points[-1].get(name) if trial.points else None


def seconds_of(trial: TrialRecord) -> Mapping[str, float]:
    """Return the seconds of a training by part: at its end, or so far while it runs."""
    return (trial.end and trial.end.seconds) or last(trial, "seconds") or {}


def device_s(trial: TrialRecord) -> float:
    """Return the device-seconds of a training, also of one that failed."""
    measured = last(trial, "device_s") or 0.0
    # Add what it trained after its last point, on its devices; without a measurement, all of it
    before: Mapping[str, float] = {}
    if measured:
        before = last(trial, "seconds") or {"train": last(trial, "train_s") or 0.0}
    seconds = seconds_of(trial)
    after = sum(seconds.get(part, 0.0) - before.get(part, 0.0) for part in ("train", "data_wait"))
    return float(measured + max(0.0, after) * trial.config.get("parallel.workers", 1))


def disturbed(trial: TrialRecord) -> bool:
    """Return whether other processes used the machine during any part of a training."""
    return any(point.get("disturbed") is True for point in trial.points)


def disturbed_count(trials: Sequence[TrialRecord]) -> int | None:
    """Return how many trainings others disturbed; None: of commands it is not measured."""
    if any(cfg.is_command(str(trial.config.get("workload"))) for trial in trials):
        return None
    return sum(map(disturbed, trials))


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value can be drawn along an axis: a number, no truth value, no text."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """Return a knob's value as YAML shows it: `true`, `[8, 16]`, `0.00123`."""
    return json.dumps(value) if isinstance(value, bool) or value is None else text.knob_value(value)
