"""Decide which trials go on, pause and continue: how a search with `early_stopping: pause` spends its time.

A rule reads the trials as their journals describe them and knows no Ray: a search, a replay of recorded curves and a
simulation ask it alike. It decides at two moments: after every point of a trial but the last one, and when a slot is
free.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Protocol

from tunediff.config import Values
from tunediff.core.trial_record import TrialRecord
from tunediff.search_space import SearchSpace


class Decision(enum.Enum):
    """What a trial does after a point."""

    GO_ON = "go on"
    PAUSE = "pause"
    """It keeps its checkpoint and gives its slot back; `AllocationRule.next_trial` may continue it."""
    END = "end"
    """It ends as `pruned`."""


class AllocationRule(Protocol):
    """Chooses how the time of a search is spent. Its answers depend on the trials only, so that a search that is
    resumed goes on as it would have."""

    def after_point(self, trial: TrialRecord, trials: Sequence[TrialRecord]) -> Decision:
        """Return what `trial` does after its last point; `trials`: all trials of the search so far, it included.

        Not asked after the last point of a budget, nor for the baseline on any seed.
        """

    def next_trial(self, trials: Sequence[TrialRecord], may_draw: bool) -> str | None:
        """Return the name of the paused trial that continues on a free slot; None: a new configuration is drawn.

        `may_draw`: whether a limit or the space leaves room for a new configuration. Where it does not, None says
        that no paused trial is worth continuing, which ends the search.
        """


class BestOfGroup:
    """Train every trial to its first point; then continue the best one of every `size` trials to its end.

    A group is `size` trials by their numbers, the baseline's runs not counted. Those that are left over continue none,
    unless they are all there are. A trial that was continued and failed before its second point is replaced by the next
    best. Source of the rule: «one epoch, then the best k», arXiv 2307.15422.
    """

    def __init__(self, space: SearchSpace, size: int = 6) -> None:
        self._space, self._size = space, size

    def after_point(self, trial: TrialRecord, trials: Sequence[TrialRecord]) -> Decision:
        """Pause every trial at its first point."""
        return Decision.PAUSE if len(trial.points) == 1 else Decision.GO_ON

    def next_trial(self, trials: Sequence[TrialRecord], may_draw: bool) -> str | None:
        """Return the best trial of the first group that has no trial beyond its first point, and none that runs."""
        compared = sorted(
            (trial for trial in trials if not is_baseline(self._space, trial.drawn)), key=lambda trial: trial.number
        )
        for first in range(0, len(compared), self._size):
            group = compared[first : first + self._size]
            if len(group) < self._size and (may_draw or first):
                return None
            paused = [trial for trial in group if trial.paused]
            if paused and all((trial.paused or trial.finished) and len(trial.points) <= 1 for trial in group):
                return min(paused, key=lambda trial: loss(self._space, trial)).name
        return None


class Promotion:
    """Pause trials at 1, 2, 4, … points, and continue those that are in the better half at their rung.

    The highest rung with such a trial goes first; without any, a new configuration is drawn. Source: Li et al. 2020,
    «A system for massively parallel hyperparameter tuning» (ASHA), algorithm 2, with reduction factor 2.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._rungs = [2**i for i in range(space.baseline.evaluation.points.bit_length())]

    def after_point(self, trial: TrialRecord, trials: Sequence[TrialRecord]) -> Decision:
        """Pause every trial at its rungs."""
        return Decision.PAUSE if len(trial.points) in self._rungs else Decision.GO_ON

    def next_trial(self, trials: Sequence[TrialRecord], may_draw: bool) -> str | None:
        """Return a paused trial that is in the better half of all that have reached its rung; None: there is none."""
        for rung in reversed(self._rungs):
            reached = [trial for trial in trials if len(trial.points) >= rung]
            reached.sort(key=lambda trial: (losses(self._space, trial)[rung - 1], trial.number))
            for trial in reached[: len(reached) // 2]:
                if trial.paused and len(trial.points) == rung:
                    return trial.name
        return None


def default_rule(space: SearchSpace) -> AllocationRule:
    """Return the rule of a search with `early_stopping: pause`."""
    return Promotion(space)


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
