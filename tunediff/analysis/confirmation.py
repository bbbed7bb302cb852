"""Confirm the winner of a search: run finalists and baseline again on new seeds, and test whether it still wins.

The best of many trials is partly the luckiest one. Its value in the search is therefore a biased estimate.
The confirming runs are made after it was chosen, on seeds that had no part in choosing it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from tunediff import analysis
from tunediff import config as cfg
from tunediff.analysis import Results, failed, last, noise
from tunediff.analysis.comparison import SPEEDUP, Comparison, Group, compare
from tunediff.analysis.sequential import Look, look
from tunediff.analysis.statistics import BASELINE, BETTER, Difference, mean, sd
from tunediff.core.trial_record import TrialRecord


def folder_name(number: int) -> str:
    """Return the folder of confirming runs, relative to that of their search: confirm, confirm-2, …"""
    return "confirm" if number == 1 else f"confirm-{number}"


def folder_within(folder: Path) -> str:
    """Return a folder of confirming runs relative to its search, `confirm/4x`; '' for a search itself."""
    inside = (folder.parent / "search.yaml").is_file()
    return f"{folder_within(folder.parent)}/{folder.name}".lstrip("/") if inside else ""


def content(results: Results, of: int, seeds: int, final: Mapping[str, object]) -> dict[str, object]:
    """Return the search file of the confirming runs: baseline and finalists, one seed after the other.

    The caller adds `base:` and the first seed.

    `final`: knobs of `evaluation.` for one more evaluation of every finished run, by the full protocol.
    """
    names = {dimension.name for dimension in results.space.dimensions} - {"seed"}
    tried = [
        {name: value for name, value in results.changed(trial).items() if name in names}
        for trial in noise.candidates(results, of)
    ]
    budget = results.space.budget
    limits = {key: value for key, value in budget.lines.items() if key not in ("trials", "total")}
    once = {"seeds": seeds, "alone": True, "trials_per_gpu": 1, "final": final, "trials": tried}
    return {"objective": results.metric, "budget": limits, **once}


def nothing_to_confirm(results: Results) -> str:
    """Return why a search with `confirm:` has no finalist; '' if it has one, or has no `confirm:`."""
    if results.space.confirm is None or noise.candidates(results, 1):
        return ""
    return "only the baseline finished" if results.ranked else "no trial finished"


@dataclasses.dataclass(frozen=True)
class Confirmation:
    """The results of the confirming runs."""

    search: Results
    compared: Comparison
    look: Look
    """The sequential test of the rounds so far, with the groups except the baseline in their order."""

    @property
    def metric(self) -> str:
        """Return the deciding metric: that of the final evaluation if there was one, else the objective."""
        return self.compared.metric

    @property
    def label(self) -> str:
        return self.compared.label

    @property
    def over(self) -> bool:
        """Return whether no further seed is needed: it is decided, or the baseline or all rivals have failed."""
        return self.decided or self.baseline_failure is not None or self._rivals_failed

    @property
    def decided(self) -> bool:
        """Return whether the sequential test has ended, with rivals that have not failed."""
        return self.look.over and not self._rivals_failed

    @property
    def baseline_failure(self) -> TrialRecord | None:
        """Return the first run of the baseline that failed."""
        return next(filter(failed, self.compared.baseline.runs if self.compared.baseline is not None else ()), None)

    @property
    def _rivals_failed(self) -> bool:
        failures = [any(map(failed, group.runs)) for group in self.compared.others]
        return bool(failures) and all(failures)

    @property
    def primary(self) -> Group | None:
        """Return the search's leader among the finalists, whose mean is unbiased: it was chosen before."""
        return next(iter(self.compared.others), None)

    @property
    def winner(self) -> Group | None:
        """Return the configuration that is significantly better than the baseline; None: there is none.

        That is the search's leader if it is; then another one only if it is significantly better than the leader too.
        """
        better = [group for group in self.compared.others if group.difference.verdict == BETTER]
        best, primary = self._best(better), self.primary
        return primary if primary in better and not self._beyond(best, primary) else best

    def _beyond(self, group: Group | None, other: Group | None) -> bool:
        """Return whether two groups differ significantly, by the standard error of a difference to the baseline."""
        groups = (group, other)
        first, second = (math.nan if entry is None else entry.difference.estimate or math.nan for entry in groups)
        distance = abs(math.expm1(abs(math.log(first / second)))) if self.look.ratios else abs(first - second)
        return self.look.resolution is not None and distance > self.look.resolution

    @property
    def leader(self) -> Group | None:
        """Return the winner; without one, the finalist that was ahead in the search if it ran at all."""
        return self.winner or next((group for group in self.compared.others if group.done), None)

    @property
    def settled(self) -> bool:
        """Return whether these runs have ended and leave the baseline as it is, unless there is a `winner`."""
        done = self.compared.baseline is not None and bool(self.compared.baseline.done)
        return done and (self.look.over or self._rivals_failed)

    def _best(self, groups: list[Group]) -> Group | None:
        return min(groups, key=lambda group: self.search.loss(float(np.mean(self.values(group)))), default=None)

    def values(self, group: Group) -> list[float]:
        """Return the deciding values of all runs that have one, in the order of the seeds."""
        return group.values(self.metric)

    def bias(self, group: Group) -> tuple[float, list[float]] | None:
        """Return (value in the search, values of the confirming runs) of a finalist, in the search's protocol."""
        ends, chosen = group.values(self.search.metric), self.trial(group)
        value = next((mean for trial, mean in self.search.standings if trial is chosen), None)
        return (value, ends) if ends and value is not None else None

    def trial(self, group: Group) -> TrialRecord | None:
        """Return the trial of the search that had this configuration, on its own seed."""
        return next((trial for trial in self.search.ranked if _knobs(trial) == _knobs(group.runs[0])), None)

    def of(self, trial: TrialRecord) -> Group | None:
        """Return the confirming runs of a trial's configuration, which may be the baseline."""
        return next((group for group in self.compared.groups if _knobs(group.runs[0]) == _knobs(trial)), None)

    def table(self) -> pd.DataFrame:
        """Return one row per configuration: mean, sd, difference and speed-up with intervals, verdict."""
        effect = self.compared.effect
        columns = [effect, f"{effect}_low", f"{effect}_high", *SPEEDUP, "verdict"]
        values = [self.values(group) for group in self.compared.groups]
        measured = [{"runs": len(runs), "mean": mean(runs), "sd": sd(runs)} for runs in values]
        table = self.compared.table()
        return pd.concat([table[["configuration"]], pd.DataFrame(measured), table[columns]], axis=1)


def _knobs(trial: TrialRecord) -> dict[str, object]:
    """Return the knobs without the seed and without the workload's file, of which every folder has its own copy."""
    return {name: value for name, value in trial.config.items() if name not in ("seed", "workload")}


def _compare(runs: Results) -> Comparison:
    final = f"final_{runs.metric}"
    return compare(runs, final if any(last(trial, final) is not None for trial in runs.trials) else None)


def confirm(search: Results, runs: Results) -> Confirmation:
    """Test what `runs`, the results of the confirming folder, say about `search`."""
    compared = _compare(runs)
    if compared.baseline is None:
        return Confirmation(search, compared, Look([], 0, runs.space.seeds, "open", search.ratios))
    values = compared.values
    for row, group in enumerate(compared.groups):
        if group.changed and any(map(failed, group.runs)):
            values[row] = math.nan  # it is out, and the others' rounds count without it
    test = look(values, runs.space.seeds, search.falls, search.ratios)
    against = [Difference(verdict=BASELINE), *test.differences]
    groups = [replace(group, difference=difference) for group, difference in zip(compared.groups, against, strict=True)]
    return Confirmation(search, replace(compared, groups=groups, ratios=test.ratios, resolution=test.resolution), test)


def longer_budgets(runs: Results, read: Callable[[Path], Results]) -> list[Comparison]:
    """Return the comparisons of the finalists with each longer budget that has results, the shortest budget first.

    `runs`: the confirming runs, whose folder contains those with longer budgets (4x and the like); `read`
    reads one.
    """
    places = sorted(runs.folder.glob("*x/search.yaml"), key=lambda path: int(path.parent.name[:-1]))
    compared = [_compare(read(place.parent)) for place in places]
    return [comparison for comparison in compared if any(group.done for group in comparison.groups)]


def latest(results: Results) -> Path | None:
    """Return the folder of the confirming runs of the present finalists, else of the newest; None: there are none."""
    newest, number, settings = None, 1, results.space.confirm
    present = content(results, settings.of, settings.seeds, {})["trials"] if settings is not None else None
    while (folder := results.folder / folder_name(number)).exists():
        newest, number = folder, number + 1
        if cfg.read_yaml(folder / "search.yaml").get("trials") == present:
            break
    return newest


def read(results: Results) -> Confirmation | None:
    """Read the newest confirming runs of a search; None if there are none."""
    if results.space.confirm is None or (folder := latest(results)) is None:
        return None
    runs = analysis.read(folder)
    return confirm(results, runs) if runs.trials else None  # `budget: total` may leave no time for them
