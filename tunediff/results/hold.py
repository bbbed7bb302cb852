"""Will it hold? What was forecast for a longer budget beside what was then measured."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from tunediff.record import TrialRecord
from tunediff.results import Results, curve
from tunediff.results.comparison import compare
from tunediff.results.forecast import Common, Crossing, Forecast, Runs, Scale, Trend, common, crossing, missing, trend
from tunediff.results.statistics import mean, sd


@dataclasses.dataclass(frozen=True)
class Finalist:
    """One configuration, the baseline or another, with its runs at both budgets."""

    name: str
    """`baseline`, or what it changes."""
    short: Sequence[TrialRecord]
    """Runs with the budget of the search."""
    long: Sequence[TrialRecord] = ()
    """Runs with the longer one, as far as there are any."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration at the longer budget."""

    finalist: Finalist
    trend: Trend | None
    forecast: Forecast | None
    """Of the mean of the runs that are measured, or of one run."""
    why: str
    """Why there is no forecast; '' where there is one."""
    short: list[float]
    """What its runs reached with the budget so far."""
    measured: list[float]
    """What they reached with the longer one."""

    @property
    def inside(self) -> bool | None:
        """Whether the measured mean lies within the interval; None: one of both is missing."""
        middle = mean(self.measured)
        return None if self.forecast is None or middle is None else self.forecast.holds(middle)


@dataclasses.dataclass(frozen=True)
class Held:
    """All finalists at the longer budget."""

    found: Results
    metric: str
    short_s: float
    """The budget that was forecast from, in seconds of its unit."""
    long_s: float
    rows: list[Row]
    """The baseline first, if it is there."""

    @property
    def told(self) -> list[Row]:
        """Rows with a forecast and a measured mean."""
        return [row for row in self.rows if row.inside is not None]

    @property
    def crossings(self) -> list[tuple[Row, Row, Crossing | None]]:
        """Who may pass the one that is ahead so far: (ahead, another, where); None: it will not."""
        trends = [(first, second) for first, second in self._pairs() if first.trend is not None]
        leader = trends[0][0] if trends else None
        return [
            (first, second, crossing(first.trend, second.trend))
            for first, second in trends
            if first is leader and first.trend is not None and second.trend is not None
        ]

    @property
    def crossed(self) -> list[tuple[Row, Row, float]]:
        """Pairs whose measured means have changed places: (ahead with the budget so far, ahead with the longer one, the
        budget in seconds between the two at which they are equal).

        Straight along the logarithm of time between what was measured with both budgets, in logarithms of the values
        where forecasts are made in these.
        """
        found = []
        for first, second in self._pairs():
            before, after = (self._ahead(first, second, long) for long in (False, True))
            if before is not None and after is not None and before > 0 > after:
                share = before / (before - after)
                found.append((first, second, self.short_s * (self.long_s / self.short_s) ** share))
        return sorted(found, key=lambda one: one[2])

    def _pairs(self) -> list[tuple[Row, Row]]:
        """All pairs with runs, that first which is ahead with the budget so far."""
        ran = [row for row in self.rows if row.short]
        ran.sort(key=lambda row: self.found.loss(mean(row.short) or 0.0))
        return list(itertools.combinations(ran, 2))

    def _ahead(self, row: Row, other: Row, long: bool) -> float | None:
        """How much better `row` is than `other`, by the means at one budget."""
        mine, theirs = (mean(one.measured if long else one.short) for one in (row, other))
        if mine is None or theirs is None:
            return None
        return math.log(theirs / mine) if self.found.ratios else self.found.loss(theirs) - self.found.loss(mine)

    def table(self) -> pd.DataFrame:
        """One row per configuration: forecast with its interval, measured mean and sd, and whether it was inside."""
        return pd.DataFrame([
            {
                "configuration": row.finalist.name,
                "budget_s": self.long_s,
                "forecast": row.forecast and row.forecast.mean,
                "low": row.forecast and row.forecast.low,
                "high": row.forecast and row.forecast.high,
                "no_forecast": row.why,
                "runs": len(row.measured),
                "mean": mean(row.measured),
                "sd": sd(row.measured),
                "inside": row.inside,
            }
            for row in self.rows
        ])  # fmt: skip


def hold(
    found: Results, finalists: Sequence[Finalist], long_s: float, others: Sequence[TrialRecord] = ()
) -> Held | None:
    """Forecasts for runs with a budget of `long_s`; None where no run of theirs ended, and for speed alone.

    By the objective of `found`, since a final evaluation has no curve. `others`: runs of further configurations with
    the budget of `found`, such as all trials of the search: the more there are, the better the common slope is known.
    """
    metric = found.metric
    mine = [Runs.of(finalist.short, metric) for finalist in finalists]
    if found.by_rate or not any(runs.curves for runs in mine):
        return None
    known = [*mine, *(Runs.of([trial], metric) for trial in others)]
    scale = Scale.of((points for runs in known for points in runs.curves), found.ratios, found.falls)
    shared = common(known, scale)
    rows = [_row(finalist, runs, shared, metric, scale, long_s) for finalist, runs in zip(finalists, mine, strict=True)]
    return Held(found, metric, found.space.budget.per_trial_s, long_s, rows)


def _row(
    finalist: Finalist, runs: Runs, shared: Common | None, metric: str, scale: Scale, long_s: float
) -> Row:  # fmt: skip
    short, measured = (
        [value for trial in trials if (value := trial.value(metric)) is not None]
        for trials in (finalist.short, finalist.long)
    )
    found = trend(runs, shared) if shared is not None else None
    # A training ends a step after its budget: the measured runs say when.
    ends = [curve(trial, metric)[-1][0] for trial in finalist.long if trial.value(metric) is not None]
    told = found.at(mean(ends) or long_s, max(1, len(measured))) if found is not None else None
    return Row(finalist, found, told, missing(runs, scale), short, measured)


def read(found: Results, runs: Results, folder_of: Callable[[Path], Results]) -> list[Held]:
    """Of the confirming `runs` of a search and the longer ones in folders within theirs, 4x and the like, as far as
    they are there; `folder_of` reads such a folder."""
    told, groups = [], compare(runs).groups
    for place in sorted(runs.folder.glob("*x/search.yaml"), key=lambda path: int(path.parent.name[:-1])):
        longer = folder_of(place.parent)
        long = {group.name: group.runs for group in compare(longer).groups}
        finalists = [Finalist(group.name, group.runs, long.get(group.name, [])) for group in groups]
        held = hold(found, finalists, longer.space.budget.per_trial_s, found.trials)
        told += [held] if held is not None else []
    return told
