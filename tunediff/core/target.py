"""A value that a metric is to reach, and when the curve of a run has reached it."""

from __future__ import annotations

import collections
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from tunediff.core.errors import ConfigError
from tunediff.core.options import allow

TIME_TO_TARGET = "time_to_target_s"
"""Quantity of the point at which a run has met its target and was ended: when it was met."""
NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_COMPARISON = re.compile(rf"\s*([^<>=]*[^<>=\s])\s*(<=|>=|<|>)\s*({NUMBER})\s*", re.IGNORECASE)
EVALUATIONS, APART = 3, 0.05
"""Evaluations whose mean has to meet a target, and by which share of the seconds since the first one
each of them comes after the one before. Simulated, equal trainings of which one is evaluated ten times as often differ
in at most 5 %; by the first value that meets it they do in 53 to 89 %."""
Evaluation = tuple[float, float]
"""Training seconds and value."""
Curve = Sequence[tuple[float, float]]
"""(training seconds, loss) of every evaluation, in order; a smaller loss is better."""


def seconds_to(falling: Curve, loss: float) -> float | None:
    """Return when a falling curve reaches `loss`, interpolated linearly; None: never.

    At the earliest that is its first evaluation.
    """
    before: tuple[float, float] | None = None
    for seconds, now in falling:
        if now <= loss:
            if before is None:
                return seconds
            return before[0] + (before[1] - loss) / (before[1] - now) * (seconds - before[0])
        before = (seconds, now)
    return None


class Evaluated(Protocol):
    """Values of one evaluation by name, as `Point` has them."""

    def get(self, name: str) -> Any: ...


class Target(NamedTuple):
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

    @classmethod
    def of_objective(cls, text: str, metric: str, mode: str, where: str) -> Target:
        """Return an objective's target. Raises `ConfigError` for a wrong metric or direction."""
        target = cls.of(text, where)
        allow(target.metric == metric, where, text, f"one of {metric}")
        sign = "<=" if mode == "min" else ">="
        fits = target.lower_is_better == (mode == "min")
        allow(fits, where, text, f"{metric}{sign}…: its mode is {mode}")
        return target

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.value:.15g}"

    @property
    def missed(self) -> str:
        """Return how a run ended that never met it."""
        return f"no mean of evaluations {100 * APART:.0f} % of the time apart met {self}"

    @property
    def lower_is_better(self) -> bool:
        return self.sign.startswith("<")

    def met(self, value: float) -> bool:
        """Return whether a value reaches it; NaN never does."""
        if self.sign.startswith("<"):
            return value <= self.value if self.sign == "<=" else value < self.value
        return value >= self.value if self.sign == ">=" else value > self.value

    def seconds(self, points: Sequence[Evaluated], along: str, ended: bool = False) -> float | None:
        """Return when the curve of a run met it, see `Approach`; None: never. `along`: what seconds
        are. A run that was ended there says it; one that has spent its budget has `ended` too."""
        if points and (noted := points[-1].get(TIME_TO_TARGET)) is not None:
            return float(noted)
        approach = Approach(self)
        for point in points:
            if (value := point.get(self.metric)) is not None:
                met_s = approach.add(float(point.get(along)), float(value))
                if met_s is not None:
                    return met_s
        ended |= bool(points) and points[-1].get("fraction") == 1.0
        return approach.end() if ended else None


class Approach:
    """Takes the evaluations of a run, one by one, and says when they have met a target.

    A value that meets it once may be luck, and a run that is evaluated more often has more luck. So
    the mean of the last evaluations has to meet it, and one that comes too soon after another does
    not count. That mean is as good as the model was at the mean of their seconds; between two means
    it is interpolated linearly, so that rare evaluations cost nothing.
    """

    def __init__(
        self, target: Target, evaluations: int = EVALUATIONS, last: Iterable[Evaluation] = (),
        newest: Iterable[Evaluation] = (), before: Evaluation | None = None,
        first_s: float | None = None,
    ) -> None:  # fmt: skip
        """`evaluations`: over how many values the mean is, fewer at the end of a run. The rest
        is the `state` of one that goes on: evaluations that count, the newest of all, the mean
        before, and when the first one came, before which lies the start-up and no training."""
        self._target, self._evaluations = target, evaluations
        self._last = collections.deque(last, evaluations)
        self._newest = collections.deque(newest, evaluations)
        self._before, self._first_s = before, first_s

    @property
    def state(self) -> dict[str, Any]:
        """Return what JSON keeps of it."""
        last, newest = [*self._last], [*self._newest]
        return {"last": last, "newest": newest, "before": self._before, "first_s": self._first_s}

    def add(self, seconds: float, value: float) -> float | None:
        """Take an evaluation; return the second at which the target was met, None: not yet."""
        self._newest.append((seconds, value))
        self._first_s = seconds if self._first_s is None else self._first_s
        if self._last:
            trained_s = self._last[-1][0] - self._first_s
            if seconds <= self._last[-1][0] + trained_s * APART:
                return None
        return self._take(seconds, value, self._evaluations)

    def end(self) -> float | None:
        """Return as `add` what a run that has ended met by its last evaluations, however soon they
        came: its last one, in the place of the one that it came too soon after, as a program may
        print all of its values at once; or else the mean of the newest, which is one more look."""
        if self._newest and self._newest[-1] != self._last[-1]:
            self._last.pop()
            if (met_s := self._take(*self._newest[-1], least=1)) is not None:
                return met_s
        met = self._newest and self._target.met(_mean(self._newest)[1])
        return self._newest[-1][0] if met else None

    def _take(self, seconds: float, value: float, least: int) -> float | None:
        """`least`: how many there have to be."""
        self._last.append((seconds, value))
        at_s, mean = _mean(self._last)
        before, self._before = self._before, (at_s, mean)
        if len(self._last) < least or not self._target.met(mean):
            return None
        if before is None or self._target.met(before[1]):  # of too few values, it did not count
            return at_s
        return before[0] + (before[1] - self._target.value) / (before[1] - mean) * (
            at_s - before[0]
        )


def _mean(evaluations: Iterable[Evaluation]) -> Evaluation:
    seconds, value = (statistics.fmean(numbers) for numbers in zip(*evaluations, strict=True))
    return seconds, float(f"{value:.12g}")  # equal values have their value, not one 1e-16 below
