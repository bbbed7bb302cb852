"""Will it hold? What was forecast for a longer budget beside what was then measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pandas as pd

from tunediff.record import TrialRecord
from tunediff.results import Results, curve
from tunediff.results.forecast import Common, Crossing, Forecast, Runs, Trend, common, crossing, missing, trend
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
    measured: list[float]

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
    """The budget that was forecast from, in training seconds."""
    long_s: float
    rows: list[Row]
    """The baseline first, if it is there."""

    @property
    def told(self) -> list[Row]:
        """Rows with a forecast and a measured mean."""
        return [row for row in self.rows if row.inside is not None]

    @property
    def crossings(self) -> list[tuple[Row, Row, Crossing]]:
        """Pairs whose forecasts cross, the soonest first: (ahead so far, ahead from then on, where)."""
        found = []
        for place, row in enumerate(self.rows):
            for other in self.rows[place + 1 :]:
                if row.trend is None or other.trend is None or not (at := crossing(row.trend, other.trend)):
                    continue
                values = [self.found.loss(one.trend.value) for one in (row, other) if one.trend is not None]
                first, second = (row, other) if values[0] <= values[1] else (other, row)
                found.append((first, second, at))
        return sorted(found, key=lambda one: one[2].budget_s)

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
    """Forecasts for runs of `long_s` training seconds; None where no finalist has a run that ended.

    By the objective of `found`, since a final evaluation has no curve. `others`: runs of further configurations with
    the budget of `found`, such as all trials of the search: the more there are, the better the common slope is known.
    """
    metric, ratios = found.metric, found.ratios
    mine = [Runs.of(finalist.short, metric) for finalist in finalists]
    if not any(runs.curves for runs in mine):
        return None
    shared = common([*mine, *(Runs.of([trial], metric) for trial in others)], ratios)
    rows = [
        _row(finalist, runs, shared, metric, ratios, long_s) for finalist, runs in zip(finalists, mine, strict=True)
    ]
    return Held(found, metric, found.space.budget.per_trial_s, long_s, rows)


def _row(
    finalist: Finalist, runs: Runs, shared: Common | None, metric: str, ratios: bool, long_s: float
) -> Row:  # fmt: skip
    measured = [value for trial in finalist.long if (value := trial.value(metric)) is not None]
    found = trend(runs, shared) if shared is not None else None
    # A training ends a step after its budget: the measured runs say when.
    ends = [curve(trial, metric)[-1][0] for trial in finalist.long if trial.value(metric) is not None]
    told = found.at(mean(ends) or long_s, max(1, len(measured))) if found is not None else None
    return Row(finalist, found, told, missing(runs, ratios), measured)
