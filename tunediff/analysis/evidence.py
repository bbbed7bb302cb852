"""What a search has shown: which trial is best, which are better than the baseline, and how many times sooner.

Everybody who names a best trial or a speed-up asks here: terminal, tables, figures, pages, export.
"""

from __future__ import annotations

import dataclasses
import functools

import pandas as pd

from tunediff import analysis
from tunediff.analysis import Results, confirmation, noise, without_seed
from tunediff.analysis.comparison import ITSELF, Comparison, Group, compare, speedup_values
from tunediff.analysis.confirmation import Confirmation
from tunediff.analysis.noise import Noise
from tunediff.analysis.statistics import BETTER, TOO_FEW, Estimate
from tunediff.config import ConfigError
from tunediff.core.trial_record import TrialRecord

UNTOLD = "no significant difference from the baseline by one run each"
UNKNOWN = "one run each, and their noise is not known"
NEAR = "within_noise_of_best"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A search, with what tells its results from noise."""

    found: Results
    told: Confirmation | None = None
    """What its confirming runs say, if any of them ended."""

    judged: Comparison | None = None
    """Of runs that were looked at more than once, with the error of that."""

    @functools.cached_property
    def compared(self) -> Comparison | None:
        """Of a search with several seeds."""
        return self.judged or (compare(self.found) if self.found.space.seeds > 1 else None)

    @functools.cached_property
    def noise(self) -> Noise | None:
        """Of one run; None: not known, or every configuration has several."""
        confirming = self.told.compared.found if self.told is not None else None
        return noise.measured(self.found, confirming) if self.compared is None else None

    @functools.cached_property
    def best(self) -> TrialRecord | None:
        """The confirmed winner; of several seeds the best of the configurations that are better than the baseline.

        Where runs on several seeds show none to be better, the baseline. A search with one run each has shown nothing
        of the kind: there it is the trial that is ahead, `better` or not. None: no trial has a result.
        """
        if self.told is not None and self.told.winner is not None:
            return self.told.trial(self.told.winner) or self.found.leader
        better = [] if self.compared is None else [g for g in self.compared.others if g.difference.verdict == BETTER]
        if better:
            return min(better, key=lambda group: self.found.loss(group.difference.estimate or 0.0)).done[0]
        asked = self.compared is not None or (self.told is not None and self.told.settled)
        return (self.baseline if asked else None) or self.found.leader

    @property
    def winner(self) -> TrialRecord | None:
        """The best trial, if runs on several seeds show that it is better than the baseline."""
        several = self.compared is not None or (self.told is not None and self.told.winner is not None)
        return self.best if several and self.best is not None and self.better(self.best) else None

    @property
    def near(self) -> list[TrialRecord]:
        """Trials that are behind the best by no more than the noise of one run, the next best first."""
        return noise.within_best(self.found, self.noise, self.best)

    @functools.cached_property
    def baseline(self) -> TrialRecord | None:
        """The first run of the baseline with a result."""
        runs = (trial for trial in self.found.ranked if not without_seed(self.found.changed(trial)))
        return min(runs, key=lambda trial: trial.number, default=None)

    @functools.cached_property
    def _asked(self) -> dict[str, bool]:
        return {}

    @functools.cached_property
    def values(self) -> dict[str, float]:
        """What configurations have reached, by the trial that stands for them: `Results.standings`."""
        return {trial.name: value for trial, value in self.found.standings}

    def runs(self, trial: TrialRecord | None) -> list[float]:
        """Return the values of all runs of the search that a trial stands for; [] where it stands for none."""
        name = trial.name if trial is not None else None
        return next((values for one, values in self.found.values_of_runs if one.name == name), [])

    def is_baseline(self, trial: TrialRecord) -> bool:
        """Whether a trial is a run of the baseline, on whatever seed."""
        if trial.name not in self._asked:  # a thousand configurations take a second
            self._asked[trial.name] = noise.is_baseline(self.found, trial)
        return self._asked[trial.name]

    def better(self, trial: TrialRecord) -> bool | None:
        """Whether a trial is better than the baseline by more than the noise; None: not known, or it is a baseline."""
        if self.is_baseline(trial):
            return None
        if (group := self._runs(trial)) is not None:
            return group.difference.verdict == BETTER
        base, mine = (self.values.get(one.name) if one is not None else None for one in (self.baseline, trial))
        if self.noise is None or base is None or mine is None:
            return None
        return not self.noise.within(base, mine)

    def _runs(self, trial: TrialRecord) -> Group | None:
        """The runs of a trial's configuration on several seeds; None where they are too few to tell."""
        told = self.told.of(trial) if self.told is not None else None
        group = self.compared.of(trial) if self.compared is not None else told
        return group if group is not None and group.difference.verdict != TOO_FEW else None

    def speedup(self, trial: TrialRecord) -> Estimate | str:
        """How many times sooner it is as good as the baseline at its end, or the ratio of throughputs.

        Over the seeds where there are several, else of one pair of runs; or why it is not determined, as a clause.
        """
        if self.is_baseline(trial):
            return ITSELF
        if self.compared is not None:
            return self.compared.speedup(self.compared.of(trial))
        if self.told is not None and (group := self._runs(trial)) is not None:
            return self.told.compared.speedup(group)
        if none := self.found.no_baseline(trial):
            return none
        if not (better := self.better(trial)):
            return UNTOLD if better is False else UNKNOWN
        ratio = self.found.time_to_target_speedup(trial)
        if ratio is None or ratio <= 1:
            return "its curve is not ahead"
        return Estimate(ratio, None, None, 1, self.found.at_first(trial))

    def seconds_to_baseline(self, trial: TrialRecord) -> float | None:
        """When it is as good as the baseline of its seed at its end, by this pair of runs; None: not determined."""
        ratio, base = self.found.time_to_target_speedup(trial), self.found.baseline_of(trial)
        if isinstance(self.speedup(trial), str) or self.found.by_rate or base is None or not ratio or ratio <= 1:
            return None
        return float(base.points[-1][base.along]) / ratio

    def table(self) -> pd.DataFrame:
        """`Results.table` with columns `speedup` and `speedup_at_least`, empty where it is not determined, and, of one
        seed, `within_noise_of_best`: True also for the best, empty where it is not known."""
        frame = self.found.table()
        if frame.empty:
            return frame
        ended = [self.speedup(trial) if trial.status == "ok" else "" for trial in self.found.trials]
        place = list(frame.columns).index("versus_baseline") + 1
        for name in ("speedup_at_least", "speedup"):
            frame.insert(place, name, [speedup_values(one)[name] for one in ended])
        if self.compared is None:
            ranked = {trial.name for trial in self.found.ranked} if self.noise is not None else set[str]()
            near = {trial.name for trial in [*self.near, *filter(None, [self.best])]}
            marks = [trial.name in near if trial.name in ranked else None for trial in self.found.trials]
            frame.insert(place, NEAR, pd.Series(marks, dtype=object))
        return frame


def read(found: Results) -> Evidence:
    """What a search has shown, its confirming runs included; of these themselves the verdicts that they end with."""
    if confirmation.folder_within(found.folder):
        told = confirmation.confirm(analysis.read(found.folder.parent), found)
        return Evidence(found, judged=told.compared if told.metric == found.metric else None)
    return Evidence(found, confirmation.read(found))


def choose(found: Results, trial: str | None) -> TrialRecord:
    """The trial of that name, else the best. Raises `ConfigError` when there is none."""
    if trial is None:
        chosen, refusal = read(found).best, f"{found.folder.name}: no trial has a result yet"
    else:
        chosen = next((known for known in found.trials if known.name == trial), None)
        names = ", ".join(known.name for known in found.trials) or "none"
        refusal = f"--trial: {trial!r} is not in {found.folder.name}; there are: {names}"
    if chosen is None:
        raise ConfigError(refusal)
    return chosen
