"""The result of finished runs, as that of every experiment; its folder, and its check."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tunediff.analysis.statistics import mean, sd
from tunediff.core.errors import ConfigError
from tunediff.core.files import write_text
from tunediff.core.outcomes import Verdict
from tunediff.core.target import Target
from tunediff.experiment.model import Experiment, FinishedRuns, Limit, SequentialTest
from tunediff.finished import words
from tunediff.finished.comparison import FinishedComparison, Rules, RunSet, SetResult
from tunediff.finished.runs import FinishedRun
from tunediff.finished.statistics import Test
from tunediff.report import page, reading
from tunediff.report.result import (
    JSON,
    Candidate,
    Effect,
    Finished,
    FinishedSet,
    Result,
    Rule,
    Shown,
)
from tunediff.report.sections import block, table
from tunediff.report.text import candidates_table

RUNS = "runs"
"""Folder with a file for each set: the parsed numbers, a line a run."""


def _effect(
    test: Test | None, p_holm: float | None = None, tells: float | None = None
) -> Effect | None:
    if test is None:
        return None
    middle, low, high = (None if math.isnan(value) else value for value in test[1:4])
    return Effect(
        kind="ratio" if test.ratios else "difference",
        value=middle, low=low, high=high, resolution=tells, p=test.p, p_holm=p_holm,
    )  # fmt: skip


def result_of(comparison: FinishedComparison, name: str) -> Result:
    """Return what finished runs have shown."""
    rules, found = comparison.rules, comparison.results
    by_time = rules.better == "time"
    candidates, sets = [], []
    for index, one in enumerate(found):
        compared = one.seconds if by_time else one.values
        values = [float(value) for value in compared if math.isfinite(value)]
        verdict = comparison.verdict(one) if index else Verdict.BASELINE
        decides = one.time if by_time else one.difference
        quality = [float(value) for value in one.values if math.isfinite(value)]
        candidates.append(
            Candidate(
                name=one.name, configuration={}, trial=None, verdict=Verdict(verdict),
                runs=len(one.values) + one.without_value, failures=one.diverged + one.missed,
                value=mean(values), sd=sd(values), values=values, speedup=None,
                effect=_effect(decides, one.p_holm, one.detectable),
                others={rules.objective: quality} if by_time else {},
                evaluations=sum(one.evaluations) / 2,
            )
        )  # fmt: skip
        sets.append(_set(comparison, one))
    ahead = [c for c in candidates[1:] if c.verdict == Verdict.BETTER]
    leader = (
        min(ahead, key=lambda c: (c.effect.p_holm or 0.0) if c.effect else 0.0) if ahead else None
    )
    last = candidates[-1] if len(candidates) == 2 else leader
    rule = Rule(
        level=rules.level, one_sided=rules.one_sided, fixed=True, within=None, margin=rules.margin,
        better_in=rules.better, target=str(rules.target) if rules.target else None,
        equal_sides=False, rounds=min(len(one.values) for one in found),
        max_rounds=max(len(one.values) for one in found), at_once=1,
    )  # fmt: skip
    result = Result(
        name=name, kind="finished", objective=rules.objective,
        metric="seconds of a run" if by_time else rules.objective,
        direction="min" if by_time else rules.mode, target=rule.target, budget_s=None,
        budget_unit="wall", clock="logs", start_up_share=None,
        verdict=last.verdict if last else Verdict.NO_DIFFERENCE if candidates[1:] else None,
        state=None, best=(leader or candidates[0]).name, candidates=candidates, rule=rule,
        rough=rule.rounds < 9, failure=None, runs=sum(one.runs for one in candidates),
        disturbed=None, seconds={}, device_s=None, price=None, files={},
        finished=Finished(paired_by=rules.paired_by, sd=rules.sd, sets=sets),
    )  # fmt: skip
    return result.model_copy(update={"summary": words.summary(result)})


def _shown(test: Test | None, level: float) -> Shown | None:
    if test is None:
        return None
    bound = None if math.isnan(test.high) else test.high
    return Shown(method=test.method, p=test.p, shown=test.p < level, bound=bound)


def _set(comparison: FinishedComparison, one: SetResult) -> FinishedSet:
    level = comparison.rules.side_level
    # Beside less time it is one of the gates; by itself it is the test that was asked for
    target_level = level if len(comparison.sets) > 1 else comparison.rules.level
    return FinishedSet(
        method=one.decides.method if one.decides else None,
        difference=_effect(one.difference), ratio=_effect(one.ratio), time=_effect(one.time),
        no_worse=_shown(one.no_worse, level), meets_target=_shown(one.target, target_level),
        runs_needed=one.runs_needed, p_if_repeated=one.p_if_repeated,
        rank=list(one.rank[:3]) if one.rank else [], ahead_of_next=one.rank.ahead_of_next if one.rank else None,
        without_value=one.without_value, diverged=one.diverged, missed=one.missed,
        evaluations=list(one.evaluations), lengths=list(one.lengths or ()), pairs=one.pairs,
        unpaired=one.unpaired,
    )  # fmt: skip


# ---- the folder
def write(comparison: FinishedComparison, folder: Path) -> Path:
    """Write experiment, parsed numbers, result and page into a new folder; return the page."""
    rules = comparison.rules
    for index, one in enumerate(comparison.sets):
        rows = [json.dumps(run._asdict()) for run in one.runs]
        write_text(folder / RUNS / f"{index}.jsonl", "\n".join(rows) + "\n")
    Experiment(
        kind="finished", objective=rules.objective, mode=rules.mode,
        candidates={str(index): one.name for index, one in enumerate(comparison.sets)},
        limit=Limit(target=str(rules.target) if rules.target else None),
        test=SequentialTest(
            level=rules.level, one_sided=rules.one_sided, fixed=True, better=rules.better, margin=rules.margin
        ),
        finished=FinishedRuns(until_target=rules.until_target, sd=rules.sd, paired_by=rules.paired_by),
    ).write(folder)  # fmt: skip
    found = result_of(comparison, folder.name)
    sets = table(candidates_table(found), words=2, stacks=True)
    content = [
        ("result", "Result", [block("lead", found.summary[0]), sets,
                              *(block("p", line) for line in found.summary[1:])]),
    ]  # fmt: skip
    return page.write_finished(folder, found, content)


def read(folder: Path) -> FinishedComparison:
    """Return the comparison in such a folder. Raises `ConfigError`."""
    asked = Experiment.read(folder)
    if asked.finished is None:
        raise ConfigError(f"{folder}: holds no finished runs")
    target = asked.limit.target
    rules = Rules(
        asked.objective, asked.mode, asked.test.better, asked.test.level, asked.test.one_sided,
        Target.of(target, "target") if target else None, asked.finished.until_target,
        asked.test.margin, asked.finished.sd, asked.finished.paired_by,
    )  # fmt: skip
    sets = []
    for index, name in asked.candidates.items():
        lines = (folder / RUNS / f"{index}.jsonl").read_text().splitlines()
        sets.append(RunSet(name, [FinishedRun(**json.loads(line)) for line in lines]))
    return FinishedComparison(sets, rules)


def verify(folder: Path) -> dict[str, Any]:
    """Return whether the result in such a folder is what its numbers give: `verified`, `faults`."""
    computed = reading.as_json(result_of(read(folder), folder.name))
    said = json.loads((folder / JSON).read_text())
    keys = [key for key in computed if key not in ("summary", "files", "name")]
    faults = [
        key for key in keys if json.loads(json.dumps(computed[key], default=str)) != said.get(key)
    ]
    return {"folder": str(folder), "verified": not faults, "faults": faults,
            "verdict": computed["verdict"]}  # fmt: skip
