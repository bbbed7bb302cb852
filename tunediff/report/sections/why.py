"""Explain the winner's gain by speed and by learning per sample, and show the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tunediff.analysis import RATE, Results, curve, disturbed, last, noise
from tunediff.analysis.noise import Noise
from tunediff.analysis.speed import compile_s, per_thousand, rate, samples_per_step
from tunediff.analysis.why import Why
from tunediff.analysis.why import why as decompose
from tunediff.core.clock import UNITS
from tunediff.core.colors import BASELINE, WINNER
from tunediff.core.point import one_of
from tunediff.core.text import number
from tunediff.core.trial_record import TrialRecord
from tunediff.report import style
from tunediff.report.context import Highlights, ReportContext
from tunediff.report.files import Files
from tunediff.report.html import Html, el, join, lead, note, table
from tunediff.report.words import percent, rounded, secs, signed, times

NEGLIGIBLE = 0.02
"""Share of a gain, or of a number of samples, below which it is not worth mentioning."""
Quantity = tuple[str, float | None, float | None]
"""Name of a quantity, and its values for the baseline and for the winner."""


def why(context: ReportContext, files: Files) -> Html | None:
    """Return the section that compares baseline and winner; it explains only differences beyond the
    noise.

    None if the baseline itself is best, or one of them is missing.
    """
    results, evidence = context.results, context.evidence
    base, winner = context.highlights.baseline, context.highlights.rival
    if base is None or winner is None or not base.points:
        return None
    better, unit, seconds = evidence.better(winner), context.unit, results.clock.seconds
    # The decomposition into speed and learning, only for a difference beyond the noise.
    parts, figure, caveat = None, None, ""
    if better and not results.by_rate:
        parts = decompose(base, winner, results.metric, results.space.mode, results.ratios)
    if parts is None:
        sentence = _faster(context, base, winner)
    else:
        split, scatter = parts, _noise(context, results.metric)
        sentence = explain(parts, context.label, _trust(context), unit, seconds, scatter)
        figure = files.chart(
            "why_curves",
            lambda: _curves(results, context.highlights, split),
            f"baseline and winner against {seconds}, and against {unit}",
            f"The same curves against seconds and against {unit} seen. The gap at equal {unit} is"
            f" learning per {one_of(unit)}; what the gap at equal seconds has beyond it is speed.",
        )
        caveat = (
            f"Values at equal {unit} are interpolated between two evaluations of a longer training;"
            " one whose schedules end there was not run. "
        )
        if _has_shares(parts, scatter):
            of = "ratio's logarithm" if results.ratios else "difference"
            caveat = f"The percentages are shares of the {of} of both values. {caveat}"
    if not better:
        nothing = "Nothing to explain"
        if better is None:
            nothing = "Whether there is a difference to explain is not known"
        sentence = f"{nothing}: {evidence.speedup(winner)}."
    # All quantities of both, side by side.
    rows = _quantities(context, base, winner, parts)
    files.csv("why", pd.DataFrame(rows, columns=["quantity", "baseline", "winner"]))
    cells = []
    for name, theirs, mine in rows:
        versus = times(mine / theirs) if theirs and mine is not None else ""
        if not results.ratios and name.startswith(f"{context.label} at equal "):
            versus = signed(mine - theirs) if mine is not None and theirs is not None else ""
        cells.append([name, _cell(theirs), _cell(mine), versus])
    header = ["", f"baseline ({base.name})", f"{context.highlights.winner_is} ({winner.name})"]
    header.append("ratio" if results.ratios or parts is None else "ratio or difference")
    return join(
        lead(sentence),
        figure,
        table(header, cells),
        note(caveat, files.links("why")),
        _steps(context, files, base, winner),
    )


def heading(context: ReportContext) -> str:
    """Return the heading of the section, which asks `why` only for a difference beyond the
    noise."""
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


def _noise(context: ReportContext, metric: str) -> Noise | None:
    """Return the noise of one run in a quantity, confirming runs included; None if unknown."""
    confirmation = context.evidence.confirmation
    runs = confirmation.compared.results if confirmation is not None else None
    return noise.measured(context.results, runs, metric)


def _equal_learning(parts: Why, scatter: Noise | None) -> bool:
    """Whether the values at equal samples are known to differ by no more than the noise of one
    run."""
    at_samples = parts.at_samples
    return scatter is not None and at_samples is not None and not scatter.differ(*at_samples)


def _has_shares(parts: Why, scatter: Noise | None) -> bool:
    """Whether both parts of the gain are worth a share of it."""
    if parts.learning is None or parts.throughput is None or parts.total >= 0:
        return False
    least = min(parts.learning / parts.total, parts.throughput / parts.total)
    return least >= NEGLIGIBLE and not _equal_learning(parts, scatter)


def explain(
    parts: Why,
    label: str,
    trust: str,
    unit: str,
    seconds: str = UNITS["wall"].seconds,
    scatter: Noise | None = None,
) -> str:
    """Return the decomposition as one sentence; without shares if the gap at equal samples is
    within the noise.

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
    # The share of both parts in the gain; a negligible part is not reported as a share.
    learning, speed = parts.learning / parts.total, parts.throughput / parts.total
    sample = one_of(unit)
    learned, sped = f"learning more from each {sample} ({same})", f"speed ({many})"
    if _has_shares(parts, scatter):
        shares = f"{percent(learning)} is {learned} and {percent(speed)} is {sped}"
        return f"Of the gain, {gain}, {shares}; {trust}."
    lost = min(learning, speed) <= -NEGLIGIBLE
    share = "All of" if lost else "Practically all of"
    if learning > speed:
        rest = f"it is slower ({many})" if lost else f"speed is equal ({many})"
        return f"{share} the gain, {gain}, is {learned}; {rest}; {trust}."
    rest = f"from each {sample} {'it learns less' if lost else 'both learn as much'} ({same})"
    return f"{share} the gain, {gain}, is {sped}; {rest}; {trust}."


def _faster(context: ReportContext, base: TrialRecord, winner: TrialRecord) -> str:
    """Return how many times as fast the winner is, from the throughput of both."""
    speed, of_base, unit = rate(winner), rate(base), context.unit
    if not speed or not of_base:
        return "Throughput was not measured for both."
    rates = f"{rounded(speed)} {unit}/s instead of {rounded(of_base)}"
    return f"{rates}, {number(speed / of_base)} times as fast."


# ---- quantities
def _parts_of_step(base: TrialRecord, winner: TrialRecord) -> list[str]:
    """Return the parts of a step of either trial, in the order in which they first ended."""
    points = [point for trial in (base, winner) for point in trial.points[-1:]]
    return list(dict.fromkeys(part for point in points for part in point.phases_s))


def _part_label(results: Results, part: str) -> str:
    label = results.quantity(f"step_{part}_s").label
    return label if label != f"step_{part}_s" else part.replace("_", " ")


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
    # A trial of `open_study` that reports no samples reports no steps either: its points are
    # counted instead.
    if any(last(trial, "samples") for trial in (base, winner)):
        rows.append(at_end("optimizer steps", "steps"))
        rows.append((f"{unit} per step", samples_per_step(base), samples_per_step(winner)))
    rows.append(at_end("time of a step (ms)", "step_s", 1000.0))
    for part in _parts_of_step(base, winner):
        name = f"· {_part_label(context.results, part)} (ms)"
        rows.append(at_end(name, f"step_{part}_s", 1000.0))
    rows += [
        at_end(f"time waiting for {unit} (%)", "data_wait_share", 100.0),
        at_end(
            "MFU: FLOP/s as a share of the fastest matrix product's here (%)", "peak_share", 100.0
        ),
        ("compiling (s)", compile_s(base), compile_s(winner)),
        at_end("peak memory (MiB)", "peak_memory_mib"),
        at_end(f"{unit} per joule", "samples_per_j"),
    ]
    return [row for row in rows if row[1] is not None or row[2] is not None]


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == round(value) and abs(value) >= 10 else rounded(float(value))


# ---- a step
def _steps(context: ReportContext, files: Files, base: TrialRecord, winner: TrialRecord) -> Html:
    """Return the parts of a step, in seconds per 1,000 samples, as a sentence and a figure."""
    theirs, mine, unit = per_thousand(base), per_thousand(winner), context.unit
    if not theirs or not mine:
        return note("The parts of a step were not recorded for both.")
    names = _parts_of_step(base, winner)
    rows = [[part, theirs.get(part), mine.get(part)] for part in names]
    columns = ["part", "baseline_s_per_1000_samples", "winner_s_per_1000_samples"]
    files.csv("step", pd.DataFrame(rows, columns=columns))
    # The part that saves or costs most is named only if the difference in speed is beyond the
    # noise of one run.
    before, after = sum(theirs.values()), sum(mine.values())
    sentence = f"1,000 {unit} take {secs(after)} of training instead of {secs(before)}"
    speed, of_base, scatter = rate(winner), rate(base), _noise(context, RATE)
    if scatter is not None and speed and of_base and scatter.differ(speed, of_base):
        saved = {part: theirs.get(part, 0.0) - mine.get(part, 0.0) for part in names}
        most = max(saved, key=lambda part: saved[part] * (before - after))
        change, label = "saved" if after < before else "lost", _part_label(context.results, most)
        sentence += f"; most is {change} in {label}, {secs(abs(saved[most]))}"
    scale, scale_unit = (1.0, "seconds") if before >= 5 else (1000.0, "milliseconds")
    labels = {part: _part_label(context.results, part) for part in {**theirs, **mine}}
    bars = {
        "baseline": {labels[part]: spent * scale for part, spent in theirs.items()},
        context.highlights.winner_is: {labels[part]: spent * scale for part, spent in mine.items()},
    }
    figure = files.chart(
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


# ---- curves
def _curves(results: Results, highlights: Highlights, parts: Why) -> Figure:
    """Draw the curves of baseline and winner against seconds and against samples, and mark equal
    values of both."""
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
