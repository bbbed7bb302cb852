"""Draw a study's figure: rungs of a ladder, longest operations, lines over `x`, or bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tunediff.core import colors
from tunediff.core.text import knob_value, number
from tunediff.report import style
from tunediff.report.study_table import StudyTable
from tunediff.report.words import fitted, short

MARKERS = "osD^v<>h"


def figure(table: StudyTable, subtitle: str) -> Figure:
    """Return the study's figure; `subtitle`: hardware, budget. Raises `ValueError` without one."""
    study = table.study
    if not study.has_figure:
        raise ValueError("this study has no figure")
    if study.of_operations:
        drawn = _operations(table)
    elif table.data["place"].any():
        drawn = _ladder(table, study.y[0])
    else:
        drawn = _bars(table) if study.x is None else _lines(table, study.x)
    style.add_title(drawn, "\n".join(filter(None, (study.title, subtitle))))
    return drawn


def _scaled(table: StudyTable, name: str) -> pd.Series:
    """Return a column in the unit that the figure shows."""
    return table.data[name].astype(float) * table.study.quantity(name).scale


# ---- lines
def _lines(table: StudyTable, x: str) -> Figure:
    """Draw one panel per y with one line per combination of the other knobs that vary.

    If x is a measured quantity, the last of these knobs varies along each line, and the points are
    labelled with it.
    """
    measured, ys, study = x in table.study.numbers, table.study.y, table.study
    along = "".join(table.varied[-1:]) if measured else x
    others = [knob for knob in table.varied if knob != along]
    names = table.data[others].apply(lambda row: ", ".join(map(knob_value, row.dropna())), axis=1)
    figure, panels = style.sheet(len(ys), 4.6, 5.6 * len(ys) + 1)
    for axes, y in zip(panels, ys, strict=True):
        points = pd.DataFrame({"x": _scaled(table, x), "y": _scaled(table, y)})
        points["line"] = names if others else ""
        points["label"] = table.data[along].map(knob_value) if along and measured else ""
        points = points.dropna(subset=["x", "y"]).sort_values("x")
        for i, (name, line) in enumerate(points.groupby("line", sort=False)):
            look, color = f"{MARKERS[i % len(MARKERS)]}-", _series(i)
            axes.plot(line["x"], line["y"], look, color=color, markersize=5, label=name)
        for point in points.itertuples():
            at = point.x, point.y
            axes.annotate(str(point.label), at, (4, 4), textcoords="offset points", fontsize=8)
        _scale(axes, points["x"].tolist(), points["y"].tolist(), ticks=not measured)
        axes.set(xlabel=study.quantity(x).heading, ylabel=study.quantity(y).heading)
        axes.grid(True, which="major", color="0.9")
    if others:
        style.legend(figure, title=", ".join(others))
    return figure


def _series(number: int) -> str:
    return colors.SERIES[number % len(colors.SERIES)]


def _scale(axes: Axes, xs: Sequence[float], ys: Sequence[float], ticks: bool) -> None:
    """Scale both axes: logarithmic for more than a decade, and on x for powers of two.

    ticks: put the ticks of x at its values.
    """
    axes.margins(0.08)
    powers = ticks and all(x > 0 and math.log2(x).is_integer() for x in xs)
    for axis, values, log in ((axes.xaxis, xs, powers), (axes.yaxis, ys, False)):
        if log or (values and 0 < 10 * min(values) < max(values)):
            axes.set(**{f"{axis.axis_name}scale": "log"})
            axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axis.set_minor_formatter(ticker.NullFormatter())
        elif axis is axes.yaxis:
            axes.set_ylim(bottom=0.0 if min(values, default=0.0) >= 0 else None)
        axis.set_major_formatter(style.tick_formatter())
    if ticks and len(set(xs)) <= 12:
        axes.set_xticks(sorted(set(xs)), [f"{x:g}" for x in sorted(set(xs))])
        axes.xaxis.set_minor_locator(ticker.NullLocator())


# ---- bars
Series = Mapping[str, tuple[Sequence[float], Sequence[str]]]
"""Lengths of horizontal bars of one colour and the labels at their ends, by meaning."""


def _bars(table: StudyTable) -> Figure:
    """Draw a bar per configuration and a panel per y; several y in seconds are stacked."""
    study, ys = table.study, table.study.y
    stacked = len(ys) > 1 and {study.quantity(y).unit for y in ys} in ({"s"}, {"ms"})
    names, count = _bar_names(table), len(table.data)
    panels = [ys] if stacked else [(y,) for y in ys]
    width_in = 5.5 * len(panels) + 4
    figure, sheets = style.sheet(len(panels), _height_in(count), width_in, sharey=True)
    for axes, parts in zip(sheets, panels, strict=True):
        # The label at the end of a bar is the sum of its parts.
        lengths = pd.DataFrame({study.quantity(y).label: _scaled(table, y) for y in parts})
        ends = _endings(table.data["status"], lengths.sum(axis=1, min_count=1).map(number))
        words = [[""] * count] * (len(parts) - 1) + [ends]
        series = {
            str(label): (column.tolist(), labels)
            for (label, column), labels in zip(lengths.items(), words, strict=True)
        }
        heading = study.quantity(parts[0]).heading
        if stacked:
            heading = study.quantity(parts[0]).unit
            heading += " per step" if all(y.startswith("step_") for y in ys) else ""
        _draw(axes, names, series, heading, stacked)
    if stacked:
        style.legend(figure)
    return figure


def _bar_names(table: StudyTable) -> list[str]:
    """Name configurations by their varied knobs, without sections where that is unambiguous."""
    leaves = [knob.rpartition(".")[2] for knob in table.varied]
    heads = [
        leaf if leaves.count(leaf) == 1 else knob
        for knob, leaf in zip(table.varied, leaves, strict=True)
    ]
    names = []
    for label, row in zip(
        table.data["configuration"], table.data[list(table.varied)].to_numpy(), strict=True
    ):
        words = [
            f"{head} {knob_value(value)}"
            for head, value in zip(heads, row, strict=True)
            if pd.notna(value)
        ]
        names.append(", ".join(words) or label)
    return names


def _ladder(table: StudyTable, y: str) -> Figure:
    """Draw every rung after those before it, and alone; labels: percent of the base."""
    rows = table.data.assign(length=_scaled(table, y))
    base = rows.loc[rows["place"] == "base", "length"].max()
    rows["words"] = _endings(rows["status"], (100 * rows["length"] / base).map("{:.0f} %".format))
    together, alone = rows[rows["place"] != "alone"], rows[rows["place"] == "alone"]
    names = together["configuration"]
    alone = alone.set_index(alone["configuration"].str.removesuffix(" alone"))
    alone = alone.reindex(names.str.removeprefix("+ ")).fillna({"words": ""})
    series = {
        label: (part["length"].tolist(), part["words"].tolist())
        for label, part in (("with all rungs before it", together), ("alone", alone))
    }
    figure, (axes,) = style.sheet(1, _height_in(1.1 * len(together)), 9.5)
    _draw(axes, names.tolist(), series, table.study.quantity(y).heading)
    if base > 0:
        axes.axvline(base, color=colors.BASELINE, linewidth=1, linestyle=":", label="base")
    style.legend(figure)
    return figure


def _operations(table: StudyTable) -> Figure:
    """Draw the longest operations of every configuration, by their self time in one step."""
    rows = [operations for _, operations in table.operations.groupby(level=0)]
    most = max(map(len, rows), default=1)
    height_in = 1.0 + max(1, len(rows)) * (0.5 + 0.27 * most)
    figure = Figure(figsize=(style.WIDTH_IN, height_in), layout="constrained")
    panels = figure.subplots(len(rows) or 1, 1, squeeze=False, sharex=True)
    scale = table.study.quantity("self_s_per_step").scale
    for axes, operations in zip(panels[:, 0], rows, strict=False):
        names = [short(name, 60) for name in operations["operation"]]
        lengths = list(operations["self_s_per_step"] * scale)
        words = [
            f"{number(length)} ({100 * share:.0f} %)"
            for length, share in zip(lengths, operations["share"], strict=True)
        ]
        _draw(axes, names, {"": (lengths, words)}, "")
        axes.set_title(table.data["configuration"][operations.index[0]], fontsize=9, loc="left")
    panels[-1, 0].set_xlabel("self time in one step (ms), share of all")
    return figure


def _height_in(bars: float) -> float:
    return 1.6 + 0.42 * max(2.0, bars)


def _endings(status: pd.Series, words: pd.Series) -> list[str]:
    """Return the labels of bars: their values, or how runs without one have ended."""
    return [how if "nan" in label else label for how, label in zip(status, words, strict=True)]


def _draw(
    axes: Axes, names: Sequence[str], series: Series, heading: str, stacked: bool = False
) -> None:
    """Draw the bars of all series next to each other, or stacked; the first name is on top."""
    height, starts, ends = 0.8 if stacked else 0.8 / len(series), np.zeros(len(names)), [0.0]
    for i, (label, (values, words)) in enumerate(series.items()):
        shift = 0.0 if stacked else (i - (len(series) - 1) / 2) * height
        rows, lengths = np.arange(len(names)) + shift, np.nan_to_num(values)
        color = _series(i) if len(series) > 1 else colors.PLAIN
        bars = axes.barh(rows, lengths, 0.92 * height, starts, color=color, label=label)
        axes.bar_label(bars, words, padding=4, fontsize=8)
        ends += list(starts + lengths)
        starts = starts + lengths if stacked else starts
    labels = [fitted(name, 50) for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(heading)
    # Leave space for the labels.
    axes.set_xlim(1.18 * min(ends), max(axes.get_xlim()[1], 1.18 * max(ends)))
    axes.grid(True, axis="x", color="0.9")
    axes.set_axisbelow(True)
