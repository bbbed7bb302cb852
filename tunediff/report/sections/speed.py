"""What speed costs: Pareto fronts of the objective against speed, memory and seconds; when torch.compile pays."""

from __future__ import annotations

import dataclasses

import pandas as pd
from matplotlib.figure import Figure

from tunediff.analysis import RATE, Results
from tunediff.analysis.speed import Compiled, compiled
from tunediff.analysis.speed import trade_offs as table_of
from tunediff.core.text import graphs, number, pluralize, truncate
from tunediff.report import style
from tunediff.report.context import ReportContext, lead, note
from tunediff.report.files import Files
from tunediff.report.html import Html, el, join, table
from tunediff.report.style import Digits, Highlights, at_the_end, objective_axis, plain_numbers, ring, say, sheet
from tunediff.report.words import SPACE, duration, rounded, secs, times

# ----------------------------------------------------------------------------------------------------------- trade-offs
AGAINST = {
    RATE: ("{unit}/s", "{unit}/s → faster"),
    "peak_memory_mib": ("memory", "memory (MiB) → more"),
    "device_s": ("device-seconds", "training seconds × devices → more"),
    "energy_wh": ("energy", "energy of the training (Wh) → more"),
    "price": ("price", "price of the training → more"),
}
"""What an objective is weighed against: its name in a sentence and along an axis; `{unit}`: of samples."""


def trade_offs(subject: ReportContext, files: Files) -> Html | None:
    """Which trials no other beats in both at once."""
    found, base = subject.found, subject.stars.baseline
    if len(found.ranked) < 2:
        return None
    frame = table_of(found)
    files.csv("trade_offs", frame)
    figure = files.chart(
        "trade_offs",
        lambda: _fronts(found, frame, subject.stars),
        f"{subject.label} against {subject.unit} per second and against memory",
        "Rings: the trials that no other beats in both directions at once.",
    )
    if figure is None:
        return None
    said = []
    for name, (words, _) in AGAINST.items():
        if f"on_front_{name}" in frame:
            names = list(frame["trial"][frame[f"on_front_{name}"]])
            among = ", the baseline among them" if base is not None and base.name in names else ""
            said.append(f"{len(names):,} in {subject.label} and {words.format(unit=subject.unit)}{among}")
    return join(
        lead(f"Beaten by no other of {pluralize(len(frame), 'trial')} in both at once: {'; '.join(said)}."), figure
    )


def _fronts(found: Results, frame: pd.DataFrame, stars: Highlights) -> Figure | None:
    """A panel for each quantity that at least two trials have, with the trials that no other beats in both."""
    wanted = [name for name in AGAINST if f"on_front_{name}" in frame and frame[name].notna().sum() > 1]
    if not wanted:
        return None
    figure, panels = sheet(len(wanted), 3.9, sharey=True)
    for axes, name in zip(panels, wanted, strict=True):
        known = frame[frame[name].notna()]
        many = len(known) > style.MANY
        axes.scatter(known[name], known[found.metric], s=10 if many else 22, color=style.GREY, linewidths=0,
                     alpha=0.6 if many else 1.0, rasterized=many, zorder=1, label="other trials")  # fmt: skip
        # No line joins them: between two of them lie trials that nobody ran, and often nothing but noise.
        best = known[known[f"on_front_{name}"]]
        axes.plot(best[name], best[found.metric], "o", color=style.INK, markerfacecolor="none", markersize=11,
                  markeredgewidth=1.1, zorder=4, label="beaten by none in both")  # fmt: skip
        for trial, color, what in stars.shown():
            mine = known[known["trial"] == trial.name]
            axes.plot(mine[name], mine[found.metric], "o", color=color, markersize=7, zorder=3, linestyle="none",
                      markeredgewidth=0, label=what)  # fmt: skip
        axes.set_xlabel(AGAINST[name][1].format(unit=found.unit))
        plain_numbers(axes)
        axes.margins(0.07)
        axes.grid(True, axis="x")
        objective_axis(axes, found, bool((frame[found.metric] > 0).all()))
    style.legend(figure)
    return figure


# -------------------------------------------------------------------------------------------------------- torch.compile
ROWS = 20
"""Of the table."""


def compiling(subject: ReportContext, files: Files) -> Html | None:
    """Only of a search that compiled."""
    if not (found := compiled(subject.found)):
        return None
    files.csv("compile", pd.DataFrame(map(dataclasses.asdict, found)))
    pairs = [one for one in found if one.versus_uncompiled is not None]
    budget_s, winner, figure = subject.found.space.longest_s, subject.stars.winner, None
    costs = [one.compile_s for one in found if one.compile_s is not None]
    cost = "its cost was not recorded"
    if costs:
        span = number(min(costs)) if min(costs) == max(costs) else f"{number(min(costs))} to {number(max(costs))}"
        cost = f"compiling took {span}{SPACE}s of a budget of {duration(budget_s)}"
    if pairs:
        paid = sum(one.break_even_s is not None and one.break_even_s <= budget_s for one in pairs)
        ran = f"{pluralize(len(pairs), 'configuration')} ran with and without torch.compile"
        said = f"{ran}: within the budget it pays in {paid} of them; {cost}."
        mine = [one for one in pairs if winner is not None and one.trial == winner.name]
        best = max(mine or pairs, key=lambda one: one.versus_uncompiled or 0.0)
        figure = files.chart(
            "compile",
            lambda: _break_even(best, budget_s, subject.unit),
            f"{subject.unit} against training seconds, compiled and not",
            f"{best.trial} and {best.uncompiled}, which are equal but for compilation.",
        )
    else:
        ran = f"{pluralize(len(found), 'configuration')} ran under torch.compile, and none of them without it as well"
        said = f"{ran}: when it pays cannot be told; {cost}."
    rows = [_row(one) for one in sorted(found, key=lambda one: -(one.versus_uncompiled or 0.0))[:ROWS]]
    more = f"The first {ROWS} of {len(found):,}. " if len(found) > ROWS else ""
    charged = "count as" if subject.found.space.budget.compile_charged else "do not count as"
    notes = note(f"{more}Compile seconds {charged} training seconds in this search. ", files.links("compile"))
    rates = [f"{subject.unit}/s", "not compiled", "ratio", "pays after", f"or {subject.unit}"]
    odd = [f"{one.trial} made {told}" for one in found if (told := graphs(one.graphs, one.expected_graphs))]
    notes = join(el("p", f"{'; '.join(odd[:ROWS])}.") if odd else None, notes)
    return join(lead(said), figure, table(["trial", "mode", "not compiled", "compile s", *rates], rows, words=3), notes)


def _row(one: Compiled) -> list[object]:
    pays = secs(one.break_even_s) if one.break_even_s is not None else "never"
    measured = [rounded(value) for value in (one.compile_s, one.samples_per_s, one.uncompiled_samples_per_s)]
    pays = "not known" if one.versus_uncompiled is None else pays
    words = [one.trial, one.mode, one.uncompiled or "–"]
    return [*words, *measured, times(one.versus_uncompiled), pays, rounded(one.samples_to_break_even)]


def _break_even(one: Compiled, budget_s: float, unit: str) -> Figure | None:
    """Samples against training seconds, with and without compilation, of one configuration that ran both ways."""
    plain, fast, cost, paid = one.uncompiled_samples_per_s, one.samples_per_s, one.compile_s, one.break_even_s
    if plain is None or fast is None or cost is None:
        return None
    end = max(budget_s, cost * 1.5, min(1.3 * (paid or 0.0), 20 * budget_s))
    trained = fast * max(0.0, end - cost)
    figure, (axes,) = sheet(1, 3.3)
    axes.plot([0, end], [0, plain * end], color=style.SOFT, linewidth=1.8)
    axes.plot([0, cost, max(cost, end)], [0, 0, trained], color=style.INK, linewidth=1.8)
    names = (style.SOFT, "not compiled"), (style.INK, f"compiled ({truncate(one.mode, 30)})")
    at_the_end(axes, [((end, plain * end), *names[0]), ((end, trained), *names[1])])
    axes.axvline(budget_s, color=style.SOFT, linewidth=0.9, linestyle=style.DASHED)
    say(axes, "budget of a trial", (budget_s, 1), (-4, -2), xycoords=("data", "axes fraction"), va="top", ha="right",
        color=style.SOFT)  # fmt: skip
    if paid is not None and paid <= end:
        ring(axes, (paid, plain * paid), style.INK)
        say(axes, f"pays from {secs(paid)} on", (paid, plain * paid), (10, -10), va="top", fontsize=9)
    axes.set_xlabel("training seconds, compilation included")
    axes.set_ylabel(unit)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(Digits())
    axes.grid(True, axis="y")
    return figure
