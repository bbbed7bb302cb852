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
from tunediff.core import text
from tunediff.core.clock import UNITS
from tunediff.search_space import SearchSpace
from tunediff.tuning import resources, warm_start

if TYPE_CHECKING:
    from tunediff.training.probe import Measured

MOST_DAYS, MOST_TRIALS = 30, 100_000
"""Limits above which a search needs `--force`."""


def values(
    space: SearchSpace, folder: Path, measured: Measured, on_this_machine: bool = True
) -> dict[str, Any]:
    """Return what a search will run and cost, in JSON types.

    Seconds are estimates of wall-clock; None means unknown. measured: timings and sizes measured on
    this machine. on_this_machine: whether trials run there too; what is reused on the nodes of a
    cluster is unknown before it runs.
    """
    # Time: what trials cost here, and how many of them fit into the limit of the search.
    machine, sizes, budget = resources.local(), resources.world_sizes(space), space.budget
    share = resources.share(space, machine)
    cost = evaluating.Cost.of(space, measured)
    spent, points = cost.parts(share.least), search_space.size(space)
    within = round(cost.within_limit(share.least)[0] * share.slots)
    trials = min(budget.trials, max(share.slots, within))
    device_hours = _device_hours(space, trials, max(sizes), share.slots)
    price = budget.price_per_device_hour
    # Disk: float32 weights of every run are kept. A running trial also has a checkpoint (weights,
    # averages and two moments of the optimizer), and two of them while it replaces the old one.
    parameters = measured.get("parameters", 0)
    stored_runs = trials + sum(runs for runs, _ in space.again)
    disk: float = 4 * parameters * (stored_runs + 2 * 4 * share.slots) if space.evaluates else 0
    disk_folder = next(path for path in [folder, *folder.parents] if path.exists())
    unknown = ["evaluation"] if cost.evaluation_s is None or cost.final_s is None else []
    plan = {
        "search": str(space.source),
        "knobs": len(space.dimensions),
        "points": None if points == float("inf") else points,
        "trials": budget.trials,
        "training_s_per_trial": space.longest_s,
        "at_once": share.slots,
        "seeds": space.seeds,
        "baseline_runs": space.noise,
        "reruns": space.reruns,
        "confirming_runs": [{"runs": runs, "budget_s": each_s} for runs, each_s in space.again],
        "seconds": {**spent, **dict.fromkeys(unknown)},
        "total_limit_s": budget.total_s,
        "trials_within_limit": trials,
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
        "budget_s": budget.per_trial_s,
        "budget_unit": budget.unit,
        "device_hours": device_hours,
        "price": device_hours * price if price is not None else None,
        "machine": str(machine),
        "world_sizes": sizes,
        "parameters": 0 if cfg.is_command(space.workload.name) else parameters or None,
        "disk_mib": disk / 2**20,
        "disk_free_mib": shutil.disk_usage(disk_folder).free / 2**20,
        "objective": _objective(space),
        "data": [*measured.get("data", []), *_batch(space)],
        "advice": cost.advice(),
        "space": {dimension.name: str(dimension) for dimension in space.dimensions},
        "first": [space.changed(point) for point in space.candidates],
        "skipped": skipped(space),
        "notes": [
            *share.notes,
            *(_reused(space, folder, machine.device) if on_this_machine else ()),
        ],
    }
    # Do not refuse a search because of timings that were made while other processes used the cores.
    certain = evaluating.Cost.of(space, {}).parts(share.least) if plan["disturbed"] else spent
    return plan | {"refused": _refused(plan, trials, certain["wall_clock"])}


def _batch(space: SearchSpace) -> list[str]:
    """Return how the baseline's batch is divided, where devices or passes share it."""
    loader, parallel = space.baseline.loader, space.baseline.parallel
    if (shares := parallel.workers * loader.accumulation) == 1:
        return []
    passes = text.pluralize(loader.accumulation, "accumulation pass", "accumulation passes")
    return [
        f"batch: {loader.batch_size} {space.workload.unit} per optimizer step:"
        f" {text.pluralize(parallel.workers, 'device')} × {passes} × {loader.batch_size // shares}"
    ]


def _reused(space: SearchSpace, folder: Path, device: str) -> list[str]:
    """Return what is reused of an earlier search; [] if that is gone since this search began."""
    try:
        return list(filter(None, [warm_start.describe(space, device)]))
    except ConfigError:
        if not (folder / "search.yaml").is_file():
            raise
        return []


def _device_hours(space: SearchSpace, trials: int, workers: int, slots: int) -> float:
    """Return the device-hours of all trainings, at most where there is no limit.

    workers: of the largest trial. slots: trials at once.
    """
    # A budget in device-seconds is shared by the devices of a trial, any other budget holds for
    # each of them.
    budget = space.budget
    devices = 1 if budget.unit == "device" else workers
    confirming_s = sum(runs * each_s for runs, each_s in space.again)
    seconds = devices * (trials * budget.per_trial_s + confirming_s)
    if budget.total_s is not None:
        seconds = min(seconds, devices * slots * budget.total_s)
    return seconds / 3600


def _objective(space: SearchSpace) -> str | None:
    """Return how the objective is measured, in words; None if the workload does not describe it."""
    if not space.evaluates:
        return f"{space.workload.unit}/s of the training; no model is evaluated"
    describe = space.workload.get_hook("evaluation_protocol")
    return describe(space.baseline) if describe is not None else None


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


def lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the plan in words, one line per item; `plan`: as `values` returns it."""
    count, unit = plan["parameters"], UNITS[plan["budget_unit"]].what
    points = "unlimited points"
    if plan["points"] is not None:
        points = text.pluralize(round(plan["points"]), "point")
    output = [
        f"search: {plan['search']} ({text.pluralize(plan['knobs'], 'knob')}, {points})",
        _trials(plan),
    ]
    stages = [
        f"{stage['runs']} × {text.seconds(stage['budget_s'])}" for stage in plan["confirming_runs"]
    ]
    if stages:
        runs = f"at most {' and '.join(stages)} {unit}"
        output.append(f"confirming: {runs}; it ends when it is decided")
    output += cost_lines(plan)
    # What the limit leaves of the trials is an estimate.
    bound = "at most" if plan["total_limit_s"] is None else "about"
    hours = f"{plan['device_hours']:.2f}"
    output.append(f"device_hours: {bound} {hours} of training, confirming runs included")
    if plan["price"] is not None:
        output.append(f"price: {bound} {text.number(plan['price'])}")
    limit = text.seconds(plan["total_limit_s"]) if plan["total_limit_s"] else "none"
    output += [
        f"total_limit: {limit}",
        f"machine: {plan['machine']}; world sizes {', '.join(map(str, plan['world_sizes']))} fit",
    ]
    disk, free = plan["disk_mib"], plan["disk_free_mib"]
    if count == 0:  # of a command, which alone knows
        output.append(f"disk_mib: {free:.0f} free; what the command writes is not counted")
    else:
        unknown = "unknown (the workload has no network(knobs))"
        fits = "fits" if disk < free else "DOES NOT FIT"
        output += [
            f"parameters: {f'{count:,}' if count else unknown}",
            f"disk_mib: {disk:.0f} of {free:.0f} free ({fits})",
        ]
    output += [f"objective: {plan['objective']}"] if plan["objective"] else []
    output += [*plan["data"], *plan["notes"]]
    output += [f"  {name}: {choices}" for name, choices in plan["space"].items()]
    output += [f"  first {i}: {text.knobs(point)}" for i, point in enumerate(plan["first"])]
    return [*output, *plan["skipped"]]


def _trials(plan: Mapping[str, Any]) -> str:
    """Return how many trials there are, and how many of them are new configurations."""
    trial = f"{text.seconds(plan['budget_s'])} {UNITS[plan['budget_unit']].what}"
    line = f"trials: {plan['trials']} × {trial}, {plan['at_once']} at once"
    if plan["seeds"] > 1:
        return f"{line}, {plan['seeds']} seeds each"
    new = plan["trials"] - plan["baseline_runs"] - plan["reruns"]
    runs = f"{plan['baseline_runs']} runs of it, for the noise" if plan["baseline_runs"] > 1 else ""
    parts = [
        text.pluralize(new, "other configuration"),
        "the baseline" if not runs else f"the baseline ({runs})",
        f"{text.pluralize(plan['reruns'], 'rerun')} of what leads" if plan["reruns"] else "",
    ]
    return f"{line}: {', '.join(filter(None, parts))}"


def start_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the lines that a search prints when it starts."""
    objective = [f"objective: {plan['objective']}"] if plan["objective"] else []
    return [_trials(plan), *objective, *plan["data"], *cost_lines(plan)]


def cost_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the wall-clock of every part and in total, with warnings and advice to reduce it."""
    output = []
    for part, spent_s in plan["seconds"].items():
        words = text.seconds(spent_s or 0.0)
        if part == "evaluation":
            words = _evaluation(plan, words)
        elif part == "confirmation":
            words = f"up to about {words}"
            if last_s := plan["final_evaluation_s_per_confirming_run"]:
                words += f", {text.seconds(last_s)} per run for its final evaluation"
        elif part == "wall_clock":
            unknown = " and evaluation" if plan["evaluation_s"] is None else ""
            words = f"about {words}{unknown}{_limited(plan)}"
        if spent_s or part != "confirmation":
            output.append(f"{part.replace('_', '-')}: {words}")
    return [*output, *load_warning(plan), *plan["advice"]]


def _evaluation(plan: Mapping[str, Any], words: str) -> str:
    each_s, last_s = plan["evaluation_s"], plan["final_evaluation_s"]
    if each_s is None:
        why = "one takes too long to be timed here" if plan["timing_too_long"] else "not timed"
        return f"unknown ({why})"
    if not each_s:
        return words
    last = f", {_short(last_s)} in the end" if last_s else ""
    per_trial = f"{plan['evaluations_per_trial']} × {_short(each_s)} per trial{last}"
    return f"{words} ({per_trial}, as timed on this machine)"


def _limited(plan: Mapping[str, Any]) -> str:
    """Return what the limit leaves of a search, as a clause; '' for one that it has room for."""
    limit_s, trials, planned_s = plan["total_limit_s"], plan["trials"], plan["seconds"]
    if limit_s is None:
        return ""
    if planned_s["wall_clock"] > limit_s + 1:
        return f"; one trial runs in any case, though the limit is {text.seconds(limit_s)}"
    confirming_s, within = planned_s["confirmation"], plan["trials_within_limit"]
    if within == trials and confirming_s + 1 > plan["confirming_s"]:
        return ""
    room = f"about {within} of {text.pluralize(trials, 'trial')}"
    if plan["confirming_s"]:
        room += f" and {text.seconds(confirming_s)} of confirming"
    return f"; the limit of {text.seconds(limit_s)} has room for {room}"


def load_warning(plan: Mapping[str, Any]) -> list[str]:
    """Return a warning that others used the machine while a plan was made, or []."""
    if not plan["disturbed"]:
        return []
    load = f"other processes use {plan['other_load_share']:.0%} of the cores"
    return [
        f"WARNING: {load}: evaluation may be timed too long, and all may take longer while they do"
    ]


def _short(value: float) -> str:
    return f"{value:.2g}s" if value < 10 else text.seconds(value)


def skipped(space: SearchSpace) -> list[str]:
    """Return which combinations of a grid and which points are not run, and why."""
    strategies = [d.choices or () for d in space.dimensions if d.name == "parallel.strategy"]
    notes = list(space.skipped)
    if any("dp" not in choices for choices in strategies) and resources.local().device == "cpu":
        notes.append("parallel.strategy=dp is not compared: torch.nn.DataParallel needs GPUs")
    return notes
