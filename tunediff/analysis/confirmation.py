"""Whether the winner of a search still wins: finalists and baseline run again on new seeds, and what that says.

The best of many trials is partly the luckiest. Its value in the search is therefore no estimate of what it is worth:
the runs here are made after it was chosen, on seeds that had no part in choosing it.
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
from tunediff.analysis import Results, evaluating, failed, last, noise
from tunediff.analysis.comparison import SPEEDUP, Comparison, Group, compare
from tunediff.analysis.sequential import Look, look
from tunediff.analysis.statistics import BASELINE, BETTER, Difference, mean, sd
from tunediff.core import text
from tunediff.core.trial_record import TrialRecord

SEED_OFFSET = 1000
"""Added to the baseline's seed: no trial of the search itself may have used these."""


def folder_name(number: int) -> str:
    """Folder, within that of the search, in which the finalists run again: confirm, confirm-2, …"""
    return "confirm" if number == 1 else f"confirm-{number}"


def folder_within(folder: Path) -> str:
    """The folder of confirming runs within that of their search, `confirm/4x`; '' for a search itself."""
    inside = (folder.parent / "search.yaml").is_file()
    return f"{folder_within(folder.parent)}/{folder.name}".lstrip("/") if inside else ""


def content(found: Results, of: int, seeds: int, final: Mapping[str, object]) -> dict[str, object]:
    """The search file of the confirmation: baseline and finalists, seed after seed; `base:` lies beside it.

    `final`: knobs of `evaluation.` for one more evaluation of every finished run, at full protocol.
    """
    names = {dimension.name for dimension in found.space.dimensions} - {"seed"}
    tried = [
        {name: value for name, value in found.changed(trial).items() if name in names}
        for trial in noise.candidates(found, of)
    ]
    budget = found.space.budget
    limits = {
        **{key: value for key, value in budget.lines.items() if key not in ("trials", "total")},
        # A final evaluation may take longer than the training; the trials have shown how fast one is here.
        "deadline": text.format_exact(budget.trial_deadline_s + evaluating.allowance_s(found.trials, final)),
    }
    once = {"seeds": seeds, "alone": True, "final": final, "trials": tried}
    return {"objective": found.metric, "budget": limits, **once}


def nothing_to_confirm(found: Results) -> str:
    """Return why a search that is to be confirmed has no finalist; '' where it has one, or no `confirm:`."""
    if found.space.confirm is None or noise.candidates(found, 1):
        return ""
    return "only the baseline finished" if found.ranked else "no trial finished"


@dataclasses.dataclass(frozen=True)
class Confirmation:
    """What the confirming runs say."""

    search: Results
    compared: Comparison
    look: Look
    """What the rounds so far tell, of the groups but the baseline in their order."""

    @property
    def metric(self) -> str:
        """What decides: that of the final evaluation where one was made, else the objective."""
        return self.compared.metric

    @property
    def label(self) -> str:
        """What the deciding number may be called."""
        if self.metric == self.search.metric:
            return self.compared.found.label
        labels = (last(trial, "final_label") for group in self.compared.groups for trial in group.done)
        return str(next(filter(None, labels), f"final {self.search.label}"))

    @property
    def over(self) -> bool:
        """Whether no further seed is needed: decided, no longer to be decided, or a rival short of a comparison."""
        failures = [any(map(failed, group.runs)) for group in self.compared.groups]
        return self.look.over or failures[0] or (len(failures) > 1 and all(failures[1:]))

    @property
    def primary(self) -> Group | None:
        """The search's own leader: it was chosen before these runs, so its mean here flatters nobody."""
        return next(iter(self.compared.others), None)

    @property
    def winner(self) -> Group | None:
        """Better than the baseline by more than the noise: the search's leader, unless another that is better than the
        baseline is also ahead of the leader by more than the noise; None: none is."""
        better = [group for group in self.compared.others if group.difference.verdict == BETTER]
        best, primary = self._best(better), self.primary
        return primary if primary in better and not self._beyond(best, primary) else best

    def _beyond(self, group: Group | None, other: Group | None) -> bool:
        """Whether their distance is larger than the noise: it has the same standard error as that to the baseline."""
        one, two = (math.nan if known is None else known.difference.estimate or math.nan for known in (group, other))
        apart = abs(math.expm1(abs(math.log(one / two)))) if self.look.ratios else abs(one - two)
        return self.look.resolution is not None and apart > self.look.resolution

    @property
    def leader(self) -> Group | None:
        """The winner, or the finalist that was ahead in the search if it ran at all, even if that means nothing."""
        return self.winner or next((group for group in self.compared.others if group.done), None)

    @property
    def settled(self) -> bool:
        """Whether these runs have told what they can of the finalists beside the baseline."""
        return self.over and self.compared.baseline is not None and bool(self.compared.baseline.done)

    def _best(self, groups: list[Group]) -> Group | None:
        return min(groups, key=lambda group: self.search.loss(float(np.mean(self.values(group)))), default=None)

    def values(self, group: Group) -> list[float]:
        """What decides, of every run that has it, in the order of the seeds."""
        return group.values(self.metric)

    def bias(self, group: Group) -> tuple[float, list[float]] | None:
        """(value in the search, values of the confirming runs) of a finalist, in the search's own protocol."""
        ends, chosen = group.values(self.search.metric), self.trial(group)
        value = chosen.value(self.search.metric) if chosen is not None else None
        return (value, ends) if ends and value is not None else None

    def trial(self, group: Group) -> TrialRecord | None:
        """The trial of the search that had this configuration, on its own seed."""
        return next((trial for trial in self.search.ranked if _knobs(trial) == _knobs(group.runs[0])), None)

    def of(self, trial: TrialRecord) -> Group | None:
        """The runs of a trial's configuration, the baseline's among them."""
        return next((group for group in self.compared.groups if _knobs(group.runs[0]) == _knobs(trial)), None)

    def table(self) -> pd.DataFrame:
        """One row per configuration: mean, sd, difference, speed-up, both with intervals, and the verdict."""
        effect = self.compared.effect
        kept = [effect, f"{effect}_low", f"{effect}_high", *SPEEDUP, "verdict"]
        values = [self.values(group) for group in self.compared.groups]
        measured = [{"runs": len(mine), "mean": mean(mine), "sd": sd(mine)} for mine in values]
        told = self.compared.table()
        return pd.concat([told[["configuration"]], pd.DataFrame(measured), told[kept]], axis=1)


def _knobs(trial: TrialRecord) -> dict[str, object]:
    """All but the seed, and the file of the workload, of which every folder has a copy of its own."""
    return {name: value for name, value in trial.config.items() if name not in ("seed", "workload")}


def confirm(search: Results, runs: Results) -> Confirmation:
    """What `runs`, the results of the confirming folder, say about `search`."""
    final = f"final_{search.metric}"
    metric = final if any(last(trial, final) is not None for trial in runs.trials) else search.metric
    compared = compare(runs, metric)
    if compared.baseline is None:
        return Confirmation(search, compared, Look([], 0, runs.space.seeds, "open", search.ratios))
    told = look(compared.values, runs.space.seeds, search.falls, search.ratios)
    against = [Difference(verdict=BASELINE), *told.differences]
    groups = [replace(group, difference=one) for group, one in zip(compared.groups, against, strict=True)]
    return Confirmation(search, replace(compared, groups=groups, ratios=told.ratios, resolution=told.resolution), told)


def longer_budgets(runs: Results, read: Callable[[Path], Results]) -> list[Comparison]:
    """Return the comparisons of the finalists with each longer budget that has results, the shortest budget first.

    `runs`: the confirming runs, whose folder contains those with longer budgets (4x and the like); `read` reads one.
    """
    places = sorted(runs.folder.glob("*x/search.yaml"), key=lambda path: int(path.parent.name[:-1]))
    compared = [compare(read(place.parent)) for place in places]
    return [one for one in compared if any(group.done for group in one.groups)]


def latest(found: Results) -> Path | None:
    """The folder of the newest confirming runs, if there are any."""
    newest, number = None, 1
    while (folder := found.folder / folder_name(number)).exists():
        newest, number = folder, number + 1
    return newest


def read(found: Results) -> Confirmation | None:
    """What the newest confirming runs of a search say so far; None without any that ended."""
    if found.space.confirm is None or (folder := latest(found)) is None:
        return None
    runs = analysis.read(folder)
    return confirm(found, runs) if runs.ranked else None
