"""Compare configurations over their seeds: a table, and their mean curves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tunediff.analysis.comparison import Comparison
from tunediff.analysis.outcome import Candidate
from tunediff.core import colors
from tunediff.core.colors import BASELINE, WINNER
from tunediff.core.text import number
from tunediff.report import style
from tunediff.report.context import ReportContext, marked
from tunediff.report.figures import Figures
from tunediff.report.html import Html, el, join, lead, table
from tunediff.report.verdicts import comparison_table, conclusions

HEIGHT_IN = 4.0
"""With title and verdict a figure of this height fits on the first screen."""
LINE_STYLES = ("-", "--", ":", "-.")
"""Line style of each pass through the colours."""


def best_of(context: ReportContext, compared: Comparison) -> Candidate | None:
    """Return the configuration of a comparison that is marked as the winner."""
    if (confirmation := context.evidence.confirmation) is not None:
        return confirmation.winner
    winner = context.highlights.winner
    return compared.candidate_of(winner) if winner is not None else None


def seeds(context: ReportContext, figures: Figures) -> Html | None:
    """Return the section that compares configurations over their seeds; None for one seed."""
    if (compared := context.evidence.compared) is None:
        return None
    return _over_seeds(compared, best_of(context, compared))


def has_curves(compared: Comparison) -> bool:
    """Whether there is more than the ends of the runs to draw."""
    curves = (group.curve(compared.metric) for group in compared.candidates)
    return not compared.results.by_rate and any(len(levels) > 1 for levels in curves)


def means_figure(
    compared: Comparison, best: Candidate | None, figures: Figures, name: str
) -> Html | None:
    """Return the figure of `of_means` with its caption; `name`: of its file."""
    mean = "On new seeds: mean" if name == "confirmed" else "Mean over the seeds"
    return figures.chart(
        name,
        lambda: of_means(compared, best),
        f"objective against {compared.results.clock.seconds}, mean and standard deviation",
        f"{mean}, and ± one standard deviation.",
    )


def _over_seeds(compared: Comparison, best: Candidate | None, figure: Html | None = None) -> Html:
    """Return the table of the configurations, below a figure."""
    header, *rows = comparison_table(compared)
    sentences = conclusions(compared) or ["Nothing can be compared yet."]
    return join(
        lead(sentences[0]),
        figure,
        table(header, rows, marked(compared, best), words=2, stacks=True),
        # The table has the other conclusions.
        el("p", sentences[-1]) if compared.resolutions else None,
    )


def of_means(compared: Comparison, best: Candidate | None) -> Figure:
    """Draw the objective against the budget: mean over the seeds and ± one standard deviation."""
    results = compared.results
    figure, (axes,) = style.sheet(1, HEIGHT_IN)
    curves = [(group, group.curve(compared.metric)) for group in compared.candidates]
    drawn = [(group, levels) for group, levels in curves if levels]
    others, lines = itertools.count(), dict[str, Line2D]()
    for group, levels in drawn:
        label, look = _look_of(group, best, others)
        xs, means = [level.seconds for level in levels], [level.mean for level in levels]
        (lines[label],) = axes.plot(xs, means, marker="o", markersize=3.5, **look)
        low, high = ([level.mean + sign * level.sd for level in levels] for sign in (-1, 1))
        axes.fill_between(xs, low, high, color=look["color"], alpha=0.12, linewidth=0)
    axes.set_xlabel(results.clock.seconds)
    axes.set_xlim(left=0)
    positive = (level.mean > level.sd for _, levels in drawn for level in levels)
    style.objective_axis(axes, results, all(positive))
    # The two that the verdict is about have their values at the ends of their lines.
    verdict = [(group, levels[-1]) for group, levels in drawn if group is best or group.is_baseline]
    style.label_line_ends(
        axes,
        [
            (
                (level.seconds, level.mean),
                BASELINE if group.is_baseline else WINNER,
                f"{'baseline' if group.is_baseline else 'winner'} {number(level.mean)}",
            )
            for group, level in verdict
        ],
    )
    # Baseline and winner first, then in the order of the colours.
    order = sorted(lines, key=lambda label: not label.startswith(("baseline", "winner (")))
    style.legend(figure, {label: lines[label] for label in order})
    return figure


def _look_of(
    group: Candidate, best: Candidate | None, others: Iterator[int]
) -> tuple[str, dict[str, Any]]:
    """Return the label of a group's line, and how it is drawn."""
    if group.is_baseline:
        return "baseline", {"color": BASELINE, "linewidth": 2.2, "zorder": 3}
    if group is best:
        # Not «best»: that is the baseline, too, if no other is significantly better.
        return f"winner ({group.name})", {"color": WINNER, "linewidth": 2.2, "zorder": 3}
    # All colours first, then again in the next style.
    turn, color = divmod(next(others), len(colors.SERIES))
    line_style = LINE_STYLES[turn % len(LINE_STYLES)]
    return group.name, {"color": colors.SERIES[color], "linewidth": 1.5, "linestyle": line_style}
