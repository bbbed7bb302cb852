"""Estimate the noise of one run, and which trials are within it of the best.

A search alone shows only what lies within its noise. Whether its winner is better takes new seeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tunediff.analysis import RATE, Results
from tunediff.analysis.statistics import ROUGH_FREEDOM, quantile, value_step
from tunediff.core.trial_record import TrialRecord

CONFIDENCE = 0.9
"""One-sided confidence of one difference: an equal trial is called worse one time in ten."""


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
    lower_is_better: bool

    @property
    def is_rough(self) -> bool:
        """Return whether the deviation is known only to a factor of two: see `ROUGH_FREEDOM`."""
        return self.freedom < ROUGH_FREEDOM

    @property
    def limit(self) -> float:
        """Return the difference that equal configurations exceed one time in ten: t·√2·sd."""
        # √2: a difference has the noise of two runs
        return quantile(CONFIDENCE, self.freedom) * math.sqrt(2) * self.sd

    def differ(self, first: float, second: float) -> bool:
        """Return whether two values differ by more than the noise, in either direction."""
        return not (self.within(first, second) and self.within(second, first))

    def within(self, value: float, best: float) -> bool:
        """Return whether `value` is behind `best` by no more than the noise."""
        worst = self.worst(best)
        return value <= worst if self.lower_is_better else value >= worst

    def worst(self, best: float) -> float:
        """Return the worst value that is behind `best` by no more than the noise.

        That is `best` itself if it is compared by ratios and is not positive.
        """
        offset = self.limit if self.lower_is_better else -self.limit
        return best * math.exp(offset if best > 0 else 0.0) if self.ratios else best + offset


def measured(
    results: Results, confirming: Results | None = None, metric: str | None = None
) -> Noise | None:
    """Return the noise of a search and its confirming runs; None: no configuration ended ok twice,
    or its runs take no seed: one run, repeated, does not show the noise of a training.

    `metric`: the objective by default, or `RATE`.
    """
    if results.space.workload.unseeded:
        return None
    metric = metric or results.metric
    searches = [results] if confirming is None else [results, confirming]
    groups = [
        # One value for each seed
        [
            *{
                run.seed: value for run in outcome.runs if (value := run.value(metric)) is not None
            }.values()
        ]
        for search in searches
        for outcome in search.outcomes
    ]
    positive = all(value > 0 for values in groups for value in values)
    ratios = (results.ratios or metric == RATE) and positive
    return pooled(groups, ratios, results.lower_is_better and metric != RATE)


def pooled(groups: Sequence[Sequence[float]], ratios: bool, lower_is_better: bool) -> Noise | None:
    """Return the noise of one run from the values of configurations; None: none ran more than once.

    `ratios`: whether to compare logarithms, of positive values. The noise is at least that of
    rounding: accuracies of a small test set are often equal by chance.
    """
    rounding = value_step(np.concatenate([[], *groups])) / math.sqrt(
        12
    )  # sd of an error of one step
    variances, freedoms = list[float](), list[int]()
    for values in groups:
        if len(values) > 1:
            sample = np.log(values) if ratios else np.array(values)
            # d log(x) = dx/x: a step is a larger share of a small value
            floor = rounding / math.exp(sample.mean()) if ratios else rounding
            variances.append(max(float(sample.var(ddof=1)), floor**2))
            freedoms.append(len(values) - 1)
    if not freedoms:
        return None
    freedom = sum(freedoms)
    sd = math.sqrt(float(np.dot(variances, freedoms)) / freedom)
    return Noise(sd, freedom, freedom + len(freedoms), len(freedoms), ratios, lower_is_better)


def within_best(
    results: Results, noise: Noise | None, best: TrialRecord | None
) -> list[TrialRecord]:
    """Return the trials of a one-seed search within the noise of its best, best first."""
    value = results.outcome_of(best).value if best is not None else None
    if noise is None or value is None or results.space.seeds > 1:
        return []
    near = [trial for trial, other in stable(results) if noise.within(other, value)]
    return [trial for trial in near if best is None or trial.name != best.name]


def stable(results: Results) -> list[tuple[TrialRecord, float]]:
    """Return trial and value of every configuration that fails on no seed, the best first."""
    outcomes = [outcome for outcome in results.ranked if not outcome.failures]
    return [(outcome.trial, value) for outcome in outcomes if (value := outcome.value) is not None]


def finalists(results: Results, most: int) -> list[TrialRecord]:
    """Return the trials that may be better than the baseline and fail on no seed.

    The first is the best that differs from the baseline. The next best follow, as long as they
    differ from each other and are behind the first by no more than the noise; at most `most`.
    Without a known noise, the best `most`. Only runs of the search itself count, so that confirming
    runs do not change what is confirmed.
    """
    noise, chosen = measured(results), dict[str, tuple[TrialRecord, float]]()
    for trial, value in stable(results):
        key = results.configuration_key(trial)
        if key in chosen or results.is_baseline(trial):
            continue
        best = next((value for _, value in chosen.values()), value)
        if len(chosen) == most or (noise is not None and not noise.within(value, best)):
            break
        chosen[key] = (trial, value)
    return [trial for trial, _ in chosen.values()]
