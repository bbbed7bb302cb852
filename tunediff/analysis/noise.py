"""Estimate how much two runs of one configuration differ, and which trials are within that of the
best.

A search alone shows only what lies within its noise. Whether its winner is better than the baseline
takes new seeds.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from tunediff.analysis import RATE, Results, curve
from tunediff.analysis.outcome import without_seed
from tunediff.analysis.statistics import LEVEL, ROUGH_FREEDOM, quantile, value_step
from tunediff.core.trial_record import TrialRecord

CONFIDENCE = 0.9
"""One-sided confidence for one difference: a trial as good as the best is called worse once in ten
times."""


@dataclasses.dataclass(frozen=True)
class Noise:
    """The noise of one run, from configurations that ran more than once."""

    sd: float
    """Pooled standard deviation: of the logarithm for `ratios`, else in units of the objective."""
    freedom: int
    """Its degrees of freedom, runs − configurations; at least 1."""
    runs: int
    configurations: int
    ratios: bool
    falls: bool
    """Whether a smaller value is better."""
    least: float | None = None
    """Standard deviation of the configuration with the least noise, where configurations measurably
    differ in it."""
    largest: float | None = None
    """That of the one with the most, which then counts for all."""
    largest_freedom: int = 0

    @property
    def rough(self) -> bool:
        """Return whether the standard deviation is known only to a factor of two: see
        `ROUGH_FREEDOM`."""
        return self.freedom < ROUGH_FREEDOM

    @property
    def limit(self) -> float:
        """Return the difference that runs of two equal configurations exceed once in ten times:
        t·√2·sd."""
        sd, freedom = (
            (self.sd, self.freedom)
            if self.largest is None
            else (self.largest, self.largest_freedom)
        )
        return quantile(CONFIDENCE, freedom) * math.sqrt(2) * sd

    def differ(self, first: float, second: float) -> bool:
        """Return whether two values differ by more than the noise, in either direction."""
        return not (self.within(first, second) and self.within(second, first))

    def within(self, value: float, best: float) -> bool:
        """Return whether `value` is behind `best` by no more than the noise.

        If a value that is compared by ratios is not positive, return whether both are equal.
        """
        if self.ratios and min(value, best) <= 0:
            return value == best
        behind = math.log(value / best) if self.ratios else value - best
        return (behind if self.falls else -behind) <= self.limit


def measured(
    results: Results, confirming: Results | None = None, metric: str | None = None
) -> Noise | None:
    """Return the noise of a search and its confirming runs; None: no configuration ended ok twice.

    `metric`: the objective by default, or `RATE`.
    """
    metric = metric or results.metric
    sets = [runs for runs in (results, confirming) if runs is not None]
    groups = [_unselected(part, outcome.runs, metric) for part in sets for outcome in part.outcomes]
    ratios = (results.ratios or metric == RATE) and all(
        value > 0 for values in groups for value in values
    )
    return pooled(groups, ratios, results.falls and metric != RATE)


def pooled(groups: Sequence[Sequence[float]], ratios: bool, falls: bool) -> Noise | None:
    """Return the noise of one run from the values of configurations; None: none ran more than once.

    `ratios`: whether to compare logarithms, of positive values; `falls`: whether a smaller value is
    better. It is at least that of rounding: accuracies of a small test set are often equal by
    chance.
    """
    rounding = value_step(np.array([value for values in groups for value in values])) / math.sqrt(
        12
    )
    variances, freedoms = list[float](), list[int]()
    for values in groups:
        if len(values) > 1:
            sample = np.log(values) if ratios else np.array(values)
            floor = rounding / math.exp(sample.mean()) if ratios else rounding
            variances.append(max(float(sample.var(ddof=1)), floor**2))
            freedoms.append(len(values) - 1)
    if not freedoms:
        return None
    freedom = sum(freedoms)
    sd = math.sqrt(float(np.dot(variances, freedoms)) / freedom)
    noise = Noise(sd, freedom, freedom + len(freedoms), len(freedoms), ratios, falls)
    if not differ_in_variance(variances, freedoms):
        return noise
    most = int(np.argmax(variances))
    least, largest = math.sqrt(min(variances)), math.sqrt(variances[most])
    return dataclasses.replace(noise, least=least, largest=largest, largest_freedom=freedoms[most])


def differ_in_variance(variances: Sequence[float], freedoms: Sequence[int]) -> bool:
    """Return whether the variance of any sample differs significantly from that of the others, by F
    tests."""
    squares, freedom = float(np.dot(variances, freedoms)), sum(freedoms)
    for variance, own in zip(variances, freedoms, strict=True):
        others = freedom - own
        rest = (squares - own * variance) / max(1, others)
        if others and rest > 0 and variance > 0:
            tail = float(special.fdtrc(own, others, variance / rest))
            if 2 * min(tail, 1 - tail) * len(variances) < LEVEL:
                return True
    return False


def _unselected(results: Results, runs: Sequence[TrialRecord], metric: str) -> list[float]:
    """Return the values of a configuration, one for each seed.

    Without the first one if a search has run the configuration again because it was good: the
    spread of such runs would be a third too large, since the first is partly the luckiest.
    """
    values = {
        trial.config["seed"]: value for trial in runs if (value := trial.value(metric)) is not None
    }
    chosen = results.space.seeds == 1 and len(values) > 1 and without_seed(results.changed(runs[0]))
    return list(values.values())[1 if chosen else 0 :]


UNMOVED = 0.01
"""Share of its first value up to which a change of the objective counts as none, where the noise is
not known."""


def unmoved(results: Results) -> int:
    """Return how many trials ended ok if the objective moved in none of them; 0: it moved, or that
    is not known.

    It moved in a trial if its last value differs from its first by more than the noise, and over
    all trials if the mean of these differences is larger than the noise of such a mean.
    """
    ends = [
        line
        for trial in results.trials
        if trial.status == "ok" and len(line := curve(trial, results.metric)) > 1
    ]
    if results.by_rate or not ends:
        return 0
    pairs = [(line[0][1], line[-1][1]) for line in ends]
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        return 0
    # The limit: the noise of a run, or a small share of the first value
    noise, ratios = measured(results), results.ratios
    moves = [math.log(last / first) if ratios else last - first for first, last in pairs]
    limit = UNMOVED * (1.0 if ratios else max(abs(first) for first, _ in pairs))
    if noise is not None and noise.ratios == ratios:
        limit = max(limit, noise.limit)
    mean = abs(sum(moves)) / len(moves)
    return (
        len(moves) if max(map(abs, moves)) <= limit and mean <= limit / math.sqrt(len(moves)) else 0
    )


def within_best(
    results: Results, noise: Noise | None, best: TrialRecord | None
) -> list[TrialRecord]:
    """Return the trials of a search with one seed that are within the noise of its best, best
    first."""
    value = results.outcome_of(best).value if best is not None else None
    if noise is None or value is None or best is None or results.space.seeds > 1:
        return []
    return [
        trial
        for trial, own in stable(results)
        if trial.name != best.name and noise.within(own, value)
    ]


def stable(results: Results) -> list[tuple[TrialRecord, float]]:
    """Return the configurations that fail on no seed, each as its trial and its value, the best
    first."""
    outcomes = [outcome for outcome in results.ranked if not outcome.failures]
    return [(outcome.trial, value) for outcome in outcomes if (value := outcome.value) is not None]


def candidates(results: Results, of: int) -> list[TrialRecord]:
    """Return the trials that may be better than the baseline and fail on no seed: the leader, and
    what is within its noise.

    The first is the best that differs from the baseline. The next best follow, as long as they
    differ from each other and are behind the first by no more than the noise; at most `of`. Without
    a known noise, the best `of`. Only runs of the search itself count, so that confirming runs do
    not change what is confirmed.
    """
    noise, chosen, seen = measured(results), list[tuple[TrialRecord, float]](), set[str]()
    for trial, value in stable(results):
        if is_baseline(results, trial) or _configuration(trial) in seen:
            continue
        if len(chosen) == of or (
            chosen and noise is not None and not noise.within(value, chosen[0][1])
        ):
            break
        chosen.append((trial, value))
        seen.add(_configuration(trial))
    return [trial for trial, _ in chosen]


def _configuration(trial: TrialRecord) -> str:
    """Return a text that is equal for equal configurations; knobs without effect do not count."""
    return json.dumps(without_seed(trial.effective), sort_keys=True, default=str)


def is_baseline(results: Results, trial: TrialRecord) -> bool:
    """Return whether a trial's configuration amounts to the baseline's, on any seed."""
    base = results.baseline
    same = base is not None and _configuration(trial) == _configuration(base)
    return same or not without_seed(results.changed(trial))
