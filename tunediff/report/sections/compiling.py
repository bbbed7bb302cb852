"""When torch.compile pays: what it costs, and after which time it has caught up."""

from __future__ import annotations

import dataclasses

import pandas as pd
from matplotlib.figure import Figure

from tunediff.cli import number
from tunediff.report.files import Files
from tunediff.report.html import Html, join, table
from tunediff.report.style import DASHED, INK, SOFT, at_the_end, ring, say, sheet, with_commas
from tunediff.report.subject import Subject, lead, note
from tunediff.report.words import SPACE, cut, duration, rounded, secs, some, times
from tunediff.results.speed import Compiled, compiled

ROWS = 20
"""Of the table."""
HEADER = ("trial", "mode", "not compiled", "compile s", "images/s", "not compiled", "ratio", "pays after", "or images")


def compiling(subject: Subject, files: Files) -> Html | None:
    """Only of a search that compiled."""
    if not (found := compiled(subject.found)):
        return None
    files.csv("compile", pd.DataFrame(map(dataclasses.asdict, found)))
    pairs = [one for one in found if one.versus_uncompiled is not None]
    budget_s, winner, figure = subject.budget_s, subject.stars.winner, None
    costs = [one.compile_s for one in found if one.compile_s is not None]
    cost = "its cost was not recorded"
    if costs:
        span = number(min(costs)) if min(costs) == max(costs) else f"{number(min(costs))} to {number(max(costs))}"
        cost = f"compiling took {span}{SPACE}s of a budget of {duration(budget_s)}"
    if pairs:
        paid = sum(one.break_even_s is not None and one.break_even_s <= budget_s for one in pairs)
        ran = f"{some(len(pairs), 'configuration')} ran with and without torch.compile"
        said = f"{ran}: within the budget it pays in {paid} of them; {cost}."
        mine = [one for one in pairs if winner is not None and one.trial == winner.name]
        best = max(mine or pairs, key=lambda one: one.versus_uncompiled or 0.0)
        figure = files.chart(
            "compile",
            lambda: _drawn(best, budget_s),
            "images against training seconds, compiled and not",
            f"{best.trial} and {best.uncompiled}, which are equal but for compilation.",
        )
    else:
        ran = f"{some(len(found), 'configuration')} ran under torch.compile, and none of them without it as well"
        said = f"{ran}: when it pays cannot be told; {cost}."
    rows = [_row(one) for one in sorted(found, key=lambda one: -(one.versus_uncompiled or 0.0))[:ROWS]]
    more = f"The first {ROWS} of {len(found):,}. " if len(found) > ROWS else ""
    charged = "count as" if subject.found.space.budget.compile_charged else "do not count as"
    notes = note(f"{more}Compile seconds {charged} training seconds in this search. ", files.links("compile"))
    return join(lead(said), figure, table(HEADER, rows, words=3), notes)


def _row(one: Compiled) -> list[object]:
    pays = secs(one.break_even_s) if one.break_even_s is not None else "never"
    measured = [rounded(value) for value in (one.compile_s, one.images_per_s, one.uncompiled_images_per_s)]
    pays = "not known" if one.versus_uncompiled is None else pays
    words = [one.trial, one.mode, one.uncompiled or "–"]
    return [*words, *measured, times(one.versus_uncompiled), pays, rounded(one.images_to_break_even)]


def _drawn(one: Compiled, budget_s: float) -> Figure | None:
    """Images against training seconds, with and without compilation, of one configuration that ran both ways."""
    plain, fast, cost, paid = one.uncompiled_images_per_s, one.images_per_s, one.compile_s, one.break_even_s
    if plain is None or fast is None or cost is None:
        return None
    end = max(budget_s, cost * 1.5, min(1.3 * (paid or 0.0), 20 * budget_s))
    trained = fast * max(0.0, end - cost)
    figure, (axes,) = sheet(1, 3.3)
    axes.plot([0, end], [0, plain * end], color=SOFT, linewidth=1.8)
    axes.plot([0, cost, max(cost, end)], [0, 0, trained], color=INK, linewidth=1.8)
    names = (SOFT, "not compiled"), (INK, f"compiled ({cut(one.mode, 30)})")
    at_the_end(axes, [((end, plain * end), *names[0]), ((end, trained), *names[1])])
    axes.axvline(budget_s, color=SOFT, linewidth=0.9, linestyle=DASHED)
    say(axes, "budget of a trial", (budget_s, 1), (-4, -2), xycoords=("data", "axes fraction"), va="top", ha="right",
        color=SOFT)  # fmt: skip
    if paid is not None and paid <= end:
        ring(axes, (paid, plain * paid), INK)
        say(axes, f"pays from {secs(paid)} on", (paid, plain * paid), (10, -10), va="top", fontsize=9)
    axes.set_xlabel("training seconds, compilation included")
    axes.set_ylabel("images")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(with_commas())
    axes.grid(True, axis="y")
    return figure
