"""What judging models costs: how long an evaluation will take, before it is made.

Most of an evaluation is passes of samples through a network. So its seconds are those of one that was measured, times
the passes that a workload says it needs (`evaluation_work`), over those of the measured one. What does not grow with
them (the distance itself, features of the images where only the sampler's steps grow) makes that too much, not too
little.
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
"""A deadline allows for so many times what an evaluation is expected to take."""


Parts = Mapping[str, float]
"""Passes, or seconds of one, by the parts of an evaluation; "" where its workload names none."""


def work(config: Any, protocol: Mapping[str, Any] | None = None, of: str = "evaluation_work") -> Parts | None:
    """Passes of a sample through each part of one evaluation, with the knobs of `protocol` if there are any.

    None where the workload does not say so, or its data are not at hand.
    """
    if (passes := cfg.of(config).get_hook(of)) is None:
        return None
    try:
        found = passes(cfg.override(config, protocol or {}).knobs)
    except ConfigError:
        return None
    return found if isinstance(found, Mapping) else {"": float(found)}


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
        measured, before, then = point_s(trial), work(config) or {}, work(config, protocol) or {}
        if measured is not None and (times := [then[part] / before[part] for part in before if before[part]]):
            found.append(measured * max(times))
    return max(found, default=None)


def allowance_s(trials: Iterable[TrialRecord], protocol: Mapping[str, Any]) -> float:
    """Wall-clock that a deadline adds for a final evaluation by `protocol`; 0 without one, or where nothing is known of
    it."""
    return SAFETY * (final_s(trials, protocol) or 0.0) if protocol else 0.0


RUN_S, START_S, FRESH_S = 2.0, 15.0, 10.0
"""What a run takes besides training and judging, what a session takes before its first, and processes of one's own:
as measured on two cores."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a search will take that has not begun, in seconds of wall-clock at most; None: not known."""

    evaluation_s: float | None
    """One evaluation of the baseline."""
    final_s: float | None
    """One more of a finished trial, by the search's `final`; 0 without."""
    confirming_final_s: float | None
    """Likewise of a confirming run."""
    once_s: float
    """What judging needs once, where the cache folder has it not."""
    space: SearchSpace

    @property
    def judging_s(self) -> float:
        """All evaluations of one trial, as far as they are known."""
        return int(self.space.baseline.evaluation.points) * (self.evaluation_s or 0.0)

    @property
    def trial_s(self) -> float:
        """A trial."""
        return self.space.longest_s + self.judging_s + (self.final_s or 0.0) + self.run_s

    @property
    def run_s(self) -> float:
        """What a run needs to start."""
        return RUN_S + FRESH_S * (self.space.fresh or self.space.baseline.compile.active)

    @property
    def confirming_s(self) -> float:
        """All confirming runs there may be."""
        more = self.judging_s + (self.confirming_final_s or 0.0) + self.run_s
        own = self.space.longest_s / self.space.budget.per_trial_s
        return sum(runs * (own * each_s + more) for runs, each_s in self.space.again)

    def parts(self, slots: int) -> dict[str, float]:
        """By what it is spent on, the trials on so many slots at once; `wall_clock` is the sum, or the limit."""
        trials, total_s = self.space.budget.trials / slots, self.space.budget.total_s
        found = {
            "training": trials * self.space.longest_s,
            "evaluation": trials * (self.judging_s + (self.final_s or 0.0)),
            "start_up": START_S + trials * self.run_s + self.once_s,
        }
        found["confirmation"] = self.confirming_s
        return found | {"wall_clock": min(sum(found.values()), math.inf if total_s is None else total_s)}


def seconds_of(
    config: Any, pass_s: Parts | None, protocol: Mapping[str, Any], of: str = "evaluation_work"
) -> float | None:
    """Of one evaluation by the knobs of `protocol`, given seconds of a pass on one worker."""
    passes = work(config, protocol, of) if pass_s is not None else None
    if pass_s is None or passes is None or not passes.keys() <= pass_s.keys():
        return None
    return sum(count * pass_s[part] for part, count in passes.items()) / float(config.parallel.processes)


def cost(space: SearchSpace, pass_s: Parts | None, evaluation_s: float | None = None, prepared: bool = False) -> Cost:
    """By the baseline's knobs and `pass_s`, or the measured seconds of one evaluation. `prepared`: nothing of `once` is
    left."""
    confirm = space.confirm.final if space.confirm is not None else {}
    known = seconds_of(space.baseline, pass_s, {}) if evaluation_s is None else evaluation_s
    return Cost(
        evaluation_s=known if space.evaluates else 0.0,
        final_s=seconds_of(space.baseline, pass_s, space.final) if space.final else 0.0,
        confirming_final_s=seconds_of(space.baseline, pass_s, confirm) if confirm else 0.0,
        once_s=0.0 if prepared else seconds_of(space.baseline, pass_s, {}, "evaluation_once") or 0.0,
        space=space,
    )


def advice(cost: Cost, pass_s: Parts | None) -> list[str]:
    """What would make judging cheaper than training, where it is not: the knobs that save most, each alone."""
    config, training_s = cost.space.baseline, cost.space.longest_s
    if cost.judging_s <= training_s:
        return []
    said = [f"evaluation takes {cost.judging_s / training_s:.1f} times as long as training"]
    saved: list[tuple[float, str, int]] = []
    for name, value in cfg.flat(config).items():
        if not name.startswith("evaluation.") or isinstance(value, bool) or not isinstance(value, int) or value < 2:
            continue
        if name in ("evaluation.seed", "evaluation.batch_size"):
            continue
        for part in (2, 4):  # what is cheaper still would no longer measure the same
            if value // part < 4 and name != "evaluation.points":
                break
            change, then = {name: max(1, value // part)}, None
            if name == "evaluation.points":
                then = cost.judging_s * change[name] / value
            else:
                with contextlib.suppress(ConfigError):  # below what is allowed
                    each_s = seconds_of(config, pass_s, cfg.differences(cfg.override(config, change), config))
                    then = each_s * config.evaluation.points if each_s is not None else None
            if then is not None and then < 0.8 * cost.judging_s:
                saved.append((then, name, change[name]))
            if then is None or then <= training_s:
                break
    best = {name: (then, value) for then, name, value in sorted(saved, reverse=True)}
    for name, (then, value) in sorted(best.items(), key=lambda one: one[1][0])[:3]:
        said.append(f"  {name}={value}: {text.seconds(then)} instead of {text.seconds(cost.judging_s)} per trial")
    return said
