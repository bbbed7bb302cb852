"""The result of a comparison as `--json` and the terminal have it; needs neither pandas nor
matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunediff.analysis import disturbed, pairs
from tunediff.analysis.pairs import Pairs
from tunediff.analysis.statistics import mean, sd
from tunediff.core import text
from tunediff.report import pair_words as words
from tunediff.report.html import PAGE
from tunediff.report.pair_result import ComparisonResult
from tunediff.report.words import effects, plain
from tunediff.tuning import sessions


def as_json(folder: Path) -> dict[str, Any]:
    """Return the result of a comparison as `--json` prints it."""
    return text.versioned(_result(pairs.read(folder)))


def _result(result: pairs.Pairs) -> dict[str, Any]:
    failure = words.failure(result, result.failure) if result.failure is not None else None
    wall_s, report_path = sessions.spent_s(result.folder), str(result.folder / PAGE)
    return _compare(result, failure, wall_s, report_path).model_dump()


def lines(folder: Path) -> list[str]:
    """Return the result of a comparison as lines of text."""
    result = pairs.read(folder)
    without = ("objective", "direction", "changed", "rough", "clock", "start_up_share", "level",
        "one_sided", "fixed", "within")  # fmt: skip
    values = _result(result)
    lines = plain({name: value for name, value in values.items() if name not in without})
    if words.diverged(result):
        lines.pop("resolution", None)  # of noise that is that of the diverged runs
    elif values["rough"] and values["resolution"] is not None:
        lines["resolution"] = f"{text.number(values['resolution'])} (a rough estimate)"
    return [text.block(lines), "", *words.sentences(result), *result.clocked.sentences]


def _compare(pairs: Pairs, failure: str | None, wall_s: float, report: str) -> ComparisonResult:
    """Return the result of a comparison of two configurations.

    failure: which run failed, and why. wall_s: wall-clock in seconds. report: path of the page.
    """
    look = pairs.look
    ended = [run for pair in pairs.runs for run in pair if run is not None and run.finished]
    # Values of A and of B over the pairs, without missing ones.
    a, b = ([float(value) for value in side if value == value] for side in pairs.values)
    return ComparisonResult(
        comparison=pairs.folder.name,
        a=pairs.names[0],
        b=pairs.names[1],
        changed=pairs.changed,
        verdict=pairs.verdict,
        failure=failure,
        metric=pairs.label,
        objective=pairs.metric.name,
        direction=pairs.metric.mode,
        a_value=mean(a),
        a_sd=sd(a),
        a_values=a,
        b_value=mean(b),
        b_sd=sd(b),
        b_values=b,
        **effects(look.differences[0], look.ratios),
        resolution=look.differences[0].resolution,
        one_run_each_tells=pairs.one_run_detects,
        rough=pairs.noise_is_rough,
        stopped=look.state,
        level=pairs.rules.level,
        one_sided=pairs.rules.one_sided,
        fixed=pairs.rules.fixed,
        within=pairs.within,
        pairs=look.rounds,
        pairs_at_most=pairs.max_pairs,
        runs=len(ended),
        disturbed_runs=sum(map(disturbed, ended)),
        a_setup_s=pairs.setup_s[0],
        b_setup_s=pairs.setup_s[1],
        training_s=pairs.trained_s,
        clock=pairs.clocked.kind,
        start_up_share=pairs.clocked.start_up_share,
        wall_s=wall_s,
        results=str(pairs.folder),
        report=report,
    )
