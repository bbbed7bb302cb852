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
"""Marks of rows: a knob that changes nothing here; other processes used the machine at the same
time."""

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
    """The ten longest operations of the first run, with the columns `study.OPERATIONS`; empty
    without a profile."""

    @property
    def status(self) -> str:
        """Return how its runs ended: `ok`, or `ok, oom` if they differ; `running` for a run that
        has not ended."""
        return ", ".join(dict.fromkeys(trial.status or "running" for trial in self.runs))

    @property
    def reason(self) -> str:
        """Return what failed in the first run of which that is known, such as a profile after it;
        "" for nothing."""
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
        """Return the cell of a column: a knob, a quantity, or a property of the row; None if it is
        unknown."""
        words = {
            "configuration": self.label,
            "trial": self.runs[0].name,
            "status": self.status,
            "runs": sum(trial.status == "ok" for trial in self.runs),
        }
        return words[column] if column in words else self.knobs.get(column, self.values.get(column))


@dataclasses.dataclass(frozen=True)
class Table:
    """The table of a study."""

    study: Study
    rows: list[Row]
    varied: list[str]
    """The searched knobs, except the seed, by which rows differ, in the order of the search
    file."""

    @property
    def columns(self) -> list[str]:
        """Return the study's columns, with `status` if a run did not end ok."""
        failed = any(row.status != "ok" for row in self.rows)
        return [
            *self.study.columns,
            *(["status"] if failed and "status" not in self.study.columns else []),
        ]

    @property
    def all_disturbed(self) -> bool:
        """Whether other processes used the machine during every run, so that a note replaces the
        marks."""
        return all(row.disturbed for row in self.rows) and bool(self.rows)

    def marks(self, row: Row) -> str:
        """Return the marks beside the name of a row."""
        disturbed = row.disturbed and not self.all_disturbed
        return NO_EFFECT * bool(row.without_effect) + DISTURBED * disturbed

    def records(self) -> list[dict[str, object]]:
        """Return one dictionary per line: the study's columns, then status and remarks."""
        records = []
        for row, line in self._lines():
            details = {
                **({"place": row.place} if row.place else {}),
                "trial": row.runs[0].name,
                "status": row.status,
                "reason": row.reason,
                "not_effective": "; ".join(
                    f"{name}: {why}" for name, why in row.without_effect.items()
                ),
                "disturbed": row.disturbed,
            }
            records.append(line | {key: value for key, value in details.items() if key not in line})
        return records

    def frame(self) -> pd.DataFrame:
        """Return the table for study.csv, in the units that the column names end with."""
        return pd.DataFrame(self.records())

    def markdown(self) -> str:
        """Return the table and its notes in Markdown."""
        return "\n".join(
            [markdown_table(self.cells(80)), "", *(f"- {note}" for note in self.notes())]
        ).rstrip()

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
        if any(
            row.values.get(name)
            for row in self.rows
            for name in self.columns
            if name.startswith("predicted_")
        ):
            notes.append(
                "prediction, not a measurement: computed from the steps of one and two ddp workers"
            )
        return list(dict.fromkeys(notes))

    def _lines(self) -> Iterator[tuple[Row, dict[str, object]]]:
        """Yield (row, values) of every line: one line per row, or one per operation in a study of
        operations."""
        for row in self.rows:
            for operation in (
                row.operations.to_dict("records") or [{}] if self.study.of_operations else [{}]
            ):
                yield (
                    row,
                    {
                        name: operation.get(name) if name in OPERATIONS else row.value(name)
                        for name in self.columns
                    },
                )

    def cells(self, most: int) -> list[list[str]]:
        """Return headings and cells as text; names are cut after `most` characters."""
        lines = [[self.study.quantity(column).heading for column in self.columns]]
        for row, line in self._lines():
            first, *others = [
                shown(self.study, column, value)[:most] for column, value in line.items()
            ]
            lines.append([f"{first} {self.marks(row)}".rstrip(), *others])
        return lines


def shown(study: Study, column: str, value: object) -> str:
    """Return a value as text, in the unit of its column's heading; '' if it is unknown."""
    if not has_value(value):
        return ""
    if column not in {**study.numbers, **OPERATIONS}:
        return knob_value(value)
    return (
        number(float(value) * study.quantity(column).scale) if is_number(value) else number(value)
    )


def table(results: Results) -> Table:
    """Return the table of a search with a `study:` section. Raises `ConfigError` if it has none."""
    if results.space.study is None:
        raise ConfigError(f"{results.folder.name}: its search file has no study:")
    rows = [_row(results, outcome.runs) for outcome in results.outcomes]
    if results.space.kind == "ladder":
        rows = _of_ladder(results, rows)
    if results.space.kind == "grid":  # in the order of the choices in the file, not of the runs
        places = {
            dimension.name: (dimension.choices or ()).index for dimension in searched(results)
        }
        rows.sort(
            key=lambda row: [
                at(row.knobs[name]) if name in row.knobs else -1 for name, at in places.items()
            ]
        )
    # Derived quantities need the baseline and the row before each.
    base = _find(rows, cfg.flat(results.space.baseline))
    if base is not None and not any(trial.status == "ok" for trial in base.runs):
        base = None  # values of an unfinished or failed baseline are no reference
    compared = [
        dataclasses.replace(row, values=row.values | _derived(row, rows, base, before))
        for before, row in zip([None, *rows], rows, strict=False)
    ]
    names = [dimension.name for dimension in searched(results)]
    varied = [name for name in names if len({repr(row.config.get(name)) for row in rows}) > 1]
    return Table(results.space.study, compared, varied)


# ---- rows
def _row(results: Results, runs: list[TrialRecord]) -> Row:
    """Return the row of a configuration, without the quantities that are derived from other
    rows."""
    baseline, drawn = cfg.flat(results.space.baseline), _without(runs[0].drawn)
    changed = {
        name: value
        for name, value in drawn.items()
        if name not in baseline or baseline[name] != value
    }
    # Runs that ended ok count; if there are none, running ones do. Values of failed runs are no
    # results.
    counted = [trial for trial in runs if trial.status == "ok"] or [
        trial for trial in runs if not trial.finished
    ]
    folder = results.folder / "trials"
    measured = [
        _measured(folder / trial.name, trial, results.space.study)
        for trial in counted
        if trial.points
    ]
    means = pd.DataFrame(measured).dropna(axis="columns").mean()
    config = _without(runs[0].config)
    idle = {dimension.name for dimension in results.space.dimensions} - set(drawn)
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


def _of_ladder(results: Results, rows: list[Row]) -> list[Row]:
    """Return the rows that have begun: the base, every rung with those before it, then every rung
    alone."""
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


def _without(knobs: Knobs, left: str = "seed") -> dict[str, object]:
    return {
        name: value
        for name, value in knobs.items()
        if name != left and not name.startswith(f"{left}.")
    }


def _measured(folder: Path, trial: TrialRecord, study: Study | None) -> dict[str, float]:
    """Return the numbers of the last point, the seconds of every part, and `set_samples`, the size
    of the data set."""
    last_values = {name: last(trial, name) for name in (study.numbers if study else ())}
    values = {
        name: float(value)
        for name, value in last_values.items()
        if is_number(value) and math.isfinite(value)
    }
    seconds = seconds_of(trial)
    values |= {
        f"{part}_s": float(seconds[part]) for part in ("compile", "setup") if part in seconds
    }
    values |= {"running_s": float(sum(seconds.values()))} if seconds else {}
    events = [
        event
        for event in record.events(folder)
        if event["event"] == "about" and event.get("samples")
    ]
    return values | ({"set_samples": float(events[-1]["samples"])} if events else {})


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
    derived, rate = dict[str, float](), row.values.get("samples_per_s")
    if rate and "set_samples" in row.values:
        derived["epoch_s"] = row.values["set_samples"] / rate
        if "data_wait_share" in row.values:
            derived["epoch_data_wait_s"] = derived["epoch_s"] * row.values["data_wait_share"]
    # Against the base, and against the previous rung.
    if speed := _ratio(row, base):
        derived |= {"versus_baseline": speed, "percent_of_base": 100 * speed}
    if memory := _ratio(row, base, "peak_memory_mib"):
        derived["memory_percent_of_base"] = 100 * memory
    if row.place == "together" and (gain := _ratio(row, before)):
        derived["versus_previous"] = gain
    # Scaling: against the same configuration with one worker.
    alone, workers = (
        _find(rows, {**row.config, "parallel.workers": 1}),
        row.runs[0].config["parallel.workers"],
    )
    if speedup := _ratio(row, alone):
        derived |= {"speedup_over_one_worker": speedup, "scaling_efficiency": speedup / workers}
    if alone is not None and workers == 2 and row.config["parallel.strategy"] == "ddp":
        derived |= _predicted(alone.values, row.values)
    # torch.compile: against the same configuration without it.
    eager = [other for other in rows if other.config["compile.mode"] == "none"]
    if row.config["compile.mode"] != "none" and (
        faster := _ratio(row, _find(eager, row.config, but_for="compile"))
    ):
        derived["versus_uncompiled"] = faster
        if paid := break_even(row.values.get("compile_s"), rate, faster):
            derived["samples_to_break_even"], derived["break_even_s"] = paid
    return derived


def _predicted(
    one_worker: Mapping[str, float], two_workers: Mapping[str, float]
) -> dict[str, float]:
    """Predict speed-ups on more devices than were used; {} if the parts of a step are unknown.

    The arguments are the values of one worker and of two ddp workers.
    """
    if not all(
        run.get(f"step_{part}s", 0.0) > 0
        for run in (one_worker, two_workers)
        for part in ("", "forward_", "backward_")
    ):
        return {}
    return {
        f"predicted_speedup_{n}": (
            one_worker["step_s"] / predicted_step_s(one_worker, two_workers, n)
        )
        for n in PREDICTED
    }


def _ratio(row: Row, other: Row | None, name: str = "samples_per_s") -> float | None:
    mine, theirs = row.values.get(name), other.values.get(name) if other is not None else None
    return mine / theirs if mine is not None and theirs else None
