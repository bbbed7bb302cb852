"""Hold what all runs of one configuration have shown: their values and their failures.

Every ranking of configurations sorts `Outcome`s. The mean of the runs that survived is no result by
itself: a configuration that diverges on two of three seeds often has the best value on the third.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from tunediff.analysis.statistics import mean
from tunediff.core.trial_record import TrialRecord


def failed(trial: TrialRecord) -> bool:
    """Return whether a trial ran and ended without a result, unless it was only stopped early."""
    return trial.status not in (None, "ok", "pruned", "skipped")


def configuration_failed(trial: TrialRecord) -> bool:
    """Return whether a trial failed, and not because a process died or others held the memory."""
    return failed(trial) and not (trial.end is not None and trial.end.external_cause)


def without_seed(values: Mapping[str, Any]) -> dict[str, object]:
    """Return the knobs without the seed: equal for all runs of a configuration."""
    return {name: value for name, value in values.items() if name != "seed"}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All runs of one configuration."""

    runs: list[TrialRecord]
    """In the order of their numbers, finished or not; at least one."""
    metric: str
    """The quantity that the values are of."""
    falls: bool
    """Whether a smaller value is better."""
    seeds: int = 1
    """Runs that every configuration of the search should have; further ones repeat what leads."""

    @functools.cached_property
    def done(self) -> list[TrialRecord]:
        """Return the runs that ended ok with a value."""
        return [run for run in self.runs if run.value(self.metric) is not None]

    @functools.cached_property
    def failures(self) -> list[TrialRecord]:
        """Return the runs that this configuration has made fail; see `configuration_failed`."""
        return [run for run in self.runs if configuration_failed(run)]

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
        """Return the run that stands for the configuration: the first with a value, else the
        first."""
        return next(iter(self.done), self.runs[0])

    @property
    def samples(self) -> list[TrialRecord]:
        """Return the runs that say what its knobs do; reruns of what leads only show how lucky it
        was."""
        return [run for run in self.runs if self.seeds > 1 or "seed" not in run.drawn]

    @property
    def failure_note(self) -> str:
        """Return `failed on 2 of 3 seeds`, as it stands beside the value; '' without a failure."""
        return failure_note(len(self.failures), len(self.done))

    @property
    def rank(self) -> tuple[float, int, float]:
        """Return the key that sorts configurations with values, the best first.

        What fails on no seed comes before what does; then what lacks the fewest planned runs; then
        the better mean.
        """
        share_failed = len(self.failures) / (len(self.failures) + len(self.done) or 1)
        missing = max(0, self.seeds - len(self.done) - len(self.failures))
        value = mean(self.values) or 0.0
        return share_failed, missing, value if self.falls else -value


def failure_note(failures: int, values: int) -> str:
    """Return how many runs of a configuration failed, of those that ended; '' for none."""
    return f"failed on {failures} of {failures + values} seeds" if failures else ""


def by_configuration(trials: Iterable[TrialRecord]) -> list[list[TrialRecord]]:
    """Return trials in groups that differ only in the seed, in the order of their first ones."""
    groups: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        key = json.dumps(without_seed(trial.drawn), sort_keys=True)
        groups.setdefault(key, []).append(trial)
    return list(groups.values())
