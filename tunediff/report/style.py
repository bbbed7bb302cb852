"""Set the common style of all figures; `tunediff.core.colors` defines what each colour means.

A chart of the page is one SVG. The lines of many trials are rasterized inside it, which limits its
size.
"""

from __future__ import annotations

import contextlib
import io
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")  # no window, also where there is a screen
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from tunediff.core import colors
from tunediff.core.text import short

INK, SOFT, GREY, RULE = "#1f1e1b", "#69675f", colors.OTHER, "#e2dfd6"
WIDTH_IN = 9.1
"""Inches of a chart's width on the page, 96 pixels each."""
MANY = 120
"""Number of lines above which a chart rasterizes them."""
DASHED = (0, (2, 2))
STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.labelsize": 9.0,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "legend.fontsize": 8.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": GREY,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "xtick.major.width": 0.8,
    "ytick.major.width": 0.8,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "white",
    "svg.hashsalt": "tunediff",
    "text.parse_math": False,  # a $ in a file's text is a $
}


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Apply the common style inside a `with` block and suppress warnings about missing glyphs."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def draw(build: Callable[[], Figure | None], kind: Literal["svg", "png"]) -> bytes | None:
    """Draw the figure of `build`; None if it returns None."""
    with drawing():
        if (figure := build()) is None:
            return None
        file, is_svg = io.BytesIO(), kind == "svg"
        metadata = {"Date": None} if is_svg else None
        face = "none" if is_svg else "white"
        figure.savefig(file, format=kind, dpi=150, facecolor=face, metadata=metadata)
        return file.getvalue()


def sheet(
    panels: int, height_in: float, width_in: float = WIDTH_IN, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return an empty figure with panels side by side."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False, sharey=sharey)
    return figure, list(axes.flat)


def add_title(figure: Figure, text: str) -> None:
    """Add a title, wrapped at the figure's width, and increase the figure's height by its lines."""
    width_in, height_in = figure.get_size_inches()
    limit = int(width_in / 0.085)
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, limit)]
    figure.set_size_inches(width_in, height_in + 0.17 * len(lines))
    figure.suptitle("\n".join(lines), fontsize=10, x=0.01, ha="left")


def legend(figure: Figure, title: str = "") -> None:
    """Add a legend of everything with a label below the panels, where it covers nothing."""
    handles = dict[str, Any]()
    for axes in figure.axes:
        artists, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, artists, strict=True))
    if not handles:
        return
    width_in, height_in = figure.get_size_inches()
    names = [short(name, 80) for name in handles]
    columns = max(1, min(len(names), int(width_in / (0.6 + 0.075 * max(map(len, names))))))
    lines = math.ceil(len(names) / columns) + bool(title)
    figure.set_size_inches(width_in, height_in + 0.1 + 0.19 * lines)
    look: dict[str, Any] = {"title": title or None, "alignment": "left", "ncols": columns}
    figure.legend(list(handles.values()), names, loc="outside lower left", **look)


def annotate(
    axes: Axes, words: str, at: tuple[float, float], shift: tuple[float, float], **more: Any
) -> None:
    """Write text `shift` (1/72 inch) away from a point; `more`: arguments of `Axes.annotate`."""
    look: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8.5}
    axes.annotate(words, at, xytext=shift, **(look | more))


def label_line_ends(axes: Axes, ends: Sequence[tuple[tuple[float, float], str, str]]) -> None:
    """Label the ends of lines without overlaps; `ends`: (point, colour, text)."""
    # On the screen: what overlaps depends on the scale of the axis.
    upward = sorted(ends, key=lambda end: axes.transData.transform(end[0])[1])
    look: dict[str, Any] = {"fontsize": 9, "fontweight": "bold", "annotation_clip": False}
    for place, (point, color, words) in enumerate(upward):
        shift = 10.0 * place - 5.0 * (len(ends) - 1)
        annotate(axes, short(words, 40), point, (8, shift), color=color, **look)


# ---- axes
def objective_axis(axes: Axes, title: str, lower: bool, positive: bool) -> None:
    """Label and scale the axis of the objective: logarithmic if it is minimized and `positive` in
    this chart."""
    name, better = short(title, 30), "lower" if lower else "higher"
    spec = axes.get_subplotspec()
    if spec is None or spec.is_first_col():
        axes.set_ylabel(f"{name},{chr(10) if len(name) > 20 else ' '}{better} is better")
    axes.yaxis.set_major_formatter(tick_formatter())
    if positive and lower:
        axes.set_yscale("log")
        plain_logarithms(axes.yaxis)
    axes.grid(True, axis="y")


def tick_formatter() -> ticker.Formatter:
    """Return what writes ticks as plain numbers: 0.05, 9.625, 20,000."""
    return ticker.StrMethodFormatter("{x:,.10g}")


def plain_logarithms(side: Axis) -> None:
    """Label a logarithmic axis with a few plain numbers (0.6 and 10, not 6×10⁻¹ and 10¹)."""
    low, high = side.get_view_interval()
    few = ticker.MaxNLocator(5) if high < 5 * low else ticker.LogLocator(subs=(1, 2, 5))
    side.set_major_locator(few if high < 1000 * low else ticker.LogLocator(numticks=8))
    side.set_major_formatter(tick_formatter())
    side.set_minor_locator(ticker.NullLocator())


def plain_numbers(axes: Axes) -> None:
    """Label the x axis with a few round numbers, with commas."""
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(tick_formatter())
