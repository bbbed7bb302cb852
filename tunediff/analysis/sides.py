"""Read what the folder of a comparison of two sides holds besides its runs.

What judges the runs needs none of it: see `comparison`.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.statistics import has_many_digits, quantile
from tunediff.config import Values
from tunediff.core import text
from tunediff.core.clock import ClockSummary, Unit
from tunediff.core.files import content as content
from tunediff.experiment.model import CODE as CODE
from tunediff.experiment.model import SIDES as SIDES
from tunediff.experiment.model import Experiment, is_comparison
from tunediff.search_space import SearchBudget

LEDGER = "ledger.json"
"""File with the place of the comparison in the ledger of the repository; see `judge.ledger`."""
HOLDOUT_VALUES = "holdout.json"
"""File with the values of the second judge, by side."""
JUDGE, HOLDOUT = "judge.py", "holdout.py"
"""Copies of what judges the runs, and judges them again: `judge.locked_judge`."""


def of_commands(folder: Path) -> bool:
    """Return whether a folder holds a comparison of commands; says nothing of other faults."""
    return is_comparison(folder) and Experiment.read(folder).runner == "command"


def changed(comparison: Comparison) -> Values:
    """Return the knobs in which B differs from A, if both belong to one workload."""
    a, b = comparison.configs
    return {name: value for name, value in cfg.differences(b, a).items() if name != "seed"}


def limits(comparison: Comparison) -> SearchBudget:
    """Return the budget of every run."""
    limit = comparison.experiment.limit
    return SearchBudget(
        limit.budget or 0.0,
        2 * comparison.rules.max_rounds,
        compile_charged=limit.compile != "free",
        unit=limit.unit,
    )


def clocked(comparison: Comparison) -> ClockSummary:
    """Return which seconds counted in the runs so far."""
    declared = cfg.of(comparison.configs[0]).clock
    return ClockSummary.of((run.clock for run in comparison.runs), declared)


def clock(comparison: Comparison) -> Unit:
    """Return the unit of the budget, along which the curves are compared."""
    return clocked(comparison).unit(comparison.experiment.limit.unit)


def run_length(comparison: Comparison) -> str:
    """Return what ends a run, in words."""
    if (seconds := comparison.experiment.limit.budget) is None:
        return "its own end"
    return f"{text.seconds(seconds)} of {clock(comparison).what}"


def unit(comparison: Comparison) -> str:
    """Return what the samples are called: `images`, `tokens`."""
    return str(cfg.of(comparison.configs[0]).unit)


def outcome_label(comparison: Comparison) -> str:
    """Return the label of what is compared: the metric, or the seconds."""
    rules = comparison.rules
    if not rules.by_time:
        return comparison.label
    if rules.target is None or rules.counted == "end":
        return "seconds of a run"
    return f"seconds until {rules.target}"


def setup_s(comparison: Comparison) -> tuple[float | None, ...]:
    """Return the median seconds that the runs of A and of B spend before their first batch."""
    medians = list[float | None]()
    for side in comparison.candidates:
        setups = [run.points[-1].before_first_batch_s for run in side.runs if run.points]
        seconds = [setup for setup in setups if setup is not None]
        medians.append(statistics.median(seconds) if seconds else None)
    return tuple(medians)


def one_run_detects(comparison: Comparison) -> float | None:
    """Return the smallest significant difference of single runs; None if `noise_is_rough`.

    It is Student's bound for the noise of these pairs. That of `resolution` also allows for
    every interim analysis: None while it is so wide that pairs would seem to detect less than
    single runs.
    """
    test, difference = comparison.analysis, comparison.analysis.differences[0]
    if difference.sd is None or difference.resolution is None or comparison.noise_is_rough:
        return None
    sides = 1 if comparison.rules.one_sided else 2
    bound = quantile(1 - comparison.rules.level / sides, test.rounds - 1)
    least = bound * (math.log1p(difference.sd) if test.ratios else difference.sd)
    least = math.expm1(least) if test.ratios else least
    return least if least > difference.resolution else None


def without_effect(comparison: Comparison) -> list[str]:
    """Return the sides with runs on different seeds whose curves are equal, to many digits."""
    found = set[str]()
    for side in comparison.candidates:
        seeds = dict[tuple[Any, ...], set[int]]()
        for run in side.done:
            curve = tuple(point.get(comparison.metric) for point in run.points)
            seeds.setdefault(curve, set()).add(run.seed)
        if any(len(equal) > 1 and has_many_digits(curve[-1]) for curve, equal in seeds.items()):
            found.add(side.name)
    return sorted(found)
