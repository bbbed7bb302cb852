"""The figure that a study ends with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, also where there is a screen
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Sheet

from tunediff.cli import number
from tunediff.report.study_table import DISTURBED, NO_EFFECT, Row, Table
from tunediff.study import Figure, quantity

MARKERS = "osD^vP*X"


def draw(table: Table, subtitle: str, path: Path) -> None:
    """Draw the study's figure; `subtitle` says what it was measured on. Writes a PNG."""
    wanted = table.study.figure
    if wanted is None:
        raise ValueError("this study has no figure")
    drawing = {"lines": _lines, "bars": _bars, "stacked": _stacked, "ladder": _ladder, "operations": _operations}
    sheet = drawing[wanted.kind](table, wanted)
    title = "\n".join(words for words in (table.study.title, subtitle, _legend_of_marks(table)) if words)
    sheet.suptitle(title, fontsize=10)
    sheet.savefig(path, dpi=120)
    plt.close(sheet)


def _legend_of_marks(table: Table) -> str:
    words = []
    if any(row.without_effect for row in table.rows):
        words.append(f"{NO_EFFECT} changes nothing here")
    if table.all_disturbed:
        words.append("others used the machine during every run")
    elif any(row.disturbed for row in table.rows):
        words.append(f"{DISTURBED} others used the machine")
    return ", ".join(words)


# -------------------------------------------------------------------------------------------------------------- lines
def _lines(table: Table, wanted: Figure) -> Sheet:
    """A panel for each y; a line for each value of the knobs in `lines`."""
    sheet, panels = plt.subplots(1, len(wanted.y), squeeze=False, figsize=(5.6 * len(wanted.y) + 1, 4.6),
                                 layout="constrained")  # fmt: skip
    names = _categories(table, wanted.x)
    for axes, y in zip(panels[0], wanted.y, strict=True):
        for i, (name, rows) in enumerate(_by_line(table, wanted).items()):
            points = [(_place(row, wanted.x, names), _scaled(row, y), row) for row in rows]
            shown = [(x, value, row) for x, value, row in points if x is not None and value is not None]
            if not shown:
                continue
            shown.sort(key=lambda point: point[:2])
            axes.plot(
                [x for x, _, _ in shown],
                [value for _, value, _ in shown],
                color=plt.get_cmap("tab10")(i % 10),
                marker=MARKERS[i % len(MARKERS)],
                markersize=5,
                label=name,
            )
            for x, value, row in shown:
                words = [number(row.knobs.get(wanted.labels, "")) if wanted.labels else "", table.marks(row)]
                if text := " ".join(word for word in words if word):
                    axes.annotate(text, (x, value), xytext=(4, 4), textcoords="offset points", fontsize=8)
        _scale(axes, wanted, names, [at for row in table.rows if (at := _place(row, wanted.x, names)) is not None])
        axes.set_xlabel(quantity(wanted.x).heading)
        axes.set_ylabel(quantity(y).heading)
        axes.grid(True, which="major", color="0.9")
        if wanted.lines and axes.lines:
            axes.legend(title=", ".join(wanted.lines), fontsize=8, title_fontsize=8)
    return sheet


def _scale(axes: Axes, wanted: Figure, names: list[str], xs: list[float]) -> None:
    """Logarithmic axes with ticks that are plain numbers; the values of a knob are its ticks."""
    axes.margins(0.08)
    if "y" in wanted.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    if names:
        axes.set_xticks(range(len(names)), names, rotation=0 if max(map(len, names)) < 12 else 20)
        return
    if "x" in wanted.log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    if quantity(wanted.x).unit or wanted.x in ("images_per_s",):  # measured: any ticks
        axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    elif len(set(xs)) <= 12:
        axes.set_xticks(sorted(set(xs)), [number(x if x % 1 else int(x)) for x in sorted(set(xs))])


def _by_line(table: Table, wanted: Figure) -> dict[str, list[Row]]:
    """Rows by the values of the knobs that make the lines, in order of first use."""
    found: dict[str, list[Row]] = {}
    for row in table.rows:
        name = ", ".join(number(row.knobs[knob]) for knob in wanted.lines if knob in row.knobs)
        found.setdefault(name, []).append(row)
    return found


def _categories(table: Table, x: str) -> list[str]:
    """The names on an x axis that holds no numbers; [] where it does."""
    values = [row.value(x) for row in table.rows]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values if value is not None):
        return []
    return list(dict.fromkeys(number(value) for value in values))


def _place(row: Row, x: str, names: list[str]) -> float | None:
    value = row.value(x)
    if names:
        return float(names.index(number(value)))
    return None if value is None else float(value) * quantity(x).scale


def _scaled(row: Row, y: str) -> float | None:
    return None if (value := row.values.get(y)) is None else value * quantity(y).scale


# --------------------------------------------------------------------------------------------------------------- bars
def _bars(table: Table, wanted: Figure) -> Sheet:
    """A panel for each y; bars for each x, beside each other for the values of the knobs in `lines`."""
    groups = _by_line(table, wanted)
    names = list(dict.fromkeys(number(_axis_value(row, wanted.x, table)) for row in table.rows))
    height = 0.8 / max(1, len(groups))
    sheet, panels = _sheet(len(wanted.y), len(names) * max(1.0, 0.6 * len(groups)))
    for axes, y in zip(panels, wanted.y, strict=True):
        for i, (name, rows) in enumerate(groups.items()):
            for j, row in enumerate(rows):
                place = names.index(number(_axis_value(row, wanted.x, table))) + (i - (len(groups) - 1) / 2) * height
                value = _scaled(row, y)
                words = _ending(table, row, None if value is None else number(value))
                color, label = plt.get_cmap("tab10")(i % 10), name if j == 0 else None
                _bar(axes, place, value, height, words, color=color, label=label)
        _name_bars(axes, names, y)
        axes.set_ylabel(quantity(wanted.x).heading if wanted.x != "configuration" else "")
        if wanted.lines and table.rows:
            axes.legend(title=", ".join(wanted.lines), fontsize=8, title_fontsize=8, loc="upper left",
                        bbox_to_anchor=(1.0, 1.0))  # fmt: skip
    return sheet


def _stacked(table: Table, wanted: Figure) -> Sheet:
    """One bar per row: all y, end to end; its whole length is written at its end."""
    rows = table.rows
    names = [" ".join(filter(None, (_words(row, wanted.x, table), table.marks(row)))) for row in rows]
    sheet, (axes,) = _sheet(1, len(rows), wide=3.0)
    starts = np.zeros(len(rows))
    for i, y in enumerate(wanted.y):
        lengths = np.array([_scaled(row, y) or 0.0 for row in rows])
        if lengths.any():
            axes.barh(range(len(rows)), lengths, left=starts, height=0.7, color=plt.get_cmap("tab10")(i % 10),
                      label=quantity(y).label)  # fmt: skip
        starts += lengths
    for place, (row, end) in enumerate(zip(rows, starts, strict=True)):
        text = number(float(end)) if end else row.status
        axes.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    _name_bars(axes, names, wanted.y[0])
    per_step = " per step" if all(y.startswith("step_") for y in wanted.y) else ""
    axes.set_xlabel(quantity(wanted.y[0]).unit + per_step)
    if wanted.x != "configuration":
        axes.set_ylabel(quantity(wanted.x).heading)
    if starts.any():
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return sheet


def _ladder(table: Table, wanted: Figure) -> Sheet:
    """Every rung with those before it, and beside it the rung alone; percent of the base are written at the bars."""
    y = wanted.y[0]
    together = [row for row in table.rows if row.place in ("base", "together")]
    alone = {row.label.removesuffix(" alone"): row for row in table.rows if row.place == "alone"}
    base = next((_scaled(row, y) for row in together if row.place == "base"), None)
    sheet, (axes,) = _sheet(1, 1.1 * len(together), wide=1.0)
    for place, row in enumerate(together):
        beside = alone.get(row.label.removeprefix("+ "))
        shift = 0.0 if row.place == "base" else -0.2
        for other, offset, color in ((row, shift, "tab:blue"), (beside, 0.2, "tab:orange")):
            if other is None:
                continue
            value = _scaled(other, y)
            percent = f"{100 * value / base:.0f} %" if value is not None and base else None
            _bar(axes, place + offset, value, 0.38, _ending(table, other, percent), color=color)
    _name_bars(axes, [row.label for row in together], y)
    axes.barh([0], [0], color="tab:blue", label="with all rungs before it")
    axes.barh([0], [0], color="tab:orange", label="alone")
    axes.legend(fontsize=8, loc="lower right" if len(together) < 4 else "best")
    if base:
        axes.axvline(base, color="0.4", linewidth=1, linestyle=":")
    return sheet


def _operations(table: Table, wanted: Figure) -> Sheet:
    """The longest operations of every configuration, by their own time in one step."""
    rows = [row for row in table.rows if row.operations] or table.rows[:1]
    most = max((len(row.operations) for row in rows), default=1)
    sheet, panels = plt.subplots(len(rows) or 1, 1, squeeze=False, sharex=True, layout="constrained",
                                 figsize=(9, 1.0 + len(rows) * (0.5 + 0.27 * max(1, most))))  # fmt: skip
    one = quantity("self_s_per_step")
    for axes, row in zip(panels[:, 0], rows, strict=False):
        lengths = [operation["self_s_per_step"] * one.scale for operation in row.operations]
        axes.barh(range(len(lengths)), lengths, height=0.7, color="tab:blue")
        for place, operation in enumerate(row.operations):
            text = f"{number(lengths[place])} ({100 * operation['share']:.0f} %)"
            axes.annotate(text, (lengths[place], place), xytext=(4, 0), textcoords="offset points", va="center",
                          fontsize=8)  # fmt: skip
        _name_bars(axes, [_short(operation["operation"]) for operation in row.operations], "self_s_per_step")
        axes.set_title(" ".join(filter(None, (row.label, table.marks(row)))), fontsize=9, loc="left")
        axes.set_xlabel("")
        axes.margins(x=0.25)
    panels[-1, 0].set_xlabel("own time in one step (ms), share of all")
    return sheet


def _sheet(panels: int, bars: float, wide: float = 0.0) -> tuple[Sheet, list[Axes]]:
    sheet, axes = plt.subplots(1, panels, squeeze=False, sharey=True, layout="constrained",
                               figsize=(5.5 * panels + 2 + wide, 1.6 + 0.42 * max(2.0, bars)))  # fmt: skip
    return sheet, list(axes[0])


def _bar(axes: Axes, place: float, value: float | None, height: float, words: str, **style: Any) -> None:
    """A bar with some words at its end."""
    axes.barh([place], [value or 0.0], height=0.92 * height, **style)
    axes.annotate(
        words,
        (value or 0.0, place),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
    )


def _ending(table: Table, row: Row, text: str | None) -> str:
    """What stands at the end of a bar: a value and marks, or how the row ended when it has none."""
    return " ".join(filter(None, (row.status if text is None else text, table.marks(row))))


def _name_bars(axes: Axes, names: list[str], y: str) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)  # the first on top
    axes.set_xlabel(quantity(y).heading)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.grid(True, axis="x", color="0.9")
    axes.set_axisbelow(True)


def _axis_value(row: Row, x: str, table: Table) -> Any:
    return _words(row, x, table) if x == "configuration" else row.value(x)


def _words(row: Row, x: str, table: Table) -> str:
    """The value of x in words; for a configuration every knob that varies, by its shortest clear name."""
    if x != "configuration":
        return number(row.value(x))
    if row.place:
        return row.label
    varied = [
        knob for knob in dict.fromkeys(knob for one in table.rows for knob in one.runs[0].drawn) if knob != "seed"
    ]
    varied = [knob for knob in varied if len({repr(one.config.get(knob)) for one in table.rows}) > 1]
    leaves = [knob.rpartition(".")[2] for knob in varied]
    clear = {knob: leaf if leaves.count(leaf) == 1 else knob for knob, leaf in zip(varied, leaves, strict=True)}
    drawn = row.runs[0].drawn
    return ", ".join(f"{clear[knob]} {number(drawn[knob])}" for knob in varied if knob in drawn) or row.label


def _short(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "…"
