"""Draw a study's figure: rungs of a ladder, longest operations, lines over `x`, or bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tunediff.analysis import is_number
from tunediff.core import colors
from tunediff.core.text import knob_value, number
from tunediff.report import style
from tunediff.report.study_rows import Row
from tunediff.report.study_table import DISTURBED, NO_EFFECT, StudyTable
from tunediff.report.words import fitted, short

MARKERS = "osD^v<>h"


def figure(table: StudyTable, subtitle: str) -> Figure:
    """Return the study's figure; `subtitle`: hardware, budget. Raises `ValueError` without one."""
    study = table.study
    if not study.has_figure:
        raise ValueError("this study has no figure")
    if study.of_operations:
        drawn = _operations(table)
    elif any(row.place for row in table.rows):
        drawn = _ladder(table, study.y[0])
    else:
        drawn = _bars(table) if study.x is None else _lines(table, study.x)
    marked = "".join(map(table.marks, table.rows))
    meanings = {NO_EFFECT: "changes nothing here", DISTURBED: "others used the machine"}
    marks = [f"{mark} {meaning}" for mark, meaning in meanings.items() if mark in marked]
    if table.all_disturbed:
        marks.append("others used the machine during every run")
    style.add_title(drawn, "\n".join(filter(None, (study.title, subtitle, ", ".join(marks)))))
    return drawn


def _scaled(table: StudyTable, row: Row | None, name: str) -> float | None:
    """Return a value in the unit that the figure shows; None if it is unknown."""
    value = row.value(name) if row is not None else None
    return float(value) * table.study.quantity(name).scale if is_number(value) else None


# ---- lines
def _lines(table: StudyTable, x: str) -> Figure:
    """Draw one panel per y with one line per combination of the other knobs that vary.

    If x is a measured quantity, the last of these knobs varies along each line, and the points are
    labelled with it.
    """
    measured, ys = x in table.study.numbers, table.study.y
    along = "".join(table.varied[-1:]) if measured else x
    others = [knob for knob in table.varied if knob != along]
    figure, panels = style.sheet(len(ys), 4.6, 5.6 * len(ys) + 1)
    for axes, y in zip(panels, ys, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in sorted(table.rows, key=lambda row: _scaled(table, row, x) or 0.0):
            knobs = [knob_value(row.knobs[knob]) for knob in others if knob in row.knobs]
            line = lines.setdefault(", ".join(knobs), [])
            at, value = _scaled(table, row, x), _scaled(table, row, y)
            if at is not None and value is not None:
                line.append((at, value))
                label = knob_value(row.knobs.get(along, "")) if measured else ""
                words = f"{label} {table.marks(row)}".strip()
                axes.annotate(words, (at, value), (4, 4), textcoords="offset points", fontsize=8)
        for i, (name, points) in enumerate(lines.items()):
            if points:
                look = f"{MARKERS[i % len(MARKERS)]}-"
                color = _series(i)
                axes.plot(*zip(*points, strict=True), look, color=color, markersize=5, label=name)
        _scale(axes, [point for line in lines.values() for point in line], ticks=not measured)
        axes.set(xlabel=table.study.quantity(x).heading, ylabel=table.study.quantity(y).heading)
        axes.grid(True, which="major", color="0.9")
    if others:
        style.legend(figure, title=", ".join(others))
    return figure


def _series(number: int) -> str:
    return colors.SERIES[number % len(colors.SERIES)]


def _scale(axes: Axes, points: Sequence[tuple[float, float]], ticks: bool) -> None:
    """Scale both axes: logarithmic for more than a decade, and on x for powers of two.

    ticks: put the ticks of x at its values.
    """
    axes.margins(0.08)
    xs, ys = [x for x, _ in points], [y for _, y in points]
    powers = ticks and all(x > 0 and math.log2(x).is_integer() for x in xs)
    for axis, values, log in ((axes.xaxis, xs, powers), (axes.yaxis, ys, False)):
        if log or (values and 0 < 10 * min(values) < max(values)):
            axes.set(**{f"{axis.axis_name}scale": "log"})
            axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axis.set_minor_formatter(ticker.NullFormatter())
        elif axis is axes.yaxis:
            axes.set_ylim(bottom=0.0 if min(values, default=0.0) >= 0 else None)
        axis.set_major_formatter(style.Digits())
    if ticks and len(set(xs)) <= 12:
        axes.set_xticks(sorted(set(xs)), [f"{x:g}" for x in sorted(set(xs))])
        axes.xaxis.set_minor_locator(ticker.NullLocator())


# ---- bars
Series = Mapping[str, tuple[Sequence[float | None], Sequence[str]]]
"""Lengths of horizontal bars of one colour and the labels at their ends, by meaning."""


def _bars(table: StudyTable) -> Figure:
    """Draw a bar per configuration and a panel per y; several y in seconds are stacked."""
    study, ys, rows = table.study, table.study.y, table.rows
    stacked = len(ys) > 1 and {study.quantity(y).unit for y in ys} in ({"s"}, {"ms"})
    names = _bar_names(table)
    panels = [ys] if stacked else [(y,) for y in ys]
    width_in = 5.5 * len(panels) + 4
    figure, sheets = style.sheet(len(panels), _height_in(len(rows)), width_in, sharey=True)
    for axes, parts in zip(sheets, panels, strict=True):
        # The label at the end of a bar is the sum of its parts.
        lengths = [[_scaled(table, row, y) for row in rows] for y in parts]
        ends = []
        for row, values in zip(rows, zip(*lengths, strict=True), strict=True):
            known = [value for value in values if value is not None]
            ends.append(_ending(table, row, number(sum(known)) if known else None))
        words = [[""] * len(rows)] * (len(parts) - 1) + [ends]
        labels = [study.quantity(y).label for y in parts]
        series = dict(zip(labels, zip(lengths, words, strict=True), strict=True))
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
    leaves, names = [knob.rpartition(".")[2] for knob in table.varied], list[str]()
    for row in table.rows:
        words = []
        for knob, leaf in zip(table.varied, leaves, strict=True):
            if knob in row.knobs:
                shown = leaf if leaves.count(leaf) == 1 else knob
                words.append(f"{shown} {knob_value(row.knobs[knob])}")
        names.append(", ".join(words) or row.label)
    return names


def _ladder(table: StudyTable, y: str) -> Figure:
    """Draw every rung after those before it, and alone; labels: percent of the base."""
    together: list[Row | None] = [row for row in table.rows if row.place != "alone"]
    by_name = {row.label.removesuffix(" alone"): row for row in table.rows if row.place == "alone"}
    names = [row.label for row in together if row is not None]
    alone = [by_name.get(name.removeprefix("+ ")) for name in names]
    bases = (_scaled(table, row, y) for row in table.rows if row.place == "base")
    base, series = next(bases, None), {}
    for label, rows in (("with all rungs before it", together), ("alone", alone)):
        lengths, words = [_scaled(table, row, y) for row in rows], list[str]()
        for row, length in zip(rows, lengths, strict=True):
            percent = f"{100 * length / base:.0f} %" if length is not None and base else None
            words.append("" if row is None else _ending(table, row, percent))
        series[label] = lengths, words
    figure, (axes,) = style.sheet(1, _height_in(1.1 * len(together)), 9.5)
    _draw(axes, names, series, table.study.quantity(y).heading)
    if base:
        axes.axvline(base, color=colors.BASELINE, linewidth=1, linestyle=":", label="base")
    style.legend(figure)
    return figure


def _operations(table: StudyTable) -> Figure:
    """Draw the longest operations of every configuration, by their self time in one step."""
    rows = [row for row in table.rows if len(row.operations)] or table.rows[:1]
    most = max((len(row.operations) for row in rows), default=1)
    height_in = 1.0 + len(rows) * (0.5 + 0.27 * max(1, most))
    figure = Figure(figsize=(style.WIDTH_IN, height_in), layout="constrained")
    panels = figure.subplots(len(rows) or 1, 1, squeeze=False, sharex=True)
    scale = table.study.quantity("self_s_per_step").scale
    for axes, row in zip(panels[:, 0], rows, strict=False):
        columns = row.operations.reindex(columns=["operation", "self_s_per_step", "share"])
        names = [short(name, 60) for name in columns["operation"]]
        lengths = list(columns["self_s_per_step"] * scale)
        words = [
            f"{number(length)} ({100 * share:.0f} %)"
            for length, share in zip(lengths, columns["share"], strict=True)
        ]
        _draw(axes, names, {"": (lengths, words)}, "")
        axes.set_title(f"{row.label} {table.marks(row)}", fontsize=9, loc="left")
    panels[-1, 0].set_xlabel("self time in one step (ms), share of all")
    return figure


def _height_in(bars: float) -> float:
    return 1.6 + 0.42 * max(2.0, bars)


def _ending(table: StudyTable, row: Row, words: str | None) -> str:
    """Return the label of a bar: its value, or the row's status if it has none, and its marks."""
    return f"{row.status if words is None else words} {table.marks(row)}".strip()


def _draw(
    axes: Axes, names: list[str], series: Series, heading: str, stacked: bool = False
) -> None:
    """Draw the bars of all series next to each other, or stacked; the first name is on top."""
    height, starts, ends = 0.8 if stacked else 0.8 / len(series), np.zeros(len(names)), [0.0]
    for i, (label, (values, words)) in enumerate(series.items()):
        shift = 0.0 if stacked else (i - (len(series) - 1) / 2) * height
        rows = np.arange(len(names)) + shift
        lengths = np.array([length or 0.0 for length in values])
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
