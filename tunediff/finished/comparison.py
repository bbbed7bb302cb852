"""Compare sets of finished runs with the first of them; keep that in a folder, and check it."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tunediff.analysis.divergence import diverged
from tunediff.analysis.statistics import holm, mean, sd
from tunediff.command.metrics import expression
from tunediff.config.knobs import validated
from tunediff.core.errors import ConfigError
from tunediff.core.files import write_text
from tunediff.core.options import allow
from tunediff.core.outcomes import Verdict
from tunediff.core.target import Target
from tunediff.core.text import pluralize
from tunediff.experiment.model import Experiment, FinishedRuns
from tunediff.finished import statistics, words
from tunediff.finished.runs import FinishedRun
from tunediff.finished.statistics import Values
from tunediff.proof import proof
from tunediff.report import page, reading
from tunediff.report.result import JSON, Candidate, Finished, FinishedSet, Result, Rule, Test

RUNS, SAID = "runs", ("name", "files", "summary")
"""Folder with a file for each set: the parsed numbers, a line a run; keys that they do not give."""


class FinishedComparison:
    """Sets of runs, each compared with the first one."""

    def __init__(self, experiment: Experiment, sets: Sequence[Sequence[FinishedRun]]) -> None:
        """`experiment`: what is compared and how; its candidates are the names of the sets. Raises
        `ConfigError` for sets that cannot be compared."""
        self.experiment, self.sets, self.rule = experiment, sets, experiment.test
        self.how = experiment.finished or FinishedRuns()
        self.names = [*experiment.candidates.values()]
        target, self.by_time = experiment.limit.target, self.rule.better == "time"
        self.target = Target.of(target, "--target") if target is not None else None
        self.sign = 1.0 if experiment.mode == "min" else -1.0
        self.is_single, self.deciding = len(sets) < 2, "time" if self.by_time else "difference"
        self.is_one_sided = self.rule.one_sided or self.is_single
        self.quality_level = self.rule.level if self.is_one_sided else self.rule.level / 2
        """Level of the tests of quality, which only one side of the level decides."""
        self.counted = [[run for run in runs if run.value is not None] for runs in sets]
        for name, runs in zip(self.names, self.counted, strict=True):
            allow(
                len(runs) > 1,
                name,
                pluralize(len(runs), "run with a value", "runs with a value"),
                "two or more",
            )
            units = sorted({run.unit or "none" for run in (*self.counted[0], *runs)})
            allow(len(units) < 2, f"{name}: unit of values", " and ".join(units), "one for all")
        for index, runs in enumerate(self.counted):  # what is usual in one set is not in another
            marks = diverged([self._values(runs)], self.sign > 0)
            self.counted[index] = [
                run._replace(value=self.sign * math.inf) if is_bad else run
                for run, is_bad in zip(runs, *marks, strict=True)
            ]
        """Runs with a value, infinite for those that diverged to a number."""
        self.pattern = (
            expression(self.how.paired_by, "--paired-by", groups=1) if self.how.paired_by else None
        )

    def _values(self, runs: Sequence[FinishedRun]) -> Values:
        """Return the values of runs, worse than any for diverged ones."""
        values = np.array([run.value for run in runs], dtype=float)
        return np.where(np.isfinite(values), values, self.sign * math.inf)

    def _seconds(self, runs: Sequence[FinishedRun]) -> Values:
        """Return the seconds of runs, longer than any where the target was never met."""
        return np.array([math.inf if run.seconds is None else run.seconds for run in runs])

    def _by_pair(self, index: int, pattern: re.Pattern[str]) -> dict[str, FinishedRun]:
        """Return the runs of a set by the names of their pairs. Raises `ConfigError`."""
        runs = dict[str, FinishedRun]()
        for run in self.counted[index]:
            match = pattern.search(run.name)
            if match is None or runs.setdefault(match[1], run) is not run:
                what = "no pair" if match is None else f"the pair of {runs[match[1]].name}"
                raise ConfigError(f"--paired-by: {self.names[index]}: {run.name} has {what}")
        return runs

    # ---- one set
    def _set(self, index: int) -> FinishedSet:
        """Return what a set shows, but for its rank."""
        runs, until, tests = self.counted[index], self.how.until_target, dict[str, Test]()
        ends = np.array([run.evaluations if run.length is None else run.length for run in runs])
        usual = np.quantile(ends, 0.5, method="higher")
        irregular = {
            "without_value": [run for run in self.sets[index] if run.value is None],
            "diverged": [run for run in runs if not math.isfinite(run.value or 0.0)],
            "missed": [run for run in runs if until and run.seconds is None],
            # Where most have no length in common, none is short
            "short": [run for run, end in zip(runs, ends, strict=True) if end < usual]
            if (ends == usual).mean() >= 0.5
            else [],
        }
        sides = [self.counted[0], runs] if index else [runs]
        if index and self.pattern is not None:
            pairs = [self._by_pair(side, self.pattern) for side in (0, index)]
            keys = dict.fromkeys(key for key in pairs[0] if key in pairs[1])
            sides = [[of[key] for key in keys] for of in pairs]
            irregular["unpaired"] = [r for of in pairs for k, r in of.items() if k not in keys]
            both = f"--paired-by: {self.names[0]} and {self.names[index]}"
            allow(len(keys) > 1, both, pluralize(len(keys), "pair"), "two or more")
        samples = [self._values(side) for side in sides]
        if index:
            tests = self._tests(*sides)
            if self.pattern is not None and np.isfinite(samples).all():
                samples = [samples[1] - samples[0]]  # of pairs differences are tested
        if self.target is not None and not until:
            tests["meets_target"] = statistics.against(
                self._values(runs), self.target.value, self.quality_level, self.how.sd, self.sign
            )
        lengths = [run.length for run in runs if run.length is not None]
        evaluations, repeated = [run.evaluations for run in runs], None
        decides = tests.get("meets_target" if self.is_single else self.deciding)
        if decides is not None and decides.resolution is not None:
            repeated = statistics.p_if_repeated(
                decides.p, list(map(len, samples)), self.is_one_sided
            )
        return FinishedSet(
            tests=tests, counted=len(sides[-1]), p_if_repeated=repeated,
            runs_needed=self._runs_needed(samples) if decides is not None else None,
            irregular={what: [run.name for run in of] for what, of in irregular.items() if of},
            evaluations=[min(evaluations), max(evaluations)],
            lengths=[min(lengths), max(lengths)] if lengths else [], rank=[], ahead_of_next=None,
        )  # fmt: skip

    def _tests(self, base: Sequence[FinishedRun], runs: Sequence[FinishedRun]) -> dict[str, Test]:
        """Return the tests of runs against those of the first set."""
        rule, level, sided = self.rule, self.rule.level, self.rule.one_sided
        both = functools.partial(statistics.compare, paired=self.pattern is not None)
        (a, b), (a_s, b_s) = ([of(base), of(runs)] for of in (self._values, self._seconds))
        tests = {"difference": both(a, b, level=level, one_sided=sided, sign=self.sign)}
        if min(a.min(), b.min()) > 0:
            tests["ratio"] = both(a, b, level=level, one_sided=sided, ratios=True, sign=self.sign)
        # Without seconds a run has missed its target, or none were asked for
        is_timed = self.by_time or self.how.until_target or np.isfinite([*a_s, *b_s]).all()
        if is_timed and min(a_s.min(), b_s.min()) > 0:
            tests["time"] = both(a_s, b_s, level=level, one_sided=sided, ratios=True)
        if rule.margin is not None:
            tests["no_worse"] = both(
                a, b, level=self.quality_level, one_sided=True, bound=rule.margin, sign=self.sign
            )
        return tests

    def _runs_needed(self, samples: Sequence[Values]) -> int | None:
        """Return how many runs of a set show the margin with 80 %."""
        margin, level = self.rule.margin, self.quality_level
        if margin is None or not np.isfinite(np.concatenate(samples)).all():
            return None
        known = self.how.sd if self.is_single else None
        spread = known or math.sqrt(np.mean([values.var(ddof=1) for values in samples]))
        return statistics.runs_needed(margin, spread, level, True, len(samples)) if spread else None

    # ---- all of them
    def _sets(self) -> list[FinishedSet]:
        """Return what each set shows, in order; of three and more with their ranks, which would
        ignore pairs."""
        found = [self._set(index) for index in range(len(self.sets))]
        if len(found) < 3 or self.pattern is not None:
            return found
        sign, of = (1.0, self._seconds) if self.by_time else (self.sign, self._values)
        compared = [sign * of(runs) for runs in self.counted]
        score = np.mean if np.isfinite(np.concatenate(compared)).all() else np.median
        return [
            one.model_copy(update={"rank": rank, "ahead_of_next": ahead})
            for one, (rank, ahead) in zip(found, statistics.ranks(compared, score), strict=True)
        ]

    def _verdict(self, one: FinishedSet, effect: Test | None) -> Verdict:
        """Return how a set compares with the first one."""
        if effect is None or effect.p_holm is None or effect.p_holm >= self.rule.level:
            return Verdict.NO_DIFFERENCE
        if not effect.ahead:
            return Verdict.WORSE
        # Less time counts if the values are shown to be good enough
        gates = [one.tests.get(name) for name in ("meets_target", "no_worse") if self.by_time]
        is_shown = all(gate.shown for gate in gates if gate is not None)
        return Verdict.BETTER if is_shown else Verdict.NOT_SHOWN

    def _candidates(self, sets: Sequence[FinishedSet]) -> list[Candidate]:
        """Return the sets as candidates, with p-values that are corrected over all of them."""
        tests, candidates = [one.tests.get(self.deciding) for one in sets], list[Candidate]()
        for index, p_holm in enumerate(holm([test.p if test else None for test in tests])):
            one, test, runs = sets[index], tests[index], self.counted[index]
            effect = test and test.model_copy(update={"p_holm": p_holm})
            values, seconds = (
                of[np.isfinite(of)].tolist() for of in (self._values(runs), self._seconds(runs))
            )
            compared = seconds if self.by_time else values
            missed = len(one.irregular.get("missed", ())) if self.by_time else 0
            middle = float(np.median(self._seconds(runs))) if missed else mean(compared)
            candidates.append(
                Candidate(
                    name=self.names[index], configuration={}, trial=None,
                    verdict=self._verdict(one, effect) if index else Verdict.BASELINE,
                    runs=len(self.sets[index]), missed=missed,
                    failures=0 if self.by_time else len(one.irregular.get("diverged", ())),
                    values=compared, effect=effect,
                    value=middle if math.isfinite(middle or 0.0) else None,
                    sd=None if missed else sd(compared),
                    speedup=None, evaluations=sum(one.evaluations) / 2,
                    others={self.experiment.objective: values} if self.by_time else {},
                )
            )  # fmt: skip
        return candidates

    def result(self, name: str) -> Result:
        """Return what the runs have shown. Raises `ConfigError` for pairs that are none."""
        sets, rule, objective = self._sets(), self.rule, self.experiment.objective
        first, *others = candidates = self._candidates(sets)
        ahead = [
            (one.effect.p_holm or 0.0, one) for one in others
            if one.verdict == Verdict.BETTER and one.effect is not None
        ]  # fmt: skip
        leader = min(ahead, key=lambda one: one[0])[1] if ahead else None
        last, gate = others[0] if len(others) == 1 else leader, sets[0].tests.get("meets_target")
        target, counts = self.experiment.limit.target, list(map(len, self.counted))
        found = Result(
            name=name, kind="finished", objective=objective,
            metric="seconds of a run" if self.by_time else objective,
            direction="min" if self.by_time else self.experiment.mode, target=target,
            budget_s=None, budget_unit="wall", clock="logs", start_up_share=None,
            verdict=last.verdict if last
            else Verdict.NO_DIFFERENCE if others
            else Verdict.NOT_SHOWN if gate and not gate.shown
            else None,
            state=None, best=(leader or first).name, candidates=candidates,
            rule=Rule(
                level=rule.level, one_sided=rule.one_sided, fixed=True, within=None,
                margin=rule.margin, better_in=rule.better, target=target, equal_sides=False,
                rounds=min(counts), max_rounds=max(counts), at_once=1,
            ),
            rough=min(counts) < 9, failure=None, runs=sum(one.runs for one in candidates),
            disturbed=None, seconds={}, device_s=None, price=None, files={},
            finished=Finished(paired_by=self.how.paired_by, sd=self.how.sd, sets=sets),
        )  # fmt: skip
        return found.model_copy(update={"summary": words.summary(found)})

    def write(self, found: Result, folder: Path) -> None:
        """Write experiment, parsed numbers, result and page into a new folder. Raises `OSError`."""
        for index, runs in enumerate(self.sets):
            rows = [json.dumps(run._asdict()) for run in runs]
            write_text(folder / RUNS / f"{index}.jsonl", "\n".join(rows) + "\n")
        self.experiment.write(folder)
        page.write_finished(folder, found)


def verify(folder: Path) -> dict[str, Any]:
    """Return whether the result in such a folder is what its numbers give: `verified`, `faults`.
    Raises `ConfigError` for another folder."""
    experiment = Experiment.read(folder)
    files = (folder / RUNS / f"{index}.jsonl" for index in experiment.candidates)
    sets = [
        [FinishedRun(**row) for row in map(json.loads, file.read_text().splitlines())]
        for file in files
    ]
    found = reading.as_json(FinishedComparison(experiment, sets).result(folder.name))
    content = json.loads((folder / JSON).read_text())
    del content["schema"]
    # A key that has come since then has its default
    said = reading.as_json(validated(Result, content, str(folder / JSON)))
    # Sentences are no facts, the folder may have been moved, and once one set had no verdict
    keys = (*SAID, "verdict") if said["verdict"] is None and len(sets) < 2 else SAID
    faults = [*proof.other_numbers(found | {key: said.get(key) for key in keys}, said)]
    return {"folder": str(folder), "verified": not faults, "faults": faults,
            "notes": [f"{JSON} is checked, and no page"], "verdict": found["verdict"]}  # fmt: skip
