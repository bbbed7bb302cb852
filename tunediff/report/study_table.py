"""The table of a study: its lines, marks and notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pandas as pd

from tunediff import config as cfg
from tunediff.analysis import Results, is_number
from tunediff.analysis.importance import searched
from tunediff.config import ConfigError
from tunediff.core.text import knob_value, number
from tunediff.report.study_rows import Row, derived, find, row_of, rungs
from tunediff.report.words import has_value, markdown_table, plain_table
from tunediff.search_space.study import OPERATIONS, Study

NO_EFFECT, DISTURBED = "†", "‡"
"""Marks of rows: a knob without effect; other processes used the machine meanwhile."""


@dataclasses.dataclass(frozen=True)
class StudyTable:
    """The table of a study."""

    study: Study
    rows: list[Row]
    varied: list[str]
    """The searched knobs by which rows differ, in the order of the file, without the seed."""

    @property
    def columns(self) -> list[str]:
        """Return the study's columns, with `status` if a run did not end ok."""
        names = list(self.study.columns)
        if any(row.status != "ok" for row in self.rows) and "status" not in names:
            names.append("status")
        return names

    @property
    def all_disturbed(self) -> bool:
        """Whether others used the machine during every run: then a note replaces the marks."""
        return all(row.disturbed for row in self.rows) and bool(self.rows)

    def marks(self, row: Row) -> str:
        """Return the marks after the name of a row."""
        disturbed = row.disturbed and not self.all_disturbed
        return NO_EFFECT * bool(row.without_effect) + DISTURBED * disturbed

    def records(self) -> list[dict[str, object]]:
        """Return one dictionary per line: the study's columns, then status and remarks."""
        records = []
        for row, line in self._lines():
            idle = "; ".join(f"{name}: {why}" for name, why in row.without_effect.items())
            details: dict[str, object] = {"place": row.place} if row.place else {}
            details |= {"trial": row.runs[0].name, "status": row.status, "reason": row.reason}
            details |= {"not_effective": idle, "disturbed": row.disturbed}
            records.append(line | {key: value for key, value in details.items() if key not in line})
        return records

    def frame(self) -> pd.DataFrame:
        """Return the table for study.csv, in the units that the column names end with."""
        return pd.DataFrame(self.records())

    def markdown(self) -> str:
        """Return the table and its notes in Markdown."""
        notes = [f"- {note}" for note in self.notes()]
        return "\n".join([markdown_table(self.cells(80)), "", *notes]).rstrip()

    def text(self, width: int | None = None) -> str:
        """Return the table and its notes for a terminal of `width` columns (None: unlimited)."""
        return "\n".join([plain_table(self.cells(50), width), "", *self.notes()]).rstrip()

    def notes(self) -> list[str]:
        """Return what the marks mean, and why runs failed."""
        notes = [
            f"{NO_EFFECT} {name} changes nothing here: {why}"
            for row in self.rows
            for name, why in row.without_effect.items()
        ]
        if self.all_disturbed:
            notes.append("others used the machine during every run")
        elif any(row.disturbed for row in self.rows):
            notes.append(f"{DISTURBED} others used the machine at the same time")
        notes += [f"{row.label}: {row.status}: {row.reason}" for row in self.rows if row.reason]
        predicted = [name for name in self.columns if name.startswith("predicted_")]
        if any(row.values.get(name) for row in self.rows for name in predicted):
            notes.append(
                "prediction, not a measurement: computed from the steps of one and two ddp workers"
            )
        return list(dict.fromkeys(notes))

    def _lines(self) -> Iterator[tuple[Row, dict[str, object]]]:
        """Yield (row, values) of every line: one per row, or one per operation of it."""
        for row in self.rows:
            operations = row.operations.to_dict("records") if self.study.of_operations else []
            for operation in operations or [{}]:
                cells = {}
                for name in self.columns:
                    cells[name] = operation.get(name) if name in OPERATIONS else row.value(name)
                yield row, cells

    def cells(self, limit: int) -> list[list[str]]:
        """Return headings and cells as text; names are cut after `limit` characters."""
        lines = [[self.study.quantity(column).heading for column in self.columns]]
        for row, line in self._lines():
            cells = [shown(self.study, column, value)[:limit] for column, value in line.items()]
            lines.append([f"{cells[0]} {self.marks(row)}".rstrip(), *cells[1:]])
        return lines


def shown(study: Study, column: str, value: object) -> str:
    """Return a value as text, in the unit of its column's heading; '' if it is unknown."""
    if not has_value(value):
        return ""
    if column not in {**study.numbers, **OPERATIONS}:
        return knob_value(value)
    return number(float(value) * study.quantity(column).scale if is_number(value) else value)


def table(results: Results) -> StudyTable:
    """Return the table of a search with a `study:` section. Raises `ConfigError` if it has none."""
    space = results.space
    if space.study is None:
        raise ConfigError(f"{results.folder.name}: its search file has no study:")
    rows = [row_of(results, outcome.runs) for outcome in results.outcomes]
    if space.kind == "ladder":
        rows = rungs(results, rows)
    names = [dimension.name for dimension in searched(results)]
    if space.kind == "grid":
        # In the order of the choices in the file, not of the runs.
        choices = {dimension.name: dimension.choices or () for dimension in searched(results)}

        def order(row: Row) -> list[int]:
            return [
                choices[name].index(row.knobs[name]) if name in row.knobs else -1 for name in names
            ]

        rows.sort(key=order)
    # Values of an unfinished or failed baseline are no reference.
    base = find(rows, cfg.flat(space.baseline))
    base = base if base is not None and base.ok else None
    compared = []
    for before, row in zip([None, *rows], rows, strict=False):
        values = row.values | derived(row, rows, base, before)
        compared.append(dataclasses.replace(row, values=values))
    varied = [name for name in names if len({repr(row.config.get(name)) for row in rows}) > 1]
    return StudyTable(space.study, compared, varied)
