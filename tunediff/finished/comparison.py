"""Compare sets of finished runs with the first of them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from tunediff.analysis.statistics import holm
from tunediff.core.errors import ConfigError
from tunediff.core.target import Target
from tunediff.finished import statistics
from tunediff.finished.runs import FinishedRun, is_diverged
from tunediff.finished.statistics import Rank, Test, Values


@dataclasses.dataclass(frozen=True)
class RunSet:
    """Runs that are one side of a comparison."""

    name: str
    runs: Sequence[FinishedRun]


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is compared, and how often that may be wrong."""

    objective: str
    mode: Literal["min", "max"] = "min"
    better: Literal["value", "time"] = "value"
    level: float = 0.05
    one_sided: bool = False
    target: Target | None = None
    until_target: bool = False
    """Whether seconds are those until the target."""
    margin: float | None = None
    """How much worse than the first set's the values may be, in their units."""
    sd: float | None = None
    """Standard deviation of a run's value, where it is known: a z-test against the target."""
    paired_by: str | None = None
    """A regular expression with one group, which names the pair of a run."""

    @property
    def side_level(self) -> float:
        """Return the level of a one-sided test: of the quality, which only one side decides."""
        return self.level if self.one_sided else self.level / 2


@dataclasses.dataclass(frozen=True)
class SetResult:
    """What one set shows, and how it compares with the first one."""

    name: str
    values: Values
    """Values of the runs that count, worse than any for diverged ones; by name of the run."""
    seconds: Values
    """Infinite: it never met the target; empty: they are not known."""
    without_value: int
    diverged: int
    missed: int
    evaluations: tuple[int, int]
    """Fewest and most of a run."""
    lengths: tuple[float, float] | None
    pairs: int | None = None
    unpaired: int = 0
    """Runs whose pair is missing."""
    target: Test | None = None
    """Whether its mean meets the target."""
    difference: Test | None = None
    """Of the values; None: of the first set."""
    ratio: Test | None = None
    time: Test | None = None
    """Ratio of the seconds."""
    no_worse: Test | None = None
    """Whether its values are worse by less than the margin."""
    p_holm: float | None = None
    """The deciding p-value, corrected for the number of sets."""
    detectable: float | None = None
    """The true difference (ratio − 1 of seconds) that these runs find with 80 %."""
    runs_needed: int | None = None
    """Runs of a set that find the margin, or that meet the target by it, with 80 %."""
    p_if_repeated: float | None = None
    """How often equal runs reach its p-value if they are tested after each run."""
    rank: Rank | None = None

    @property
    def decides(self) -> Test | None:
        """Return the test that decides: of seconds where they are compared."""
        return self.time if self.seconds_decide else self.difference

    seconds_decide: bool = False


class FinishedComparison:
    """Sets of runs, each compared with the first one."""

    def __init__(self, sets: Sequence[RunSet], rules: Rules) -> None:
        """Raises `ConfigError` for sets that cannot be compared."""
        self.sets, self.rules = sets, rules
        if len(sets) < 2 and rules.target is None:
            raise ConfigError("command line: one set of runs: needs another one, or a --target")
        for one in sets:
            count = sum(run.value is not None for run in one.runs)
            if count < 2:
                raise ConfigError(f"{one.name}: {count} run has a value; allowed: two or more")
        self._pairs = [self._keys(one) for one in sets] if rules.paired_by is not None else None

    def _keys(self, one: RunSet) -> dict[str, FinishedRun]:
        """Return the runs of a set by the names of their pairs. Raises `ConfigError`."""
        keys = dict[str, FinishedRun]()
        for run in one.runs:
            if run.value is None:
                continue
            match = re.search(str(self.rules.paired_by), run.name)
            if match is None or match[1] in keys:
                what = "no pair" if match is None else f"the pair of {keys[match[1]].name}"
                raise ConfigError(f"--paired-by: {one.name}: {run.name} has {what}")
            keys[match[1]] = run
        return keys

    @property
    def lower(self) -> bool:
        return self.rules.mode == "min"

    def _arrays(self, runs: Sequence[FinishedRun]) -> tuple[Values, Values]:
        """Return (values, seconds) of runs that have a value."""
        worst = math.inf if self.lower else -math.inf
        values = [worst if is_diverged(run) else float(run.value or 0.0) for run in runs]
        seconds = [math.inf if run.seconds is None else run.seconds for run in runs]
        timed = self.rules.better == "time" or any(run.seconds is not None for run in runs)
        return np.array(values), np.array(seconds if timed else [])

    @property
    def results(self) -> list[SetResult]:
        """Return what each set shows, in order."""
        results = [self._of(one, index) for index, one in enumerate(self.sets)]
        p_values = holm([one.decides.p if one.decides else None for one in results])
        ranks: Sequence[Rank | None] = [None] * len(results)
        if len(results) > 2:
            of = [one.seconds if one.seconds_decide else self._rising(one) for one in results]
            exact = all(np.isfinite(values).all() for values in of)
            ranks = statistics.ranks(of, statistics.means if exact else statistics.medians)
        return [
            dataclasses.replace(one, p_holm=p, rank=rank)
            for one, p, rank in zip(results, p_values, ranks, strict=True)
        ]

    def _rising(self, one: SetResult) -> Values:
        """Return values of which smaller ones are better."""
        return one.values if self.lower else -one.values

    def _of(self, one: RunSet, index: int) -> SetResult:
        rules, first = self.rules, self.sets[0]
        counted = [run for run in one.runs if run.value is not None]
        values, seconds = self._arrays(counted)
        lengths = [run.length for run in counted if run.length is not None]
        result = SetResult(
            one.name, values, seconds,
            without_value=len(one.runs) - len(counted),
            diverged=sum(map(is_diverged, counted)),
            missed=int(np.isinf(seconds).sum()) if rules.until_target else 0,
            evaluations=(min(r.evaluations for r in counted), max(r.evaluations for r in counted)),
            lengths=(min(lengths), max(lengths)) if lengths else None,
            seconds_decide=rules.better == "time",
        )  # fmt: skip
        if rules.target is not None and not rules.until_target:
            result = dataclasses.replace(result, **self._against_target(values))
        if index == 0:
            return result
        pairs = self._pairs
        base = [run for run in first.runs if run.value is not None]
        if pairs is not None:
            common = pairs[0].keys() & pairs[index].keys()
            keys = [key for key in pairs[0] if key in common]
            if len(keys) < 2:
                raise ConfigError(f"--paired-by: {one.name}: {len(keys)} pairs with {first.name}")
            base, counted = [pairs[0][k] for k in keys], [pairs[index][k] for k in keys]
            unpaired = len(pairs[0]) + len(pairs[index]) - 2 * len(keys)
            result = dataclasses.replace(result, pairs=len(keys), unpaired=unpaired)
        return dataclasses.replace(result, **self._versus(base, counted))

    def _against_target(self, values: Values) -> dict[str, Any]:
        """Return whether a mean meets the target, what runs that needs, and what looking does."""
        rules, target = self.rules, self.rules.target
        assert target is not None
        sign = 1.0 if self.lower else -1.0
        test = statistics.against(sign * values, sign * target.value, rules.level, rules.sd)
        found: dict[str, Any] = {"target": test}
        if len(self.sets) < 2 and test.error > 0:
            counts = [len(values)]
            found["p_if_repeated"] = statistics.p_if_repeated(test.p, counts, True)
            sd = rules.sd or float(values.std(ddof=1))
            error, freedom = test.error, test.freedom
            if math.isfinite(freedom):
                found["detectable"] = statistics.detectable(error, freedom, rules.level, True)
            if rules.margin is not None:
                needed = statistics.runs_needed(rules.margin, sd, rules.level, True, 1)
                found["runs_needed"] = needed
        return found

    def _versus(self, base: Sequence[FinishedRun], runs: Sequence[FinishedRun]) -> dict[str, Any]:
        """Return the tests of runs against those of the first set."""
        rules, paired = self.rules, self.rules.paired_by is not None
        (a, a_s), (b, b_s) = self._arrays(base), self._arrays(runs)
        level, one_sided = rules.level, rules.one_sided
        rising = (a, b) if self.lower else (-a, -b)
        difference = statistics.compare(*rising, level, one_sided, paired=paired)
        found: dict[str, Any] = {"difference": difference if self.lower else _mirrored(difference)}
        if self.lower and min(a.min(), b.min()) > 0:
            found["ratio"] = statistics.compare(a, b, level, one_sided, True, paired)
        if len(a_s) and len(b_s) and min(a_s.min(), b_s.min()) > 0:
            found["time"] = statistics.compare(a_s, b_s, level, one_sided, True, paired)
        if rules.margin is not None:
            found["no_worse"] = statistics.compare(
                *rising, rules.side_level, True, paired=paired, bound=rules.margin
            )
            is_finite = bool(np.isfinite(a).all() and np.isfinite(b).all())
            sd = math.hypot(a.std(ddof=1), b.std(ddof=1)) / math.sqrt(2) if is_finite else 0.0
            if sd > 0:
                needed = statistics.runs_needed(rules.margin, sd, rules.side_level, True)
                found["runs_needed"] = needed
        decides = found.get("time") if rules.better == "time" else difference
        if isinstance(decides, Test) and decides.error > 0:
            shift = statistics.detectable(decides.error, decides.freedom, level, one_sided)
            found["detectable"] = math.expm1(shift) if rules.better == "time" else shift
            counts = [len(a), len(b)]
            found["p_if_repeated"] = statistics.p_if_repeated(decides.p, counts, one_sided)
        return found

    def verdict(self, result: SetResult) -> str:
        """Return how a set compares with the first: `better`, `worse`, `no_difference`, or
        `quality_not_shown`: it takes less time, and its values are not shown to be good enough."""
        test, rules = result.decides, self.rules
        if test is None or result.p_holm is None or result.p_holm >= rules.level:
            return "no_difference"
        if not self._is_ahead(result, test):
            return "worse"
        return "better" if all(self.quality(result).values()) else "quality_not_shown"

    def _is_ahead(self, result: SetResult, test: Test) -> bool:
        if math.isnan(test.estimate):  # by ranks
            return test.lead > 0
        if result.seconds_decide:
            return test.estimate < 1
        return (test.estimate < 0) == self.lower

    def quality(self, result: SetResult) -> dict[str, bool]:
        """Return what has to be shown of the values for less time to count, and whether it is."""
        if self.rules.better == "value":
            return {}
        gates = {"target": result.target, "margin": result.no_worse}
        return {name: test.p < self.rules.side_level for name, test in gates.items() if test}


def _mirrored(test: Test) -> Test:
    """Return the test of a difference of values whose signs were turned."""
    return test._replace(estimate=-test.estimate, low=-test.high, high=-test.low)
