"""Compute what a comparison of two configurations will run and cost, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunediff import config as cfg
from tunediff.analysis import error_spending, evaluating
from tunediff.core import text
from tunediff.core.clock import UNITS, UnitName, own_s
from tunediff.report.plan_words import load_warning


def values(
    names: Sequence[str],
    sides: Sequence[Any],
    most: int,
    budget_s: float,
    unit: UnitName,
    measured: Mapping[str, Any],
    at_once: int = 1,
) -> dict[str, Any]:
    """Return the plan in JSON types; wall-clock seconds. Start-up is assumed, not measured.

    names: A and B as the user typed them. sides: their configurations. most: maximum number of
    pairs. budget_s: of one run, in seconds of `unit`. measured: `evaluation_s` of one evaluation,
    `data` (lines that describe the data), and how much of the cores others used meanwhile
    (`other_load_share`, `disturbed`), if they are known. at_once: runs at the same time.
    """
    # A pair trains both sides and evaluates both; the test may stop it at its first look.
    evaluation_s, points = measured.get("evaluation_s"), int(sides[0].evaluation.points)
    training_s = [own_s(budget_s, unit, side.devices) for side in sides]
    per_run_s = None if evaluation_s is None else points * evaluation_s
    pair_s = sum(training_s) + 2 * ((per_run_s or 0.0) + evaluating.RUN_S)
    least = error_spending.first_look(most)
    changed = cfg.differences(sides[1], sides[0])
    return {
        "a": names[0],
        "b": names[1],
        "changed": {name: value for name, value in changed.items() if name != "seed"},
        "metric": cfg.of(sides[0]).objective.name,
        "pairs_at_least": least,
        "pairs_at_most": most,
        "runs_at_most": 2 * most,
        "budget_s": budget_s,
        "budget_unit": unit,
        "training_s_per_run": training_s,
        "training_s_at_most": most * sum(training_s),
        "evaluation_s": evaluation_s,
        "evaluations_per_run": points,
        "evaluation_s_at_most": None if per_run_s is None else 2 * most * per_run_s,
        "evaluation_is_known": evaluation_s is not None,
        "wall_s_at_least": evaluating.START_S + least * pair_s / at_once,
        "wall_s_at_most": evaluating.START_S + most * pair_s / at_once,
        "runs_at_once": at_once,
        "other_load_share": measured.get("other_load_share"),
        "disturbed": measured.get("disturbed", False),
        "data": [*_objective(sides[0]), *measured.get("data", [])],
    }


def _objective(config: Any) -> list[str]:
    """Return how the runs are judged, if the workload says it: a search may judge otherwise."""
    describe = cfg.of(config).get_hook("evaluation_protocol")
    return [f"objective: {describe(config)}"] if describe is not None else []


def lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the plan in words, with a warning of other load on the machine."""
    least = plan["pairs_at_least"]
    most = plan["pairs_at_most"]
    total_s = plan["evaluation_s_at_most"]
    if not plan["budget_s"]:
        runs = f"runs: at most {most} pairs × 2 of equally many samples, as long as they take"
        return [runs, *load_warning(plan), *plan["data"]]
    run = f"{text.seconds(plan['budget_s'])} {UNITS[plan['budget_unit']].what}"
    evaluation, unknown = "evaluation is not known", ", and evaluation"
    if total_s is not None:
        per_run = text.seconds(total_s / plan["runs_at_most"])
        evaluation, unknown = f"about {text.seconds(total_s)} of evaluation ({per_run} per run)", ""
    fewer = f", about {text.seconds(plan['wall_s_at_least'])} with {least}" if least < most else ""
    wall_clock = f"about {text.seconds(plan['wall_s_at_most'])} with {most} pairs{fewer}{unknown}"
    if plan["runs_at_once"] > 1:
        wall_clock += f", {plan['runs_at_once']} runs at the same time"
    return [
        f"runs: at most {most} pairs × 2 × {run}; it ends as soon as it is decided, after {least}"
        " pairs at the earliest",
        f"cost: at most {text.seconds(plan['training_s_at_most'])} of training, {evaluation}",
        f"wall-clock: {wall_clock}",
        *load_warning(plan),
        *plan["data"],
    ]
