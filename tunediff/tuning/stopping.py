"""Stop trials early by Tune's own rules, which never judge the baseline and keep what they know
over a resume."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from tunediff.analysis import RATE
from tunediff.analysis.noise import pooled
from tunediff.config import Values
from tunediff.core import text
from tunediff.core.trial_record import End, Role, TrialRecord
from tunediff.search_space import SearchSpace
from tunediff.tuning.trial import SPEC, reported

Trials = Sequence[TrialRecord]
GRACE = 0.5
"""Share of its budget that every trial gets before it may be stopped early."""
RATIO_MARGIN, DIFFERENCE_MARGIN = 0.2, 0.05
"""Margins behind the best value at a point, as a share of it, within which no trial is stopped
while the noise of one run is unknown because no configuration has run twice: for objectives
compared by ratios, and for all others."""


class TrialName(NamedTuple):
    """A trial for the rule: it reads `trial_id` only. Our name outlives a session; Tune's own id
    does not."""

    trial_id: str


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
        """Return whether `value` is behind the best one by no more than the noise of one run, or a
        margin if unknown.

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


class BaselineExemptScheduler(FIFOScheduler):  # type: ignore[misc]
    """Stop trials by a rule of Tune that never judges the baseline, on any seed, although it
    compares with it.

    Every result of a search is compared with the finished baseline, which an early stop would
    remove. Not judged either are trials that are behind the best one at the same point by no more
    than the noise, and trials at their last point, which end by themselves after their weights are
    written. `earlier`: the trials of the sessions before this one, whose curves the rule gets
    first.
    """

    def __init__(
        self, rule: TrialScheduler, space: SearchSpace, earlier: Iterable[TrialRecord] = ()
    ) -> None:
        super().__init__()
        self._rule, self._space, self._earlier = rule, space, tuple(earlier)
        self._judged_s = dict[TrialName, float]()
        """Training seconds of the last point that was not a repetition."""
        self._values = defaultdict[int, PointValues](PointValues)  # by the index of the point

    def __getstate__(self) -> dict[str, object]:
        return {}  # Tune keeps a pickled copy of all it was given; nobody reads it

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Set what Tune optimizes, and feed the rule the earlier trials, which it can take only
        from then on."""
        accepted = bool(self._rule.set_search_properties(metric, mode, **spec))
        for trial in self._earlier if accepted else ():
            for point in trial.points:
                if point.get(self._space.metric) is not None:
                    result = reported(point, self._space)
                    self._feed(None, TrialName(trial.name), result)
                    self._note(trial.name, trial.drawn, result)
                    self._judged_s[TrialName(trial.name)] = point.train_s
        return accepted

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Pass the start of a trial on."""
        self._rule.on_trial_add(tune_controller, _name_of(trial))

    def on_trial_result(self, tune_controller: Any, trial: Any, result: Mapping[str, Any]) -> str:
        """Return whether a trial goes on after this point; a point reported again after a resume
        was judged before."""
        name, spec, train_s = _name_of(trial), trial.config[SPEC], result.get("train_s", math.inf)
        if train_s <= self._judged_s.get(name, -1.0):
            return str(TrialScheduler.CONTINUE)
        self._judged_s[name] = train_s
        self._note(name.trial_id, spec.drawn, result)
        if self._is_judged(spec.role, spec.drawn, result):
            self._rule.on_trial_add(tune_controller, name)  # ASHA has forgotten it since `_feed`
            return str(self._rule.on_trial_result(tune_controller, name, result))
        self._feed(tune_controller, name, result)
        return str(TrialScheduler.CONTINUE)

    def _note(self, trial: str, values: Values, result: Mapping[str, Any]) -> None:
        """Remember the value of a point, by the drawn knobs of its trial."""
        if "index" in result:
            changes = self._space.changed(values)
            seed = changes.pop("seed", self._space.baseline.seed)
            key, value = repr(sorted(changes.items())), float(result["objective"])
            self._values[int(result["index"])].add(trial, key, seed, value)

    def _is_judged(self, role: Role, drawn: Values, result: Mapping[str, Any]) -> bool:
        """Return whether the rule may stop such a trial after this point."""
        if runs_through(self._space, role, drawn):
            return False
        index, points = int(result.get("index", 0)), self._space.baseline.evaluation.points
        # Whoever asks for trials may report more points
        if index == points or result.get("fraction", 1.0) >= 1:
            return False
        lower, rate = self._space.mode == "min", self._space.metric == RATE
        value = float(result["objective"])
        return not self._values[index].within_noise(value, lower, ratios=lower or rate)

    def on_trial_complete(
        self, tune_controller: Any, trial: Any, result: Mapping[str, Any]
    ) -> None:
        """Pass the end of a trial on."""
        self._feed(tune_controller, _name_of(trial), result)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """Pass on that a trial never began."""
        self._rule.on_trial_remove(tune_controller, _name_of(trial))

    def debug_string(self) -> str:
        """Return the rule's own description."""
        return str(self._rule.debug_string())

    def _feed(self, controller: Any, trial: TrialName, result: Mapping[str, Any]) -> None:
        """Feed a result to the rule without a judgement, as rules take it when a trial
        completes."""
        self._rule.on_trial_add(controller, trial)
        self._rule.on_trial_complete(controller, trial, result)


def runs_through(space: SearchSpace, role: Role, drawn: Values) -> bool:
    """Return whether no rule stops a trial: others are compared with the baseline, and a
    configuration that is repeated is compared by the mean of finished runs."""
    return role == "repeat" or space.is_baseline(drawn)


def _name_of(trial: Any) -> TrialName:
    return TrialName(trial.config[SPEC].name)


def ended_early(space: SearchSpace, stopped: TrialRecord | None, others: Trials) -> End:
    """Return the end of a trial that the scheduler stopped; its reason says what the trial was
    compared with: the values of `others` at the same point of their curves."""
    budget_s = stopped.budget_s if stopped is not None else None
    grace_s = GRACE * (budget_s or space.longest_s)
    where = ""
    if stopped is not None and stopped.points:
        point, metric = stopped.points[-1], space.metric
        where = f" after {point.train_s:.1f} s"
        values = [
            other[metric]
            for trial in others
            if trial.name != stopped.name
            for other in trial.points
            if other["index"] == point["index"] and other.get(metric) is not None
        ]
        if values and point.get(metric) is not None:
            least = space.mode == "min"
            better = sum(v < point[metric] if least else v > point[metric] for v in values)
            best = text.number(min(values) if least else max(values))
            where += (
                f": {space.label} {text.number(point[metric])}, {better} of {len(values)} other trials"
                f" were better by then, the best {best}"
            )
    why = f"stopped by {space.early_stopping}{where}; no trial is stopped before {grace_s:.1f} s"
    return End("pruned", f"{why} or within the noise of the best")
