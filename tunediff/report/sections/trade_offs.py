"""Pareto fronts: the objective against speed, against memory, and against the seconds of all workers."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from tunediff.report.files import Files
from tunediff.report.html import Html, join
from tunediff.report.style import GREY, INK, MANY, Stars, objective_axis, plain_numbers, sheet
from tunediff.report.subject import Subject, lead
from tunediff.report.words import some
from tunediff.results import RATE, Results
from tunediff.results.speed import trade_offs as table_of

AGAINST = {
    RATE: ("images/s", "images/s → faster"),
    "peak_memory_mib": ("memory", "memory (MiB) → more"),
    "worker_s": ("training seconds × workers", "training seconds × workers → more"),
}
"""What an objective is weighed against: how it is called in a sentence, and along an axis."""


def trade_offs(subject: Subject, files: Files) -> Html | None:
    """Which trials no other beats in both at once."""
    found, base = subject.found, subject.stars.baseline
    if len(found.ranked) < 2:
        return None
    frame = table_of(found)
    files.csv("trade_offs", frame)
    figure = files.chart(
        "trade_offs",
        lambda: _drawn(found, frame, subject.stars),
        f"{subject.label} against images per second and against memory",
        "The line joins the trials that no other beats in both directions at once.",
    )
    if figure is None:
        return None
    said = []
    for name, (words, _) in AGAINST.items():
        if f"on_front_{name}" in frame:
            names = list(frame["trial"][frame[f"on_front_{name}"]])
            among = ", the baseline among them" if base is not None and base.name in names else ""
            said.append(f"{len(names):,} in {subject.label} and {words}{among}")
    return join(lead(f"Beaten by no other of {some(len(frame), 'trial')} in both at once: {'; '.join(said)}."), figure)


def _drawn(found: Results, frame: pd.DataFrame, stars: Stars) -> Figure | None:
    """A panel for each quantity that at least two trials have, with the trials that no other beats in both."""
    wanted = [name for name in AGAINST if f"on_front_{name}" in frame and frame[name].notna().sum() > 1]
    if not wanted:
        return None
    figure, panels = sheet(len(wanted), 3.9, sharey=True)
    for axes, name in zip(panels, wanted, strict=True):
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
        axes.set_xlabel(AGAINST[name][1])
        plain_numbers(axes)
        axes.margins(0.07)
        axes.grid(True, axis="both")
    objective_axis(panels[0], found, bool((frame[found.metric] > 0).all()))
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside upper left", ncols=3)
    return figure
