"""Every trial, in a table that sorts and filters itself."""

from __future__ import annotations

from typing import Any

from tunediff.report.files import Files
from tunediff.report.html import Html, el, join, table
from tunediff.report.subject import Subject, lead, note
from tunediff.report.words import cut, is_known, rounded, some
from tunediff.results import RATE, shown


def trials(subject: Subject, files: Files) -> Html | None:
    """The best first, then those without a result by their numbers."""
    found = subject.found
    if not found.trials:
        return None
    frame = found.table()
    files.csv("trials", frame)
    names = [dimension.name for dimension in found.space.dimensions]
    reasons = any(trial.reason for trial in found.trials)
    ranks = {trial.name: rank for rank, trial in enumerate(found.ranked)}
    lines = list(zip(found.trials, frame.astype(object).to_dict("records"), strict=True))
    lines.sort(key=lambda line: (ranks.get(line[0].name, len(ranks)), line[0].number))
    rows = [
        [
            *_reached(subject, row),
            *(shown(trial.drawn[name]) if name in trial.drawn else "" for name in names),
            *([cut(trial.reason, 100)] if reasons else []),
        ]
        for trial, row in lines
    ]
    fast = [] if subject.by_rate else ["speed-up", "images/s"]
    header = ["trial", "status", subject.label, "× baseline", *fast, "train s", "MiB", *map(_on_two_lines, names)]
    search = el("input", id="trials-filter", type="search", placeholder="for example: bf16 ok", autocomplete="off")
    count = el("span", f"{len(rows)} of {len(rows)}", id="trials-count", class_="soft")
    # The script shows the box: without it there is nothing to filter with.
    box = el("div", el("label", "Show only", search), count, class_="filter", hidden="hidden")
    marks = [subject.mark(trial) for trial, _ in lines]
    empty = "Empty: the knob does not apply, or nothing was measured. On paper: the first 40. "
    return join(
        lead(f"{some(len(rows), 'trial')}, the best first. A click on a heading sorts."),
        box,
        table([*header, *(["reason"] if reasons else [])], rows, marks, words=2, id_="trials-table"),
        note(empty, files.links("trials")),
    )


def _reached(subject: Subject, row: dict[Any, Any]) -> list[object]:
    fast = [] if subject.by_rate else [_two(row["speedup"]), _plain(row[RATE])]
    value = [_plain(row[subject.found.metric]), _two(row["versus_baseline"])]
    return [row["trial"], row["status"], *value, *fast, _plain(row["train_s"]), _plain(row["peak_memory_mib"])]


def _plain(value: Any) -> str:
    return rounded(float(value)) if is_known(value) else ""


def _two(value: Any) -> str:
    return f"{value:.2f}" if is_known(value) else ""


def _on_two_lines(name: str) -> Html:
    section, dot, leaf = name.rpartition(".")
    return join(section, dot, el("br") if dot else "", leaf)
