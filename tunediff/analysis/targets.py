"""Judge two things of a run, its value and its seconds: a target, and the gate of quality.

Whoever makes a training faster has to show two things: that the model is still good enough, and
that it takes less time. Both must be shown (an intersection–union test: R. L. Berger,
Technometrics 24 (1982), 295–300), so that neither needs a correction for the other: B is wrongly
called better at most as often as the weaker of the two tests errs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from tunediff.analysis.error_spending import EARLY, bounds, last_analysis
from tunediff.analysis.sequential import Rules
from tunediff.analysis.statistics import printed_step
from tunediff.core.outcomes import Status
from tunediff.core.target import TIME_TO_TARGET, Target
from tunediff.core.trial_record import TrialRecord

Requirement = Literal["target", "margin"]
"""What has to be shown: that the mean of B meets the target, or that it is not worse by a margin."""


class QualityGate(NamedTuple):
    """Whether the values of B are shown to be good enough for its seconds to count."""

    requirement: Requirement
    shown: bool
    p: float | None
    """One-sided p-value of a single test of these pairs; None: too few, or no noise."""


def quality_gates(
    values: NDArray[np.float64], runs: Sequence[TrialRecord], rules: Rules, lower: bool
) -> list[QualityGate]:
    """Return what has to be shown of B's values [2, pairs] for its seconds to count; NaN: no
    run."""
    gates = list[QualityGate]()
    if not rules.by_time:
        return gates
    # Pairs: a margin is one of differences on equal seeds
    a, b = values[:, np.isfinite(values).all(axis=0)]
    if rules.target is not None and not all(map(ended_at_target, runs)):
        gates.append(target_gate(b, rules.target, rules))
    if rules.margin is not None:
        gates.append(margin_gate(a, b, rules.margin, lower, rules))
    return gates


def target_gate(b: NDArray[np.float64], target: Target, rules: Rules) -> QualityGate:
    """Test whether the mean of B's values meets a target: a one-sample t-test after every pair."""
    worse = b - target.value if target.lower_is_better else target.value - b
    return _gate(worse, 0.0, "target", rules, printed_step(b))


def margin_gate(
    a: NDArray[np.float64], b: NDArray[np.float64], margin: float, lower: bool, rules: Rules
) -> QualityGate:
    """Test whether B is worse than A by less than a margin, pair by pair."""
    worse, step = b - a if lower else a - b, printed_step(np.concatenate([a, b]))
    return _gate(worse, margin, "margin", rules, math.sqrt(2) * step)  # both values are rounded


def _gate(
    worse: NDArray[np.float64], margin: float, requirement: Requirement, rules: Rules, step: float
) -> QualityGate:
    """Test whether the mean of `worse` is below a margin, with the error of the analyses so far.

    `step`: to which it is rounded, whose error (uniform, step/√12) is part of the noise: values
    that repeat themselves do not show that there is none.
    """
    worse = worse[: last_analysis(len(worse), rules.max_rounds)]
    n = len(worse)
    if n < 2:
        return QualityGate(requirement, False, None)
    level = rules.level if rules.one_sided else rules.level / 2
    limit = bounds(level, rules.max_rounds, EARLY.power, one_sided=True, fixed=rules.fixed)[n - 1]
    room = margin - float(worse.mean())
    sd, rounding = float(worse.std(ddof=1)), step / math.sqrt(12)
    error = math.hypot(sd, rounding) / math.sqrt(n)
    if sd < rounding:  # then rounding is hardly a noise: it is the same in all runs, and stays
        error = math.hypot(sd / math.sqrt(n), rounding)
    # The p-value is that of the plain test, as the rules of speedruns have it
    p = float(special.stdtr(n - 1, -room * math.sqrt(n) / sd)) if sd else None
    return QualityGate(requirement, room > limit * error, p)


def ended_at_target(run: TrialRecord) -> bool:
    """Return whether a run was ended where it met its target, so that it is good enough, or missed
    it, which counts in seconds."""
    met = bool(run.points) and run.points[-1].get(TIME_TO_TARGET) is not None
    return met or run.status == Status.MISSED


def seconds_of(run: TrialRecord, rules: Rules) -> float | None:
    """Return the seconds of a run that count; ∞: it missed its target; None: it has failed."""
    if run.status == Status.MISSED:
        return math.inf
    if run.status != Status.OK or not run.points:
        return None
    if rules.counted == "first" and rules.target is not None:
        met_s = rules.target.seconds(run.points, run.along)
        return math.inf if met_s is None else met_s
    return float(run.points[-1][run.along])
