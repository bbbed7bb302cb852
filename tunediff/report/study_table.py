"""The table of a study: one frame of its configurations, from the search's folder alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tunediff import config as cfg
from tunediff.analysis import Results, disturbed, is_number, last, seconds_of
from tunediff.analysis.importance import searched
from tunediff.analysis.speed import measured_runs
from tunediff.config import ConfigError
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.outcomes import Status
from tunediff.core.text import knob_value, number
from tunediff.core.trial_record import TrialRecord
from tunediff.report.words import has_value, markdown_table, plain_table
from tunediff.search_space.study import OPERATIONS, Study

DETAILS = ("trial", "status", "reason", "not_effective", "disturbed")
"""Columns of study.csv after those of the study."""
MEASURED = ("samples_per_s", "compile_s", "data_wait_share", "peak_memory_mib", "set_samples")
"""Numbers that others are derived from."""
Knobs = Mapping[str, object]
"""Values by dotted name."""


@dataclasses.dataclass(frozen=True)
class StudyTable:
    """The table of a study.

    A row of `data` is a configuration with all its runs. Its columns are `WORDS` of the study,
    `DETAILS`, the knobs (None where a searched knob with `when:` does not apply), the means of its
    numbers (NaN: unknown), `place` (of a ladder: `base`, `together` with all rungs before it, or
    `alone`), and `config`, all knobs but the seed.
    """

    study: Study
    data: pd.DataFrame
    varied: Sequence[str]
    """The searched knobs by which rows differ, in the order of the file, without the seed."""
    operations: pd.DataFrame
    """The ten longest operations of each row's first run, by the row's index: `OPERATIONS`."""

    @property
    def columns(self) -> list[str]:
        """Return the study's columns, with `status` if a run did not end ok."""
        names = list(self.study.columns)
        if "status" not in names and (self.data["status"] != "ok").any():
            names.append("status")
        return names

    def frame(self) -> pd.DataFrame:
        """Return the table for study.csv: a line per row, or per operation of it."""
        data = self.data.drop(columns=list(OPERATIONS), errors="ignore")
        places = ["place"] * bool(self.data["place"].any())
        if self.study.of_operations:
            data = data.join(self.operations)
        return data.reindex(columns=list(dict.fromkeys([*self.columns, *places, *DETAILS])))

    def cells(self, limit: int) -> list[list[str]]:
        """Return headings and cells as text; names are cut after `limit` characters."""
        shown_rows = self.frame()[self.columns].to_dict("records")
        return [
            [self.study.quantity(column).heading for column in self.columns],
            *(
                [shown(self.study, str(column), value)[:limit] for column, value in row.items()]
                for row in shown_rows
            ),
        ]

    def markdown(self) -> str:
        """Return the table and its notes in Markdown."""
        notes = [f"- {note}" for note in self.notes()]
        return "\n".join([markdown_table(self.cells(80)), "", *notes]).rstrip()

    def text(self) -> str:
        """Return the table and its notes for a terminal."""
        return "\n".join([plain_table(self.cells(50)), "", *self.notes()]).rstrip()

    def notes(self) -> list[str]:
        """Return which knobs change nothing, who was disturbed, and why runs failed."""
        idle = [why for row in self.data["not_effective"] if row for why in row.split("; ")]
        notes = [why.replace(": ", " changes nothing here: ", 1) for why in idle]
        busy, failed = self.data[self.data["disturbed"]], self.data[self.data["reason"] != ""]
        if len(busy):
            of = "every run" if len(busy) == len(self.data) else ", ".join(busy["configuration"])
            notes.append(f"others used the machine during {of}")
        notes += map(": ".join, failed[["configuration", "status", "reason"]].to_numpy())
        return list(dict.fromkeys(notes))


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
    numbers = [*MEASURED, *space.study.numbers]
    rows = [_row(results, outcome.runs) for outcome in results.outcomes]
    if space.kind == "ladder":
        rows = _rungs(results, rows)
    columns = ["config", "place", "configuration", "runs", *DETAILS, *space.schema.knobs, *numbers]
    data = pd.DataFrame(rows, columns=list(dict.fromkeys(columns)), dtype=object)
    data = data.astype(dict.fromkeys(numbers, float)).astype({"disturbed": bool})
    names = [dimension.name for dimension in searched(results)]
    if space.kind == "grid":
        # In the order of the choices in the file, not of the runs.
        choices = {dimension.name: dimension.choices or () for dimension in searched(results)}

        def place(knob: pd.Series) -> pd.Series:
            order = list(choices[str(knob.name)])
            return knob.map(lambda value: order.index(value) if has_value(value) else -1)

        data = data.sort_values(names, key=place, kind="stable", ignore_index=True)
    varied = [name for name in names if data[name].map(repr).nunique() > 1]
    _derive(data, cfg.flat(space.baseline))
    operations = [
        _operations(results.folder / "trials" / name / "operations.csv", space.operations)
        for name in data["trial"]
    ]
    listed = pd.concat(dict(enumerate(operations))) if operations else pd.DataFrame()
    return StudyTable(space.study, data, varied, listed.droplevel(1) if len(listed) else listed)


def _row(results: Results, runs: list[TrialRecord]) -> dict[str, Any]:
    """Return the row of a configuration, without the quantities that need other rows."""
    baseline, folder = cfg.flat(results.space.baseline), results.folder / "trials"
    config, drawn = _without(runs[0].config), _without(runs[0].drawn)
    missing = object()
    changed = {n: value for n, value in drawn.items() if baseline.get(n, missing) != value}
    idle = {dimension.name for dimension in results.space.dimensions} - set(drawn)
    measured = [
        _measured(folder / trial.name, trial, results.space.study) for trial in measured_runs(runs)
    ]
    means = pd.DataFrame(measured).dropna(axis="columns").mean()
    return {
        **{name: value for name, value in config.items() if name not in idle},
        **means.to_dict(),
        **_named(text.knobs(changed), "", changed, runs),
        "config": config,
        "trial": runs[0].name,
        "runs": sum(trial.status == Status.OK for trial in runs),
        "status": ", ".join(dict.fromkeys(trial.status or "running" for trial in runs)),
        "reason": next((trial.reason for trial in runs if trial.reason), ""),
        "disturbed": any(map(disturbed, runs)),
        "all_runs": runs,
    }


def _named(name: str, place: str, changed: Knobs, runs: Sequence[TrialRecord]) -> dict[str, object]:
    """Return the cells that follow from what a row is called, and which knobs it changes."""
    reasons = {knob: why for trial in runs for knob, why in trial.not_effective.items()}
    idle = [f"{knob}: {reasons[knob]}" for knob in changed if knob in reasons]
    return {"configuration": name, "place": place, "not_effective": "; ".join(idle)}


def _rungs(results: Results, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that have begun: the base, every rung after those before it, and alone."""
    ladder, ordered = results.space.rungs, []
    points: list[tuple[str, str, Knobs, Knobs]] = [("base", "base", {}, {})]
    points += [(f"+ {rung.name}", "together", rung.knobs, rung.together) for rung in ladder]
    points += [
        (f"{rung.name} alone", "alone", rung.knobs, rung.alone) for rung in ladder if rung.alone
    ]
    for name, place, knobs, point in points:
        config = _without(cfg.flat(results.space.config(point)))
        for row in rows:
            if row["config"] == config:
                ordered.append(row | _named(name, place, knobs, row["all_runs"]))
    return ordered


def _without(knobs: Knobs, left_out: str = "seed") -> dict[str, object]:
    """Return knobs without one, or without a section."""
    prefix = f"{left_out}."
    return {name: value for name, value in knobs.items() if not f"{name}.".startswith(prefix)}


def _measured(folder: Path, trial: TrialRecord, study: Study | None) -> dict[str, float]:
    """Return the last point's numbers, the seconds by part, and `set_samples` of the data set."""
    values = {name: last(trial, name) for name in (*MEASURED, *(study.numbers if study else ()))}
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

    path: CSV file with the columns operation, calls, self_s, total_s, share. steps: profiled ones.
    """
    if not steps or not path.exists():
        return pd.DataFrame()
    operations = pd.read_csv(path).nlargest(10, "self_s")
    return operations.assign(
        calls_per_step=operations["calls"] / steps, self_s_per_step=operations["self_s"] / steps
    )


# ---- derived
def _derive(data: pd.DataFrame, baseline: Knobs) -> None:
    """Add the quantities that follow from a row's numbers and those of other rows, in place."""
    rate, compile_s = data["samples_per_s"].where(data["samples_per_s"] > 0), data["compile_s"]
    data["epoch_s"] = data["set_samples"] / rate
    data["epoch_data_wait_s"] = data["epoch_s"] * data["data_wait_share"]
    # Against the baseline and the rung before; an unfinished or failed baseline is no reference.
    base = data[(data["config"] == _without(baseline)) & (data["runs"] > 0)].iloc[:1]
    data["versus_baseline"] = rate / base["samples_per_s"].max()
    data["percent_of_base"] = 100 * data["versus_baseline"]
    memory = base["peak_memory_mib"].max()
    data["memory_percent_of_base"] = 100 * data["peak_memory_mib"] / memory
    data["versus_previous"] = (rate / rate.shift()).where(data["place"] == "together")
    # Against the same configuration with one worker.
    workers = data["config"].map(lambda config: config["parallel.workers"]).astype(float)
    data["speedup_over_one_worker"] = rate / _reference(
        data, rate[workers == 1], "parallel.workers"
    )
    data["scaling_efficiency"] = data["speedup_over_one_worker"] / workers
    # Against the same configuration without torch.compile: n samples take n/r without it and
    # c + n/(f·r) with it, which is equal at n = c·f·r/(f − 1).
    eager = data["config"].map(lambda config: config["compile.mode"] == "none").astype(bool)
    faster = (rate / _reference(data, rate[eager], "compile")).where(~eager)
    data["versus_uncompiled"] = faster
    data["samples_to_break_even"] = compile_s * rate / (faster.where(faster > 1) - 1)
    data["break_even_s"] = compile_s + data["samples_to_break_even"] / rate


def _reference(data: pd.DataFrame, rates: pd.Series, but_for: str) -> pd.Series:
    """Return for each row the one of `rates` whose row differs at most in a knob or section."""
    rest = data["config"].map(lambda config: repr(_without(config, but_for)))
    return rates.reindex(data.index).groupby(rest).transform("first")
