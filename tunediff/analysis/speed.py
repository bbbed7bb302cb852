"""Measure how fast trials were: rates, speed-ups, and when torch.compile pays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tunediff.analysis import RATE, Results, last, reach, seconds_of
from tunediff.analysis.outcome import Candidate
from tunediff.analysis.statistics import Estimate, estimate, is_wide
from tunediff.core import text
from tunediff.core.outcomes import Status
from tunediff.core.trial_record import TrialRecord

ITSELF = "it is the baseline itself"
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
def mean_speedup(found: Sequence[reach.SpeedUp]) -> Estimate | str:
    """Return the geometric mean of speed-ups on several seeds with its 95 % interval, or why it is
    not determined: the interval has to exclude 1 and to be no wider than `WIDEST`.

    If a run reached the baseline's value at its first evaluation, its ratio is a lower bound, and
    so is the mean: without an upper end.
    """
    mean_ratio = estimate([one.ratio for one in found], ratios=True)
    low = mean_ratio.low if mean_ratio is not None else None
    if mean_ratio is None or low is None or low <= 1 or is_wide(low, mean_ratio.high):
        return f"the curves of {len(found)} seeds leave it open"
    is_bound = any(one.at_first for one in found)
    high = None if is_bound else mean_ratio.high
    return dataclasses.replace(mean_ratio, at_least=is_bound, high=high)


def speedup_values(speedup: Estimate | str) -> dict[str, float | None]:
    """Return a speed-up by the names of `SPEEDUP`, for tables and JSON; None: not determined.

    It is either `speedup` with the ends of its interval (None for one pair of runs), or
    `speedup_at_least` alone.
    """
    values: dict[str, float | None] = dict.fromkeys(SPEEDUP)
    if isinstance(speedup, Estimate) and speedup.bound is not None:
        values["speedup_at_least"] = speedup.bound
    elif isinstance(speedup, Estimate):
        values |= zip(SPEEDUP, (speedup.mean, speedup.low, speedup.high), strict=False)
    return values


def rates(candidate: Candidate) -> list[float]:
    """Return the samples per training second of every run that ended ok."""
    return [
        last(run, "samples") / seconds
        for run in candidate.done
        if (seconds := last(run, "train_s")) > 0
    ]
