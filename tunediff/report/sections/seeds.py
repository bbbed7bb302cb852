"""All configurations of a search with several seeds, and which differences are noise."""

from __future__ import annotations

from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tunediff.cli import number
from tunediff.report.files import Files
from tunediff.report.html import Html, el, join, table
from tunediff.report.style import INK, WIDTH_IN, objective_axis, sheet
from tunediff.report.subject import Subject, lead, note
from tunediff.report.verdicts import conclusions
from tunediff.report.words import interval, is_known, rounded, times, with_sd
from tunediff.results.comparison import Comparison, Group

LINE_STYLES = ("-", "--", ":", "-.")
"""One for each ten colours."""


def seeds(subject: Subject, files: Files) -> Html | None:
    """Every configuration of a search with several seeds, and which differences are noise."""
    if (compared := subject.compared) is None:
        return None
    frame, best = compared.table(), subject.stars.winner
    files.csv("comparison", frame)
    rows, marks = list[list[object]](), list[str]()
    for group, row in zip(compared.groups, frame.astype(object).to_dict("records"), strict=True):
        known = interval(group.difference) if group.difference.low is not None else ""
        p_holm = number(float(row["p_holm"])) if is_known(row["p_holm"]) else ""
        reached = [
            f"{len(group.done)} of {compared.seeds}",
            with_sd(group.values(compared.metric)),
            known,
            p_holm,
        ]
        fast = [times(row["speedup"]), rounded(row["images_per_s"])]
        rows.append([group.name, group.difference.verdict, *reached, *fast])
        mine = best is not None and any(trial.name == best.name for trial in group.runs)
        marks.append("baseline" if not group.changed else "winner" if mine else "")
    header = ["configuration", "verdict", "runs", f"{subject.label}, mean ± sd", f"{compared.effect} (95 %)"]
    said = conclusions(compared) or ["Nothing can be compared yet."]
    figure = None
    if not subject.by_rate and any(len(group.curve(compared.metric)) > 1 for group in compared.groups):
        figure = files.chart(
            "comparison",
            lambda: drawn(compared),
            "objective against training seconds, mean and standard deviation over seeds",
            "Mean over the seeds, and ± one standard deviation.",
        )
    return join(
        lead(said[0]),
        figure,
        table([*header, "p (Holm)", "speed-up", "images/s"], rows, marks, words=2),
        el("p", said[-1]) if compared.resolution is not None else None,  # what lies between is in the table
        note(files.links("comparison")),
    )


def drawn(compared: Comparison) -> Figure:
    """The objective against training seconds: mean over the seeds and ± one standard deviation.

    Where two knobs were varied there is one panel for each value of the one with fewer; the baseline is in all of them.
    """
    found = compared.found
    shown = [group for group in compared.groups if group.curve(compared.metric)]
    panel_knob, line_knob = _panels_and_lines(shown) or (None, None)
    values = _values(shown, panel_knob) if panel_knob is not None else [""]
    figure, panels = sheet(len(values), 4.7, max(WIDTH_IN, 3.0 * len(values) + 3.0), sharey=True)
    levels = [level for group in shown for level in group.curve(compared.metric)]
    named = [(group, group.name if line_knob is None else _line_name(group, shown, line_knob)) for group in shown]
    styles = {name: _style(i) for i, name in enumerate(dict.fromkeys(name for group, name in named if group.changed))}
    lines: dict[str, Line2D] = {}
    for axes, value in zip(panels, values, strict=True):
        for group, name in named:
            if not group.changed:
                name = f"baseline ({name}, {number(group.knobs[panel_knob])})" if panel_knob is not None else name
                style: dict[str, Any] = {"color": INK, "linewidth": 2.2, "zorder": 3}
            elif panel_knob is None or number(group.knobs[panel_knob]) == value:
                style = styles[name]
            else:
                continue
            curve = group.curve(compared.metric)
            seconds = [level.train_s for level in curve]
            (line,) = axes.plot(seconds, [level.mean for level in curve], marker="o", markersize=3.5, **style)
            ends = [level.mean - level.sd for level in curve], [level.mean + level.sd for level in curve]
            axes.fill_between(seconds, *ends, color=style["color"], alpha=0.12, linewidth=0)
            lines.setdefault(name, line)
        axes.set_xlabel("training seconds")
        axes.set_xlim(left=0)
        objective_axis(axes, found, all(level.mean > level.sd for level in levels))
        axes.label_outer()
        axes.set_title(f"{panel_knob} = {value}" if panel_knob is not None else "")
    if lines:
        order = sorted(lines, key=lambda name: list(styles).index(name) if name in styles else -1)  # baseline first
        figure.legend([lines[name] for name in order], order, loc="outside right upper", title=line_knob)
    return figure


def _style(place: int) -> dict[str, Any]:
    """Ten colours, then the same in another line style."""
    return {
        "color": matplotlib.colormaps["tab10"](place % 10),
        "linewidth": 1.5,
        "linestyle": LINE_STYLES[place // 10 % 4],
    }


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
