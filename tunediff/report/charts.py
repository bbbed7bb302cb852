"""Draw the figures of the page; `style` gives them their look."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from tunediff.analysis import RATE, Results, curve, shown, sides
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.importance import is_range, searched
from tunediff.analysis.outcome import Candidate
from tunediff.analysis.speed import Why
from tunediff.core import colors
from tunediff.core.colors import BASELINE, SERIES, WINNER
from tunediff.core.outcomes import Status, Verdict
from tunediff.core.text import number, secs, short
from tunediff.core.trial_record import TrialRecord
from tunediff.report import style
from tunediff.report.context import Highlights

Build = Callable[[], Figure | None]
HEIGHT_IN = 4.0
"""With title and verdict a figure of this height fits on the first screen."""
DOTTED = (0, (1.2, 1.6))
KINDS: dict[str, tuple[str, Any]] = {
    "other trials": (colors.OTHER, "solid"),
    "under way": (colors.OTHER, DOTTED),
    "stopped early": (colors.PRUNED, style.DASHED),
    "failed": (colors.FAILED, DOTTED),
}
"""Colour and line style of the trials that are neither baseline nor best, by how they ended."""
AGAINST = {
    RATE: "{unit}/s → faster",
    "peak_memory_mib": "memory (MiB) → more",
    "device_s": "training seconds × devices → more",
    "price": "price of the training → more",
}
"""Label of the axis of what the objective is drawn against; `{unit}`: of samples."""
MOST_PANELS = 8
"""Most knobs in the figure of their values."""


# ---- curves
def of_trials(results: Results, highlights: Highlights) -> Figure:
    """Draw all trials' curves, and when the best is as good as the baseline at its end."""
    name, title, lower = results.curve_quantity
    lines = {trial.name: curve(trial, name) for trial in results.trials}
    figure, (axes,) = style.sheet(1, HEIGHT_IN)
    kinds = {None: "under way", Status.OK: "other trials", Status.PRUNED: "stopped early"}
    for kind, (color, dashes) in KINDS.items():
        drawn = [
            lines[trial.name]
            for trial in results.trials
            if lines[trial.name]
            and highlights.color(trial.name) is None
            and kinds.get(trial.status, "failed") == kind
        ]
        if not drawn:
            continue
        look: dict[str, Any] = {"colors": color, "linestyles": [dashes], "linewidths": 1.0}
        is_many = len(lines) > style.MANY
        look |= {"alpha": 0.3 if is_many else 0.85, "rasterized": is_many, "zorder": 1}
        axes.add_collection(LineCollection(drawn, **look), autolim=False)
        ends = [line[-1] for line in drawn]  # a line through one point is invisible
        marker = "x" if kind == "failed" else "o"
        axes.plot(*zip(*ends, strict=True), marker, color=color, markersize=3.5, label=kind)
    # Values of failed trials may be extreme, so that the other trials define the axes' limits.
    usable = [trial for trial in results.trials if trial.status in kinds]
    inside = [point for trial in usable for point in lines[trial.name]]
    axes.update_datalim(inside or [point for line in lines.values() for point in line] or [(0, 1)])
    axes.autoscale_view()
    pairs = [(trial, color, role) for trial, color, role in highlights.shown() if lines[trial.name]]
    for trial, color, _ in pairs:
        look = {"marker": "o", "markersize": 4.5, "linewidth": 2.2, "zorder": 4}
        axes.plot(*zip(*lines[trial.name], strict=True), color=color, **look)
    if (target := results.target) is not None:
        look = {"color": style.GREY, "linestyle": style.DASHED}
        axes.axhline(target.value, label=f"target {target}", **look)
    style.objective_axis(axes, title, lower, all(y > 0 for line in lines.values() for _, y in line))
    ends_of = [(lines[one.name][-1], color, role) for one, color, role in pairs]
    style.label_line_ends(axes, [(end, c, f"{role} {number(end[1])}") for end, c, role in ends_of])
    if len(pairs) == 2 and (seconds := highlights.reached_s) is not None:
        end_s, level = lines[pairs[0][0].name][-1]
        found = results.speedup(pairs[1][0])
        when = "before" if found is not None and found.at_first else "after"
        look = {"color": BASELINE, "linewidth": 1.0, "linestyle": style.DASHED}
        axes.plot([seconds, end_s], [level, level], label="baseline at its end", **look)
        look = {"ha": "right", "va": "top" if lower else "bottom", "color": WINNER}
        style.annotate(
            axes,
            f"as good {when} {secs(seconds)}",
            (seconds, level),
            (-7, -6 if lower else 6),
            **look,
        )
    _finish(figure, axes, results.clock.seconds)
    return figure


def of_candidates(
    comparison: Comparison, best: Candidate | None, seconds: str, title: str
) -> Figure:
    """Draw the objective of all candidates against the budget.

    Of sides a line for each run; of configurations of a search the mean over the seeds and ± one
    standard deviation.
    """
    figure, (axes,) = style.sheet(1, HEIGHT_IN)
    metric, lower = comparison.objective, comparison.mode == "min"
    others, positive, ends = itertools.cycle(SERIES), True, []
    for one in comparison.candidates:
        is_best = one is best and not one.is_baseline
        color = BASELINE if one.is_baseline else WINNER if is_best else next(others)
        named = is_best and comparison.of_search is not None
        label = f"winner ({one.name})" if named else one.name
        levels = one.curve(metric) if comparison.of_search is not None else []
        lines = [curve(run, metric) for run in one.runs] if comparison.of_search is None else []
        xs, means = [level.seconds for level in levels], [level.mean for level in levels]
        width = 2.2 if one.is_baseline or one is best else 1.5
        axes.plot(xs, means, marker="o", markersize=3.5, color=color, linewidth=width, label=label)
        low, high = ([level.mean + sign * level.sd for level in levels] for sign in (-1, 1))
        axes.fill_between(xs, low, high, color=color, alpha=0.12, linewidth=0)
        for line in filter(None, lines):
            axes.plot(*zip(*line, strict=True), color=color, linewidth=1.1, alpha=0.7)
            axes.plot(*line[-1], "o", color=color, markersize=4)
        positive = positive and all(y > 0 for y in [*low, *(y for line in lines for _, y in line)])
        if levels and (one.is_baseline or one is best):
            role = "baseline" if one.is_baseline else "winner"
            ends.append(((xs[-1], means[-1]), color, f"{role} {number(means[-1])}"))
    style.objective_axis(axes, title, lower, positive)
    style.label_line_ends(axes, ends)
    _finish(figure, axes, seconds)
    return figure


def of_sides(comparison: Comparison) -> Figure:
    """Draw the curves of all runs of two sides."""
    best = comparison.candidates[-1] if comparison.verdict == Verdict.BETTER else None
    return of_candidates(comparison, best, sides.clock(comparison).seconds, comparison.label)


def _finish(figure: Figure, axes: Axes, seconds: str) -> None:
    axes.set_xlabel(seconds)
    axes.set_xlim(left=0)
    style.plain_numbers(axes)
    style.legend(figure)


# ---- why
def of_why(results: Results, highlights: Highlights, parts: Why) -> Figure:
    """Draw baseline and winner against seconds and samples, and where both are compared."""
    figure, panels = style.sheet(2, 3.5, sharey=True)
    clock, equal = results.clock, f"{results.unit} ({parts.equal_samples:,})"
    for axes, along, label, at, title in (
        (panels[0], clock.along, clock.seconds, parts.seconds, f"seconds ({secs(parts.seconds)})"),
        (panels[1], "samples", f"{results.unit} seen", parts.equal_samples, equal),
    ):  # fmt: skip
        for trial, color, role in highlights.pairs():
            line = curve(trial, results.metric, along)
            axes.plot(*zip(*line, strict=True), "o-", color=color, markersize=4, label=role)
        axes.axvline(float(at), color=style.SOFT, linewidth=0.9, linestyle=style.DASHED)
        axes.set(xlabel=label, title=f"at equal {title}")
        axes.set_xlim(left=0)
        style.plain_numbers(axes)
        axes.grid(True, axis="y")
    style.objective_axis(panels[0], results.title, results.lower_is_better, results.ratios)
    style.legend(figure)
    return figure


# ---- knobs
def of_knobs(
    results: Results, highlights: Highlights, trials: Sequence[TrialRecord], names: Sequence[str]
) -> Figure:
    """Draw a panel for each knob, with a dot for each trial at its value of the knob."""
    ends = {run.name: run.value(results.metric) or 0.0 for run in trials}
    dimensions = {dimension.name: dimension for dimension in searched(results)}
    rows = -(-len(names) // 2)
    figure = Figure(figsize=(style.WIDTH_IN, 2.5 * rows), layout="constrained")
    panels = list(figure.subplots(rows, 2, squeeze=False, sharey=True).flat)
    for axes, name in zip(panels, names, strict=False):
        drawn = {run.name: run.drawn[name] for run in trials if name in run.drawn}
        places: dict[str, Any] = drawn
        if is_range(dimensions[name], list(drawn.values())):
            axes.set_xscale("log" if dimensions[name].log else "linear")
            axes.xaxis.set_major_formatter(style.tick_formatter())
        else:  # values that have no order are categories
            listed = sorted(drawn, key=lambda run: repr(drawn[run]))
            places = {run: short(shown(drawn[run]), 14) for run in listed}
            axes.margins(x=0.2)
        heights, look = [ends[run] for run in places], {"color": colors.PLAIN, "markersize": 4}
        axes.plot(list(places.values()), heights, "o", **look)
        for trial, color, role in highlights.pairs():
            at = [places[trial.name]] if trial.name in places else []
            axes.plot(at, [ends[trial.name]] * len(at), "o", color=color, markersize=6, label=role)
        if axes.get_xscale() == "log":
            style.plain_logarithms(axes.xaxis)
        axes.set_title(short(name, 40))
        style.objective_axis(axes, results.title, results.lower_is_better, min(ends.values()) > 0)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    style.legend(figure)
    return figure


def of_fronts(results: Results, frame: pd.DataFrame, highlights: Highlights) -> Figure | None:
    """Draw one panel per quantity that at least two trials have, with its Pareto front."""
    known = [name for name in AGAINST if f"on_front_{name}" in frame]
    quantities = [name for name in known if frame[name].notna().sum() > 1]
    if not quantities:
        return None
    figure, panels = style.sheet(len(quantities), 3.9, sharey=True)
    for axes, name in zip(panels, quantities, strict=True):
        measured = frame[frame[name].notna()]
        axes.plot(
            measured[name],
            measured[results.metric],
            "o",
            color=style.GREY,
            markersize=4,
            label="other trials",
        )
        best = measured[measured[f"on_front_{name}"]]  # no line: between the points is noise
        look: dict[str, Any] = {"markerfacecolor": "none", "markersize": 11, "color": style.INK}
        axes.plot(best[name], best[results.metric], "o", label="Pareto-optimal", **look)
        for trial, color, role in highlights.shown():
            rows = measured[measured["trial"] == trial.name]
            axes.plot(rows[name], rows[results.metric], "o", color=color, markersize=7, label=role)
        axes.set_xlabel(AGAINST[name].format(unit=results.unit))
        style.plain_numbers(axes)
        axes.margins(0.07)
        style.objective_axis(
            axes, results.title, results.lower_is_better, bool((frame[results.metric] > 0).all())
        )
    style.legend(figure)
    return figure
