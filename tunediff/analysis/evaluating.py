"""Estimate how long evaluations will take before they are made.

Most of an evaluation's time goes into passes of samples through a network. So its estimate is the measured
time of one evaluation, times the passes that a workload says it needs (`evaluation_work`), divided by
those of the measured one. Parts that do not grow with the passes (the distance itself, features of the
images where only the sampler's steps grow) make the estimate too large, never too small.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from tunediff import config as cfg
from tunediff.analysis import last
from tunediff.config import ConfigError
from tunediff.core import text
from tunediff.core.trial_record import TrialRecord
from tunediff.search_space import SearchSpace

SAFETY = 2.0
"""A deadline allows this multiple of the expected time of an evaluation."""


Parts = Mapping[str, float]
"""Passes, or seconds of one pass, by part of an evaluation; "" if the workload names no parts."""


def work(config: Any, protocol: Mapping[str, Any] | None = None, of: str = "evaluation_work") -> Parts | None:
    """Return the passes of a sample through each part of one evaluation, with the knobs of `protocol` applied.

    `of`: the workload's function that counts them. None if the workload has no such function or its data
    are missing.
    """
    if (passes := cfg.of(config).get_hook(of)) is None:
        return None
    try:
        count = passes(cfg.override(config, protocol or {}).knobs)
    except ConfigError:
        return None
    return count if isinstance(count, Mapping) else {"": float(count)}


def point_s(trial: TrialRecord) -> float | None:
    """Return the seconds of one evaluation of a trial, the mean over its points; None before the first."""
    spent = (last(trial, "seconds") or {}).get("evaluation")
    return float(spent) / len(trial.points) if spent else None


def final_s(trials: Iterable[TrialRecord], protocol: Mapping[str, Any]) -> float | None:
    """Return the seconds of one evaluation with the knobs of `protocol`: the longest that any of these
    trials would need.

    None if none of them was evaluated, or the workload has no `evaluation_work`.
    """
    estimates = []
    for trial in trials:
        try:
            config = trial.configuration
        except ConfigError:  # the journal of another version
            continue
        measured, before, after = point_s(trial), work(config) or {}, work(config, protocol) or {}
        if measured is not None and (times := [after[part] / before[part] for part in before if before[part]]):
            estimates.append(measured * max(times))
    return max(estimates, default=None)


def allowance_s(trials: Iterable[TrialRecord], protocol: Mapping[str, Any]) -> float:
    """Return the wall-clock that a deadline adds for a final evaluation by `protocol`; 0 without one, or
    if it is not known.
    """
    return SAFETY * (final_s(trials, protocol) or 0.0) if protocol else 0.0


RUN_S, START_S, FRESH_S = 2.0, 15.0, 10.0
"""Seconds that a run takes besides training and evaluation, that a session takes before its first run, and
that processes of a run's own take; measured on two cores."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The most wall-clock seconds that a search will take, before it begins; None: not known."""

    evaluation_s: float | None
    """One evaluation of the baseline."""
    final_s: float | None
    """The additional evaluation of a finished trial by the search's `final`; 0 without one."""
    confirming_final_s: float | None
    """The same for a confirming run."""
    once_s: float
    """Preparation that evaluations need once, unless it is in the cache folder."""
    space: SearchSpace

    @property
    def judging_s(self) -> float:
        """Return the seconds of all evaluations of one trial, as far as they are known."""
        return int(self.space.baseline.evaluation.points) * (self.evaluation_s or 0.0)

    @property
    def trial_s(self) -> float:
        """Return the seconds of one trial."""
        return self.space.longest_s + self.judging_s + (self.final_s or 0.0) + self.run_s

    @property
    def run_s(self) -> float:
        """Return the seconds that a run needs to start."""
        return RUN_S + FRESH_S * (self.space.fresh or self.space.baseline.compile.active)

    @property
    def confirming_s(self) -> float:
        """Return the seconds of all confirming runs that there may be."""
        more = self.judging_s + (self.confirming_final_s or 0.0) + self.run_s
        own = self.space.longest_s / self.space.budget.per_trial_s
        return sum(runs * (own * each_s + more) for runs, each_s in self.space.again)

    def parts(self, slots: int) -> dict[str, float]:
        """Return the seconds by purpose, with trials on `slots` slots at once.

        `wall_clock` is the sum, or the search's limit if that is less.
        """
        trials, total_s = self.space.budget.trials / slots, self.space.budget.total_s
        seconds = {
            "training": trials * self.space.longest_s,
            "evaluation": trials * (self.judging_s + (self.final_s or 0.0)),
            "start_up": START_S + trials * self.run_s + self.once_s,
        }
        seconds["confirmation"] = self.confirming_s
        return seconds | {"wall_clock": min(sum(seconds.values()), math.inf if total_s is None else total_s)}


def seconds_of(
    config: Any, pass_s: Parts | None, protocol: Mapping[str, Any], of: str = "evaluation_work"
) -> float | None:
    """Return the seconds of one evaluation with the knobs of `protocol`, given the seconds of a pass on
    one worker.
    """
    passes = work(config, protocol, of) if pass_s is not None else None
    if pass_s is None or passes is None or not passes.keys() <= pass_s.keys():
        return None
    return sum(count * pass_s[part] for part, count in passes.items()) / float(config.parallel.processes)


def cost(space: SearchSpace, pass_s: Parts | None, evaluation_s: float | None = None, prepared: bool = False) -> Cost:
    """Estimate the cost of a search from `pass_s`, or from the measured seconds of one evaluation.

    `prepared`: the one-time preparation has been done.
    """
    confirm = space.confirm.final if space.confirm is not None else {}
    one_evaluation_s = seconds_of(space.baseline, pass_s, {}) if evaluation_s is None else evaluation_s
    return Cost(
        evaluation_s=one_evaluation_s if space.evaluates else 0.0,
        final_s=seconds_of(space.baseline, pass_s, space.final) if space.final else 0.0,
        confirming_final_s=seconds_of(space.baseline, pass_s, confirm) if confirm else 0.0,
        once_s=0.0 if prepared else seconds_of(space.baseline, pass_s, {}, "evaluation_once") or 0.0,
        space=space,
    )


def advice(cost: Cost, pass_s: Parts | None) -> list[str]:
    """Return how to make evaluation cheaper than training, if it is not: the knobs that save most, each
    changed alone.
    """
    config, training_s = cost.space.baseline, cost.space.longest_s
    if cost.judging_s <= training_s:
        return []
    lines = [f"evaluation takes {cost.judging_s / training_s:.1f} times as long as training"]
    # Try a half and a quarter of every whole number of the evaluation
    saved: list[tuple[float, str, int]] = []
    for name, value in cfg.flat(config).items():
        if not name.startswith("evaluation.") or isinstance(value, bool) or not isinstance(value, int) or value < 2:
            continue
        if name in ("evaluation.seed", "evaluation.batch_size"):
            continue
        # Less than a quarter would no longer measure the same
        for part in (2, 4):
            if value // part < 4 and name != "evaluation.points":
                break
            change, new_s = {name: max(1, value // part)}, None
            if name == "evaluation.points":
                new_s = cost.judging_s * change[name] / value
            else:
                with contextlib.suppress(ConfigError):  # below what is allowed
                    each_s = seconds_of(config, pass_s, cfg.differences(cfg.override(config, change), config))
                    new_s = each_s * config.evaluation.points if each_s is not None else None
            if new_s is not None and new_s < 0.8 * cost.judging_s:
                saved.append((new_s, name, change[name]))
            if new_s is None or new_s <= training_s:
                break
    # The best value of each knob, then the three best knobs
    best = {name: (new_s, value) for new_s, name, value in sorted(saved, reverse=True)}
    for name, (new_s, value) in sorted(best.items(), key=lambda item: item[1][0])[:3]:
        lines.append(f"  {name}={value}: {text.seconds(new_s)} instead of {text.seconds(cost.judging_s)} per trial")
    return lines
