"""How all figures look. What a colour means stands in `tunediff.core.colors`.

A chart is drawn for a wide page and for a telephone, both as SVG, and kept as PNG for other places. Where many trials
are drawn, their lines become an image inside the SVG, so that its size does not grow with the search.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")  # no window, also where there is a screen
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tunediff.analysis import Results
from tunediff.analysis.evidence import Evidence
from tunediff.core import colors
from tunediff.core.trial_record import TrialRecord
from tunediff.report.html import BASELINE, WINNER
from tunediff.report.words import short

INK, SOFT, GREY, RULE = "#1f1e1b", "#69675f", colors.OTHER, "#e2dfd6"
WIDTH_IN, NARROW_IN = 9.1, 3.8
"""Of a chart: the page's, at 96 pixels per inch, and a telephone's of 400 pixels."""
MANY = 120
"""Lines from which they are drawn as an image."""
DASHED = (0, (2, 2))
STYLE: dict[Any, Any] = {
    "font.size": 9.0, "axes.labelsize": 9.0, "axes.titlesize": 9.5, "legend.fontsize": 8.5, "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5, "text.color": INK, "axes.labelcolor": SOFT, "axes.edgecolor": GREY, "xtick.color": SOFT,
    "ytick.color": SOFT, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8,
    "xtick.major.width": 0.8, "ytick.major.width": 0.8, "axes.grid": False, "grid.color": RULE, "grid.linewidth": 0.7,
    "axes.axisbelow": True, "legend.frameon": False, "figure.facecolor": "none", "axes.facecolor": "none",
    "savefig.facecolor": "white", "svg.hashsalt": "tunediff", "axes.titlelocation": "left",
    "text.parse_math": False,  # a $ in a file's text is a $
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Chart:
    """One picture in two formats, and for a telephone."""

    svg: bytes
    png: bytes
    narrow: bytes = b""
    """SVG."""


@dataclasses.dataclass(frozen=True)
class Highlights:
    """The two trials that have a colour; either may be missing, and the baseline may have won."""

    baseline: TrialRecord | None
    winner: TrialRecord | None
    winner_is: str
    """`winner`, or what it may be called."""
    reached_s: float | None = None
    """When it was as good as the baseline at its end; None: not determined."""

    @classmethod
    def of(cls, known: Evidence) -> Highlights:
        """The best trial beside the baseline of its seed."""
        found, best = known.found, known.best
        if best is None:
            return cls(found.baseline, None, "best")
        base = best if known.is_baseline(best) else found.baseline_of(best) or found.baseline
        return cls(base, best, "winner" if known.winner else "best", known.seconds_to_baseline(best))

    def pairs(self) -> list[tuple[TrialRecord, str, str]]:
        """(trial, colour, what it is), the baseline first."""
        found = [(self.baseline, BASELINE, "baseline")] if self.baseline is not None else []
        if self.winner is not None and (self.baseline is None or self.winner.name != self.baseline.name):
            found.append((self.winner, WINNER, self.winner_is))
        return [(trial, color, what) for trial, color, what in found if trial is not None]

    def shown(self) -> list[tuple[TrialRecord, str, str]]:
        """`pairs` as figures name them: a baseline that is the best itself is both."""
        found = self.pairs()
        both = len(found) == 1 and self.winner is not None and found[0][1] == BASELINE
        return [(trial, color, f"{what}, {self.winner_is}" if both else what) for trial, color, what in found]

    def color(self, name: str) -> str | None:
        """Of a trial; None for all others."""
        return next((color for trial, color, _ in self.pairs() if trial.name == name), None)


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Figures made inside look alike; letters that the font lacks are shown as boxes, without a word."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_narrow = False
"""Whether what is being drawn is for a telephone."""


def draw(build: Callable[[], Figure | None]) -> Chart | None:
    """The chart that `build` makes; None where there is nothing to see."""
    global _narrow
    with drawing():
        if (figure := build()) is None:
            return None
        svg, png = _saved(figure, "svg"), _saved(figure, "png")
        try:
            _narrow = True
            small = build()
        finally:
            _narrow = False
        return Chart(svg, png, _saved(small, "svg") if small is not None else b"")


def png(build: Callable[[], Figure | None]) -> bytes | None:
    """The figure that `build` makes, by itself."""
    with drawing():
        return _saved(figure, "png") if (figure := build()) is not None else None


def _saved(figure: Figure, kind: str) -> bytes:
    file, more = io.BytesIO(), {"Date": None} if kind == "svg" else None
    figure.savefig(file, format=kind, dpi=150, facecolor="none" if more else "white", metadata=more)
    return file.getvalue()


def sheet(panels: int, height_in: float, width_in: float = WIDTH_IN, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """An empty figure with panels side by side; for a telephone below each other, and less high."""
    size = (NARROW_IN, 0.8 * height_in * panels) if _narrow else (width_in, height_in)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(*((panels, 1) if _narrow else (1, panels)), squeeze=False, sharey=sharey)
    return figure, list(axes.flat)


def stacked() -> bool:
    """Whether panels lie below each other."""
    return _narrow


def letters(wide: int) -> int:
    """How many characters a name may have that has so many on a wide page."""
    return wide // 2 if _narrow else wide


def in_first_column(axes: Axes) -> bool:
    """Whether the names of the y axis belong beside this panel."""
    place = axes.get_subplotspec()
    return place is None or place.is_first_col()


def headline(figure: Figure, text: str) -> None:
    """A title of one or more lines, each wrapped at the figure's width; the figure grows by them."""
    width_in, height_in = figure.get_size_inches()
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, int(width_in / 0.085))]
    figure.set_size_inches(width_in, height_in + 0.17 * len(lines))
    figure.suptitle("\n".join(lines), fontsize=10, x=0.01, ha="left")


def key(color: str, **look: Any) -> Line2D:
    """A line or a dot of a legend."""
    return Line2D([], [], color=color, **look)


def legend(figure: Figure, known: Mapping[str, Any] | None = None, title: str = "") -> None:
    """Names for what is drawn (None: all that has a label), below the panels, where it covers nothing."""
    known = known or {
        name: one for axes in figure.axes for one, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if not known:
        return
    width_in, height_in = figure.get_size_inches()
    names = [short(name, letters(80)) for name in known]
    columns = max(1, min(len(names), int(width_in / (0.6 + 0.075 * max(map(len, names))))))
    lines = math.ceil(len(names) / columns) + bool(title)
    figure.set_size_inches(width_in, height_in + 0.1 + 0.19 * lines)
    figure.legend(list(known.values()), names, loc="outside lower left", ncols=columns, title=title or None,
                  alignment="left")  # fmt: skip


def say(axes: Axes, words: str, at: tuple[float, float], shift: tuple[float, float], **more: Any) -> None:
    """Words beside a place, `shift` (1/72 inch) away from it; `more` as `Axes.annotate` takes it."""
    axes.annotate(words, at, xytext=shift, textcoords="offset points", **{"va": "center", "fontsize": 8.5, **more})


def ring(axes: Axes, at: tuple[float, float], color: str, size: float = 8.0, label: str | None = None) -> None:
    """A hollow dot: a place between evaluations."""
    axes.plot(*([value] for value in at), marker="o", color=color, markersize=size, markerfacecolor="white",
              markeredgewidth=1.7, zorder=5, linestyle="none", label=label)  # fmt: skip


def at_the_end(axes: Axes, ends: Sequence[tuple[tuple[float, float], str, str]]) -> None:
    """Names at the ends of lines (place, colour, words), moved apart where two would cover each other."""
    heights, line = [axes.transData.transform(place)[1] for place, _, _ in ends], 2.0 if _narrow else 1.0
    shifts = [0.0] * len(ends)
    if len(ends) == 2 and abs(heights[0] - heights[1]) < 16 * line:
        up = 0 if heights[0] >= heights[1] else 1
        shifts[up], shifts[1 - up] = 7.0 * line, -7.0 * line
    for (place, color, words), shift in zip(ends, shifts, strict=True):
        said = "\n".join(short(words, 40).rsplit(" ", 1)) if _narrow else short(words, 40)
        say(axes, said, place, (8, shift), color=color, fontsize=9, fontweight="bold", annotation_clip=False)


def objective_axis(axes: Axes, found: Results, positive: bool, axis: Literal["x", "y"] = "y") -> None:
    """Name and scale of the objective: logarithmic for one that falls and is `positive` here."""
    name, better = short(found.quantity(found.label).label, 30), "lower" if found.falls else "higher"
    side, between = axes.yaxis if axis == "y" else axes.xaxis, "\n" if len(name) > letters(20) else " "
    if axis == "x" or in_first_column(axes):
        side.set_label_text(f"{name},{between}{better} is better")
    side.set_major_formatter(Digits())
    if positive and found.falls:
        axes.set(**{f"{axis}scale": "log"})
        plain_logarithms(side)
    axes.grid(True, axis="y")


class Digits(ticker.Formatter):
    """As many decimals for every tick of an axis as the one that needs most, with commas: 9.625 beside 9.650, not 9.65.

    Over several decades, where ticks have one significant digit each, as many as each needs: 0.05, 1, 20.
    """

    def __call__(self, value: float, pos: int | None = None) -> str:
        """Of one tick."""
        return self.format_ticks([value])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Of all."""
        sizes = [abs(value) for value in values if value]
        low, high = min(sizes, default=1.0), max(sizes, default=1.0)
        if high >= 10 * low and all(math.isclose(value, float(f"{value:.0e}")) for value in values):
            known = [f"{value:,.{max(0, -math.floor(math.log10(abs(value) or 1)))}f}" for value in values]
        else:
            exact = (d for d in range(12) if all(abs(round(value, d) - value) <= 1e-5 * high for value in values))
            decimals = next(exact, 12)
            known = [f"{value:,.{decimals}f}" for value in values]
        return [one.replace("-", "\N{MINUS SIGN}") for one in known]


def plain_logarithms(side: Axis) -> None:
    """0.6 and 10, not 6×10⁻¹ and 10¹; as many ticks as there is room for."""
    low, high = side.get_view_interval()
    decades = math.log10(high / low) if low > 0 and high > low else 1.0
    fine: tuple[float, ...] = (1, 2, 5) if decades > 1.5 or side is side.axes.xaxis else (1, 1.5, 2, 3, 4, 6, 8)
    ticks = [at * 10.0**power for power in range(-12, 13) for at in fine if low <= at * 10.0**power <= high]
    some = ticker.FixedLocator(ticks) if len(ticks) >= 3 else ticker.MaxNLocator(3 if _narrow else 5)
    side.set_major_locator(some if len(ticks) <= 10 else ticker.LogLocator(numticks=8))
    side.set_major_formatter(Digits())
    side.set_minor_locator(ticker.NullLocator())


def plain_numbers(axes: Axes) -> None:
    """A few round numbers along the x axis, with commas."""
    axes.xaxis.set_major_locator(ticker.MaxNLocator(4 if _narrow else 6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(Digits())
