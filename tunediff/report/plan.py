"""Compute what a search will run and cost, before anything starts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import config as cfg
from tunediff import search_space
from tunediff.analysis import evaluating
from tunediff.config import ConfigError
from tunediff.search_space import SearchSpace
from tunediff.tuning import confirming, resources

if TYPE_CHECKING:
    from tunediff.training.probe import Measured

MOST_DAYS, MOST_TRIALS = 30, 100_000
"""Limits above which a search needs `--force`."""


def values(
    space: SearchSpace, folder: Path, measured: Measured, on_this_machine: bool = True
) -> dict[str, Any]:
    """Return what a search will run and cost, in JSON types.

    Seconds are estimates of wall-clock; None means unknown. measured: timings and sizes on this
    machine. on_this_machine: whether trials run on it too.
    """
    machine, sizes, budget = resources.local(), resources.world_sizes(space), space.budget
    share = resources.share(space, machine)
    confirming_at_once, _ = confirming.runs_at_once(space, max(sizes), on_this_machine)
    confirms = {"confirming_at_once": confirming_at_once}
    cost = evaluating.Cost.of(space, {**measured, **confirms})
    spent = cost.parts(share.least)
    within = round(cost.within_limit(share.least)[0] * share.slots)
    trials = min(budget.trials, max(share.slots, within))
    device_hours = _device_hours(space, trials, max(sizes), share.slots)
    plan = {
        **_runs(space),
        **confirms,
        "at_once": share.slots,
        **_times(space, cost, spent, measured),
        "trials_within_limit": trials,
        **_budget(space, device_hours),
        "machine": str(machine),
        "world_sizes": sizes,
        **_disk(space, measured, trials, share.slots),
        "disk_free_mib": _free_mib(folder),
        "objective": _objective(space),
        "data": measured.get("data", []),
        "advice": cost.advice(),
        "space": {dimension.name: str(dimension) for dimension in space.dimensions},
        "first": [space.changed(point) for point in space.candidates],
        "skipped": skipped(space),
        "notes": list(share.notes),
    }
    # Do not refuse a search because of timings that were made while other processes used the cores.
    certain = evaluating.Cost.of(space, confirms).parts(share.least) if plan["disturbed"] else spent
    return plan | {"refused": _refused(plan, trials, certain["wall_clock"])}


def _budget(space: SearchSpace, device_hours: float) -> dict[str, Any]:
    """Return the budget of a trial, and what all trials use."""
    budget, price = space.budget, space.budget.price_per_device_hour
    return {
        "budget_s": budget.per_trial_s,
        "budget_unit": budget.unit,
        "device_hours": device_hours,
        "price": device_hours * price if price is not None else None,
    }


def _disk(space: SearchSpace, measured: Measured, trials: int, slots: int) -> dict[str, Any]:
    """Return the parameters of a model, and the room that the files of all trials need."""
    parameters = measured.get("parameters", 0)
    saved = measured.get("saved_parameters", parameters)
    return {
        "parameters": 0 if cfg.is_command(space.workload.name) else parameters or None,
        "disk_mib": _disk_mib(space, saved, trials, slots),
    }


def _runs(space: SearchSpace) -> dict[str, Any]:
    """Return what runs, by the search file."""
    points = search_space.size(space)
    return {
        "search": str(space.source),
        "knobs": len(space.dimensions),
        "points": None if points == float("inf") else points,
        "trials": space.budget.trials,
        "training_s_per_trial": space.longest_s,
        "seeds": space.seeds,
        "baseline_runs": space.noise,
        "confirming_runs": space.most_confirming_runs,
    }


def _times(
    space: SearchSpace, cost: evaluating.Cost, spent: Mapping[str, float], measured: Measured
) -> dict[str, Any]:
    """Return what takes how long, and what of it is unknown or uncertain. `spent`: by part."""
    unknown = ["evaluation"] if cost.evaluation_s is None or cost.final_s is None else []
    return {
        "seconds": {**spent, **dict.fromkeys(unknown)},
        "total_limit_s": space.budget.total_s,
        "wall_clock_lacks": unknown,
        "evaluation_s": cost.evaluation_s,
        "evaluations_per_trial": space.baseline.evaluation.points,
        "other_load_share": measured.get("other_load_share"),
        "disturbed": measured.get("disturbed", False),
        "timing_too_long": measured.get("too_long", False),
        "final_evaluation_s": cost.final_s,
        "final_evaluation_s_per_confirming_run": cost.confirming_final_s,
        "trial_s": cost.trial_s,
        "confirming_s": cost.confirming_s,
    }


def _disk_mib(space: SearchSpace, parameters: int, trials: int, slots: int) -> float:
    """Return what a search writes: float32 weights of every run are kept.

    A running trial also has a checkpoint (weights, averages and two moments of the optimizer), and
    two of them while it replaces the old one.
    """
    stored_runs = trials + space.most_confirming_runs
    return 4 * parameters * (stored_runs + 2 * 4 * slots) / 2**20 if space.evaluates else 0.0


def _free_mib(folder: Path) -> float:
    existing = next(path for path in [folder, *folder.parents] if path.exists())
    return shutil.disk_usage(existing).free / 2**20


def _device_hours(space: SearchSpace, trials: int, workers: int, slots: int) -> float:
    """Return the device-hours of all trainings, at most where there is no limit.

    workers: of the largest trial. slots: trials at once.
    """
    # Devices share a budget in device-seconds; any other budget holds for each of them.
    budget = space.budget
    devices = 1 if budget.unit == "device" else workers
    seconds = devices * (trials + space.most_confirming_runs) * budget.per_trial_s
    if budget.total_s is not None:
        seconds = min(seconds, devices * slots * budget.total_s)
    return seconds / 3600


def _objective(space: SearchSpace) -> str | None:
    """Return how the objective is measured, in words; None if the workload does not describe it."""
    if not space.evaluates:
        return f"{space.workload.unit}/s of the training; no model is evaluated"
    describe = space.workload.get_hook("evaluation_protocol")
    until = f"{space.budget.clock.seconds} until {space.target}" if space.target else None
    protocol = describe(space.baseline) if describe is not None else None
    return "; ".join(filter(None, [until, protocol])) or None


def _refused(plan: Mapping[str, Any], trials: int, certain_s: float) -> str | None:
    """Return why the search is refused as a likely mistake; None if it is not.

    trials: how many there is time for. certain_s: wall-clock without uncertain timings, in seconds.
    """
    days, disk, free = certain_s / 86400, plan["disk_mib"], plan["disk_free_mib"]
    if trials > MOST_TRIALS:
        return f"{trials:,} trials: over {MOST_TRIALS:,}; change --trials or give a limit, --total"
    if days > MOST_DAYS:
        change = "change --trials, --budget or evaluation.*, or give --total"
        return f"{days:,.0f} days of wall-clock: over {MOST_DAYS}; {change}"
    if disk > free:
        full = f"{disk:,.0f} MiB of weights on a disk with {free:,.0f} MiB free"
        return f"{full}; change --trials or --storage"
    return None


def check(plan: Mapping[str, Any], force: bool) -> None:
    """Raise `ConfigError` for a plan that is likely a mistake, unless `force`."""
    if plan["refused"] is not None and not force:
        raise ConfigError(f"command line: {plan['refused']}; --force starts it all the same")


def skipped(space: SearchSpace) -> list[str]:
    """Return which combinations of a grid and which points are not run, and why."""
    strategies = [d.choices or () for d in space.dimensions if d.name == "parallel.strategy"]
    notes = list(space.skipped)
    if any("dp" not in choices for choices in strategies) and resources.local().device == "cpu":
        notes.append("parallel.strategy=dp is not compared: torch.nn.DataParallel needs GPUs")
    return notes
