"""The table and the figure of a search file's `study:` section."""

from __future__ import annotations

from tunediff.report import study_figure, study_table
from tunediff.report.files import Files
from tunediff.report.html import Html, el, join, table
from tunediff.report.outputs import measured_on
from tunediff.report.subject import Subject, lead, note


def study(subject: Subject, files: Files) -> Html | None:
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
