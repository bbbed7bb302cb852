"""What pairs of runs say of two configurations, read from the folder of a comparison: facts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from tunediff import config as cfg
from tunediff.analysis import failed
from tunediff.analysis.sequential import Look, look
from tunediff.analysis.statistics import BETTER, ROUGH_FREEDOM, WORSE, quantile
from tunediff.config import ConfigError, Metric, Values
from tunediff.core import trial_record
from tunediff.core.clock import Unit, UnitName
from tunediff.core.trial_record import TrialRecord
from tunediff.search_space import SearchBudget

FILE = "compare.yaml"
SIDES = ("A", "B")


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Two configurations, each run once on every seed; B is asked about, A is what there was."""

    folder: Path
    asked: tuple[str, str]
    """A and B as they were given."""
    configs: tuple[Any, Any]
    budget_s: float
    """Of a run, in seconds of `budget_unit`."""
    most: int
    """Pairs at most."""
    within: float | None
    """A difference that does not matter, a share of A's value where values fall; None: none was named."""
    compile_charged: bool
    runs: list[tuple[TrialRecord | None, TrialRecord | None]]
    """(A, B) of every pair that has begun."""
    budget_unit: UnitName = "wall"

    @property
    def limits(self) -> SearchBudget:
        """Of every run."""
        charged, unit = self.compile_charged, self.budget_unit
        return SearchBudget(self.budget_s, 2 * self.most, compile_charged=charged, unit=unit)

    @property
    def clock(self) -> Unit:
        """What the budget is counted in, and curves are drawn along."""
        return self.limits.clock

    @property
    def metric(self) -> Metric:
        """What decides."""
        return cfg.of(self.configs[0]).objective

    @property
    def label(self) -> str:
        """What it may be called, as its measurements say."""
        labels = (
            point["label"] for pair in self.runs for run in pair if run for point in run.points if "label" in point
        )
        return str(next(labels, self.metric.label))

    @property
    def unit(self) -> str:
        """What the samples are called."""
        return cfg.of(self.configs[0]).unit

    @property
    def values(self) -> Any:
        """[2, pairs]: the value of every run that ended ok; NaN: there is none."""
        found = np.full((2, len(self.runs)), np.nan)
        for column, pair in enumerate(self.runs):
            for row, run in enumerate(pair):
                value = run.value(self.metric.name) if run is not None else None
                found[row, column] = np.nan if value is None else value
        return found

    @property
    def look(self) -> Look:
        """What the pairs so far tell."""
        values, within, falls = self.values, self.within, self.metric.mode == "min"
        if within is not None and falls and bool((values <= 0).any()):  # compared by differences: see `look`
            within *= abs(float(np.nanmean(values[0])))
        return look(values, self.most, falls, falls, within)

    @property
    def failure(self) -> TrialRecord | None:
        """The first run that ended without a result: the comparison ends with it."""
        return next((run for pair in self.runs for run in pair if run is not None and failed(run)), None)

    @property
    def over(self) -> bool:
        """Whether no further pair is needed."""
        return self.failure is not None or self.look.over

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `no significant difference`, or `failed`: what B is beside A."""
        if self.failure is not None:
            return "failed"
        told = self.look.differences[0].verdict
        return told if told in (BETTER, WORSE) else "no significant difference"

    @property
    def one_run_tells(self) -> float | None:
        """The smallest difference that one run each would tell from noise, at 95 %: a ratio − 1 or in units."""
        told = self.look
        if told.sd is None or told.rounds < 2:
            return None
        wide = quantile(0.975, told.rounds - 1)
        return float(np.expm1(wide * np.log1p(told.sd))) if told.ratios else wide * told.sd

    @property
    def rough(self) -> bool:
        """Whether `resolution` and `one_run_tells` come from too few pairs to be known to more than a factor of two."""
        return self.look.rounds - 1 < ROUGH_FREEDOM

    @property
    def ahead(self) -> int:
        """Pairs in which B was better."""
        known = self.values[:, np.isfinite(self.values).all(axis=0)]
        return int((known[1] < known[0]).sum() if self.metric.mode == "min" else (known[1] > known[0]).sum())

    @property
    def trained_s(self) -> float:
        """Training seconds of all runs."""
        return sum(run.points[-1].train_s for pair in self.runs for run in pair if run is not None and run.points)

    @property
    def changed(self) -> Values:
        """Knobs in which B differs from A, where both are of one workload's."""
        return {
            name: value for name, value in cfg.differences(self.configs[1], self.configs[0]).items() if name != "seed"
        }


def read(folder: Path) -> Pairs:
    """The comparison in a folder. Raises `ConfigError` if it is none."""
    if not (folder / FILE).is_file():
        found = sorted(path.parent.name for path in folder.parent.glob(f"*/{FILE}"))
        there = ", ".join(found) or "none"
        raise ConfigError(f"{folder.name}: no such comparison in {folder.parent}; there are: {there}")
    asked, runs = cfg.read_yaml(folder / FILE), {run.number: run for run in trial_record.read_trials(folder)}
    first = [number for number in range(0, 2 * len(runs), 2) if {number, number + 1} & runs.keys()]
    if missing := {"a", "b", "budget_s", "pairs", "within", "compile"} - asked.keys():
        raise ConfigError(f"{folder / FILE}: is damaged: {', '.join(sorted(missing))} is missing")
    return Pairs(
        folder, (asked["a"], asked["b"]), tuple(cfg.load(folder / side / "config.yaml") for side in SIDES),
        asked["budget_s"], asked["pairs"], asked["within"], asked["compile"] == "charged",
        [(runs.get(number), runs.get(number + 1)) for number in first], asked.get("unit", "wall"),
    )  # fmt: skip
