"""Which knobs matter, of quality and of throughput; and what the values of each reached, with the noise of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from tunediff.analysis import Results
from tunediff.analysis.effects import ABOVE, TOO_FEW, WITHIN, Effect, effects_table
from tunediff.analysis.importance import ENOUGH, FAIR, Importance, searched
from tunediff.core import colors
from tunediff.core.colors import WINNER
from tunediff.core.text import number, pluralize
from tunediff.report import style
from tunediff.report.context import ReportContext, lead, note
from tunediff.report.files import Files
from tunediff.report.html import Html, el, folded, join, table
from tunediff.report.style import (
    GREY,
    INK,
    RULE,
    SOFT,
    Highlights,
    in_first_column,
    letters,
    objective_axis,
    plain_numbers,
    say,
    sheet,
)
from tunediff.report.words import between, percent, rounded, short

# ----------------------------------------------------------------------------------------------------------- importance
MOST_SHARES = 15
"""Knobs in the figure."""


def importance(subject: ReportContext, files: Files) -> Html | None:
    """Shares of the knobs, with how far they can be trusted; a ladder's knobs change together and have none."""
    if not searched(subject.found) or not subject.found.ranked or subject.found.space.kind == "ladder":
        return None
    both = {"quality": (subject.label, subject.quality), "throughput": (f"{subject.unit}/s", subject.throughput)}
    known = {what: (label, one) for what, (label, one) in both.items() if one is not None}
    logs = all(one.logs for _, one in known.values())
    if not known:
        trials = len(subject.found.ranked)
        return lead(
            f"Shares of the knobs are given from {ENOUGH} trials with a result on, if a knob varies; "
            f"there {'is' if trials == 1 else 'are'} {trials}."
        )
    verdicts = {effect.knob: effect.verdict for effect in subject.effects}
    names = list(dict.fromkeys(name for _, one in known.values() for name in one.shares))
    shares = {f"{what}_share": [one.shares.get(name) for name in names] for what, (_, one) in known.items()}
    said = [verdicts.get(name, "") for name in names]
    files.csv("importance", pd.DataFrame({"knob": names, **shares, "effect_on_objective": said}))
    figure = files.chart(
        "importance",
        lambda: _shares({f"{what}: {label}": one for what, (label, one) in known.items()}),
        "share of every knob in the variance of quality and of throughput",
        f"fANOVA: the part of the variance{' of the logarithm' * logs} that a random forest over all trials puts down "
        "to a knob alone; what is missing to 100 % belongs to combinations of knobs. A knob that does not always apply "
        "has its share where it does. Hollow bars: not to be trusted.",
    )
    unvaried = next(iter(known.values()))[1].unvaried
    return join(
        lead(" ".join(_leading(label, one) for label, one in known.values())),
        figure,
        el("ul", *(el("li", _reliability(label, one)) for label, one in known.values())),
        note(f"One value in all trials: {', '.join(unvaried)}.") if unvaried else None,
    )


def _leading(label: str, one: Importance) -> str:
    if one.doubtful:
        return f"What decides {label} can hardly be told from {pluralize(one.trials, 'trial')}."
    top = [f"{name} ({percent(share)})" for name, share in one.shares.items() if share >= 0.05][:3]
    if not top:
        return f"No knob by itself explains much of the differences in {label}."
    return f"Differences in {label} come most from {', '.join(top)}."


def _reliability(label: str, one: Importance) -> str:
    if one.fit is None:
        return f"{label}: from {pluralize(one.trials, 'trial')}; how far to trust the shares is not known."
    trust = "noise" if one.fit <= 0 else "rather a guess" if one.fit < FAIR else "fair" if one.fit < 0.7 else "good"
    return (
        f"{label}: the shares are {trust}. From {pluralize(one.trials, 'trial')} the forest predicts those that it has "
        f"not seen with R² = {one.fit:.2f} (1: exactly; 0 and less: not at all).".replace("= -", "= −")
    )


def _shares(columns: Mapping[str, Importance]) -> Figure:
    """One column of bars per target; the knobs in the order of the first one."""
    highest: dict[str, float] = {}
    for one in columns.values():
        highest |= {name: max(share, highest.get(name, 0.0)) for name, share in one.shares.items()}
    names = [name for name in highest if name in sorted(highest, key=lambda name: -highest[name])[:MOST_SHARES]]
    figure, panels = sheet(len(columns), 0.85 + 0.26 * len(names), sharey=True)
    for axes, (title, one) in zip(panels, columns.items(), strict=True):
        lengths = [100 * one.shares.get(name, 0.0) for name in names]
        axes.barh(range(len(names)), lengths, height=0.62, color="none" if one.doubtful else colors.PLAIN,
                  edgecolor=colors.PLAIN, linewidth=1.0)  # fmt: skip
        for place, (name, length) in enumerate(zip(names, lengths, strict=True)):
            say(axes, f"{length:.0f} %" if name in one.shares else "–", (length, place), (4, 0), fontsize=8)
        axes.set_title(short(title, 28))
        axes.set_xlim(0, max(10.0, 1.18 * max(lengths, default=0.0)))
        axes.set_xlabel("share of the variance (%)")
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0, labelcolor=INK)
    panels[0].set_yticks(range(len(names)), [short(name, letters(44)) for name in names])
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    return figure


# -------------------------------------------------------------------------------------------------------------- effects
MOST_EFFECTS, STRONG = 8, "#55534c"
"""Knobs in the figure: those that matter most."""
HOW = (
    "Means of what is compared by ratios are geometric. “Larger than the noise”: an analysis of variance, p < 0.05 "
    "after Holm's correction over all knobs. The noise holds what the other knobs do; and a search draws good "
    "values together, so that a part of an effect may belong to another knob."
)


def effects(subject: ReportContext, files: Files) -> Html | None:
    """All knobs with several values; a ladder changes its knobs together, what each does is in its own table."""
    found = subject.effects
    if not found or not subject.found.ranked or subject.found.space.kind == "ladder":
        return None
    files.csv("effects", effects_table(subject.found, found))
    above = [effect for effect in found if effect.verdict == ABOVE]
    said = f"No knob has an effect on {subject.label} that is larger than the noise between trials."
    if above:
        widest = max(above, key=lambda effect: effect.spread or 0.0)
        factor = "a factor of " if widest.ratios else ""
        by = f", by {factor}{number(widest.spread)} from its best to its worst value" if widest.spread else ""
        said = (
            f"{len(above)} of {pluralize(len(found), 'knob')} {'has' if len(above) == 1 else 'have'} an effect on "
            f"{subject.label} larger than the noise between trials; the largest is that of {widest.knob}{by}."
        )
    order = subject.by_weight()
    chosen = sorted(found, key=lambda effect: (effect.verdict != ABOVE, order.index(effect.knob)))[:MOST_EFFECTS]
    figure = files.chart(
        "effects",
        lambda: _levels(subject.found, chosen, subject.stars),
        "mean objective and standard error for every value of the knobs",
        "Mean over all trials with a value, whatever their other knobs, ± its standard error; in brackets how many "
        "trials.",
    )
    rest = {"Within the noise": WITHIN, "Too few trials to tell": TOO_FEW}
    named = {words: [effect.knob for effect in found if effect.verdict == kind] for words, kind in rest.items()}
    return join(
        lead(said),
        figure,
        *(el("p", f"{words}: {', '.join(names)}.") for words, names in named.items() if names),
        note(HOW),
        folded(f"All of it in numbers: {pluralize(len(found), 'knob')}", _in_numbers(subject)),
    )


def _in_numbers(subject: ReportContext) -> Html:
    rows, marks, rate = list[list[object]](), list[str](), [] if subject.found.by_rate else [f"{subject.unit}/s"]
    for effect in subject.effects:
        for place, level in enumerate(effect.levels):
            mean, speed = level.objective, [rounded(level.rate.mean) if level.rate else ""] if rate else []
            value = [number(mean.mean), between(mean)] if mean is not None else ["", ""]
            knob, verdict = (effect.knob, effect.verdict) if place == 0 else ("", "")
            rows.append([knob, level.label, len(level.members), level.failed or "", *value, *speed, verdict])
            marks.append("" if effect.verdict == ABOVE else "rest")
    header = ["knob", "value", "trials", "failed", subject.label, "± its error", *rate, "verdict"]
    return table(header, rows, marks, words=2)


def _levels(found: Results, chosen: Sequence[Effect], stars: Highlights) -> Figure:
    """Mean and standard error of the objective, and of throughput, for every value of some knobs."""
    figure, panels = sheet(1 if found.by_rate else 2, 0.7 + 0.215 * sum(1 + len(e.levels) for e in chosen), sharey=True)
    at, ticks, names = 0.0, list[float](), list[str]()
    inside = {"xycoords": ("axes fraction", "data")}
    for effect in chosen:
        pale = effect.verdict != ABOVE
        for axes in filter(in_first_column, panels):
            say(axes, short(effect.knob, letters(44)), (0, at), (-6, 0), ha="right", fontsize=9, fontweight="bold",
                color=INK, annotation_clip=False, **inside)  # fmt: skip
        say(panels[0], effect.verdict, (0, at), (6, 0), fontsize=8, color=SOFT, style="italic", **inside)
        for axes in panels:
            axes.axhline(at - 0.62, color=RULE, linewidth=0.8)
        for level in effect.levels:
            at += 1
            for axes, mean in zip(panels, (level.objective, level.rate), strict=False):
                if mean is None:
                    continue
                color = colors.PLAIN if axes is not panels[0] else GREY if pale else STRONG  # rates are not tested
                if mean.low is not None and mean.high is not None:
                    axes.plot([mean.low, mean.high], [at, at], color=color, linewidth=1.6, solid_capstyle="butt")
                axes.plot([mean.mean], [at], "o", markersize=5, color=color, markeredgewidth=1.2,
                          markerfacecolor="white" if mean.runs < 3 else color)  # fmt: skip
            for trial, color, _ in stars.pairs():  # beside the panel, where nothing is measured
                if trial.name in level.members:
                    shift = 6.0 if color == WINNER else 14.0
                    say(panels[0], "■", (1, at), (shift, 0), ha="center", fontsize=8, color=color,
                        annotation_clip=False, **inside)  # fmt: skip
            ticks.append(at)
            names.append(f"{short(level.label, letters(40))}  ({len(level.members)})")
        at += 1.25
    panels[0].set_yticks(ticks, names)
    panels[0].set_ylim(at - 0.3, -0.8)
    means = [level.objective.mean for effect in chosen for level in effect.levels if level.objective is not None]
    objective_axis(panels[0], found, all(mean > 0 for mean in means), axis="x")
    if not found.by_rate:
        panels[1].set_xlabel(f"{found.unit}/s, higher is better")
        panels[1].set_xlim(left=0)
        plain_numbers(panels[1])
    for axes in panels:
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x")
        axes.grid(False, axis="y")
        axes.margins(x=0.08)
    dot: dict[str, Any] = {"marker": "o", "markersize": 5, "linewidth": 1.6}
    style.legend(figure, {
        "larger than the noise": style.key(STRONG, **dot),
        "within it, or too few trials": style.key(GREY, **dot),
        **({} if found.by_rate else {f"{found.unit}/s, not tested": style.key(colors.PLAIN, **dot)}),
        "fewer than three trials": style.key(SOFT, markerfacecolor="white", **dot),
        **{f"value of the {what}": style.key(color, marker="s", linestyle="none", markersize=5)
           for _, color, what in stars.shown()},
    })  # fmt: skip
    return figure
