"""A comparison's result for `--json` and the terminal, without pandas and matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunediff.analysis import disturbed_count, sides
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.statistics import mean, sd
from tunediff.core import text
from tunediff.core.target import TIME_TO_TARGET
from tunediff.report import pair_words as words
from tunediff.report.html import PAGE
from tunediff.report.pair_result import ComparisonResult, LedgerResult
from tunediff.report.words import effects, plain
from tunediff.tuning import sessions


def as_json(folder: Path) -> dict[str, Any]:
    """Return the result of a comparison as `--json` prints it."""
    return text.versioned(_result(Comparison.read(folder)))


def _result(result: Comparison) -> dict[str, Any]:
    failure = words.failure(result, result.failure) if result.failure is not None else None
    wall_s, report_path = sessions.spent_s(result.folder), str(result.folder / PAGE)
    return _compare(result, failure, wall_s, report_path).model_dump()


def lines(folder: Path) -> list[str]:
    """Return the result of a comparison as lines of text."""
    result = Comparison.read(folder)
    without = ("objective", "direction", "changed", "rough", "clock", "start_up_share", "level",
        "one_sided", "fixed", "equal_sides", "within", "seeds_drawn", "a_digest", "b_digest",
        "better_in", "target", "runs_at_once", "ledger", "judge_digest")  # fmt: skip
    values = _result(result)
    lines = plain({name: value for name, value in values.items() if name not in without})
    if words.diverged(result):
        lines.pop("resolution", None)  # of noise that is that of the diverged runs
    elif values["rough"] and values["resolution"] is not None:
        lines["resolution"] = f"{text.number(values['resolution'])} (a rough estimate)"
    return [text.block(lines), "", *words.sentences(result), *sides.clocked(result).sentences]


def _outcome_name(test: Comparison) -> str:
    """Return the name of what is compared, as files have it."""
    if not test.rules.by_time:
        return test.metric
    return TIME_TO_TARGET if test.rules.counted == "first" else "train_s"


def measured(test: Comparison) -> dict[str, Any]:
    """Return the keys of a result that follow from the journals and the rules alone."""
    analysis = test.analysis
    # Values of A and of B over the pairs, without missing ones.
    a, b = ([float(value) for value in side if value == value] for side in test.values)
    return {
        "verdict": test.verdict,
        "a_value": mean(a),
        "a_sd": sd(a),
        "a_values": a,
        "b_value": mean(b),
        "b_sd": sd(b),
        "b_values": b,
        **effects(analysis.differences[0], analysis.ratios),
        "resolution": analysis.differences[0].resolution,
        "stopped": analysis.state,
        "level": test.rules.level,
        "one_sided": test.rules.one_sided,
        "fixed": test.rules.fixed,
        "within": test.rules.within,
        "pairs": analysis.rounds,
        "pairs_at_most": test.rules.max_rounds,
        **_quality(test),
    }


def _ledger(pairs: Comparison) -> LedgerResult | None:
    if not (ledger := sides.content(pairs.folder, sides.LEDGER)):
        return None
    return LedgerResult(
        **{key: value for key, value in ledger.items() if key not in ("file", "id")}
    )


def _quality(test: Comparison) -> dict[str, Any]:
    """Return the keys about the values of a comparison by time."""
    a, b = ([float(value) for value in side if value == value] for side in test.qualities)
    target, gates = test.rules.target, test.gates
    return {
        "better_in": test.rules.better,
        "target": str(target) if target is not None else None,
        "target_p": test.target_p,
        "quality_shown": all(gate.shown for gate in gates) if gates else None,
        "a_quality": a if test.rules.by_time else [],
        "b_quality": b if test.rules.by_time else [],
    }


def _compare(
    pairs: Comparison, failure: str | None, wall_s: float, report: str
) -> ComparisonResult:
    """Return the result of a comparison of two configurations.

    failure: which run failed, and why. wall_s: wall-clock in seconds. report: path of the page.
    """
    ended, code = (
        [run for run in pairs.runs if run.finished],
        sides.content(pairs.folder, sides.CODE),
    )
    holdout, clocked = sides.content(pairs.folder, sides.HOLDOUT_VALUES), sides.clocked(pairs)
    (a_setup_s, b_setup_s), (a_config, _) = sides.setup_s(pairs), pairs.configs
    return ComparisonResult(
        comparison=pairs.folder.name,
        a=pairs.names[0],
        b=pairs.names[1],
        changed=sides.changed(pairs),
        failure=failure,
        metric=sides.outcome_label(pairs),
        objective=_outcome_name(pairs),
        direction="min" if pairs.lower_is_better else "max",
        **measured(pairs),
        equal_sides=pairs.rules.equal,
        one_run_each_tells=sides.one_run_detects(pairs),
        rough=pairs.noise_is_rough,
        runs=len(ended),
        runs_at_once=pairs.at_once,
        disturbed_runs=disturbed_count(ended),
        a_setup_s=a_setup_s,
        b_setup_s=b_setup_s,
        training_s=sum(run.points[-1].train_s for run in pairs.runs if run.points),
        first_seed=code.get("first_seed", a_config.seed),
        seeds_drawn=code.get("drawn", False),
        a_digest=code["A"]["digest"] if code else None,
        b_digest=code["B"]["digest"] if code else None,
        seeds_without_effect=words.without_effect(pairs),
        judge_digest=pairs.experiment.judge,
        holdout_a_values=holdout.get("A", []),
        holdout_b_values=holdout.get("B", []),
        holdout_failure=holdout.get("failure"),
        ledger=_ledger(pairs),
        clock=clocked.kind,
        start_up_share=clocked.start_up_share,
        wall_s=wall_s,
        results=str(pairs.folder),
        report=report,
    )
