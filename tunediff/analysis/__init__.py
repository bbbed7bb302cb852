"""What a search found, read from its folder: facts, as numbers and pandas tables.

Needs neither torch nor ray, draws nothing, and works while the search runs. Words and pictures are `tunediff.report`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import pandas as pd

from tunediff import config as cfg
from tunediff import search_space
from tunediff.analysis import reach
from tunediff.config import Quantity, Values
from tunediff.core import text, trial_record
from tunediff.core.clock import Unit
from tunediff.core.point import quantities
from tunediff.core.trial_record import TrialRecord
from tunediff.search_space import SearchSpace

RATE = "samples_per_s"
"""The objective of a search for speed: it has no curve, and nothing that was learned is judged."""
_OF_POINTS = ("train_s", "device_s", "samples", RATE, "step_s", "data_wait_share", "peak_memory_mib")


@dataclasses.dataclass
class Results:
    """The trials of a search and what follows from them."""

    folder: Path
    space: SearchSpace
    trials: list[TrialRecord]

    @property
    def metric(self) -> str:
        """The objective, as evaluations name it."""
        return self.space.metric

    @property
    def by_rate(self) -> bool:
        """Whether the search is for speed alone."""
        return self.metric == RATE

    @property
    def label(self) -> str:
        """What the objective may be called, as its measurements say: FID only where it is one."""
        labels = (point["label"] for trial in self.trials for point in trial.points if "label" in point)
        return self.metric if self.by_rate else next(labels, self.space.label)

    @property
    def unit(self) -> str:
        """What the samples are called: `images`, `tokens`."""
        return self.space.workload.unit

    @property
    def clock(self) -> Unit:
        """What its budgets are counted in, and its curves compared along."""
        return self.space.budget.clock

    @property
    def falls(self) -> bool:
        """Whether a smaller value is better: the one place that knows the direction of the objective."""
        return self.space.mode == "min"

    @functools.cached_property
    def ratios(self) -> bool:
        """Whether values are compared by their ratios, as rates are, and what falls and is positive throughout.

        Anything else is compared by differences: what is zero or negative has no ratio, and that of two accuracies
        depends on whether one counts the right or the wrong ones.
        """
        values = (point.get(self.metric) for trial in self.trials for point in trial.points)
        return self.by_rate or (self.falls and not any(value <= 0 for value in values if is_number(value)))

    @property
    def judged(self) -> list[str]:
        """What evaluations have found besides the objective, by the names that the workload declares."""
        names = (name for name in self.space.workload.quantities if name != self.metric and name[:5] != "step_")
        return [name for name in names if any(last(trial, name) is not None for trial in self.trials)]

    def loss(self, value: float) -> float:
        """The objective turned so that smaller is better."""
        return value if self.falls else -value

    @property
    def baseline(self) -> TrialRecord | None:
        """The trial of the baseline; of several seeds, the first."""
        return self._with_seed(self.space.baseline.seed)

    def baseline_of(self, trial: TrialRecord) -> TrialRecord | None:
        """What a trial is compared with: the baseline's run with the same seed; of one seed, the baseline's first."""
        return self._with_seed(trial.config["seed"]) if self.space.seeds > 1 else self.baseline

    def quantity(self, name: str) -> Quantity:
        """What a measured number is called, and its unit."""
        return quantities(self.space.workload).get(name, Quantity(name))

    def _with_seed(self, seed: int) -> TrialRecord | None:
        fingerprint = cfg.fingerprint(dataclasses.replace(self.space.baseline, seed=seed))
        return next((trial for trial in self.trials if trial.fingerprint == fingerprint), None)

    def changed(self, trial: TrialRecord) -> Values:
        """Knobs of a trial that differ from the baseline's: what makes it of the baseline, by `knob=value` words."""
        return self.space.changed(trial.config)

    @property
    def groups(self) -> list[list[TrialRecord]]:
        """Trials that differ in their seed only, together; in order of their first ones."""
        return _grouped(self.trials)

    def repeats(self, trial: TrialRecord) -> bool:
        """Whether it is there for the noise alone: a further run of the baseline of a search with one seed."""
        return self.space.seeds == 1 and "seed" in trial.drawn

    @property
    def singles(self) -> list[TrialRecord]:
        """The trials but for those that repeat another: each says something of its own about the knobs."""
        return [trial for trial in self.trials if not self.repeats(trial)]

    @property
    def standings(self) -> list[tuple[TrialRecord, float]]:
        """Successful trials with what their configuration has reached, the best first.

        That is the mean over the runs where a search repeats its baseline: the first of them that ended ok stands for
        all, so that no lucky seed is ahead. With several seeds every run stands for itself.
        """
        means = [(trial, sum(values) / len(values)) for trial, values in self.values_of_runs]
        return sorted(means, key=lambda pair: self.loss(pair[1]))

    @property
    def values_of_runs(self) -> list[tuple[TrialRecord, list[float]]]:
        """Trials that stand for a configuration in `standings`, with the values of all its runs that ended ok."""
        done = [(trial, value) for trial in self.trials if (value := trial.value(self.metric)) is not None]
        found = [(trial, [value]) for trial, value in done if not self.repeats(trial)]
        for trial, value in (pair for pair in done if self.repeats(pair[0])):
            own = without_seed(trial.drawn)
            same = next((values for first, values in found if without_seed(first.drawn) == own), None)
            if same is None:
                found.append((trial, [value]))
            else:
                same.append(value)
        return found

    @property
    def ranked(self) -> list[TrialRecord]:
        """Successful trials, the best first; a search's runs of its baseline once: `standings`."""
        return [trial for trial, _ in self.standings]

    @property
    def leader(self) -> TrialRecord | None:
        """The trial that is ahead, by however little: what is best is asked of `evidence`.

        With several seeds the first run of the best mean; only configurations with as many successful runs as any are
        looked at.
        """
        if self.space.seeds == 1:
            return next(iter(self.ranked), None)
        runs = _grouped(self.ranked)
        most = max(map(len, runs), default=0)
        full = [trials for trials in runs if len(trials) == most]
        best = min(full, key=lambda trials: sum(map(self._ended, trials)), default=[])
        return min(best, key=lambda trial: trial.number, default=None)

    def _ended(self, trial: TrialRecord) -> float:
        return self.loss(trial.value(self.metric) or 0.0)

    @property
    def pareto(self) -> list[TrialRecord]:
        """The trade-offs of a search with two objectives: no other trial is as good in both and better in one.

        From the best of the first objective to the smallest of the second.
        """
        assert self.space.cost is not None
        costs = [(trial, cost) for trial in self.ranked if (cost := trial.value(self.space.cost)) is not None]
        found = sorted(((self._ended(trial), cost, trial) for trial, cost in costs), key=lambda one: one[:2])
        return [trial for (*_, trial), on in zip(found, front([one[:2] for one in found]), strict=True) if on]

    def pareto_table(self) -> pd.DataFrame:
        """`pareto` as rows: trial, both objectives by their names, versus_baseline, configuration (what it changes)."""
        names = [self.metric, self.space.cost or ""]
        rows = [
            {"trial": trial.name, **{name: trial.value(name) for name in names}}
            | {"versus_baseline": self.versus_baseline(trial), "configuration": text.knobs(self.changed(trial))}
            for trial in self.pareto
        ]
        return pd.DataFrame(rows)

    def versus(self, value: float | None, base: float | None) -> float | None:
        """A value of the objective over another one, or, where these are not compared by `ratios`, less it."""
        if value is None or base is None:
            return None
        return value - base if not self.ratios else value / base if base else None

    @property
    def versus_heading(self) -> str:
        """What `versus` the baseline is called over a column."""
        return "× baseline" if self.ratios else "vs. baseline"

    def versus_baseline(self, trial: TrialRecord) -> float | None:
        """The objective over the baseline's of the same seed, or less it: `versus`."""
        baseline = self.baseline_of(trial)
        return self.versus(trial.value(self.metric), baseline.value(self.metric) if baseline is not None else None)

    def time_to_target_speedup(self, trial: TrialRecord) -> float | None:
        """How many times sooner it was as good as the finished baseline of its seed, or the ratio of throughputs.

        By this one pair of runs, whatever the noise: what was shown is asked of `evidence`.
        """
        baseline = self.baseline_of(trial)
        if baseline is None or baseline.value(self.metric) is None or trial.value(self.metric) is None:
            return None
        if self.by_rate:
            return self.versus_baseline(trial)
        one, two = ([(s, self.loss(v)) for s, v in curve(run, self.metric)] for run in (baseline, trial))
        return reach.time_to_target_speedup(one, two)

    def at_first(self, trial: TrialRecord) -> bool:
        """Whether it was as good as the baseline's end at its first evaluation: its speed-up is a lower bound."""
        ratio, base, line = self.time_to_target_speedup(trial), self.baseline_of(trial), curve(trial, self.metric)
        if ratio is None or self.by_rate or base is None or not line:
            return False
        return math.isclose(ratio, float(base.points[-1][base.along]) / line[0][0])

    def no_baseline(self, trial: TrialRecord) -> str:
        """Why a trial has no finished baseline to be compared with, as a clause; '' where it has one."""
        baseline = self.baseline_of(trial)
        if baseline is None:
            return "the baseline has not begun"
        if baseline.value(self.metric) is not None:
            return ""
        ended = f"ended as {baseline.status}" if baseline.status != "ok" else f"ended without {self.metric}"
        return f"the baseline {baseline.name} {ended if baseline.finished else 'is not finished'}"

    def seconds(self) -> dict[str, float]:
        """Where the workers' seconds went, over all trials."""
        parts = dict.fromkeys(("train", "data_wait", "compile", "evaluation", "checkpoint", "setup"), 0.0)
        for trial in self.trials:
            for part, value in seconds_of(trial).items():
                parts[part] = parts.get(part, 0.0) + value
        return parts

    def used(self) -> dict[str, float | None]:
        """What all trainings used together: device_s, energy_wh and price, as far as measured; None: nowhere."""
        spent = {name: [last(trial, name) for trial in self.trials] for name in ("energy_wh", "price")}
        spent["device_s"] = [device_s(trial) for trial in self.trials]
        known = {name: [value for value in values if value is not None] for name, values in spent.items()}
        return {name: sum(values) if values else None for name, values in known.items()}

    def table(self) -> pd.DataFrame:
        """One row per trial: status, objective, rates, and every knob by its dotted name."""
        rows, judged = [], self.judged
        costs = [name for name in ("energy_wh", "price") if any(last(trial, name) is not None for trial in self.trials)]
        for trial in self.trials:
            reached = {
                "trial": trial.name,
                "status": trial.status or "running",
                "disturbed": disturbed(trial),
                self.metric: last(trial, self.metric),
                "versus_baseline": self.versus_baseline(trial),
            }
            measured = {name: last(trial, name) for name in (*_OF_POINTS, *costs, *judged)}
            rows.append({**reached, **measured, "reason": trial.remarks, **trial.config})
        return pd.DataFrame(rows)

    def curves(self) -> pd.DataFrame:
        """One row per evaluation of every trial."""
        lines = [{"trial": trial.name, **point.flat} for trial in self.trials for point in trial.points]
        return pd.DataFrame([{name: value for name, value in line.items() if name != "seconds"} for line in lines])


def read(folder: Path) -> Results:
    """The results of a search folder. Raises `ConfigError` if it is none."""
    return Results(folder, search_space.load(search_space.of_search(folder)), trial_record.read_trials(folder))


def without_seed(values: Mapping[str, Any]) -> dict[str, object]:
    """Knobs but for the seed: what runs of one configuration have in common."""
    return {name: value for name, value in values.items() if name != "seed"}


def _grouped(trials: Sequence[TrialRecord]) -> list[list[TrialRecord]]:
    found: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        found.setdefault(json.dumps(without_seed(trial.drawn), sort_keys=True), []).append(trial)
    return list(found.values())


def last(trial: TrialRecord, name: str) -> Any:
    """What the last evaluation of a trial holds under that name; None where there is none."""
    return trial.points[-1].get(name) if trial.points else None


def curve(trial: TrialRecord, metric: str, along: str = "") -> list[tuple[float, float]]:
    """(seconds in the unit of its budget, value) of every evaluation that has one; or `along` samples."""
    along = along or trial.along
    return [(float(p[along]), float(p[metric])) for p in trial.points if p.get(metric) is not None and along in p]


def seconds_of(trial: TrialRecord) -> Mapping[str, float]:
    """Seconds of each part of a training: of its end, or of its last evaluation while it is under way."""
    return (trial.end and trial.end.seconds) or last(trial, "seconds") or {}


def device_s(trial: TrialRecord) -> float:
    """Device-seconds of a training, of one that failed as well."""
    seconds = sum(seconds_of(trial).get(part, 0.0) for part in ("train", "data_wait"))
    return float(last(trial, "device_s") or seconds * int(trial.config["parallel.workers"]))


def disturbed(trial: TrialRecord) -> bool:
    """Whether others used the machine during any part of a training."""
    return any(point.get("disturbed") is True for point in trial.points)


def failed(trial: TrialRecord) -> bool:
    """Whether it ran and ended without a result, and was not merely stopped early."""
    return trial.status not in (None, "ok", "pruned", "skipped")


def front(pairs: Sequence[tuple[float, float]]) -> list[bool]:
    """Which pairs are beaten by no other: another one that is at most as large in both, and smaller in one."""
    on, least = [False] * len(pairs), math.inf
    before: tuple[float, float] | None = None
    for place in sorted(range(len(pairs)), key=lambda place: pairs[place]):
        on[place] = pairs[place][1] < least or pairs[place] == before
        if pairs[place][1] < least:
            least, before = pairs[place][1], pairs[place]
    return on


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it can be drawn along an axis: no truth value, no word."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A knob's value as YAML has it: `true`, `[8, 16]`, `0.00123`."""
    return json.dumps(value) if isinstance(value, bool) or value is None else text.number(value)
