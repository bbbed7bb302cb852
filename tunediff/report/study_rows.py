"""The rows of a study's table: configurations with their quantities, from the search's folder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from tunediff import config as cfg
from tunediff.analysis import Results, disturbed, is_number, last, seconds_of
from tunediff.analysis.speed import break_even, measured_runs, predicted_step_s
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.trial_record import TrialRecord
from tunediff.search_space.study import PREDICTED, Study

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


def row_of(results: Results, runs: list[TrialRecord]) -> Row:
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


def rungs(results: Results, rows: list[Row]) -> list[Row]:
    """Return the rows that have begun: the base, every rung after those before it, and alone."""
    ladder = results.space.rungs
    points: list[tuple[str, str, Knobs, Knobs]] = [("base", "base", {}, {})]
    points += [(f"+ {rung.name}", "together", rung.knobs, rung.together) for rung in ladder]
    points += [
        (f"{rung.name} alone", "alone", rung.knobs, rung.alone) for rung in ladder if rung.alone
    ]
    ordered = []
    for label, place, knobs, point in points:
        if (row := find(rows, cfg.flat(results.space.config(point)))) is not None:
            ordered.append(dataclasses.replace(row, label=label, place=place, changed=knobs))
    return ordered


def find(rows: list[Row], knobs: Knobs, but_for: str = "seed") -> Row | None:
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

    path: CSV file with the columns operation, calls, self_s, total_s, share. steps: profiled ones.
    """
    if not steps or not path.exists():
        return pd.DataFrame()
    operations = pd.read_csv(path).nlargest(10, "self_s")
    return operations.assign(
        calls_per_step=operations["calls"] / steps, self_s_per_step=operations["self_s"] / steps
    )


# ---- derived
def derived(row: Row, rows: list[Row], base: Row | None, before: Row | None) -> dict[str, float]:
    """Return the quantities that follow from the row's values and those of other rows.

    base: row of the baseline. before: the row above it, the previous rung of a ladder.
    """
    workers, rate = row.runs[0].config["parallel.workers"], row.values.get("samples_per_s")
    values, alone = dict[str, float](), find(rows, {**row.config, "parallel.workers": 1})
    if rate and "set_samples" in row.values:
        values["epoch_s"] = row.values["set_samples"] / rate
        if "data_wait_share" in row.values:
            values["epoch_data_wait_s"] = values["epoch_s"] * row.values["data_wait_share"]
    # Against the baseline and the rung before.
    if faster := _ratio(row, base):
        values |= {"versus_baseline": faster, "percent_of_base": 100 * faster}
    if larger := _ratio(row, base, "peak_memory_mib"):
        values["memory_percent_of_base"] = 100 * larger
    if row.place == "together" and (faster := _ratio(row, before)):
        values["versus_previous"] = faster
    # Against the same configuration with one worker.
    if faster := _ratio(row, alone):
        values |= {"speedup_over_one_worker": faster, "scaling_efficiency": faster / workers}
    if alone is not None and workers == 2 and row.config["parallel.strategy"] == "ddp":
        values |= _predicted(alone.values, row.values)
    # Against the same configuration without torch.compile.
    eager = [other for other in rows if other.config["compile.mode"] == "none"]
    plain = find(eager, row.config, but_for="compile")
    if row.config["compile.mode"] != "none" and (faster := _ratio(row, plain)):
        values["versus_uncompiled"] = faster
        if paid := break_even(row.values.get("compile_s"), rate, faster):
            values["samples_to_break_even"], values["break_even_s"] = paid
    return values


def _predicted(one: Mapping[str, float], two: Mapping[str, float]) -> dict[str, float]:
    """Predict speed-ups on more devices from one and two ddp workers; {}: parts unknown."""
    parts = ("step_s", "step_forward_s", "step_backward_s")
    if not all(values.get(part, 0.0) > 0 for values in (one, two) for part in parts):
        return {}
    return {
        f"predicted_speedup_{n}": one["step_s"] / predicted_step_s(one, two, n) for n in PREDICTED
    }


def _ratio(row: Row, other: Row | None, name: str = "samples_per_s") -> float | None:
    value, reference = row.values.get(name), other.values.get(name) if other is not None else None
    return value / reference if value is not None and reference else None
