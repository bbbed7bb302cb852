"""Measure how fast trials were: rates, parts of a step, and when torch.compile pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tunediff.analysis import RATE, Results, last, seconds_of
from tunediff.analysis.statistics import mean
from tunediff.core import text
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
    if free and trial.status == "ok" and trial.points:
        return "--samples", trial.points[-1].samples
    return "--budget", text.format_exact(trial.budget_s or results.space.budget.per_trial_s)


def per_thousand(trial: TrialRecord) -> dict[str, float]:
    """Return the seconds of each part of the step per 1,000 samples, for any batch size.

    Over the last evaluation interval; {} if they were not recorded.
    """
    if not (samples := samples_per_step(trial)):
        return {}
    return {
        part: 1000 * float(value) / samples for part, value in trial.points[-1].phases_s.items()
    }


# ---- compile
def break_even(
    cost_s: float | None, rate: float | None, ratio: float | None
) -> tuple[float, float] | None:
    """Return (samples, training seconds) after which compilation has paid for itself; None: never.

    `ratio`: how many times as fast the compiled configuration is.
    """
    if cost_s is None or not rate or not ratio or ratio <= 1:
        return None
    # n samples take n/r without compilation and c + n/(f·r) with it: equal at n = c·f·r/(f−1).
    samples = cost_s * rate / (ratio - 1)
    return samples, cost_s + samples / rate


def predicted_step_s(one: Mapping[str, float], two: Mapping[str, float], devices: int) -> float:
    """Predict the seconds of a `ddp` step on `devices` devices from one and two, for one batch.

    `one` and `two` contain `step_s`, `step_forward_s` and `step_backward_s` of one and two devices.
    Two devices give the measured value. The model is step(n) = compute(n) + exposed(n) + rest:

    - compute(n) = (φ + (1 − φ)/n)·(forward(1) + backward(1)). The share φ, 0 to 1, does not get
      shorter with a smaller batch. It follows from the forward passes, in which nothing is sent:
      forward(2) / forward(1) = φ + (1 − φ)/2.
    - exposed(n) = exposed(2)·2(n − 1)/n is what sending adds to the passes. A ring all-reduce sends
      2(n − 1)/n of the gradients' bytes from each device (Patarasuk and Yuan 2009, J. Parallel
      Distrib. Comput. 69, 117), at the bandwidth that two devices reached, and hides as much of it
      behind the backward pass as there; more devices hide less.
    - rest is that of two devices: the optimizer updates all weights on each device.
    """
    passes, of_two = (run["step_forward_s"] + run["step_backward_s"] for run in (one, two))
    ratio = min(1.0, max(0.5, two["step_forward_s"] / one["step_forward_s"]))
    fixed, exposed_s = 2 * ratio - 1, max(0.0, of_two - ratio * passes)
    compute_s, rest_s = passes * (fixed + (1 - fixed) / devices), two["step_s"] - of_two
    return compute_s + exposed_s * 2 * (devices - 1) / devices + rest_s


def measured_runs(runs: list[TrialRecord]) -> list[TrialRecord]:
    """Return the runs whose values count: those that ended ok; without any, the running ones."""
    done = [trial for trial in runs if trial.status == "ok"]
    counted = done or [trial for trial in runs if not trial.finished]
    return [trial for trial in counted if trial.points]


def _mean(runs: list[TrialRecord], quantity: Callable[[TrialRecord], float | None]) -> float | None:
    values = [quantity(trial) for trial in measured_runs(runs)]
    return mean([value for value in values if value is not None])
