"""How all figures look. The winner and the baseline have one colour each, everywhere; all else is grey.

A figure is drawn once and kept twice: as SVG for the page, as PNG for other places. Where many trials are drawn, their
lines become an image inside the SVG, so that its size does not grow with the search.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")  # no window, also where there is a screen
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from tunediff.cli import number
from tunediff.record import TrialRecord
from tunediff.report.html import BASELINE, WINNER
from tunediff.report.words import cut
from tunediff.results import Results
from tunediff.results.evidence import Evidence

INK, SOFT, GREY, RULE = "#1f1e1b", "#69675f", "#b4b0a5", "#e2dfd6"
WIDTH_IN = 9.1
"""Of a chart: the page's, at 96 pixels per inch."""
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
    """One picture in two formats."""

    svg: bytes
    png: bytes


@dataclasses.dataclass(frozen=True)
class Stars:
    """The two trials that have a colour; either may be missing, and the baseline may have won."""

    baseline: TrialRecord | None
    winner: TrialRecord | None
    winner_is: str
    """`winner`, or what it may be called."""
    reached_s: float | None = None
    """When it was as good as the baseline at its end; None: not determined."""

    @classmethod
    def of(cls, known: Evidence) -> Stars:
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

    def color(self, name: str) -> str | None:
        """Of a trial; None for all others."""
        return next((color for trial, color, _ in self.pairs() if trial.name == name), None)


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Figures made inside look alike; letters that the font lacks are shown as boxes, without a word."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def draw(build: Callable[[], Figure | None]) -> Chart | None:
    """The chart that `build` makes; None where there is nothing to see."""
    with drawing():
        if (figure := build()) is None:
            return None
        svg, png = io.BytesIO(), io.BytesIO()
        figure.savefig(svg, format="svg", dpi=150, facecolor="none", metadata={"Date": None})
        figure.savefig(png, format="png", dpi=150)
    return Chart(svg.getvalue(), png.getvalue())


def sheet(panels: int, height_in: float, width_in: float = WIDTH_IN, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """An empty figure with panels side by side."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False, sharey=sharey)
    return figure, list(axes[0])


def say(axes: Axes, words: str, at: tuple[float, float], shift: tuple[float, float], **more: Any) -> None:
    """Words beside a place, `shift` (1/72 inch) away from it; `more` as `Axes.annotate` takes it."""
    axes.annotate(words, at, xytext=shift, textcoords="offset points", **{"va": "center", "fontsize": 8.5, **more})


def ring(axes: Axes, at: tuple[float, float], color: str, size: float = 8.0) -> None:
    """A hollow dot: a place between evaluations."""
    axes.plot(*([value] for value in at), marker="o", markersize=size, markerfacecolor="white", markeredgecolor=color,
              markeredgewidth=1.7, zorder=5)  # fmt: skip


def at_the_end(axes: Axes, ends: Sequence[tuple[tuple[float, float], str, str]]) -> None:
    """Names at the ends of lines (place, colour, words), moved apart where two would cover each other."""
    heights = [axes.transData.transform(place)[1] for place, _, _ in ends]
    shifts = [0.0] * len(ends)
    if len(ends) == 2 and abs(heights[0] - heights[1]) < 16:
        up = 0 if heights[0] >= heights[1] else 1
        shifts[up], shifts[1 - up] = 7.0, -7.0
    for (place, color, words), shift in zip(ends, shifts, strict=True):
        say(axes, cut(words, 40), place, (8, shift), color=color, fontsize=9, fontweight="bold", annotation_clip=False)


def objective_axis(axes: Axes, found: Results, positive: bool, axis: Literal["x", "y"] = "y") -> None:
    """Name and scale of the objective: logarithmic for one that falls and is `positive` here."""
    name, better = found.quantity(found.label).label, "lower" if found.falls else "higher"
    axes.set(**{f"{axis}label": f"{name}, {better} is better"})
    if positive and found.falls:
        axes.set(**{f"{axis}scale": "log"})
        plain_logarithms(axes.yaxis if axis == "y" else axes.xaxis)
    axes.grid(True, axis="y")


def plain_logarithms(side: Axis) -> None:
    """0.6 and 10, not 6×10⁻¹ and 10¹; as many ticks as there is room for."""
    low, high = side.get_view_interval()
    decades = math.log10(high / low) if low > 0 and high > low else 1.0
    fine: tuple[float, ...] = (1, 2, 5) if decades > 1.5 else (1, 1.5, 2, 3, 4, 6, 8)
    ticks = [at * 10.0**power for power in range(-12, 13) for at in fine if low <= at * 10.0**power <= high]
    some = ticker.FixedLocator(ticks) if len(ticks) >= 3 else ticker.MaxNLocator(5)
    side.set_major_locator(some if len(ticks) <= 10 else ticker.LogLocator(numticks=8))
    side.set_major_formatter(ticker.FuncFormatter(lambda value, _: number(float(value))))
    side.set_minor_locator(ticker.NullLocator())


def plain_numbers(axes: Axes) -> None:
    """A few round numbers along the x axis, with commas."""
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(with_commas())


def with_commas() -> ticker.Formatter:
    """`4,000`."""
    return ticker.FuncFormatter(lambda value, _: f"{value:,.10g}")
