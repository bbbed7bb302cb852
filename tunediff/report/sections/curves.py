"""The objective against training seconds: of all trials, and of configurations with several seeds their means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tunediff.analysis import Results, curve
from tunediff.analysis.comparison import Comparison, Group
from tunediff.analysis.statistics import mean
from tunediff.core import colors
from tunediff.core.colors import BASELINE, WINNER
from tunediff.core.text import number, pluralize
from tunediff.core.trial_record import TrialRecord
from tunediff.report import style
from tunediff.report.context import ReportContext, lead, marked, note
from tunediff.report.files import Files
from tunediff.report.html import Html, el, join, table
from tunediff.report.style import Highlights, at_the_end, objective_axis, plain_numbers, ring, say, sheet
from tunediff.report.verdicts import comparison_table, conclusions
from tunediff.report.words import duration, secs, short

# --------------------------------------------------------------------------------------------------------------- trials
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
"""Colour and line of the trials that are neither baseline nor best, by how they ended."""


def curves(subject: ReportContext, files: Files) -> Html | None:
    """All curves, with baseline and winner on top."""
    found, base = subject.found, subject.stars.baseline
    if any(trial.points for trial in found.trials):
        frame = found.curves()
        wide = [name for name in frame.columns if any(isinstance(value, list | dict) for value in frame[name])]
        files.csv("curves", frame.drop(columns=wide))
    if not any(len(curve(trial, found.metric)) > 1 for trial in found.trials):
        return None
    figure = files.chart(
        "curves",
        lambda: of_trials(found, subject.stars),
        f"{subject.label} against {found.clock.seconds}, all trials",
    )
    ranked, of_base = found.ranked, subject.known.runs(base)
    end = mean(of_base)
    others = [trial for trial in ranked if base is None or trial.name != base.name]
    if subject.compared is not None:
        said = f"{pluralize(len(ranked), 'run has', 'runs have')} a result; their means are above."
    elif end is None:
        count = pluralize(len(ranked), "trial has", "trials have")
        said = f"{count} a result; the baseline has none to compare them with."
    elif not others:
        so_far = "" if subject.over else " so far"
        said = f"Only the baseline has a result{so_far}. {subject.unfinished}".rstrip()
    else:
        better = sum(found.loss(trial.value(found.metric) or 0.0) < found.loss(end) for trial in others)
        side = "below" if found.falls else "above"
        said = f"{better:,} of {pluralize(len(others), 'other trial')} with a result "
        said += f"{'ends' if better == 1 else 'end'} {side} the baseline"
        said += f" (mean of its {len(of_base)} runs)." if len(of_base) > 1 else "."
    return join(lead(said), figure)


def of_trials(found: Results, stars: Highlights) -> Figure:
    """The figure; the winner is marked where it is as good as the baseline at its end."""
    lines = {trial.name: curve(trial, found.metric) for trial in found.trials}
    figure, (axes,) = sheet(1, 4.7)
    _background(axes, found, lines, stars)
    pairs = [(lines[trial.name], color, what) for trial, color, what in stars.shown() if lines.get(trial.name)]
    for line, color, _ in pairs:
        axes.plot(*zip(*line, strict=True), color=color, linewidth=2.2, marker="o", markersize=4.5, zorder=4)
    objective_axis(axes, found, all(y > 0 for line in lines.values() for _, y in line))
    at_the_end(axes, [(line[-1], color, f"{what} {number(line[-1][1])}") for line, color, what in pairs])
    if len(pairs) == 2 and stars.winner is not None:
        _crossing(axes, found, pairs[0][0], pairs[1], stars)
    axes.set_xlabel(found.clock.seconds)
    axes.set_xlim(left=0)
    plain_numbers(axes)
    style.legend(figure)
    return figure


def _crossing(axes: Axes, found: Results, base: Line, of: tuple[Line, str, str], stars: Highlights) -> None:
    """Where the winner passes the end of the baseline; when that was is not known before its first evaluation."""
    if stars.winner is None or (seconds := stars.reached_s) is None:
        return
    (_, color, what), (end_s, level), first = of, base[-1], found.at_first(stars.winner)
    axes.plot([seconds, end_s], [level, level], color=BASELINE, linewidth=1.0, linestyle=style.DASHED,
              label="baseline at its end")  # fmt: skip
    if not first:
        ring(axes, (seconds, level), color, 7, f"{what}: as good as that")
    words = f"{'before ' if first else ''}{secs(seconds)}"
    below = found.falls  # a curve that falls leaves room to its lower left, one that rises to its upper left
    shift, side = ((-7, -6), "top") if below else ((-7, 6), "bottom")
    say(axes, words, (seconds, level), shift, ha="right", va=side, color=color)


def _kind(found: Results, trial: TrialRecord) -> str:
    if trial.status == "ok" and found.repeats(trial):
        return AGAIN
    return {None: "under way", "ok": "other trials", "pruned": "stopped early"}.get(trial.status, "failed")


def _background(axes: Axes, found: Results, lines: Mapping[str, Line], stars: Highlights) -> None:
    """All trials but those that have a colour of their own, by how they ended."""
    many = len(lines) > style.MANY
    others = [trial for trial in found.trials if lines[trial.name] and stars.color(trial.name) is None]
    for kind, (color, dashes) in KINDS.items():
        mine = [lines[trial.name] for trial in others if _kind(found, trial) == kind]
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
        axes.plot([], [], color=color, linestyle=dashes, linewidth=1.4, label=kind, marker="x" * (kind == "failed"))
        if kind != "failed" and (single := [line[0] for line in mine if len(line) == 1]):  # a line has no length there
            axes.plot(*zip(*single, strict=True), "o", color=color, markersize=4, zorder=2)
        if kind == "failed":
            axes.plot(*zip(*(line[-1] for line in mine), strict=True), "x", color=color, markersize=5, zorder=2)
        if not many and kind == "other trials":
            dots = [place for line in mine for place in line]
            axes.scatter([x for x, _ in dots], [y for _, y in dots], s=9, color=style.GREY, zorder=2, linewidths=0)
    # What failed may lie anywhere; it is of_trials as far as it fits.
    inside = [place for t in found.trials if t.status in ("ok", "pruned", None) for place in lines[t.name]]
    if inside := inside or [place for line in lines.values() for place in line]:
        axes.update_datalim(inside)
        axes.autoscale_view()


# ---------------------------------------------------------------------------------------------------------------- seeds
LINE_STYLES = ("-", "--", ":", "-.")
"""One for each round through the colours."""


class _Look(TypedDict):
    """Of a line, as matplotlib takes it."""

    color: str
    linewidth: float
    linestyle: NotRequired[str]
    zorder: NotRequired[float]


def seeds(subject: ReportContext, files: Files) -> Html | None:
    """Every configuration of a search with several seeds, and which differences are noise."""
    if (compared := subject.compared) is None:
        return None
    best = compared.of(subject.stars.winner) if subject.stars.winner is not None else None
    return _over_seeds(compared, best, files, "comparison")


def longer(subject: ReportContext, files: Files) -> Html | None:
    """The finalists with every longer budget of the confirming runs; None without any."""
    parts = []
    for compared in subject.longer:
        budget_s = compared.found.space.budget.per_trial_s
        parts += [
            el("h3", f"With {duration(budget_s)}"),
            _over_seeds(compared, None, files, f"longer_{budget_s:.10g}s"),
        ]
    return join(*parts) if parts else None


def _over_seeds(compared: Comparison, best: Group | None, files: Files, name: str) -> Html:
    """Curves of means, and a table of the configurations beside the baseline; `name`: of the files."""
    files.csv(name, compared.table())
    header, *rows = comparison_table(compared)
    said = conclusions(compared) or ["Nothing can be compared yet."]
    figure = None
    if not compared.found.by_rate and any(len(group.curve(compared.metric)) > 1 for group in compared.groups):
        figure = files.chart(
            name,
            lambda: of_means(compared, best),
            f"objective against {compared.found.clock.seconds}, mean and standard deviation over seeds",
            "Mean over the seeds, and ± one standard deviation.",
        )
    return join(
        lead(said[0]),
        figure,
        table(header, rows, marked(compared, best), words=2, stacks=True),
        el("p", said[-1]) if compared.resolution is not None else None,  # what lies between is in the table
        note(files.links(name)),
    )


def of_means(compared: Comparison, best: Group | None) -> Figure:
    """The objective against training seconds: mean over the seeds and ± one standard deviation.

    Where two knobs were varied there is one panel for each value of the one with fewer; the baseline is in all of them.
    """
    found = compared.found
    shown = [group for group in compared.groups if group.curve(compared.metric)]
    panel_knob, line_knob = _panels_and_lines(shown) or (None, None)
    values = _values(shown, panel_knob) if panel_knob is not None else [""]
    figure, panels = sheet(len(values), 4.7, max(style.WIDTH_IN, 3.0 * len(values)), sharey=True)
    levels = [level for group in shown for level in group.curve(compared.metric)]
    named = [(group, group.name if line_knob is None else _line_name(group, shown, line_knob)) for group in shown]
    others = dict.fromkeys(name for group, name in named if group.changed and group is not best)
    looks = {name: _look(i) for i, name in enumerate(others)}
    lines: dict[str, Line2D] = {}
    for axes, value in zip(panels, values, strict=True):
        for group, name in named:
            here = panel_knob is None or number(group.knobs[panel_knob]) == value
            if not (here or not group.changed):
                continue
            if not group.changed or group is best:
                what = ", ".join(["baseline"] * (not group.changed) + ["best mean"] * (group is best))
                where = name if panel_knob is None else f"{name}, {number(group.knobs[panel_knob])}"
                name = what if where == "baseline" else f"{what} ({where})"
                color = WINNER if group.changed else BASELINE
                look: _Look = {"color": color, "linewidth": 2.2, "zorder": 3}
            else:
                look = looks[name]
            curve = group.curve(compared.metric)
            seconds = [level.seconds for level in curve]
            (line,) = axes.plot(seconds, [level.mean for level in curve], marker="o", markersize=3.5, **look)
            ends = [level.mean - level.sd for level in curve], [level.mean + level.sd for level in curve]
            axes.fill_between(seconds, *ends, color=look["color"], alpha=0.12, linewidth=0)
            lines.setdefault(name, line)
        axes.set_xlabel(found.clock.seconds)
        axes.set_xlim(left=0)
        objective_axis(axes, found, all(level.mean > level.sd for level in levels))
        axes.set_title(short(f"{panel_knob} = {value}", 44) if panel_knob is not None else "")
    if lines:
        order = sorted(
            lines, key=lambda name: list(looks).index(name) if name in looks else -1
        )  # baseline and best first
        style.legend(figure, {name: lines[name] for name in order}, line_knob or "")
    return figure


def _look(place: int) -> _Look:
    """All colours, then the same in another line style."""
    turn, color = divmod(place, len(colors.SERIES))
    return {"color": colors.SERIES[color], "linewidth": 1.5, "linestyle": LINE_STYLES[turn % len(LINE_STYLES)]}


def _values(groups: list[Group], knob: str) -> list[str]:
    """The values of a knob in words, in the order of their first use."""
    return list(dict.fromkeys(number(group.knobs[knob]) for group in groups))


def _panels_and_lines(groups: list[Group]) -> tuple[str, str] | None:
    """Where two knobs that every configuration has were varied: that with fewer values makes the panels."""
    common = [name for name in groups[0].knobs if all(name in group.knobs for group in groups)] if groups else []
    if len(varied := [name for name in common if len(_values(groups, name)) > 1]) != 2:
        return None
    panels, lines = sorted(varied, key=lambda name: len(_values(groups, name)))
    return panels, lines


def _line_name(group: Group, groups: list[Group], lines: str) -> str:
    """The value of the knob that the lines show, and of knobs that only some configurations have."""
    special = {k: v for k, v in group.knobs.items() if not all(k in other.knobs for other in groups)}
    words = [f"{name.rpartition('.')[2]}={number(value)}" for name, value in special.items()]
    return ", ".join([number(group.knobs[lines]), *words])
