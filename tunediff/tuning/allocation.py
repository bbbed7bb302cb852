"""Decide which trials go on, pause and continue: how a search with `early_stopping: pause` spends its time.

The rule reads the trials as their journals describe them and knows no Ray: a search and a replay of recorded curves ask
it alike. It decides at two moments: after every point of a trial but the last one, and when a slot is free. Its answers
depend on the trials only, so that a search that is resumed goes on as it would have.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

from tunediff.config import Values
from tunediff.core.trial_record import TrialRecord
from tunediff.search_space import SearchSpace


class Decision(enum.Enum):
    """What a trial does after a point."""

    GO_ON = "go on"
    PAUSE = "pause"
    """It keeps its checkpoint and gives its slot back; `Promotion.next_trial` may continue it."""


class Promotion:
    """Pause trials at 1, 2, 4, … points, and continue those that are in the better half at their rung.

    The highest rung with such a trial goes first; without any, a new configuration is drawn. Source: Li et al. 2020,
    «A system for massively parallel hyperparameter tuning» (ASHA), algorithm 2, with reduction factor 2.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._rungs = [2**i for i in range(space.baseline.evaluation.points.bit_length())]

    def after_point(self, trial: TrialRecord, trials: Sequence[TrialRecord]) -> Decision:
        """Pause every trial at its rungs. Not asked after the last point of a budget, nor for runs of the baseline."""
        return Decision.PAUSE if len(trial.points) in self._rungs else Decision.GO_ON

    def next_trial(self, trials: Sequence[TrialRecord], may_draw: bool) -> str | None:
        """Return a paused trial that is in the better half of all that have reached its rung; None: there is none.

        `may_draw`: whether a limit or the space leaves room for a new configuration; this rule does not depend on it.
        """
        for rung in reversed(self._rungs):
            reached = [trial for trial in trials if len(trial.points) >= rung]
            reached.sort(key=lambda trial: (losses(self._space, trial)[rung - 1], trial.number))
            for trial in reached[: len(reached) // 2]:
                if trial.paused and len(trial.points) == rung:
                    return trial.name
        return None


def is_baseline(space: SearchSpace, drawn: Values) -> bool:
    """Return whether drawn knobs are the baseline's, on any seed."""
    return all(knob == "seed" for knob in space.changed(drawn))


def runs_through(space: SearchSpace, drawn: Values) -> bool:
    """Return whether a trial is neither paused nor stopped: others are compared with the baseline, and a configuration
    that runs again is compared by the mean of whole runs."""
    return "seed" in drawn or is_baseline(space, drawn)


def loss(space: SearchSpace, trial: TrialRecord) -> float:
    """Return the objective at a trial's last point, with its sign changed where more is better; not finite: inf."""
    return losses(space, trial)[-1] if trial.points else math.inf


def losses(space: SearchSpace, trial: TrialRecord) -> list[float]:
    """Return the objective at every point of a trial, as `loss` has it."""
    values = [point.get(space.metric) for point in trial.points]
    return [
        (float(value) if space.mode == "min" else -float(value))
        if value is not None and math.isfinite(value) else math.inf
        for value in values
    ]  # fmt: skip
