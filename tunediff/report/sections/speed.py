"""Show Pareto fronts of the objective against speed, memory and cost."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from tunediff.analysis import RATE, Results
from tunediff.analysis.pareto import trade_offs as table_of
from tunediff.core.text import pluralize
from tunediff.report import style
from tunediff.report.context import Highlights, ReportContext
from tunediff.report.figures import Figures
from tunediff.report.html import Html, join, lead

# ---- trade-offs
AGAINST = {
    RATE: ("{unit}/s", "{unit}/s → faster"),
    "peak_memory_mib": ("memory", "memory (MiB) → more"),
    "device_s": ("device-seconds", "training seconds × devices → more"),
    "price": ("price", "price of the training → more"),
}
"""Quantities besides the objective: name in a sentence, axis label; `{unit}`: of samples."""


def trade_offs(context: ReportContext, figures: Figures) -> Html | None:
    """Return the section with the Pareto fronts; None with fewer than two results."""
    results, base = context.results, context.highlights.baseline
    if len(results.ranked) < 2:
        return None
    frame = table_of(results)
    figure = figures.chart(
        "trade_offs",
        lambda: _fronts(results, frame, context.highlights),
        f"{context.label} against speed and memory, as far as they were measured",
        "Rings: Pareto-optimal trials, which no other trial beats in both quantities.",
    )
    if figure is None:
        return None
    fronts = []
    for name, (words, _) in AGAINST.items():
        if f"on_front_{name}" in frame:
            names = list(frame["trial"][frame[f"on_front_{name}"]])
            among = ", the baseline among them" if base is not None and base.name in names else ""
            against = words.format(unit=context.unit)
            fronts.append(f"{len(names):,} in {context.label} and {against}{among}")
    trials = pluralize(len(frame), "trial")
    return join(lead(f"Pareto-optimal among {trials}: {'; '.join(fronts)}."), figure)


def _fronts(results: Results, frame: pd.DataFrame, highlights: Highlights) -> Figure | None:
    """Draw one panel per quantity that at least two trials have, with its Pareto front."""
    known = [name for name in AGAINST if f"on_front_{name}" in frame]
    quantities = [name for name in known if frame[name].notna().sum() > 1]
    if not quantities:
        return None
    figure, panels = style.sheet(len(quantities), 3.9, sharey=True)
    positive = bool((frame[results.metric] > 0).all())
    for axes, name in zip(panels, quantities, strict=True):
        measured = frame[frame[name].notna()]
        many = len(measured) > style.MANY
        axes.scatter(
            measured[name],
            measured[results.metric],
            s=10 if many else 22,
            color=style.GREY,
            linewidths=0,
            alpha=0.6 if many else 1.0,
            rasterized=many,
            zorder=1,
            label="other trials",
        )
        # No line: between the points lie trials that were not run, and noise.
        best = measured[measured[f"on_front_{name}"]]
        look: dict[str, Any] = {"markerfacecolor": "none", "markersize": 11, "markeredgewidth": 1.1}
        look |= {"color": style.INK, "zorder": 4, "label": "Pareto-optimal"}
        axes.plot(best[name], best[results.metric], "o", **look)
        for trial, color, role in highlights.shown():
            rows = measured[measured["trial"] == trial.name]
            look = {"markersize": 7, "markeredgewidth": 0, "zorder": 3}
            axes.plot(rows[name], rows[results.metric], "o", color=color, label=role, **look)
        axes.set_xlabel(AGAINST[name][1].format(unit=results.unit))
        style.plain_numbers(axes)
        axes.margins(0.07)
        axes.grid(True, axis="x")
        style.objective_axis(axes, results, positive)
    style.legend(figure)
    return figure
