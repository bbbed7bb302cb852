"""Explain the winner's gain by speed and by learning per sample, and show where the time of a step
goes."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from tunediff.analysis import RATE, Results, curve, last, noise
from tunediff.analysis.noise import Noise
from tunediff.analysis.speed import compile_s, per_thousand, rate, samples_per_step
from tunediff.analysis.why import Why
from tunediff.analysis.why import why as decompose
from tunediff.core.clock import UNITS
from tunediff.core.point import one_of
from tunediff.core.text import number
from tunediff.core.trial_record import TrialRecord
from tunediff.report.context import ReportContext, lead, note
from tunediff.report.files import Files
from tunediff.report.html import BASELINE, WINNER, Html, el, join, table
from tunediff.report.style import (
    DASHED,
    INK,
    SOFT,
    Highlights,
    annotate,
    legend,
    objective_axis,
    plain_numbers,
    ring,
    sheet,
)
from tunediff.report.words import beside, percent, rounded, secs, times

SHARES = "Shares are of the {of} of both values. "
CAVEAT = (
    "Values at equal {unit} are interpolated between two evaluations of a longer training; "
    "one whose schedules end there was not run. "
)
Quantity = tuple[str, float | None, float | None]
"""Name of a quantity, and its values for the baseline and for the winner."""


def why(context: ReportContext, files: Files) -> Html | None:
    """Return the section that compares baseline and winner; it explains only differences beyond the
    noise.

    None if the baseline itself is best, or one of them is missing.
    """
    results, base, winner = context.results, context.rival, context.highlights.winner
    if base is None or winner is None or not base.points:
        return None
    # The decomposition into speed and learning, only for a difference beyond the noise.
    figure, decomposition, unit, better = None, None, context.unit, context.evidence.better(winner)
    if (
        not results.by_rate
        and better
        and (
            decomposition := decompose(
                base, winner, results.metric, results.space.mode, results.ratios
            )
        )
        is not None
    ):
        split = decomposition
        figure = files.chart(
            "why_curves",
            lambda: _curves(results, context.highlights, split),
            f"baseline and winner against {results.clock.seconds}, and against {unit}",
            f"The same curves against seconds and against {unit} seen. The gap at equal {unit} is"
            f" learning per {one_of(unit)}; what the gap at equal seconds has beyond it is speed.",
        )
    words = context.label, _trust(context), unit, results.clock.seconds
    scatter = _noise(context, results.metric)
    sentence = (
        explain(decomposition, *words, scatter)
        if decomposition is not None
        else _faster(context, base, winner)
    )
    if not better:
        why_not = context.evidence.speedup(winner)
        sentence = (
            "Whether there is a difference to explain is not known"
            if better is None
            else "Nothing to explain"
        )
        sentence += f": {why_not}."
    # All quantities of both, side by side.
    rows = _side_by_side(context, base, winner, decomposition)
    files.csv("why", pd.DataFrame(rows, columns=["quantity", "baseline", "winner"]))
    versus = "ratio" if results.ratios or decomposition is None else "ratio or difference"
    header = [
        "",
        f"baseline ({base.name})",
        f"{context.highlights.winner_is} ({winner.name})",
        versus,
    ]
    cells = [
        [name, _cell(theirs), _cell(mine), _versus(context, name, theirs, mine)]
        for name, theirs, mine in rows
    ]
    caveat = ""
    if decomposition is not None:
        of = "ratio's logarithm" if results.ratios else "difference"
        shares = "" if _alike(decomposition, scatter) else SHARES.format(of=of)
        caveat = shares + CAVEAT.format(unit=unit)
    notes = note(caveat, files.links("why"))
    return join(
        lead(sentence), figure, table(header, cells), notes, _steps(context, files, base, winner)
    )


def _versus(context: ReportContext, name: str, theirs: float | None, mine: float | None) -> str:
    """Return how two values compare: as a ratio, or as a difference if they are of an objective
    without ratios."""
    if not context.results.ratios and name.startswith(f"{context.label} at equal "):
        return beside(context.results.versus(mine, theirs), ratios=False)
    return times(mine / theirs) if theirs and mine is not None else ""


def heading(context: ReportContext) -> str:
    """Return the heading of the section, which asks `why` only for a difference beyond the
    noise."""
    winner = context.highlights.winner
    if winner is None or not context.evidence.better(winner):
        return f"{context.leader[:1].upper()}{context.leader[1:]} beside the baseline"
    return "Why it wins" if context.evidence.winner else "Why it is better"


def _trust(context: ReportContext) -> str:
    """Return how many runs the comparison rests on, and whether other processes disturbed them."""
    disturbed = any(
        point.get("disturbed") is True
        for trial, _, _ in context.highlights.pairs()
        for point in trial.points
    )
    repeated = context.evidence.confirmation is not None or context.evidence.compared is not None
    runs = "these two are runs of one seed" if repeated else "one run each"
    return f"{runs}, and others used the machine meanwhile" if disturbed else runs


def _noise(context: ReportContext, metric: str) -> Noise | None:
    """Return the noise of one run in a quantity, confirming runs included; None if it is
    unknown."""
    confirmation = context.evidence.confirmation
    return noise.measured(
        context.results, confirmation.compared.results if confirmation is not None else None, metric
    )


def _alike(decomposition: Why, scatter: Noise | None) -> bool:
    """Whether the values at equal samples differ by no more than the noise of one run; False if it
    is unknown."""
    at_samples = decomposition.at_samples
    return scatter is not None and at_samples is not None and not scatter.differ(*at_samples)


def explain(
    decomposition: Why,
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
    (base, winner), end = decomposition.at_seconds, f"; {trust}."
    samples, at_samples = decomposition.samples, decomposition.at_samples
    equal = f"{decomposition.equal_samples:,} {unit}"
    ratio = samples[1] / samples[0] if samples[0] else 1.0
    many = f"as many {unit}" if abs(ratio - 1) < 0.02 else f"{number(ratio)} times as many {unit}"
    at_end = (
        f"{label} {number(winner)} instead of {number(base)} at {number(decomposition.seconds)}"
        f" {seconds}"
    )
    if decomposition.learning is None or decomposition.throughput is None or at_samples is None:
        return (
            f"{at_end}; how much of that is speed is unknown, because at {equal}, the most that"
            f" both have seen, one of them had not been evaluated yet{end}"
        )
    same = f"{number(at_samples[1])} instead of {number(at_samples[0])} at {equal}"
    if decomposition.total >= 0:
        return (
            f"In these two runs it is not ahead: {at_end}, {same}, with {many} in the same"
            f" seconds{end}"
        )
    if _alike(decomposition, scatter):
        return (
            f"The gain is {at_end}, with {many} in the same seconds; the difference at equal {unit}"
            f" is within the noise of one run ({same}){end}"
        )
    # The share of both parts in the gain; a part under 2 % is not reported.
    learning, throughput = (
        decomposition.learning / decomposition.total,
        decomposition.throughput / decomposition.total,
    )
    per_sample = f"from each {one_of(unit)}"
    learned, sped = f"learning more {per_sample} ({same})", f"speed ({many} in the same seconds)"
    if learning >= 0.02 and throughput >= 0.02:
        return (
            f"Of the gain, {at_end}, {percent(learning)} is {learned} and {percent(throughput)} is"
            f" {sped}{end}"
        )
    if throughput <= -0.02:
        return (
            f"All of the gain, {at_end}, is {learned}; in speed it loses ({many} in the same"
            f" seconds){end}"
        )
    if learning <= -0.02:
        return f"All of the gain, {at_end}, is {sped}; {per_sample} it learns less ({same}){end}"
    if learning > 0.5:
        return (
            f"Practically all of the gain, {at_end}, is {learned}, with {many} in the same"
            f" seconds{end}"
        )
    return (
        f"Practically all of the gain, {at_end}, is {sped}; {per_sample} both learn as much"
        f" ({same}){end}"
    )


def _faster(context: ReportContext, base: TrialRecord, winner: TrialRecord) -> str:
    """Return how many times as fast the winner is, from the throughput of both."""
    speed, of_base, unit = rate(winner), rate(base), context.unit
    if not speed or not of_base:
        return "Throughput was not measured for both."
    return (
        f"{rounded(speed)} {unit}/s instead of {rounded(of_base)}, {number(speed / of_base)} times"
        " as fast."
    )


def _parts(base: TrialRecord, winner: TrialRecord) -> list[str]:
    """Return the parts of a step of either trial, in the order in which they first ended."""
    return list(
        dict.fromkeys(
            part
            for trial in (base, winner)
            for point in trial.points[-1:]
            for part in point.phases_s
        )
    )


def _part(context: ReportContext, name: str) -> str:
    label = context.results.quantity(f"step_{name}_s").label
    return label if label != f"step_{name}_s" else name.replace("_", " ")


def _side_by_side(
    context: ReportContext, base: TrialRecord, winner: TrialRecord, decomposition: Why | None
) -> list[Quantity]:
    """Return all quantities that the baseline or the winner has, with both values."""

    def at_end(words: str, name: str, scale: float = 1.0) -> Quantity:
        theirs, mine = (
            None if (v := last(trial, name)) is None else float(v) * scale
            for trial in (base, winner)
        )
        return words, theirs, mine

    # Values at equal seconds and at equal samples, then those of the last point.
    rows, unit = list[Quantity](), context.unit
    if decomposition is not None:
        rows.append(
            (
                f"{context.label} at equal seconds ({secs(decomposition.seconds)})",
                *decomposition.at_seconds,
            )
        )
        rows.append(
            (
                f"{context.label} at equal {unit} ({decomposition.equal_samples:,})",
                *(decomposition.at_samples or (None, None)),
            )
        )
        rows.append((f"{unit} seen by then", *decomposition.samples))
    rows.append(at_end(f"{unit}/s", RATE))
    # A trial of `open_study` that reports no samples reports no steps either: its points are
    # counted instead.
    if any(last(trial, "samples") for trial in (base, winner)):
        rows += [
            at_end("optimizer steps", "steps"),
            (f"{unit} per step", samples_per_step(base), samples_per_step(winner)),
        ]
    rows += [
        at_end("time of a step (ms)", "step_s", 1000.0),
        *(
            at_end(f"· {_part(context, part)} (ms)", f"step_{part}_s", 1000.0)
            for part in _parts(base, winner)
        ),
        at_end(f"time waiting for {unit} (%)", "data_wait_share", 100.0),
        at_end("of a matrix product's speed here (%)", "peak_share", 100.0),
        ("compiling (s)", compile_s(base), compile_s(winner)),
        at_end("peak memory (MiB)", "peak_memory_mib"),
        at_end(f"{unit} per joule", "samples_per_j"),
    ]
    return [row for row in rows if row[1] is not None or row[2] is not None]


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == round(value) and abs(value) >= 10 else rounded(float(value))


def _steps(context: ReportContext, files: Files, base: TrialRecord, winner: TrialRecord) -> Html:
    """Return the parts of a step, in seconds per 1,000 samples, as a sentence and a figure."""
    theirs, mine = per_thousand(base), per_thousand(winner)
    if not theirs or not mine:
        return note("The parts of a step were not recorded for both.")
    saved = {part: theirs.get(part, 0.0) - mine.get(part, 0.0) for part in _parts(base, winner)}
    columns = ["part", "baseline_s_per_1000_samples", "winner_s_per_1000_samples"]
    files.csv(
        "step",
        pd.DataFrame([[part, theirs.get(part), mine.get(part)] for part in saved], columns=columns),
    )
    # The part that saves or costs most is named only if the difference in speed is beyond the
    # noise.
    before, after = sum(theirs.values()), sum(mine.values())
    scale, scale_unit = (1.0, "seconds") if before >= 5 else (1000.0, "milliseconds")
    sentence = f"1,000 {context.unit} take {secs(after)} of training instead of {secs(before)}"
    if _differ_in_speed(context, base, winner):
        most = max(saved, key=lambda part: saved[part] * (before - after))
        sentence += (
            f"; most is {'saved' if after < before else 'lost'} in {_part(context, most)},"
            f" {secs(abs(saved[most]))}"
        )
    scaled = [{part: spent * scale for part, spent in of.items()} for of in (theirs, mine)]
    figure = files.chart(
        "step",
        lambda: _step(
            context,
            scaled[0],
            scaled[1],
            f"{scale_unit} per 1,000 {context.unit}",
            context.highlights.winner_is,
        ),
        "parts of a training step, baseline and winner",
        f"By {context.unit} and not by steps, because batch sizes may differ; over the last"
        " interval of each.",
    )
    return join(el("h3", "Where a step goes"), el("p", f"{sentence}."), figure)


def _differ_in_speed(context: ReportContext, base: TrialRecord, winner: TrialRecord) -> bool:
    """Whether their throughputs differ by more than the noise of one run; False if that noise is
    unknown."""
    speed, of_base, scatter = rate(winner), rate(base), _noise(context, RATE)
    return (
        scatter is not None
        and bool(speed and of_base)
        and scatter.differ(speed or 0.0, of_base or 0.0)
    )


# ---- figures
def _curves(results: Results, highlights: Highlights, decomposition: Why) -> Figure:
    """Draw the curves of baseline and winner against seconds and against samples, and mark equal
    values of both."""
    figure, panels = sheet(2, 3.5, sharey=True)
    for axes, along, words, place, values in (
        (
            panels[0],
            results.clock.along,
            results.clock.seconds,
            decomposition.seconds,
            decomposition.at_seconds,
        ),
        (
            panels[1],
            "samples",
            f"{results.unit} seen",
            float(decomposition.equal_samples),
            decomposition.at_samples,
        ),
    ):
        for trial, color, role in highlights.pairs():
            line = curve(trial, results.metric, along)
            axes.plot(
                *zip(*line, strict=True),
                color=color,
                linewidth=1.8,
                marker="o",
                markersize=4,
                label=role,
            )
        if values is not None:
            axes.axvline(place, color=SOFT, linewidth=0.9, linestyle=DASHED, zorder=0)
            both = sorted(zip(values, (BASELINE, WINNER), strict=True), reverse=True)
            # Labels go where curves leave space: for falling curves to the upper right and the
            # lower left, for rising ones to the upper left and the lower right.
            sides = (("left", 7), ("right", -7)) if results.falls else (("right", -7), ("left", 7))
            for (value, color), (side, shift), up in zip(both, sides, (7, -7), strict=True):
                ring(axes, (place, value), color)
                annotate(axes, number(value), (place, value), (shift, up), ha=side, va="bottom" if up > 0 else "top",
                    color=color, fontsize=9, fontweight="bold")  # fmt: skip
        axes.set_xlabel(words)
        axes.margins(x=0.12, y=0.12)
        axes.set_xlim(left=0)
        plain_numbers(axes)
    panels[0].set_title(f"at equal seconds ({secs(decomposition.seconds)})")
    equal = "" if decomposition.at_samples is not None else ": not known"
    panels[1].set_title(f"at equal {results.unit} ({decomposition.equal_samples:,}){equal}")
    objective_axis(panels[0], results, results.ratios)
    panels[1].grid(True, axis="y")
    legend(figure)
    return figure


def _step(
    context: ReportContext,
    baseline: Mapping[str, float],
    winner: Mapping[str, float],
    unit: str,
    winner_is: str,
) -> Figure | None:
    """Draw the parts of a step of baseline and winner as pairs of bars, in `unit`; None if all are
    0."""
    parts = list(dict.fromkeys([*baseline, *winner]))
    if not any(baseline.values()) and not any(winner.values()):
        return None
    figure, (axes,) = sheet(1, 0.7 + 0.42 * len(parts))
    for values, color, role, shift in (
        (baseline, BASELINE, "baseline", -0.19),
        (winner, WINNER, winner_is, 0.19),
    ):
        lengths = [values.get(part, 0.0) for part in parts]
        axes.barh(
            [place + shift for place in range(len(parts))],
            lengths,
            height=0.33,
            color=color,
            label=role,
        )
        for place, length in enumerate(lengths):
            annotate(axes, number(length), (length, place + shift), (4, 0), fontsize=8, color=color)
    axes.set_yticks(range(len(parts)), [_part(context, part) for part in parts])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * max([*baseline.values(), *winner.values()]))
    axes.set_xlabel(unit)
    axes.grid(True, axis="x")
    legend(figure)
    return figure
