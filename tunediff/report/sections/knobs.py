"""Show the importance of the knobs for quality and throughput, and every trial by its knobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from tunediff.analysis import shown
from tunediff.analysis.importance import ENOUGH, Importance, is_range, searched
from tunediff.core import colors
from tunediff.core.text import pluralize
from tunediff.core.trial_record import TrialRecord
from tunediff.report import style
from tunediff.report.context import ReportContext
from tunediff.report.figures import Figures
from tunediff.report.html import Html, join, lead, note
from tunediff.report.words import percent, short
from tunediff.search_space.dimension import as_param

# ---- importance
MOST_SHARES = 15
"""Maximum number of knobs in the figure."""


def importance(context: ReportContext, figures: Figures) -> Html | None:
    """Return the section with the importance of the knobs.

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
        " does.",
    )
    unvaried = next(iter(targets.values()))[1].unvaried
    return join(
        lead(" ".join(_top(label, scores) for label, scores in targets.values())),
        figure,
        note(f"One value in all trials: {', '.join(unvaried)}.") if unvaried else None,
    )


def _top(label: str, scores: Importance) -> str:
    shares = {name: share for name, share in scores.shares.items() if share >= 0.05}
    if not shares:
        return f"No knob by itself explains much of the differences in {label}."
    top = [f"{name} ({percent(share)})" for name, share in shares.items()][:3]
    trials = pluralize(scores.trials, "trial")
    return f"Differences in {label} between {trials} come most from {', '.join(top)}."


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
        axes.barh(range(len(names)), lengths, 0.62, color=colors.PLAIN)
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


# ---- each trial by its knobs
MOST_PANELS, COLUMNS = 8, 2
"""Maximum number of knobs in the figure, and of panels side by side."""


def effects(context: ReportContext, figures: Figures) -> Html | None:
    """Return the section with a dot for every trial at its value of each knob that varies.

    None for a ladder, whose own table shows the effects, and with few results.
    """
    results = context.results
    stable = [outcome for outcome in results.outcomes if not outcome.failures]
    trials = [run for outcome in stable for run in outcome.samples if run in outcome.done]
    if len(trials) < ENOUGH or results.space.kind == "ladder":
        return None
    drawn = {
        name: {as_param(run.drawn[name]) for run in trials if name in run.drawn}
        for name in context.by_weight()
    }
    names = [name for name, values in drawn.items() if len(values) > 1]
    if not names:
        return None
    chart = figures.chart(
        "effects",
        lambda: _scatter(context, trials, names[:MOST_PANELS]),
        "the objective of every trial over its value of each knob",
        "A dot is a trial that ended with a value, whatever its other knobs; the knobs that matter"
        " most come first.",
    )
    more = names[MOST_PANELS:]
    return join(chart, note(f"Not shown: {', '.join(more)}.") if more else None)


def _scatter(context: ReportContext, trials: Sequence[TrialRecord], names: Sequence[str]) -> Figure:
    """Draw a panel for each knob."""
    results, marks = context.results, context.highlights.pairs()
    ends = {run.name: run.value(results.metric) or 0.0 for run in trials}
    rows = -(-len(names) // COLUMNS)
    figure = Figure(figsize=(style.WIDTH_IN, 0.3 + 2.1 * rows), layout="constrained")
    panels = list(figure.subplots(rows, COLUMNS, squeeze=False, sharey=True).flat)
    dimensions = {dimension.name: dimension for dimension in searched(results)}
    for axes, name in zip(panels, names, strict=False):
        values = {run.name: run.drawn[name] for run in trials if name in run.drawn}
        places: dict[str, float]
        if is_range(dimensions[name], list(values.values())):
            places = values
            axes.set_xscale("log" if dimensions[name].log else "linear")
            axes.xaxis.set_major_formatter(style.tick_formatter())
        else:
            listed = [*(dimensions[name].choices or ()), *values.values()]
            met = set(map(as_param, values.values()))
            choices = [value for value in dict.fromkeys(map(as_param, listed)) if value in met]
            places = {run: choices.index(as_param(value)) for run, value in values.items()}
            axes.set_xticks(range(len(choices)), [short(shown(value), 14) for value in choices])
            axes.margins(x=0.2)
        heights = [ends[run] for run in places]
        axes.plot(list(places.values()), heights, "o", color=colors.PLAIN, markersize=4)
        for trial, color, role in marks:
            if trial.name in places:
                at = [places[trial.name]], [ends[trial.name]]
                axes.plot(*at, "o", color=color, markersize=6, label=role)
        if axes.get_xscale() == "log":
            style.plain_logarithms(axes.xaxis)
        axes.set_title(short(name, 40))
        style.objective_axis(axes, results, all(value > 0 for value in ends.values()))
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    style.legend(figure)
    return figure
