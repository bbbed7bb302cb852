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
from tunediff.tuning.curve_model import NOTHING_TO_GAIN, CurveModel


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


class ForecastRule:
    """Train the trial that is worth most by the forecasts of a `CurveModel`, one point at a time.

    Before each point, the paused trials and the one that has just reached a point compete with each other and with a
    new configuration; see `CurveModel.worth`. The first `START` configurations get one point each.
    """

    START = 6
    """So many first points are needed before a difference between them means something."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space

    def after_point(self, trial: TrialRecord, trials: Sequence[TrialRecord]) -> Decision:
        """Pause the trial, unless it is the one that is worth most."""
        candidates = [trial, *(other for other in trials if other.paused)]
        chosen = self._choose(candidates, trials, at_once=len(trials) >= self._space.budget.trials)
        return Decision.GO_ON if chosen == trial.name else Decision.PAUSE

    def next_trial(self, trials: Sequence[TrialRecord], may_draw: bool) -> str | None:
        """Return the paused trial that is worth most; None: a new configuration is worth more than all of them.

        Where none can be drawn, None says that hardly an improvement is to be expected of any of them.
        """
        paused = [trial for trial in trials if trial.paused]
        return self._choose(paused, trials, at_once=not may_draw)

    def _choose(
        self, candidates: Sequence[TrialRecord], trials: Sequence[TrialRecord], at_once: bool = False
    ) -> str | None:
        """Return the candidate to train; None: a new configuration. `at_once`: none can be drawn."""
        candidates = [trial for trial in candidates if math.isfinite(loss(self._space, trial))]
        drawn = [trial for trial in trials if not is_baseline(self._space, trial.drawn)]
        if not candidates or (len(drawn) < self.START and not at_once):
            return None
        curves = {trial.name: losses(self._space, trial) for trial in trials if trial.points}
        if self._space.mode == "min" and all(value > 0 for curve in curves.values() for value in curve):
            curves = {name: [math.log(value) for value in curve] for name, curve in curves.items()}  # compare ratios
        points = self._space.baseline.evaluation.points
        done = [curve[-1] for curve in curves.values() if len(curve) == points and math.isfinite(curve[-1])]
        if not done:
            return min(candidates, key=lambda trial: (-len(trial.points), loss(self._space, trial))).name
        model = CurveModel.fit(list(curves.values()), points)
        # Of trials with as many points, the one with the best value is worth most
        firsts = {len(trial.points): trial for trial in sorted(candidates, key=self._behind, reverse=True)}
        worth, new = model.worth([curves[trial.name] for trial in firsts.values()], min(done))
        best, name = max(zip(worth, (trial.name for trial in firsts.values()), strict=True))
        return name if best >= (NOTHING_TO_GAIN if at_once else new) else None

    def _behind(self, trial: TrialRecord) -> float:
        return loss(self._space, trial)


def default_rule(space: SearchSpace) -> AllocationRule:
    """Return the rule of a search with `early_stopping: pause`."""
    return ForecastRule(space)


def is_baseline(space: SearchSpace, drawn: Values) -> bool:
    """Return whether drawn knobs are the baseline's, on any seed: it is compared with, so it is neither paused nor
    stopped."""
    return all(knob == "seed" for knob in space.changed(drawn))


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
