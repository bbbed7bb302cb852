"""Show trade-offs: Pareto fronts of the objective against speed, memory and cost; when
torch.compile pays."""

from __future__ import annotations

import dataclasses

import pandas as pd
from matplotlib.figure import Figure

from tunediff.analysis import RATE, Results
from tunediff.analysis.pareto import trade_offs as table_of
from tunediff.analysis.speed import Compiled, compiled
from tunediff.core.text import graphs, number, pluralize, truncate
from tunediff.report import style
from tunediff.report.context import ReportContext, lead, note
from tunediff.report.files import Files
from tunediff.report.html import Html, el, join, table
from tunediff.report.style import (
    Digits,
    Highlights,
    annotate,
    label_line_ends,
    objective_axis,
    plain_numbers,
    ring,
    sheet,
)
from tunediff.report.words import SPACE, duration, rounded, secs, times

# ---- trade-offs
AGAINST = {
    RATE: ("{unit}/s", "{unit}/s → faster"),
    "peak_memory_mib": ("memory", "memory (MiB) → more"),
    "device_s": ("device-seconds", "training seconds × devices → more"),
    "energy_wh": ("energy", "energy of the training (Wh) → more"),
    "price": ("price", "price of the training → more"),
}
"""Quantities that the objective is compared with: name in a sentence, label of an axis; `{unit}`:
of samples."""


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
            fronts.append(
                f"{len(names):,} in {context.label} and {words.format(unit=context.unit)}{among}"
            )
    return join(
        lead(f"Pareto-optimal among {pluralize(len(frame), 'trial')}: {'; '.join(fronts)}."), figure
    )


def _fronts(results: Results, frame: pd.DataFrame, highlights: Highlights) -> Figure | None:
    """Draw one panel per quantity that at least two trials have, with its Pareto front; None
    without any."""
    quantities = [
        name for name in AGAINST if f"on_front_{name}" in frame and frame[name].notna().sum() > 1
    ]
    if not quantities:
        return None
    figure, panels = sheet(len(quantities), 3.9, sharey=True)
    for axes, name in zip(panels, quantities, strict=True):
        measured = frame[frame[name].notna()]
        many = len(measured) > style.MANY
        axes.scatter(measured[name], measured[results.metric], s=10 if many else 22, color=style.GREY, linewidths=0,
                     alpha=0.6 if many else 1.0, rasterized=many, zorder=1, label="other trials")  # fmt: skip
        # The front has no line: between its points lie trials that were not run, and differences
        # are often noise.
        best = measured[measured[f"on_front_{name}"]]
        axes.plot(best[name], best[results.metric], "o", color=style.INK, markerfacecolor="none", markersize=11,
                  markeredgewidth=1.1, zorder=4, label="Pareto-optimal")  # fmt: skip
        for trial, color, role in highlights.shown():
            mine = measured[measured["trial"] == trial.name]
            axes.plot(mine[name], mine[results.metric], "o", color=color, markersize=7, zorder=3, linestyle="none",
                      markeredgewidth=0, label=role)  # fmt: skip
        axes.set_xlabel(AGAINST[name][1].format(unit=results.unit))
        plain_numbers(axes)
        axes.margins(0.07)
        axes.grid(True, axis="x")
        objective_axis(axes, results, bool((frame[results.metric] > 0).all()))
    style.legend(figure)
    return figure


# ---- torch.compile
ROWS = 20
"""Maximum number of rows in the table."""


def compiling(context: ReportContext, files: Files) -> Html | None:
    """Return the section about torch.compile: its cost and when it pays; None if no trial
    compiled."""
    if not (runs := compiled(context.results)):
        return None
    files.csv("compile", pd.DataFrame(map(dataclasses.asdict, runs)))
    pairs = [run for run in runs if run.versus_uncompiled is not None]
    budgets, winner, figure = [run.budget_s for run in runs], context.highlights.winner, None
    # What compiling costs, and where the same configuration also ran without it, when it pays.
    costs = [run.compile_s for run in runs if run.compile_s is not None]
    cost = "its cost was not recorded"
    if costs:
        span = (
            number(min(costs))
            if min(costs) == max(costs)
            else f"{number(min(costs))} to {number(max(costs))}"
        )
        of = " to ".join(dict.fromkeys([duration(min(budgets)), duration(max(budgets))]))
        cost = f"compiling took {span}{SPACE}s of a budget of {of}"
    if pairs:
        paid = sum(run.pays_in_budget for run in pairs)
        ran = f"{pluralize(len(pairs), 'configuration')} ran with and without torch.compile"
        sentence = f"{ran}: within the budget it pays in {paid} of them; {cost}."
        mine = [run for run in pairs if winner is not None and run.trial == winner.name]
        best = max(mine or pairs, key=lambda run: run.versus_uncompiled or 0.0)
        figure = files.chart(
            "compile",
            lambda: _break_even(best, context.unit),
            f"{context.unit} against training seconds, compiled and not",
            f"{best.trial} and {best.uncompiled}, which are equal but for compilation.",
        )
    else:
        ran = (
            f"{pluralize(len(runs), 'configuration')} ran under torch.compile, and none of them"
            " without it as well"
        )
        sentence = f"{ran}: the break-even point is unknown; {cost}."
    # The table, and remarks about the number of compiled graphs.
    rows = [
        _row(run) for run in sorted(runs, key=lambda run: -(run.versus_uncompiled or 0.0))[:ROWS]
    ]
    more = f"The first {ROWS} of {len(runs):,}. " if len(runs) > ROWS else ""
    charged = "count as" if context.results.space.budget.compile_charged else "do not count as"
    notes = note(
        f"{more}Compile seconds {charged} training seconds in this search. ", files.links("compile")
    )
    rates = [f"{context.unit}/s", "not compiled", "ratio", "pays after", f"or {context.unit}"]
    odd = [
        f"{run.trial} made {graphs_made}"
        for run in runs
        if (graphs_made := graphs(run.graphs, run.expected_graphs))
    ]
    notes = join(el("p", f"{'; '.join(odd[:ROWS])}.") if odd else None, notes)
    return join(
        lead(sentence),
        figure,
        table(["trial", "mode", "not compiled", "compile s", *rates], rows, words=3),
        notes,
    )


def _row(run: Compiled) -> list[object]:
    pays = secs(run.break_even_s) if run.break_even_s is not None else "never"
    measured = [
        rounded(value) for value in (run.compile_s, run.samples_per_s, run.uncompiled_samples_per_s)
    ]
    pays = "not known" if run.versus_uncompiled is None else pays
    words = [run.trial, run.mode, run.uncompiled or "–"]
    return [
        *words,
        *measured,
        times(run.versus_uncompiled),
        pays,
        rounded(run.samples_to_break_even),
    ]


def _break_even(run: Compiled, unit: str) -> Figure | None:
    """Draw samples against training seconds of one configuration, with and without compilation.

    None if a rate or the cost of compiling is unknown. unit: name of the samples.
    """
    budget_s, plain, fast, cost, paid = (
        run.budget_s, run.uncompiled_samples_per_s, run.samples_per_s, run.compile_s, run.break_even_s,
    )  # fmt: skip
    if plain is None or fast is None or cost is None:
        return None
    # The axis ends behind the budget, the compilation and, unless it is far away, the break-even
    # point.
    end = max(budget_s, cost * 1.5, min(1.3 * (paid or 0.0), 20 * budget_s))
    trained = fast * max(0.0, end - cost)
    figure, (axes,) = sheet(1, 3.3)
    axes.plot([0, end], [0, plain * end], color=style.SOFT, linewidth=1.8)
    axes.plot([0, cost, max(cost, end)], [0, 0, trained], color=style.INK, linewidth=1.8)
    names = (style.SOFT, "not compiled"), (style.INK, f"compiled ({truncate(run.mode, 30)})")
    label_line_ends(axes, [((end, plain * end), *names[0]), ((end, trained), *names[1])])
    axes.axvline(budget_s, color=style.SOFT, linewidth=0.9, linestyle=style.DASHED)
    annotate(axes, "budget of a trial", (budget_s, 1), (-4, -2), xycoords=("data", "axes fraction"), va="top",
             ha="right", color=style.SOFT)  # fmt: skip
    if paid is not None and paid <= end:
        ring(axes, (paid, plain * paid), style.INK)
        annotate(
            axes,
            f"pays from {secs(paid)} on",
            (paid, plain * paid),
            (10, -10),
            va="top",
            fontsize=9,
        )
    axes.set_xlabel("training seconds, compilation included")
    axes.set_ylabel(unit)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(Digits())
    axes.grid(True, axis="y")
    return figure
