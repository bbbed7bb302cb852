"""Compute what a search will run and cost, before anything starts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
WORDS = {"start_up": "start-up", "wall_clock": "wall-clock"}


def values(
    space: SearchSpace, folder: Path, measured: Measured, here: bool = True
) -> dict[str, Any]:
    """Return what a search will run and cost, in JSON types.

    Seconds are estimates of wall-clock; None means unknown. measured: timings and sizes measured on
    this machine. here: whether trials run on this machine; what is reused on the nodes of a cluster
    is not known before it is asked.
    """
    # Time: what trials cost here, and how many of them fit into the limit of the search.
    machine = resources.local()
    share, sizes, budget = (
        resources.share(space, machine),
        resources.world_sizes(space),
        space.budget,
    )
    cost = evaluating.Cost.of(space, measured)
    spent, points = cost.parts(share.least), search_space.size(space)
    trials = min(
        budget.trials, max(share.slots, round(cost.within_limit(share.least)[0] * share.slots))
    )
    device_hours = _device_hours(space, trials, max(sizes), share.slots)
    price, stored_runs = budget.price_per_device_hour, trials + sum(runs for runs, _ in space.again)
    parameters = measured.get("parameters", 0)
    # Disk: float32 weights of every run are kept. A running trial also has a checkpoint (weights,
    # averages and two moments of the optimizer), and two of them while it replaces the old one.
    disk: float = 4 * parameters * (stored_runs + 2 * 4 * share.slots) if space.evaluates else 0
    above = next(path for path in [folder, *folder.parents] if path.exists())
    unknown = ["evaluation"] if cost.evaluation_s is None or cost.final_s is None else []
    plan = {
        "search": str(space.source), "knobs": len(space.dimensions),
        "points": None if points == float("inf") else points,
        "trials": budget.trials, "training_s_per_trial": space.longest_s, "at_once": share.slots,
        "seeds": space.seeds, "baseline_runs": space.noise, "reruns": space.reruns,
        "confirming_runs": [{"runs": runs, "budget_s": each_s} for runs, each_s in space.again],
        "seconds": {**spent, **dict.fromkeys(unknown)}, "total_limit_s": budget.total_s,
        "trials_within_limit": trials,
        "wall_clock_lacks": unknown,
        "evaluation_s": cost.evaluation_s, "evaluations_per_trial": space.baseline.evaluation.points,
        "other_load_share": measured.get("other_load_share"), "disturbed": measured.get("disturbed", False),
        "timing_too_long": measured.get("too_long", False),
        "final_evaluation_s": cost.final_s, "final_evaluation_s_per_confirming_run": cost.confirming_final_s,
        "trial_s": cost.trial_s, "confirming_s": cost.confirming_s,
        "budget_s": budget.per_trial_s, "budget_unit": budget.unit, "device_hours": device_hours,
        "price": device_hours * price if price is not None else None,
        "machine": str(machine), "world_sizes": sizes, "parameters": parameters or None,
        "disk_mib": disk / 2**20,
        "disk_free_mib": shutil.disk_usage(above).free / 2**20,
        "objective": _objective(space),
        "data": measured.get("data", []), "advice": cost.advice(),
        "space": {dimension.name: str(dimension) for dimension in space.dimensions},
        "first": [space.changed(point) for point in space.candidates], "skipped": skipped(space),
        "notes": [*share.notes, *filter(None, [_warm(space, folder, machine.device) if here else ""])],
    }  # fmt: skip
    # Do not refuse a search because of timings that were made while other processes used the cores.
    certain = evaluating.Cost.of(space, {}).parts(share.least) if plan["disturbed"] else spent
    return plan | {"refused": _refused(plan, trials, certain["wall_clock"])}


def _warm(space: SearchSpace, folder: Path, device: str) -> str:
    """Return `warm_start.describe`; '' for a search that has begun, where the earlier one is gone
    since."""
    try:
        return warm_start.describe(space, device)
    except ConfigError:
        if not (folder / "search.yaml").is_file():
            raise
        return ""


def _device_hours(space: SearchSpace, trials: int, workers: int, slots: int) -> float:
    """Return the device-hours of all trainings, at most where there is no limit.

    workers: of the largest trial. slots: trials at once.
    """
    budget = space.budget
    # A budget in device-seconds is shared by the devices of a trial, any other budget holds for
    # each of them.
    devices = 1 if budget.unit == "device" else workers
    seconds = devices * (
        trials * budget.per_trial_s + sum(runs * each_s for runs, each_s in space.again)
    )
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
        return (
            f"{disk:,.0f} MiB of weights on a disk with {free:,.0f} MiB free; change --trials or"
            " --storage"
        )
    return None


def check(plan: Mapping[str, Any], force: bool) -> None:
    """Raise `ConfigError` for a plan that is likely a mistake, unless `force`."""
    if plan["refused"] is not None and not force:
        raise ConfigError(f"command line: {plan['refused']}; --force starts it all the same")


def lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the plan in words, one line per item; `plan`: as `values` returns it."""
    repeats = f", {plan['seeds']} seeds each" if plan["seeds"] > 1 else ""
    repeats += (
        f", {plan['baseline_runs']} of them the baseline, for the noise"
        if plan["baseline_runs"] > 1
        else ""
    )
    repeats += f", the last {plan['reruns']} reruns of what leads" if plan["reruns"] else ""
    points = (
        "unlimited points"
        if plan["points"] is None
        else text.pluralize(round(plan["points"]), "point")
    )
    unit, sizes = UNITS[plan["budget_unit"]].what, ", ".join(map(str, plan["world_sizes"]))
    per_trial = f"{text.seconds(plan['budget_s'])} {unit}"
    again = " and ".join(
        f"{stage['runs']} × {text.seconds(stage['budget_s'])}" for stage in plan["confirming_runs"]
    )
    disk, free, count = plan["disk_mib"], plan["disk_free_mib"], plan["parameters"]
    # What the limit leaves of them is an estimate.
    bound = "at most" if plan["total_limit_s"] is None else "about"
    output = [
        f"search: {plan['search']} ({text.pluralize(plan['knobs'], 'knob')}, {points})",
        f"trials: {plan['trials']} × {per_trial}, {plan['at_once']} at once{repeats}",
        *([f"confirming: at most {again} {unit}; it ends when it is decided"] if again else []),
        *cost_lines(plan),
        f"device_hours: {bound} {plan['device_hours']:.2f} of training, confirming runs included",
        *([f"price: {bound} {text.number(plan['price'])}"] if plan["price"] is not None else []),
        f"total_limit: {text.seconds(plan['total_limit_s']) if plan['total_limit_s'] else 'none'}",
        f"machine: {plan['machine']}; world sizes {sizes} fit",
        f"parameters: {f'{count:,}' if count else 'unknown (the workload has no network(knobs))'}",
        f"disk_mib: {disk:.0f} of {free:.0f} free ({'fits' if disk < free else 'DOES NOT FIT'})",
        *([f"objective: {plan['objective']}"] if plan["objective"] else []),
        *plan["data"],
    ]
    output += [*plan["notes"], *(f"  {name}: {choices}" for name, choices in plan["space"].items())]
    return [
        *output,
        *(f"  first {i}: {text.knobs(point)}" for i, point in enumerate(plan["first"])),
        *plan["skipped"],
    ]


def start_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the lines that a search prints when it starts."""
    measure = [f"objective: {plan['objective']}"] if plan["objective"] else []
    return [*measure, *plan["data"], *cost_lines(plan)]


def cost_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the wall-clock of every part and in total, with warnings and advice to reduce it."""
    output, each_s = [], plan["evaluation_s"]
    # One line per part, with what its seconds consist of.
    parts_s = {part: spent or 0.0 for part, spent in plan["seconds"].items()}
    for part, spent in parts_s.items():
        words = text.seconds(spent)
        if part == "evaluation" and each_s is None:
            words = (
                "unknown"
                f" ({'one takes too long to be timed here' if plan['timing_too_long'] else 'not timed'})"
            )
        elif part == "evaluation" and each_s:
            last = (
                f", {_short(plan['final_evaluation_s'])} in the end"
                if plan["final_evaluation_s"]
                else ""
            )
            words += (
                f" ({plan['evaluations_per_trial']} × {_short(each_s)} per trial{last}, as timed on"
                " this machine)"
            )
        elif part == "confirmation":
            last = plan["final_evaluation_s_per_confirming_run"]
            words = (
                "up to about"
                f" {words}{f', {text.seconds(last)} per run for its final evaluation' if last else ''}"
            )
        elif part == "wall_clock":
            words = f"about {words}{' and evaluation' if each_s is None else ''}{_limited(plan)}"
        if spent or part != "confirmation":
            output.append(f"{WORDS.get(part, part)}: {words}")
    return [*output, *load_warning(plan), *plan["advice"]]


def _limited(plan: Mapping[str, Any]) -> str:
    """Return what the limit leaves of a search, as a clause; '' for one that it has room for."""
    limit_s, trials, confirming_s = (
        plan["total_limit_s"],
        plan["trials"],
        plan["seconds"]["confirmation"],
    )
    if limit_s is None:
        return ""
    if plan["seconds"]["wall_clock"] > limit_s + 1:
        return f"; one trial runs in any case, though the limit is {text.seconds(limit_s)}"
    if plan["trials_within_limit"] == trials and confirming_s + 1 > plan["confirming_s"]:
        return ""
    confirming = f" and {text.seconds(confirming_s)} of confirming" if plan["confirming_s"] else ""
    few = f"about {plan['trials_within_limit']} of {text.pluralize(trials, 'trial')}"
    return f"; the limit of {text.seconds(limit_s)} has room for {few}{confirming}"


def load_warning(plan: Mapping[str, Any]) -> list[str]:
    """Return a warning that others used the machine while a plan was made, as a list; [] if they
    did not."""
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
    strategies = [
        dimension.choices or ()
        for dimension in space.dimensions
        if dimension.name == "parallel.strategy"
    ]
    gpus = "parallel.strategy=dp is not compared: torch.nn.DataParallel needs GPUs"
    notes = (
        [gpus]
        if any("dp" not in choices for choices in strategies) and resources.local().device == "cpu"
        else []
    )
    return [*space.skipped, *notes]
