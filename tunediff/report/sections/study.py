"""The table and the figure of a search file's `study:` section."""

from __future__ import annotations

from tunediff.report import study_table
from tunediff.report.files import Files
from tunediff.report.html import Html, el, join, picture, table
from tunediff.report.outputs import draw_study
from tunediff.report.subject import Subject, lead, note


def study(subject: Subject, files: Files) -> Html | None:
    """The study as its search ended with it."""
    found, figure = subject.found, None
    if found.space.study is None or not found.trials:
        return None
    try:
        told = study_table.table(found)
        lines = iter(told.records())
    except (
        KeyError,
        TypeError,
        ValueError,
        ZeroDivisionError,
    ) as error:  # journals of another version, or a stranger's
        return el("p", f"The study's table cannot be made of these journals: {type(error).__name__}: {error}")
    files.csv("study", told.frame())
    rows = list[list[object]]()
    for row in told.rows:
        for _ in range(max(1, len(row.operations)) if told.study.of_operations else 1):
            line = next(lines)
            cells = [study_table.shown(told.study, column, line[column]) for column in told.columns]
            rows.append([f"{cells[0]} {told.marks(row)}".rstrip(), *cells[1:]])
    if told.study.has_figure:
        path = files.folder / "study.png"
        draw_study(found, told, path)
        files.written.append(path.name)
        image = picture("png", path.read_bytes(), "the figure of the study")
        figure = files.figure("study", image, "The study's own figure.")
    return join(
        lead(told.study.title or "The study's own table and figure."),
        figure,
        table([told.study.quantity(column).heading for column in told.columns], rows),
        *map(note, told.notes()),
        note(files.links("study")),
    )
