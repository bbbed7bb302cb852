"""Decide which of the listed runs a search makes, and how many of its trials repeat others."""

from __future__ import annotations

from typing import Any

from tunediff.config.knobs import refuse
from tunediff.core import text
from tunediff.search_space.points import ListedRuns
from tunediff.search_space.sections import SearchFile

TRIALS_WITH_NOISE = 6
"""Trials from which a search runs its baseline twice, unless its file says otherwise."""


def listed_fields(
    file: SearchFile,
    kind: str,
    source: str,
    runs: ListedRuns,
    trials: int,
    seed: int,
) -> dict[str, Any]:
    """Return the fields of a space that say what runs, the runs of the baseline first."""
    noise = _noise(file.noise, kind, trials, source)
    first, *others = runs.candidates
    repeats = [{**first, "seed": seed + number} for number in range(1, noise)]
    candidates = (first, *repeats, *others)[:trials]
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
