"""What judging models costs: how long an evaluation will take, before it is made.

Most of an evaluation is passes of samples through a network. So its seconds are those of one that was measured, times
the passes that a workload says it needs (`evaluation_work`), over those of the measured one. What does not grow with
them (the distance itself, features of the images where only the sampler's steps grow) makes that too much, not too
little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.record import TrialRecord
from tunediff.results import last
from tunediff.space import SearchSpace

SAFETY = 2.0
"""A deadline allows for so many times what an evaluation is expected to take."""


def work(config: Any, protocol: Mapping[str, Any] | None = None) -> float | None:
    """Passes of a sample through the network in one evaluation, with the knobs of `protocol` if there are any.

    None where the workload does not say so, or its data are not at hand.
    """
    if (passes := cfg.of(config).offers("evaluation_work")) is None:
        return None
    try:
        return float(passes(cfg.override(config, protocol or {}).knobs))
    except ConfigError:
        return None


def point_s(trial: TrialRecord) -> float | None:
    """Seconds of one evaluation of a trial, the mean over its points; None before the first."""
    spent = (last(trial, "seconds") or {}).get("evaluation")
    return float(spent) / len(trial.points) if spent else None


def final_s(trials: Iterable[TrialRecord], protocol: Mapping[str, Any]) -> float | None:
    """Seconds of one evaluation by the knobs of `protocol`: the longest that any of these trials would need.

    None where none of them was evaluated, or the workload has no `evaluation_work`.
    """
    found = []
    for trial in trials:
        try:
            config = trial.configuration
        except ConfigError:  # the journal of another version
            continue
        measured, before, then = point_s(trial), work(config), work(config, protocol)
        if measured is not None and before and then is not None:
            found.append(measured * then / before)
    return max(found, default=None)


def allowance_s(trials: Iterable[TrialRecord], protocol: Mapping[str, Any]) -> float:
    """Wall-clock that a deadline adds for a final evaluation by `protocol`; 0 without one, or where nothing is known of
    it."""
    return SAFETY * (final_s(trials, protocol) or 0.0) if protocol else 0.0


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the evaluations of a search will take that has not begun, in seconds of wall-clock; None: not known."""

    evaluation_s: float | None
    """One evaluation of the baseline."""
    evaluations: int
    """Of all trials, final ones apart."""
    finals: tuple[tuple[str, int, float | None], ...] = ()
    """(of what, runs, seconds of each): final evaluations at full protocol."""


def cost(space: SearchSpace, pass_s: float | None) -> Cost:
    """By the baseline's knobs and `pass_s`, measured seconds of one sample through its network on one worker."""

    def seconds(protocol: Mapping[str, Any]) -> float | None:
        passes = work(space.baseline, protocol)
        return None if pass_s is None or passes is None else passes * pass_s / space.baseline.parallel.workers

    finals, again = [("trial", space.budget.trials, seconds(space.final))] if space.final else [], space.confirm
    if again is not None and again.final:
        finals.append(("confirming run", sum(runs for runs, _ in space.again), seconds(again.final)))
    return Cost(seconds({}), space.budget.trials * space.baseline.evaluation.points, tuple(finals))
