"""Read the folder of a comparison: pairs of runs of two configurations, and what they show."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from tunediff import config as cfg
from tunediff.analysis.pair_test import PairTest, Runs
from tunediff.analysis.sequential import Look, Rules
from tunediff.analysis.statistics import ROUGH_FREEDOM, quantile
from tunediff.config import ConfigError, Metric, Values, recorded
from tunediff.core import text
from tunediff.core.clock import ClockSummary, Unit, UnitName
from tunediff.core.outcomes import Verdict
from tunediff.core.refusals import allow
from tunediff.core.trial_record import TrialRecord
from tunediff.experiment.model import Experiment, is_comparison
from tunediff.search_space import SearchBudget

CODE = "code.json"
"""File in its folder with the code of both sides and the first seed; see `judge.frozen_code`."""
LEDGER = "ledger.json"
"""File in its folder with its place in the ledger of the repository; see `judge.ledger`."""
HOLDOUT_VALUES = "holdout.json"
"""File in its folder with the values of the second judge, by side."""
SIDES = recorded.SIDES


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Two configurations that run on the same seeds; B is compared with the reference A."""

    folder: Path
    names: tuple[str, str]
    """A and B as the user named them."""
    configs: tuple[Any, Any]
    budget_s: float
    """Budget of a run, in seconds of `budget_unit`."""
    compile_charged: bool
    test: PairTest
    """The runs, and how they are judged."""
    budget_unit: UnitName = "wall"
    code: Values = dataclasses.field(default_factory=dict)
    """The content of `CODE`; empty where that file is gone."""
    ledger: Values = dataclasses.field(default_factory=dict)
    """The content of `LEDGER`; empty without one."""
    judges: tuple[str | None, str | None] = (None, None)
    """SHA-256 of what judges the runs, and of what judges them again at the end; None: nothing."""
    holdout: Values = dataclasses.field(default_factory=dict)
    """The content of `HOLDOUT_VALUES`; empty before the end."""

    @property
    def runs(self) -> Runs:
        """Return (A, B) of every pair that has begun."""
        return self.test.runs

    @property
    def rules(self) -> Rules:
        return self.test.rules

    @property
    def max_pairs(self) -> int:
        return self.test.max_pairs

    @property
    def within(self) -> float | None:
        """Return the difference that does not matter; see `PairTest.within`."""
        return self.test.within

    @property
    def lower_is_better(self) -> bool:
        """Return whether smaller ones of the compared values or seconds are better."""
        return self.test.lower_is_better or self.test.by_time

    @property
    def limits(self) -> SearchBudget:
        """Return the budget of every run."""
        return SearchBudget(
            self.budget_s,
            2 * self.max_pairs,
            compile_charged=self.compile_charged,
            unit=self.budget_unit,
        )

    @property
    def clocked(self) -> ClockSummary:
        """Return which seconds counted in the runs so far."""
        return ClockSummary.of(
            (run.clock for run in self.test.begun), cfg.of(self.configs[0]).clock
        )

    @property
    def clock(self) -> Unit:
        return self.clocked.unit(self.budget_unit)

    @property
    def run_length(self) -> str:
        """Return what ends a run, in words."""
        if not self.budget_s:
            return "its own end"
        return f"{text.seconds(self.budget_s)} of {self.clock.what}"

    @property
    def metric(self) -> Metric:
        """Return the metric of the values, which decides unless the seconds do."""
        declared = cfg.of(self.configs[0]).objective
        if declared.name == self.test.metric:
            return declared
        return Metric(self.test.metric, self.test.mode)

    @property
    def label(self) -> str:
        """Return its label, as the measurements give it."""
        points = (point for run in self.test.begun for point in run.points)
        return str(next((p["label"] for p in points if "label" in p), self.metric.label))

    @property
    def outcome_label(self) -> str:
        """Return the label of what is compared: the metric, or the seconds."""
        target = self.test.target
        if not self.test.by_time:
            return self.label
        if target is None or self.test.counted == "end":
            return "seconds of a run"
        return f"seconds until {target}"

    @property
    def unit(self) -> str:
        return cfg.of(self.configs[0]).unit

    @property
    def values(self) -> Any:
        """Return the value of every run that ended ok [2, pairs]; NaN: there is none."""
        return self.test.values

    @property
    def look(self) -> Look:
        """Return the sequential test of the pairs so far."""
        return self.test.look

    @property
    def failure(self) -> TrialRecord | None:
        """Return the first run that ended without a result, which ends the comparison."""
        return self.test.failure

    @property
    def over(self) -> bool:
        """Return whether no further pair is needed."""
        return self.test.over

    @property
    def verdict(self) -> Verdict:
        """Return how B compares with A, see `PairTest.verdict`."""
        return self.test.verdict

    @property
    def one_run_detects(self) -> float | None:
        """Return the smallest significant difference of single runs; None if `noise_is_rough`.

        It is Student's bound for the noise of these pairs. That of `resolution` also allows for
        every look: None while it is so wide that pairs would seem to detect less than single runs.
        """
        test, difference = self.look, self.look.differences[0]
        if difference.sd is None or difference.resolution is None or self.noise_is_rough:
            return None
        sides = 1 if self.rules.one_sided else 2
        bound = quantile(1 - self.rules.level / sides, test.rounds - 1)
        least = bound * (float(np.log1p(difference.sd)) if test.ratios else difference.sd)
        least = float(np.expm1(least)) if test.ratios else least
        return least if least > difference.resolution else None

    @property
    def noise_is_rough(self) -> bool:
        """Return whether the noise is known only to a factor of two, because of few pairs."""
        return self.look.rounds - 1 < ROUGH_FREEDOM

    @property
    def pairs_won(self) -> int:
        """Return in how many pairs B was better."""
        a, b = self.values[:, np.isfinite(self.values).all(axis=0)]
        return int((b < a if self.lower_is_better else b > a).sum())

    @property
    def equal(self) -> bool:
        """Return whether both sides had the same value in every pair."""
        a, b = self.values[:, np.isfinite(self.values).all(axis=0)]
        return len(a) > 0 and bool((a == b).all())

    @property
    def trained_s(self) -> float:
        """Return the training seconds of all runs."""
        return sum(run.points[-1].train_s for run in self.test.begun if run.points)

    @property
    def setup_s(self) -> tuple[float | None, float | None]:
        """Return the median seconds that the runs of A and of B spend before their first batch."""

        def median(side: int) -> float | None:
            ended = [run for pair in self.runs if (run := pair[side]) is not None and run.points]
            setups = [run.points[-1].before_first_batch_s for run in ended]
            seconds = [setup for setup in setups if setup is not None]
            return statistics.median(seconds) if seconds else None

        return median(0), median(1)

    @property
    def changed(self) -> Values:
        """Return the knobs in which B differs from A, if both belong to one workload."""
        changed = cfg.differences(self.configs[1], self.configs[0])
        return {name: value for name, value in changed.items() if name != "seed"}


def of_commands(folder: Path) -> bool:
    """Return whether a folder holds a comparison of commands; says nothing of other faults."""
    return is_comparison(folder) and Experiment.read(folder).runner == "command"


def margin(words: str | None, metric: Metric) -> float | None:
    """Return `--within`: a share of A's value where lower is better, else the metric's units.

    Raises `ConfigError`.
    """
    if words is None:
        return None
    relative = metric.mode == "min"
    allowed = f"a number above 0, in units of {metric.name}"
    if relative:
        allowed = f"a share of A's {metric.name} such as 2%"
    try:
        value = float(words.removesuffix("%") if relative else words)
    except ValueError:
        value = 0.0
    fits = 0 < value < math.inf and words.endswith("%") == relative
    allow(fits, "--within", words, allowed)
    return value / 100 if relative else value


def _json(file: Path) -> Values:
    """Return the content of a JSON file; {} where there is none."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def read(folder: Path) -> Pairs:
    """Read the comparison in a folder. Raises `ConfigError` if it is none."""
    if not is_comparison(folder):
        comparisons = sorted(path.name for path in folder.parent.glob("*/") if is_comparison(path))
        names = ", ".join(comparisons) or "none"
        raise ConfigError(
            f"{folder.name}: no such comparison in {folder.parent}; there are: {names}"
        )
    experiment = Experiment.read(folder)
    configs = tuple(cfg.load(folder / side / recorded.CONFIG) for side in SIDES)
    return Pairs(
        folder,
        (experiment.candidates["A"], experiment.candidates["B"]),
        (configs[0], configs[1]),
        experiment.limit.budget or 0.0,
        experiment.limit.compile == "charged",
        PairTest.read(folder, experiment),
        experiment.limit.unit,
        _json(folder / CODE),
        _json(folder / LEDGER),
        (experiment.judge, experiment.holdout),
        _json(folder / HOLDOUT_VALUES),
    )
