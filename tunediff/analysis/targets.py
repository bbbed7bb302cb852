"""Judge two things of a run, its value and its seconds: a target, and the gate of quality.

Whoever makes a training faster has to show two things: that the model is still good enough, and
that it takes less time. Both must be shown (an intersection–union test: R. L. Berger,
Technometrics 24 (1982), 295–300), so that neither needs a correction for the other: B is wrongly
called better at most as often as the weaker of the two tests errs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from tunediff.analysis.error_spending import EARLY, bounds
from tunediff.analysis.reach import seconds_to
from tunediff.analysis.sequential import Rules
from tunediff.core.errors import ConfigError
from tunediff.core.trial_record import TrialRecord

TIME_TO_TARGET = "time_to_target_s"
"""Quantity of a point at which a command has met its target."""
Counted = Literal["first", "end"]
"""Which seconds count: those until the target is first met, or those of the whole run."""
NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_COMPARISON = re.compile(rf"\s*([\w./-]+)\s*(<=|>=|<|>)\s*({NUMBER})\s*", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Target:
    """A value that a metric is to reach: `val_loss<=3.28`."""

    metric: str
    sign: str
    value: float

    @classmethod
    def of(cls, text: str, where: str) -> Target:
        """Raises `ConfigError` for a text that is no such comparison."""
        match = _COMPARISON.fullmatch(text)
        if match is None or not math.isfinite(float(match[3])):
            raise ConfigError(f"{where}: {text!r} is not allowed; allowed: such as val_loss<=3.28")
        return cls(match[1], match[2], float(match[3]))

    def met(self, value: float) -> bool:
        """Return whether a value reaches it; NaN never does."""
        if self.sign.startswith("<"):
            return value <= self.value if self.sign == "<=" else value < self.value
        return value >= self.value if self.sign == ">=" else value > self.value

    @property
    def lower_is_better(self) -> bool:
        return self.sign.startswith("<")

    def seconds(self, run: TrialRecord) -> float | None:
        """Return when a run first met it; None: never.

        A command was ended there. Between two evaluations of a training it is interpolated
        linearly; at its first one it is that second.
        """
        if not run.points:
            return None
        if (exact := run.points[-1].get(TIME_TO_TARGET)) is not None:
            return float(exact)
        sign = 1.0 if self.lower_is_better else -1.0
        curve = [
            (float(point[run.along]), sign * float(point[self.metric]))
            for point in run.points
            if point.get(self.metric) is not None
        ]
        return seconds_to(curve, sign * self.value)


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
    return _gate(worse, 0.0, f"the mean of B meets {target.metric}{target.sign}{target.value:g}",
                 max_pairs, rules)  # fmt: skip


def margin_gate(
    a: NDArray[np.float64], b: NDArray[np.float64], margin: float, lower: bool, max_pairs: int,
    rules: Rules,
) -> QualityGate:  # fmt: skip
    """Test whether B is worse than A by less than a margin, pair by pair."""
    worse = b - a if lower else a - b
    return _gate(worse, margin, f"B is not worse than A by {margin:g}", max_pairs, rules)


def equal_gate(
    a: NDArray[np.float64], b: NDArray[np.float64], within: float, max_pairs: int, rules: Rules
) -> QualityGate:
    """Test whether B differs from A by less than a bound either way: two one-sided tests (D. J.
    Schuirmann, J. Pharmacokinet. Biopharm. 15 (1987), 657–680)."""
    words = f"B equals A within {within:g}"
    above, below = (_gate(sign * (b - a), within, words, max_pairs, rules) for sign in (1, -1))
    p_values = [gate.p for gate in (above, below) if gate.p is not None]
    return QualityGate(above.shown and below.shown, max(p_values, default=None), words)


def _gate(
    worse: NDArray[np.float64], margin: float, statement: str, max_pairs: int, rules: Rules
) -> QualityGate:
    """Test whether the mean of `worse` is below a margin, with the error of the looks so far."""
    n = len(worse)
    if n < 2:
        return QualityGate(False, None, statement)
    level = rules.level if rules.one_sided else rules.level / 2
    limit = bounds(level, max_pairs, EARLY.power, one_sided=True, fixed=rules.fixed)[n - 1]
    error, room = float(worse.std(ddof=1)) / math.sqrt(n), margin - float(worse.mean())
    if error == 0:  # values that repeat exactly
        return QualityGate(room >= 0 and math.isfinite(limit), None, statement)
    p = float(special.stdtr(n - 1, -room / error))
    return QualityGate(room > limit * error, p, statement)


def ended_at_target(run: TrialRecord) -> bool:
    """Return whether a run was ended where it met its target: it is good enough."""
    return bool(run.points) and run.points[-1].get(TIME_TO_TARGET) is not None


def seconds_of(run: TrialRecord, target: Target | None, counted: Counted) -> float | None:
    """Return the seconds of a run that count; None: it did not end ok, or missed its target."""
    if run.status != "ok" or not run.points:
        return None
    if counted == "first" and target is not None:
        return target.seconds(run)
    return float(run.points[-1][run.along])


def margin_of(words: str | None, where: str, example: Any = 0.01) -> float | None:
    """Return a bound in units of the metric. Raises `ConfigError`."""
    if words is None:
        return None
    try:
        value = float(words)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(
            f"{where}: {words!r} is not allowed; allowed: a number above 0 in units of the metric,"
            f" such as {example}"
        )
    return value
