"""The sections of a page: what each says, as blocks that the template lays out.

A section is a list of blocks; an empty one is left out. Facts come from `tunediff.analysis` and
the `Result`, sentences from `sentences`, figures from `charts`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from tunediff import config as cfg
from tunediff.analysis import RATE, curve, disturbed, last, noise, shown, speed
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.importance import ENOUGH, searched
from tunediff.analysis.pareto import trade_offs as fronts_of
from tunediff.analysis.speed import Why
from tunediff.analysis.speed import why as decompose
from tunediff.core import text
from tunediff.core.text import number, percent, pluralize, rounded, secs, times
from tunediff.core.trial_record import TrialRecord
from tunediff.report import charts, sentences
from tunediff.report.context import ReportContext, protocol
from tunediff.report.text import candidates_table

Block = dict[str, Any]
"""A part of a section: `kind` (lead, p, note, h3, pre, figure, table …) and what it holds."""
LARGEST = 1024
"""Maximum pixels per side of a picture in the page."""


def block(kind: str, content: object = "", **more: Any) -> Block:
    return {"kind": kind, "text": content, **more}


def table(
    rows: Sequence[Sequence[object]], marks: Sequence[str] = (), words: int = 1, **more: Any
) -> Block:
    """Return a table. rows: the headings first. marks: the CSS class of each row. words: how many
    columns hold text; the others are aligned as numbers."""
    return block("table", head=rows[0], rows=rows[1:], marks=marks, words=words, **more)


def figure(name: str, build: charts.Build, alt: str, caption: str = "") -> Block:
    """Return a figure, which the page draws; `alt`: for screen readers."""
    return block("figure", caption, name=name, build=build, alt=alt)


# ---- the result
def result(about: ReportContext) -> list[Block]:
    """Return the verdict, its curves, what the winner changes, and all that stands behind it."""
    results, tested, found = about.results, about.tested, about.result
    first, *more = found.summary
    machines = f" Measured on {' and '.join(found.workers)}." if found.workers else ""
    blocks = [block("lead", first), *_curves_of_verdict(about)]
    blocks.append(block("note", f"{_objective(about)}{machines}"))
    winner, base = about.highlights.winner, cfg.flat(results.space.baseline)
    changed = results.changed(winner) if winner is not None else {}
    if winner is not None and changed and about.highlights.baseline is not None:
        order = [*(name for name in about.by_weight() if name in changed), *changed]
        rows: list[list[object]] = [["knob", "baseline", about.highlights.winner_is]]
        for name in dict.fromkeys(order):
            idle = winner.not_effective.get(name)
            remark = f" (changes nothing here: {idle})" if idle else ""
            before = shown(base[name]) if name in base else "–"
            rows.append([name, before, f"{shown(changed[name])}{remark}"])
        blocks.append(block("h3", f"What {about.best_words} changes"))
        blocks.append(table(rows, words=3, code=True))
    said = [*more, about.confirming, *_next(about)]
    blocks += [block("p", sentence) for sentence in said if sentence]
    if tested is not None:
        heading = "On new seeds" if found.confirmations else "All configurations over their seeds"
        rows_of = candidates_table(found.counts)
        marks = [
            "baseline"
            if not one.configuration
            else "winner"
            if one.name == getattr(about.leader, "name", None)
            else ""
            for one in found.counts.candidates
        ]
        blocks += [block("h3", heading), table(rows_of, marks, words=2, stacks=True)]
        blocks.append(block("note", sentences.INTERVALS))
    return blocks


def _curves_of_verdict(about: ReportContext) -> list[Block]:
    """Return the figure of the runs that the verdict rests on."""
    tested, results, best = about.tested, about.results, about.leader
    if tested is None or not _has_means(tested):
        return _all_trials(about)
    of = "On new seeds: mean" if tested.search is not None else "Mean over the seeds"
    return [
        figure(
            "means",
            lambda: charts.of_candidates(tested, best, results.clock.seconds, results.title),
            "objective against seconds",
            f"{of}, and ± one standard deviation.",
        )
    ]


def _has_means(tested: Comparison) -> bool:
    curves = (len(one.curve(tested.objective)) for one in tested.candidates)
    return not tested.results.by_rate and max(curves, default=0) > 1


def _all_trials(about: ReportContext) -> list[Block]:
    results, name = about.results, about.results.curve_quantity.name
    if not any(len(curve(trial, name)) > 1 for trial in results.trials):
        return []
    alt = f"{results.curve_quantity.title} against {results.clock.seconds}, all trials"
    return [
        figure(
            "curves",
            lambda: charts.of_trials(results, about.highlights),
            alt,
            f"A line for each of {pluralize(len(results.trials), 'trial')}.",
        )
    ]


def _objective(about: ReportContext) -> str:
    """Return a sentence on what the objective is and how it was measured."""
    results, unit = about.results, about.results.unit
    if results.by_rate:
        return (
            f"{unit}/s: {unit} trained per second, waiting for {unit} included and compilation not."
        )
    quantity = results.quantity(results.metric)
    until = f"{results.clock.seconds} until {results.target}" if results.by_time else ""
    details = [
        until or (quantity.label if quantity.label != results.title else ""),
        protocol(results),
        f"{'lower' if results.lower_is_better else 'higher'} is better",
        "" if until else quantity.meaning,
    ]
    return f"{results.title}: {'; '.join(filter(None, details))}."


def _next(about: ReportContext) -> list[str]:
    """Return which command tests the result of one run each."""
    results, space = about.results, about.results.space
    if about.tested is not None or about.confirming or about.highlights.winner is None:
        return []
    if space.kind != "search" or results.by_rate or space.confirm is not None:
        return []
    again = text.command("search", "--resume", about.name, "--confirm", "1", storage=about.storage)
    return [f"{again} runs the best again on new seeds and tests them against the baseline."]


def curves(about: ReportContext) -> list[Block]:
    """Return the curves of all trials, where the result shows others."""
    tested = about.tested
    return _all_trials(about) if tested is not None and _has_means(tested) else []


# ---- why
def why(about: ReportContext) -> list[Block]:
    """Compare baseline and winner: a gain is split into speed and learning per sample."""
    results, evidence = about.results, about.evidence
    base, winner = about.highlights.baseline, about.highlights.rival
    prints = cfg.is_command(results.space.workload.name)  # of which no number is a sample
    if base is None or winner is None or not base.points or prints:
        return []
    better, parts, blocks = evidence.better(winner), None, list[Block]()
    if better and not (results.by_rate or results.by_time):
        parts = decompose(base, winner, results.metric, results.space.mode, results.ratios)
    rates = speed.rate(base), speed.rate(winner)
    if not better:
        nothing = "No significant difference is there to explain."
        lead = nothing if better is False else "Whether there is a difference is not known."
    elif parts is None:
        both = f"{rounded(rates[1])} {results.unit}/s instead of {rounded(rates[0])}"
        known = rates[0] and rates[1]
        ratio = number(rates[1] / rates[0]) if rates[0] and rates[1] else ""
        lead = (
            f"{both}, {ratio} times as fast." if known else "Throughput was not measured for both."
        )
    else:
        split = parts
        confirmed = evidence.confirmation
        scatter = noise.measured(results, confirmed.results if confirmed is not None else None)
        equal = (
            scatter is not None
            and split.at_samples is not None
            and not scatter.differ(*split.at_samples)
        )
        trust = "one run each" if about.tested is None else "these two are runs of one seed"
        if disturbed(base) or disturbed(winner):
            trust += f", and {sentences.OTHERS}"
        lead = sentences.why(
            split, results.title, results.unit, results.clock.seconds, equal, trust
        )
        caption = (
            f"The gap at equal {results.unit} is learning; what the gap at equal seconds"
            " has beyond it is"
            f" speed. Values at equal {results.unit} are interpolated between two evaluations."
        )
        blocks = [
            figure(
                "why_curves",
                lambda: charts.of_why(results, about.highlights, split),
                "baseline and winner against seconds and samples",
                caption,
            )
        ]
    head = ["", f"baseline ({base.name})", f"{about.highlights.winner_is} ({winner.name})", "ratio"]
    cells = [
        [name, rounded(a) or "–", rounded(b) or "–", times(b / a) if a and b else ""]
        for name, a, b in _quantities(about, base, winner, parts)
        if a is not None or b is not None
    ]
    return [block("lead", lead), *blocks, table([head, *cells])]


def _quantities(
    about: ReportContext, base: TrialRecord, winner: TrialRecord, parts: Why | None
) -> list[tuple[str, float | None, float | None]]:
    """Return all quantities that the baseline or the winner has, with both values."""
    results, label, unit = about.results, about.results.title, about.results.unit

    def at_end(words: str, name: str, scale: float = 1.0) -> tuple[str, float | None, float | None]:
        values = (last(trial, name) for trial in (base, winner))
        a, b = (None if value is None else float(value) * scale for value in values)
        return words, a, b

    at = [] if parts is None else [
        (f"{label} at equal seconds ({secs(parts.seconds)})", *parts.at_seconds),
        (f"{label} at equal {unit} ({parts.equal_samples:,})", *(parts.at_samples or (None, None))),
        (f"{unit} seen by then", *parts.samples),
    ]  # fmt: skip
    ends = [point for trial in (base, winner) for point in trial.points[-1:]]
    spent = dict.fromkeys(part for point in ends for part in point.phases_s)
    of_step = {part: results.quantity(f"step_{part}_s").label for part in spent}
    of_step |= {p: p.replace("_", " ") for p, words in of_step.items() if words == f"step_{p}_s"}
    has_steps = any(last(trial, "samples") for trial in (base, winner))
    per_step = (f"{unit} per step", speed.samples_per_step(base), speed.samples_per_step(winner))
    return [
        *at,
        at_end(f"{unit}/s, last interval", RATE),
        *([at_end("optimizer steps", "steps"), per_step] if has_steps else []),
        at_end("time of a step (ms)", "step_s", 1000.0),
        *(at_end(f"· {words} (ms)", f"step_{part}_s", 1000.0) for part, words in of_step.items()),
        at_end(f"time waiting for {unit} (%)", "data_wait_share", 100.0),
        at_end("MFU: FLOP/s over the fastest matrix product's here (%)", "peak_share", 100.0),
        ("compiling (s)", speed.compile_s(base), speed.compile_s(winner)),
        at_end("peak memory (MiB)", "peak_memory_mib"),
    ]  # fmt: skip


# ---- samples
def samples(about: ReportContext) -> list[Block]:
    """Return the samples of the last evaluation of baseline and winner."""
    grids = []
    for trial, _, role in about.highlights.pairs() if not about.results.by_rate else ():
        image = _picture(about.results.folder / "trials" / trial.name / "samples.png")
        after = f"{role} ({trial.name}) after {secs(last(trial, 'train_s') or 0.0)} of training."
        if image is not None:
            grids.append(block("picture", after, png=image, alt=f"samples of the {role}"))
    notes = [block("note", f"{measured}.")] if (measured := protocol(about.results)) else []
    return (
        [block("lead", "From the last evaluation of each."), block("pair", parts=grids), *notes]
        if grids
        else []
    )


def _picture(path: Path) -> bytes | None:
    """Return the picture of a trial as PNG, None if it is missing or unreadable.

    It is decoded and encoded again, so that the page contains pixels and nothing else.
    """
    try:
        with Image.open(path, formats=["PNG"]) as image:
            pixels = image.convert("L" if image.mode in ("1", "L") else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    pixels.thumbnail((LARGEST, LARGEST))
    pixels.save(written := io.BytesIO(), format="PNG", optimize=True)
    return written.getvalue()


# ---- knobs
def importance(about: ReportContext) -> list[Block]:
    """Return the share of each knob in the variance; nothing for a ladder and without results."""
    results = about.results
    if not searched(results) or not results.ranked or results.space.kind == "ladder":
        return []
    both = {results.title: about.quality, f"{results.unit}/s": about.throughput}
    scores = {label: one for label, one in both.items() if one is not None}
    if not scores:
        needed = (
            f"Knob importance needs at least {ENOUGH} trials with a result and a knob that varies"
        )
        return [block("lead", f"{needed}; there are {len(results.ranked)}.")]
    names = dict.fromkeys(name for one in scores.values() for name in one.shares)
    head = ["knob", *(f"share of {label}" for label in scores)]
    rows = [
        [
            name,
            *(percent(one.shares[name]) if name in one.shares else "–" for one in scores.values()),
        ]
        for name in names
    ]
    unvaried = ", ".join(next(iter(scores.values())).unvaried)
    note = (
        "fANOVA: the part of the variance that a random forest over all trials attributes to a knob"
        " alone; the rest to 100 % belongs to combinations of knobs."
    )
    note += f" One value in all trials: {unvaried}." if unvaried else ""
    most = f"Differences come most from {next(iter(names))}." if names else "No knob varies."
    return [block("lead", most), table([head, *rows]), block("note", note)]


def effects(about: ReportContext) -> list[Block]:
    """Return a dot for every trial at its value of each knob; nothing with few results."""
    results = about.results
    stable = [outcome for outcome in results.outcomes if not outcome.failures]
    trials = [run for outcome in stable for run in outcome.samples if run in outcome.done]
    values = {
        name: {repr(run.drawn[name]) for run in trials if name in run.drawn}
        for name in about.by_weight()
    }
    names = [name for name, found in values.items() if len(found) > 1][: charts.MOST_PANELS]
    if len(trials) < ENOUGH or results.space.kind == "ladder" or not names:
        return []
    return [
        figure(
            "effects",
            lambda: charts.of_knobs(results, about.highlights, trials, names),
            "every trial over its value of each knob",
            "A dot is a trial that ended with a value, whatever its other knobs.",
        )
    ]


def trade_offs(about: ReportContext) -> list[Block]:
    """Return the Pareto fronts; nothing with fewer than two results."""
    if len(about.results.ranked) < 2:
        return []
    frame = fronts_of(about.results)
    return [
        figure(
            "trade_offs",
            lambda: charts.of_fronts(about.results, frame, about.highlights),
            "the objective against speed and memory",
            "Rings: Pareto-optimal trials, which no other trial beats in both quantities.",
        )
    ]
