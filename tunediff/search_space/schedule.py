"""Decide which of the listed runs a search makes, and how many of its trials repeat others."""

from __future__ import annotations

from typing import Any

from tunediff.config.knobs import refuse
from tunediff.core import text
from tunediff.search_space.points import ListedRuns
from tunediff.search_space.sections import SearchFile

TRIALS_WITH_NOISE = 6
"""Trials from which a search runs its baseline twice, unless its file says otherwise."""
TRIALS_WITH_RERUNS, RERUN_SHARE = 32, 8
"""Least number of trials of which one in eight is a rerun by default; see docs/search.md."""


def listed_fields(
    file: SearchFile,
    kind: str,
    source: str,
    runs: ListedRuns,
    trials: int,
    seed: int,
    cost: str | None,
) -> dict[str, Any]:
    """Return the fields of a space that say what runs, the runs of the baseline first."""
    noise = _noise(file.noise, kind, trials, source)
    first, *others = runs.candidates
    repeats = [{**first, "seed": seed + number} for number in range(1, noise)]
    candidates = (first, *repeats, *others)[:trials]
    # The baseline's runs and the points under first: have trials that no rerun takes
    reruns = _reruns(file.reruns, kind, cost, trials, trials - len(candidates), source)
    skipped = list(runs.skipped)
    if kind == "search" and len(others) > (left := trials - noise):
        run = f"only {left} of {text.pluralize(len(others), 'point')} run"
        of_all = f"{text.pluralize(trials, 'trial')}, {noise} of them the baseline"
        skipped.append(f"{source}: first: {run}: {of_all}; allowed: more trials")
    return {
        "dimensions": runs.dimensions,
        "candidates": candidates,
        "rungs": runs.rungs,
        "skipped": tuple(skipped),
        "noise": noise,
        "reruns": reruns,
    }


def _noise(runs: int | None, kind: str, trials: int, source: str) -> int:
    """Return the number of runs of the baseline in a search. `runs`: the value in the file."""
    if runs is None:
        return 2 if kind == "search" and trials >= TRIALS_WITH_NOISE else 1
    where = f"{source}: noise"
    refuse(
        kind != "search", f"{where}: belongs to search:; {kind}: repeats every point with seeds:"
    )
    none_left = f"{where}: {runs} runs of the baseline leave none of {trials} trials to search"
    allowed = f"allowed: at most {max(1, trials - 1)}, or more trials"
    refuse(1 < runs >= trials, f"{none_left}; {allowed}")
    return runs


def _reruns(
    value: int | None, kind: str, cost: str | None, trials: int, most: int, source: str
) -> int:
    """Return how many trials of a search repeat what leads, of `most`. `value`: in the file."""
    if value is None:
        drawn = kind == "search" and cost is None
        return min(trials // RERUN_SHARE, most) if drawn and trials >= TRIALS_WITH_RERUNS else 0
    where = f"{source}: reruns: {value} is not allowed"
    refuse(kind != "search", f"{where}: it belongs to search:; allowed: no such line")
    single = "two objectives have no single best"
    refuse(value > 0 and cost is not None, f"{where}: {single}; allowed: 0")
    refuse(value > most, f"{where} with {trials} trials; allowed: 0 to {most}")
    return value
