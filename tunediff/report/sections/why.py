"""Why the winner is ahead: is it speed, or is it learning per sample? And where a step goes."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from tunediff.analysis import RATE, Results, curve, last, noise
from tunediff.analysis import why as decomposition
from tunediff.analysis.speed import batch_size, compile_s, per_thousand, rate
from tunediff.analysis.why import Why
from tunediff.core.clock import UNITS
from tunediff.core.point import one_of
from tunediff.core.text import number
from tunediff.core.trial_record import TrialRecord
from tunediff.report.context import ReportContext, lead, note
from tunediff.report.files import Files
from tunediff.report.html import BASELINE, WINNER, Html, el, join, table
from tunediff.report.style import DASHED, INK, SOFT, Highlights, legend, objective_axis, plain_numbers, ring, say, sheet
from tunediff.report.words import percent, rounded, secs, times

CAVEAT = (
    "Shares are of the {of} of both values. Equal {unit} are read from curves in the middle of a training, between two "
    "evaluations; schedules follow the budget, so that a training that was meant to end there would end better. "
)
Quantity = tuple[str, float | None, float | None]
"""Its name, and its value for the baseline and for the winner."""


def why(subject: ReportContext, files: Files) -> Html | None:
    """Baseline and winner beside each other; reasons only for what is more than noise."""
    found, base, winner = subject.found, subject.rival, subject.stars.winner
    if base is None or winner is None or not base.points:
        return None
    figure, told, unit, better = None, None, subject.unit, subject.known.better(winner)
    if (
        not found.by_rate
        and better
        and (told := decomposition.why(base, winner, found.metric, found.space.mode, found.ratios)) is not None
    ):
        split = told
        figure = files.chart(
            "why_curves",
            lambda: _curves(found, subject.stars, split),
            f"baseline and winner against {found.clock.seconds}, and against {unit}",
            f"What the clock sees, and the same curves by the {unit} they have seen. A gap at equal {unit} is "
            f"learning per {one_of(unit)}; what the one at equal seconds has beyond it is speed.",
        )
    words = subject.label, _trust(subject), unit, found.clock.seconds
    said = explain(told, *words) if told is not None else _faster(subject, base, winner)
    if not better:
        why_not = subject.known.speedup(winner)
        said = f"{'Whether there is anything' if better is None else 'Nothing is'} to be explained"
        said += f"{' is not known' * (better is None)}: {why_not}."
    rows = _side_by_side(subject, base, winner, told)
    files.csv("why", pd.DataFrame(rows, columns=["quantity", "baseline", "winner"]))
    header = ["", f"baseline ({base.name})", f"{subject.stars.winner_is} ({winner.name})", "ratio"]
    cells = [
        [name, _cell(theirs), _cell(mine), times(mine / theirs) if theirs and mine is not None else ""]
        for name, theirs, mine in rows
    ]
    of = "ratio's logarithm" if found.ratios else "difference"
    notes = note(CAVEAT.format(of=of, unit=unit) if told is not None else "", files.links("why"))
    return join(lead(said), figure, table(header, cells), notes, _steps(subject, files, base, winner))


def heading(subject: ReportContext) -> str:
    """`Why it is ahead` only of what is ahead by more than the noise."""
    winner = subject.stars.winner
    if winner is None or not subject.known.better(winner):
        return f"{subject.leader[:1].upper()}{subject.leader[1:]} beside the baseline"
    return "Why it wins" if subject.known.winner else "Why it is better"


def _trust(subject: ReportContext) -> str:
    disturbed = any(point.get("disturbed") is True for trial, _, _ in subject.stars.pairs() for point in trial.points)
    repeated = subject.told is not None or subject.compared is not None
    runs = "these two are runs of one seed" if repeated else "one run each"
    return f"{runs}, and others used the machine meanwhile" if disturbed else runs


def explain(told: Why, label: str, trust: str, unit: str, seconds: str = UNITS["wall"].seconds) -> str:
    """The decomposition as one sentence; `trust`: what is to be said about its noise; `unit`: of samples."""
    (base, winner), end = told.at_seconds, f"; {trust}."
    ratio = told.samples[1] / told.samples[0] if told.samples[0] else 1.0
    many = f"as many {unit}" if abs(ratio - 1) < 0.02 else f"{number(ratio)} times as many {unit}"
    at_end = f"{label} {number(winner)} instead of {number(base)} at {number(told.seconds)} {seconds}"
    if told.learning is None or told.throughput is None or told.at_samples is None:
        return (
            f"{at_end}; how much of that is speed cannot be told, for at {told.equal_samples:,} {unit}, the most that "
            f"both have seen, one of them had not been evaluated yet{end}"
        )
    same = f"{number(told.at_samples[1])} instead of {number(told.at_samples[0])} at {told.equal_samples:,} {unit}"
    if told.total >= 0:
        return f"In these two runs it is not ahead: {at_end}, {same}, with {many} in the same seconds{end}"
    learning, throughput = told.learning / told.total, told.throughput / told.total
    each = f"from each {one_of(unit)}"
    learned, sped = f"learning more {each} ({same})", f"speed ({many} in the same seconds)"
    if learning >= 0.02 and throughput >= 0.02:
        return f"Of the gain, {at_end}, {percent(learning)} is {learned} and {percent(throughput)} is {sped}{end}"
    if throughput <= -0.02:
        return f"All of the gain, {at_end}, is {learned}; in speed it loses ({many} in the same seconds){end}"
    if learning <= -0.02:
        return f"All of the gain, {at_end}, is {sped}; {each} it learns less ({same}){end}"
    if learning > 0.5:
        return f"Practically all of the gain, {at_end}, is {learned}, with {many} in the same seconds{end}"
    return f"Practically all of the gain, {at_end}, is {sped}; {each} both learn as much ({same}){end}"


def _faster(subject: ReportContext, base: TrialRecord, winner: TrialRecord) -> str:
    """By how much a throughput is higher; what of a step is faster is said beside its parts."""
    speed, of_base, unit = rate(winner), rate(base), subject.unit
    if not speed or not of_base:
        return "Throughput was not measured for both."
    return f"{rounded(speed)} {unit}/s instead of {rounded(of_base)}, {number(speed / of_base)} times as fast."


def _parts(base: TrialRecord, winner: TrialRecord) -> list[str]:
    """The parts of a step of either, in the order in which they first ended."""
    return list(
        dict.fromkeys(part for trial in (base, winner) for point in trial.points[-1:] for part in point.phases_s)
    )


def _part(subject: ReportContext, name: str) -> str:
    known = subject.found.quantity(f"step_{name}_s").label
    return known if known != f"step_{name}_s" else name.replace("_", " ")


def _side_by_side(subject: ReportContext, base: TrialRecord, winner: TrialRecord, told: Why | None) -> list[Quantity]:
    """Without the quantities that neither has."""

    def at_end(words: str, name: str, scale: float = 1.0) -> Quantity:
        theirs, mine = (None if (v := last(trial, name)) is None else float(v) * scale for trial in (base, winner))
        return words, theirs, mine

    rows, unit = list[Quantity](), subject.unit
    if told is not None:
        rows.append((f"{subject.label} at equal seconds ({secs(told.seconds)})", *told.at_seconds))
        rows.append((f"{subject.label} at equal {unit} ({told.equal_samples:,})", *(told.at_samples or (None, None))))
        rows.append((f"{unit} seen by then", *told.samples))
    rows += [
        at_end(f"{unit}/s", RATE),
        at_end("optimizer steps", "steps"),
        (f"{unit} per step", batch_size(base), batch_size(winner)),
        at_end("time of a step (ms)", "step_s", 1000.0),
        *(at_end(f"· {_part(subject, part)} (ms)", f"step_{part}_s", 1000.0) for part in _parts(base, winner)),
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


def _steps(subject: ReportContext, files: Files, base: TrialRecord, winner: TrialRecord) -> Html:
    theirs, mine = per_thousand(base), per_thousand(winner)
    if not theirs or not mine:
        return note("The parts of a step were not recorded for both.")
    saved = {part: theirs.get(part, 0.0) - mine.get(part, 0.0) for part in _parts(base, winner)}
    columns = ["part", "baseline_s_per_1000_samples", "winner_s_per_1000_samples"]
    files.csv("step", pd.DataFrame([[part, theirs.get(part), mine.get(part)] for part in saved], columns=columns))
    before, after = sum(theirs.values()), sum(mine.values())
    scale, scale_unit = (1.0, "seconds") if before >= 5 else (1000.0, "milliseconds")
    said = f"1,000 {subject.unit} take {secs(after)} of training instead of {secs(before)}"
    if _differ_in_speed(subject, base, winner):
        most = max(saved, key=lambda part: saved[part] * (before - after))
        said += f"; most is {'saved' if after < before else 'lost'} in {_part(subject, most)}, {secs(abs(saved[most]))}"
    scaled = [{part: spent * scale for part, spent in of.items()} for of in (theirs, mine)]
    figure = files.chart(
        "step",
        lambda: _step(subject, scaled[0], scaled[1], f"{scale_unit} per 1,000 {subject.unit}", subject.stars.winner_is),
        "parts of a training step, baseline and winner",
        f"By {subject.unit} and not by steps, because batch sizes may differ; over the last interval of each.",
    )
    return join(el("h3", "Where a step goes"), el("p", f"{said}."), figure)


def _differ_in_speed(subject: ReportContext, base: TrialRecord, winner: TrialRecord) -> bool:
    """Whether their throughputs differ by more than the noise of one run, which is known."""
    speed, of_base, told = rate(winner), rate(base), subject.told
    scatter = noise.measured(subject.found, told.compared.found if told is not None else None, RATE)
    return scatter is not None and bool(speed and of_base) and scatter.apart(speed or 0.0, of_base or 0.0)


# ------------------------------------------------------------------------------------------------------------- figures
def _curves(found: Results, stars: Highlights, told: Why) -> Figure:
    """Baseline and winner at equal seconds, and at equal samples."""
    figure, panels = sheet(2, 3.5, sharey=True)
    for axes, along, words, place, values in (
        (panels[0], found.clock.along, found.clock.seconds, told.seconds, told.at_seconds),
        (panels[1], "samples", f"{found.unit} seen", float(told.equal_samples), told.at_samples),
    ):
        for trial, color, what in stars.pairs():
            line = curve(trial, found.metric, along)
            axes.plot(*zip(*line, strict=True), color=color, linewidth=1.8, marker="o", markersize=4, label=what)
        if values is not None:
            axes.axvline(place, color=SOFT, linewidth=0.9, linestyle=DASHED, zorder=0)
            both = sorted(zip(values, (BASELINE, WINNER), strict=True), reverse=True)
            # Falling curves leave room to the upper right of one and to the lower left of the other; rising ones to the
            # upper left and the lower right.
            sides = (("left", 7), ("right", -7)) if found.falls else (("right", -7), ("left", 7))
            for (value, color), (side, shift), up in zip(both, sides, (7, -7), strict=True):
                ring(axes, (place, value), color)
                say(axes, number(value), (place, value), (shift, up), ha=side, va="bottom" if up > 0 else "top",
                    color=color, fontsize=9, fontweight="bold")  # fmt: skip
        axes.set_xlabel(words)
        axes.margins(x=0.12, y=0.12)
        axes.set_xlim(left=0)
        plain_numbers(axes)
    panels[0].set_title(f"at equal seconds ({secs(told.seconds)})")
    equal = "" if told.at_samples is not None else ": not known"
    panels[1].set_title(f"at equal {found.unit} ({told.equal_samples:,}){equal}")
    objective_axis(panels[0], found, found.ratios)
    panels[1].grid(True, axis="y")
    legend(figure)
    return figure


def _step(
    subject: ReportContext, baseline: Mapping[str, float], winner: Mapping[str, float], unit: str, winner_is: str
) -> Figure | None:
    """The parts of a step, baseline and winner beside each other, in `unit`."""
    parts = list(dict.fromkeys([*baseline, *winner]))
    if not any(baseline.values()) and not any(winner.values()):
        return None
    figure, (axes,) = sheet(1, 0.7 + 0.42 * len(parts))
    for values, color, what, shift in ((baseline, BASELINE, "baseline", -0.19), (winner, WINNER, winner_is, 0.19)):
        lengths = [values.get(part, 0.0) for part in parts]
        axes.barh([place + shift for place in range(len(parts))], lengths, height=0.33, color=color, label=what)
        for place, length in enumerate(lengths):
            say(axes, number(length), (length, place + shift), (4, 0), fontsize=8, color=color)
    axes.set_yticks(range(len(parts)), [_part(subject, part) for part in parts])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * max([*baseline.values(), *winner.values()]))
    axes.set_xlabel(unit)
    axes.grid(True, axis="x")
    legend(figure)
    return figure
