"""Decide what a search shows: the best trial, those better than the baseline, speed-ups.

Terminal, tables, figures, pages and export use this module for best trial and speed-ups.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from tunediff import analysis
from tunediff.analysis import Results, confirming_runs, noise
from tunediff.analysis.comparison import Comparison, over_seeds
from tunediff.analysis.noise import Noise
from tunediff.analysis.outcome import Candidate, Outcome
from tunediff.analysis.speed import speedup_values
from tunediff.analysis.statistics import Estimate
from tunediff.config import ConfigError
from tunediff.core.outcomes import Status, Verdict
from tunediff.core.trial_record import TrialRecord

if TYPE_CHECKING:
    import pandas as pd

NEAR = "within_noise_of_best"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A search, with the noise and the tests that its conclusions need."""

    results: Results
    confirmation: Comparison | None = None
    """Its confirming runs, if there are any."""
    judged: Comparison | None = None
    """The sequential test of these runs, if they are confirming runs themselves."""

    @functools.cached_property
    def compared(self) -> Comparison | None:
        """Return the comparison of a search with several seeds; None with one seed."""
        return self.judged or (over_seeds(self.results) if self.results.space.seeds > 1 else None)

    @property
    def tested(self) -> Comparison | None:
        """Return the comparison over several seeds that decides; None: one run each."""
        return self.compared or self.confirmation

    @functools.cached_property
    def noise(self) -> Noise | None:
        """Return the noise of one run; None: not known, or every configuration has several runs."""
        if self.compared is not None:
            return None
        confirming = self.confirmation.results if self.confirmation is not None else None
        return noise.measured(self.results, confirming)

    @functools.cached_property
    def best(self) -> TrialRecord | None:
        """Return the best trial: the confirmed winner, or with several seeds a significant one.

        If runs on several seeds show that none is better, return the baseline. A search with one
        run each cannot show that; it returns the trial that is ahead, whether it is `better` or
        not. What fails on a seed is best only if everything does. None: no trial has a result.
        """
        tested, baseline = self.tested, self.baseline
        if tested is not None and tested.winner is not None:
            if self.compared is not None:
                return tested.winner.done[0]
            return confirming_runs.trial_of(tested, tested.winner) or self._leader
        if self.compared is not None:
            stays = baseline is not None and not self.outcome(baseline).failures
        else:
            stays = tested is not None and tested.is_conclusive
        return (baseline if stays else None) or self._leader

    @property
    def _leader(self) -> TrialRecord | None:
        """Return the leading trial among those that have not failed on new seeds, if any."""
        trials = [outcome.trial for outcome in self.results.ranked]
        for trial in trials:
            group = self.confirmation.candidate_of(trial) if self.confirmation is not None else None
            if group is None or not group.fails:
                return trial
        return trials[0] if trials else None

    @property
    def set_aside(self) -> list[Outcome]:
        """Return the configurations that are better than the best but fail on some seeds."""
        if self.best is None:
            return []
        best = self.outcome(self.best)
        return [
            outcome
            for outcome in self.results.ranked
            if outcome.failures and outcome is not best and outcome.rank[-1] < best.rank[-1]
        ]

    @property
    def winner(self) -> TrialRecord | None:
        """Return the best trial if several seeds show it better than the baseline; else None."""
        has_winner = self.tested is not None and self.tested.winner is not None
        return self.best if has_winner and self.best and self.better(self.best) else None

    @property
    def near(self) -> list[TrialRecord]:
        """Return the trials that are within the noise of one run of the best, nearest first."""
        return noise.within_best(self.results, self.noise, self.best)

    @functools.cached_property
    def baseline(self) -> TrialRecord | None:
        """Return the first run of the baseline with a result."""
        trials = (outcome.trial for outcome in self.results.outcomes if outcome.values)
        return next((trial for trial in trials if not self.results.changed(trial)), None)

    @property
    def baseline_of_best(self) -> TrialRecord | None:
        """Return the baseline's run on the best trial's seed; of a baseline, that trial."""
        if self.best is None or self.is_baseline(self.best):
            return self.best or self.results.baseline
        return self.results.baseline_of(self.best) or self.results.baseline

    def outcome(self, trial: TrialRecord) -> Outcome:
        """Return what the configuration of a trial has shown in all its runs of the search."""
        return self.results.outcome_of(trial)

    def is_baseline(self, trial: TrialRecord) -> bool:
        """Return whether a trial is a run of the baseline, on any seed."""
        return self.results.is_baseline(trial)

    def better(self, trial: TrialRecord) -> bool | None:
        """Return whether a trial beats the baseline by more than the noise, and fails on no seed.

        None: unknown, or it is a baseline.
        """
        if self.is_baseline(trial):
            return None
        if (group := self._candidate(trial)) is not None:
            return None if group.verdict == Verdict.OPEN else group.verdict == Verdict.BETTER
        if self.outcome(trial).failures:
            return False
        of_base = self.outcome(self.baseline).value if self.baseline is not None else None
        value = self.outcome(trial).value
        if self.noise is None or of_base is None or value is None:
            return None
        return not self.noise.within(of_base, value)

    def _candidate(self, trial: TrialRecord) -> Candidate | None:
        """Return the runs of a trial's configuration on several seeds; None: too few for a test."""
        candidate = self.tested.candidate_of(trial) if self.tested is not None else None
        is_tested = candidate is not None and (  # there is no test where it fails
            candidate.verdict == Verdict.FAILS or candidate.difference.resolution is not None
        )
        return candidate if is_tested else None

    def speedup(self, trial: TrialRecord) -> Estimate | None:
        """Return how many times sooner a trial reaches the baseline's end, or a ratio of rates.

        Over all seeds if there are several, else by one pair of runs; None: not determined.
        """
        if self.is_baseline(trial):
            return None
        candidate, tested = self._candidate(trial), self.tested
        if self.compared is not None:
            candidate = self.compared.candidate_of(trial)
        if tested is not None and candidate is not None:
            return tested.speedup(candidate)
        found = self.results.speedup(trial) if self.better(trial) else None
        if found is None or found.ratio <= 1 or self._is_unsteady(trial, found.ratio):
            return None
        return Estimate(found.ratio, None, None, found.at_first)

    def _is_unsteady(self, trial: TrialRecord, ratio: float) -> bool:
        """Return whether seconds of single runs do not show that a trial is `ratio` times sooner:
        one value ends a run, or the baseline's own runs differ by as much in speed."""
        baseline = self.results.baseline_of(trial)
        if self.results.by_rate or self.results.by_time or baseline is None:
            return False
        ends = [run.points[-1] for run in self.outcome(baseline).runs if run.points]
        rates = [end.samples / end.train_s for end in ends]
        runs = (trial, *self.outcome(baseline).runs)
        return any(len(run.points) == 1 for run in runs) or max(rates) >= ratio * min(rates)

    def seconds_to_baseline(self, trial: TrialRecord) -> float | None:
        """Return when a trial reaches its baseline's final value; None: not determined."""
        if self.results.by_rate or self.results.by_time or self.speedup(trial) is None:
            return None
        found, base = self.results.speedup(trial), self.results.baseline_of(trial)
        if base is None or found is None or found.ratio <= 1:
            return None
        return float(base.points[-1][base.along]) / found.ratio

    def table(self) -> pd.DataFrame:
        """Return `Results.table` with `speedup` and `speedup_at_least`; empty: not determined.

        In a search with one seed also `within_noise_of_best`: True also for the best, empty if the
        noise is not known.
        """
        import pandas as pd

        added, trials = ("speedup_at_least", "speedup"), self.results.trials
        frame = self.results.table((*added, NEAR))
        if frame.empty:
            return frame
        column = list(frame.columns).index("versus_baseline") + 1
        speedups = [self.speedup(trial) if trial.status == Status.OK else None for trial in trials]
        for name in added:
            frame.insert(column, name, [speedup_values(speedup)[name] for speedup in speedups])
        if self.compared is None:
            measured = self.results.ranked if self.noise is not None else []
            ranked = {outcome.trial.name for outcome in measured}
            near = {trial.name for trial in [*self.near, *filter(None, [self.best])]}
            marks = [trial.name in near if trial.name in ranked else None for trial in trials]
            frame.insert(column, NEAR, pd.Series(marks, dtype=object))
        return frame


def read(results: Results) -> Evidence:
    """Return what a search and its confirming runs have shown; for confirming runs, their test."""
    if confirming_runs.folder_within(results.folder):
        return of_confirming_runs(results, analysis.read(results.folder.parent))
    return Evidence(results, confirming_runs.read(results))


def of_confirming_runs(results: Results, search: Results) -> Evidence:
    """Return what confirming runs of `search` have shown by their sequential test."""
    confirmed = confirming_runs.confirm(search, results)
    return Evidence(results, judged=confirmed if confirmed.metric == results.metric else None)


def choose(results: Results, trial: str | None) -> TrialRecord:
    """Return the trial of that name, else the best. Raises `ConfigError` if there is none."""
    if trial is None:
        if (best := read(results).best) is None:
            raise ConfigError(f"{results.folder.name}: no trial has a result yet")
        return best
    records = {record.name: record for record in results.trials}
    if trial not in records:
        names = ", ".join(records) or "none"
        raise ConfigError(f"--trial: {trial!r} is not in {results.folder.name}; there are: {names}")
    return records[trial]
