"""Build the table of a study from the folder of its search: quantities, marks and notes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd

from tunediff import config as cfg
from tunediff.analysis import Results, disturbed, is_number, last, seconds_of
from tunediff.analysis.importance import searched
from tunediff.analysis.speed import break_even, predicted_step_s
from tunediff.config import ConfigError
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.text import knob_value, number
from tunediff.core.trial_record import TrialRecord
from tunediff.report.words import has_value, markdown_table, plain_table
from tunediff.search_space.study import OPERATIONS, PREDICTED, Study

NO_EFFECT, DISTURBED = "†", "‡"
"""Marks of rows: a knob without effect; other processes used the machine meanwhile."""

Knobs = Mapping[str, object]
"""Values by dotted name."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration with all its runs."""

    label: str
    """What differs from the baseline, or the rung of the ladder."""
    place: str
    """For a ladder `base`, `together` (with all rungs before it) or `alone`; otherwise ''."""
    changed: Knobs
    """The knobs that differ from the baseline; for a ladder those of the rung."""
    config: Knobs
    """All knobs except the seed."""
    knobs: Knobs
    """The knobs of `config` that apply: a searched knob with `when:` does not always apply."""
    runs: list[TrialRecord]
    values: dict[str, float]
    """Known quantities by name."""
    operations: pd.DataFrame
    """The first run's ten longest operations, as `study.OPERATIONS`; empty without a profile."""

    @property
    def ok(self) -> list[TrialRecord]:
        return [trial for trial in self.runs if trial.status == "ok"]

    @property
    def status(self) -> str:
        """Return how its runs ended: `ok`, or `ok, oom` if they differ."""
        return ", ".join(dict.fromkeys(trial.status or "running" for trial in self.runs))

    @property
    def reason(self) -> str:
        """Return the first known reason why something failed, such as a profile after the run."""
        return next((trial.reason for trial in self.runs if trial.reason), "")

    @property
    def without_effect(self) -> dict[str, str]:
        """Return its changed knobs that have no effect here, with the reason."""
        reasons = {name: why for trial in self.runs for name, why in trial.not_effective.items()}
        return {name: reasons[name] for name in self.changed if name in reasons}

    @property
    def disturbed(self) -> bool:
        """Whether other processes used the machine during a run."""
        return any(map(disturbed, self.runs))

    def value(self, column: str) -> object:
        """Return the cell of a column: a knob, a quantity, or a property of the row."""
        words: dict[str, object] = {"configuration": self.label, "trial": self.runs[0].name}
        words |= {"status": self.status, "runs": len(self.ok)}
        return words[column] if column in words else self.knobs.get(column, self.values.get(column))


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
    rows = [_row(results, outcome.runs) for outcome in results.outcomes]
    if space.kind == "ladder":
        rows = _rungs(results, rows)
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
    base = _find(rows, cfg.flat(space.baseline))
    base = base if base is not None and base.ok else None
    compared = []
    for before, row in zip([None, *rows], rows, strict=False):
        derived = _derived(row, rows, base, before)
        compared.append(dataclasses.replace(row, values=row.values | derived))
    varied = [name for name in names if len({repr(row.config.get(name)) for row in rows}) > 1]
    return StudyTable(space.study, compared, varied)


# ---- rows
def _row(results: Results, runs: list[TrialRecord]) -> Row:
    """Return the row of a configuration, without the quantities that need other rows."""
    baseline, folder = cfg.flat(results.space.baseline), results.folder / "trials"
    config, drawn = _without(runs[0].config), _without(runs[0].drawn)
    missing = object()
    changed = {n: value for n, value in drawn.items() if baseline.get(n, missing) != value}
    idle = {dimension.name for dimension in results.space.dimensions} - set(drawn)
    # Runs that ended ok count; without any, running ones do. Values of failed runs are no results.
    counted = [trial for trial in runs if trial.status == "ok"]
    counted = counted or [trial for trial in runs if not trial.finished]
    measured = [
        _measured(folder / trial.name, trial, results.space.study)
        for trial in counted
        if trial.points
    ]
    means = pd.DataFrame(measured).dropna(axis="columns").mean()
    return Row(
        label=text.knobs(changed),
        place="",
        changed=changed,
        config=config,
        knobs={name: value for name, value in config.items() if name not in idle},
        runs=runs,
        values={str(name): float(mean) for name, mean in means.items()},
        operations=_operations(folder / runs[0].name / "operations.csv", results.space.operations),
    )


def _rungs(results: Results, rows: list[Row]) -> list[Row]:
    """Return the rows that have begun: the base, every rung after those before it, and alone."""
    rungs = results.space.rungs
    points: list[tuple[str, str, Knobs, Knobs]] = [("base", "base", {}, {})]
    points += [(f"+ {rung.name}", "together", rung.knobs, rung.together) for rung in rungs]
    points += [
        (f"{rung.name} alone", "alone", rung.knobs, rung.alone) for rung in rungs if rung.alone
    ]
    ordered = []
    for label, place, knobs, point in points:
        if (row := _find(rows, cfg.flat(results.space.config(point)))) is not None:
            ordered.append(dataclasses.replace(row, label=label, place=place, changed=knobs))
    return ordered


def _find(rows: list[Row], knobs: Knobs, but_for: str = "seed") -> Row | None:
    """Return the row with these knobs; `but_for`: a knob or section that may differ."""
    target = _without(knobs, but_for)
    return next((row for row in rows if _without(row.config, but_for) == target), None)


def _without(knobs: Knobs, left_out: str = "seed") -> dict[str, object]:
    """Return knobs without one, or without a section."""
    prefix = f"{left_out}."
    return {name: value for name, value in knobs.items() if not f"{name}.".startswith(prefix)}


def _measured(folder: Path, trial: TrialRecord, study: Study | None) -> dict[str, float]:
    """Return the last point's numbers, the seconds by part, and `set_samples` of the data set."""
    values = {name: last(trial, name) for name in (study.numbers if study else ())}
    numbers = {n: float(v) for n, v in values.items() if is_number(v) and math.isfinite(v)}
    if seconds := seconds_of(trial):
        numbers["running_s"] = float(sum(seconds.values()))
        for part in ("compile", "setup"):
            if part in seconds:
                numbers[f"{part}_s"] = float(seconds[part])
    for event in record.events(folder):
        if event["event"] == "about" and event.get("samples"):
            numbers["set_samples"] = float(event["samples"])
    return numbers


def _operations(path: Path, steps: int) -> pd.DataFrame:
    """Return the ten longest operations of a profiled trial, with their calls and seconds per step.

    path: CSV file with the columns operation, calls, self_s, total_s, share. steps: how many were
    profiled.
    """
    if not steps or not path.exists():
        return pd.DataFrame()
    operations = pd.read_csv(path).nlargest(10, "self_s")
    return operations.assign(
        calls_per_step=operations["calls"] / steps, self_s_per_step=operations["self_s"] / steps
    )


# ---- derived
def _derived(row: Row, rows: list[Row], base: Row | None, before: Row | None) -> dict[str, float]:
    """Return the quantities that follow from the row's values and those of other rows.

    base: row of the baseline. before: the row above it, the previous rung of a ladder.
    """
    workers, rate = row.runs[0].config["parallel.workers"], row.values.get("samples_per_s")
    derived, alone = dict[str, float](), _find(rows, {**row.config, "parallel.workers": 1})
    if rate and "set_samples" in row.values:
        derived["epoch_s"] = row.values["set_samples"] / rate
        if "data_wait_share" in row.values:
            derived["epoch_data_wait_s"] = derived["epoch_s"] * row.values["data_wait_share"]
    # Against the baseline and the rung before.
    if faster := _ratio(row, base):
        derived |= {"versus_baseline": faster, "percent_of_base": 100 * faster}
    if larger := _ratio(row, base, "peak_memory_mib"):
        derived["memory_percent_of_base"] = 100 * larger
    if row.place == "together" and (faster := _ratio(row, before)):
        derived["versus_previous"] = faster
    # Against the same configuration with one worker.
    if faster := _ratio(row, alone):
        derived |= {"speedup_over_one_worker": faster, "scaling_efficiency": faster / workers}
    if alone is not None and workers == 2 and row.config["parallel.strategy"] == "ddp":
        derived |= _predicted(alone.values, row.values)
    # Against the same configuration without torch.compile.
    eager = [other for other in rows if other.config["compile.mode"] == "none"]
    plain = _find(eager, row.config, but_for="compile")
    if row.config["compile.mode"] != "none" and (faster := _ratio(row, plain)):
        derived["versus_uncompiled"] = faster
        if paid := break_even(row.values.get("compile_s"), rate, faster):
            derived["samples_to_break_even"], derived["break_even_s"] = paid
    return derived


def _predicted(one: Mapping[str, float], two: Mapping[str, float]) -> dict[str, float]:
    """Predict speed-ups on more devices, from the values of one worker and of two ddp workers; {}
    if parts of a step are unknown."""
    parts = ("step_s", "step_forward_s", "step_backward_s")
    if not all(values.get(part, 0.0) > 0 for values in (one, two) for part in parts):
        return {}
    return {
        f"predicted_speedup_{n}": one["step_s"] / predicted_step_s(one, two, n) for n in PREDICTED
    }


def _ratio(row: Row, other: Row | None, name: str = "samples_per_s") -> float | None:
    value, reference = row.values.get(name), other.values.get(name) if other is not None else None
    return value / reference if value is not None and reference else None
