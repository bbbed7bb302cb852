"""Confirm a search's winner: run finalists and baseline on new seeds and test the difference.

The best of many trials is partly the luckiest one. Its value in the search is therefore a biased
estimate. The confirming runs are made after it was chosen, on seeds that had no part in choosing
it. Here are their folders, their search file, their share of the error, and what they show.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunediff import analysis
from tunediff.analysis import Results, comparison, last, noise
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.outcome import Candidate, knobs_of
from tunediff.analysis.sequential import Rules
from tunediff.analysis.statistics import LEVEL
from tunediff.config import ConfigError
from tunediff.core.trial_record import TrialRecord
from tunediff.experiment.model import Experiment, is_search

FIRST_SHARE, FURTHER_SHARE = 0.85, 0.15
"""Share of the error that the first confirmation of a search spends, and that each further one
spends of what the one before it had: together no more than all of it. Halves would leave the first
one less than 92 % of chances to find 2 sd of a run in one of three finalists."""


# ---- folders
def folder_name(number: int) -> str:
    """Return the folder of confirming runs inside that of a search: confirm, confirm-2, …"""
    return "confirm" if number == 1 else f"confirm-{number}"


def level(folder: Path) -> float:
    """Return the probability of any wrong verdict that the confirming runs in a folder may have."""
    number = re.fullmatch(r"confirm-(\d+)", folder.name)
    return LEVEL * FIRST_SHARE * FURTHER_SHARE ** (int(number[1]) - 1 if number else 0)


def folder_within(folder: Path) -> str:
    """Return a folder of confirming runs relative to its search, `confirm-2`; '' for a search."""
    return folder.name if is_search(folder.parent) else ""


def folders(search: Path) -> list[Path]:
    """Return the folders of a search's confirming runs, in the order in which they were made."""
    numbered = (search / folder_name(number) for number in itertools.count(1))
    return list(itertools.takewhile(Path.exists, numbered))


def of_finalists(search: Path, trials: object) -> Path | None:
    """Return the folder in which these finalists were confirmed, in any order; else None."""

    def unordered(points: Any) -> list[str]:
        return sorted(json.dumps(point, sort_keys=True, default=str) for point in points or ())

    for path in folders(search):
        if unordered(Experiment.read(path).space.get("trials")) == unordered(trials):
            return path
    return None


# ---- finalists
def content(
    results: Results, of: int, seeds: int, final: Mapping[str, object]
) -> dict[str, object]:
    """Return the search file of the confirming runs: baseline and finalists, seed after seed.

    The caller adds `base:` and the first seed. `final`: knobs of `evaluation.` for one more
    evaluation of every finished run, by the full protocol.
    """
    names = {dimension.name for dimension in results.space.dimensions} - {"seed"}
    finalists = [
        {
            name: value
            for name, value in results.space.changed(trial.config).items()
            if name in names
        }
        for trial in noise.finalists(results, of)
    ]
    budget, target = results.space.budget.lines, results.space.target
    objective: object = {"target": str(target)} if target is not None else results.metric
    return {
        "objective": objective,
        "budget": {key: budget[key] for key in budget if key not in ("trials", "total")},
        "seeds": seeds,
        "trials_per_gpu": 1,
        "final": final,
        "trials": finalists,
    }


def nothing_to_confirm(results: Results) -> bool:
    """Return whether a search with `confirm:` has no finalist."""
    return results.space.confirm is not None and not noise.finalists(results, 1)


def latest(results: Results) -> Path | None:
    """Return the folder that confirms the present finalists, else the newest one, or None."""
    settings, present = results.space.confirm, None
    if settings is not None:
        present = content(results, settings.of, settings.seeds, {})["trials"]
    return of_finalists(results.folder, present) or next(reversed(folders(results.folder)), None)


# ---- what they show
def confirm(search: Results, runs: Results) -> Comparison:
    """Test what `runs`, the results of the confirming folder, say about `search`."""
    final, rules = f"final_{runs.metric}", Rules(runs.space.seeds, level(runs.folder))
    has_final = any(last(trial, final) is not None for trial in runs.trials)
    metric = final if has_final else runs.metric
    compared = comparison.of_results(runs, rules, metric, search.ratios)
    return dataclasses.replace(compared, search=search).judged()


def read(results: Results) -> Comparison | None:
    """Read the confirmation of a search that counts, see `counting`; None if there is none."""
    if results.space.confirm is None or (chosen := latest(results)) is None:
        return None
    return counting(results, analysis.read(chosen), analysis.read)


def counting(results: Results, runs: Results, read: Callable[[Path], Results]) -> Comparison | None:
    """Return the confirmation of a search that counts, with the others as `others`, or None.

    A configuration that was confirmed stays so, whatever other finalists show later. So it is the
    first that has a winner, beginning with `runs`, those of the present finalists, else `runs`.
    `read` reads a folder's results.
    """
    confirmations = list[Comparison]()
    if runs.trials:  # `budget: total` may leave no time for them
        present = confirm(results, runs)
        if runs.ranked or present.ended:  # else the first runs are under way and change nothing yet
            confirmations.append(present)
    counted = len(confirmations)
    for folder in folders(results.folder):
        with contextlib.suppress(ConfigError):  # it is damaged
            if folder != runs.folder and (other := read(folder)).trials:
                confirmations.append(confirm(results, other))
    default = confirmations[0] if counted else None
    chosen = next((one for one in confirmations if one.winner is not None), default)
    if chosen is None:
        return None
    others = [one for one in confirmations if one is not chosen]
    return dataclasses.replace(chosen, others=others)


def trial_of(confirmation: Comparison, candidate: Candidate) -> TrialRecord | None:
    """Return the trial of the search that had the configuration of a finalist."""
    knobs, search = knobs_of(candidate.runs[0]), confirmation.search
    trials = (outcome.trial for outcome in (search.ranked if search is not None else ()))
    return next((trial for trial in trials if knobs_of(trial) == knobs), None)


def bias(confirmation: Comparison, candidate: Candidate) -> tuple[float, list[float]] | None:
    """Return (value in the search, values of confirming runs) of a finalist, one protocol."""
    trial, confirmed = trial_of(confirmation, candidate), candidate.values(confirmation.objective)
    if confirmation.search is None or trial is None or not confirmed:
        return None
    value = confirmation.search.outcome_of(trial).value
    return (value, confirmed) if value is not None else None
