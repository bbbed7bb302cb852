"""Put the plan of a search, as `plan.values` returns it, into words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunediff.core import text
from tunediff.core.clock import UNITS


def lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the plan in words, one line per item; `plan`: as `values` returns it."""
    unit = UNITS[plan["budget_unit"]].what
    points = "unlimited points"
    if plan["points"] is not None:
        points = text.pluralize(round(plan["points"]), "point")
    output = [
        f"search: {plan['search']} ({text.pluralize(plan['knobs'], 'knob')}, {points})",
        _trials(plan),
    ]
    if most := plan["confirming_runs"]:
        runs = f"at most {most} × {text.seconds(plan['budget_s'])} {unit}"
        if (count := plan["confirming_at_once"]) > 1:
            runs += f", {count} at once"
        output.append(f"confirming: {runs}; it ends when it is decided")
    output += cost_lines(plan)
    # What the limit leaves of the trials is an estimate.
    bound = "at most" if plan["total_limit_s"] is None else "about"
    hours = f"{plan['device_hours']:.2f}"
    output.append(f"device_hours: {bound} {hours} of training, confirming runs included")
    if plan["price"] is not None:
        output.append(f"price: {bound} {text.number(plan['price'])}")
    limit = text.seconds(plan["total_limit_s"]) if plan["total_limit_s"] else "none"
    sizes = ", ".join(map(str, plan["world_sizes"]))
    output += [f"total_limit: {limit}", f"machine: {plan['machine']}; world sizes {sizes} fit"]
    output += _disk_lines(plan)
    output += [f"objective: {plan['objective']}"] if plan["objective"] else []
    output += [*plan["data"], *plan["notes"]]
    output += [f"  {name}: {choices}" for name, choices in plan["space"].items()]
    output += [f"  first {i}: {text.knobs(point)}" for i, point in enumerate(plan["first"])]
    return [*output, *plan["skipped"]]


def _disk_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return how large the model is and what the search writes."""
    disk, free, count = plan["disk_mib"], plan["disk_free_mib"], plan["parameters"]
    if count == 0:  # of a command, which alone knows
        return [f"disk_mib: {free:.0f} free; what the command writes is not counted"]
    unknown = "unknown (the workload has no network(knobs))"
    fits = "fits" if disk < free else "DOES NOT FIT"
    return [
        f"parameters: {f'{count:,}' if count else unknown}",
        f"disk_mib: {disk:.0f} of {free:.0f} free ({fits})",
    ]


def _trials(plan: Mapping[str, Any]) -> str:
    """Return how many trials there are, and how many of them are new configurations."""
    trial = f"{text.seconds(plan['budget_s'])} {UNITS[plan['budget_unit']].what}"
    line = f"trials: {plan['trials']} × {trial}, {plan['at_once']} at once"
    if plan["seeds"] > 1:
        return f"{line}, {plan['seeds']} seeds each"
    new = plan["trials"] - plan["baseline_runs"]
    runs = f"{plan['baseline_runs']} runs of it, for the noise" if plan["baseline_runs"] > 1 else ""
    baseline = "the baseline" if not runs else f"the baseline ({runs})"
    return f"{line}: {text.pluralize(new, 'other configuration')}, {baseline}"


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
    last = f", {text.seconds(last_s)} in the end" if last_s else ""
    per_trial = f"{plan['evaluations_per_trial']} × {text.seconds(each_s)} per trial{last}"
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
