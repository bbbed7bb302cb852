"""Show every trial in a table that can be sorted and filtered, the failures, and the table of a
study."""

from __future__ import annotations

from typing import Any

from tunediff.analysis import RATE, Results, shown
from tunediff.analysis.effects import failures_table
from tunediff.analysis.evidence import NEAR as NEAR_COLUMN
from tunediff.analysis.outcome import failed
from tunediff.analysis.statistics import BETTER
from tunediff.core.text import pluralize, truncate
from tunediff.core.trial_record import TrialRecord
from tunediff.report import study_figure, study_table
from tunediff.report.context import ReportContext, lead, note
from tunediff.report.files import Files
from tunediff.report.html import Html, breakable, el, join, table
from tunediff.report.outputs import measured_on
from tunediff.report.verdicts import DISTURBED, NEAR, OTHERS, disturbed_words, noise_words
from tunediff.report.words import beside, has_value, noted, rounded


# ---- all of them
def trials(context: ReportContext, files: Files) -> Html | None:
    """Return the table of all trials: the best first, repeats below their baseline, then trials
    without a result."""
    results = context.results
    if not results.trials:
        return None
    frame = context.evidence.table()
    # New seeds decide: the speed-up of one run is no result for a trial that they did not show to
    # be better.
    if "speedup" in frame:
        frame.loc[
            [not _is_better(context, trial) for trial in results.trials],
            ["speedup", "speedup_at_least"],
        ] = None
    files.csv("trials", frame)
    names = [
        *(
            ["seed"]
            if results.space.seeds == 1 and any("seed" in trial.drawn for trial in results.trials)
            else []
        ),
        *(d.name for d in results.space.dimensions),
    ]
    reasons = any(trial.remarks for trial in results.trials)
    lines = list(zip(results.trials, frame.astype(object).to_dict("records"), strict=True))
    ranks = _ranks(results)
    lines.sort(key=lambda line: (ranks.get(line[0].name, len(results.trials)), line[0].number))
    rows = [
        [
            *_reached(context, trial, row),
            *(shown(trial.drawn[name]) if name in trial.drawn else "" for name in names),
            *([truncate(trial.remarks, 100)] if reasons else []),
        ]
        for trial, row in lines
    ]
    # Headings; columns without content are left out.
    fast = [] if results.by_rate else ["speed-up", f"{results.unit}/s"]
    near = [] if context.evidence.noise is None else [f"{NEAR} best"]
    spent = "train s" if results.clock.along == "train_s" else results.clock.short
    reached = ["trial", "status", context.label, results.versus_heading, *near, *fast, spent, "MiB"]
    header = [*reached, *map(_on_two_lines, names)]
    search = el(
        "input",
        id="trials-filter",
        type="search",
        placeholder="for example: bf16 ok",
        autocomplete="off",
    )
    count = el("span", f"{len(rows)} of {len(rows)}", id="trials-count", class_="soft")
    # The box is hidden until the script, which does the filtering, shows it.
    box = el("div", el("label", "Show only", search), count, class_="filter", hidden="hidden")
    marks = [context.mark(trial) for trial, _ in lines]
    empty = "Empty: the knob does not apply, or nothing was measured. In print: the first 40. "
    if frame["disturbed"].any():
        empty = f"{DISTURBED}: {OTHERS}. {empty}"
    if context.evidence.noise is not None:
        empty = (
            f"{NEAR}: within the noise of the best,"
            f" {noise_words(context.evidence.noise, context.label)}. {empty}"
        )
    return join(
        lead(f"{pluralize(len(rows), 'trial')}, the best first. A click on a heading sorts."),
        box,
        table(
            [*header, *(["reason"] if reasons else [])], rows, marks, words=2, id_="trials-table"
        ),
        note(empty, files.links("trials")),
    )


def _ranks(results: Results) -> dict[str, int]:
    """Return the ranks of the trials with a result, by name: those of their configurations."""
    return {run.name: rank for rank, outcome in enumerate(results.ranked) for run in outcome.done}


def _reached(context: ReportContext, trial: TrialRecord, row: dict[Any, Any]) -> list[object]:
    """Return the cells of a row before its knobs."""
    fast = [] if context.results.by_rate else [_speedup(row), rounded(row[RATE])]
    if context.evidence.noise is not None:
        best, near = context.evidence.best, row[NEAR_COLUMN] is True
        fast.insert(0, NEAR if near and best is not None and row["trial"] != best.name else "")
    versus = row["versus_baseline"] if has_value(row["versus_baseline"]) else None
    value = [rounded(row[context.results.metric]), beside(versus, context.results.ratios)]
    spent = [rounded(row[name]) for name in (context.results.clock.along, "peak_memory_mib")]
    status = row["status"] + f" {DISTURBED}" * row["disturbed"]
    if has_value(row[context.results.metric]):
        status = noted(status, context.results.outcome_of(trial))
    return [row["trial"], status, *value, *fast, *spent]


def _is_better(context: ReportContext, trial: TrialRecord) -> bool:
    """Whether a trial is significantly better than the baseline: on new seeds if the confirming
    runs have ended."""
    confirmation = context.evidence.confirmation
    if confirmation is not None and confirmation.settled:
        runs = confirmation.of(trial)
        return runs is not None and runs.difference.verdict == BETTER
    return context.evidence.better(trial) is not False


def _speedup(row: dict[Any, Any]) -> str:
    """Return a speed-up: `1.85`, or `≥ 4.00` if only a lower bound is known."""
    value, bound = row["speedup"], row["speedup_at_least"]
    return f"{value:.2f}" if has_value(value) else f"≥ {bound:.2f}" if has_value(bound) else ""


def _on_two_lines(name: str) -> Html:
    section, dot, leaf = name.rpartition(".")
    return join(section, dot, el("br") if dot else "", breakable(leaf))


# ---- failures
def failures(context: ReportContext, files: Files) -> Html | None:
    """Return the section about failed, stopped and skipped trials; None before the first trial has
    ended."""
    results = context.results
    ended = [trial for trial in results.trials if trial.finished]
    if not ended and not context.unreadable:
        return None
    # How many failed, were stopped early or skipped; then the reasons, and values that fail often.
    bad = sum(map(failed, ended))
    sentence = (
        f"{bad:,} of {pluralize(len(ended), 'trial')} that ended failed"
        if bad
        else "No trial failed"
    )
    for status, words in (
        ("pruned", "stopped early"),
        ("skipped", "not run, because other trials showed that they would fail"),
    ):
        if count := sum(trial.status == status for trial in ended):
            sentence += f"; {count:,} {'was' if count == 1 else 'were'} {words}"
    parts: list[object] = [lead(f"{sentence}.")]
    frame = failures_table(results)
    if len(frame):
        files.csv("failures", frame)
        rows = [
            [s, truncate(why, 300), truncate(names, 48), trials]
            for s, trials, why, names in frame[:30].to_numpy().tolist()
        ]
        parts.append(
            table(["status", "reason (of the first)", "trials", "how many"], rows, words=3)
        )
        parts.append(note(files.links("failures")))
    if sentence := disturbed_words(context.evidence):
        parts.append(el("p", sentence))
    if left := context.unreadable:
        sentence = (
            f"{pluralize(len(left), 'journal was', 'journals were')} not readable and left out:"
        )
        parts += [
            el("p", sentence),
            table(["trial", "why"], [[*item] for item in left.items()][:20], words=2),
        ]
    return join(*parts)


# ---- the study
def study(context: ReportContext, files: Files) -> Html | None:
    """Return the table and the figure of the study; None if the search is no study."""
    results, figure = context.results, None
    if results.space.study is None or not results.trials:
        return None
    try:
        studied = study_table.table(results)
        header, *rows = studied.cells(1000)
    # Journals of another version, or edited ones.
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return el(
            "p",
            f"The study's table cannot be made of these journals: {type(error).__name__}: {error}",
        )
    files.csv("study", studied.frame())
    if studied.study.has_figure:
        about = measured_on(results)
        figure = files.chart(
            "study",
            lambda: study_figure.figure(studied, about),
            "the figure of the study",
            "The study's own figure.",
        )
    return join(
        lead(studied.study.title or "The study's own table and figure."),
        figure,
        table(header, rows),
        *map(note, studied.notes()),
        note(files.links("study")),
    )
