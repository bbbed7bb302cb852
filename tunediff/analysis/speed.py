"""Measure how fast trials were: rates, and when torch.compile pays."""

from __future__ import annotations

from collections.abc import Callable

from tunediff.analysis import RATE, Results, last, seconds_of
from tunediff.analysis.statistics import mean
from tunediff.core import text
from tunediff.core.outcomes import Status
from tunediff.core.trial_record import TrialRecord


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


def _mean(runs: list[TrialRecord], quantity: Callable[[TrialRecord], float | None]) -> float | None:
    values = [quantity(trial) for trial in measured_runs(runs)]
    return mean([value for value in values if value is not None])
