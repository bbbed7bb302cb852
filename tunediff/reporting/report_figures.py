"""The report's charts. Each is drawn once and kept twice: as SVG for the page, as PNG for other places.

The winner and the baseline have one colour each, everywhere; all else is grey. Where many trials are drawn, their lines
become an image inside the SVG, so that its size does not grow with the search.
"""

from __future__ import annotations

import dataclasses
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, also where there is a screen
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure as Sheet

from tunediff.cli import number
from tunediff.record import TrialRecord
from tunediff.reporting.report_html import BASELINE, WINNER
from tunediff.reporting.report_numbers import ABOVE, FAIR, PARTS, Effect, Importance, Why, rate, searched
from tunediff.reporting.report_words import cut, rounded, secs, shown
from tunediff.reporting.results import Results
from tunediff.study import MEASURED

INK, SOFT, GREY, RULE = "#1f1e1b", "#69675f", "#b4b0a5", "#e2dfd6"
WIDTH_IN = 9.1
"""Of a chart: the page's, at 96 pixels per inch."""
MANY = 120
"""Lines from which they are drawn as an image."""
STYLE: dict[Any, Any] = {
    "font.size": 9.0, "axes.labelsize": 9.0, "axes.titlesize": 9.5, "legend.fontsize": 8.5, "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5, "text.color": INK, "axes.labelcolor": SOFT, "axes.edgecolor": GREY, "xtick.color": SOFT,
    "ytick.color": SOFT, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8,
    "xtick.major.width": 0.8, "ytick.major.width": 0.8, "axes.grid": False, "grid.color": RULE, "grid.linewidth": 0.7,
    "axes.axisbelow": True, "legend.frameon": False, "figure.facecolor": "none", "axes.facecolor": "none",
    "savefig.facecolor": "none", "svg.hashsalt": "tunediff", "axes.titlelocation": "left",
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

    def pairs(self) -> list[tuple[TrialRecord, str, str]]:
        """(trial, colour, what it is), the baseline first."""
        found = [(self.baseline, BASELINE, "baseline")] if self.baseline is not None else []
        if self.winner is not None and (self.baseline is None or self.winner.name != self.baseline.name):
            found.append((self.winner, WINNER, self.winner_is))
        return [(trial, color, what) for trial, color, what in found if trial is not None]

    def color(self, name: str) -> str | None:
        """Of a trial; None for all others."""
        return next((color for trial, color, _ in self.pairs() if trial.name == name), None)


def draw(build: Callable[[], Sheet | None]) -> Chart | None:
    """The chart that `build` makes; None where there is nothing to see."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font lacks: they are shown as boxes
        if (sheet := build()) is None:
            return None
        svg, png = io.BytesIO(), io.BytesIO()
        sheet.savefig(svg, format="svg", dpi=150, metadata={"Date": None})
        sheet.savefig(png, format="png", dpi=150, facecolor="white")
    return Chart(svg.getvalue(), png.getvalue())


# -------------------------------------------------------------------------------------------------------------- curves
def curves(found: Results, stars: Stars, crossing_s: float | None) -> Sheet | None:
    """The objective against training seconds; `crossing_s`: when the winner is as good as the baseline at its end."""
    lines = {trial.name: _curve(trial, "train_s", found.metric) for trial in found.trials}
    first_s = stars.winner.points[0]["train_s"] if stars.winner is not None and stars.winner.points else None
    if not any(len(line) > 1 for line in lines.values()):
        return None
    sheet, (axes,) = _sheet(1, 4.7)
    positive = all(y > 0 for line in lines.values() for _, y in line)
    _background(axes, found, lines, stars)
    for trial, color, _ in stars.pairs():
        if line := lines.get(trial.name):
            axes.plot(*zip(*line, strict=True), color=color, linewidth=2.2, marker="o", markersize=4.5, zorder=4)
    _objective_axis(axes, found, positive)
    _at_the_end(axes, [(lines[t.name][-1], c, f"{what} {number(lines[t.name][-1][1])}")
                       for t, c, what in stars.pairs() if lines.get(t.name)])  # fmt: skip
    if crossing_s is not None and stars.baseline is not None and (line := lines.get(stars.baseline.name)):
        level = line[-1][1]
        axes.plot([crossing_s, line[-1][0]], [level, level], color=BASELINE, linewidth=1.0, linestyle=(0, (2, 2)))
        if crossing_s != first_s:
            axes.plot([crossing_s], [level], marker="o", markersize=7, markerfacecolor="white", markeredgecolor=WINNER,
                      markeredgewidth=1.6, zorder=5)  # fmt: skip
        words = f"{'before ' if crossing_s == first_s else ''}{secs(crossing_s)}"
        axes.annotate(words, (crossing_s, level), xytext=(-7, -6), textcoords="offset points",
                      ha="right", va="top", fontsize=8.5, color=WINNER)  # fmt: skip
    axes.set_xlabel("training seconds")
    axes.set_xlim(left=0)
    _plain_numbers(axes)
    return sheet


def _curve(trial: TrialRecord, along: str, metric: str) -> list[tuple[float, float]]:
    return [(float(p[along]), float(p[metric])) for p in trial.points if p.get(metric) is not None and along in p]


def _background(axes: Axes, found: Results, lines: Mapping[str, list[tuple[float, float]]], stars: Stars) -> None:
    """All trials in grey; dotted where they did not end ok."""
    many = len(lines) > MANY
    for ok in (False, True):
        shown_ = [lines[t.name] for t in found.trials if (t.status == "ok") == ok and lines[t.name]
                  and stars.color(t.name) is None]  # fmt: skip
        collection = LineCollection(
            [line if len(line) > 1 else line * 2 for line in shown_],
            colors=GREY,
            linewidths=0.7 if many else 1.1,
            alpha=0.14 if len(lines) > 4 * MANY else 0.35 if many else 0.85,
            linestyles="solid" if ok else (0, (1.2, 1.6)),
            rasterized=many,
            zorder=1,
        )
        axes.add_collection(collection, autolim=False)
        if not many and ok:
            dots = [point for line in shown_ for point in line]
            if dots:
                axes.scatter([x for x, _ in dots], [y for _, y in dots], s=9, color=GREY, zorder=2, linewidths=0)
    # What failed may lie anywhere; it is drawn as far as it fits.
    inside = [point for t in found.trials if t.status in ("ok", "pruned", None) for point in lines[t.name]]
    axes.update_datalim(inside or [point for line in lines.values() for point in line])
    axes.autoscale_view()


def _at_the_end(axes: Axes, ends: Sequence[tuple[tuple[float, float], str, str]]) -> None:
    """Names at the ends of lines, moved apart where they would cover each other."""
    heights = [axes.transData.transform(point)[1] for point, _, _ in ends]
    shifts = [0.0] * len(ends)
    if len(ends) == 2 and abs(heights[0] - heights[1]) < 16:
        up = 0 if heights[0] >= heights[1] else 1
        shifts[up], shifts[1 - up] = 7.0, -7.0
    for (point, color, words), shift in zip(ends, shifts, strict=True):
        axes.annotate(cut(words, 40), point, xytext=(8, shift), textcoords="offset points", va="center", color=color,
                      fontsize=9, fontweight="bold", annotation_clip=False)  # fmt: skip


def _objective_axis(axes: Axes, found: Results, positive: bool, axis: str = "y") -> None:
    """Name and scale of the objective: logarithmic for a Fréchet distance that is positive."""
    words = f"{found.label}, lower is better" if found.metric == "frechet" else "images/s, higher is better"
    (axes.set_ylabel if axis == "y" else axes.set_xlabel)(words)
    if positive and found.metric == "frechet":
        (axes.set_yscale if axis == "y" else axes.set_xscale)("log")
        _plain_logarithms(axes, axis)
    axes.grid(True, axis="y")


def _plain_logarithms(axes: Axes, axis: str) -> None:
    """0.6 and 10, not 6×10⁻¹ and 10¹; as many ticks as there is room for."""
    side = axes.yaxis if axis == "y" else axes.xaxis
    low, high = axes.get_ylim() if axis == "y" else axes.get_xlim()
    decades = math.log10(high / low) if low > 0 and high > low else 1.0
    fine: tuple[float, ...] = (1, 2, 5) if decades > 1.5 else (1, 1.5, 2, 3, 4, 6, 8)
    ticks = [at * 10.0**power for power in range(-12, 13) for at in fine if low <= at * 10.0**power <= high]
    side.set_major_locator(ticker.FixedLocator(ticks) if 3 <= len(ticks) <= 10 else ticker.MaxNLocator(5))
    if len(ticks) > 10:
        side.set_major_locator(ticker.LogLocator(numticks=8))
    side.set_major_formatter(ticker.FuncFormatter(lambda value, _: number(float(value))))
    side.set_minor_locator(ticker.NullLocator())


# ----------------------------------------------------------------------------------------------------------------- why
def why_curves(found: Results, stars: Stars, told: Why) -> Sheet | None:
    """Baseline and winner at equal seconds, and at equal images."""
    if len(stars.pairs()) < 2:
        return None
    sheet, panels = _sheet(2, 3.5, sharey=True)
    for axes, along, words, place, values in (
        (panels[0], "train_s", "training seconds", told.seconds, told.at_seconds),
        (panels[1], "images", "images seen", float(told.equal_images), told.at_images),
    ):
        for trial, color, what in stars.pairs():
            line = _curve(trial, along, found.metric)
            axes.plot(*zip(*line, strict=True), color=color, linewidth=1.8, marker="o", markersize=4, label=what)
        if values is not None:
            axes.axvline(place, color=SOFT, linewidth=0.9, linestyle=(0, (2, 2)), zorder=0)
            both = sorted(zip(values, (BASELINE, WINNER), strict=True), reverse=True)
            # Falling curves leave room to the upper right of one and to the lower left of the other.
            for (value, color), (side, shift) in zip(both, (("left", 7), ("right", -7)), strict=True):
                axes.plot([place], [value], "o", markersize=8, markerfacecolor="white", markeredgecolor=color,
                          markeredgewidth=1.8, zorder=5)  # fmt: skip
                axes.annotate(number(value), (place, value), xytext=(shift, shift), textcoords="offset points",
                              ha=side, va="bottom" if shift > 0 else "top", color=color, fontsize=9,
                              fontweight="bold")  # fmt: skip
        axes.set_xlabel(words)
        axes.margins(x=0.12, y=0.12)
        axes.set_xlim(left=0)
        _plain_numbers(axes)
    panels[0].set_title(f"at equal seconds ({secs(told.seconds)})")
    equal = "" if told.at_images is not None else ": not known"
    panels[1].set_title(f"at equal images ({told.equal_images:,}){equal}")
    _objective_axis(panels[0], found, True)
    panels[1].grid(True, axis="y")
    panels[0].legend(loc="lower left")
    return sheet


def step(baseline: Mapping[str, float], winner: Mapping[str, float], unit: str, winner_is: str) -> Sheet | None:
    """The parts of a step, baseline and winner beside each other, in `unit`."""
    parts = [part for part in PARTS if part in baseline or part in winner]
    if not parts or not (any(baseline.values()) or any(winner.values())):
        return None
    sheet, (axes,) = _sheet(1, 0.7 + 0.42 * len(parts))
    most = max([*baseline.values(), *winner.values()])
    for values, color, what, shift in ((baseline, BASELINE, "baseline", -0.19), (winner, WINNER, winner_is, 0.19)):
        if not values:
            continue
        lengths = [values.get(part, 0.0) for part in parts]
        axes.barh([place + shift for place in range(len(parts))], lengths, height=0.33, color=color, label=what)
        for place, length in enumerate(lengths):
            axes.annotate(number(length), (length, place + shift), xytext=(4, 0), textcoords="offset points",
                          va="center", fontsize=8, color=color)  # fmt: skip
    axes.set_yticks(range(len(parts)), [MEASURED[f"step_{part}_s"].label for part in parts])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * most)
    axes.set_xlabel(unit)
    axes.grid(True, axis="x")
    axes.legend(loc="lower right")
    return sheet


# --------------------------------------------------------------------------------------------------------------- knobs
def importances(columns: Mapping[str, Importance | None], most: int = 15) -> Sheet | None:
    """One column of bars per target; the knobs in the order of the first one that is known."""
    known = {title: one for title, one in columns.items() if one is not None}
    if not known:
        return None
    names = list(dict.fromkeys(name for one in known.values() for name in one.shares))
    highest = {name: max(one.shares.get(name, 0.0) for one in known.values()) for name in names}
    names = [name for name in names if name in sorted(names, key=lambda name: -highest[name])[:most]]
    sheet, panels = _sheet(len(known), 0.85 + 0.26 * len(names), sharey=True)
    for axes, (title, one) in zip(panels, known.items(), strict=True):
        lengths = [100 * one.shares.get(name, 0.0) for name in names]
        doubtful = one.fit is None or one.fit < FAIR
        axes.barh(range(len(names)), lengths, height=0.62, color="none" if doubtful else "#8b887e",
                  edgecolor="#8b887e", linewidth=1.0)  # fmt: skip
        for place, (name, length) in enumerate(zip(names, lengths, strict=True)):
            words = f"{length:.0f} %" if name in one.shares else "–"
            axes.annotate(words, (length, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_title(title)
        axes.set_xlim(0, max(10.0, 1.18 * max(lengths, default=0.0)))
        axes.set_xlabel("share of the variance (%)")
        axes.grid(True, axis="x")
    panels[0].set_yticks(range(len(names)), [cut(name, 44) for name in names])
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    for axes in panels:
        axes.tick_params(axis="y", length=0, labelcolor=INK)
    return sheet


def effects(found: Results, chosen: Sequence[Effect], stars: Stars) -> Sheet | None:
    """Mean and standard error of the objective, and of images/s, for every value of some knobs."""
    if not chosen:
        return None
    with_rate = found.metric != "images_per_s"
    rows = sum(1 + len(effect.levels) for effect in chosen)
    sheet, panels = _sheet(2 if with_rate else 1, 0.7 + 0.215 * rows, sharey=True)
    at, ticks, names = 0.0, list[float](), list[str]()
    for effect in chosen:
        faint = effect.verdict != ABOVE
        panels[0].annotate(cut(effect.knob, 44), (0, at), xytext=(-6, 0), xycoords=("axes fraction", "data"),
                           textcoords="offset points", va="center", ha="right", fontsize=9, fontweight="bold",
                           color=INK, annotation_clip=False)  # fmt: skip
        panels[0].annotate(effect.verdict, (0, at), xycoords=("axes fraction", "data"), xytext=(6, 0), va="center",
                           textcoords="offset points", fontsize=8, color=SOFT, style="italic")  # fmt: skip
        for axes in panels:
            axes.axhline(at - 0.62, color=RULE, linewidth=0.8)
        at += 1
        for level in effect.levels:
            for axes, mean in zip(panels, (level.objective, level.rate), strict=False):
                if mean is None:
                    continue
                color = GREY if faint and axes is panels[0] else "#55534c"
                if mean.low is not None and mean.high is not None:
                    axes.plot([mean.low, mean.high], [at, at], color=color, linewidth=1.6, solid_capstyle="butt")
                few = mean.trials < 3
                axes.plot([mean.mean], [at], "o", markersize=5, color=color, markeredgewidth=1.2,
                          markerfacecolor="white" if few else color)  # fmt: skip
            for trial, color, _ in stars.pairs():
                if trial.name in level.members:
                    shift = -13.0 if color == WINNER else -4.0
                    panels[0].annotate("■", (1, at), xycoords=("axes fraction", "data"), xytext=(shift, 0),
                                       textcoords="offset points", va="center", ha="center", fontsize=8,
                                       color=color)  # fmt: skip
            ticks.append(at)
            names.append(f"{cut(level.label, 30)}  ({len(level.members)})")
            at += 1
        at += 0.25
    panels[0].set_yticks(ticks, names)
    panels[0].set_ylim(at - 0.3, -0.8)
    positive = all(level.objective.mean > 0 for e in chosen for level in e.levels if level.objective is not None)
    _objective_axis(panels[0], found, positive, axis="x")
    if with_rate:
        panels[1].set_xlabel("images/s, higher is better")
        panels[1].set_xlim(left=0)
        _plain_numbers(panels[1])
    for axes in panels:
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x")
        axes.grid(False, axis="y")
        axes.margins(x=0.08)
    return sheet


# ---------------------------------------------------------------------------------------------------------- trade-offs
def trade_offs(found: Results, frame: pd.DataFrame, stars: Stars) -> Sheet | None:
    """The objective against images/s and against memory, with the trials that no other beats in both."""
    wanted = [
        (name, words)
        for name, words in (
            ("images_per_s", "images/s"),
            ("peak_memory_mib", MEASURED["peak_memory_mib"].heading),
            ("worker_s", "training seconds × workers"),
        )
        if f"on_front_{name}" in frame and frame[name].notna().sum() > 1
    ]
    if not wanted:
        return None
    sheet, panels = _sheet(len(wanted), 3.9, sharey=True)
    positive = bool((frame[found.metric] > 0).all())
    for axes, (name, words) in zip(panels, wanted, strict=True):
        known = frame[frame[name].notna()]
        many = len(known) > MANY
        axes.scatter(known[name], known[found.metric], s=10 if many else 22, color=GREY, linewidths=0,
                     alpha=0.6 if many else 1.0, rasterized=many, zorder=1)  # fmt: skip
        best = known[known[f"on_front_{name}"]].sort_values([name, found.metric])
        axes.plot(best[name], best[found.metric], color=INK, linewidth=1.1, marker="o", markersize=3.8, zorder=2,
                  label="beaten by none in both")  # fmt: skip
        for trial, color, what in stars.pairs():
            mine = known[known["trial"] == trial.name]
            axes.plot(mine[name], mine[found.metric], "o", color=color, markersize=9, zorder=3, linestyle="none",
                      markeredgecolor="white", markeredgewidth=1.2, label=what)  # fmt: skip
        axes.set_xlabel(f"{words} {'→ faster' if name == 'images_per_s' else '→ more'}")
        _plain_numbers(axes)
        axes.margins(0.07)
        axes.grid(True, axis="both")
    _objective_axis(panels[0], found, positive)
    sheet.legend(*panels[-1].get_legend_handles_labels(), loc="outside upper left", ncols=3)
    return sheet


# ----------------------------------------------------------------------------------------------------------- all knobs
def parallel(found: Results, stars: Stars, knobs: Sequence[str]) -> Sheet | None:
    """One line per trial through the values of some knobs, images/s and the objective; better ones are darker."""
    dimensions, ranked = [dimension for dimension in searched(found) if dimension.name in knobs], found.ranked
    if len(ranked) < 2 or not dimensions:
        return None
    scales = [_Scale([t.drawn.get(d.name) for t in ranked], d.log, d.choices) for d in dimensions]
    places = [
        [scale.place(trial.drawn.get(d.name), i) for i, trial in enumerate(ranked)]
        for d, scale in zip(dimensions, scales, strict=True)
    ]
    titles = [dimension.name for dimension in dimensions]
    if found.metric != "images_per_s":
        rates = [rate(trial) for trial in ranked]
        scales.append(_Scale(rates, False, None))
        places.append([scales[-1].place(value, i) for i, value in enumerate(rates)])
        titles.append("images/s")
    values = [trial.value(found.metric) for trial in ranked]
    scales.append(_Scale(values, all((value or 0) > 0 for value in values), None))
    places.append([scales[-1].place(value, i) for i, value in enumerate(values)])
    titles.append("images/s" if found.metric == "images_per_s" else found.label)

    sheet, (axes,) = _sheet(1, 4.9)
    lines = [[(x, column[i]) for x, column in enumerate(places)] for i in range(len(ranked))]
    many, best = len(ranked) > MANY, darkest(len(ranked))
    order = [i for i in range(len(ranked))[::-1] if stars.color(ranked[i].name) is None]  # the best on top
    axes.add_collection(
        LineCollection(
            [lines[i] for i in order],
            colors=[(0.33, 0.32, 0.29, 0.7 if i < best else 0.07 if many else 0.3) for i in order],
            linewidths=[1.0 if i < best else 0.6 for i in order],
            rasterized=many,
        )
    )
    for trial, color, what in stars.pairs():
        if (i := next((i for i, one in enumerate(ranked) if one.name == trial.name), None)) is not None:
            axes.plot(*zip(*lines[i], strict=True), color=color, linewidth=2.4, label=what, zorder=3)
    for x, (scale, title) in enumerate(zip(scales, titles, strict=True)):
        axes.axvline(x, color=SOFT, linewidth=0.8, zorder=2)
        axes.annotate(_narrow(title), (x, 1.04), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8,
                      color=INK, annotation_clip=False)  # fmt: skip
        for place, label in scale.ticks():
            axes.annotate(_narrow(label), (x, place), xytext=(3, 0), textcoords="offset points", va="center",
                          fontsize=7.5, color=INK, zorder=5,
                          bbox={"facecolor": "#fdfcf9", "edgecolor": "none", "alpha": 0.78, "pad": 0.8})  # fmt: skip
    axes.set_xlim(-0.15, len(titles) - 0.55)
    axes.set_ylim(-0.16 if any(scale.missing for scale in scales) else -0.05, 1.06)
    axes.axis("off")
    if axes.lines:
        axes.legend(*_named_lines(axes), loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2)
    return sheet


def darkest(trials: int) -> int:
    """How many of the best are drawn dark."""
    return max(3, min(20, trials // 4))


class _Scale:
    """Where the values of one axis lie, 0 to 1; choices are spread, with a little jitter to keep lines apart."""

    def __init__(self, values: Sequence[Any], log: bool, choices: Sequence[Any] | None) -> None:
        known = [value for value in values if value is not None]
        self.missing = len(known) < len(values)
        self.words: list[str] = []
        self.log, self.low, self.high = False, 0.0, 1.0
        numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)
        if choices is not None or not numeric or not known:
            order = [shown(choice) for choice in choices or ()]
            seen = list(dict.fromkeys(map(shown, known)))
            self.words = [*(word for word in order if word in seen), *(word for word in seen if word not in order)]
        else:
            self.log = log and min(known) > 0
            self.low, self.high = self._scaled(min(known)), self._scaled(max(known))

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.log else float(value)

    def place(self, value: Any, i: int) -> float:
        """Of trial `i`; a knob that does not apply lies below the axis."""
        jitter = (i * 0.618034 % 1 - 0.5) * 0.05
        if value is None:
            return -0.12 + 0.4 * jitter
        if self.words:
            step = 1 / max(1, len(self.words) - 1)
            middle = self.words.index(shown(value)) * step if len(self.words) > 1 else 0.5
            return middle + jitter * min(1.0, 2 * step)
        return (self._scaled(value) - self.low) / (self.high - self.low) if self.high > self.low else 0.5

    def ticks(self) -> list[tuple[float, str]]:
        """Labels beside the axis."""
        found = [(-0.13, "does not apply")] if self.missing else []
        if self.words:
            step = 1 / max(1, len(self.words) - 1)
            return [*found, *((i * step if len(self.words) > 1 else 0.5, word) for i, word in enumerate(self.words))]
        back: Callable[[float], float] = math.exp if self.log else float
        places = [0.0, 0.25, 0.5, 0.75, 1.0] if self.high > self.low else [0.5]
        return [*found, *((at, rounded(float(back(self.low + at * (self.high - self.low))))) for at in places)]


def _narrow(name: str, width: int = 13) -> str:
    """A dotted name on lines that fit between two axes; its breaks are dots, underscores and spaces."""
    lines = [""]
    for word in re.findall(r"[^._ ]+[._ ]?|[._ ]", cut(name, 3 * width)):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip(" ") for line in lines)


# ------------------------------------------------------------------------------------------------------------- compile
def break_even(row: Mapping[str, Any], budget_s: float) -> Sheet | None:
    """Images against training seconds, with and without compilation, of one configuration that ran both ways."""
    plain, fast, cost = row["uncompiled_images_per_s"], row["images_per_s"], row["compile_s"]
    if any(value is None or not math.isfinite(value) for value in (plain, fast, cost)):
        return None
    paid = row.get("break_even_s")
    known = paid is not None and math.isfinite(paid)
    end = max(budget_s, cost * 1.5, min(1.3 * float(paid or 0), 20 * budget_s) if known else 0.0)
    sheet, (axes,) = _sheet(1, 3.3)
    axes.plot([0, end], [0, plain * end], color=SOFT, linewidth=1.8)
    axes.plot([0, cost, max(cost, end)], [0, 0, fast * max(0.0, end - cost)], color=INK, linewidth=1.8)
    compiled = (end, fast * max(0.0, end - cost))
    words = f"compiled ({cut(str(row['mode']), 30)})"
    _at_the_end(axes, [((end, plain * end), SOFT, "not compiled"), (compiled, INK, words)])
    axes.axvline(budget_s, color=SOFT, linewidth=0.9, linestyle=(0, (2, 2)))
    axes.annotate("budget of a trial", (budget_s, 1), xycoords=("data", "axes fraction"), xytext=(-4, -2), fontsize=8.5,
                  textcoords="offset points", va="top", ha="right", color=SOFT)  # fmt: skip
    if known and paid is not None and paid <= end:
        axes.plot([paid], [plain * paid], "o", markersize=8, markerfacecolor="white", markeredgecolor=INK,
                  markeredgewidth=1.6, zorder=5)  # fmt: skip
        axes.annotate(f"pays from {secs(float(paid))} on", (paid, plain * paid), xytext=(10, -10), va="top",
                      textcoords="offset points", fontsize=9)  # fmt: skip
    axes.set_xlabel("training seconds, compilation included")
    axes.set_ylabel("images")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.grid(True, axis="y")
    return sheet


# -------------------------------------------------------------------------------------------------------------- shared
def _sheet(panels: int, height_in: float, sharey: bool = False) -> tuple[Sheet, list[Axes]]:
    sheet = Sheet(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = sheet.subplots(1, panels, squeeze=False, sharey=sharey)
    return sheet, list(axes[0])


def _plain_numbers(axes: Axes) -> None:
    """A few round numbers along the x axis, with commas."""
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _named_lines(axes: Axes) -> tuple[list[Any], list[str]]:
    named = [(line, str(line.get_label())) for line in axes.lines if not str(line.get_label()).startswith("_")]
    return [line for line, _ in named], [name for _, name in named]
