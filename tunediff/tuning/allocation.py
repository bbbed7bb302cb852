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


def default_rule(space: SearchSpace) -> AllocationRule:
    """Return the rule of a search with `early_stopping: pause`."""
    return BestOfGroup(space)


def is_baseline(space: SearchSpace, drawn: Values) -> bool:
    """Return whether drawn knobs are the baseline's, on any seed: it is compared with, so it is neither paused nor
    stopped."""
    return all(knob == "seed" for knob in space.changed(drawn))


def loss(space: SearchSpace, trial: TrialRecord) -> float:
    """Return the objective at a trial's last point, with its sign changed where more is better; not finite: inf."""
    value = trial.points[-1].get(space.metric) if trial.points else None
    if value is None or not math.isfinite(value):
        return math.inf
    return float(value) if space.mode == "min" else -float(value)
