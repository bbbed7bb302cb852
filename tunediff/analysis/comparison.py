"""Compare the configurations of a search with several seeds with the baseline, by paired tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tunediff.analysis import Results, knob_columns, last
from tunediff.analysis.outcome import Outcome
from tunediff.analysis.statistics import (
    Difference,
    Estimate,
    differences,
    estimate,
    is_wide,
    mean,
    sd,
)
from tunediff.core.outcomes import Verdict
from tunediff.core.text import knobs
from tunediff.core.trial_record import TrialRecord

if TYPE_CHECKING:
    import pandas as pd

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
        """Return the drawn knobs."""
        return self.runs[0].knobs

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
        """Return whether it fails on a seed; the baseline, the reference, never counts so."""
        return bool(self.changed and self.outcome.failures)

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
        seeds = sorted({trial.seed for group in self.groups for trial in group.runs})
        values = np.full((len(self.groups), len(seeds)), np.nan)
        for row, group in enumerate(self.groups):
            for trial in group.done:
                values[row, seeds.index(trial.seed)] = trial.value(self.metric)
        return values

    def judged(self, differences: Sequence[Difference], ratios: bool) -> Comparison:
        """Return the comparison with the differences of all rivals from the baseline.

        What fails on a seed has none: the runs that survived are no sample of what it reaches.
        """
        groups = [
            dataclasses.replace(
                group, difference=Difference(verdict=Verdict.FAILS) if group.fails else difference
            )
            for group, difference in zip(
                self.groups, [Difference(verdict=Verdict.BASELINE), *differences], strict=True
            )
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
        tested rival: a ratio − 1, or in units of the metric."""
        resolutions = (rival.difference.resolution for rival in self.rivals)
        return [resolution for resolution in resolutions if resolution is not None]

    @property
    def effect(self) -> str:
        return "ratio" if self.ratios else "difference"

    @property
    def baseline(self) -> Group | None:
        """Return the configuration with which the others are compared; None if it did not run."""
        return self.groups[0] if self.groups and not self.groups[0].changed else None

    @property
    def rivals(self) -> list[Group]:
        """Return all configurations except the baseline."""
        return [group for group in self.groups if group.changed]

    def of(self, trial: TrialRecord) -> Group:
        """Return the group of a trial: all seeds of its configuration."""
        return next(
            group for group in self.groups if any(run.name == trial.name for run in group.runs)
        )

    def table(self) -> pd.DataFrame:
        """Return one row per configuration: knobs, results, and comparison with the baseline.

        A knob that has the name of another column is in the column `knobs.NAME`. `p` and the
        interval hold for one comparison alone; `p_holm` is corrected for their number. `speedup`:
        see `speedup_values`. `cost`: the baseline's samples per second divided by its own.
        """
        import pandas as pd

        metric, effect, rows = self.metric, self.effect, []
        base_rate = mean(_rates(self.baseline)) if self.baseline is not None else None
        for group in self.groups:
            values, rate, difference = group.values(metric), mean(_rates(group)), group.difference
            cells: dict[str, object] = {
                "runs": len(group.runs),
                "finished": len(group.done),
                "failures": len(group.outcome.failures),
                f"{metric}_mean": mean(values),
                f"{metric}_sd": sd(values),
                effect: difference.estimate,
                f"{effect}_low": difference.low,
                f"{effect}_high": difference.high,
                "p": difference.p,
                "p_holm": difference.p_holm,
                "verdict": difference.verdict,
                **speedup_values(self.speedup(group)),
                "samples_per_s": rate,
                "cost": base_rate / rate if rate and base_rate else None,
            }
            for name in self.results.judged:
                others = group.values(name)
                cells |= {f"{name}_mean": mean(others), f"{name}_sd": sd(others)}
            columns = knob_columns(group.knobs, {"configuration", *cells})
            rows.append({"configuration": group.name, **columns, **cells})
        return pd.DataFrame(rows)

    def speedup(self, group: Group) -> Estimate | str:
        """Return how many times sooner it reaches the baseline's end, or why that is unknown.

        The speed-up is the geometric mean of the ratios of all seeds, with its 95 % interval. It is
        determined only if the configuration is significantly better than the baseline and the
        interval excludes 1 and is not wider than `WIDEST`. If a run reached the baseline's value at
        its first evaluation, its ratio is a lower bound, and so is the mean: without an upper end.
        """
        if not group.changed:
            return ITSELF
        if self.baseline is None or not self.baseline.done:
            return "no run of the baseline ended ok"
        if note := group.outcome.failure_note:
            return f"it {note}"
        if group.difference.verdict != Verdict.BETTER:
            return f"{len(group.done)} seeds do not show it to be better than the baseline"
        ratios, bounded = list[float](), False
        for trial in group.done:
            if (ratio := self.results.time_to_target_speedup(trial)) is not None:
                ratios.append(ratio or 1.0)
                bounded = bounded or self.results.at_first(trial)
        mean_ratio = estimate(ratios, ratios=True)
        low = mean_ratio.low if mean_ratio is not None else None
        if mean_ratio is None or low is None or low <= 1 or is_wide(low, mean_ratio.high):
            return f"the curves of {len(ratios)} seeds leave it open"
        high = None if bounded else mean_ratio.high
        return dataclasses.replace(mean_ratio, at_least=bounded, high=high)


SPEEDUP = ("speedup", "speedup_low", "speedup_high", "speedup_at_least")


def speedup_values(speedup: Estimate | str) -> dict[str, float | None]:
    """Return a speed-up by the names of `SPEEDUP`, for tables and JSON; None: not determined.

    It is either `speedup` with the ends of its interval (None for one pair of runs), or
    `speedup_at_least` alone.
    """
    values: dict[str, float | None] = dict.fromkeys(SPEEDUP)
    if isinstance(speedup, Estimate) and speedup.bound is not None:
        values["speedup_at_least"] = speedup.bound
    elif isinstance(speedup, Estimate):
        values |= {
            "speedup": speedup.mean,
            "speedup_low": speedup.low,
            "speedup_high": speedup.high,
        }
    return values


def compare(results: Results, metric: str | None = None) -> Comparison:
    """Compare a search's configurations with its baseline; those that fail on no seed, by values.

    `metric`: another quantity of the last points with the same direction; by default the objective.
    """
    metric = metric or results.metric
    groups = []
    for outcome in results.outcomes:
        changed = results.space.changed(outcome.runs[0].knobs)
        groups.append(Group(changed, dataclasses.replace(outcome, metric=metric), Difference()))
    groups.sort(key=lambda group: bool(group.changed))  # the baseline first
    compared = Comparison(results, metric, groups)
    if compared.baseline is None:
        return compared
    values = compared.values
    values[[group.fails for group in groups]] = np.nan  # the tests of the others count without them
    return compared.judged(*differences(values, results.lower_is_better, results.ratios))


def _rates(group: Group) -> list[float]:
    """Return the samples per training second of every run that ended ok."""
    return [
        last(trial, "samples") / seconds
        for trial in group.done
        if (seconds := last(trial, "train_s")) > 0
    ]
