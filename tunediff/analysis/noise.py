"""How much two runs of one configuration differ, and which trials lie no further than that behind the best.

A search alone tells what lies within its noise. That its winner is better than the baseline only new seeds tell.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

import numpy as np

from tunediff.analysis import RATE, Results, curve, without_seed
from tunediff.analysis.statistics import ROUGH_FREEDOM, quantile
from tunediff.core.trial_record import TrialRecord

CONFIDENCE = 0.9
"""Of one difference, one-sided: a trial that is as good as the best is called worse once in ten times."""


@dataclasses.dataclass(frozen=True)
class Noise:
    """The noise of one run, from configurations that ran more than once."""

    sd: float
    """Pooled standard deviation: of the logarithm for `ratios`, else in units of the objective."""
    freedom: int
    """Its degrees of freedom, runs less configurations; at least 1."""
    runs: int
    configurations: int
    ratios: bool
    falls: bool
    """Whether a smaller value is better."""

    @property
    def rough(self) -> bool:
        """Whether the standard deviation is known to a factor of two only: `ROUGH_FREEDOM`."""
        return self.freedom < ROUGH_FREEDOM

    @property
    def limit(self) -> float:
        """What single runs of two equal configurations differ by, less often than once in ten times: t·√2·sd."""
        return quantile(CONFIDENCE, self.freedom) * math.sqrt(2) * self.sd

    def apart(self, one: float, other: float) -> bool:
        """Whether two values differ by more than the noise, whichever is better."""
        return not (self.within(one, other) and self.within(other, one))

    def within(self, value: float, best: float) -> bool:
        """Whether `value` is behind `best` by no more than the noise; without any noise, whether it is not behind."""
        if self.ratios and min(value, best) <= 0:
            return value == best
        behind = math.log(value / best) if self.ratios else value - best
        return (behind if self.falls else -behind) <= self.limit


def measured(found: Results, confirming: Results | None = None, metric: str | None = None) -> Noise | None:
    """The noise of a search, with that of the runs that confirm it; None: nothing of it ended ok twice.

    Of its objective, or of `RATE`.
    """
    metric = metric or found.metric
    sets = [one for one in (found, confirming) if one is not None]
    groups = [values for one in sets for runs in one.groups if len(values := _by_seed(runs, metric)) > 1]
    ratios = (found.ratios or metric == RATE) and all(value > 0 for values in groups for value in values)
    return pooled(groups, ratios, found.falls and metric != RATE)


def pooled(groups: Sequence[Sequence[float]], ratios: bool, falls: bool) -> Noise | None:
    """Return the noise of one run from the values of configurations that ran more than once; None: none did.

    `ratios`: whether to compare logarithms, of positive values; `falls`: whether a smaller value is better.
    """
    samples = [np.log(values) if ratios else np.array(values) for values in groups if len(values) > 1]
    if (freedom := sum(len(sample) - 1 for sample in samples)) < 1:
        return None
    squares = sum(float(((sample - sample.mean()) ** 2).sum()) for sample in samples)
    return Noise(math.sqrt(squares / freedom), freedom, sum(map(len, samples)), len(samples), ratios, falls)


def _by_seed(runs: Sequence[TrialRecord], metric: str) -> list[float]:
    """The values of a configuration, one for each seed."""
    return list({trial.config["seed"]: value for trial in runs if (value := trial.value(metric)) is not None}.values())


UNMOVED = 0.01
"""Share of its first value by which an objective may change and has not moved, where the noise is not known."""


def unmoved(found: Results) -> int:
    """Return how many trials ended ok, if the objective moved in none of them; 0: it moved, or that cannot be told.

    It moved in a trial if its last value differs from its first by more than the noise, and in all together if the mean
    of these differences is larger than that of as many runs may be by chance.
    """
    ends = [line for trial in found.trials if trial.status == "ok" and len(line := curve(trial, found.metric)) > 1]
    if found.by_rate or not ends:
        return 0
    pairs = [(line[0][1], line[-1][1]) for line in ends]
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        return 0
    noise, ratios = measured(found), found.ratios
    moves = [math.log(last / first) if ratios else last - first for first, last in pairs]
    limit = UNMOVED * (1.0 if ratios else max(abs(first) for first, _ in pairs))
    if noise is not None and noise.ratios == ratios:
        limit = max(limit, noise.limit)
    mean = abs(sum(moves)) / len(moves)
    return len(moves) if max(map(abs, moves)) <= limit and mean <= limit / math.sqrt(len(moves)) else 0


def within_best(found: Results, noise: Noise | None, best: TrialRecord | None) -> list[TrialRecord]:
    """Trials of a search with one seed that are behind its best by no more than the noise, the next best first."""
    value = next((value for trial, value in found.standings if best is not None and trial.name == best.name), None)
    if noise is None or value is None or best is None or found.space.seeds > 1:
        return []
    return [trial for trial, one in found.standings if trial.name != best.name and noise.within(one, value)]


def candidates(found: Results, of: int) -> list[TrialRecord]:
    """Which trials of a search may be better than its baseline: the leader, and what lies within its noise.

    The best of those that differ from the baseline; then the next best ones that differ from each other, as long as
    they are behind it by no more than the noise; `of` at most. Without a known noise the best `of`. Only runs of the
    search itself count: what runs are to confirm does not change with what they show.
    """
    noise, chosen, seen = measured(found), list[tuple[TrialRecord, float]](), set[str]()
    for trial, value in found.standings:
        if is_baseline(found, trial) or _configuration(trial) in seen:
            continue
        if len(chosen) == of or (chosen and noise is not None and not noise.within(value, chosen[0][1])):
            break
        chosen.append((trial, value))
        seen.add(_configuration(trial))
    return [trial for trial, _ in chosen]


def _configuration(trial: TrialRecord) -> str:
    """Equal for trials that came to the same: knobs that changed nothing do not count."""
    return json.dumps(without_seed(trial.effective), sort_keys=True, default=str)


def is_baseline(found: Results, trial: TrialRecord) -> bool:
    """Whether its configuration comes to the same as the baseline's, whatever the seed."""
    base = found.baseline
    same = base is not None and _configuration(trial) == _configuration(base)
    return same or not without_seed(found.changed(trial))
