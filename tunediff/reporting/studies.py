"""The table that a study ends with, made from the folder of its search alone: quantities, marks and notes."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tunediff import config as cfg
from tunediff import record
from tunediff.cli import number
from tunediff.config import ConfigError
from tunediff.record import TrialRecord
from tunediff.results import Results
from tunediff.study import DERIVED, MEASURED, OPERATIONS, TOP, Study, quantity

NO_EFFECT, DISTURBED = "†", "‡"
"""Marks of rows: a knob that changes nothing here; others used the machine at the same time."""

OPERATIONS_FILE = "operations.csv"
"""In the folder of a trial that was profiled: operation, calls, self_s, total_s, share; the longest first."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration, with all its runs."""

    label: str
    """What differs from the baseline, or the rung of the ladder."""
    place: str
    """Of a ladder: `base`, `together` (with all rungs before) or `alone`; else ''."""
    changed: dict[str, Any]
    """The knobs that it tries: those that differ from the baseline, or the rung's own."""
    config: dict[str, Any]
    """Every knob by its dotted name, but for the seed."""
    knobs: dict[str, Any]
    """Those of them that apply: a searched knob with `when:` does not always."""
    runs: list[TrialRecord]
    values: dict[str, float]
    """Quantities by name, as far as they are known."""
    operations: list[dict[str, Any]]
    """The longest operations, of the first run."""

    @property
    def status(self) -> str:
        """How its runs ended: `ok`, or `ok, oom` where they differ; `running` is not over yet."""
        return ", ".join(dict.fromkeys(trial.status or "running" for trial in self.runs))

    @property
    def reason(self) -> str:
        """Why a run failed."""
        return next((trial.reason for trial in self.runs if trial.status != "ok" and trial.reason), "")

    @property
    def without_effect(self) -> dict[str, str]:
        """Knobs that it tries and that change nothing here, with the reason."""
        known = {name: why for trial in self.runs for name, why in trial.not_effective.items()}
        return {name: known[name] for name in self.changed if name in known}

    @property
    def disturbed(self) -> bool:
        """Whether others used the machine during a run."""
        return any(trial.points[-1].get("disturbed") for trial in self.runs if trial.points)

    def value(self, column: str) -> Any:
        """Of a knob, a word or a quantity; None: not known."""
        words = {
            "configuration": self.label,
            "trial": self.runs[0].name,
            "status": self.status,
            "runs": sum(trial.status == "ok" for trial in self.runs),
        }
        return words[column] if column in words else self.knobs.get(column, self.values.get(column))


@dataclasses.dataclass(frozen=True)
class Table:
    """A study's table."""

    study: Study
    rows: list[Row]

    @property
    def columns(self) -> list[str]:
        """The study's columns, and `status` where a run did not end ok."""
        failed = any(row.status != "ok" for row in self.rows)
        return [*self.study.columns, *(["status"] if failed and "status" not in self.study.columns else [])]

    @property
    def all_disturbed(self) -> bool:
        """Whether others used the machine during every run: a mark on all rows would tell nothing."""
        return all(row.disturbed for row in self.rows) and bool(self.rows)

    def marks(self, row: Row) -> str:
        """What is written beside the name of a row."""
        disturbed = row.disturbed and not self.all_disturbed
        return NO_EFFECT * bool(row.without_effect) + DISTURBED * disturbed

    def records(self) -> list[dict[str, Any]]:
        """One dictionary per line: what was asked for, then how it was measured."""
        found = []
        for row in self.rows:
            how = {
                "trial": row.runs[0].name,
                "status": row.status,
                "reason": row.reason,
                "not_effective": "; ".join(f"{name}: {why}" for name, why in row.without_effect.items()),
                "disturbed": row.disturbed,
            }
            place = {"place": row.place} if row.place else {}
            for line in self._lines(row):
                found.append({**line, **place, **{key: value for key, value in how.items() if key not in line}})
        return found

    def frame(self) -> pd.DataFrame:
        """The table in stored units (the names say them), as it is written to study.csv."""
        return pd.DataFrame(self.records())

    def markdown(self) -> str:
        """The table for reading, in Markdown, with its notes."""
        names, *rows = self._cells(cut=80)
        lines = [f"| {' | '.join(names)} |", "|" + "|".join("-" * (len(name) + 2) for name in names) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes())]).rstrip()

    def text(self) -> str:
        """The table for a terminal, with its notes."""
        return "\n".join(["  ".join(row).rstrip() for row in self._cells(cut=50)] + ["", *self.notes()]).rstrip()

    def notes(self) -> list[str]:
        """What the marks mean, and why runs failed."""
        said = []
        for row in self.rows:
            for name, why in row.without_effect.items():
                said.append(f"{NO_EFFECT} {name} changes nothing here: {why}")
        if self.all_disturbed:
            said.append("others used the machine during every run")
        elif any(row.disturbed for row in self.rows):
            said.append(f"{DISTURBED} others used the machine at the same time")
        for row in self.rows:
            if row.reason:
                said.append(f"{row.label}: {row.status}: {row.reason}")
        return list(dict.fromkeys(said))

    def _lines(self, row: Row) -> list[dict[str, Any]]:
        """The values of each of its lines: one, or one for each operation."""
        if not self.study.of_operations:
            return [{column: row.value(column) for column in self.columns}]
        operations: Sequence[Mapping[str, Any]] = row.operations or [{}]
        return [
            {column: one.get(column) if column in OPERATIONS else row.value(column) for column in self.columns}
            for one in operations
        ]

    def _cells(self, cut: int) -> list[list[str]]:
        """Headings and cells in words, padded to equal widths; names longer than `cut` characters are cut."""
        lines = [[quantity(column).heading for column in self.columns]]
        for row in self.rows:
            for line in self._lines(row):
                cells = [shown(column, value)[:cut] for column, value in line.items()]
                lines.append([f"{cells[0]} {self.marks(row)}".rstrip(), *cells[1:]])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]


def shown(column: str, value: Any) -> str:
    """A value in words, in the unit of its column's heading; '' when it is not known."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    one = quantity(column)
    scaled = value * one.scale if one.scale != 1.0 else value
    return number(float(scaled)) if column in MEASURED | DERIVED | OPERATIONS and _is_number(value) else number(value)


def table(found: Results) -> Table:
    """The table of a search with a `study:` section. Raises `ConfigError` where there is none."""
    if found.space.study is None:
        raise ConfigError(f"{found.folder.name}: its search file has no study:")
    rows = [_row(found, runs) for runs in found.groups]
    if found.space.kind == "ladder":
        rows = _of_ladder(found, rows)
    if found.space.kind == "grid":
        rows.sort(key=lambda row: _place_in_grid(found, row))
    base = next((row for row in rows if row.config == _without_seed(cfg.flat(found.space.baseline))), None)
    compared = [dataclasses.replace(row, values=row.values | _derived(row, rows, base)) for row in rows]
    return Table(found.space.study, _with_rungs_before(compared))


# --------------------------------------------------------------------------------------------------------------- rows
def _row(found: Results, runs: list[TrialRecord]) -> Row:
    """A configuration without what follows from others."""
    baseline = cfg.flat(found.space.baseline)
    drawn = {name: value for name, value in runs[0].drawn.items() if name != "seed"}
    changed = {name: value for name, value in drawn.items() if name not in baseline or baseline[name] != value}
    label = " ".join(f"{name}={number(value)}" for name, value in changed.items()) or "baseline"
    # What a run measured before it failed is no result; what a running one has measured so far is shown as such.
    counted = [trial for trial in runs if trial.status == "ok"] or [trial for trial in runs if not trial.finished]
    measured = [_measured(found.folder / "trials" / trial.name, trial) for trial in counted if trial.points]
    values = {name: sum(one[name] for one in measured) / len(measured) for name in _common(measured)}
    values |= _per_epoch(values)
    operations = _operations(found.folder / "trials" / runs[0].name, found.space.operations)
    config = _without_seed(runs[0].config)
    idle = {dimension.name for dimension in found.space.dimensions} - set(runs[0].drawn)
    knobs = {name: value for name, value in config.items() if name not in idle}
    return Row(label, "", changed, config, knobs, runs, values, operations)


def _of_ladder(found: Results, rows: list[Row]) -> list[Row]:
    """The base, every rung with those before it, then every rung alone; as far as they have begun."""
    by_point = {_key(row.runs[0].drawn): row for row in rows}
    points: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = []
    points.append(("base", "base", {}, found.space.expand({}, found.space.source)))
    points += [(f"+ {rung.name}", "together", rung.knobs, rung.together) for rung in found.space.rungs]
    points += [(f"{rung.name} alone", "alone", rung.knobs, rung.alone) for rung in found.space.rungs if rung.alone]
    return [
        dataclasses.replace(by_point[_key(point)], label=label, place=place, changed=dict(knobs))
        for label, place, knobs, point in points
        if _key(point) in by_point
    ]


def _place_in_grid(found: Results, row: Row) -> tuple[int, ...]:
    """As the file lists the choices, whatever the order in which they ran."""
    drawn = row.runs[0].drawn
    dimensions = [dimension for dimension in found.space.dimensions if dimension.name != "seed"]
    return tuple(
        (dimension.choices or ()).index(drawn[dimension.name]) if dimension.name in drawn else -1
        for dimension in dimensions
    )


def _key(drawn: Mapping[str, Any]) -> str:
    return repr(sorted((name, value) for name, value in drawn.items() if name != "seed"))


def _without_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "seed"}


def _common(measured: list[dict[str, float]]) -> list[str]:
    return [name for name in measured[0] if all(name in one for one in measured)] if measured else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _measured(folder: Path, trial: TrialRecord) -> dict[str, float]:
    """Numbers of the last point, seconds of its parts, and `set_images`, the images of the data set."""
    last = trial.points[-1]
    values = {name: float(last[name]) for name in MEASURED if _is_number(last.get(name)) and math.isfinite(last[name])}
    seconds = trial.end.get("seconds") or last.get("seconds") or {}
    values |= {f"{part}_s": float(seconds[part]) for part in ("compile", "setup") if part in seconds}
    workers = [event for event in record.events(folder) if event["event"] == "worker" and event.get("images")]
    return values | ({"set_images": float(workers[-1]["images"])} if workers else {})


def _operations(folder: Path, steps: int) -> list[dict[str, Any]]:
    """The longest operations of a trial; none where it was not profiled."""
    path = folder / OPERATIONS_FILE
    if not steps or not path.exists():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        found: list[dict[str, Any]] = [
            {
                "operation": line["operation"],
                "calls": int(float(line["calls"])),
                "self_s": float(line["self_s"]),
                "total_s": float(line.get("total_s") or math.nan),
                "share": float(line["share"]),
            }
            for line in csv.DictReader(file)
        ]
    longest = sorted(found, key=lambda one: one["self_s"], reverse=True)[:TOP]
    return [one | {"calls_per_step": one["calls"] / steps, "self_s_per_step": one["self_s"] / steps} for one in longest]


# ------------------------------------------------------------------------------------------------------------- derived
def _per_epoch(values: Mapping[str, float]) -> dict[str, float]:
    """What one pass over the images takes."""
    if not values.get("images_per_s") or "set_images" not in values:
        return {}
    epoch = values["set_images"] / values["images_per_s"]
    waited = {"epoch_data_wait_s": epoch * values["data_wait_share"]} if "data_wait_share" in values else {}
    return {"epoch_s": epoch} | waited


def _derived(row: Row, rows: list[Row], base: Row | None) -> dict[str, float]:
    """Quantities that compare a configuration with others."""
    found, rate = dict[str, float](), row.values.get("images_per_s")
    if base is not None:
        if speed := _ratio(row, base):
            found |= {"versus_baseline": speed, "percent_of_base": 100 * speed}
        if memory := _ratio(row, base, "peak_memory_mib"):
            found["memory_percent_of_base"] = 100 * memory
    workers = row.config["parallel.workers"]
    if (alone := _like(row, rows, {"parallel.workers": 1})) is not None and (speedup := _ratio(row, alone)):
        found |= {"speedup_over_one_worker": speedup, "scaling_efficiency": speedup / workers}
    eager = _like(row, rows, {"compile.mode": "none"}, leave_out="compile.")
    if row.config["compile.mode"] != "none" and eager is not None and (faster := _ratio(row, eager)) and rate:
        found["versus_uncompiled"] = faster
        if faster > 1 and "compile_s" in row.values:
            # n images take n/r without compilation and c + n/(f·r) with it: equal at n = c·f·r/(f−1).
            paid = row.values["compile_s"] * rate / (faster - 1)
            found |= {"images_to_break_even": paid, "break_even_s": row.values["compile_s"] + paid / rate}
    return found


def _ratio(row: Row, other: Row, name: str = "images_per_s") -> float | None:
    mine, theirs = row.values.get(name), other.values.get(name)
    return mine / theirs if mine is not None and theirs else None


def _like(row: Row, rows: Iterable[Row], changes: Mapping[str, Any], leave_out: str = "\n") -> Row | None:
    """The configuration that is this one but for `changes`; knobs whose names begin with `leave_out` do not count."""

    def counted(config: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in config.items() if name in changes or not name.startswith(leave_out)}

    wanted = counted(row.config) | dict(changes)
    return next((other for other in rows if counted(other.config) == wanted), None)


def _with_rungs_before(rows: list[Row]) -> list[Row]:
    """Each rung of a ladder compared with the one before."""
    found: list[Row] = []
    for i, row in enumerate(rows):
        ratio = _ratio(row, rows[i - 1]) if row.place == "together" and i else None
        more = {"versus_previous": ratio} if ratio else {}
        found.append(dataclasses.replace(row, values=row.values | more))
    return found
