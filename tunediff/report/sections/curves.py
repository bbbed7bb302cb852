"""Draw the objective against training seconds: of all trials, and means of configurations with
several seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tunediff.analysis import Results, curve
from tunediff.analysis.comparison import Comparison, Group
from tunediff.analysis.outcome import without_seed
from tunediff.analysis.statistics import mean
from tunediff.core import colors
from tunediff.core.colors import BASELINE, WINNER
from tunediff.core.text import knob_value, number, pluralize
from tunediff.core.trial_record import TrialRecord
from tunediff.report import style
from tunediff.report.context import ReportContext, lead, marked, note
from tunediff.report.files import Files
from tunediff.report.headline import unfinished
from tunediff.report.html import Html, el, join, table
from tunediff.report.style import (
    Highlights,
    annotate,
    label_line_ends,
    objective_axis,
    plain_numbers,
    ring,
    sheet,
)
from tunediff.report.verdicts import comparison_table, conclusions
from tunediff.report.words import duration, secs, short
from tunediff.search_space.model import as_param

# ---- trials
Line = Sequence[tuple[float, float]]
DOTTED = (0, (1.2, 1.6))
AGAIN = "baseline on other seeds"
KINDS: dict[str, tuple[str, Any]] = {
    AGAIN: (BASELINE, "solid"),
    "other trials": (colors.OTHER, "solid"),
    "under way": (colors.OTHER, DOTTED),
    "stopped early": (colors.PRUNED, style.DASHED),
    "failed": (colors.FAILED, DOTTED),
}
"""Colour and line style of the trials that are neither baseline nor best, by how they ended."""


def curves(context: ReportContext, files: Files) -> Html | None:
    """Return the section with the curves of all trials, baseline and winner on top; None without
    any curve."""
    results, base = context.results, context.highlights.baseline
    if any(trial.points for trial in results.trials):
        frame = results.curves()
        wide = [
            name
            for name in frame.columns
            if any(isinstance(value, list | dict) for value in frame[name])
        ]
        files.csv("curves", frame.drop(columns=wide))
    if not any(len(curve(trial, results.metric)) > 1 for trial in results.trials):
        return None
    figure = files.chart(
        "curves",
        lambda: of_trials(results, context.highlights),
        f"{context.label} against {results.clock.seconds}, all trials",
    )
    # The sentence: how many trials are better than the baseline at their ends.
    ranked = results.ranked
    of_base = results.outcome_of(base).values if base is not None else []
    end = mean(of_base)
    others = [outcome for outcome in ranked if base is None or base not in outcome.runs]
    if context.evidence.compared is not None:
        runs = sum(len(outcome.done) for outcome in ranked)
        sentence = f"{pluralize(runs, 'run has', 'runs have')} a result; their means are above."
    elif end is None:
        count = pluralize(len(ranked), "trial has", "trials have")
        sentence = f"{count} a result; the baseline has none to compare them with."
    elif not others:
        so_far = "" if context.over else " so far"
        sentence = f"Only the baseline has a result{so_far}. {unfinished(results)}".rstrip()
    else:
        ends = [
            value
            for outcome in others
            if not outcome.failures and (value := outcome.value) is not None
        ]
        better = sum(results.loss(value) < results.loss(end) for value in ends)
        side = "below" if results.falls else "above"
        sentence = f"{better:,} of {pluralize(len(others), 'other trial')} with a result "
        sentence += f"{'ends' if better == 1 else 'end'} {side} the baseline"
        sentence += f" (mean of its {len(of_base)} runs)." if len(of_base) > 1 else "."
    return join(lead(sentence), figure)


def of_trials(results: Results, highlights: Highlights) -> Figure:
    """Draw the curves of all trials and mark where the winner is as good as the baseline at its
    end."""
    lines = {trial.name: curve(trial, results.metric) for trial in results.trials}
    figure, (axes,) = sheet(1, 4.7)
    _background(axes, results, lines, highlights)
    pairs = [
        (lines[trial.name], color, role)
        for trial, color, role in highlights.shown()
        if lines.get(trial.name)
    ]
    for line, color, _ in pairs:
        axes.plot(
            *zip(*line, strict=True),
            color=color,
            linewidth=2.2,
            marker="o",
            markersize=4.5,
            zorder=4,
        )
    objective_axis(axes, results, all(y > 0 for line in lines.values() for _, y in line))
    label_line_ends(
        axes, [(line[-1], color, f"{role} {number(line[-1][1])}") for line, color, role in pairs]
    )
    if len(pairs) == 2 and highlights.winner is not None:
        _crossing(axes, results, pairs[0][0], pairs[1], highlights)
    axes.set_xlabel(results.clock.seconds)
    axes.set_xlim(left=0)
    plain_numbers(axes)
    style.legend(figure)
    return figure


def _crossing(
    axes: Axes, results: Results, base: Line, of: tuple[Line, str, str], highlights: Highlights
) -> None:
    """Mark where the winner's curve crosses the baseline's final value.

    If it is that good at its first evaluation already, the label says `before`.
    """
    if highlights.winner is None or (seconds := highlights.reached_s) is None:
        return
    (_, color, role), (end_s, level), first = of, base[-1], results.at_first(highlights.winner)
    axes.plot([seconds, end_s], [level, level], color=BASELINE, linewidth=1.0, linestyle=style.DASHED,
              label="baseline at its end")  # fmt: skip
    if not first:
        ring(axes, (seconds, level), color, 7, f"{role}: as good as that")
    words = f"{'before ' if first else ''}{secs(seconds)}"
    below = (
        results.falls
    )  # falling curves leave space to the lower left, rising ones to the upper left
    shift, side = ((-7, -6), "top") if below else ((-7, 6), "bottom")
    annotate(axes, words, (seconds, level), shift, ha="right", va=side, color=color)


def _kind(results: Results, trial: TrialRecord) -> str:
    repeats = trial is not results.outcome_of(trial).trial and results.space.seeds == 1
    if trial.status == "ok" and repeats and not without_seed(results.changed(trial)):
        return AGAIN
    kinds = {None: "under way", "ok": "other trials", "pruned": "stopped early"}
    return kinds.get(trial.status, "failed")


def _background(
    axes: Axes, results: Results, lines: Mapping[str, Line], highlights: Highlights
) -> None:
    """Draw all trials except baseline and best, by how they ended."""
    many = len(lines) > style.MANY
    others = [
        trial
        for trial in results.trials
        if lines[trial.name] and highlights.color(trial.name) is None
    ]
    for kind, (color, dashes) in KINDS.items():
        mine = [lines[trial.name] for trial in others if _kind(results, trial) == kind]
        if not mine:
            continue
        collection = LineCollection(
            [line if len(line) > 1 else [*line, *line] for line in mine],
            colors=color,
            linewidths=0.7 if many else 1.1,
            alpha=0.14 if len(lines) > 4 * style.MANY else 0.35 if many else 0.85,
            linestyles=[dashes],
            rasterized=many,
            zorder=1,
        )
        axes.add_collection(collection, autolim=False)
        axes.plot(
            [],
            [],
            color=color,
            linestyle=dashes,
            linewidth=1.4,
            label=kind,
            marker="x" * (kind == "failed"),
        )
        # A line through one point is invisible: draw a dot instead.
        if kind != "failed" and (single := [line[0] for line in mine if len(line) == 1]):
            axes.plot(*zip(*single, strict=True), "o", color=color, markersize=4, zorder=2)
        if kind == "failed":
            axes.plot(
                *zip(*(line[-1] for line in mine), strict=True),
                "x",
                color=color,
                markersize=5,
                zorder=2,
            )
        if not many and kind == "other trials":
            dots = [place for line in mine for place in line]
            axes.scatter(
                [x for x, _ in dots],
                [y for _, y in dots],
                s=9,
                color=style.GREY,
                zorder=2,
                linewidths=0,
            )
    # Values of failed trials may be extreme, so that the other trials define the limits of the
    # axes.
    inside = [
        place
        for t in results.trials
        if t.status in ("ok", "pruned", None)
        for place in lines[t.name]
    ]
    if inside := inside or [place for line in lines.values() for place in line]:
        axes.update_datalim(inside)
        axes.autoscale_view()


# ---- seeds
LINE_STYLES = ("-", "--", ":", "-.")
"""Line style of each pass through the colours."""


class _Look(TypedDict):
    """Arguments of `Axes.plot` for one line."""

    color: str
    linewidth: float
    linestyle: NotRequired[str]
    zorder: NotRequired[float]


def seeds(context: ReportContext, files: Files) -> Html | None:
    """Return the section that compares configurations over their seeds; None for a search with one
    seed."""
    if (compared := context.evidence.compared) is None:
        return None
    best = compared.of(context.highlights.winner) if context.highlights.winner is not None else None
    return _over_seeds(compared, best, files, "comparison")


def longer(context: ReportContext, files: Files) -> Html | None:
    """Return the section that compares the finalists with every longer budget; None if there is
    none."""
    parts = []
    for compared in context.longer:
        budget_s = compared.results.space.budget.per_trial_s
        parts += [
            el("h3", f"With {duration(budget_s)}"),
            _over_seeds(compared, None, files, f"longer_{budget_s:.10g}s"),
        ]
    return join(*parts) if parts else None


def _over_seeds(compared: Comparison, best: Group | None, files: Files, name: str) -> Html:
    """Return curves of means and the table of the configurations; `name`: of the files."""
    files.csv(name, compared.table())
    header, *rows = comparison_table(compared)
    sentences = conclusions(compared) or ["Nothing can be compared yet."]
    figure = None
    if not compared.results.by_rate and any(
        len(group.curve(compared.metric)) > 1 for group in compared.groups
    ):
        figure = files.chart(
            name,
            lambda: of_means(compared, best),
            f"objective against {compared.results.clock.seconds}, mean and standard deviation over"
            " seeds",
            "Mean over the seeds, and ± one standard deviation.",
        )
    return join(
        lead(sentences[0]),
        figure,
        table(header, rows, marked(compared, best), words=2, stacks=True),
        (
            el("p", sentences[-1]) if compared.resolutions else None
        ),  # the table has the other conclusions
        note(files.links(name)),
    )


def of_means(compared: Comparison, best: Group | None) -> Figure:
    """Draw the objective against training seconds: mean over the seeds and ± one standard
    deviation.

    If two knobs were varied, there is one panel per value of the one with fewer values; all panels
    show the baseline.
    """
    results = compared.results
    # Panels, and one colour per configuration over all panels.
    shown = [group for group in compared.groups if group.curve(compared.metric)]
    panel_knob, line_knob = _panels_and_lines(shown) or (None, None)
    values = _values(shown, panel_knob) if panel_knob is not None else [None]
    figure, panels = sheet(len(values), 4.7, max(style.WIDTH_IN, 3.0 * len(values)), sharey=True)
    levels = [level for group in shown for level in group.curve(compared.metric)]
    named = [
        (group, group.name if line_knob is None else _line_name(group, shown, line_knob))
        for group in shown
    ]
    others = dict.fromkeys(name for group, name in named if group.changed and group is not best)
    looks = {name: _look(i) for i, name in enumerate(others)}
    lines: dict[str, Line2D] = {}
    for axes, value in zip(panels, values, strict=True):
        for group, name in named:
            here = panel_knob is None or as_param(group.knobs[panel_knob]) == value
            if not (here or not group.changed):
                continue
            if not group.changed or group is best:
                # Not «best mean»: `best` is the baseline, too, where a mean is better without a
                # significant difference.
                role = "winner" if group.changed else "baseline"
                where = (
                    name if panel_knob is None else f"{name}, {knob_value(group.knobs[panel_knob])}"
                )
                name = role if where == "baseline" else f"{role} ({where})"
                color = WINNER if group.changed else BASELINE
                look: _Look = {"color": color, "linewidth": 2.2, "zorder": 3}
            else:
                look = looks[name]
            curve = group.curve(compared.metric)
            seconds = [level.seconds for level in curve]
            (line,) = axes.plot(
                seconds, [level.mean for level in curve], marker="o", markersize=3.5, **look
            )
            ends = (
                [level.mean - level.sd for level in curve],
                [level.mean + level.sd for level in curve],
            )
            axes.fill_between(seconds, *ends, color=look["color"], alpha=0.12, linewidth=0)
            lines.setdefault(name, line)
        axes.set_xlabel(results.clock.seconds)
        axes.set_xlim(left=0)
        objective_axis(axes, results, all(level.mean > level.sd for level in levels))
        axes.set_title(
            short(f"{panel_knob} = {knob_value(value)}", 44) if panel_knob is not None else ""
        )
    if lines:
        # Baseline and best first, then in the order of the colours.
        order = sorted(lines, key=lambda name: list(looks).index(name) if name in looks else -1)
        style.legend(figure, {name: lines[name] for name in order}, line_knob or "")
    return figure


def _look(place: int) -> _Look:
    """Return colour and line style of the line at `place`: all colours first, then again in the
    next style."""
    turn, color = divmod(place, len(colors.SERIES))
    return {
        "color": colors.SERIES[color],
        "linewidth": 1.5,
        "linestyle": LINE_STYLES[turn % len(LINE_STYLES)],
    }


def _values(groups: list[Group], knob: str) -> list[Any]:
    """Return the values of a knob as Optuna stores them, in the order of their first use."""
    return list(dict.fromkeys(as_param(group.knobs[knob]) for group in groups))


def _panels_and_lines(groups: list[Group]) -> tuple[str, str] | None:
    """Return (panel knob, line knob) if exactly two common knobs were varied; the one with fewer
    values has panels."""
    common = (
        [name for name in groups[0].knobs if all(name in group.knobs for group in groups)]
        if groups
        else []
    )
    if len(varied := [name for name in common if len(_values(groups, name)) > 1]) != 2:
        return None
    panels, lines = sorted(varied, key=lambda name: len(_values(groups, name)))
    return panels, lines


def _line_name(group: Group, groups: list[Group], lines: str) -> str:
    """Return the label of a line: the value of its knob, and of knobs that only some configurations
    have."""
    special = {
        k: v for k, v in group.knobs.items() if not all(k in other.knobs for other in groups)
    }
    words = [f"{name.rpartition('.')[2]}={knob_value(value)}" for name, value in special.items()]
    return ", ".join([knob_value(group.knobs[lines]), *words])
