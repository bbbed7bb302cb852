"""Read the folder of a comparison: pairs of runs of two configurations, and what they show."""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from tunediff import config as cfg
from tunediff.analysis.outcome import failed
from tunediff.analysis.sequential import RULES, Look, Rules, look
from tunediff.analysis.statistics import BETTER, LEVEL, ROUGH_FREEDOM, WORSE, quantile
from tunediff.config import ConfigError, Metric, Values, recorded
from tunediff.core import trial_record
from tunediff.core.clock import ClockSummary, Unit, UnitName
from tunediff.core.refusals import allow
from tunediff.core.trial_record import TrialRecord
from tunediff.search_space import SearchBudget

FILE = "compare.yaml"
SIDES = recorded.SIDES
EQUIVALENT = "equivalent"


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Two configurations, each run once on every seed; A is the reference, B is compared with
    it."""

    folder: Path
    names: tuple[str, str]
    """A and B as the user named them."""
    configs: tuple[Any, Any]
    budget_s: float
    """Budget of a run, in seconds of `budget_unit`."""
    max_pairs: int
    within: float | None
    """The difference that does not matter, as a share of A's value where values fall; None: not
    given."""
    compile_charged: bool
    runs: list[tuple[TrialRecord | None, TrialRecord | None]]
    """(A, B) of every pair that has begun."""
    budget_unit: UnitName = "wall"
    setup_charged: bool = False
    rules: Rules = RULES

    @property
    def limits(self) -> SearchBudget:
        """Return the budget of every run."""
        return SearchBudget(
            self.budget_s,
            2 * self.max_pairs,
            compile_charged=self.compile_charged,
            setup_charged=self.setup_charged,
            unit=self.budget_unit,
        )

    @property
    def clocked(self) -> ClockSummary:
        """Return which seconds counted in the runs so far."""
        return ClockSummary.of((run.clock for run in self._begun), cfg.of(self.configs[0]).clock)

    @property
    def clock(self) -> Unit:
        return self.clocked.unit(self.budget_unit)

    @property
    def metric(self) -> Metric:
        """Return the deciding metric."""
        return cfg.of(self.configs[0]).objective

    @property
    def label(self) -> str:
        """Return its label, as the measurements give it."""
        points = (point for run in self._begun for point in run.points)
        return str(next((p["label"] for p in points if "label" in p), self.metric.label))

    @property
    def unit(self) -> str:
        return cfg.of(self.configs[0]).unit

    @property
    def lower_is_better(self) -> bool:
        return self.metric.mode == "min"

    @property
    def _begun(self) -> list[TrialRecord]:
        return [run for pair in self.runs for run in pair if run is not None]

    @property
    def values(self) -> Any:
        """Return the value of every run that ended ok [2, pairs]; NaN: there is none."""
        values = np.full((2, len(self.runs)), np.nan)
        for column, pair in enumerate(self.runs):
            for row, run in enumerate(pair):
                value = run.value(self.metric.name) if run is not None else None
                values[row, column] = np.nan if value is None else value
        return values

    @property
    def look(self) -> Look:
        """Return the sequential test of the pairs so far."""
        values, margin, lower = self.values, self.within, self.lower_is_better
        # Values that are not positive are compared by differences, see `look`
        if margin is not None and lower and bool((values <= 0).any()):
            margin *= abs(float(np.nanmean(values[0])))
        return look(values, self.max_pairs, lower, ratios=lower, margin=margin, rules=self.rules)

    @property
    def failure(self) -> TrialRecord | None:
        """Return the first run that ended without a result, which ends the comparison."""
        return next(filter(failed, self._begun), None)

    @property
    def over(self) -> bool:
        """Return whether no further pair is needed."""
        return self.failure is not None or self.look.over

    @property
    def verdict(self) -> str | None:
        """Return how B compares with A: `better`, `worse`, `equivalent` (the interval lies inside
        the difference that does not matter), `no significant difference`, or `failed`.

        None: the comparison is not over.
        """
        if self.failure is not None:
            return "failed"
        if not self.over:
            return None
        look = self.look
        if (verdict := look.differences[0].verdict) in (BETTER, WORSE):
            return verdict
        return EQUIVALENT if look.state == "equal" else "no significant difference"

    @property
    def one_run_detects(self) -> float | None:
        """Return the smallest significant difference of one run each: a ratio − 1, or in units;
        None while `noise_is_rough`.

        It is Student's bound for the noise of these pairs. That of `resolution` also allows for
        every look: None as long as it is so much wider that several pairs would seem to detect less
        than one run each.
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
        """Return whether the noise, and so `resolution`, is known only to a factor of two, because
        of few pairs."""
        return self.look.rounds - 1 < ROUGH_FREEDOM

    @property
    def pairs_won(self) -> int:
        """Return in how many pairs B was better."""
        a, b = self.values[:, np.isfinite(self.values).all(axis=0)]
        return int((b < a if self.lower_is_better else b > a).sum())

    @property
    def trained_s(self) -> float:
        """Return the training seconds of all runs."""
        return sum(run.points[-1].train_s for run in self._begun if run.points)

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
    file = folder / SIDES[0] / recorded.CONFIG
    if not file.is_file():
        return False
    content = cfg.read_yaml(file)
    return isinstance(content, dict) and cfg.is_command(str(content.get("workload")))


def margin(words: str | None, metric: Metric) -> float | None:
    """Return `--within` as values are compared: a share of A's value where lower is better, else
    in units of the metric.

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


def read(folder: Path) -> Pairs:
    """Read the comparison in a folder. Raises `ConfigError` if it is none."""
    if not (folder / FILE).is_file():
        comparisons = sorted(path.parent.name for path in folder.parent.glob(f"*/{FILE}"))
        names = ", ".join(comparisons) or "none"
        raise ConfigError(
            f"{folder.name}: no such comparison in {folder.parent}; there are: {names}"
        )
    content, runs = (
        cfg.read_yaml(folder / FILE),
        {run.number: run for run in trial_record.read_trials(folder)},
    )
    first = [number for number in range(0, 2 * len(runs), 2) if {number, number + 1} & runs.keys()]
    if missing := {"a", "b", "budget_s", "pairs", "within", "compile"} - content.keys():
        raise ConfigError(f"{folder / FILE}: is damaged: {', '.join(sorted(missing))} is missing")
    files = [folder / side / recorded.CONFIG for side in SIDES]
    for file in files:
        recorded.own_file(file, file.parent)
    return Pairs(
        folder,
        (content["a"], content["b"]),
        tuple(map(cfg.load, files)),
        content["budget_s"],
        content["pairs"],
        content["within"],
        content["compile"] == "charged",
        [(runs.get(number), runs.get(number + 1)) for number in first],
        content.get("unit", "wall"),
        content.get("setup") == "charged",
        Rules(
            content.get("level", LEVEL),
            content.get("one_sided", False),
            content.get("fixed", False),
        ),
    )
