"""Show Pareto fronts of the objective against speed, memory and cost; when torch.compile pays."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from tunediff.analysis import RATE, Results
from tunediff.analysis.pareto import trade_offs as table_of
from tunediff.analysis.speed import Compiled, compiled
from tunediff.core.text import graphs, number, pluralize
from tunediff.report import style
from tunediff.report.context import Highlights, ReportContext
from tunediff.report.files import Files
from tunediff.report.html import Html, el, join, lead, note, table
from tunediff.report.words import SPACE, duration, rounded, secs, times

# ---- trade-offs
AGAINST = {
    RATE: ("{unit}/s", "{unit}/s → faster"),
    "peak_memory_mib": ("memory", "memory (MiB) → more"),
    "device_s": ("device-seconds", "training seconds × devices → more"),
    "price": ("price", "price of the training → more"),
}
"""Quantities besides the objective: name in a sentence, axis label; `{unit}`: of samples."""


def trade_offs(context: ReportContext, files: Files) -> Html | None:
    """Return the section with the Pareto fronts; None with fewer than two results."""
    results, base = context.results, context.highlights.baseline
    if len(results.ranked) < 2:
        return None
    frame = table_of(results)
    files.csv("trade_offs", frame)
    figure = files.chart(
        "trade_offs",
        lambda: _fronts(results, frame, context.highlights),
        f"{context.label} against {context.unit} per second and against memory",
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


# ---- torch.compile
ROWS = 20
"""Maximum number of rows in the table."""


def compiling(context: ReportContext, files: Files) -> Html | None:
    """Return the section about torch.compile: cost and gain; None if no trial compiled."""
    if not (runs := compiled(context.results)):
        return None
    files.csv("compile", pd.DataFrame(map(dataclasses.asdict, runs)))
    pairs = [run for run in runs if run.versus_uncompiled is not None]
    count = pluralize(len(pairs or runs), "configuration")
    sentence = (
        f"{count} ran under torch.compile, and none of them without it as well: the break-even"
        f" point is unknown; {_cost(runs)}."
    )
    if pairs:
        paid = sum(run.pays_in_budget for run in pairs)
        sentence = (
            f"{count} ran with and without torch.compile: within the budget it pays in {paid} of"
            f" them; {_cost(runs)}."
        )
    # The table, and remarks about the number of compiled graphs.
    by_gain = sorted(runs, key=lambda run: -(run.versus_uncompiled or 0.0))
    rates = [f"{context.unit}/s", "not compiled", "ratio", "pays after", f"or {context.unit}"]
    header = ["trial", "mode", "not compiled", "compile s", *rates]
    odd = [(run.trial, graphs(run.graphs, run.expected_graphs)) for run in runs]
    made = [f"{trial} made {words}" for trial, words in odd if words][:ROWS]
    more = f"The first {ROWS} of {len(runs):,}. " if len(runs) > ROWS else ""
    counts = "count" if context.results.space.budget.compile_charged else "do not count"
    charged = f"Compile seconds {counts} as training seconds in this search. "
    return join(
        lead(sentence),
        table(header, [_row(run) for run in by_gain[:ROWS]], words=3),
        el("p", f"{'; '.join(made)}.") if made else None,
        note(more + charged, files.links("compile")),
    )


def _cost(runs: list[Compiled]) -> str:
    costs = [run.compile_s for run in runs if run.compile_s is not None]
    if not costs:
        return "its cost was not recorded"
    spent = " to ".join(dict.fromkeys([number(min(costs)), number(max(costs))]))
    budgets = [run.budget_s for run in runs]
    of = " to ".join(dict.fromkeys([duration(min(budgets)), duration(max(budgets))]))
    return f"compiling took {spent}{SPACE}s of a budget of {of}"


def _row(run: Compiled) -> list[object]:
    pays = "never" if run.break_even_s is None else secs(run.break_even_s)
    return [
        run.trial,
        run.mode,
        run.uncompiled or "–",
        rounded(run.compile_s),
        rounded(run.samples_per_s),
        rounded(run.uncompiled_samples_per_s),
        times(run.versus_uncompiled),
        "not known" if run.versus_uncompiled is None else pays,
        rounded(run.samples_to_break_even),
    ]
