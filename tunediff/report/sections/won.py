"""Show the result of a search: the best configuration, its confirmation, what it changes, and its samples."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd
from PIL import Image

from tunediff import config as cfg
from tunediff.analysis import RATE, last, shown, without_seed
from tunediff.analysis.comparison import Comparison, speedup_values
from tunediff.analysis.confirmation import Confirmation, nothing_to_confirm
from tunediff.analysis.evidence import NOT_SIGNIFICANT
from tunediff.analysis.statistics import BETTER
from tunediff.core.text import number, pluralize
from tunediff.core.trial_record import TrialRecord
from tunediff.report.context import ReportContext, lead, marked, note, protocol
from tunediff.report.files import Files
from tunediff.report.html import Html, breakable, el, join, picture, table
from tunediff.report.verdicts import INTERVALS, caution_words, confirmation_table, noise_words, sentences, unmoved_words
from tunediff.report.words import OPEN, duration, interval, percent, rounded, secs, with_sd

MOST_NAMES = 8
"""Maximum number of trial names in a sentence."""


# ----------------------------------------------------------------------------------------------------------- the answer
def won(context: ReportContext, files: Files) -> Html:
    """Return the section with the result and what the winner changes."""
    winner = context.highlights.winner
    if winner is None:
        return lead(_no_result(context))
    # The strongest evidence first: confirming runs, then several seeds, then one run each.
    parts: list[object] = []
    if context.confirmation is not None:
        first, *more = sentences(context.confirmation)
        parts += [lead(first), *(el("p", sentence) for sentence in more), _confirmation(context.confirmation, files)]
    elif context.compared is not None:
        parts.append(lead(*_best_of_seeds(context, context.compared, winner)))
    else:
        parts.append(lead(*_single(context, winner)))
        parts += [*(el("p", sentence) for sentence in [_as_good(context)] if sentence), note(_chance(context))]
        files.csv("won", pd.DataFrame([_row(context, trial, role) for trial, _, role in context.highlights.pairs()]))
    # Remarks, and the changed knobs.
    if context.confirming:
        parts.append(note(context.confirming))
    remarks = [unmoved_words(context.results), caution_words(context.evidence)]
    parts += [el("p", remark) for remark in remarks if remark]
    if context.rival is not None and (changed := without_seed(context.results.changed(winner))):
        parts += [el("h3", f"What {context.leader} changes"), _changed(context, winner, changed)]
    return join(*parts)


def _no_result(context: ReportContext) -> str:
    """Return the state of a search in which no trial has a result."""
    trials = context.results.trials
    begun = [trial for trial in trials if not trial.finished]
    ended = len(trials) - len(begun)
    if not trials:
        return "No trial has begun yet."
    if not begun:
        none_of = f"none of the {pluralize(ended, 'trial')} that ended has a result"
        return f"No result: {none_of}; the reasons are under Failures."
    farthest = max(begun, key=lambda trial: last(trial, trial.along) or 0.0)
    sentence = f"No trial has a result yet: {pluralize(len(begun), 'trial is', 'trials are')} under way"
    if seconds := last(farthest, farthest.along):
        sentence += f", {farthest.name} farthest, at {number(seconds)} of {duration(context.budget_s)}"
    return f"{sentence}, and {ended} ended without one." if ended else f"{sentence}."


def _single(context: ReportContext, winner: TrialRecord) -> list[object]:
    """Return the result of a search with one run per configuration, as parts of a sentence."""
    # The baseline itself is best, or the best trial.
    metric, base, others = context.results.metric, context.highlights.baseline, len(context.results.ranked) - 1
    value, of_base = winner.value(metric) or 0.0, base.value(metric) if base is not None else None
    if base is not None and context.rival is None:
        itself = el("span", f"The baseline ({base.name})", class_="baseline")
        if not others:
            so_far = "" if context.over else " so far"
            alone = f" is the only trial with a result{so_far}: {context.label} {number(value)}."
            return [itself, f"{alone} {context.unfinished}".rstrip()]
        rest = "the other trial does not beat" if others == 1 else f"none of {others:,} other trials beats"
        mean = context.evidence.values.get(base.name, value)
        runs = "" if mean == value else " (mean of its runs)"
        return [itself, f" itself is best: {rest} its {context.label} of {number(mean)}{runs}."]
    # Another trial leads: its value, then the comparison with the baseline as far as the noise allows one.
    spent = f"{number(float(winner.points[-1][winner.along]))} {context.results.clock.seconds}"
    after = f"after {spent} its {context.label} is"
    is_ = f"{rounded(value)} {context.unit}/s" if context.results.by_rate else f"{after} {number(value)}"
    better = context.evidence.better(winner)
    parts: list[object] = [el("span", winner.name, class_="winner"), f" is {'best' if better else 'ahead'}: {is_}"]
    if none := context.results.no_baseline(winner):
        return [*parts, f"; how much better or faster that is than the baseline is not determined: {none}."]
    if base is None or of_base is None or (context.results.ratios and not of_base):
        return [*parts, "; the baseline's result has no ratio to compare it with."]
    itself = el("span", f"the baseline ({base.name})", class_="baseline")
    if not better:
        which = NOT_SIGNIFICANT if better is False else "whether that is more than noise is not known"
        return [*parts, f" beside the {rounded(of_base)} of ", itself, f": {which}."]
    if context.results.by_rate:
        return [*parts, f", {number(value / of_base)} times the {rounded(of_base)} of ", itself, "."]
    by = percent(abs(1 - value / of_base)) if context.results.ratios else number(abs(value - of_base))
    parts += [f", {by} {'below' if value < of_base else 'above'} the {number(of_base)} of ", itself, "."]
    if context.crossing_s:
        ratio = base.points[-1][base.along] / context.crossing_s
        when = f"after {secs(context.crossing_s)}: {number(ratio)}"
        if context.crosses_before_first:
            when = f"before its first evaluation, at {secs(context.crossing_s)}: at least {number(ratio)}"
        parts.append(f" It is as good as the baseline at its end {when} times faster.")
    return parts


def _best_of_seeds(context: ReportContext, compared: Comparison, winner: TrialRecord) -> list[object]:
    """Return the result of a search with several seeds, as parts of a sentence."""
    group = compared.of(winner)
    values, difference = group.values(compared.metric), group.difference
    name = el("span", group.name, class_="winner" if group.changed else "baseline")
    reached = f"{context.label} {with_sd(values)} over {pluralize(len(values), 'seed')}"
    if not group.changed:
        return ["No configuration is shown to be better than the ", name, f": {reached}."]
    parts: list[object] = [name, f" is best: {reached}"]
    if difference.verdict != BETTER:
        return [*parts, f" ({difference.verdict})."]
    if (effect := interval(difference, compared.ratios)) != OPEN:
        parts.append(f", {effect} {'times' if compared.ratios else 'beside'} the baseline's")
    return [*parts, ". The difference from the baseline is significant at 5 %, corrected for all comparisons."]


def _as_good(context: ReportContext) -> str:
    """Return which other trials are within the noise of the best; '' if there are none or the noise is unknown."""
    near = [trial.name for trial in context.evidence.near if not context.evidence.is_baseline(trial)]
    more = f" and {len(near) - MOST_NAMES} more" if len(near) > MOST_NAMES else ""
    return (
        f"Within the noise of the best, and so possibly as good: {', '.join(near[:MOST_NAMES])}{more}." if near else ""
    )


def _chance(context: ReportContext) -> str:
    """Return how much of the result may be chance, and which search would test it."""
    ended, many = len(context.results.ranked), ""
    if ended > 2:
        many = f"the best of {ended:,} is biased by its selection"
    if context.noise is None:
        sentence = f"One run each: how much of that is chance is unknown{f', and {many}' if many else ''}. "
    else:
        sentence = f"Noise: {noise_words(context.noise, context.label)}{f'; {many}' if many else ''}. "
    if context.confirming:
        return sentence
    if context.results.space.confirm is not None:
        why = nothing_to_confirm(context.results)
        return (
            f"{sentence}Nothing to confirm: {why}." if why and context.over else f"{sentence}Nothing is confirmed yet."
        )
    if context.results.space.kind == "search" and not context.results.by_rate:
        return (
            sentence
            + "A search file with confirm: runs the best again on new seeds and tests them against the baseline."
        )
    again = "runs every configuration several times and compares by the noise between them."
    return f"{sentence}A search file with seeds: {again}"


def _confirmation(confirmation: Confirmation, files: Files) -> Html:
    """Return the table of the confirming runs."""
    files.csv("won", confirmation.table())
    header, *rows = confirmation_table(confirmation, compact=False)
    method = f"These runs were made after the selection, on seeds that it did not use. {INTERVALS}. "
    return join(
        el("h3", "On new seeds"),
        table(header, rows, marked(confirmation.compared, confirmation.winner), words=2, stacks=True),
        note(method, files.links("won")),
    )


def _changed(context: ReportContext, winner: TrialRecord, changed: dict[str, object]) -> Html:
    """Return a table of the changed knobs, the most important first."""
    base, order = cfg.flat(context.results.space.baseline), context.by_weight()
    rows = []
    for name in sorted(changed, key=lambda name: order.index(name) if name in order else len(order)):
        idle = winner.not_effective.get(name)
        before = el("span", shown(base[name]) if name in base else "–", class_="baseline")
        mine = el("span", shown(changed[name]), class_="winner")
        rows.append(
            [el("code", breakable(name)), before, join(mine, f" (changes nothing here: {idle})" if idle else "")]
        )
    return table(["knob", "baseline", context.highlights.winner_is], rows, words=3)


def _row(context: ReportContext, trial: TrialRecord, role: str) -> dict[str, object]:
    """Return the row of a trial in won.csv."""
    measured = {name: last(trial, name) for name in ("train_s", "device_s", "samples", RATE, "peak_memory_mib")}
    value = {"what": role, "trial": trial.name, context.results.metric: trial.value(context.results.metric)}
    speedup = speedup_values(context.evidence.speedup(trial))
    return {**measured, **value, **{name: speedup[name] for name in ("speedup", "speedup_at_least")}}


# ------------------------------------------------------------------------------------------------------------- pictures
LARGEST = 1024
"""Maximum pixels per side of a picture in the page."""


def samples(context: ReportContext, files: Files) -> Html | None:
    """Return the samples of the last evaluation of baseline and winner; None if the workload has none."""
    if context.results.by_rate or not context.highlights.pairs():
        return None
    grids, missing = list[Html](), list[str]()
    for trial, _, role in context.highlights.pairs():
        title, kind = f"{role} ({trial.name})", context.mark(trial)
        if (image := _grid(context.results.folder / "trials" / trial.name / "samples.png")) is None:
            missing.append(title)
            continue
        files.keep(f"{kind}_samples.png", image)
        at = f" after {secs(trial.points[-1]['train_s'])} of training. " if trial.points else ". "
        caption = el("figcaption", el("span", title, class_=kind), at, files.links(f"{kind}_samples"))
        grids.append(el("figure", picture("png", image, f"samples of the {role}"), caption))
    if not grids:
        return None
    none = f"No picture is kept of {' and '.join(missing)}." if missing else ""
    ends = [last(trial, trial.along) for trial, _, _ in context.highlights.pairs() if trial.points]
    equal = f", after equal {context.results.clock.seconds}" if len(grids) == 2 and max(ends) < 1.05 * min(ends) else ""
    sentence = f"From the last evaluation of each{equal}."
    method = f"{measured}. {none}" if (measured := protocol(context.results)) else none
    return join(lead(sentence), el("div", *grids, class_="pair"), note(method) if method else None)


def _grid(path: Path) -> bytes | None:
    """Return the picture of a trial as PNG, None if it is missing or unreadable.

    It is decoded and encoded again, so that the page contains pixels and nothing else that a file may hold.
    """
    try:
        with Image.open(path, formats=["PNG"]) as image:
            if max(image.size) > 8192:
                return None
            pixels = image.convert("L" if image.mode in ("1", "L") else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    pixels.thumbnail((LARGEST, LARGEST))
    written = io.BytesIO()
    pixels.save(written, format="PNG", optimize=True)
    return written.getvalue()
