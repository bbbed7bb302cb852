"""Confirm a search's winner: run finalists and baseline on new seeds and test the difference.

The best of many trials is partly the luckiest one. Its value in the search is therefore a biased
estimate. The confirming runs are made after it was chosen, on seeds that had no part in choosing
it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tunediff import analysis
from tunediff.analysis import Results, last
from tunediff.analysis.comparison import SPEEDUP, Comparison, Group, compare
from tunediff.analysis.confirming_runs import folders, latest, level
from tunediff.analysis.outcome import failed
from tunediff.analysis.sequential import Look, Rules, look
from tunediff.analysis.statistics import mean, sd
from tunediff.config import ConfigError
from tunediff.core.outcomes import State, Verdict
from tunediff.core.trial_record import TrialRecord

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True)
class Confirmation:
    """The results of the confirming runs."""

    search: Results
    compared: Comparison
    look: Look
    """The sequential test of the rounds so far; its differences are in the order of the rivals."""
    others: Sequence[Confirmation] = ()
    """The other confirmations of the search, of other finalists."""

    @property
    def metric(self) -> str:
        """Return the deciding metric: that of a final evaluation, else the objective."""
        return self.compared.metric

    @property
    def label(self) -> str:
        return self.compared.label

    @property
    def name(self) -> str:
        """Return the folder of the runs, inside that of the search."""
        return self.compared.results.folder.name

    @property
    def at_once(self) -> int:
        """Return how many runs there were at the same time."""
        return self.compared.results.space.at_once

    @property
    def over(self) -> bool:
        """Return whether no further seed is needed: decided, or baseline or rivals failed."""
        return self.decided or self.baseline_failure is not None or self._rivals_failed

    @property
    def decided(self) -> bool:
        """Return whether the sequential test has ended, with rivals that have not failed."""
        return self.look.over and not self._rivals_failed

    @property
    def settled(self) -> bool:
        """Return whether these runs have ended: without a `winner` the baseline stays."""
        done = self.compared.baseline is not None and bool(self.compared.baseline.done)
        return done and (self.look.over or self._rivals_failed)

    @property
    def baseline_failure(self) -> TrialRecord | None:
        """Return the first run of the baseline that failed."""
        runs = self.compared.baseline.runs if self.compared.baseline is not None else []
        return next(filter(failed, runs), None)

    @property
    def _rivals_failed(self) -> bool:
        failures = [any(map(failed, rival.runs)) for rival in self.compared.rivals]
        return bool(failures) and all(failures)

    @property
    def primary(self) -> Group | None:
        """Return the search's leader of the finalists: unbiased, since it was chosen before."""
        return next(iter(self.compared.rivals), None)

    @property
    def winner(self) -> Group | None:
        """Return the configuration that is significantly better than the baseline, or None.

        That is the search's leader if it is; then another one only if it is significantly better
        than the leader too.
        """
        better = [
            rival for rival in self.compared.rivals if rival.difference.verdict == Verdict.BETTER
        ]
        if not better:
            return None

        def loss(rival: Group) -> float:
            return self.search.loss(float(np.mean(self.values(rival))))

        best, primary = min(better, key=loss), self.primary
        return primary if primary in better and not self._beats(best, primary) else best

    def _beats(self, rival: Group, primary: Group | None) -> bool:
        """Return whether a rival is significantly better than the search's leader."""
        if primary is None or rival is primary:
            return False
        compared, search = self.compared, self.search
        rows = [compared.groups.index(group) for group in (primary, rival)]
        share = level(compared.results.folder) / len(compared.rivals)
        values, most = compared.values[rows], self.look.max_rounds
        lower, ratios = search.lower_is_better, search.ratios
        test = look(values, most, lower, ratios, rules=Rules(share))
        return test.differences[0].verdict == Verdict.BETTER

    @property
    def leader(self) -> Group | None:
        """Return the winner, or else the finalist that led the search if it ran."""
        return self.winner or next((rival for rival in self.compared.rivals if rival.done), None)

    def values(self, group: Group) -> list[float]:
        """Return the deciding values of all runs that have one, in the order of the seeds."""
        return group.values(self.metric)

    def bias(self, group: Group) -> tuple[float, list[float]] | None:
        """Return (value in the search, values of confirming runs) of a finalist, one protocol."""
        confirmed, trial = group.values(self.search.metric), self.trial(group)
        value = self.search.outcome_of(trial).value if trial is not None else None
        return (value, confirmed) if confirmed and value is not None else None

    def trial(self, group: Group) -> TrialRecord | None:
        """Return the trial of the search that had this configuration, on the search's seed."""
        knobs = _knobs(group.runs[0])
        trials = (outcome.trial for outcome in self.search.ranked)
        return next((trial for trial in trials if _knobs(trial) == knobs), None)

    def of(self, trial: TrialRecord) -> Group | None:
        """Return the confirming runs of a trial's configuration, which may be the baseline."""
        knobs, groups = _knobs(trial), self.compared.groups
        return next((group for group in groups if _knobs(group.runs[0]) == knobs), None)

    def table(self) -> pd.DataFrame:
        """Return one row per configuration: mean, sd, difference, speed-up, intervals, verdict."""
        import pandas as pd

        effect = self.compared.effect
        columns = [effect, f"{effect}_low", f"{effect}_high", *SPEEDUP, "verdict"]
        values = [self.values(group) for group in self.compared.groups]
        measured = [{"runs": len(runs), "mean": mean(runs), "sd": sd(runs)} for runs in values]
        table = self.compared.table()
        return pd.concat([table[["configuration"]], pd.DataFrame(measured), table[columns]], axis=1)


def _knobs(trial: TrialRecord) -> dict[str, object]:
    """Return the knobs without seed and workload file, of which every folder has a copy."""
    return {name: value for name, value in trial.config.items() if name not in ("seed", "workload")}


def _compare(runs: Results) -> Comparison:
    final = f"final_{runs.metric}"
    return compare(
        runs, final if any(last(trial, final) is not None for trial in runs.trials) else None
    )


def confirm(search: Results, runs: Results) -> Confirmation:
    """Test what `runs`, the results of the confirming folder, say about `search`."""
    compared, rounds = _compare(runs), runs.space.seeds
    if compared.baseline is None:
        return Confirmation(search, compared, Look([], 0, rounds, State.OPEN, search.ratios))
    values = compared.values
    for row, group in enumerate(compared.groups):
        if group.changed and any(map(failed, group.runs)):
            values[row] = math.nan  # it is out, and the others' rounds count without it
    lower, share = search.lower_is_better, level(runs.folder)
    test = look(values, rounds, lower, search.ratios, rules=Rules(share))
    return Confirmation(search, compared.judged(test.differences, test.ratios), test)


def read(results: Results) -> Confirmation | None:
    """Read the confirmation of a search that counts, see `counting`; None if there is none."""
    if results.space.confirm is None or (chosen := latest(results)) is None:
        return None
    return counting(results, analysis.read(chosen), analysis.read)


def counting(
    results: Results, runs: Results, read: Callable[[Path], Results]
) -> Confirmation | None:
    """Return the confirmation of a search that counts, with the others as `others`, or None.

    A configuration that was confirmed stays so, whatever other finalists show later. So it is the
    first that has a winner, beginning with `runs`, those of the present finalists, else `runs`.
    `read` reads a folder's results.
    """
    confirmations = list[Confirmation]()
    if runs.trials:  # `budget: total` may leave no time for them
        present = confirm(results, runs)
        if runs.ranked or present.over:  # else the first runs are under way and change nothing yet
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
    return replace(chosen, others=[one for one in confirmations if one is not chosen])
