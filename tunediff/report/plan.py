"""What a search would run and cost, before anything starts."""

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
from tunediff.tuning import resources

if TYPE_CHECKING:
    from tunediff.training.judging import Measured

MOST_DAYS, MOST_TRIALS = 30, 100_000
"""What is more needs `--force`."""
WORDS = {"start_up": "start-up", "wall_clock": "wall-clock"}


def values(wanted: SearchSpace, folder: Path, measured: Measured) -> dict[str, Any]:
    """What a search would run and cost, in JSON types; seconds are wall-clock and at most, None is not known.

    `measured`: what was found on this machine.
    """
    machine = resources.local()
    share, sizes, budget = resources.share(wanted, machine), resources.world_sizes(wanted), wanted.budget
    pass_s = measured.get("pass_s")
    cost = evaluating.cost(wanted, pass_s, measured.get("evaluation_s"), measured.get("prepared", False))
    spent, points = cost.parts(share.least), search_space.size(wanted)
    ends = budget.total_s is not None and budget.trials * cost.trial_s / share.least > budget.total_s
    trials = budget.trials if not ends else round((budget.total_s or 0.0) * share.least / cost.trial_s)
    # N devices train for as long as one, or share the budget: then its device-seconds are the same on all.
    each, parameters = 1 if budget.unit == "device" else max(sizes), measured.get("parameters", 0)
    device_hours: float = (
        each * (trials * budget.per_trial_s + sum(runs * each_s for runs, each_s in wanted.again)) / 3600
    )
    if budget.total_s is not None:
        device_hours = min(device_hours, each * share.slots * budget.total_s / 3600)
    price, kept = budget.price_per_device_hour, trials + sum(runs for runs, _ in wanted.again)
    # Weights of all runs stay, float32. Those under way have a checkpoint as well, with averages and two moments of the
    # gradients, and for a moment the one before it.
    disk = 4 * parameters * (kept + 2 * 4 * share.slots) if wanted.evaluates else 0
    above = next(path for path in [folder, *folder.parents] if path.exists())
    unknown = ["evaluation"] if cost.evaluation_s is None or cost.final_s is None else []
    found = {
        "search": str(wanted.source), "knobs": len(wanted.dimensions),
        "points": None if points == float("inf") else points,
        "trials": budget.trials, "training_s_per_trial": wanted.longest_s, "at_once": share.slots,
        "seeds": wanted.seeds, "baseline_runs": wanted.noise,
        "confirming_runs": [{"runs": runs, "budget_s": each_s} for runs, each_s in wanted.again],
        "seconds": {**spent, **dict.fromkeys(unknown)}, "total_limit_s": budget.total_s,
        "wall_clock_lacks": unknown,
        "evaluation_s": cost.evaluation_s, "evaluations_per_trial": wanted.baseline.evaluation.points,
        "other_load_share": measured.get("other_load_share"), "disturbed": measured.get("disturbed", False),
        "timing_too_long": measured.get("too_long", False),
        "final_evaluation_s": cost.final_s, "final_evaluation_s_per_confirming_run": cost.confirming_final_s,
        "trial_s": cost.trial_s, "confirming_s": cost.confirming_s, "once_s": cost.once_s,
        "budget_s": budget.per_trial_s, "budget_unit": budget.unit, "device_hours": device_hours,
        "price": device_hours * price if price is not None else None,
        "machine": str(machine), "world_sizes": sizes, "parameters": parameters or None,
        "disk_mib": disk / 2**20,
        "disk_free_mib": shutil.disk_usage(above).free / 2**20,
        "objective": _objective(wanted),
        "data": measured.get("data", []), "advice": evaluating.advice(cost, pass_s),
        "space": {dimension.name: str(dimension) for dimension in wanted.dimensions},
        "first": [wanted.changed(point) for point in wanted.candidates], "skipped": skipped(wanted),
        "notes": list(share.notes),
    }  # fmt: skip
    # No refusal rests on what was timed while other processes used the cores.
    certain = evaluating.cost(wanted, None).parts(share.least) if found["disturbed"] else spent
    return found | {"refused": _refused(found, trials, certain["wall_clock"])}


def _objective(wanted: SearchSpace) -> str | None:
    """What is measured, in words; None where the workload does not say."""
    if not wanted.evaluates:
        return f"{wanted.workload.unit}/s of the training; no model is evaluated"
    describe = wanted.workload.get_hook("evaluation_protocol")
    return describe(wanted.baseline) if describe is not None else None


def _refused(found: Mapping[str, Any], trials: int, certain_s: float) -> str | None:
    """Why nobody can mean such a search. `trials`: those that there is time for; `certain_s`: its wall-clock."""
    days, disk, free = certain_s / 86400, found["disk_mib"], found["disk_free_mib"]
    if trials > MOST_TRIALS:
        return f"{trials:,} trials: over {MOST_TRIALS:,}; change --trials or give a limit, --total"
    if days > MOST_DAYS:
        change = "change --trials, --budget or evaluation.*, or give --total"
        return f"{days:,.0f} days of wall-clock: over {MOST_DAYS}; {change}"
    if disk > free:
        return f"{disk:,.0f} MiB of weights on a disk with {free:,.0f} MiB free; change --trials or --storage"
    return None


def check(found: Mapping[str, Any], force: bool) -> None:
    """Raise `ConfigError` for a plan that nobody can mean, unless forced."""
    if found["refused"] is not None and not force:
        raise ConfigError(f"command line: {found['refused']}; --force starts it all the same")


def lines(found: Mapping[str, Any]) -> list[str]:
    """`values` in words."""
    repeats = f", {found['seeds']} seeds each" if found["seeds"] > 1 else ""
    repeats += f", {found['baseline_runs']} of them the baseline, for the noise" if found["baseline_runs"] > 1 else ""
    points = "unlimited points" if found["points"] is None else text.pluralize(round(found["points"]), "point")
    unit, sizes = UNITS[found["budget_unit"]].what, ", ".join(map(str, found["world_sizes"]))
    each = f"{text.seconds(found['budget_s'])} {unit}"
    again = " and ".join(f"{one['runs']} × {text.seconds(one['budget_s'])}" for one in found["confirming_runs"])
    disk, free, count = found["disk_mib"], found["disk_free_mib"], found["parameters"]
    said = [
        f"search: {found['search']} ({text.pluralize(found['knobs'], 'knob')}, {points})",
        f"trials: {found['trials']} × {each}, {found['at_once']} at once{repeats}",
        *([f"confirming: at most {again} {unit}; it ends when it is decided"] if again else []),
        *cost_lines(found),
        f"device_hours: at most {found['device_hours']:.2f} of training, confirming runs included",
        *([f"price: at most {text.number(found['price'])}"] if found["price"] is not None else []),
        f"total_limit: {text.seconds(found['total_limit_s']) if found['total_limit_s'] else 'none'}",
        f"machine: {found['machine']}; world sizes {sizes} fit",
        f"parameters: {f'{count:,}' if count else 'unknown (the workload has no network(knobs))'}",
        f"disk_mib: {disk:.0f} of {free:.0f} free ({'fits' if disk < free else 'DOES NOT FIT'})",
        *([f"objective: {found['objective']}"] if found["objective"] else []),
        *found["data"],
    ]
    said += [*found["notes"], *(f"  {name}: {choices}" for name, choices in found["space"].items())]
    return [*said, *(f"  first {i}: {text.knobs(point)}" for i, point in enumerate(found["first"])), *found["skipped"]]


def start_lines(found: Mapping[str, Any]) -> list[str]:
    """What a search says of itself when it starts."""
    measure = [f"objective: {found['objective']}"] if found["objective"] else []
    return [*measure, *found["data"], *cost_lines(found)]


def cost_lines(found: Mapping[str, Any]) -> list[str]:
    """Where the wall-clock goes, part by part and in all, and how it could be less."""
    said, each_s = [], found["evaluation_s"]
    known_s = {part: spent or 0.0 for part, spent in found["seconds"].items()}
    for part, spent in known_s.items():
        words = text.seconds(spent)
        if part == "evaluation" and each_s is None:
            words = "unknown (the workload has no evaluation_work(knobs) and evaluation_pass(knobs, device))"
            words = "unknown (timing a few passes takes too long here)" if found["timing_too_long"] else words
        elif part == "evaluation" and each_s:
            last = f", {_short(found['final_evaluation_s'])} in the end" if found["final_evaluation_s"] else ""
            words += f" ({found['evaluations_per_trial']} × {_short(each_s)} per trial{last}, as timed on this machine)"
        elif part == "start_up" and found["once_s"] >= 1:
            words += f" (up to {text.seconds(found['once_s'])} of it once for what judges, then it is kept)"
        elif part == "confirmation" and (last := found["final_evaluation_s_per_confirming_run"]):
            words += f" at most, {text.seconds(last)} per run for its final evaluation"
        elif part == "wall_clock":
            words = f"at most {words}" if each_s is not None else f"{words} and evaluation"
            if (limit := found["total_limit_s"]) is not None and sum(known_s.values()) > 2 * spent:
                words += f", since no run starts that would not end within {text.seconds(limit)}"
        if spent or part != "confirmation":
            said.append(f"{WORDS.get(part, part)}: {words}")
    if found["disturbed"] and each_s:
        load = f"other processes use {found['other_load_share']:.0%} of the cores"
        said.append(f"WARNING: {load}: the evaluation and what follows from it may be too long")
    return [*said, *found["advice"]]


def _short(value: float) -> str:
    return f"{value:.2g}s" if value < 10 else text.seconds(value)


def skipped(wanted: SearchSpace) -> list[str]:
    """Which combinations of a grid are not run, and why."""
    strategies = [one.choices or () for one in wanted.dimensions if one.name == "parallel.strategy"]
    gpus = "parallel.strategy=dp is not compared: torch.nn.DataParallel needs GPUs"
    told = [gpus] if any("dp" not in choices for choices in strategies) and resources.local().device == "cpu" else []
    return [*(f"skipped a combination that contradicts itself: {why}" for why in wanted.skipped), *told]
