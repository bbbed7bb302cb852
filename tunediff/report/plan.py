"""Compute what a search or a comparison will run and cost, before anything starts, and say it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import config as cfg
from tunediff.analysis import error_spending, evaluating
from tunediff.config import ConfigError
from tunediff.core import text
from tunediff.core.clock import UNITS, UnitName, seconds_per_device
from tunediff.experiment.model import Experiment
from tunediff.search_space import SearchSpace
from tunediff.tuning import confirming, resources

if TYPE_CHECKING:
    from tunediff.inspector.probe import Measured

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
    confirms = {"confirming_at_once": confirming.runs_at_once(space, max(sizes), on_this_machine)}
    cost = evaluating.Cost.of(space, {**measured, **confirms})
    spent = cost.parts(share.least)
    lacks = {
        "training": (has_own_end := _has_own_end(space.baseline)),
        "confirmation": has_own_end and space.most_confirming_runs > 0,
        "evaluation": None in (cost.evaluation_s, cost.final_s),
    }
    unknown = [part for part, is_unknown in lacks.items() if is_unknown]
    within = round(cost.within_limit(share.least)[0] * share.slots)
    trials = min(budget.trials, max(share.slots, within))
    runs = trials + space.most_confirming_runs
    # Devices share a budget in device-seconds; any other budget holds for each of them.
    devices = 1 if budget.unit == "device" else max(sizes)
    device_s = devices * runs * budget.per_trial_s
    if budget.total_s is not None:
        device_s = min(device_s, devices * share.slots * budget.total_s)
    price = budget.price_per_device_hour
    plan = {
        "search": str(space.source),
        "knobs": len(space.dimensions),
        "points": None if space.kind == "search" else len(space.candidates),
        "trials": budget.trials,
        "trials_within_limit": trials,
        "training_s_per_trial": space.longest_s,
        "seeds": space.seeds,
        "baseline_runs": space.noise,
        "confirming_runs": space.most_confirming_runs,
        **confirms,
        "at_once": share.slots,
        "seconds": {**spent, **dict.fromkeys([*unknown, *["wall_clock"] * lacks["training"]])},
        "wall_clock_lacks": unknown,
        "total_limit_s": budget.total_s,
        **_of_runs(space.baseline, budget.per_trial_s, budget.unit, measured),
        "evaluation_s": cost.evaluation_s,
        "final_evaluation_s": cost.final_s,
        "final_evaluation_s_per_confirming_run": cost.confirming_final_s,
        "trial_s": cost.trial_s,
        "confirming_s": cost.confirming_s,
        "device_hours": device_s / 3600,
        "price": device_s / 3600 * price if price is not None else None,
        "machine": str(machine),
        "world_sizes": sizes,
        **_disk(space, folder, measured, runs, share.slots),
        "objective": _objective(space),
        "space": {dimension.name: str(dimension) for dimension in space.dimensions},
        "first": [space.changed(point) for point in space.candidates],
        "notes": [*measured.get("data", []), *skipped(space)],
    }
    return plan | {"refused": _refused(plan)}


def _disk(
    space: SearchSpace, folder: Path, measured: Measured, runs: int, slots: int
) -> dict[str, Any]:
    """Return the parameters of a model, and the room that all runs need and have, in MiB.

    float32 weights of every run are kept. A running trial also has a checkpoint (weights, averages
    and two moments of the optimizer), and two of them while it replaces the old one.
    """
    parameters = measured.get("parameters", 0)
    stored = measured.get("saved_parameters", parameters) * (runs + 2 * 4 * slots)
    existing = next(path for path in [folder, *folder.parents] if path.exists())
    return {
        "parameters": 0 if cfg.is_command(space.workload.name) else parameters or None,
        "disk_mib": 4 * stored / 2**20 if space.evaluates else 0.0,
        "disk_free_mib": shutil.disk_usage(existing).free / 2**20,
    }


def of_pairs(
    names: Sequence[str],
    sides: Sequence[Any],
    experiment: Experiment,
    measured: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what a comparison will run and cost; see `values`. Start-up is assumed, not measured.

    names: A and B as the user typed them. sides: their configurations.
    """
    most, unit, budget_s = (
        experiment.test.pairs,
        experiment.limit.unit,
        experiment.limit.budget or 0.0,
    )
    workload, each_s = cfg.of(sides[0]), measured.get("evaluation_s")
    describe = workload.get_hook("evaluation_protocol")
    training_s = most * sum(seconds_per_device(budget_s, unit, side.devices) for side in sides)
    evaluation_s = 2 * most * int(sides[0].evaluation.points) * (each_s or 0.0)
    # A pair trains both sides and evaluates both; the test may stop it at its first look.
    runs_s = training_s + evaluation_s + 2 * most * evaluating.RUN_S
    least, changed = error_spending.first_analysis(most), cfg.differences(sides[1], sides[0])
    has_own_end = _has_own_end(sides[0])
    return {
        "a": names[0],
        "b": names[1],
        "changed": {name: value for name, value in changed.items() if name != "seed"},
        "metric": workload.objective.name,
        "pairs_at_least": least,
        "pairs_at_most": most,
        "runs_at_most": 2 * most,
        "at_once": experiment.devices,
        "seconds": {
            "training": None if has_own_end else training_s,
            "evaluation": None if each_s is None else evaluation_s,
            "wall_clock": None if has_own_end else evaluating.START_S + runs_s / experiment.devices,
        },
        "wall_clock_lacks": [*["training"] * has_own_end, *["evaluation"] * (each_s is None)],
        "wall_s_at_least": evaluating.START_S + runs_s * least / most / experiment.devices,
        **_of_runs(sides[0], budget_s, unit, measured),
        "objective": describe(sides[0]) if describe is not None else None,
        "notes": measured.get("data", []),
    }


def _has_own_end(config: Any) -> bool:
    """Return whether runs end by themselves, so that nobody knows when."""
    return getattr(getattr(config, "definition", None), "outcome", "") == "final"


def _of_runs(
    config: Any, budget_s: float, unit: UnitName, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what both plans say of a run and of its timing."""
    return {
        "budget_s": budget_s,
        "budget_unit": unit,
        "evaluation_s": measured.get("evaluation_s"),
        "evaluations_per_run": int(config.evaluation.points),
    }


def _objective(space: SearchSpace) -> str | None:
    """Return how the objective is measured, in words; None if the workload does not describe it."""
    if not space.evaluates:
        return f"{space.workload.unit}/s of the training; no model is evaluated"
    describe = space.workload.get_hook("evaluation_protocol")
    until = f"{space.budget.clock.seconds} until {space.target}" if space.target else None
    protocol = describe(space.baseline) if describe is not None else None
    return "; ".join(filter(None, [until, protocol])) or None


def _refused(plan: Mapping[str, Any]) -> str | None:
    """Return why the search is refused as a likely mistake; None if it is not."""
    days, disk = (plan["seconds"]["wall_clock"] or 0.0) / 86400, plan["disk_mib"]
    free = plan["disk_free_mib"]
    if (trials := plan["trials_within_limit"]) > MOST_TRIALS:
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


# ---- in words
def lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the plan in words: what runs, what it takes, and of a search what it searches."""
    if "search" not in plan:
        return [f"A: {plan['a']}", f"B: {plan['b']}", *start_lines(plan)]
    points, count = plan["points"], plan["parameters"]
    many = "drawn" if points is None else f"{points:,} points"
    rows = {
        "search": f"{plan['search']} ({text.pluralize(plan['knobs'], 'knob')}, {many})",
        "device_hours": f"about {plan['device_hours']:.2f} of training",
        "price": None if plan["price"] is None else f"about {text.number(plan['price'])}",
        "machine": f"{plan['machine']}; world sizes {', '.join(map(str, plan['world_sizes']))} fit",
        "parameters": "unknown (no network(knobs))"
        if count is None
        else f"{count:,}"
        if count
        else None,
        "disk_mib": f"{plan['disk_mib']:.0f} of {plan['disk_free_mib']:.0f} free",
    }
    head, *facts = [f"{name}: {words}" for name, words in rows.items() if words is not None]
    knobs = [f"  {name}: {choices}" for name, choices in plan["space"].items()]
    first = [f"  first {i}: {text.knobs(point)}" for i, point in enumerate(plan["first"])]
    return [head, *start_lines(plan), *facts, *knobs, *first]


def start_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return what a run prints of its plan when it starts: runs, seconds, notes."""
    seconds, limit_s = plan["seconds"], plan.get("total_limit_s")
    run = "its own end"
    if plan["budget_s"] and "training" not in plan["wall_clock_lacks"]:
        run = f"{text.seconds(plan['budget_s'])} {UNITS[plan['budget_unit']].what}"
    earliest = f"it ends as soon as it is decided, after {plan.get('pairs_at_least')} pairs"
    rows = {"runs": f"at most {plan.get('pairs_at_most')} pairs × 2 × {run}; {earliest} at least"}
    if "search" in plan:
        others = text.pluralize(plan["trials"] - plan["baseline_runs"], "other configuration")
        many = f": {others}, {text.pluralize(plan['baseline_runs'], 'run')} of the baseline"
        many = f", {plan['seeds']} seeds each" if plan["seeds"] > 1 else many
        rows = {"trials": f"{plan['trials']} × {run}{many}"}
        if most := plan["confirming_runs"]:
            rows["confirming"] = f"at most {most} × {run}; it ends when it is decided"
    rows |= {"at_once": f"{plan['at_once']} at the same time"} if plan["at_once"] > 1 else {}
    for part, spent_s in seconds.items() if plan["budget_s"] else ():
        rows[part.replace("_", "-")] = (
            "unknown" if spent_s is None else f"about {text.seconds(spent_s)}"
        )
    if plan["wall_clock_lacks"] and seconds["wall_clock"]:
        rows["wall-clock"] += f" and {' and '.join(plan['wall_clock_lacks'])}"
    if "wall_s_at_least" in plan and seconds["wall_clock"]:
        rows["wall-clock"] += (
            f" at most, {text.seconds(plan['wall_s_at_least'])} with {plan['pairs_at_least']} pairs"
        )
    if limit_s is not None:
        within, all_trials = plan["trials_within_limit"], text.pluralize(plan["trials"], "trial")
        rows["total_limit"] = f"{text.seconds(limit_s)}, room for about {within} of {all_trials}"
    if plan["objective"]:
        rows["objective"] = plan["objective"]
    said = [f"{name}: {words}" for name, words in rows.items()]
    return [*said, *plan["notes"]]
