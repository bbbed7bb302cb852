"""Will it hold? The forecast for a longer budget beside what was measured with it."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tunediff.cli import number
from tunediff.report import style
from tunediff.report.files import Files
from tunediff.report.html import BASELINE, WINNER, Html, el, join, table
from tunediff.report.style import objective_axis, sheet
from tunediff.report.subject import Subject, lead, note
from tunediff.report.words import duration, percent, short, some, with_sd
from tunediff.results import curve
from tunediff.results.forecast import FARTHEST, LEVEL, Crossing
from tunediff.results.hold import Held, Row

PANELS = 4
"""Configurations in the figure, the baseline among them; the table has all."""
LINES = 3
"""Of a panel's heading: a knob in each."""


def longer(subject: Subject, files: Files) -> Html | None:
    """Every longer budget of the confirming runs; None without any."""
    return join(*(hold(held, files, f"hold_{held.long_s:.10g}s") for held in subject.held)) if subject.held else None


def hold(held: Held, files: Files, name: str = "hold") -> Html:
    """Forecast and truth side by side, and where curves are expected to cross."""
    files.csv(name, held.table())
    header, *rows = hold_table(held)
    figure = files.chart(
        name,
        lambda: of_held(held),
        f"{held.metric} against {held.found.clock.seconds}, forecast and measured",
        f"Lines: runs of {duration(held.short_s)}. Bands: the {percent(LEVEL)} interval of a run with a longer budget. "
        f"Dots: runs of {duration(held.long_s)}, thin: their curves.",
    )
    first, *more = sentences(held)
    return join(lead(first), figure, *(el("p", words) for words in more), table(header, rows, words=1, stacks=True),
                note("A forecast goes on with the common slope of all curves against the logarithm of time; what its "
                     "interval holds was measured on other trainings. ", files.links(name)))  # fmt: skip


def hold_table(held: Held) -> list[list[str]]:
    """Headings and rows, for the terminal, Markdown and the page."""
    header = ["configuration", f"after {duration(held.short_s)}", f"forecast for {duration(held.long_s)}",
              f"{percent(LEVEL)} interval", "measured, mean ± sd", "inside"]  # fmt: skip
    lines = [header]
    for row in held.rows:
        told, inside = row.forecast, {None: "", True: "yes", False: "no"}[row.inside]
        said = [number(told.mean), f"{number(told.low)} … {number(told.high)}"] if told else ["none", row.why]
        lines.append([row.finalist.name, with_sd(row.short), *said, with_sd(row.measured), inside])
    return lines


def sentences(held: Held) -> list[str]:
    """In words: how many forecasts held, and which configurations are expected to change places."""
    told, long, short = held.told, duration(held.long_s), duration(held.short_s)
    if told:
        inside = sum(row.inside is True for row in told)
        lies = "lies" if inside == 1 else "lie"
        said = [
            f"{inside} of {some(len(told), 'measured mean')} after {long} {lies} within the "
            f"{percent(LEVEL)} interval that was forecast from runs of {short}."
        ]
    else:
        known = sum(row.forecast is not None for row in held.rows)
        said = [f"Forecast from runs of {short} for {long}: {known} of {some(len(held.rows), 'configuration')}."]
    for place, (ahead, other, at) in enumerate(held.crossings):
        words = f"{ahead.finalist.name} has the best mean with {short}. " if not place else ""
        said.append(f"{words}{_stays(ahead, other, at)}.")
    for ahead, later, seconds in held.crossed:
        said.append(
            f"Measured, the mean of {later.finalist.name} has passed that of {ahead.finalist.name}: equal with about "
            f"{duration(seconds)}."
        )
    if len(told) > 1 and not held.crossed:
        said.append("Measured, no mean has passed another.")
    return said


def _stays(ahead: Row, other: Row, at: Crossing | None) -> str:
    """Until when a configuration is known to be behind, and where forecasts are equal."""
    name = "the baseline" if other.finalist.name == "baseline" else other.finalist.name
    so_far = max(row.trend.end_s for row in (ahead, other) if row.trend is not None)
    if at is None or at.open_s is None:
        said = f"{name} is expected to stay behind it, with up to {FARTHEST:.0f} times that"
    elif at.open_s <= so_far:
        said = f"Whether {name} is behind it is open already"
    else:
        said = f"Whether {name} stays behind it is open from {duration(at.open_s)} on"
    return said if at is None or at.budget_s is None else f"{said}; their forecasts cross at {duration(at.budget_s)}"


def of_held(held: Held) -> Figure | None:
    """A panel for each configuration: its runs, the band of its forecast, what was measured."""
    rows = [row for row in held.rows if any(trial.points for trial in row.finalist.short)][:PANELS]
    if not rows:
        return None
    figure, panels = sheet(len(rows), 3.4, sharey=True)
    leader = next((row for row in rows if row.finalist.name != "baseline"), None)
    for axes, row in zip(panels, rows, strict=True):
        color = BASELINE if row.finalist.name == "baseline" else WINNER if row is leader else style.INK
        _panel(axes, held, row, color)
        names = row.finalist.name.split(" ")
        shown = names if len(names) <= LINES else [*names[: LINES - 1], f"and {len(names) - LINES + 1} more"]
        axes.set_title(
            "\n".join(short(name, 45 if style.stacked() else 120 // len(rows)) for name in shown), color=color
        )
    lines = [curve(trial, held.metric) for row in rows for trial in (*row.finalist.short, *row.finalist.long)]
    for axes in panels:
        objective_axis(axes, held.found, all(value > 0 for line in lines for _, value in line))
        axes.set(xscale="log", xlabel=held.found.clock.seconds)
        style.plain_logarithms(axes.xaxis)
    style.legend(figure, {
        f"runs of {duration(held.short_s)}": style.key(style.SOFT, marker="o", markersize=3, linewidth=1.6),
        "forecast": style.key(style.SOFT, linestyle=style.DASHED, linewidth=1.2),
        f"its {percent(LEVEL)} interval": Patch(color=style.SOFT, alpha=0.15),
        f"runs of {duration(held.long_s)} and their ends": style.key(style.GREY, marker="o", linewidth=0.8,
                                                                  markerfacecolor=style.INK, markeredgecolor=style.INK),
    })  # fmt: skip
    return figure


def _panel(axes: Axes, held: Held, row: Row, color: str) -> None:
    for trial in row.finalist.short:
        axes.plot(*zip(*curve(trial, held.metric), strict=True), color=color, linewidth=1.6, marker="o", markersize=3)
    if row.trend is not None:
        start, end = row.trend.end_s, 1.15 * max(held.long_s, row.forecast.budget_s if row.forecast else 0.0)
        told = [row.trend.at(start * (end / start) ** (i / 24)) for i in range(25)]
        seconds = [one.budget_s for one in told]
        axes.fill_between(seconds, [one.low for one in told], [one.high for one in told], color=color, alpha=0.15,
                          linewidth=0)  # fmt: skip
        axes.plot(seconds, [one.mean for one in told], color=color, linewidth=1.2, linestyle=style.DASHED)
    for trial in row.finalist.long:
        line = curve(trial, held.metric)
        axes.plot(*zip(*line, strict=True), color=style.GREY, linewidth=0.8, zorder=1)
        if trial.value(held.metric) is not None:
            axes.plot(*([value] for value in line[-1]), color=style.INK, marker="o", markersize=5, zorder=5)
