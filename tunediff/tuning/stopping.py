"""Stop hopeless trials early, by what the journals say of all others. Imports no Ray."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from tunediff.analysis import RATE
from tunediff.analysis.noise import pooled
from tunediff.config import Values
from tunediff.core.journal import Journal
from tunediff.core.outcomes import Ruling
from tunediff.core.trial_record import Decision, Role, TrialRecord, read_begun
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

    def best_and_worst(self, lower_is_better: bool, ratios: bool) -> tuple[float, float, str]:
        """Return the best value, and the worst within one run's `noise` of it, or within a
        `margin`, and which of both.

        `ratios`: positive values are compared by their ratios.
        """
        values = self._by_trial.values()
        best, ratios = min(values) if lower_is_better else max(values), ratios and min(values) > 0
        groups = [list(seeds.values()) for seeds in self._by_seed.values()]
        if (noise := pooled(groups, ratios, lower_is_better)) is not None:
            return best, noise.worst(best), "noise"
        margin = (RATIO_MARGIN if ratios else DIFFERENCE_MARGIN) * abs(best)
        return best, best + margin if lower_is_better else best - margin, "margin"


class Halving:
    """Asynchronous successive halving with one rung, at `GRACE` of the budget.

    A trial stops there if it is worse than the median of those that were there before (Li et al.,
    "A System for Massively Parallel Hyperparameter Tuning", 2020, with a reduction factor of 2).
    """

    def __init__(self, lower_is_better: bool) -> None:
        self._sign, self._values = 1.0 if lower_is_better else -1.0, dict[str, float]()

    def judge(self, trial: str, result: Mapping[str, Any]) -> Decision | None:
        """Note a trial's first value at the rung and judge it; None: there is nothing to judge."""
        fraction, value = float(result.get("fraction", 0.0)), float(result["objective"])
        if fraction < GRACE or trial in self._values:
            return None
        earlier = dict(self._values)
        self._values[trial] = value
        if not earlier:
            return None
        # Against those before it alone: trials arrive one by one, and none waits for others
        median = statistics.median(earlier.values())
        worse = self._sign * value > self._sign * median
        outcome = Ruling.STOPPED if worse else Ruling.BETTER_HALF
        train_s = float(result["train_s"])
        return Decision("halving", outcome, value, fraction, train_s, median, [*earlier])


class EarlyStopping:
    """Stop trials by `Halving`, never the baseline on any seed, which others compare with.

    Every result of a search is compared with the finished baseline, which an early stop would
    remove. Not stopped either are trials that are behind the best one at the same point by no more
    than the noise, and trials at their last point, which end by themselves.
    """

    def __init__(self, space: SearchSpace, earlier: Iterable[TrialRecord] = ()) -> None:
        """`earlier`: the trials of the sessions before this one."""
        self._space, self._lower = space, space.mode == "min"
        self._halving = Halving(self._lower)
        self._seen_s = dict[str, float]()
        """Training seconds of a trial's last point."""
        self._values = defaultdict[int, PointValues](PointValues)  # by the index of the point
        self._stopped = dict[str, Decision]()
        """Decisions whose trials have not ended yet: the search was killed."""
        for trial in earlier:
            for point in trial.points:
                if point.get(space.metric) is not None:
                    self._is_news(trial.name, trial.drawn, result := reported(point, space))
                    self._halving.judge(trial.name, result)
            if trial.decision is not None and trial.decision.outcome == Ruling.STOPPED:
                self._stopped[trial.name] = trial.decision

    def stops(self, spec: TrialSpec, result: Mapping[str, Any]) -> bool:
        """Return whether a trial ends after this point. What is decided goes to its journal."""
        if (decision := self.decide(read_begun(spec.folder), result)) is None:
            return False
        Journal(spec.folder).write("decision", **vars(decision))
        return decision.outcome == Ruling.STOPPED

    def decide(self, trial: TrialRecord, result: Mapping[str, Any]) -> Decision | None:
        """Judge a trial at a point; None: there is nothing to decide.

        A point that is reported again was judged before.
        """
        if not self._is_news(trial.name, trial.drawn, result):
            before = self._stopped.get(trial.name)
            return before if before and float(result["train_s"]) >= before.train_s else None
        if (judged := self._halving.judge(trial.name, result)) is None:
            return None
        ratios = self._lower or self._space.metric == RATE
        values = self._values[int(result["index"])]
        best, limit, limit_of = values.best_and_worst(self._lower, ratios)
        outcome = judged.outcome
        if outcome == Ruling.STOPPED:
            near = judged.value <= limit if self._lower else judged.value >= limit
            outcome = Ruling.WITHIN_NOISE if near else outcome
            outcome = self._runs_on(trial, result) or outcome
        return dataclasses.replace(
            judged, best=best, limit=limit, limit_of=limit_of, outcome=outcome
        )

    def _is_news(self, trial: str, drawn: Values, result: Mapping[str, Any]) -> bool:
        """Remember a point's value by its trial's drawn knobs; return whether it is new."""
        train_s = float(result["train_s"])
        # A trial that resumes from its checkpoint reports again what it had reported
        if train_s <= self._seen_s.get(trial, -1.0):
            return False
        self._seen_s[trial] = train_s
        changes = self._space.changed(drawn)
        seed = changes.pop("seed", self._space.baseline.seed)
        key, value = repr(sorted(changes.items())), float(result["objective"])
        self._values[int(result["index"])].add(trial, key, seed, value)
        return True

    def _runs_on(self, trial: TrialRecord, result: Mapping[str, Any]) -> Ruling | None:
        """Return why a trial goes on after this point however bad it is; None: it need not."""
        if runs_through(self._space, trial.role, trial.drawn):
            return Ruling.RUNS_THROUGH
        # Whoever asks for trials may report more points
        points = self._space.baseline.evaluation.points
        return Ruling.LAST_POINT if result["index"] == points or result["fraction"] >= 1 else None


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
