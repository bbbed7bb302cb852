"""Draw the figure of a study: the rungs of a ladder, the longest operations, lines over `x`, or
bars."""

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
from tunediff.report.study_table import DISTURBED, NO_EFFECT, Row, Table
from tunediff.report.style import (
    NARROW_IN,
    WIDTH_IN,
    Digits,
    headline,
    legend,
    max_characters,
    sheet,
    stacked,
)
from tunediff.report.words import fitted, short

MARKERS = "osD^v<>h"


def figure(table: Table, subtitle: str) -> Figure:
    """Return the study's figure; `subtitle`: hardware and budget. Raises `ValueError` if the study
    has no figure."""
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
    marks = [
        f"{mark} {meaning}"
        for mark, meaning in words.items()
        if any(mark in table.marks(r) for r in table.rows)
    ]
    marks += ["others used the machine during every run"] * table.all_disturbed
    headline(drawn, "\n".join(filter(None, (study.title, subtitle, ", ".join(marks)))))
    return drawn


def _scaled(table: Table, row: Row, name: str) -> float | None:
    """Return a value in the unit that the figure shows; None if it is unknown."""
    value = row.value(name)
    return float(value) * table.study.quantity(name).scale if is_number(value) else None


# ---- lines
def _lines(table: Table, x: str) -> Figure:
    """Draw one panel per y with one line per combination of the other knobs that vary.

    If x is a measured quantity, the last of these knobs varies along each line, and the points are
    labelled with it.
    """
    measured, ys = x in table.study.numbers, table.study.y
    along = "".join(table.varied[-1:]) if measured else x
    others = [knob for knob in table.varied if knob != along]
    names = [
        ", ".join(knob_value(row.knobs[knob]) for knob in others if knob in row.knobs)
        for row in table.rows
    ]
    # One panel per y: lines through the points of equal names, then labels at the points.
    figure, panels = sheet(len(ys), 4.6, 5.6 * len(ys) + 1)
    for axes, y in zip(panels, ys, strict=True):
        candidates = [
            (_scaled(table, row, x), _scaled(table, row, y), name, row)
            for name, row in zip(names, table.rows, strict=True)
        ]
        points = [
            (at, value, name, row)
            for at, value, name, row in candidates
            if at is not None and value is not None
        ]
        points.sort(key=lambda point: point[:2])
        for i, line in enumerate(dict.fromkeys(names)):
            places = [(at, value) for at, value, name, _ in points if name == line]
            if places:
                axes.plot(
                    *zip(*places, strict=True),
                    f"{MARKERS[i % 8]}-",
                    color=_series(i),
                    markersize=5,
                    label=line,
                )
        for at, value, _, row in points:
            words = f"{knob_value(row.knobs.get(along, '')) if measured else ''} {table.marks(row)}".strip()
            axes.annotate(words, (at, value), (4, 4), textcoords="offset points", fontsize=8)
        _scale(
            axes, [point[0] for point in points], [point[1] for point in points], ticks=not measured
        )
        axes.set(xlabel=table.study.quantity(x).heading, ylabel=table.study.quantity(y).heading)
        axes.grid(True, which="major", color="0.9")
    if others:
        legend(figure, title=", ".join(others))
    return figure


def _series(place: int) -> str:
    return colors.SERIES[place % len(colors.SERIES)]


def _scale(axes: Axes, xs: list[float], ys: list[float], ticks: bool) -> None:
    """Scale both axes: logarithmic for more than a decade, and on x for powers of two.

    ticks: put the ticks of x at its values.
    """
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


# ---- bars
Series = Mapping[str, tuple[Sequence[float | None], Sequence[str]]]
"""Lengths of the horizontal bars of one colour and the labels at their ends, by the colour's
meaning."""


def _bars(table: Table) -> Figure:
    """Draw one bar per configuration in one panel per y; if all y are seconds, stack them in one
    panel."""
    ys, rows = table.study.y, table.rows
    stacked = len(ys) > 1 and {table.study.quantity(y).unit for y in ys} in ({"s"}, {"ms"})
    # Name a configuration by its varied knobs, without their sections where that is unambiguous.
    leaves = [knob.rpartition(".")[2] for knob in table.varied]
    clear = {
        knob: leaf if leaves.count(leaf) == 1 else knob
        for knob, leaf in zip(table.varied, leaves, strict=True)
    }
    named = [
        {short: row.knobs[knob] for knob, short in clear.items() if knob in row.knobs}
        for row in rows
    ]
    labels = [
        ", ".join(f"{short} {knob_value(value)}" for short, value in of.items()) for of in named
    ]
    names = [words or row.label for words, row in zip(labels, rows, strict=True)]
    panels = [ys] if stacked else [(y,) for y in ys]
    figure, sheets = sheet(len(panels), _height_in(len(rows)), 5.5 * len(panels) + 4, sharey=True)
    for axes, parts in zip(sheets, panels, strict=True):
        lengths = [[_scaled(table, row, y) for row in rows] for y in parts]
        stacks = [
            [length for length in of if length is not None] for of in zip(*lengths, strict=True)
        ]
        ends = [
            _ending(table, row, number(sum(of)) if of else None)
            for row, of in zip(rows, stacks, strict=True)
        ]
        words = [[""] * len(rows)] * (len(parts) - 1) + [ends]
        series = {
            table.study.quantity(y).label: of
            for y, of in zip(parts, zip(lengths, words, strict=True), strict=True)
        }
        per_step = " per step" if all(y.startswith("step_") for y in ys) else ""
        first = table.study.quantity(parts[0])
        _draw(axes, names, series, first.unit + per_step if stacked else first.heading, stacked)
    if stacked:
        legend(figure)
    return figure


def _ladder(table: Table, y: str) -> Figure:
    """Draw every rung with those before it and alone; the bars are labelled with percent of the
    base."""
    together = [row for row in table.rows if row.place != "alone"]
    by_name = {row.label.removesuffix(" alone"): row for row in table.rows if row.place == "alone"}
    alone = [by_name.get(row.label.removeprefix("+ ")) for row in together]
    base = next((_scaled(table, row, y) for row in together if row.place == "base"), None)
    series = {}
    for label, rows in (("with all rungs before it", together), ("alone", alone)):
        lengths = [_scaled(table, row, y) if row is not None else None for row in rows]
        percents = [
            f"{100 * length / base:.0f} %" if length is not None and base else None
            for length in lengths
        ]
        words = [
            "" if row is None else _ending(table, row, percent)
            for row, percent in zip(rows, percents, strict=True)
        ]
        series[label] = lengths, words
    figure, (axes,) = sheet(1, _height_in(1.1 * len(together)), 9.5)
    _draw(axes, [row.label for row in together], series, table.study.quantity(y).heading)
    if base:
        axes.axvline(base, color=colors.BASELINE, linewidth=1, linestyle=":", label="base")
    legend(figure)
    return figure


def _operations(table: Table) -> Figure:
    """Draw the longest operations of every configuration, by their own time in one step."""
    rows = [row for row in table.rows if len(row.operations)] or table.rows[:1]
    most = max((len(row.operations) for row in rows), default=1)
    width_in = NARROW_IN if stacked() else WIDTH_IN
    figure = Figure(
        figsize=(width_in, 1.0 + len(rows) * (0.5 + 0.27 * max(1, most))), layout="constrained"
    )
    panels = figure.subplots(len(rows) or 1, 1, squeeze=False, sharex=True)
    for axes, row in zip(panels[:, 0], rows, strict=False):
        columns = row.operations.reindex(columns=["operation", "self_s_per_step", "share"])
        lengths = list(columns["self_s_per_step"] * table.study.quantity("self_s_per_step").scale)
        words = [
            f"{number(length)} ({100 * share:.0f} %)"
            for length, share in zip(lengths, columns["share"], strict=True)
        ]
        names = [short(name, max_characters(60)) for name in columns["operation"]]
        _draw(axes, names, {"": (lengths, words)}, "")
        axes.set_title(f"{row.label} {table.marks(row)}", fontsize=9, loc="left")
    panels[-1, 0].set_xlabel("own time in one step (ms), share of all")
    return figure


def _height_in(bars: float) -> float:
    return 1.6 + 0.42 * max(2.0, bars)


def _ending(table: Table, row: Row, text: str | None) -> str:
    """Return the label of a bar: its value, or the row's status if it has none, and its marks."""
    return f"{row.status if text is None else text} {table.marks(row)}".strip()


def _draw(
    axes: Axes, names: list[str], series: Series, heading: str, stacked: bool = False
) -> None:
    """Draw the bars of all series beside each other, or stacked; the first name is on top."""
    height, starts, ends = 0.8 if stacked else 0.8 / len(series), np.zeros(len(names)), [0.0]
    for i, (label, (values, words)) in enumerate(series.items()):
        places = np.arange(len(names)) + (0.0 if stacked else (i - (len(series) - 1) / 2) * height)
        lengths = np.array([length or 0.0 for length in values])
        bars = axes.barh(
            places,
            lengths,
            0.92 * height,
            starts,
            color=_series(i) if len(series) > 1 else colors.PLAIN,
            label=label,
        )
        axes.bar_label(bars, words, padding=4, fontsize=8)
        ends += list(starts + lengths)
        starts = starts + lengths if stacked else starts
    axes.set_yticks(
        range(len(names)), [fitted(name, max_characters(50)) for name in names], fontsize=8
    )
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(heading)
    axes.set_xlim(
        1.18 * min(ends), max(axes.get_xlim()[1], 1.18 * max(ends))
    )  # space for the labels
    axes.grid(True, axis="x", color="0.9")
    axes.set_axisbelow(True)
