"""Show every trial in a table, the failures, and a study."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tunediff.analysis import RATE, Results, shown
from tunediff.analysis.evidence import NEAR as NEAR_COLUMN
from tunediff.analysis.outcome import failed
from tunediff.core.outcomes import Status, Verdict
from tunediff.core.text import pluralize, truncate
from tunediff.core.trial_record import TrialRecord
from tunediff.report import study as studies
from tunediff.report.context import ReportContext
from tunediff.report.figures import Figures
from tunediff.report.html import Html, breakable, el, join, lead, note, table
from tunediff.report.outputs import measured_on
from tunediff.report.verdicts import DISTURBED, NEAR, OTHERS, disturbed_words, noise_words
from tunediff.report.words import has_value, noted, rounded, versus


# ---- all of them
def trials(context: ReportContext, figures: Figures) -> Html | None:
    """Return the table of all trials: best first, repeats below their baseline, failures last."""
    results, evidence = context.results, context.evidence
    if not results.trials:
        return None
    frame = evidence.table()
    # One run's speed-up does not count for a trial that new seeds did not show to be better
    if "speedup" in frame:
        rejected = [not _may_be_faster(context, trial) for trial in results.trials]
        frame.loc[rejected, ["speedup", "speedup_at_least"]] = None
    knobs = [dimension.name for dimension in results.space.dimensions]
    if any(trial.role == "repeat" for trial in results.trials):
        knobs = ["seed", *knobs]
    reasons = any(trial.remarks for trial in results.trials)
    ranks = {run.name: rank for rank, outcome in enumerate(results.ranked) for run in outcome.done}
    lines = list(zip(results.trials, frame.astype(object).to_dict("records"), strict=True))
    lines.sort(key=lambda line: (ranks.get(line[0].name, len(results.trials)), line[0].number))
    # All columns but the knobs are the same in every row.
    rows, names = [], list[object]()
    for trial, row in lines:
        cells = _cells(context, trial, row)
        drawn = [shown(trial.drawn[name]) if name in trial.drawn else "" for name in knobs]
        reason = [truncate(trial.remarks, 100)] if reasons else []
        rows.append([*cells.values(), *drawn, *reason])
        names = [*cells, *map(_on_two_lines, knobs), *(["reason"] if reasons else [])]
    remarks = ["Empty: the knob does not apply, or nothing was measured. In print: the first 40. "]
    if frame["disturbed"].any():
        remarks.insert(0, f"{DISTURBED}: {OTHERS}. ")
    if evidence.noise is not None:
        size = noise_words(evidence.noise, context.label)
        remarks.insert(0, f"{NEAR}: within the noise of the best, {size}. ")
    marks = [context.highlights.mark(trial) for trial, _ in lines]
    return join(
        lead(f"{pluralize(len(rows), 'trial')}, the best first."),
        table(names, rows, marks, words=2, id_="trials-table"),
        note("".join(remarks)),
    )


def _cells(context: ReportContext, trial: TrialRecord, row: Mapping[Any, Any]) -> dict[str, str]:
    """Return the cells of a row before its knobs, by heading."""
    results, evidence = context.results, context.evidence
    compared = row["versus_baseline"] if has_value(row["versus_baseline"]) else None
    status = row["status"] + f" {DISTURBED}" * row["disturbed"]
    if has_value(row[results.metric]):
        status = noted(status, results.outcome_of(trial))
    cells = {
        "trial": row["trial"],
        "status": status,
        context.label: rounded(row[results.metric]),
        results.versus_heading: versus(compared, results.ratios),
    }
    if results.by_time:
        name, title, _ = results.curve_quantity
        cells[title] = rounded(row[name]) if name in row else ""
    if evidence.noise is not None:
        is_best = evidence.best is not None and evidence.best.name == trial.name
        cells[f"{NEAR} best"] = NEAR if row[NEAR_COLUMN] is True and not is_best else ""
    if not results.by_rate:
        value, bound = row["speedup"], row["speedup_at_least"]
        cells["speed-up"] = f"≥ {bound:.2f}" if has_value(bound) else ""
        if has_value(value):
            cells["speed-up"] = f"{value:.2f}"
        cells[f"{context.unit}/s"] = rounded(row[RATE])
    spent = "train s" if results.clock.along == "train_s" else results.clock.short
    cells[spent] = rounded(row[results.clock.along])
    if "peak_memory_mib" in row:
        cells["MiB"] = rounded(row["peak_memory_mib"])
    return cells


def _may_be_faster(context: ReportContext, trial: TrialRecord) -> bool:
    """Whether a speed-up of a trial may be shown: new seeds decide if they ran."""
    confirmation = context.evidence.confirmation
    if confirmation is not None and confirmation.is_conclusive:
        runs = confirmation.candidate_of(trial)
        return runs is not None and runs.verdict == Verdict.BETTER
    return context.evidence.better(trial) is not False


def _on_two_lines(name: str) -> Html:
    section, dot, leaf = name.rpartition(".")
    return join(section, dot, el("br") if dot else "", breakable(leaf))


# ---- failures
def failures(context: ReportContext, figures: Figures) -> Html | None:
    """Return the section about failed, stopped and skipped trials; None: no trial has ended."""
    ended = [trial for trial in context.results.trials if trial.finished]
    if not ended and not context.unreadable:
        return None
    bad = sum(map(failed, ended))
    sentence = "No trial failed"
    if bad:
        sentence = f"{bad:,} of {pluralize(len(ended), 'trial')} that ended failed"
    for status, words in (
        (Status.PRUNED, "stopped early"),
        (Status.SKIPPED, "not run, because other trials showed that they would fail"),
    ):
        if count := sum(trial.status == status for trial in ended):
            sentence += f"; {count:,} {'was' if count == 1 else 'were'} {words}"
    parts: list[object] = [lead(f"{sentence}.")]
    if found := failures_table(context.results)[:30]:
        rows = [
            [status, truncate(why, 300), truncate(names, 48), count]
            for status, count, why, names in found
        ]
        header = ["status", "reason (of the first)", "trials", "how many"]
        parts.append(table(header, rows, words=3))
    if remark := disturbed_words(context.evidence):
        parts.append(el("p", remark))
    if left := context.unreadable:
        journals = pluralize(len(left), "journal was", "journals were")
        lines = [list(item) for item in left.items()][:20]
        parts.append(el("p", f"{journals} not readable and left out:"))
        parts.append(table(["trial", "why"], lines, words=2))
    return join(*parts)


# ---- the study
def study(context: ReportContext, figures: Figures) -> Html | None:
    """Return the table and the figure of the study; None if the search is no study."""
    results, figure = context.results, None
    if results.space.study is None or not results.trials:
        return None
    try:
        studied = studies.table(results)
        header, *rows = studied.cells(1000)
    # Journals of another version, or edited ones.
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        why = f"{type(error).__name__}: {error}"
        return el("p", f"The study's table cannot be made of these journals: {why}")
    if studied.study.has_figure:
        figure = figures.chart(
            "study",
            lambda: studies.figure(studied, measured_on(results)),
            "the figure of the study",
            "The study's own figure.",
        )
    return join(
        lead(studied.study.title or "The study's own table and figure."),
        figure,
        table(header, rows),
        *map(note, studied.notes()),
    )


def failures_table(results: Results) -> list[tuple[str, int, str, str]]:
    """Return one row per status and reason other than ok: count, first reason, names of trials."""
    kinds: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for trial in results.trials:
        if trial.status in (None, Status.OK):
            continue
        reason = trial.reason if trial.status != Status.PRUNED else "stopped early"
        # Numbers differ between trials; without them, equal causes have equal reasons.
        key = (trial.status, re.sub(r"\d+(\.\d+)?", "#", reason)[:80])
        kinds.setdefault(key, (reason, []))[1].append(trial.name)
    rows = [
        (status, len(names), reason, " ".join(names))
        for (status, _), (reason, names) in kinds.items()
    ]
    return sorted(rows, key=lambda row: row[1], reverse=True)
