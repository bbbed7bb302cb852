"""What each knob does: what its values reached on average, with the noise of that."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from tunediff.cli import number
from tunediff.report.files import Files
from tunediff.report.html import WINNER, Html, el, folded, join, table
from tunediff.report.style import GREY, INK, RULE, SOFT, Stars, objective_axis, plain_numbers, say, sheet
from tunediff.report.subject import Subject, lead, note
from tunediff.report.words import between, cut, rounded, some
from tunediff.results import Results
from tunediff.results.effects import ABOVE, TOO_FEW, WITHIN, Effect, effects_table

MOST = 8
"""Knobs in the figure: those that matter most."""
HOW = (
    "Means are geometric where all values are positive. “Larger than the noise”: an analysis of variance, p < 0.05 "
    "after Holm's correction over all knobs. The noise holds what the other knobs do; and a search draws good "
    "values together, so that a part of an effect may belong to another knob."
)


def effects(subject: Subject, files: Files) -> Html | None:
    """All knobs with several values; a ladder changes its knobs together, what each does is in its own table."""
    found = subject.effects
    if not found or not subject.found.ranked or subject.found.space.kind == "ladder":
        return None
    files.csv("effects", effects_table(subject.found, found))
    above = [effect for effect in found if effect.verdict == ABOVE]
    said = f"No knob has an effect on {subject.label} that is larger than the noise between trials."
    if above:
        widest = max(above, key=lambda effect: effect.spread or 0.0)
        by = f", by a factor of {number(widest.spread)} from its best to its worst value" if widest.spread else ""
        said = (
            f"{len(above)} of {some(len(found), 'knob')} {'has' if len(above) == 1 else 'have'} an effect on "
            f"{subject.label} larger than the noise between trials; the largest is that of {widest.knob}{by}."
        )
    order = subject.by_weight()
    chosen = sorted(found, key=lambda effect: (effect.verdict != ABOVE, order.index(effect.knob)))[:MOST]
    figure = files.chart(
        "effects",
        lambda: _drawn(subject.found, chosen, subject.stars),
        "mean objective and standard error for every value of the knobs",
        "Mean over all trials with a value, whatever their other knobs, ± its standard error; in brackets how many "
        "trials. Pale: within the noise; hollow: fewer than three trials. Squares: the values of the ",
        el("span", "baseline", class_="baseline"),
        " and of the ",
        el("span", subject.stars.winner_is, class_="winner"),
        ".",
    )
    rest = {"Within the noise": WITHIN, "Too few trials to tell": TOO_FEW}
    named = {words: [effect.knob for effect in found if effect.verdict == kind] for words, kind in rest.items()}
    return join(
        lead(said),
        figure,
        *(el("p", f"{words}: {', '.join(names)}.") for words, names in named.items() if names),
        note(HOW),
        folded(f"All of it in numbers: {some(len(found), 'knob')}", _table(subject)),
    )


def _table(subject: Subject) -> Html:
    rows, marks = list[list[object]](), list[str]()
    for effect in subject.effects:
        for place, level in enumerate(effect.levels):
            mean, speed = level.objective, [] if subject.by_rate else [rounded(level.rate.mean) if level.rate else ""]
            value = [number(mean.mean), between(mean)] if mean is not None else ["", ""]
            knob, verdict = (effect.knob, effect.verdict) if place == 0 else ("", "")
            rows.append([knob, level.label, len(level.members), level.failed or "", *value, *speed, verdict])
            marks.append("" if effect.verdict == ABOVE else "rest")
    rate = [] if subject.by_rate else ["images/s"]
    header = ["knob", "value", "trials", "failed", subject.label, "± its error", *rate, "verdict"]
    return table(header, rows, marks, words=2)


def _drawn(found: Results, chosen: Sequence[Effect], stars: Stars) -> Figure:
    """Mean and standard error of the objective, and of images/s, for every value of some knobs."""
    figure, panels = sheet(1 if found.by_rate else 2, 0.7 + 0.215 * sum(1 + len(e.levels) for e in chosen), sharey=True)
    at, ticks, names = 0.0, list[float](), list[str]()
    inside = {"xycoords": ("axes fraction", "data")}
    for effect in chosen:
        pale = effect.verdict != ABOVE
        say(panels[0], cut(effect.knob, 44), (0, at), (-6, 0), ha="right", fontsize=9, fontweight="bold", color=INK,
            annotation_clip=False, **inside)  # fmt: skip
        say(panels[0], effect.verdict, (0, at), (6, 0), fontsize=8, color=SOFT, style="italic", **inside)
        for axes in panels:
            axes.axhline(at - 0.62, color=RULE, linewidth=0.8)
        for level in effect.levels:
            at += 1
            for axes, mean in zip(panels, (level.objective, level.rate), strict=False):
                if mean is None:
                    continue
                color = GREY if pale and axes is panels[0] else "#55534c"
                if mean.low is not None and mean.high is not None:
                    axes.plot([mean.low, mean.high], [at, at], color=color, linewidth=1.6, solid_capstyle="butt")
                axes.plot([mean.mean], [at], "o", markersize=5, color=color, markeredgewidth=1.2,
                          markerfacecolor="white" if mean.runs < 3 else color)  # fmt: skip
            for trial, color, _ in stars.pairs():
                if trial.name in level.members:
                    shift = -13.0 if color == WINNER else -4.0
                    say(panels[0], "■", (1, at), (shift, 0), ha="center", fontsize=8, color=color, **inside)
            ticks.append(at)
            names.append(f"{cut(level.label, 30)}  ({len(level.members)})")
        at += 1.25
    panels[0].set_yticks(ticks, names)
    panels[0].set_ylim(at - 0.3, -0.8)
    means = [level.objective.mean for effect in chosen for level in effect.levels if level.objective is not None]
    objective_axis(panels[0], found, all(mean > 0 for mean in means), axis="x")
    if not found.by_rate:
        panels[1].set_xlabel("images/s, higher is better")
        panels[1].set_xlim(left=0)
        plain_numbers(panels[1])
    for axes in panels:
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x")
        axes.grid(False, axis="y")
        axes.margins(x=0.08)
    return figure
