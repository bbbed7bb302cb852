"""The figure that a study ends with: of a ladder its rungs, of operations the longest, else lines over `x`, or bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tunediff.analysis import is_number
from tunediff.core import colors
from tunediff.core.text import number
from tunediff.report.study_table import DISTURBED, NO_EFFECT, Row, Table
from tunediff.report.style import NARROW_IN, WIDTH_IN, Digits, headline, legend, letters, sheet, stacked
from tunediff.report.words import fitted, short

MARKERS = "osD^v<>h"


def figure(table: Table, subtitle: str) -> Figure:
    """The study's figure; `subtitle` says what it was measured on. Raises `ValueError` where it has none."""
    study = table.study
    if not study.has_figure:
        raise ValueError("this study has no figure")
    if study.of_operations:
        drawn = _operations(table)
    elif any(row.place for row in table.rows):
        drawn = _ladder(table, study.y[0])
    else:
        drawn = _bars(table) if study.x is None else _lines(table, study.x)
    words = {NO_EFFECT: "changes nothing here", DISTURBED: "others used the machine"}
    marks = [f"{mark} {meaning}" for mark, meaning in words.items() if any(mark in table.marks(r) for r in table.rows)]
    marks += ["others used the machine during every run"] * table.all_disturbed
    headline(drawn, "\n".join(filter(None, (study.title, subtitle, ", ".join(marks)))))
    return drawn


def _scaled(table: Table, row: Row, name: str) -> float | None:
    """A value as it is shown; None: not known."""
    value = row.value(name)
    return float(value) * table.study.quantity(name).scale if is_number(value) else None


# -------------------------------------------------------------------------------------------------------------- lines
def _lines(table: Table, x: str) -> Figure:
    """A panel for each y; a line for each combination of the other knobs that vary.

    Where x is measured, the last of them runs along each line instead, its value written at the points.
    """
    measured, ys = x in table.study.numbers, table.study.y
    along = "".join(table.varied[-1:]) if measured else x
    others = [knob for knob in table.varied if knob != along]
    names = [", ".join(number(row.knobs[knob]) for knob in others if knob in row.knobs) for row in table.rows]
    figure, panels = sheet(len(ys), 4.6, 5.6 * len(ys) + 1)
    for axes, y in zip(panels, ys, strict=True):
        found = [
            (_scaled(table, row, x), _scaled(table, row, y), name, row)
            for name, row in zip(names, table.rows, strict=True)
        ]
        points = [(at, value, name, row) for at, value, name, row in found if at is not None and value is not None]
        points.sort(key=lambda point: point[:2])
        for i, line in enumerate(dict.fromkeys(names)):
            places = [(at, value) for at, value, name, _ in points if name == line]
            if places:
                axes.plot(*zip(*places, strict=True), f"{MARKERS[i % 8]}-", color=_series(i), markersize=5, label=line)
        for at, value, _, row in points:
            words = f"{number(row.knobs.get(along, '')) if measured else ''} {table.marks(row)}".strip()
            axes.annotate(words, (at, value), (4, 4), textcoords="offset points", fontsize=8)
        _scale(axes, [point[0] for point in points], [point[1] for point in points], ticks=not measured)
        axes.set(xlabel=table.study.quantity(x).heading, ylabel=table.study.quantity(y).heading)
        axes.grid(True, which="major", color="0.9")
    if others:
        legend(figure, title=", ".join(others))
    return figure


def _series(place: int) -> str:
    return colors.SERIES[place % len(colors.SERIES)]


def _scale(axes: Axes, xs: list[float], ys: list[float], ticks: bool) -> None:
    """Logarithmic for more than a decade, on x for powers of two as well; `ticks`: the values of x are its ticks."""
    axes.margins(0.08)
    powers = ticks and all(x > 0 and math.log2(x).is_integer() for x in xs)
    for axis, values, log in ((axes.xaxis, xs, powers), (axes.yaxis, ys, False)):
        if log or (values and 0 < 10 * min(values) < max(values)):
            axes.set(**{f"{axis.axis_name}scale": "log"})
            axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(Digits())
            axis.set_minor_formatter(ticker.NullFormatter())
        else:
            axis.set_major_formatter(Digits())
        if axis is axes.yaxis and axis.get_scale() == "linear":
            axes.set_ylim(bottom=0.0 if min(values, default=0.0) >= 0 else None)
    if ticks and len(set(xs)) <= 12:
        axes.set_xticks(sorted(set(xs)), [f"{x:g}" for x in sorted(set(xs))])
        axes.xaxis.set_minor_locator(ticker.NullLocator())


# --------------------------------------------------------------------------------------------------------------- bars
Series = Mapping[str, tuple[Sequence[float | None], Sequence[str]]]
"""Lengths of lying bars of one colour and the words at their ends, by the colour's meaning."""


def _bars(table: Table) -> Figure:
    """A bar for each configuration, in a panel for each y; several parts in seconds are laid end to end instead."""
    ys, rows = table.study.y, table.rows
    stacked = len(ys) > 1 and {table.study.quantity(y).unit for y in ys} in ({"s"}, {"ms"})
    leaves = [knob.rpartition(".")[2] for knob in table.varied]
    clear = {knob: leaf if leaves.count(leaf) == 1 else knob for knob, leaf in zip(table.varied, leaves, strict=True)}
    named = [{short: row.knobs[knob] for knob, short in clear.items() if knob in row.knobs} for row in rows]
    said = [", ".join(f"{short} {number(value)}" for short, value in of.items()) for of in named]
    names = [words or row.label for words, row in zip(said, rows, strict=True)]
    panels = [ys] if stacked else [(y,) for y in ys]
    figure, sheets = sheet(len(panels), _height_in(len(rows)), 5.5 * len(panels) + 4, sharey=True)
    for axes, parts in zip(sheets, panels, strict=True):
        lengths = [[_scaled(table, row, y) for row in rows] for y in parts]
        known = [[one for one in of if one is not None] for of in zip(*lengths, strict=True)]
        ends = [_ending(table, row, number(sum(of)) if of else None) for row, of in zip(rows, known, strict=True)]
        words = [[""] * len(rows)] * (len(parts) - 1) + [ends]
        series = {
            table.study.quantity(y).label: of for y, of in zip(parts, zip(lengths, words, strict=True), strict=True)
        }
        per_step = " per step" if all(y.startswith("step_") for y in ys) else ""
        first = table.study.quantity(parts[0])
        _draw(axes, names, series, first.unit + per_step if stacked else first.heading, stacked)
    if stacked:
        legend(figure)
    return figure


def _ladder(table: Table, y: str) -> Figure:
    """Every rung with those before it, and beside it the rung alone; percent of the base are written at the bars."""
    together = [row for row in table.rows if row.place != "alone"]
    by_name = {row.label.removesuffix(" alone"): row for row in table.rows if row.place == "alone"}
    alone = [by_name.get(row.label.removeprefix("+ ")) for row in together]
    base = next((_scaled(table, row, y) for row in together if row.place == "base"), None)
    series = {}
    for label, rows in (("with all rungs before it", together), ("alone", alone)):
        lengths = [_scaled(table, row, y) if row is not None else None for row in rows]
        percents = [f"{100 * one / base:.0f} %" if one is not None and base else None for one in lengths]
        words = ["" if row is None else _ending(table, row, said) for row, said in zip(rows, percents, strict=True)]
        series[label] = lengths, words
    figure, (axes,) = sheet(1, _height_in(1.1 * len(together)), 9.5)
    _draw(axes, [row.label for row in together], series, table.study.quantity(y).heading)
    if base:
        axes.axvline(base, color=colors.BASELINE, linewidth=1, linestyle=":", label="base")
    legend(figure)
    return figure


def _operations(table: Table) -> Figure:
    """The longest operations of every configuration, by their own time in one step."""
    rows = [row for row in table.rows if len(row.operations)] or table.rows[:1]
    most = max((len(row.operations) for row in rows), default=1)
    width_in = NARROW_IN if stacked() else WIDTH_IN
    figure = Figure(figsize=(width_in, 1.0 + len(rows) * (0.5 + 0.27 * max(1, most))), layout="constrained")
    panels = figure.subplots(len(rows) or 1, 1, squeeze=False, sharex=True)
    for axes, row in zip(panels[:, 0], rows, strict=False):
        columns = row.operations.reindex(columns=["operation", "self_s_per_step", "share"])
        lengths = list(columns["self_s_per_step"] * table.study.quantity("self_s_per_step").scale)
        words = [f"{number(one)} ({100 * share:.0f} %)" for one, share in zip(lengths, columns["share"], strict=True)]
        names = [short(name, letters(60)) for name in columns["operation"]]
        _draw(axes, names, {"": (lengths, words)}, "")
        axes.set_title(f"{row.label} {table.marks(row)}", fontsize=9, loc="left")
    panels[-1, 0].set_xlabel("own time in one step (ms), share of all")
    return figure


def _height_in(bars: float) -> float:
    return 1.6 + 0.42 * max(2.0, bars)


def _ending(table: Table, row: Row, text: str | None) -> str:
    """What stands at the end of a bar: a value and marks, or how the row ended when it has none."""
    return f"{row.status if text is None else text} {table.marks(row)}".strip()


def _draw(axes: Axes, names: list[str], series: Series, heading: str, stacked: bool = False) -> None:
    """Bars beside a name for each series, or end to end; the first name on top."""
    height, starts, ends = 0.8 if stacked else 0.8 / len(series), np.zeros(len(names)), [0.0]
    for i, (label, (known, words)) in enumerate(series.items()):
        places = np.arange(len(names)) + (0.0 if stacked else (i - (len(series) - 1) / 2) * height)
        lengths = np.array([length or 0.0 for length in known])
        bars = axes.barh(
            places, lengths, 0.92 * height, starts, color=_series(i) if len(series) > 1 else colors.PLAIN, label=label
        )
        axes.bar_label(bars, words, padding=4, fontsize=8)
        ends += list(starts + lengths)
        starts = starts + lengths if stacked else starts
    axes.set_yticks(range(len(names)), [fitted(name, letters(50)) for name in names], fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(heading)
    axes.set_xlim(1.18 * min(ends), max(axes.get_xlim()[1], 1.18 * max(ends)))  # room for the words
    axes.grid(True, axis="x", color="0.9")
    axes.set_axisbelow(True)
