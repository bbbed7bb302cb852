"""Show the importance of the knobs for quality and throughput, and the effect of each knob."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tunediff.analysis import Results
from tunediff.analysis.effects import ABOVE, TOO_FEW, WITHIN, Effect, Level
from tunediff.analysis.importance import ENOUGH, FAIR, Importance, searched
from tunediff.core import colors
from tunediff.core.colors import WINNER
from tunediff.core.text import number, pluralize
from tunediff.report import style
from tunediff.report.context import Highlights, ReportContext
from tunediff.report.figures import Figures
from tunediff.report.html import Html, el, folded, join, lead, note, table
from tunediff.report.words import between, percent, rounded, short

# ---- importance
MOST_SHARES = 15
"""Maximum number of knobs in the figure."""


def importance(context: ReportContext, figures: Figures) -> Html | None:
    """Return the section with the importance of the knobs and its reliability.

    None for a ladder, whose knobs change together, and without searched knobs or results.
    """
    results = context.results
    if not searched(results) or not results.ranked or results.space.kind == "ladder":
        return None
    both = {
        "quality": (context.label, context.quality),
        "throughput": (f"{context.unit}/s", context.throughput),
    }
    targets = {
        target: (label, scores) for target, (label, scores) in both.items() if scores is not None
    }
    if not targets:
        trials = len(results.ranked)
        return lead(
            f"Knob importance needs at least {ENOUGH} trials with a result and a knob that varies;"
            f" there {'is' if trials == 1 else 'are'} {trials}."
        )
    logs = all(scores.logs for _, scores in targets.values())
    titled = {f"{target}: {label}": scores for target, (label, scores) in targets.items()}
    figure = figures.chart(
        "importance",
        lambda: _shares(titled),
        "share of every knob in the variance of quality and of throughput",
        f"fANOVA: the part of the variance{' of the logarithm' * logs} that a random forest over"
        " all trials attributes to a knob alone; the rest to 100 % belongs to combinations of"
        " knobs. For a knob that does not always apply, the share is that in the trials where it"
        " does. Hollow bars: unreliable.",
    )
    unvaried = next(iter(targets.values()))[1].unvaried
    return join(
        lead(" ".join(_top(label, scores) for label, scores in targets.values())),
        figure,
        el("ul", *(el("li", _reliability(label, scores)) for label, scores in targets.values())),
        note(f"One value in all trials: {', '.join(unvaried)}.") if unvaried else None,
    )


def _top(label: str, scores: Importance) -> str:
    if scores.doubtful:
        trials = pluralize(scores.trials, "trial")
        return f"The importance of the knobs for {label} is unreliable: {trials} show little."
    shares = {name: share for name, share in scores.shares.items() if share >= 0.05}
    if not shares:
        return f"No knob by itself explains much of the differences in {label}."
    top = [f"{name} ({percent(share)})" for name, share in shares.items()][:3]
    return f"Differences in {label} come most from {', '.join(top)}."


def _reliability(label: str, scores: Importance) -> str:
    trials = pluralize(scores.trials, "trial")
    if scores.fit is None:
        return f"{label}: from {trials}; the reliability of the shares is unknown."
    trust = "good" if scores.fit >= 0.7 else "fair" if scores.fit >= FAIR else "rather a guess"
    trust = "noise" if scores.fit <= 0 else trust
    fit = f"{scores.fit:.2f}".replace("-", "−")
    return (
        f"{label}: the shares are {trust}. From {trials} the forest predicts held-out ones with"
        f" R² = {fit} (1: exactly; 0 and less: not at all)."
    )


def _shares(columns: Mapping[str, Importance]) -> Figure:
    """Draw one panel of bars per target; the knobs are in the order of the first target."""
    highest: dict[str, float] = {}
    for scores in columns.values():
        for name, share in scores.shares.items():
            highest[name] = max(share, highest.get(name, 0.0))
    top = sorted(highest, key=lambda name: -highest[name])[:MOST_SHARES]
    names = [name for name in highest if name in top]
    figure, panels = style.sheet(len(columns), 0.85 + 0.26 * len(names), sharey=True)
    for axes, (title, scores) in zip(panels, columns.items(), strict=True):
        lengths = [100 * scores.shares.get(name, 0.0) for name in names]
        fill = "none" if scores.doubtful else colors.PLAIN
        axes.barh(range(len(names)), lengths, 0.62, color=fill, edgecolor=colors.PLAIN, linewidth=1)
        for row, (name, length) in enumerate(zip(names, lengths, strict=True)):
            words = f"{length:.0f} %" if name in scores.shares else "–"
            style.annotate(axes, words, (length, row), (4, 0), fontsize=8)
        axes.set_title(short(title, 28))
        axes.set_xlim(0, max(10.0, 1.18 * max(lengths, default=0.0)))
        axes.set_xlabel("share of the variance (%)")
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0, labelcolor=style.INK)
    panels[0].set_yticks(range(len(names)), [short(name, 44) for name in names])
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    return figure


# ---- effects
MOST_EFFECTS, STRONG = 8, "#55534c"
"""Maximum number of knobs in the figure, and the colour of effects larger than the noise."""
METHOD = (
    "Means of what is compared by ratios are geometric. “Larger than the noise”: an analysis of"
    " variance, p < 0.05 after Holm's correction over all knobs. The noise includes the effects of"
    " the other knobs. Where values of several knobs came together more often than others, part of"
    " an effect may belong to another knob."
)


def effects(context: ReportContext, figures: Figures) -> Html | None:
    """Return the section with the effect of every knob that has several values.

    None for a ladder, whose own table shows the effects, and without effects or results.
    """
    results, all_effects = context.results, context.effects
    if not all_effects or not results.ranked or results.space.kind == "ladder":
        return None
    # The figure shows significant effects first, then the most important knobs.
    order = context.by_weight()
    by_weight = sorted(
        all_effects, key=lambda effect: (effect.verdict != ABOVE, order.index(effect.knob))
    )
    figure = None
    if any(effect.verdict != TOO_FEW for effect in all_effects):
        figure = figures.chart(
            "effects",
            lambda: _levels(results, by_weight[:MOST_EFFECTS], context.highlights),
            "mean objective and standard error for every value of the knobs",
            "Mean over all trials with a value, whatever their other knobs, ± its standard error;"
            " in brackets how many trials.",
        )
    parts: list[object] = [lead(_largest(context.label, all_effects)), figure]
    for words, verdict in (("Within the noise", WITHIN), ("Too few trials to tell", TOO_FEW)):
        if names := [effect.knob for effect in all_effects if effect.verdict == verdict]:
            parts.append(el("p", f"{words}: {', '.join(names)}."))
    title = f"All effects in numbers: {pluralize(len(all_effects), 'knob')}"
    return join(*parts, note(METHOD), folded(title, _in_numbers(context)))


def _largest(label: str, all_effects: Sequence[Effect]) -> str:
    above = [effect for effect in all_effects if effect.verdict == ABOVE]
    if not above:
        if all(effect.verdict == TOO_FEW for effect in all_effects):
            return f"Too few trials to tell whether a knob has an effect on {label}."
        return f"No knob has an effect on {label} that is larger than the noise between trials."
    widest, by = max(above, key=lambda effect: effect.spread or 0.0), ""
    if widest.spread:
        factor = "a factor of " if widest.ratios else ""
        by = f", by {factor}{number(widest.spread)} from its best to its worst value"
    count = f"{len(above)} of {pluralize(len(all_effects), 'knob')}"
    have = "has" if len(above) == 1 else "have"
    return (
        f"{count} {have} an effect on {label} larger than the noise between trials; the largest is"
        f" that of {widest.knob}{by}."
    )


def _in_numbers(context: ReportContext) -> Html:
    """Return a table with one row per value of every knob."""
    rates = [] if context.results.by_rate else [f"{context.unit}/s"]
    rows, marks = list[list[object]](), list[str]()
    for effect in context.effects:
        for i, level in enumerate(effect.levels):
            mean = level.objective
            value = [number(mean.mean), between(mean)] if mean is not None else ["", ""]
            rate = [rounded(level.rate.mean) if level.rate else ""] if rates else []
            knob, verdict = ("", "") if i else (effect.knob, effect.verdict)
            counts = [len(level.members), level.failed or ""]
            rows.append([knob, level.label, *counts, *value, *rate, verdict])
            marks.append("" if effect.verdict == ABOVE else "rest")
    header = ["knob", "value", "trials", "failed", context.label, "± its error", *rates, "verdict"]
    return table(header, rows, marks, words=2)


OUTSIDE: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "annotation_clip": False}
"""Arguments of `annotate` for text of a row that lies outside a panel."""


def _levels(results: Results, chosen: Sequence[Effect], highlights: Highlights) -> Figure:
    """Draw mean and standard error of objective and throughput for every value of these knobs."""
    rows = sum(1 + len(effect.levels) for effect in chosen)
    figure, panels = style.sheet(1 if results.by_rate else 2, 0.7 + 0.215 * rows, sharey=True)
    at, ticks, names = 0.0, list[float](), list[str]()
    # One block of rows per knob: its name and verdict, then one row per value.
    for effect in chosen:
        look: dict[str, Any] = {"ha": "right", "fontsize": 9, "fontweight": "bold"}
        look["color"] = style.INK
        for axes in filter(style.in_first_column, panels):
            name = short(effect.knob, 44)
            style.annotate(axes, name, (0, at), (-6, 0), **look, **OUTSIDE)
        look = {"fontsize": 8, "color": style.SOFT, "style": "italic"}
        style.annotate(panels[0], effect.verdict, (0, at), (6, 0), **look, **OUTSIDE)
        for axes in panels:
            axes.axhline(at - 0.62, color=style.RULE, linewidth=0.8)
        for level in effect.levels:
            at += 1
            _level(panels, level, at, style.GREY if effect.verdict != ABOVE else STRONG, highlights)
            ticks.append(at)
            names.append(f"{short(level.label, 40)}  ({len(level.members)})")
        at += 1.25
    # Axes and legend.
    panels[0].set_yticks(ticks, names)
    panels[0].set_ylim(at - 0.3, -0.8)
    means = (level.objective for effect in chosen for level in effect.levels)
    positive = all(mean.mean > 0 for mean in means if mean is not None)
    style.objective_axis(panels[0], results, positive, axis="x")
    if not results.by_rate:
        panels[1].set_xlabel(f"{results.unit}/s, higher is better")
        panels[1].set_xlim(left=0)
        style.plain_numbers(panels[1])
    for axes in panels:
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x")
        axes.grid(False, axis="y")
        axes.margins(x=0.08)
    _legend(figure, results, highlights)
    return figure


def _level(
    panels: Sequence[Axes], level: Level, at: float, color: str, highlights: Highlights
) -> None:
    """Draw the row of one value at height `at`: its means, and the marks of baseline and best."""
    for axes, mean in zip(panels, (level.objective, level.rate), strict=False):
        if mean is None:
            continue
        shade = color if axes is panels[0] else colors.PLAIN  # rates are not tested
        if mean.low is not None and mean.high is not None:
            ends = [mean.low, mean.high]
            axes.plot(ends, [at, at], color=shade, linewidth=1.6, solid_capstyle="butt")
        fill = "white" if mean.runs < 3 else shade
        look: dict[str, Any] = {"color": shade, "markeredgewidth": 1.2, "markerfacecolor": fill}
        axes.plot([mean.mean], [at], "o", markersize=5, **look)
    for trial, mark, _ in highlights.pairs():
        if trial.name in level.members:
            shift = 6.0 if mark == WINNER else 14.0
            look = {"ha": "center", "fontsize": 8, "color": mark}
            style.annotate(panels[0], "■", (1, at), (shift, 0), **look, **OUTSIDE)


def _legend(figure: Figure, results: Results, highlights: Highlights) -> None:
    dot: dict[str, Any] = {"marker": "o", "markersize": 5, "linewidth": 1.6}
    square: dict[str, Any] = {"marker": "s", "markersize": 5, "linestyle": "none"}
    handles = {
        "larger than the noise": Line2D([], [], color=STRONG, **dot),
        "within it, or too few trials": Line2D([], [], color=style.GREY, **dot),
    }
    if not results.by_rate:
        handles[f"{results.unit}/s, not tested"] = Line2D([], [], color=colors.PLAIN, **dot)
    few = Line2D([], [], color=style.SOFT, markerfacecolor="white", **dot)
    handles["fewer than three trials"] = few
    for _, color, role in highlights.shown():
        handles[f"value of the {role}"] = Line2D([], [], color=color, **square)
    style.legend(figure, handles)
