"""Every trial, in a table that sorts and filters itself; how those ended that have no result; the table of a study."""

from __future__ import annotations

from typing import Any

from tunediff.analysis import RATE, evidence, failed, shown
from tunediff.analysis.effects import failures_table, suspects
from tunediff.core.text import pluralize, truncate
from tunediff.report import study_figure, study_table
from tunediff.report.context import ReportContext, lead, note
from tunediff.report.files import Files
from tunediff.report.html import Html, breakable, el, join, table
from tunediff.report.outputs import measured_on
from tunediff.report.verdicts import DISTURBED, NEAR, OTHERS, disturbed_words, noise_words
from tunediff.report.words import beside, is_known, rounded


# ---------------------------------------------------------------------------------------------------------- all of them
def trials(subject: ReportContext, files: Files) -> Html | None:
    """The best first, further runs of the baseline below it, then those without a result by their numbers."""
    found = subject.found
    if not found.trials:
        return None
    frame = subject.known.table()
    files.csv("trials", frame)
    names = [*(["seed"] if any(map(found.repeats, found.trials)) else []), *(d.name for d in found.space.dimensions)]
    reasons = any(trial.remarks for trial in found.trials)
    ranks = {trial.name: rank for rank, trial in enumerate(found.ranked)}
    lines = list(zip(found.trials, frame.astype(object).to_dict("records"), strict=True))
    if found.baseline is not None and found.baseline.name in ranks:
        again = [trial.name for trial in found.trials if found.repeats(trial) and trial.status == "ok"]
        ranks |= dict.fromkeys(again, ranks[found.baseline.name])
    lines.sort(key=lambda line: (ranks.get(line[0].name, len(found.trials)), line[0].number))
    rows = [
        [
            *_reached(subject, row),
            *(shown(trial.drawn[name]) if name in trial.drawn else "" for name in names),
            *([truncate(trial.remarks, 100)] if reasons else []),
        ]
        for trial, row in lines
    ]
    fast = [] if found.by_rate else ["speed-up", f"{found.unit}/s"]
    near = [] if subject.noise is None else [f"{NEAR} best"]
    spent = "train s" if found.clock.along == "train_s" else found.clock.short
    reached = ["trial", "status", subject.label, found.versus_heading, *near, *fast, spent, "MiB"]
    header = [*reached, *map(_on_two_lines, names)]
    search = el("input", id="trials-filter", type="search", placeholder="for example: bf16 ok", autocomplete="off")
    count = el("span", f"{len(rows)} of {len(rows)}", id="trials-count", class_="soft")
    # The script shows the box: without it there is nothing to filter with.
    box = el("div", el("label", "Show only", search), count, class_="filter", hidden="hidden")
    marks = [subject.mark(trial) for trial, _ in lines]
    empty = "Empty: the knob does not apply, or nothing was measured. On paper: the first 40. "
    if frame["disturbed"].any():
        empty = f"{DISTURBED}: {OTHERS}. {empty}"
    if subject.noise is not None:
        empty = (
            f"{NEAR}: behind the best by no more than the noise, {noise_words(subject.noise, subject.label)}. {empty}"
        )
    return join(
        lead(f"{pluralize(len(rows), 'trial')}, the best first. A click on a heading sorts."),
        box,
        table([*header, *(["reason"] if reasons else [])], rows, marks, words=2, id_="trials-table"),
        note(empty, files.links("trials")),
    )


def _reached(subject: ReportContext, row: dict[Any, Any]) -> list[object]:
    fast = [] if subject.found.by_rate else [_speedup(row), rounded(row[RATE])]
    if subject.noise is not None:
        best, near = subject.known.best, row[evidence.NEAR] is True
        fast.insert(0, NEAR if near and best is not None and row["trial"] != best.name else "")
    versus = row["versus_baseline"] if is_known(row["versus_baseline"]) else None
    value = [rounded(row[subject.found.metric]), beside(versus, subject.found.ratios)]
    spent = [rounded(row[name]) for name in (subject.found.clock.along, "peak_memory_mib")]
    status = row["status"] + f" {DISTURBED}" * row["disturbed"]
    return [row["trial"], status, *value, *fast, *spent]


def _speedup(row: dict[Any, Any]) -> str:
    """`1.85`, or `≥ 4.00` where there is no upper bound."""
    value, bound = row["speedup"], row["speedup_at_least"]
    return f"{value:.2f}" if is_known(value) else f"≥ {bound:.2f}" if is_known(bound) else ""


def _on_two_lines(name: str) -> Html:
    section, dot, leaf = name.rpartition(".")
    return join(section, dot, el("br") if dot else "", breakable(leaf))


# ------------------------------------------------------------------------------------------------------------- failures
def failures(subject: ReportContext, files: Files) -> Html | None:
    """Left out before the first trial ended."""
    found = subject.found
    ended = [trial for trial in found.trials if trial.finished]
    if not ended and not subject.unreadable:
        return None
    bad = sum(map(failed, ended))
    said = f"{bad:,} of {pluralize(len(ended), 'trial')} that ended failed" if bad else "No trial failed"
    for status, words in (
        ("pruned", "stopped early"),
        ("skipped", "not run, as others had shown that they would fail"),
    ):
        if count := sum(trial.status == status for trial in ended):
            said += f"; {count:,} {'was' if count == 1 else 'were'} {words}"
    parts: list[object] = [lead(f"{said}.")]
    frame = failures_table(found)
    if len(frame):
        files.csv("failures", frame)
        rows = [
            [s, truncate(why, 300), truncate(names, 48), trials]
            for s, trials, why, names in frame[:30].to_numpy().tolist()
        ]
        parts.append(table(["status", "reason (of the first)", "trials", "how many"], rows, words=3))
        parts.append(note(files.links("failures")))
    if hints := suspects(found, subject.effects):
        words = "; ".join(f"{of.failed} of {len(of.members)} with {knob} = {of.label}" for knob, of in hints)
        parts.append(el("p", f"More than twice as often as elsewhere trials failed with these values: {words}."))
    if said := disturbed_words(subject.known):
        parts.append(el("p", said))
    if left := subject.unreadable:
        said = f"{pluralize(len(left), 'journal was', 'journals were')} not understood and left out:"
        parts += [el("p", said), table(["trial", "why"], [[*item] for item in left.items()][:20], words=2)]
    return join(*parts)


# ------------------------------------------------------------------------------------------------------------ the study
def study(subject: ReportContext, files: Files) -> Html | None:
    """The study as its search ended with it."""
    found, figure = subject.found, None
    if found.space.study is None or not found.trials:
        return None
    try:
        told = study_table.table(found)
        header, *rows = told.cells(1000)
    # journals of another version, or a stranger's
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return el("p", f"The study's table cannot be made of these journals: {type(error).__name__}: {error}")
    files.csv("study", told.frame())
    if told.study.has_figure:
        about = measured_on(found)
        figure = files.chart(
            "study", lambda: study_figure.figure(told, about), "the figure of the study", "The study's own figure."
        )
    return join(
        lead(told.study.title or "The study's own table and figure."),
        figure,
        table(header, rows),
        *map(note, told.notes()),
        note(files.links("study")),
    )
