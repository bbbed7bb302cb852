"""The table that a study ends with, made from the folder of its search alone: quantities, marks and notes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd

from tunediff import config as cfg
from tunediff.analysis import Results, is_number, last, seconds_of
from tunediff.analysis.importance import searched
from tunediff.analysis.speed import break_even, predicted_step_s
from tunediff.config import ConfigError
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.text import number
from tunediff.core.trial_record import TrialRecord
from tunediff.report.words import is_known, markdown_table, plain_table
from tunediff.search_space.study import OPERATIONS, PREDICTED, Study

NO_EFFECT, DISTURBED = "†", "‡"
"""Marks of rows: a knob that changes nothing here; others used the machine at the same time."""

Knobs = Mapping[str, object]
"""Values by dotted name."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration, with all its runs."""

    label: str
    """What differs from the baseline, or the rung of the ladder."""
    place: str
    """Of a ladder: `base`, `together` (with all rungs before) or `alone`; else ''."""
    changed: Knobs
    """Those that it tries: those that differ from the baseline, or the rung's own."""
    config: Knobs
    """All but the seed."""
    knobs: Knobs
    """Those of them that apply: a searched knob with `when:` does not always."""
    runs: list[TrialRecord]
    values: dict[str, float]
    """Quantities by name, as far as they are known."""
    operations: pd.DataFrame
    """The ten longest, of the first run: a column for each of `study.OPERATIONS`; empty where none were profiled."""

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

    def value(self, column: str) -> object:
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
    varied: list[str]
    """The searched knobs by which rows differ, but for the seed, in the order of the search file."""

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

    def records(self) -> list[dict[str, object]]:
        """One dictionary per line: what was asked for, then how it was measured."""
        found = []
        for row, line in self._lines():
            how = {
                **({"place": row.place} if row.place else {}),
                "trial": row.runs[0].name,
                "status": row.status,
                "reason": row.reason,
                "not_effective": "; ".join(f"{name}: {why}" for name, why in row.without_effect.items()),
                "disturbed": row.disturbed,
            }
            found.append(line | {key: value for key, value in how.items() if key not in line})
        return found

    def frame(self) -> pd.DataFrame:
        """The table in stored units (the names say them), as it is written to study.csv."""
        return pd.DataFrame(self.records())

    def markdown(self) -> str:
        """The table for reading, in Markdown, with its notes."""
        return "\n".join([markdown_table(self.cells(80)), "", *(f"- {note}" for note in self.notes())]).rstrip()

    def text(self, width: int | None = None) -> str:
        """The table for a terminal of so many columns, with its notes."""
        return "\n".join([plain_table(self.cells(50), width), "", *self.notes()]).rstrip()

    def notes(self) -> list[str]:
        """What the marks mean, and why runs failed."""
        said = [
            f"{NO_EFFECT} {name} changes nothing here: {why}"
            for row in self.rows
            for name, why in row.without_effect.items()
        ]
        if self.all_disturbed:
            said.append("others used the machine during every run")
        elif any(row.disturbed for row in self.rows):
            said.append(f"{DISTURBED} others used the machine at the same time")
        said += [f"{row.label}: {row.status}: {row.reason}" for row in self.rows if row.reason]
        if any(row.values.get(name) for row in self.rows for name in self.columns if name.startswith("predicted_")):
            said.append("prediction: nothing of it was measured; from the steps of one and two workers of ddp")
        return list(dict.fromkeys(said))

    def _lines(self) -> Iterator[tuple[Row, dict[str, object]]]:
        """The values of each line, with its row: one line of a row, or one for each operation."""
        for row in self.rows:
            for one in row.operations.to_dict("records") or [{}] if self.study.of_operations else [{}]:
                yield row, {name: one.get(name) if name in OPERATIONS else row.value(name) for name in self.columns}

    def cells(self, most: int) -> list[list[str]]:
        """Headings and cells in words; names longer than `most` characters are cut."""
        lines = [[self.study.quantity(column).heading for column in self.columns]]
        for row, line in self._lines():
            first, *others = [shown(self.study, column, value)[:most] for column, value in line.items()]
            lines.append([f"{first} {self.marks(row)}".rstrip(), *others])
        return lines


def shown(study: Study, column: str, value: object) -> str:
    """A value in words, in the unit of its column's heading; '' when it is not known."""
    if not is_known(value):
        return ""
    return number(float(value) * study.quantity(column).scale) if is_number(value) else number(value)


def table(found: Results) -> Table:
    """The table of a search with a `study:` section. Raises `ConfigError` where there is none."""
    if found.space.study is None:
        raise ConfigError(f"{found.folder.name}: its search file has no study:")
    rows = [_row(found, runs) for runs in found.groups]
    if found.space.kind == "ladder":
        rows = _of_ladder(found, rows)
    if found.space.kind == "grid":  # as the file lists the choices, whatever the order in which they ran
        places = {one.name: (one.choices or ()).index for one in searched(found)}
        rows.sort(key=lambda row: [at(row.knobs[name]) if name in row.knobs else -1 for name, at in places.items()])
    base = _find(rows, cfg.flat(found.space.baseline))
    if base is not None and not any(trial.status == "ok" for trial in base.runs):
        base = None  # what it has measured so far is no measure for others
    compared = [
        dataclasses.replace(row, values=row.values | _derived(row, rows, base, before))
        for before, row in zip([None, *rows], rows, strict=False)
    ]
    varied = [one.name for one in searched(found) if len({repr(row.config.get(one.name)) for row in rows}) > 1]
    return Table(found.space.study, compared, varied)


# --------------------------------------------------------------------------------------------------------------- rows
def _row(found: Results, runs: list[TrialRecord]) -> Row:
    """A configuration without what follows from others."""
    baseline, drawn = cfg.flat(found.space.baseline), _without(runs[0].drawn)
    changed = {name: value for name, value in drawn.items() if name not in baseline or baseline[name] != value}
    # What a run measured before it failed is no result; what a running one has measured so far is shown as such.
    counted = [trial for trial in runs if trial.status == "ok"] or [trial for trial in runs if not trial.finished]
    folder = found.folder / "trials"
    measured = [_measured(folder / trial.name, trial, found.space.study) for trial in counted if trial.points]
    means = pd.DataFrame(measured).dropna(axis="columns").mean()
    config = _without(runs[0].config)
    idle = {dimension.name for dimension in found.space.dimensions} - set(drawn)
    return Row(
        label=text.knobs(changed),
        place="",
        changed=changed,
        config=config,
        knobs={name: value for name, value in config.items() if name not in idle},
        runs=runs,
        values={str(name): float(mean) for name, mean in means.items()},
        operations=_operations(folder / runs[0].name / "operations.csv", found.space.operations),
    )


def _of_ladder(found: Results, rows: list[Row]) -> list[Row]:
    """The base, every rung with those before it, then every rung alone; as far as they have begun."""
    rungs = found.space.rungs
    points: list[tuple[str, str, Knobs, Knobs]] = [("base", "base", {}, {})]
    points += [(f"+ {rung.name}", "together", rung.knobs, rung.together) for rung in rungs]
    points += [(f"{rung.name} alone", "alone", rung.knobs, rung.alone) for rung in rungs if rung.alone]
    ordered = []
    for label, place, knobs, point in points:
        if (row := _find(rows, cfg.flat(found.space.config(point)))) is not None:
            ordered.append(dataclasses.replace(row, label=label, place=place, changed=knobs))
    return ordered


def _find(rows: list[Row], knobs: Knobs, but_for: str = "seed") -> Row | None:
    """The configuration with these knobs, whatever that knob or the knobs of that section are."""
    wanted = _without(knobs, but_for)
    return next((row for row in rows if _without(row.config, but_for) == wanted), None)


def _without(knobs: Knobs, left: str = "seed") -> dict[str, object]:
    return {name: value for name, value in knobs.items() if name != left and not name.startswith(f"{left}.")}


def _measured(folder: Path, trial: TrialRecord, study: Study | None) -> dict[str, float]:
    """Numbers of the last point, seconds of its parts, and `set_samples`, the samples of the data set."""
    known = {name: last(trial, name) for name in (study.numbers if study else ())}
    values = {name: float(value) for name, value in known.items() if is_number(value) and math.isfinite(value)}
    seconds = seconds_of(trial)
    values |= {f"{part}_s": float(seconds[part]) for part in ("compile", "setup") if part in seconds}
    values |= {"running_s": float(sum(seconds.values()))} if seconds else {}
    told = [event for event in record.events(folder) if event["event"] == "about" and event.get("samples")]
    return values | ({"set_samples": float(told[-1]["samples"])} if told else {})


def _operations(path: Path, steps: int) -> pd.DataFrame:
    """The ten longest operations of a profiled trial, from a file of operation, calls, self_s, total_s, share."""
    if not steps or not path.exists():
        return pd.DataFrame()
    found = pd.read_csv(path).nlargest(10, "self_s")
    return found.assign(calls_per_step=found["calls"] / steps, self_s_per_step=found["self_s"] / steps)


# ------------------------------------------------------------------------------------------------------------- derived
def _derived(row: Row, rows: list[Row], base: Row | None, before: Row | None) -> dict[str, float]:
    """What follows from its values and from those of others."""
    found, rate = dict[str, float](), row.values.get("samples_per_s")
    if rate and "set_samples" in row.values:
        found["epoch_s"] = row.values["set_samples"] / rate
        if "data_wait_share" in row.values:
            found["epoch_data_wait_s"] = found["epoch_s"] * row.values["data_wait_share"]
    if speed := _ratio(row, base):
        found |= {"versus_baseline": speed, "percent_of_base": 100 * speed}
    if memory := _ratio(row, base, "peak_memory_mib"):
        found["memory_percent_of_base"] = 100 * memory
    if row.place == "together" and (gain := _ratio(row, before)):
        found["versus_previous"] = gain
    alone, workers = _find(rows, {**row.config, "parallel.workers": 1}), row.runs[0].config["parallel.workers"]
    if speedup := _ratio(row, alone):
        found |= {"speedup_over_one_worker": speedup, "scaling_efficiency": speedup / workers}
    if alone is not None and workers == 2 and row.config["parallel.strategy"] == "ddp":
        found |= _predicted(alone.values, row.values)
    eager = [other for other in rows if other.config["compile.mode"] == "none"]
    if row.config["compile.mode"] != "none" and (faster := _ratio(row, _find(eager, row.config, but_for="compile"))):
        found["versus_uncompiled"] = faster
        if paid := break_even(row.values.get("compile_s"), rate, faster):
            found["samples_to_break_even"], found["break_even_s"] = paid
    return found


def _predicted(one: Mapping[str, float], two: Mapping[str, float]) -> dict[str, float]:
    """Speed-ups on more devices than were there; {} where the parts of a step are not known."""
    if not all(run.get(f"step_{part}s", 0.0) > 0 for run in (one, two) for part in ("", "forward_", "backward_")):
        return {}
    return {f"predicted_speedup_{n}": one["step_s"] / predicted_step_s(one, two, n) for n in PREDICTED}


def _ratio(row: Row, other: Row | None, name: str = "samples_per_s") -> float | None:
    mine, theirs = row.values.get(name), other.values.get(name) if other is not None else None
    return mine / theirs if mine is not None and theirs else None
