"""Show where a training step goes, of baseline and winner, and the part that makes a difference."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from tunediff.analysis import RATE, Results, noise
from tunediff.analysis.noise import Noise
from tunediff.analysis.speed import per_thousand, rate
from tunediff.core.colors import BASELINE, WINNER
from tunediff.core.text import number
from tunediff.core.trial_record import TrialRecord
from tunediff.report import style
from tunediff.report.context import ReportContext
from tunediff.report.figures import Figures
from tunediff.report.html import Html, el, join, note
from tunediff.report.words import secs


def step_parts(
    context: ReportContext, figures: Figures, base: TrialRecord, winner: TrialRecord
) -> Html:
    """Return the parts of a step, in seconds per 1,000 samples, as a sentence and a figure."""
    theirs, mine, unit = per_thousand(base), per_thousand(winner), context.unit
    if not theirs or not mine:
        return note("The parts of a step were not recorded for both.")
    names = parts_of_step(base, winner)
    # The largest part is named only if the difference in speed is beyond the noise.
    before, after = sum(theirs.values()), sum(mine.values())
    sentence = f"1,000 {unit} take {secs(after)} of training instead of {secs(before)}"
    speed, of_base, scatter = rate(winner), rate(base), noise_of_run(context, RATE)
    if scatter is not None and speed and of_base and scatter.differ(speed, of_base):
        saved = {part: theirs.get(part, 0.0) - mine.get(part, 0.0) for part in names}
        most = max(saved, key=lambda part: saved[part] * (before - after))
        change, label = "saved" if after < before else "lost", part_label(context.results, most)
        sentence += f"; most is {change} in {label}, {secs(abs(saved[most]))}"
    scale, scale_unit = (1.0, "seconds") if before >= 5 else (1000.0, "milliseconds")
    labels = {part: part_label(context.results, part) for part in {**theirs, **mine}}
    bars = {
        "baseline": {labels[part]: spent * scale for part, spent in theirs.items()},
        context.highlights.winner_is: {labels[part]: spent * scale for part, spent in mine.items()},
    }
    figure = figures.chart(
        "step",
        lambda: _bars(bars, f"{scale_unit} per 1,000 {unit}"),
        "parts of a training step, baseline and winner",
        f"By {unit} and not by steps, because batch sizes may differ; over the last interval of"
        " each.",
    )
    return join(el("h3", "Where a step goes"), el("p", f"{sentence}."), figure)


def _bars(of_roles: Mapping[str, Mapping[str, float]], unit: str) -> Figure | None:
    """Draw the parts of a step of baseline and winner as pairs of bars; None if all are 0."""
    parts = list(dict.fromkeys(part for values in of_roles.values() for part in values))
    longest = max((spent for values in of_roles.values() for spent in values.values()), default=0)
    if not longest:
        return None
    figure, (axes,) = style.sheet(1, 0.7 + 0.42 * len(parts))
    looks = ((BASELINE, -0.19), (WINNER, 0.19))
    for (role, values), (color, shift) in zip(of_roles.items(), looks, strict=True):
        lengths = [values.get(part, 0.0) for part in parts]
        rows = [row + shift for row in range(len(parts))]
        axes.barh(rows, lengths, height=0.33, color=color, label=role)
        for row, length in zip(rows, lengths, strict=True):
            style.annotate(axes, number(length), (length, row), (4, 0), fontsize=8, color=color)
    axes.set_yticks(range(len(parts)), parts)
    axes.tick_params(axis="y", length=0, labelcolor=style.INK)
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * longest)
    axes.set_xlabel(unit)
    axes.grid(True, axis="x")
    style.legend(figure)
    return figure


def parts_of_step(base: TrialRecord, winner: TrialRecord) -> list[str]:
    """Return the parts of a step of either trial, in the order in which they first ended."""
    points = [point for trial in (base, winner) for point in trial.points[-1:]]
    return list(dict.fromkeys(part for point in points for part in point.phases_s))


def part_label(results: Results, part: str) -> str:
    label = results.quantity(f"step_{part}_s").label
    return label if label != f"step_{part}_s" else part.replace("_", " ")


def noise_of_run(context: ReportContext, metric: str) -> Noise | None:
    """Return the noise of one run in a quantity, confirming runs included; None if unknown."""
    confirmation = context.evidence.confirmation
    runs = confirmation.compared.results if confirmation is not None else None
    return noise.measured(context.results, runs, metric)
