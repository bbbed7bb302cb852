"""Write the page of an experiment: one self-contained HTML file, and its result as JSON beside it.

The templates escape all text, which may come from anybody's files.
"""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

import jinja2

from tunediff.analysis import journals, sides
from tunediff.analysis.comparison import Comparison
from tunediff.core import colors
from tunediff.core.files import write_atomically
from tunediff.core.text import pluralize, seconds
from tunediff.report import reading, sections, style, tables
from tunediff.report.charts import Build
from tunediff.report.context import ReportContext
from tunediff.report.result import JSON, PAGE, Result
from tunediff.report.sections import Block
from tunediff.report.text import candidates_table

Contents = list[tuple[str, str, list[Block]]]
"""(id, heading, blocks) of the sections that say something."""


def of_search(about: ReportContext) -> Contents:
    """Return the sections of a search, in reading order."""
    better = about.highlights.winner is not None and about.evidence.better(about.highlights.winner)
    why = "Why it wins" if about.evidence.winner else "Why it is better"
    parts = (
        ("result", "Result", sections.result),
        ("study", "The study", tables.study),
        ("curves", "All trials", sections.curves),
        ("why", why if better else f"{about.best_words} and the baseline", sections.why),
        ("samples", "Samples", sections.samples),
        ("importance", "Knob importance", sections.importance),
        ("effects", "Knob effects", sections.effects),
        ("trade-offs", "Trade-offs", sections.trade_offs),
        ("failures", "Failures", tables.failures),
        ("trials", "Every trial", tables.trials),
        ("reproduce", "Reproduce", tables.reproduce),
    )
    made = [
        (name, heading[:1].upper() + heading[1:], build(about)) for name, heading, build in parts
    ]
    return [section for section in made if section[2]]


def figures(about: ReportContext) -> dict[str, Build]:
    """Return what builds each figure of the page, by name; it returns None for no figure."""
    blocks = [part for _, _, blocks in of_search(about) for part in blocks]
    return {part["name"]: part["build"] for part in blocks if part["kind"] == "figure"}


def write_search(about: ReportContext, out: Path) -> Path:
    """Write page and JSON of a search into `out`; return the page. Raises `OSError`."""
    results, now = about.results, about.now
    space, running = results.space, [one for one in results.trials if not one.finished]
    judged_by = f"time to {results.target}" if results.by_time else results.title
    per_trial = f"{seconds(space.budget.per_trial_s)} of {results.clock.what} per trial"
    planned, ended = space.budget.trials, len(results.trials) - len(running)
    confirmed, session = about.evidence.confirmation, about.sessions[-1] if about.sessions else None
    state = "running, or killed"
    if ended >= planned:
        complete = not about.confirming or (confirmed is not None and confirmed.ended)
        state = "finished" if complete else "trials finished, confirming runs not complete"
    elif session is None or session.end is not None:
        state = "" if session is None else "ended" if session.complete else "interrupted"
    left_out = journals.not_begun(results, about.sessions)
    latest = max((trial.last_written for trial in results.trials), default=0.0)
    written = time.strftime("written %Y-%m-%d %H:%M", time.localtime(now))
    said = [
        state,
        f"{ended:,} of {pluralize(planned, 'trial')} ended",
        f"{len(running)} under way" if state.startswith("running") else "",
        f"not begun: {left_out}" if left_out and ended < planned else "",
        written,
        f"last update {seconds(max(0.0, now - latest))} earlier"
        if state.startswith("running") and latest
        else "",
    ]
    return _write(
        out,
        title=results.folder.name,
        about=f"{space.workload.title}, {per_trial}, judged by {judged_by}",
        state=" · ".join(filter(None, said)),
        sections=of_search(about),
        command=about.command("report"),
        foot=f"Data: trials.csv and curves.csv in {results.folder}",
        found=about.result,
    )


def write_sides(comparison: Comparison, out: Path) -> Path:
    """Write page and JSON of a comparison into `out`; return the page. Raises `OSError`."""
    found = reading.of_sides(comparison)
    length = f"{sides.run_length(comparison)} per run, judged by {found.metric}"
    return _write(
        out,
        title=comparison.folder.name,
        about="; ".join([length, *found.workers]),
        state="",
        sections=tables.of_sides(comparison, found),
        foot=f"Data: pairs.csv in {comparison.folder}",
        found=found,
    )


def write_finished(folder: Path, found: Result) -> Path:
    """Write page and JSON of finished runs into a folder; return the page. Raises `OSError`."""
    first, *more = (sections.block("p", line) for line in found.summary)
    rows = sections.table(candidates_table(found), words=2, stacks=True)
    return _write(
        folder,
        title=folder.name,
        about=f"{found.runs} finished runs, by {found.objective}",
        state="",
        sections=[("result", "Result", [first | {"kind": "lead"}, rows, *more])],
        foot="Data: runs/ in this folder",
        found=found,
    )


def _write(out: Path, found: Result, **content: object) -> Path:
    loader = jinja2.PackageLoader("tunediff.report", "templates")
    surroundings = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
    surroundings.filters |= {"base64": _base64, "drawn": _drawn}
    template = surroundings.get_template("page.html")
    page = template.render(winner=colors.WINNER, baseline=colors.BASELINE, **content)
    printed = json.dumps(reading.as_json(found), indent=1, default=str)
    for name, text in ((PAGE, page), (JSON, printed)):
        data = text.encode("utf-8", "replace")
        write_atomically(out / name, lambda file, data=data: file.write(data))  # type: ignore[misc]
    return out / PAGE


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _drawn(build: Build) -> str:
    """Return a figure as SVG in base64; '' where there is none."""
    return _base64(style.draw(build, "svg") or b"")
