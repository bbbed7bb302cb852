"""Measure how fast trials were: rates and speed-ups; and why the winner is ahead, by speed or by
learning per sample."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tunediff.analysis import RATE, Results, last, reach, seconds_of
from tunediff.analysis.outcome import Candidate
from tunediff.analysis.statistics import Difference, Estimate, estimate, is_wide
from tunediff.core import text
from tunediff.core.outcomes import Status
from tunediff.core.trial_record import TrialRecord

SPEEDUP = ("speedup", "speedup_low", "speedup_high", "speedup_at_least")
"""Columns and keys of a speed-up."""


def rate(trial: TrialRecord) -> float | None:
    """Return the samples per second at the last evaluation."""
    return float(value) if (value := last(trial, RATE)) else None


def samples_per_step(trial: TrialRecord) -> float | None:
    """Return the mean samples per optimizer step, counted by the training.

    It may differ from `loader.batch_size`: a sample of a workload may count as many tokens, and a
    loop over a loader of one's own may never read that knob.
    """
    return end.samples / end.steps if trial.points and (end := trial.points[-1]).steps else None


def compile_s(trial: TrialRecord) -> float | None:
    """Return the seconds of compilation and of the warm-up step; None without compilation."""
    return float(spent) if (spent := seconds_of(trial).get("compile")) else None


def repeating_budget(results: Results, trial: TrialRecord) -> tuple[str, object]:
    """Return (option, value) of the budget with which `train` repeats a trial.

    `train` counts compiling as training. Where the search does not, the samples of the trial are
    its budget: equal seconds leave fewer for steps, longer ones delay schedules.
    """
    free = compile_s(trial) and not results.space.budget.compile_charged
    if free and trial.status == Status.OK and trial.points:
        return "--samples", trial.points[-1].samples
    return "--budget", text.format_exact(trial.budget_s or results.space.budget.per_trial_s)


# ---- compile
def measured_runs(runs: list[TrialRecord]) -> list[TrialRecord]:
    """Return the runs whose values count: those that ended ok; without any, the running ones."""
    done = [trial for trial in runs if trial.status == Status.OK]
    counted = done or [trial for trial in runs if not trial.finished]
    return [trial for trial in counted if trial.points]


# ---- comparisons
def mean_speedup(found: Sequence[reach.SpeedUp]) -> Estimate | None:
    """Return the geometric mean of speed-ups on several seeds with its 95 % interval; None: it is
    not determined, since the interval has to exclude 1 and to be no wider than `WIDEST`.

    If a run reached the baseline's value at its first evaluation, its ratio is a lower bound, and
    so is the mean: its low end counts.
    """
    mean_ratio = estimate([one.ratio for one in found], ratios=True)
    low = mean_ratio.low if mean_ratio is not None else None
    if mean_ratio is None or low is None or low <= 1 or is_wide(low, mean_ratio.high):
        return None
    return dataclasses.replace(mean_ratio, at_least=any(one.at_first for one in found))


def inverse(effect: Difference) -> Estimate | None:
    """Return how many times as fast, by a ratio of seconds and its interval; None: unknown."""
    known = [end for end in (effect.high, effect.estimate, effect.low) if end]
    if len(known) < 3 or is_wide(effect.low, effect.high):
        return None
    low, middle, high = (1 / end for end in known)
    return Estimate(middle, low, high)


def speedup_values(speedup: Estimate | None) -> dict[str, float | None]:
    """Return a speed-up by the names of `SPEEDUP`, for tables and JSON; None: not determined.

    It is either `speedup` with the ends of its interval (None for one pair of runs), or
    `speedup_at_least` alone.
    """
    values: dict[str, float | None] = dict.fromkeys(SPEEDUP)
    if speedup is not None and speedup.bound is not None:
        values["speedup_at_least"] = speedup.bound
    elif speedup is not None:
        values |= zip(SPEEDUP, (speedup.mean, speedup.low, speedup.high), strict=False)
    return values


def rates(candidate: Candidate) -> list[float]:
    """Return the samples per training second of every run that ended ok."""
    return [
        last(run, "samples") / seconds
        for run in candidate.done
        if (seconds := last(run, "train_s")) > 0
    ]


# ---- why the winner is ahead
@dataclasses.dataclass(frozen=True)
class Why:
    """The winner compared with the baseline."""

    seconds: float
    """Seconds, in the unit of the budgets, at which both are compared."""
    at_seconds: tuple[float, float]
    """Objective of (baseline, winner) at these seconds."""
    samples: tuple[int, int]
    """Samples that both have seen by then."""
    equal_samples: int
    """The smaller of these numbers."""
    at_samples: tuple[float, float] | None
    """Objective of both after `equal_samples`; None: one of them was not evaluated early enough."""
    mode: str = "min"
    """Whether a smaller (`min`) or a larger (`max`) objective is better."""
    ratios: bool = True
    """Whether `total` and its parts are logarithms of ratios; else they are differences."""

    @property
    def learning(self) -> float | None:
        """Return the part of `total` that is present at equal samples."""
        return self._gain(self.at_samples) if self.at_samples is not None else None

    @property
    def total(self) -> float:
        """Return log(winner / baseline), or winner − baseline, at equal seconds; < 0: better."""
        return self._gain(self.at_seconds)

    @property
    def throughput(self) -> float | None:
        """Return the rest: the effect of samples that the winner saw more or less."""
        return self.total - self.learning if self.learning is not None else None

    def _gain(self, values: tuple[float, float]) -> float:
        base, winner = map(math.log, values) if self.ratios else values
        return base - winner if self.mode == "max" else winner - base


def why(
    baseline: TrialRecord, winner: TrialRecord, metric: str, mode: str = "min", ratios: bool = True
) -> Why | None:
    """Return the decomposition; None unless both have values, which must be positive for `ratios`.

    Curves are interpolated between evaluations: linearly in seconds or samples, and for `ratios`
    with the objective on a logarithmic scale.
    """
    curves = [_curve(trial, metric, ratios) for trial in (baseline, winner)]
    if not all(map(len, curves)):
        return None
    # Trainings exceed their budget by a part of a step: such ends count as the same second.
    ends = [float(curve[-1, 0]) for curve in curves]
    seconds = min(ends)
    if max(ends) > 1.02 * seconds:
        ends = [seconds, seconds]
    base, won = (_at(curve, 0, end) for curve, end in zip(curves, ends, strict=True))
    if base is None or won is None:
        return None
    fewer = min(base[1], won[1])
    equal_base, equal_won = (
        row if row[1] == fewer else _at(curve, 1, fewer)
        for row, curve in zip((base, won), curves, strict=True)
    )
    back, at_samples = math.exp if ratios else float, None
    if equal_base is not None and equal_won is not None:
        at_samples = (back(equal_base[2]), back(equal_won[2]))
    values, samples = (back(base[2]), back(won[2])), (round(base[1]), round(won[1]))
    return Why(seconds, values, samples, round(fewer), at_samples, mode, ratios)


def _curve(trial: TrialRecord, metric: str, ratios: bool) -> NDArray[np.float64]:
    """Return (seconds, samples, objective) of every evaluation; for `ratios` its logarithm."""
    points = [p for p in trial.points if metric in p and (not ratios or p[metric] > 0)]
    scale = math.log if ratios else float
    rows = [(point[trial.along], point["samples"], scale(point[metric])) for point in points]
    return np.array(rows, dtype=float)


def _at(
    curve: NDArray[np.float64], column: int, position: float
) -> tuple[float, float, float] | None:
    """Return a curve's row where a column reaches `position`, interpolated; None outside."""
    if not curve[0, column] <= position <= curve[-1, column]:
        return None
    seconds, samples, value = (
        float(np.interp(position, curve[:, column], values)) for values in curve.T
    )
    return seconds, samples, value
