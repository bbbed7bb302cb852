"""The table and the figure of a study: one frame of its configurations, from the folder alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tunediff import config as cfg
from tunediff.analysis import Results, disturbed, is_number, last, seconds_of
from tunediff.analysis.importance import searched
from tunediff.analysis.speed import measured_runs
from tunediff.config import ConfigError
from tunediff.core import colors, text
from tunediff.core import trial_record as record
from tunediff.core.environment import hardware
from tunediff.core.outcomes import Status
from tunediff.core.text import has_value, knob_value, number, short
from tunediff.core.trial_record import TrialRecord
from tunediff.report import sentences, style
from tunediff.search_space.sections import OPERATIONS, Study

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
        failed = ["status"] if (self.data["status"] != Status.OK).any() else []
        return list(dict.fromkeys([*self.study.columns, *failed]))

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

    def notes(self) -> list[str]:
        """Return which knobs change nothing, who was disturbed, and why runs failed."""
        idle = [why for row in self.data["not_effective"] if row for why in row.split("; ")]
        notes = [why.replace(": ", " changes nothing here: ", 1) for why in idle]
        busy, failed = self.data[self.data["disturbed"]], self.data[self.data["reason"] != ""]
        if len(busy):
            notes.append(f"others used the machine during {', '.join(busy['configuration'])}")
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
    space, folder = results.space, results.folder / "trials"
    if space.study is None:
        raise ConfigError(f"{results.folder.name}: its search file has no study:")
    numbers = [*MEASURED, *space.study.numbers]
    rows = [_row(results, outcome.runs, numbers) for outcome in results.outcomes]
    if space.kind == "ladder":
        rows = _rungs(results, rows)
    columns = ["config", "place", "configuration", "runs", *DETAILS, *space.schema.knobs, *numbers]
    data = pd.DataFrame(rows, columns=list(dict.fromkeys(columns)), dtype=object)
    data = data.astype(dict.fromkeys(numbers, float)).astype({"disturbed": bool})
    knobs = {dimension.name: list(dimension.choices or ()) for dimension in searched(results)}
    if space.kind == "grid":
        # In the order of the choices in the file, not of the runs
        places = {
            name: data[name].map(
                lambda value, listed=listed: listed.index(value) if has_value(value) else -1
            )
            for name, listed in knobs.items()
        }
        data = data.loc[pd.DataFrame(places).sort_values(list(knobs), kind="stable").index]
        data = data.reset_index(drop=True)
    _derive(data, cfg.flat(space.baseline))
    listed = {}
    for place, name in data["trial"].items():
        # CSV file with the columns operation, calls, self_s, total_s, share
        if space.operations and (path := folder / name / "operations.csv").exists():
            longest = pd.read_csv(path).nlargest(10, "self_s")
            each = {f"{c}_per_step": longest[c] / space.operations for c in ("calls", "self_s")}
            listed[place] = longest.assign(**each)
    operations = pd.concat(listed).droplevel(1) if listed else pd.DataFrame()
    varied = [name for name in knobs if data[name].map(repr).nunique() > 1]
    return StudyTable(space.study, data, varied, operations)


def _row(results: Results, runs: list[TrialRecord], numbers: Sequence[str]) -> dict[str, Any]:
    """Return the row of a configuration, without the quantities that need other rows."""
    baseline, folder = cfg.flat(results.space.baseline), results.folder / "trials"
    config, drawn = _without(runs[0].config), _without(runs[0].drawn)
    missing = object()
    changed = {n: value for n, value in drawn.items() if baseline.get(n, missing) != value}
    idle = {dimension.name for dimension in results.space.dimensions} - set(drawn)
    measured = []
    for trial in measured_runs(runs):
        seconds = seconds_of(trial)
        about = [event.get("samples") for event in record.events(folder / trial.name)
                 if event["event"] == "about"]  # fmt: skip
        values = {
            **{name: last(trial, name) for name in numbers},
            **{f"{part}_s": seconds[part] for part in ("compile", "setup") if part in seconds},
            "running_s": sum(seconds.values()) if seconds else None,
            "set_samples": next(filter(None, reversed(about)), None),
        }
        measured.append(
            {n: float(v) for n, v in values.items() if is_number(v) and math.isfinite(v)}
        )
    return {
        **{name: value for name, value in config.items() if name not in idle},
        # What not every seed measured has no mean
        **pd.DataFrame(measured).dropna(axis="columns").mean().to_dict(),
        **_named(text.knobs(changed), "", changed, runs),
        "config": config,
        "trial": runs[0].name,
        "runs": sum(trial.status == Status.OK for trial in runs),
        "status": ", ".join(dict.fromkeys(str(trial.status or "running") for trial in runs)),
        "reason": next(filter(None, map(sentences.of_trial, runs)), ""),
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
    ladder = results.space.rungs
    points: list[tuple[str, str, Knobs, Knobs]] = [
        ("base", "base", {}, {}),
        *((f"+ {rung.name}", "together", rung.knobs, rung.together) for rung in ladder),
        *((f"{rung.name} alone", "alone", rung.knobs, rung.alone) for rung in ladder if rung.alone),
    ]
    configs = [_without(cfg.flat(results.space.config(point))) for *_, point in points]
    return [
        row | _named(name, place, knobs, row["all_runs"])
        for (name, place, knobs, _), config in zip(points, configs, strict=True)
        for row in rows
        if row["config"] == config
    ]


def _without(knobs: Knobs, left_out: str = "seed") -> dict[str, object]:
    """Return knobs without one, or without a section."""
    prefix = f"{left_out}."
    return {name: value for name, value in knobs.items() if not f"{name}.".startswith(prefix)}


def measured_on(results: Results) -> str:
    """Return device, cores, torch version and budget in one line; '': no trial has begun."""
    environments = (trial.environment for trial in results.trials)
    environment = next((known for known in environments if "device" in known), None)
    if environment is None:
        return ""
    cores = f"{environment.get('cpu_cores', '?')} CPU cores"
    torch = f"torch {environment.get('versions', {}).get('torch', '?')}"
    budget = f"{text.seconds(results.space.budget.per_trial_s)} {results.clock.what} each"
    return f"{hardware(environment)}, {cores}, {torch}, {budget}"


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
    alone = _reference(data, rate[workers == 1], "parallel.workers")
    data["speedup_over_one_worker"] = rate / alone
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


# ---- the figure
def figure(table: StudyTable, subtitle: str) -> Figure:
    """Return the study's figure: lines over `x`, or bars of rungs, operations, configurations.

    One panel above the other. `subtitle`: hardware, budget.
    """
    study = table.study
    lines = study.x is not None and not table.data["place"].any()
    panels = [] if lines else [panel for panel in _bars(table) if len(panel[2])]
    heights = [3.6 for _ in study.y] if lines else [0.9 + 0.3 * len(bars) for _, _, bars in panels]
    drawn = Figure(figsize=(style.WIDTH_IN, sum(heights) + 1.0), layout="constrained")
    grid = drawn.subplots(len(heights) or 1, 1, squeeze=False, height_ratios=heights or None)
    for axes, y in zip(grid.flat, study.y, strict=False) if lines else ():
        _lines(axes, table, y)
    for axes, (title, heading, lengths) in zip(grid.flat, panels, strict=False):
        many = len(lengths.columns) > 1
        stacked = many and "alone" not in lengths
        look: dict[str, Any] = {"color": colors.SERIES if many else colors.PLAIN}
        bars = lengths.iloc[::-1].fillna(0.0)
        bars.index = [short(str(name), 50) for name in bars.index]
        bars.plot.barh(ax=axes, stacked=stacked, width=0.8, legend=False, **look)
        ends = lengths.iloc[::-1].sum(axis=1) if stacked else None
        for place, box in enumerate(axes.containers):
            values = lengths.iloc[::-1, place] if ends is None else ends
            if ends is None or place == len(axes.containers) - 1:
                axes.bar_label(box, [number(v) if v else "" for v in values], padding=4, fontsize=8)
        axes.set(title=title, xlabel=heading, ylabel="")
        axes.margins(x=0.15)
    if lines or any(len(lengths.columns) > 1 for *_, lengths in panels):
        others = [knob for knob in table.varied if knob != study.x]
        style.legend(drawn, title=", ".join(others) if lines else "")
    style.add_title(drawn, "\n".join(filter(None, (study.title, subtitle))))
    return drawn


def _bars(table: StudyTable) -> list[tuple[str, str, pd.DataFrame]]:
    """Return title, label of the axis, and lengths of bars by name and series, of every panel."""
    study, data, ys = table.study, table.data, table.study.y
    if study.of_operations:
        heading, scale = "self time in one step (ms)", study.quantity("self_s_per_step").scale
        found = {
            name: table.operations.loc[[place]]
            for place, name in enumerate(data["configuration"])
            if place in table.operations.index
        }
        short_names = {
            name: [short(one, 60) for one in rows["operation"]] for name, rows in found.items()
        }
        return [
            (name, heading, scale * rows[["self_s_per_step"]].set_axis(short_names[name]))
            for name, rows in found.items()
        ]
    lengths = data[list(ys)].astype(float) * [study.quantity(y).scale for y in ys]
    lengths.columns = [study.quantity(y).label for y in ys]
    unit = study.quantity(ys[0]).unit
    if data["place"].any():
        names = data["configuration"].str.removesuffix(" alone").str.removeprefix("+ ")
        kinds = {"with all rungs before it": ("base", "together"), "alone": ("alone",)}
        rungs = {
            label: lengths[data["place"].isin(places)].iloc[:, 0] for label, places in kinds.items()
        }
        both = {label: rows.set_axis(names[rows.index]) for label, rows in rungs.items()}
        return [("", study.quantity(ys[0]).heading, pd.DataFrame(both).reindex(names.unique()))]
    lengths.index = pd.Index(data["configuration"])
    if {study.quantity(y).unit for y in ys} in ({"s"}, {"ms"}):  # parts of one time
        return [("", study.quantity(ys[0]).heading if len(ys) == 1 else unit, lengths)]
    headings = [study.quantity(y).heading for y in ys]
    return [("", heading, lengths.iloc[:, [i]]) for i, heading in enumerate(headings)]


def _lines(axes: Axes, table: StudyTable, y: str) -> None:
    """Draw y over the study's x with one line per combination of the other knobs that vary.

    If x is a measured quantity, the last of these knobs varies along each line, and the points are
    labelled with it.
    """
    study, data, x = table.study, table.data, str(table.study.x)
    measured = x in study.numbers
    along = "".join(table.varied[-1:]) if measured else x
    others = [knob for knob in table.varied if knob != along]
    points = pd.DataFrame({name: data[name] * study.quantity(name).scale for name in (x, y)})
    points["line"] = [", ".join(map(knob_value, row)) for row in data[others].to_numpy()]
    points["label"] = data[along].map(knob_value) if along and measured else ""
    points = points.dropna(subset=[x, y]).sort_values(x)
    for i, (name, line) in enumerate(points.groupby("line", sort=False)):
        color = colors.SERIES[i % len(colors.SERIES)]
        axes.plot(line[x], line[y], "o-", color=color, markersize=5, label=name or None)
    for at_x, at_y, _, label in points.itertuples(index=False):
        style.annotate(axes, label, (at_x, at_y), (4, 4), va="bottom", fontsize=8)
    axes.set(xlabel=study.quantity(x).heading, ylabel=study.quantity(y).heading)
    for axis, values in ((axes.xaxis, points[x]), (axes.yaxis, points[y])):
        if len(values) and 0 < 5 * values.min() < values.max():
            axes.set(**{f"{axis.axis_name}scale": "log"})
            style.plain_logarithms(axis)
    if not measured and points[x].nunique() <= 12:
        axes.set_xticks(sorted(set(points[x])), [f"{value:g}" for value in sorted(set(points[x]))])
    axes.grid(True, which="major", color="0.9")
