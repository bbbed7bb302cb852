"""Stop hopeless trials early, by what the journals say of all others. Imports no Ray."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from tunediff.analysis import RATE
from tunediff.analysis.noise import pooled
from tunediff.config import Values
from tunediff.core.outcomes import Status
from tunediff.core.trial_record import End, Role, TrialRecord
from tunediff.search_space import SearchSpace
from tunediff.tuning.trial import reported
from tunediff.tuning.trial_spec import TrialSpec

GRACE = 0.5
"""Share of its budget that every trial gets before it may be stopped early."""
RATIO_MARGIN, DIFFERENCE_MARGIN = 0.2, 0.05
"""Margins behind the best value at a point, as a share of it, within which no trial is stopped
while the noise of one run is unknown because no configuration has run twice: for objectives
compared by ratios, and for all others."""


class PointValues:
    """Values of the objective at one point of the curve, of all trials that have reached it."""

    def __init__(self) -> None:
        self._by_trial = dict[str, float]()
        self._by_seed = defaultdict[str, dict[Any, float]](dict)  # of each configuration

    def add(self, trial: str, configuration: str, seed: Any, value: float) -> None:
        """Add the value of a trial, or replace its earlier value at this point."""
        self._by_trial[trial] = value
        self._by_seed[configuration][seed] = value

    def within_noise(self, value: float, lower_is_better: bool, ratios: bool) -> bool:
        """Return whether `value` is within one run's noise of the best, or within a margin.

        `ratios`: positive values are compared by their ratios.
        """
        values = self._by_trial.values()
        if not values:
            return False
        best, ratios = min(values) if lower_is_better else max(values), ratios and min(values) > 0
        groups = [list(seeds.values()) for seeds in self._by_seed.values()]
        if (noise := pooled(groups, ratios, lower_is_better)) is not None:
            return noise.within(value, best)
        behind = value - best if lower_is_better else best - value
        return behind <= (RATIO_MARGIN if ratios else DIFFERENCE_MARGIN) * abs(best)


class Halving:
    """Asynchronous successive halving with one rung, at `GRACE` of the budget.

    A trial stops there if it is worse than the median of those that were there before (Li et al.,
    "A System for Massively Parallel Hyperparameter Tuning", 2020, with a reduction factor of 2).
    """

    def __init__(self, lower_is_better: bool) -> None:
        self._sign, self._values = 1.0 if lower_is_better else -1.0, dict[str, float]()

    def worse_than_half(self, trial: str, fraction: float, value: float) -> bool:
        """Note a trial's first value at a rung; return whether it is in the worse half."""
        if fraction < GRACE or trial in self._values:
            return False
        earlier, loss = list(self._values.values()), self._sign * value
        self._values[trial] = loss
        # Against those before it alone: trials arrive one by one, and none waits for others
        return bool(earlier) and loss > statistics.median(earlier)


class EarlyStopping:
    """Stop trials by `Halving`, never the baseline on any seed, which others compare with.

    Every result of a search is compared with the finished baseline, which an early stop would
    remove. Not stopped either are trials that are behind the best one at the same point by no more
    than the noise, and trials at their last point, which end by themselves.
    """

    def __init__(self, space: SearchSpace, earlier: Iterable[TrialRecord] = ()) -> None:
        """`earlier`: the trials of the sessions before this one."""
        self._space, self._halving = space, Halving(space.mode == "min")
        self._seen_s = dict[str, float]()
        """Training seconds of a trial's last point."""
        self._values = defaultdict[int, PointValues](PointValues)  # by the index of the point
        for trial in earlier:
            for point in trial.points:
                if point.get(space.metric) is not None:
                    self._is_news(trial.name, trial.drawn, result := reported(point, space))
                    self._is_worse(trial.name, result)

    def stops(self, spec: TrialSpec, result: Mapping[str, Any]) -> bool:
        """Return whether a trial ends after this point; a repeated one was judged before."""
        if not self._is_news(spec.name, spec.drawn, result):
            return False
        spared = self._is_spared(spec.role, spec.drawn, result)
        return self._is_worse(spec.name, result) and not spared

    def _is_worse(self, trial: str, result: Mapping[str, Any]) -> bool:
        fraction = float(result.get("fraction", 0.0))
        return self._halving.worse_than_half(trial, fraction, float(result["objective"]))

    def _is_news(self, trial: str, drawn: Values, result: Mapping[str, Any]) -> bool:
        """Remember a point's value by its trial's drawn knobs; return whether it is new."""
        train_s = result.get("train_s", math.inf)
        # A trial that resumes from its checkpoint reports again what it had reported
        if train_s <= self._seen_s.get(trial, -1.0):
            return False
        self._seen_s[trial] = train_s
        if "index" in result:
            changes = self._space.changed(drawn)
            seed = changes.pop("seed", self._space.baseline.seed)
            key, value = repr(sorted(changes.items())), float(result["objective"])
            self._values[int(result["index"])].add(trial, key, seed, value)
        return True

    def _is_spared(self, role: Role, drawn: Values, result: Mapping[str, Any]) -> bool:
        """Return whether such a trial goes on after this point, however bad it is."""
        if runs_through(self._space, role, drawn):
            return True
        index, points = int(result.get("index", 0)), self._space.baseline.evaluation.points
        # Whoever asks for trials may report more points
        if index == points or result.get("fraction", 1.0) >= 1:
            return True
        lower, rate = self._space.mode == "min", self._space.metric == RATE
        value = float(result["objective"])
        return self._values[index].within_noise(value, lower, ratios=lower or rate)


def early_stopping(space: SearchSpace, earlier: Iterable[TrialRecord] = ()) -> EarlyStopping | None:
    """Return what stops trials of a search early, or None.

    Curves cross early: no trial is judged before `GRACE` of its budget. `earlier`: the trials so
    far of a search that is resumed.
    """
    return None if space.early_stopping == "none" else EarlyStopping(space, earlier)


def runs_through(space: SearchSpace, role: Role, drawn: Values) -> bool:
    """Return whether no rule stops a trial: others are compared with the baseline, and a
    configuration that is repeated is compared by the mean of finished runs."""
    return role == "repeat" or space.is_baseline(drawn)


def ended_early(space: SearchSpace, stopped: TrialRecord | None) -> End:
    """Return the end of a trial that the scheduler stopped."""
    where = f" after {stopped.points[-1].train_s:.1f} s" if stopped and stopped.points else ""
    return End(Status.PRUNED, f"stopped by {space.early_stopping}{where}")
