"""Show the importance of the knobs for quality and throughput, and the effect of each knob with its
noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tunediff.analysis import Results
from tunediff.analysis.effects import ABOVE, TOO_FEW, WITHIN, Effect, Level, effects_table
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
    annotate,
    in_first_column,
    max_characters,
    objective_axis,
    plain_numbers,
    sheet,
)
from tunediff.report.words import between, percent, rounded, short

# ---- importance
MOST_SHARES = 15
"""Maximum number of knobs in the figure."""


def importance(context: ReportContext, files: Files) -> Html | None:
    """Return the section with the importance of the knobs and its reliability.

    None for a ladder, whose knobs change together, and without searched knobs or results.
    """
    if (
        not searched(context.results)
        or not context.results.ranked
        or context.results.space.kind == "ladder"
    ):
        return None
    both = {
        "quality": (context.label, context.quality),
        "throughput": (f"{context.unit}/s", context.throughput),
    }
    available = {
        target: (label, scores) for target, (label, scores) in both.items() if scores is not None
    }
    # Only targets whose importance could be computed.
    logs = all(scores.logs for _, scores in available.values())
    if not available:
        trials = len(context.results.ranked)
        return lead(
            f"Knob importance needs at least {ENOUGH} trials with a result and a knob that varies; "
            f"there {'is' if trials == 1 else 'are'} {trials}."
        )
    verdicts = {effect.knob: effect.verdict for effect in context.effects}
    names = list(dict.fromkeys(name for _, scores in available.values() for name in scores.shares))
    shares = {
        f"{target}_share": [scores.shares.get(name) for name in names]
        for target, (_, scores) in available.items()
    }
    verdict_column = [verdicts.get(name, "") for name in names]
    files.csv(
        "importance", pd.DataFrame({"knob": names, **shares, "effect_on_objective": verdict_column})
    )
    figure = files.chart(
        "importance",
        lambda: _shares(
            {f"{target}: {label}": scores for target, (label, scores) in available.items()}
        ),
        "share of every knob in the variance of quality and of throughput",
        f"fANOVA: the part of the variance{' of the logarithm' * logs} that a random forest over"
        " all trials attributes to a knob alone; the rest to 100 % belongs to combinations of"
        " knobs. For a knob that does not always apply, the share is that in the trials where it"
        " does. Hollow bars: unreliable.",
    )
    unvaried = next(iter(available.values()))[1].unvaried
    return join(
        lead(" ".join(_leading(label, scores) for label, scores in available.values())),
        figure,
        el("ul", *(el("li", _reliability(label, scores)) for label, scores in available.values())),
        note(f"One value in all trials: {', '.join(unvaried)}.") if unvaried else None,
    )


def _leading(label: str, scores: Importance) -> str:
    if scores.doubtful:
        return (
            f"The importance of the knobs for {label} is unreliable:"
            f" {pluralize(scores.trials, 'trial')} show little."
        )
    top = [f"{name} ({percent(share)})" for name, share in scores.shares.items() if share >= 0.05][
        :3
    ]
    if not top:
        return f"No knob by itself explains much of the differences in {label}."
    return f"Differences in {label} come most from {', '.join(top)}."


def _reliability(label: str, scores: Importance) -> str:
    if scores.fit is None:
        return (
            f"{label}: from {pluralize(scores.trials, 'trial')}; the reliability of the shares is"
            " unknown."
        )
    trust = (
        "noise"
        if scores.fit <= 0
        else "rather a guess"
        if scores.fit < FAIR
        else "fair"
        if scores.fit < 0.7
        else "good"
    )
    return (
        f"{label}: the shares are {trust}. From {pluralize(scores.trials, 'trial')} the forest"
        f" predicts held-out ones with R² = {scores.fit:.2f} (1: exactly; 0 and less: not at all).".replace(
            "= -", "= −"
        )
    )


def _shares(columns: Mapping[str, Importance]) -> Figure:
    """Draw one panel of bars per target; the knobs are in the order of the first target."""
    highest: dict[str, float] = {}
    for scores in columns.values():
        highest |= {
            name: max(share, highest.get(name, 0.0)) for name, share in scores.shares.items()
        }
    names = [
        name
        for name in highest
        if name in sorted(highest, key=lambda name: -highest[name])[:MOST_SHARES]
    ]
    figure, panels = sheet(len(columns), 0.85 + 0.26 * len(names), sharey=True)
    for axes, (title, scores) in zip(panels, columns.items(), strict=True):
        lengths = [100 * scores.shares.get(name, 0.0) for name in names]
        axes.barh(range(len(names)), lengths, height=0.62, color="none" if scores.doubtful else colors.PLAIN,
                  edgecolor=colors.PLAIN, linewidth=1.0)  # fmt: skip
        for place, (name, length) in enumerate(zip(names, lengths, strict=True)):
            annotate(
                axes,
                f"{length:.0f} %" if name in scores.shares else "–",
                (length, place),
                (4, 0),
                fontsize=8,
            )
        axes.set_title(short(title, 28))
        axes.set_xlim(0, max(10.0, 1.18 * max(lengths, default=0.0)))
        axes.set_xlabel("share of the variance (%)")
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0, labelcolor=INK)
    panels[0].set_yticks(range(len(names)), [short(name, max_characters(44)) for name in names])
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    return figure


# ---- effects
MOST_EFFECTS, STRONG = 8, "#55534c"
"""Maximum number of knobs in the figure, and the colour of effects larger than the noise."""
HOW = (
    "Means of what is compared by ratios are geometric. “Larger than the noise”: an analysis of"
    " variance, p < 0.05 after Holm's correction over all knobs. The noise includes the effects of"
    " the other knobs. Where values of several knobs came together more often than others, part of"
    " an effect may belong to another knob."
)


def effects(context: ReportContext, files: Files) -> Html | None:
    """Return the section with the effect of every knob that has several values.

    None for a ladder, whose own table shows the effects, and without effects or results.
    """
    all_effects = context.effects
    if not all_effects or not context.results.ranked or context.results.space.kind == "ladder":
        return None
    files.csv("effects", effects_table(context.results, all_effects))
    above = [effect for effect in all_effects if effect.verdict == ABOVE]
    sentence = (
        f"No knob has an effect on {context.label} that is larger than the noise between trials."
    )
    if all(effect.verdict == TOO_FEW for effect in all_effects):
        sentence = f"Too few trials to tell whether a knob has an effect on {context.label}."
    if above:
        widest = max(above, key=lambda effect: effect.spread or 0.0)
        factor = "a factor of " if widest.ratios else ""
        by = (
            f", by {factor}{number(widest.spread)} from its best to its worst value"
            if widest.spread
            else ""
        )
        count = f"{len(above)} of {pluralize(len(all_effects), 'knob')}"
        count += " has" if len(above) == 1 else " have"
        sentence = f"{count} an effect on {context.label} larger than the noise between trials; "
        sentence += f"the largest is that of {widest.knob}{by}."
    # The figure shows significant effects first, then the most important knobs.
    order = context.by_weight()
    chosen = sorted(
        all_effects, key=lambda effect: (effect.verdict != ABOVE, order.index(effect.knob))
    )[:MOST_EFFECTS]
    figure = files.chart(
        "effects",
        lambda: _levels(context.results, chosen, context.highlights),
        "mean objective and standard error for every value of the knobs",
        "Mean over all trials with a value, whatever their other knobs, ± its standard error; in"
        " brackets how many trials.",
    )
    rest = {"Within the noise": WITHIN, "Too few trials to tell": TOO_FEW}
    named = {
        words: [effect.knob for effect in all_effects if effect.verdict == kind]
        for words, kind in rest.items()
    }
    return join(
        lead(sentence),
        figure,
        *(el("p", f"{words}: {', '.join(names)}.") for words, names in named.items() if names),
        note(HOW),
        folded(
            f"All effects in numbers: {pluralize(len(all_effects), 'knob')}", _in_numbers(context)
        ),
    )


def _in_numbers(context: ReportContext) -> Html:
    """Return a table with one row per value of every knob."""
    rows, marks, rate = (
        list[list[object]](),
        list[str](),
        [] if context.results.by_rate else [f"{context.unit}/s"],
    )
    for effect in context.effects:
        for place, level in enumerate(effect.levels):
            mean, speed = (
                level.objective,
                [rounded(level.rate.mean) if level.rate else ""] if rate else [],
            )
            value = [number(mean.mean), between(mean)] if mean is not None else ["", ""]
            knob, verdict = (effect.knob, effect.verdict) if place == 0 else ("", "")
            rows.append(
                [knob, level.label, len(level.members), level.failed or "", *value, *speed, verdict]
            )
            marks.append("" if effect.verdict == ABOVE else "rest")
    header = ["knob", "value", "trials", "failed", context.label, "± its error", *rate, "verdict"]
    return table(header, rows, marks, words=2)


def _levels(results: Results, chosen: Sequence[Effect], highlights: Highlights) -> Figure:
    """Draw mean and standard error of the objective and of throughput for every value of the chosen
    knobs."""
    figure, panels = sheet(
        1 if results.by_rate else 2,
        0.7 + 0.215 * sum(1 + len(e.levels) for e in chosen),
        sharey=True,
    )
    at, ticks, names = 0.0, list[float](), list[str]()
    # One block of rows per knob: its name and verdict, then one row per value.
    for effect in chosen:
        for axes in filter(in_first_column, panels):
            annotate(axes, short(effect.knob, max_characters(44)), (0, at), (-6, 0), ha="right", fontsize=9,
                     fontweight="bold", color=INK, annotation_clip=False, **BESIDE)  # fmt: skip
        annotate(
            panels[0],
            effect.verdict,
            (0, at),
            (6, 0),
            fontsize=8,
            color=SOFT,
            style="italic",
            **BESIDE,
        )
        for axes in panels:
            axes.axhline(at - 0.62, color=RULE, linewidth=0.8)
        for level in effect.levels:
            at += 1
            _level(panels, level, at, GREY if effect.verdict != ABOVE else STRONG, highlights)
            ticks.append(at)
            names.append(f"{short(level.label, max_characters(40))}  ({len(level.members)})")
        at += 1.25
    # Axes and legend.
    panels[0].set_yticks(ticks, names)
    panels[0].set_ylim(at - 0.3, -0.8)
    means = [
        level.objective.mean
        for effect in chosen
        for level in effect.levels
        if level.objective is not None
    ]
    objective_axis(panels[0], results, all(mean > 0 for mean in means), axis="x")
    if not results.by_rate:
        panels[1].set_xlabel(f"{results.unit}/s, higher is better")
        panels[1].set_xlim(left=0)
        plain_numbers(panels[1])
    for axes in panels:
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x")
        axes.grid(False, axis="y")
        axes.margins(x=0.08)
    _legend(figure, results, highlights)
    return figure


BESIDE: dict[str, Any] = {"xycoords": ("axes fraction", "data")}
"""Coordinates of text that lies outside a panel, beside a row."""


def _level(
    panels: Sequence[Axes], level: Level, at: float, color: str, highlights: Highlights
) -> None:
    """Draw the row of one value at height `at`: its means, in the objective's panel in this color,
    and its marks."""
    for axes, mean in zip(panels, (level.objective, level.rate), strict=False):
        if mean is None:
            continue
        shade = color if axes is panels[0] else colors.PLAIN  # rates are not tested
        if mean.low is not None and mean.high is not None:
            axes.plot(
                [mean.low, mean.high], [at, at], color=shade, linewidth=1.6, solid_capstyle="butt"
            )
        axes.plot([mean.mean], [at], "o", markersize=5, color=shade, markeredgewidth=1.2,
                  markerfacecolor="white" if mean.runs < 3 else shade)  # fmt: skip
    for trial, mark, _ in highlights.pairs():
        if trial.name in level.members:
            shift = 6.0 if mark == WINNER else 14.0
            annotate(panels[0], "■", (1, at), (shift, 0), ha="center", fontsize=8, color=mark,
                     annotation_clip=False, **BESIDE)  # fmt: skip


def _legend(figure: Figure, results: Results, highlights: Highlights) -> None:
    dot: dict[str, Any] = {"marker": "o", "markersize": 5, "linewidth": 1.6}
    style.legend(figure, {
        "larger than the noise": style.key(STRONG, **dot),
        "within it, or too few trials": style.key(GREY, **dot),
        **({} if results.by_rate else {f"{results.unit}/s, not tested": style.key(colors.PLAIN, **dot)}),
        "fewer than three trials": style.key(SOFT, markerfacecolor="white", **dot),
        **{f"value of the {role}": style.key(color, marker="s", linestyle="none", markersize=5)
           for _, color, role in highlights.shown()},
    })  # fmt: skip
