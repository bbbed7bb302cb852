"""The report of a search: one HTML file that needs nothing else, and its data as CSV and PNG beside it.

A section says in a sentence what is to be seen, and is left out where there is nothing. Facts come from `results`;
everything that a file holds is escaped by `html`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tunediff.core.environment import hardware
from tunediff.core.text import pluralize
from tunediff.report.context import ReportContext, ruler
from tunediff.report.files import FOLDER, Files, listed, write
from tunediff.report.html import Html, el, join, page
from tunediff.report.sections import curves, knobs, reproduce, speed, trials, why, won
from tunediff.report.words import duration

PAGE = "report.html"

Section = Callable[[ReportContext, Files], Html | None]

SECTIONS: tuple[tuple[str, str, Section], ...] = (
    ("won", "What won", won.won),
    ("seeds", "All configurations over their seeds", curves.seeds),
    ("study", "The study", trials.study),
    ("curves", "{label} against {seconds}", curves.curves),
    ("longer", "With longer budgets", curves.longer),
    ("why", "{why}", why.why),
    ("samples", "Pictures", won.samples),
    ("importance", "Which knobs matter", knobs.importance),
    ("effects", "What each knob does", knobs.effects),
    ("trade-offs", "Trade-offs", speed.trade_offs),
    ("compile", "When torch.compile pays", speed.compiling),
    ("failures", "Failures", trials.failures),
    ("trials", "Every trial", trials.trials),
    ("reproduce", "Run it again", reproduce.reproduce),
)
"""(id, heading, content), in reading order."""


def write_all(subject: ReportContext, out: Path) -> dict[str, Path]:
    """Write the page and its data into `out`; returns their paths by what they are. Raises `OSError`."""
    files, sections = Files(out / FOLDER), list[tuple[str, str, Html]]()
    for name, heading, build in SECTIONS:
        if (content := build(subject, files)) is not None:
            words = {"why": why.heading(subject), "label": subject.label, "seconds": subject.found.clock.seconds}
            named = heading.format(**words)
            sections.append((name, named, content))
    text = page(f"{subject.found.folder.name}: report", _head(subject), sections, _foot(subject, files))
    write(out / PAGE, text.encode("utf-8", "replace"))
    files.tidy()
    return {"report": out / PAGE, "data": out / FOLDER}


def _head(subject: ReportContext) -> Html:
    space, said = subject.found.space, ruler(subject.found)
    each = f"{duration(subject.budget_s)} of {space.budget.clock.what} per trial"
    about = f"{space.workload.title}, {each}, judged by {subject.label}"
    # What two machines differ in counts for every figure below, and a processor's name does not tell it.
    where = " and ".join(dict.fromkeys(filter(None, (hardware(trial.environment) for trial in subject.found.trials))))
    return join(
        el("h1", subject.found.folder.name),
        el("p", f"{about}: {said}" if said else about, class_="soft"),
        el("p", f"Measured on {where}.", class_="soft") if where else None,
        el("p", _state(subject), class_="state"),
    )


def _state(subject: ReportContext) -> str:
    """Whether the search is over, and how fresh this is."""
    trials, planned = subject.found.trials, subject.found.space.budget.trials
    begun = sum(not trial.finished for trial in trials)
    count = f"{len(trials) - begun:,} of {pluralize(planned, 'trial')} ended"
    written = time.strftime("written %Y-%m-%d %H:%M", time.localtime(subject.now))
    if len(trials) - begun >= planned:
        return f"finished · {count} · {written}"
    if not subject.sessions:
        return f"{count} · {written}"
    if subject.sessions[-1].end is not None:
        return f"interrupted · {count} · {written}"
    last = reproduce.latest(subject)
    age = f" · last news {duration(max(0.0, subject.now - last))} before" if last else ""
    return f"running, or killed · {count}, {begun} under way · {written}{age}"


def _foot(subject: ReportContext, files: Files) -> Html:
    links = listed([el("a", name, href=f"{FOLDER}/{name}") for name in sorted(files.written)])
    command = el("code", subject.command("report"))
    again = el("p", "Written by ", command, "; again while the search runs, for newer numbers.")
    return join(again, el("p", "Data: ", links))
