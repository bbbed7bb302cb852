"""Write the report of a search: one self-contained HTML file.

Every section begins with a sentence that states its result, and is left out if it has none. Facts
come from `tunediff.analysis`; `html` escapes everything that comes from files.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tunediff.analysis.journals import not_begun
from tunediff.core.files import write_atomically
from tunediff.core.text import pluralize
from tunediff.report import html
from tunediff.report.context import ReportContext
from tunediff.report.figures import Build, Figures
from tunediff.report.html import PAGE, Html, el, join
from tunediff.report.sections import curves, knobs, reproduce, seeds, speed, trials, why, won
from tunediff.report.words import duration

Section = Callable[[ReportContext, Figures], Html | None]

SECTIONS: tuple[tuple[str, str, Section], ...] = (
    ("won", "Result", won.won),
    ("seeds", "All configurations over their seeds", seeds.seeds),
    ("study", "The study", trials.study),
    ("curves", "{label} against {seconds}: all trials", curves.curves),
    ("why", "{why}", why.why),
    ("samples", "Samples", won.samples),
    ("importance", "Knob importance", knobs.importance),
    ("effects", "Knob effects", knobs.effects),
    ("trade-offs", "Trade-offs", speed.trade_offs),
    ("failures", "Failures", trials.failures),
    ("trials", "Every trial", trials.trials),
    ("reproduce", "Reproduce", reproduce.reproduce),
)
"""(id, heading, function that builds the content), in reading order."""


def write_all(context: ReportContext, out: Path) -> dict[str, Path]:
    """Write the page into `out`; return its path as `report`. Raises `OSError`."""
    figures, sections = Figures(), list[tuple[str, str, Html]]()
    seconds, about_best = context.results.clock.seconds, why.heading(context)
    for name, heading, build in SECTIONS:
        if (content := build(context, figures)) is not None:
            title = heading.format(why=about_best, label=context.label, seconds=seconds)
            # The name of an objective may begin in lower case, a heading does not.
            sections.append((name, title[:1].upper() + title[1:], content))
    command = el("code", context.command("report"))
    again = el("p", "Written by ", command, "; run it again during the search for newer numbers.")
    foot = join(again, el("p", f"Data: trials.csv and curves.csv in {context.results.folder}"))
    write(out, f"{context.results.folder.name}: report", _head(context), sections, foot)
    return {"report": out / PAGE}


def write(
    out: Path, title: str, head: Html, sections: list[tuple[str, str, Html]], foot: Html
) -> None:
    """Write a page into the folder `out`; for the other arguments see `html.page`."""
    content = html.page(title, head, sections, foot).encode("utf-8", "replace")
    write_atomically(out / PAGE, lambda file: file.write(content))


def figures(context: ReportContext) -> dict[str, Build]:
    """Return what builds each figure of the page, by name; it returns None for no figure."""
    drawn = Figures(drawn=False)
    for _, _, build in SECTIONS:
        build(context, drawn)
    return drawn.builders


def _head(context: ReportContext) -> Html:
    results, space = context.results, context.results.space
    budget = f"{duration(space.budget.per_trial_s)} of {results.clock.what} per trial"
    judged_by = f"time to {context.results.target}" if context.results.by_time else context.label
    about = f"{space.workload.title}, {budget}, judged by {judged_by}"
    return join(
        el("h1", results.folder.name),
        el("p", about, " ", el("span", _state(context), class_="state"), class_="soft"),
    )


def _state(context: ReportContext) -> str:
    """Return whether the search is over, how many trials ended, and when the page was written."""
    results, sessions = context.results, context.sessions
    planned = results.space.budget.trials
    ended = sum(trial.finished for trial in results.trials)
    count = f"{ended:,} of {pluralize(planned, 'trial')} ended"
    written = time.strftime("written %Y-%m-%d %H:%M", time.localtime(context.now))
    if ended >= planned:
        confirmation = context.evidence.confirmation
        complete = not context.confirming or (confirmation is not None and confirmation.ended)
        state = "finished" if complete else "trials finished, confirming runs not complete"
        words = [state, count, written]
    elif not sessions:
        words = [count, written]
    elif sessions[-1].end is not None:
        left_out = not_begun(results, sessions)
        state = "ended" if sessions[-1].complete else "interrupted"
        words = [state, count, f"not begun: {left_out}" if left_out else "", written]
    else:
        under_way = f"{len(results.trials) - ended} under way"
        words = ["running, or killed", f"{count}, {under_way}", written]
        if latest := max((trial.last_written for trial in results.trials), default=0.0):
            words.append(f"last update {duration(max(0.0, context.now - latest))} earlier")
    return " · ".join(filter(None, words))
