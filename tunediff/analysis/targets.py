"""Judge two things of a run, its value and its seconds: a target, and the gate of quality.

Whoever makes a training faster has to show two things: that the model is still good enough, and
that it takes less time. Both must be shown (an intersection–union test: R. L. Berger,
Technometrics 24 (1982), 295–300), so that neither needs a correction for the other: B is wrongly
called better at most as often as the weaker of the two tests errs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from tunediff.analysis.error_spending import EARLY, bounds
from tunediff.analysis.sequential import Rules
from tunediff.analysis.statistics import printed_step
from tunediff.core.errors import ConfigError
from tunediff.core.outcomes import Status
from tunediff.core.target import TIME_TO_TARGET, Target
from tunediff.core.trial_record import TrialRecord
from tunediff.experiment.model import Counted


class QualityGate(NamedTuple):
    """Whether the values of B are shown to be good enough for its seconds to count."""

    shown: bool
    p: float | None
    """One-sided p-value of a single test of these pairs; None: too few, or no noise."""
    statement: str
    """What is to be shown, in words."""


def target_gate(
    b: NDArray[np.float64], target: Target, max_pairs: int, rules: Rules
) -> QualityGate:
    """Test whether the mean of B's values meets a target: a one-sample t-test after every pair."""
    worse = b - target.value if target.lower_is_better else target.value - b
    words = f"the mean of B meets {target}"
    return _gate(worse, 0.0, words, max_pairs, rules, printed_step(b))


def margin_gate(
    a: NDArray[np.float64], b: NDArray[np.float64], margin: float, lower: bool, max_pairs: int,
    rules: Rules,
) -> QualityGate:  # fmt: skip
    """Test whether B is worse than A by less than a margin, pair by pair."""
    worse, words = b - a if lower else a - b, f"B is not worse than A by {margin:g}"
    return _gate(worse, margin, words, max_pairs, rules, _step_of_pairs(a, b))


def equal_gate(
    a: NDArray[np.float64], b: NDArray[np.float64], within: float, max_pairs: int, rules: Rules
) -> QualityGate:
    """Test whether B differs from A by less than a bound either way: two one-sided tests (D. J.
    Schuirmann, J. Pharmacokinet. Biopharm. 15 (1987), 657–680)."""
    words = f"B equals A within {within:g}"
    step = _step_of_pairs(a, b)
    above, below = (
        _gate(sign * (b - a), within, words, max_pairs, rules, step) for sign in (1, -1)
    )
    p_values = [gate.p for gate in (above, below) if gate.p is not None]
    return QualityGate(above.shown and below.shown, max(p_values, default=None), words)


def _step_of_pairs(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return the step of differences of values, each of which is rounded by itself."""
    return math.sqrt(2) * printed_step(np.concatenate([a, b]))


def _gate(
    worse: NDArray[np.float64], margin: float, statement: str, max_pairs: int, rules: Rules,
    step: float,
) -> QualityGate:  # fmt: skip
    """Test whether the mean of `worse` is below a margin, with the error of the looks so far.

    `step`: to which it is rounded, whose error (uniform, step/√12) is part of the noise: values
    that repeat themselves do not show that there is none.
    """
    n = len(worse)
    if n < 2:
        return QualityGate(False, None, statement)
    level = rules.level if rules.one_sided else rules.level / 2
    limit = bounds(level, max_pairs, EARLY.power, one_sided=True, fixed=rules.fixed)[n - 1]
    room = margin - float(worse.mean())
    sd, rounding = float(worse.std(ddof=1)), step / math.sqrt(12)
    error = math.hypot(sd, rounding) / math.sqrt(n)
    if sd < rounding:  # then rounding is hardly a noise: it is the same in all runs, and stays
        error = math.hypot(sd / math.sqrt(n), rounding)
    # The p-value is that of the plain test, as the rules of speedruns have it
    p = float(special.stdtr(n - 1, -room * math.sqrt(n) / sd)) if sd else None
    return QualityGate(room > limit * error, p, statement)


def ended_at_target(run: TrialRecord) -> bool:
    """Return whether a run was ended where it met its target: it is good enough."""
    return bool(run.points) and run.points[-1].get(TIME_TO_TARGET) is not None


def seconds_of(run: TrialRecord, target: Target | None, counted: Counted) -> float | None:
    """Return the seconds of a run that count; None: it did not end ok, or missed its target."""
    if run.status != Status.OK or not run.points:
        return None
    if counted == "first" and target is not None:
        return target.seconds(run.points, run.along)
    return float(run.points[-1][run.along])


def margin_of(words: str | None) -> float | None:
    """Return --margin, a bound in units of the metric. Raises `ConfigError`."""
    if words is None:
        return None
    try:
        value = float(words)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        allowed = "a number above 0 in units of the metric, such as 0.01"
        raise ConfigError(f"--margin: {words!r} is not allowed; allowed: {allowed}")
    return value
