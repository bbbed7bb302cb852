"""Explain the winner's gain by speed and by learning per sample."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tunediff import config as cfg
from tunediff.analysis import RATE, Results, curve, disturbed, last, noise
from tunediff.analysis.noise import Noise
from tunediff.analysis.speed import compile_s, rate, samples_per_step
from tunediff.analysis.why import Why
from tunediff.analysis.why import why as decompose
from tunediff.core.clock import UNITS
from tunediff.core.colors import BASELINE, WINNER
from tunediff.core.point import one_of
from tunediff.core.text import number
from tunediff.core.trial_record import TrialRecord
from tunediff.report import style
from tunediff.report.context import Highlights, ReportContext
from tunediff.report.figures import Figures
from tunediff.report.html import Html, join, lead, note, table
from tunediff.report.words import percent, rounded, secs, signed, times

NEGLIGIBLE = 0.02
"""Share of a number of samples below which it is not worth mentioning."""
Quantity = tuple[str, float | None, float | None]
"""Name of a quantity, and its values for the baseline and for the winner."""


def why(context: ReportContext, figures: Figures) -> Html | None:
    """Return the section that compares baseline and winner; None if the baseline is best, one of
    them is missing, or a command prints values. It explains only differences beyond the noise."""
    results, evidence = context.results, context.evidence
    base, winner = context.highlights.baseline, context.highlights.rival
    prints = cfg.is_command(results.space.workload.name)  # of which no number is a sample
    if base is None or winner is None or not base.points or prints:
        return None
    better, unit, seconds = evidence.better(winner), context.unit, results.clock.seconds
    parts, figure, caveat = None, None, ""
    if better and not (results.by_rate or results.by_time):
        parts = decompose(base, winner, results.metric, results.space.mode, results.ratios)
    if parts is None:
        sentence = _faster(context, base, winner)
    else:
        split, scatter = parts, _noise_of_run(context, results.metric)
        sentence = explain(parts, context.label, _trust(context), unit, seconds, scatter)
        figure = figures.chart(
            "why_curves",
            lambda: _curves(results, context.highlights, split),
            f"baseline and winner against {seconds}, and against {unit}",
            f"The same curves against seconds and against {unit} seen. The gap at equal {unit} is"
            f" learning per {one_of(unit)}; what the gap at equal seconds has beyond it is speed.",
        )
        caveat = (
            f"Values at equal {unit} are interpolated between two evaluations of a longer training;"
            " one whose schedules end there was not run."
        )
    if not better:
        nothing = "Nothing to explain"
        if better is None:
            nothing = "Whether there is a difference to explain is not known"
        sentence = f"{nothing}: {evidence.speedup(winner)}."
    rows = _quantities(context, base, winner, parts)
    return join(
        lead(sentence),
        figure,
        _table(context, base, winner, rows, parts is not None),
        note(caveat),
    )


def _table(
    context: ReportContext,
    base: TrialRecord,
    winner: TrialRecord,
    rows: list[Quantity],
    split: bool,
) -> Html:
    """Return all quantities of both, side by side. `split`: whether the gain was decomposed."""
    cells, ratios = [], context.results.ratios
    for name, theirs, mine in rows:
        versus = times(mine / theirs) if theirs and mine is not None else ""
        if not ratios and name.startswith(f"{context.label} at equal "):
            versus = signed(mine - theirs) if mine is not None and theirs is not None else ""
        cells.append([name, _cell(theirs), _cell(mine), versus])
    header = ["", f"baseline ({base.name})", f"{context.highlights.winner_is} ({winner.name})"]
    return table([*header, "ratio" if ratios or not split else "ratio or difference"], cells)


def heading(context: ReportContext) -> str:
    """Return the section's heading; it asks `why` only for a difference beyond the noise."""
    winner = context.highlights.winner
    if winner is None or not context.evidence.better(winner):
        return f"{context.best_words} and the baseline"
    return "Why it wins" if context.evidence.winner else "Why it is better"


def _trust(context: ReportContext) -> str:
    """Return how many runs the comparison rests on, and whether other processes disturbed them."""
    repeated = context.evidence.confirmation is not None or context.evidence.compared is not None
    runs = "these two are runs of one seed" if repeated else "one run each"
    if any(disturbed(trial) for trial, _, _ in context.highlights.pairs()):
        runs += ", and others used the machine meanwhile"
    return runs


def _noise_of_run(context: ReportContext, metric: str) -> Noise | None:
    """Return the noise of one run in a quantity, confirming runs included; None if unknown."""
    confirmation = context.evidence.confirmation
    runs = confirmation.results if confirmation is not None else None
    return noise.measured(context.results, runs, metric)


def _equal_learning(parts: Why, scatter: Noise | None) -> bool:
    """Whether the values at equal samples differ by no more than the noise of one run."""
    at_samples = parts.at_samples
    return scatter is not None and at_samples is not None and not scatter.differ(*at_samples)


def explain(
    parts: Why, label: str, trust: str, unit: str,
    seconds: str = UNITS["wall"].seconds, scatter: Noise | None = None,
) -> str:  # fmt: skip
    """Return the decomposition as a sentence, without shares where a gap is within the noise. A
    share below 0 % is a loss.

    label: of the objective. trust: remark about the noise. unit: name of the samples. seconds: name
    of the seconds. scatter: the noise of one run; None if it is unknown.
    """
    (base, winner), samples, at_samples = parts.at_seconds, parts.samples, parts.at_samples
    ratio = samples[1] / samples[0] if samples[0] else 1.0
    times_as = "" if abs(ratio - 1) < NEGLIGIBLE else f"{number(ratio)} times "
    many = f"{times_as}as many {unit} in the same seconds"
    gain = (
        f"{label} {number(winner)} instead of {number(base)} at {number(parts.seconds)} {seconds}"
    )
    equal = f"{parts.equal_samples:,} {unit}"
    if parts.learning is None or parts.throughput is None or at_samples is None:
        return (
            f"{gain}; how much of that is speed is unknown, because at {equal}, the most that"
            f" both have seen, one of them had not been evaluated yet; {trust}."
        )
    same = f"{number(at_samples[1])} instead of {number(at_samples[0])} at {equal}"
    if parts.total >= 0:
        return f"In these two runs it is not ahead: {gain}, {same}, with {many}; {trust}."
    if _equal_learning(parts, scatter):
        return (
            f"The gain is {gain}, with {many}; the difference at equal {unit} is within the noise"
            f" of one run ({same}); {trust}."
        )
    share = round(parts.learning / parts.total, 3)
    return (
        f"Of the gain, {gain}, {percent(share)} is learning more from each {one_of(unit)} ({same})"
        f" and {percent(1 - share)} is speed ({many}); {trust}."
    )


def _faster(context: ReportContext, base: TrialRecord, winner: TrialRecord) -> str:
    """Return how much faster the winner is, and what a trial learned before its target."""
    speed, of_base, unit = rate(winner), rate(base), context.unit
    if not speed or not of_base:
        return "Throughput was not measured for both."
    seen = ""
    if context.results.space.target is not None:
        needed, of_baseline = (last(trial, "samples") for trial in (winner, base))
        seen = f"It met the target after {needed:,} {unit} instead of {of_baseline:,}; "
    rates = f"{seen}{rounded(speed)} {unit}/s instead of {rounded(of_base)}"
    return f"{rates}, {number(speed / of_base)} times as fast."


# ---- quantities
def _quantities(
    context: ReportContext, base: TrialRecord, winner: TrialRecord, parts: Why | None
) -> list[Quantity]:
    """Return all quantities that the baseline or the winner has, with both values."""

    def at_end(words: str, name: str, scale: float = 1.0) -> Quantity:
        values = (last(trial, name) for trial in (base, winner))
        theirs, mine = (None if value is None else float(value) * scale for value in values)
        return words, theirs, mine

    label, unit, rows = context.label, context.unit, list[Quantity]()
    # Values at equal seconds and at equal samples, then those of the last point.
    if parts is not None:
        at_samples = parts.at_samples or (None, None)
        rows.append((f"{label} at equal seconds ({secs(parts.seconds)})", *parts.at_seconds))
        rows.append((f"{label} at equal {unit} ({parts.equal_samples:,})", *at_samples))
        rows.append((f"{unit} seen by then", *parts.samples))
    rows.append(at_end(f"{unit}/s, last interval", RATE))
    # A trial of `open_study` without samples has no steps either: its points are counted.
    if any(last(trial, "samples") for trial in (base, winner)):
        rows.append(at_end("optimizer steps", "steps"))
        rows.append((f"{unit} per step", samples_per_step(base), samples_per_step(winner)))
    rows.append(at_end("time of a step (ms)", "step_s", 1000.0))
    ends = [point for trial in (base, winner) for point in trial.points[-1:]]
    for part in dict.fromkeys(part for point in ends for part in point.phases_s):
        name = f"step_{part}_s"
        part_label = context.results.quantity(name).label
        shown = part.replace("_", " ") if part_label == name else part_label
        rows.append(at_end(f"· {shown} (ms)", name, 1000.0))
    rows += [
        at_end(f"time waiting for {unit} (%)", "data_wait_share", 100.0),
        at_end(
            "MFU: FLOP/s as a share of the fastest matrix product's here (%)", "peak_share", 100.0
        ),
        ("compiling (s)", compile_s(base), compile_s(winner)),
        at_end("peak memory (MiB)", "peak_memory_mib"),
    ]
    return [row for row in rows if row[1] is not None or row[2] is not None]


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == round(value) and abs(value) >= 10 else rounded(float(value))


# ---- curves
def _curves(results: Results, highlights: Highlights, parts: Why) -> Figure:
    """Draw baseline and winner against seconds and samples, and mark equal values."""
    figure, panels = style.sheet(2, 3.5, sharey=True)
    samples = float(parts.equal_samples)
    for axes, along, words in zip(
        panels,
        (results.clock.along, "samples"),
        (results.clock.seconds, f"{results.unit} seen"),
        strict=True,
    ):
        for trial, color, role in highlights.pairs():
            line = curve(trial, results.metric, along)
            axes.plot(
                *zip(*line, strict=True), color=color, linewidth=1.8, label=role, **style.CURVE
            )
        axes.set_xlabel(words)
        axes.margins(x=0.12, y=0.12)
        axes.set_xlim(left=0)
        style.plain_numbers(axes)
    _mark(panels[0], parts.seconds, parts.at_seconds, results.lower_is_better)
    unknown = ": not known"
    if parts.at_samples is not None:
        _mark(panels[1], samples, parts.at_samples, results.lower_is_better)
        unknown = ""
    panels[0].set_title(f"at equal seconds ({secs(parts.seconds)})")
    panels[1].set_title(f"at equal {results.unit} ({parts.equal_samples:,}){unknown}")
    style.objective_axis(panels[0], results, results.ratios)
    panels[1].grid(True, axis="y")
    style.legend(figure)
    return figure


def _mark(axes: Axes, at: float, values: tuple[float, float], falls: bool) -> None:
    """Mark the values of baseline and winner at one place of the x axis.

    Labels go where curves leave space: for falling curves to the upper right and the lower left,
    for rising ones to the upper left and the lower right.
    """
    axes.axvline(at, color=style.SOFT, linewidth=0.9, linestyle=style.DASHED, zorder=0)
    both = sorted(zip(values, (BASELINE, WINNER), strict=True), reverse=True)
    sides = (("left", 7), ("right", -7)) if falls else (("right", -7), ("left", 7))
    for (value, color), (side, shift), up in zip(both, sides, (7, -7), strict=True):
        style.ring(axes, (at, value), color)
        look: dict[str, Any] = {"ha": side, "va": "bottom" if up > 0 else "top", "color": color}
        look |= {"fontsize": 9, "fontweight": "bold"}
        style.annotate(axes, number(value), (at, value), (shift, up), **look)
