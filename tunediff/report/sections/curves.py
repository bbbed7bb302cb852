"""The objective of all trials against training seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from tunediff.cli import number
from tunediff.report.files import Files
from tunediff.report.html import BASELINE, WINNER, Html, join
from tunediff.report.style import DASHED, GREY, MANY, Stars, at_the_end, objective_axis, plain_numbers, ring, say, sheet
from tunediff.report.subject import Subject, lead
from tunediff.report.words import secs, some
from tunediff.results import Results, curve

Line = Sequence[tuple[float, float]]


def curves(subject: Subject, files: Files) -> Html | None:
    """All curves, with baseline and winner on top."""
    found, base = subject.found, subject.stars.baseline
    if any(trial.points for trial in found.trials):
        frame = found.curves()
        wide = [name for name in frame.columns if any(isinstance(value, list | dict) for value in frame[name])]
        files.csv("curves", frame.drop(columns=wide))
    if not any(len(curve(trial, found.metric)) > 1 for trial in found.trials):
        return None
    ring_ = " The dashed line is the baseline at its end." if subject.crossing_s else ""
    if subject.crossing_s and not subject.crosses_before_first:
        ring_ += f" The ring: {subject.leader} is as good."
    figure = files.chart(
        "curves",
        lambda: drawn(found, subject.stars),
        f"{subject.label} against training seconds, all trials",
        f"Grey: the other trials; dotted: those that failed, were stopped, or are under way.{ring_}",
    )
    ranked, end = found.ranked, base.value(found.metric) if base is not None else None
    others = [trial for trial in ranked if base is None or trial.name != base.name]
    if end is None:
        said = f"{some(len(ranked), 'trial has', 'trials have')} a result; the baseline has none to compare them with."
    elif not others:
        said = "Only the baseline has a result so far."
    else:
        better = sum(found.loss(trial.value(found.metric) or 0.0) < found.loss(end) for trial in others)
        side = "below" if found.falls else "above"
        said = f"{better:,} of {some(len(others), 'other trial')} with a result "
        said += f"{'ends' if better == 1 else 'end'} {side} the baseline."
    return join(lead(said), figure)


def drawn(found: Results, stars: Stars) -> Figure:
    """The figure; the winner is marked where it is as good as the baseline at its end."""
    lines = {trial.name: curve(trial, found.metric) for trial in found.trials}
    figure, (axes,) = sheet(1, 4.7)
    _background(axes, found, lines, stars)
    pairs = [(lines[trial.name], color, what) for trial, color, what in stars.pairs() if lines.get(trial.name)]
    for line, color, _ in pairs:
        axes.plot(*zip(*line, strict=True), color=color, linewidth=2.2, marker="o", markersize=4.5, zorder=4)
    objective_axis(axes, found, all(y > 0 for line in lines.values() for _, y in line))
    at_the_end(axes, [(line[-1], color, f"{what} {number(line[-1][1])}") for line, color, what in pairs])
    if len(pairs) == 2 and stars.winner is not None:
        _crossing(axes, pairs[0][0], pairs[1][0], found.seconds_to_baseline(stars.winner))
    axes.set_xlabel("training seconds")
    axes.set_xlim(left=0)
    plain_numbers(axes)
    return figure


def _crossing(axes: Axes, base: Line, winner: Line, seconds: float | None) -> None:
    """Where the winner passes the end of the baseline; when that was is not known before its first evaluation."""
    if seconds is None:
        return
    (end_s, level), first = base[-1], seconds == winner[0][0]
    axes.plot([seconds, end_s], [level, level], color=BASELINE, linewidth=1.0, linestyle=DASHED)
    if not first:
        ring(axes, (seconds, level), WINNER, 7)
    words = f"{'before ' if first else ''}{secs(seconds)}"
    say(axes, words, (seconds, level), (-7, -6), ha="right", va="top", color=WINNER)


def _background(axes: Axes, found: Results, lines: Mapping[str, Line], stars: Stars) -> None:
    """All trials in grey; dotted where they did not end ok."""
    many = len(lines) > MANY
    others = [trial for trial in found.trials if lines[trial.name] and stars.color(trial.name) is None]
    for ok in (False, True):
        mine = [lines[trial.name] for trial in others if (trial.status == "ok") == ok]
        collection = LineCollection(
            [line if len(line) > 1 else [*line, *line] for line in mine],
            colors=GREY,
            linewidths=0.7 if many else 1.1,
            alpha=0.14 if len(lines) > 4 * MANY else 0.35 if many else 0.85,
            linestyles="solid" if ok else (0, (1.2, 1.6)),
            rasterized=many,
            zorder=1,
        )
        axes.add_collection(collection, autolim=False)
        if not many and ok and mine:
            dots = [place for line in mine for place in line]
            axes.scatter([x for x, _ in dots], [y for _, y in dots], s=9, color=GREY, zorder=2, linewidths=0)
    # What failed may lie anywhere; it is drawn as far as it fits.
    inside = [place for t in found.trials if t.status in ("ok", "pruned", None) for place in lines[t.name]]
    if inside := inside or [place for line in lines.values() for place in line]:
        axes.update_datalim(inside)
        axes.autoscale_view()
