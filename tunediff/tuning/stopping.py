"""When a trial is stopped early: Tune's own rules, which never judge the baseline and forget nothing over a resume."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from tunediff.analysis import RATE
from tunediff.analysis.noise import pooled
from tunediff.config import Values
from tunediff.core.trial_record import TrialRecord
from tunediff.search_space import SearchSpace
from tunediff.tuning.messages import drawn
from tunediff.tuning.trial import reported

RATIO_MARGIN, DIFFERENCE_MARGIN = 0.2, 0.05
"""How far behind the best value at a point, as a share of it, a trial is never stopped while no configuration has run
twice and the noise of one run is not known: for objectives that are compared by ratios and for all others."""


class Known(NamedTuple):
    """A trial as the rule knows it: by our name, which outlives a session; Tune's id does not."""

    trial_id: str


class PointValues:
    """The objective's values at one point of the curve, of all trials that have reached it."""

    def __init__(self) -> None:
        self._by_trial = dict[str, float]()
        self._by_seed = defaultdict[str, dict[Any, float]](dict)  # of each configuration

    def add(self, trial: str, configuration: str, seed: Any, value: float) -> None:
        """Add the value of a trial, or replace what it had before it was measured again."""
        self._by_trial[trial] = value
        self._by_seed[configuration][seed] = value

    def within_noise(self, value: float, falls: bool, positive_ratios: bool) -> bool:
        """Whether `value` is behind the best of these by no more than the noise of one run, or the margin without it.

        `falls`: a smaller value is better; `positive_ratios`: positive values are compared by their ratios.
        """
        values = self._by_trial.values()
        if not values or not math.isfinite(value):
            return False
        best, ratios = min(values) if falls else max(values), positive_ratios and min(values) > 0
        noise = pooled([list(seeds.values()) for seeds in self._by_seed.values()], ratios, falls)
        if noise is not None:
            return noise.within(value, best)
        behind = value - best if falls else best - value
        return behind <= (RATIO_MARGIN if ratios else DIFFERENCE_MARGIN) * abs(best)


class BaselineExemptScheduler(FIFOScheduler):  # type: ignore[misc]
    """A rule that all trials are held against and all but the baseline, on whatever seed, are judged by.

    Every figure of a search is told beside the finished baseline: stopped early, it would leave none. The rule does not
    judge a trial either that is behind the best one at the same point by no more than the noise, or that has reached
    its last point: that one ends by itself, after its weights are written. `earlier`: the trials of the sessions before
    this one, whose curves the rule hears first.
    """

    def __init__(self, rule: TrialScheduler, space: SearchSpace, earlier: Iterable[TrialRecord] = ()) -> None:
        super().__init__()
        self._rule, self._space, self._earlier = rule, space, tuple(earlier)
        self._heard_s = dict[Known, float]()  # training seconds of the last point that was news
        self._values = defaultdict[int, PointValues](PointValues)  # by the index of the point

    def __getstate__(self) -> dict[str, object]:
        return {}  # Tune keeps a pickled copy of all it was given; nobody reads it

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Tune says what is searched for; only then can a rule take in results."""
        accepted = bool(self._rule.set_search_properties(metric, mode, **spec))
        for trial in self._earlier if accepted else ():
            for point in trial.points:
                if point.get(self._space.metric) is not None:
                    result = reported(point, self._space)
                    self._hear(None, Known(trial.name), result)
                    self._note(trial.name, trial.drawn, result)
                    self._heard_s[Known(trial.name)] = point.train_s
        return accepted

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """A trial begins."""
        self._rule.on_trial_add(tune_controller, _known(trial))

    def on_trial_result(self, tune_controller: Any, trial: Any, result: Mapping[str, Any]) -> str:
        """Whether it goes on after this point; one told again, from a checkpoint, was judged before."""
        if (train_s := result.get("train_s", math.inf)) <= self._heard_s.get(_known(trial), -1.0):
            return str(TrialScheduler.CONTINUE)
        self._heard_s[_known(trial)] = train_s
        values = drawn(trial.config)
        self._note(_known(trial).trial_id, values, result)
        if self._is_judged(values, result):
            self._rule.on_trial_add(tune_controller, _known(trial))  # hearing a point makes ASHA forget the trial
            return str(self._rule.on_trial_result(tune_controller, _known(trial), result))
        self._hear(tune_controller, _known(trial), result)
        return str(TrialScheduler.CONTINUE)

    def _note(self, trial: str, values: Values, result: Mapping[str, Any]) -> None:
        """Remember the value of a point, by the drawn knobs of its trial."""
        if "index" in result and math.isfinite(result["objective"]):
            changes = self._space.changed(values)
            seed = changes.pop("seed", self._space.baseline.seed)
            configuration = repr(sorted(changes.items()))
            self._values[int(result["index"])].add(trial, configuration, seed, float(result["objective"]))

    def _is_judged(self, values: Values, result: Mapping[str, Any]) -> bool:
        """Whether the rule may stop a trial with these drawn knobs after this point."""
        if not any(knob != "seed" for knob in self._space.changed(values)):
            return False
        if (index := int(result.get("index", 0))) >= self._space.baseline.evaluation.points:
            return False
        falls, rate = self._space.mode == "min", self._space.metric == RATE
        return not self._values[index].within_noise(float(result["objective"]), falls, falls or rate)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: Mapping[str, Any]) -> None:
        """It has ended."""
        self._hear(tune_controller, _known(trial), result)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """It never began."""
        self._rule.on_trial_remove(tune_controller, _known(trial))

    def debug_string(self) -> str:
        """The rule's own words."""
        return str(self._rule.debug_string())

    def _hear(self, controller: Any, trial: Known, result: Mapping[str, Any]) -> None:
        """Let the rule take in a result without a judgement; rules do so when a trial completes."""
        self._rule.on_trial_add(controller, trial)
        self._rule.on_trial_complete(controller, trial, result)


def _known(trial: Any) -> Known:
    return Known(trial.config["trial"])
