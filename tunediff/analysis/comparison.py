"""Compare the configurations of a search with several seeds with the baseline, by paired tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tunediff.analysis import Results, knob_columns, last
from tunediff.analysis.outcome import Outcome, without_seed
from tunediff.analysis.statistics import (
    BASELINE,
    BETTER,
    FAILS,
    Difference,
    Estimate,
    differences,
    estimate,
    is_wide,
    mean,
    sd,
)
from tunediff.core.text import knobs
from tunediff.core.trial_record import TrialRecord

ITSELF = "it is the baseline itself"


class CurveMean(NamedTuple):
    """The mean curve of a configuration at one evaluation."""

    seconds: float
    """In the unit of the budget."""
    mean: float
    sd: float
    """Standard deviation over the seeds; 0 for one seed."""


@dataclasses.dataclass(frozen=True)
class Group:
    """One configuration with all its seeds."""

    changed: dict[str, object]
    """The drawn knobs that differ from the baseline."""
    outcome: Outcome
    difference: Difference

    @property
    def knobs(self) -> dict[str, object]:
        """Return the drawn knobs without the seed."""
        return without_seed(self.runs[0].drawn)

    @property
    def runs(self) -> list[TrialRecord]:
        return self.outcome.runs

    @property
    def done(self) -> list[TrialRecord]:
        """Return the runs that have a value."""
        return self.outcome.done

    @property
    def name(self) -> str:
        """Return its name: `timesteps.name=speed weighting.name=p2`, or `baseline`."""
        return knobs(self.changed)

    @property
    def fails(self) -> bool:
        """Return whether it fails on a seed; the baseline, with which all are compared, is left as
        it is."""
        return bool(self.changed and self.outcome.failures)

    def values(self, metric: str) -> list[float]:
        """Return the value at the end of the budget of every run that has one, in the order of the
        seeds."""
        return dataclasses.replace(self.outcome, metric=metric).values

    def curve(self, metric: str) -> list[CurveMean]:
        """Return the mean over the runs that ended ok, at every evaluation that all of them
        have."""
        means = []
        for index in sorted({point["index"] for trial in self.done for point in trial.points}):
            same = [
                point for trial in self.done for point in trial.points if point["index"] == index
            ]
            values = [point[metric] for point in same if point.get(metric) is not None]
            if len(values) == len(self.done):
                seconds = float(np.mean([point[self.done[0].along] for point in same]))
                means.append(CurveMean(seconds, float(np.mean(values)), sd(values) or 0.0))
        return means


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All configurations of a search, the baseline first if it ran at all."""

    results: Results
    metric: str
    groups: list[Group]
    ratios: bool = True
    """Whether differences are ratios to the baseline."""

    @property
    def values(self) -> NDArray[np.float64]:
        """Return the values at the end [groups, seeds], seeds in ascending order; NaN: missing."""
        seeds = sorted({trial.config["seed"] for group in self.groups for trial in group.runs})
        values = np.full((len(self.groups), len(seeds)), np.nan)
        for row, group in enumerate(self.groups):
            for trial in group.done:
                values[row, seeds.index(trial.config["seed"])] = trial.value(self.metric)
        return values

    def judged(self, against: Sequence[Difference], ratios: bool) -> Comparison:
        """Return the comparison with the differences of all configurations from the baseline.

        What fails on a seed has none: the runs that survived are no sample of what it reaches.
        """
        differences = [Difference(verdict=BASELINE), *against]
        groups = [
            dataclasses.replace(
                group, difference=Difference(verdict=FAILS) if group.fails else difference
            )
            for group, difference in zip(self.groups, differences, strict=True)
        ]
        return dataclasses.replace(self, groups=groups, ratios=ratios)

    @property
    def seeds(self) -> int:
        """Return the number of runs that every configuration should have."""
        return self.results.space.seeds

    @property
    def label(self) -> str:
        if self.metric == self.results.metric:
            return self.results.label
        labels = (last(trial, "final_label") for group in self.groups for trial in group.done)
        return str(next(filter(None, labels), f"final {self.results.label}"))

    @property
    def resolutions(self) -> list[float]:
        """Return the smallest differences from the baseline that would be significant, of every
        tested configuration.

        A ratio − 1, or in units of the metric. They differ as the noise of configurations does.
        """
        return [
            least for group in self.others if (least := group.difference.resolution) is not None
        ]

    @property
    def effect(self) -> str:
        return "ratio" if self.ratios else "difference"

    @property
    def baseline(self) -> Group | None:
        """Return the configuration with which the others are compared; None if it did not run."""
        return self.groups[0] if self.groups and not self.groups[0].changed else None

    @property
    def others(self) -> list[Group]:
        """Return all configurations except the baseline."""
        return [group for group in self.groups if group.changed]

    def of(self, trial: TrialRecord) -> Group:
        """Return the group of a trial: all seeds of its configuration."""
        return next(
            group for group in self.groups if any(run.name == trial.name for run in group.runs)
        )

    def table(self) -> pd.DataFrame:
        """Return one row per configuration: its knobs, its results, and how they compare with the
        baseline.

        A knob that has the name of another column is in the column `knobs.NAME`. `p` and the
        interval hold for one comparison alone; `p_holm` is corrected for their number. `speedup`:
        see `speedup_values`. `cost`: the baseline's samples per second divided by its own.
        """
        metric, effect, rows = self.metric, self.effect, []
        base_rate = mean(_rates(self.baseline)) if self.baseline is not None else None
        for group in self.groups:
            values, rate = group.values(metric), mean(_rates(group))
            cells: dict[str, object] = {
                "runs": len(group.runs),
                "finished": len(group.done),
                "failures": len(group.outcome.failures),
                f"{metric}_mean": mean(values),
                f"{metric}_sd": sd(values),
                effect: group.difference.estimate,
                f"{effect}_low": group.difference.low,
                f"{effect}_high": group.difference.high,
                "p": group.difference.p,
                "p_holm": group.difference.p_holm,
                "verdict": group.difference.verdict,
                **speedup_values(self.speedup(group)),
                "samples_per_s": rate,
                "cost": base_rate / rate if rate and base_rate else None,
            }
            for name in self.results.judged:
                cells |= {
                    f"{name}_mean": mean(group.values(name)),
                    f"{name}_sd": sd(group.values(name)),
                }
            columns = knob_columns(group.knobs, {"configuration", *cells})
            rows.append({"configuration": group.name, **columns, **cells})
        return pd.DataFrame(rows)

    def speedup(self, group: Group) -> Estimate | str:
        """Return how many times sooner a configuration reaches the baseline's final value, or why
        that is unknown.

        The speed-up is the geometric mean of the ratios of all seeds, with its 95 % interval. It is
        determined only if the configuration is significantly better than the baseline and the
        interval excludes 1 and is not wider than `WIDEST`. If a run reached the baseline's value at
        its first evaluation, its ratio is a lower bound, and so is the mean: then there is no upper
        end.
        """
        if not group.changed:
            return ITSELF
        if self.baseline is None or not self.baseline.done:
            return "no run of the baseline ended ok"
        if note := group.outcome.failure_note:
            return f"it {note}"
        if group.difference.verdict != BETTER:
            return f"{len(group.done)} seeds do not show it to be better than the baseline"
        trials = [
            trial for trial in group.done if self.results.time_to_target_speedup(trial) is not None
        ]
        ratios = [self.results.time_to_target_speedup(trial) or 1.0 for trial in trials]
        speedup = estimate(ratios, ratios=True)
        if (
            speedup is None
            or speedup.low is None
            or speedup.low <= 1
            or is_wide(speedup.low, speedup.high)
        ):
            return f"the curves of {len(ratios)} seeds leave it open"
        at_least = any(map(self.results.at_first, trials))
        return dataclasses.replace(
            speedup, at_least=at_least, high=None if at_least else speedup.high
        )


SPEEDUP = ("speedup", "speedup_low", "speedup_high", "speedup_at_least")


def speedup_values(speedup: Estimate | str) -> dict[str, float | None]:
    """Return a speed-up by the names of `SPEEDUP`, for tables and JSON; None where it is not
    determined.

    It is either `speedup` with the ends of its interval (None for one pair of runs), or
    `speedup_at_least` alone.
    """
    values: tuple[float | None, ...] = (None, None, None, None)
    if isinstance(speedup, Estimate):
        bound = speedup.bound
        values = (
            (speedup.mean, speedup.low, speedup.high, None)
            if bound is None
            else (None, None, None, bound)
        )
    return dict(zip(SPEEDUP, values, strict=True))


def compare(results: Results, metric: str | None = None) -> Comparison:
    """Compare the configurations of a search with its baseline, those that fail on no seed by their
    values.

    `metric`: another quantity of the last points with the same direction; by default the objective.
    """
    metric = metric or results.metric
    groups = []
    for outcome in results.outcomes:
        changed = results.space.changed(without_seed(outcome.runs[0].drawn))
        groups.append(Group(changed, dataclasses.replace(outcome, metric=metric), Difference()))
    groups.sort(
        key=lambda group: bool(group.changed)
    )  # the baseline changes nothing; the others keep their order
    compared = Comparison(results, metric, groups)
    if compared.baseline is None:
        return compared
    values = compared.values
    values[[group.fails for group in groups]] = np.nan  # the tests of the others count without them
    return compared.judged(*differences(values, results.falls, results.ratios))


def _rates(group: Group) -> list[float]:
    """Samples per training second of every run that ended ok."""
    return [
        last(trial, "samples") / seconds
        for trial in group.done
        if (seconds := last(trial, "train_s")) > 0
    ]
