"""Draw the objective against the budget, of all trials.

The figure of the verdict's runs belongs to the result; the sections show the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from tunediff.analysis import Results, curve
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.statistics import mean
from tunediff.core import colors
from tunediff.core.colors import BASELINE, WINNER
from tunediff.core.outcomes import Status
from tunediff.core.text import number, pluralize
from tunediff.core.trial_record import TrialRecord
from tunediff.report import style
from tunediff.report.context import Highlights, ReportContext
from tunediff.report.figures import Figures
from tunediff.report.html import Html, join, lead
from tunediff.report.sections import seeds
from tunediff.report.words import secs

Line = Sequence[tuple[float, float]]
DOTTED = (0, (1.2, 1.6))
REPEATS = "baseline on other seeds"
KINDS: dict[str, tuple[str, Any]] = {
    REPEATS: (BASELINE, "solid"),
    "other trials": (colors.OTHER, "solid"),
    "under way": (colors.OTHER, DOTTED),
    "stopped early": (colors.PRUNED, style.DASHED),
    "failed": (colors.FAILED, DOTTED),
}
"""Colour and line style of the trials that are neither baseline nor best, by how they ended."""


def curves(context: ReportContext, figures: Figures) -> Html | None:
    """Return the section with the curves of all trials; None without any curve."""
    results = context.results
    if not _has_curves(results):
        return None
    if _compared(context) is None:  # they are the figure of the result
        return None
    return join(lead(_ends(context)), _all_trials(context, figures))


def of_verdict(context: ReportContext, figures: Figures) -> Html | None:
    """Return the figure of the runs that the verdict rests on; None without curves."""
    results = context.results
    if (compared := _compared(context)) is not None:
        name = "comparison" if context.evidence.confirmation is None else "confirmed"
        return seeds.means_figure(compared, seeds.best_of(context, compared), figures, name)
    if not _has_curves(results):
        return None
    return _all_trials(context, figures, _ends(context))


def _has_curves(results: Results) -> bool:
    name = results.curve_quantity.name
    return any(len(curve(trial, name)) > 1 for trial in results.trials)


def _compared(context: ReportContext) -> Comparison | None:
    """Return the comparison over several seeds whose curves show the verdict; None without one."""
    confirmation = context.evidence.confirmation
    compared = context.evidence.compared if confirmation is None else confirmation
    return compared if compared is not None and seeds.has_curves(compared) else None


def _all_trials(context: ReportContext, figures: Figures, caption: str = "") -> Html | None:
    return figures.chart(
        "curves",
        lambda: of_trials(context.results, context.highlights),
        f"{context.results.curve_quantity.title} against {context.results.clock.seconds}, all"
        " trials",
        caption,
    )


def _ends(context: ReportContext) -> str:
    """Return how many trials end better than the baseline."""
    results, base = context.results, context.highlights.baseline
    base_values = results.outcome_of(base).values if base is not None else []
    end = mean(base_values)
    others = [outcome for outcome in results.ranked if base is None or base not in outcome.runs]
    better = sum(
        results.loss(outcome.value or 0.0) < results.loss(end)
        for outcome in others
        if end is not None and not outcome.failures
    )
    if end is None or not others or context.evidence.compared is not None:
        count = pluralize(len(results.ranked), "configuration has", "configurations have")
        return f"{count} a result."
    mean_of = f" (mean of its {len(base_values)} runs)" * (len(base_values) > 1)
    ended = f"ended {'below' if results.lower_is_better else 'above'}"
    if results.by_time:
        ended = "met the target sooner than"
    which = f"{better:,} of {pluralize(len(others), 'other trial')} with a result"
    return f"{which} {ended} the baseline{mean_of}."


def of_trials(results: Results, highlights: Highlights) -> Figure:
    """Draw all trials' curves and mark where the best is as good as the baseline's end."""
    name = results.curve_quantity.name
    lines = {trial.name: curve(trial, name) for trial in results.trials}
    figure, (axes,) = style.sheet(1, seeds.HEIGHT_IN)
    _background(axes, results, lines, highlights)
    pairs = [
        (lines[trial.name], color, role)
        for trial, color, role in highlights.shown()
        if lines.get(trial.name)
    ]
    for line, color, _ in pairs:
        look: dict[str, Any] = {"marker": "o", "markersize": 4.5, "linewidth": 2.2, "zorder": 4}
        axes.plot(*zip(*line, strict=True), color=color, **look)
    if (target := results.target) is not None:
        axes.axhline(
            target.value, color=style.GREY, linestyle=style.DASHED, label=f"target {target}"
        )
    positive = all(y > 0 for line in lines.values() for _, y in line)
    style.objective_axis(axes, results, positive, of_curves=True)
    ends = [(line[-1], color, f"{role} {number(line[-1][1])}") for line, color, role in pairs]
    style.label_line_ends(axes, ends)
    if len(pairs) == 2:
        _crossing(axes, results, pairs[0][0][-1], highlights)
    axes.set_xlabel(results.clock.seconds)
    axes.set_xlim(left=0)
    style.plain_numbers(axes)
    style.legend(figure)
    return figure


def _crossing(
    axes: Axes, results: Results, end: tuple[float, float], highlights: Highlights
) -> None:
    """Mark where the best trial's curve crosses the baseline's final value, `end`."""
    if highlights.winner is None or (seconds := highlights.reached_s) is None:
        return
    end_s, level = end
    look: dict[str, Any] = {"color": BASELINE, "linewidth": 1.0, "linestyle": style.DASHED}
    axes.plot([seconds, end_s], [level, level], label="baseline at its end", **look)
    when = f"as good after {secs(seconds)}"
    found = results.speedup(highlights.winner)
    if found is not None and found.at_first:  # it may have been that good before
        when = f"as good before {secs(seconds)}"
    else:
        style.ring(axes, (seconds, level), WINNER, 7, f"{highlights.winner_is}: as good as that")
    # Falling curves leave space to the lower left, rising ones to the upper left.
    shift, side = ((-7, -6), "top") if results.lower_is_better else ((-7, 6), "bottom")
    style.annotate(axes, when, (seconds, level), shift, ha="right", va=side, color=WINNER)


def _kind(results: Results, trial: TrialRecord) -> str:
    repeats = trial is not results.outcome_of(trial).trial and results.space.seeds == 1
    if trial.status == Status.OK and repeats and not results.changed(trial):
        return REPEATS
    kinds = {None: "under way", Status.OK: "other trials", Status.PRUNED: "stopped early"}
    return kinds.get(trial.status, "failed")


def _background(
    axes: Axes, results: Results, lines: Mapping[str, Line], highlights: Highlights
) -> None:
    """Draw all trials except baseline and best, by how they ended."""
    many = len(lines) > style.MANY
    alpha = 0.14 if len(lines) > 4 * style.MANY else 0.35 if many else 0.85
    by_kind: dict[str, list[Line]] = {kind: [] for kind in KINDS}
    for trial in results.trials:
        if lines[trial.name] and highlights.color(trial.name) is None:
            by_kind[_kind(results, trial)].append(lines[trial.name])
    for kind, (color, dashes) in KINDS.items():
        if not (drawn := by_kind[kind]):
            continue
        collection = LineCollection(
            drawn,
            colors=color,
            linewidths=0.7 if many else 1.1,
            alpha=alpha,
            linestyles=[dashes],
            rasterized=many,
            zorder=1,
        )
        axes.add_collection(collection, autolim=False)
        # A line through one point is invisible.
        marker, ends = "x" if kind == "failed" else "o", [line[-1] for line in drawn]
        look: dict[str, Any] = {"color": color, "markersize": 3.5, "zorder": 2}
        axes.plot(*zip(*ends, strict=True), marker, label=kind, rasterized=many, **look)
    # Values of failed trials may be extreme, so that the other trials define the axes' limits.
    usable = [trial for trial in results.trials if trial.status in (Status.OK, Status.PRUNED, None)]
    inside = [point for trial in usable for point in lines[trial.name]]
    if inside := inside or [point for line in lines.values() for point in line]:
        axes.update_datalim(inside)
        axes.autoscale_view()
