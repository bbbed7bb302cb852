"""When a trial is stopped early: Tune's own rules, which never judge the baseline and forget nothing over a resume."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from tunediff.record import TrialRecord
from tunediff.space import SearchSpace
from tunediff.tuning.messages import drawn
from tunediff.tuning.trial import reported


class Known(NamedTuple):
    """A trial as the rule knows it: by our name, which outlives a session; Tune's id does not."""

    trial_id: str


class Fair(FIFOScheduler):  # type: ignore[misc]
    """A rule that all trials are held against and all but the baseline, on whatever seed, are judged by.

    Every figure of a search is told beside the finished baseline: stopped early, it would leave none. `earlier`: the
    trials of the sessions before this one, whose curves the rule hears first.
    """

    def __init__(self, rule: TrialScheduler, space: SearchSpace, earlier: Iterable[TrialRecord] = ()) -> None:
        super().__init__()
        self._rule, self._space, self._earlier = rule, space, tuple(earlier)
        self._heard_s = dict[Known, float]()  # training seconds of the last point that was news

    def __getstate__(self) -> dict[str, object]:
        return {}  # Tune keeps a pickled copy of all it was given; nobody reads it

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Tune says what is searched for; only then can a rule take in results."""
        accepted = bool(self._rule.set_search_properties(metric, mode, **spec))
        for trial in self._earlier if accepted else ():
            for point in trial.points:
                if point.get(self._space.metric) is not None:
                    self._hear(None, Known(trial.name), reported(point, self._space))
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
        if any(knob != "seed" for knob in self._space.changed(drawn(trial.config))):
            return str(self._rule.on_trial_result(tune_controller, _known(trial), result))
        self._hear(tune_controller, _known(trial), result)
        return str(TrialScheduler.CONTINUE)

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
