"""Write the report of a search: one self-contained HTML file, and its data as CSV and PNG beside
it.

Every section begins with a sentence that states its result, and is left out if it has none. Facts
come from `tunediff.analysis`; `html` escapes everything that comes from files.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from tunediff.analysis.journals import not_begun
from tunediff.core.environment import hardware
from tunediff.core.files import write_atomically
from tunediff.core.text import pluralize
from tunediff.report.context import ReportContext, protocol
from tunediff.report.files import FOLDER, Figures, Files, listed
from tunediff.report.html import Html, el, join, page
from tunediff.report.sections import curves, knobs, reproduce, speed, trials, why, won
from tunediff.report.words import duration

PAGE = "report.html"

Section = Callable[[ReportContext, Files], Html | None]

SECTIONS: tuple[tuple[str, str, Section], ...] = (
    ("won", "Result", won.won),
    ("seeds", "All configurations over their seeds", curves.seeds),
    ("study", "The study", trials.study),
    ("curves", "{label} against {seconds}", curves.curves),
    ("longer", "With longer budgets", curves.longer),
    ("why", "{why}", why.why),
    ("samples", "Samples", won.samples),
    ("importance", "Knob importance", knobs.importance),
    ("effects", "Knob effects", knobs.effects),
    ("trade-offs", "Trade-offs", speed.trade_offs),
    ("compile", "When torch.compile pays", speed.compiling),
    ("failures", "Failures", trials.failures),
    ("trials", "Every trial", trials.trials),
    ("reproduce", "Reproduce", reproduce.reproduce),
)
"""(id, heading, function that builds the content), in reading order."""


def write_all(context: ReportContext, out: Path) -> dict[str, Path]:
    """Write the page and its data into `out` and return both paths by `report` and `data`. Raises
    `OSError`."""
    files, sections = Files(out / FOLDER), list[tuple[str, str, Html]]()
    for name, heading, build in SECTIONS:
        if (content := build(context, files)) is not None:
            words = {
                "why": why.heading(context),
                "label": context.label,
                "seconds": context.results.clock.seconds,
            }
            named = heading.format(**words)
            # The name of an objective may begin in lower case, a heading does not.
            sections.append((name, named[:1].upper() + named[1:], content))
    text = page(
        f"{context.results.folder.name}: report", _head(context), sections, _foot(context, files)
    )
    write_atomically(out / PAGE, lambda file: file.write(text.encode("utf-8", "replace")))
    files.tidy()
    return {"report": out / PAGE, "data": out / FOLDER}


def figures(context: ReportContext) -> dict[str, Callable[[], Figure | None]]:
    """Return what builds each figure of the page, by name; it returns None where there is nothing
    to draw."""
    collected = Figures()
    for _, _, build in SECTIONS:
        build(context, collected)
    return collected.by_name


def _head(context: ReportContext) -> Html:
    space, protocol_text = context.results.space, protocol(context.results)
    budget = f"{duration(context.budget_s)} of {space.budget.clock.what} per trial"
    about = f"{space.workload.title}, {budget}, judged by {context.label}"
    # Trials on different machines are not comparable, and a processor's name alone does not show a
    # difference.
    where = " and ".join(
        dict.fromkeys(
            filter(None, (hardware(trial.environment) for trial in context.results.trials))
        )
    )
    return join(
        el("h1", context.results.folder.name),
        el("p", f"{about}: {protocol_text}" if protocol_text else about, class_="soft"),
        el("p", f"Measured on {where}.", class_="soft") if where else None,
        el("p", _state(context), class_="state"),
    )


def _state(context: ReportContext) -> str:
    """Return whether the search is over, how many trials ended, and when the report was written."""
    trials, planned = context.results.trials, context.results.space.budget.trials
    ended = sum(trial.finished for trial in trials)
    count = f"{ended:,} of {pluralize(planned, 'trial')} ended"
    written = time.strftime("written %Y-%m-%d %H:%M", time.localtime(context.now))
    if ended >= planned:
        confirmation = context.evidence.confirmation
        whole = not context.confirming or (confirmation is not None and confirmation.over)
        state = "finished" if whole else "trials finished, confirming runs not complete"
        return f"{state} · {count} · {written}"
    if not context.sessions:
        return f"{count} · {written}"
    if context.sessions[-1].end is not None:
        left_out = (
            f" · not begun: {words}"
            if (words := not_begun(context.results, context.sessions))
            else ""
        )
        return (
            f"{'ended' if context.sessions[-1].complete else 'interrupted'} · {count}{left_out} ·"
            f" {written}"
        )
    last = reproduce.latest(context)
    age = f" · last update {duration(max(0.0, context.now - last))} earlier" if last else ""
    return f"running, or killed · {count}, {len(trials) - ended} under way · {written}{age}"


def _foot(context: ReportContext, files: Files) -> Html:
    links = listed([el("a", name, href=f"{FOLDER}/{name}") for name in sorted(files.written)])
    command = el("code", context.command("report"))
    again = el("p", "Written by ", command, "; run it again during the search for newer numbers.")
    return join(again, el("p", "Data: ", links))
