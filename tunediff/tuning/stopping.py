"""Early stopping by Tune's own rules, but for the runs of the baseline: all others are compared with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule, TrialScheduler

from tunediff.config import Values
from tunediff.tuning.messages import drawn


class _Sparing:
    """What such a run has reached counts for the others, and stops them."""

    spared: Sequence[Values] = ()
    """The drawn knobs of the trials that are never stopped."""

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision: str = super().on_trial_result(controller, trial, result)  # type: ignore[misc]
        if decision != TrialScheduler.STOP or drawn(trial.config) not in self.spared:
            return decision
        getattr(self, "_stopped_trials", set()).discard(trial)  # the median rule expects no further word of those
        return str(TrialScheduler.CONTINUE)


class Asha(_Sparing, ASHAScheduler):  # type: ignore[misc]
    """Asynchronous successive halving."""


class Median(_Sparing, MedianStoppingRule):  # type: ignore[misc]
    """The median stopping rule."""
