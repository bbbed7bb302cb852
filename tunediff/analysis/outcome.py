"""Hold what all runs of one configuration have shown: their values and their failures.

Every ranking of configurations sorts `Outcome`s, and every comparison has `Candidate`s. The mean of
the runs that survived is no result by itself: a configuration that diverges on two of three seeds
often has the best value on the third.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from tunediff.analysis.statistics import Difference, mean, sd
from tunediff.core.outcomes import Status, Verdict
from tunediff.core.trial_record import TrialRecord


def failed(trial: TrialRecord) -> bool:
    """Return whether a trial ran and ended without a result, unless it was only stopped early.

    A side that missed its target has one: longer than any run."""
    if trial.status == Status.MISSED and trial.role == "side":
        return False
    return trial.status not in (None, Status.OK, Status.PRUNED, Status.SKIPPED)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All runs of one configuration."""

    runs: list[TrialRecord]
    """In the order of their numbers, finished or not; at least one."""
    metric: str
    """The quantity that the values are of."""
    lower_is_better: bool
    seeds: int = 1
    """Runs that every configuration of the search should have."""

    @functools.cached_property
    def done(self) -> list[TrialRecord]:
        """Return the runs that ended ok with a value."""
        return [run for run in self.runs if run.value(self.metric) is not None]

    @functools.cached_property
    def failures(self) -> list[TrialRecord]:
        """Return the runs that failed because of this configuration."""
        return [run for run in self.runs if failed(run) and not run.external_cause]

    @functools.cached_property
    def values(self) -> list[float]:
        """Return the values of `done`."""
        return [value for run in self.runs if (value := run.value(self.metric)) is not None]

    @property
    def value(self) -> float | None:
        """Return the mean of the values; None without any. To be shown with `failure_note`."""
        return mean(self.values)

    @property
    def trial(self) -> TrialRecord:
        """Return the run that stands for the configuration: the first, if possible with a value."""
        return self.done[0] if self.done else self.runs[0]

    @property
    def samples(self) -> list[TrialRecord]:
        """Return the runs that show the effect of knobs; further baseline runs only show noise."""
        return [run for run in self.runs if run.role != "repeat"]

    @property
    def failure_note(self) -> str:
        """Return `failed on 2 of 3 seeds`, to be shown with the value; '' without a failure."""
        return failure_note(len(self.failures), len(self.done))

    @property
    def rank(self) -> tuple[float, int, float]:
        """Return the key that sorts configurations with values, the best first.

        What fails on no seed comes before what does; then fewer missing runs; then the better mean.
        """
        failures, done = len(self.failures), len(self.done)
        missing = max(0, self.seeds - done - failures)
        value = mean(self.values) or 0.0
        loss = value if self.lower_is_better else -value
        return failures / (failures + done or 1), missing, loss


def failure_note(failures: int, values: int, how: str = "failed") -> str:
    """Return how many runs of a configuration failed, of those that ended; '' for none."""
    return f"{how} on {failures} of {failures + values} seeds" if failures else ""


def by_configuration(trials: Iterable[TrialRecord]) -> list[list[TrialRecord]]:
    """Return trials in groups that differ only in the seed, in the order of their first ones."""
    groups: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        groups.setdefault(json.dumps(trial.knobs, sort_keys=True), []).append(trial)
    return list(groups.values())


class CurveMean(NamedTuple):
    """The mean curve of a candidate at one evaluation."""

    seconds: float
    """In the unit of the budget."""
    mean: float
    sd: float
    """Standard deviation over the seeds; 0 for one seed."""


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A configuration, command or revision of a comparison, with all its runs."""

    name: str
    """`timesteps.name=speed weighting.name=p2`, or `baseline`; of two sides `A` and `B`."""
    changed: dict[str, object]
    """The drawn knobs that differ from the baseline."""
    is_baseline: bool
    """Whether the others are compared with it."""
    outcome: Outcome
    rounds: Mapping[int, TrialRecord]
    """Its run of each round, by the seed or the number of the pair."""
    difference: Difference = dataclasses.field(default_factory=Difference)
    """From the baseline, with the verdict: `open` as long as the test goes on."""

    @property
    def verdict(self) -> Verdict:
        return self.difference.verdict

    @property
    def runs(self) -> list[TrialRecord]:
        return self.outcome.runs

    @property
    def done(self) -> list[TrialRecord]:
        """Return the runs that have a value."""
        return self.outcome.done

    @property
    def fails(self) -> bool:
        """Return whether it fails on a seed; the baseline, the reference, never counts so."""
        return bool(self.outcome.failures) and not self.is_baseline

    def values(self, metric: str) -> list[float]:
        """Return the values at the end of the budget, in the order of the seeds."""
        return dataclasses.replace(self.outcome, metric=metric).values

    def curve(self, metric: str) -> list[CurveMean]:
        """Return the mean over the runs that ended ok, at every evaluation that all have."""
        by_index: dict[int, list[tuple[float, float]]] = {}
        for trial in self.done:
            for point in trial.points:
                if point.get(metric) is not None:
                    by_index.setdefault(point.index, []).append((point[trial.along], point[metric]))
        means = []
        for _, measured in sorted(by_index.items()):
            if len(measured) == len(self.done):
                seconds, values = zip(*measured, strict=True)
                mean_s, mean_value = float(np.mean(seconds)), float(np.mean(values))
                means.append(CurveMean(mean_s, mean_value, sd(values) or 0.0))
        return means


def knobs_of(trial: TrialRecord) -> dict[str, object]:
    """Return the knobs without seed and workload file, of which every folder has a copy."""
    return {name: value for name, value in trial.config.items() if name not in ("seed", "workload")}
