"""What won: the answer, confirmed where it was, else as far as one run each goes; and what both have shown."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd
from PIL import Image

from tunediff import config as cfg
from tunediff.analysis import RATE, confirmation, last, shown, without_seed
from tunediff.analysis.comparison import Comparison, speedup_values
from tunediff.analysis.confirmation import Confirmation
from tunediff.analysis.evidence import UNTOLD
from tunediff.analysis.statistics import BETTER
from tunediff.core.text import number, pluralize
from tunediff.core.trial_record import TrialRecord
from tunediff.report.context import ReportContext, lead, marked, note, ruler
from tunediff.report.files import Files
from tunediff.report.html import Html, breakable, el, join, picture, table
from tunediff.report.verdicts import INTERVALS, confirmation_table, noise_words, sentences, unmoved_words
from tunediff.report.words import OPEN, duration, interval, percent, rounded, secs, with_sd

MOST_NAMES = 8
"""Of trials in a sentence."""


# ----------------------------------------------------------------------------------------------------------- the answer
def won(subject: ReportContext, files: Files) -> Html:
    """The answer, and what the winner changes."""
    winner = subject.stars.winner
    if winner is None:
        return lead(_nothing_won(subject))
    parts: list[object] = []
    if subject.told is not None:
        first, *more = sentences(subject.told)
        parts += [lead(first), *(el("p", sentence) for sentence in more), _confirmation(subject.told, files)]
    elif subject.compared is not None:
        parts.append(lead(*_best_of_seeds(subject, subject.compared, winner)))
    else:
        parts.append(lead(*_single(subject, winner)))
        parts += [*(el("p", said) for said in [_as_good(subject)] if said), note(_luck(subject))]
        files.csv("won", pd.DataFrame([_row(subject, trial, what) for trial, _, what in subject.stars.pairs()]))
    if subject.confirming:
        parts.append(note(subject.confirming))
    if remark := unmoved_words(subject.found):
        parts.append(el("p", remark))
    if subject.rival is not None and (changed := without_seed(subject.found.changed(winner))):
        parts += [el("h3", f"What {subject.leader} changes"), _changed(subject, winner, changed)]
    return join(*parts)


def _nothing_won(subject: ReportContext) -> str:
    trials = subject.found.trials
    begun = [trial for trial in trials if not trial.finished]
    ended = len(trials) - len(begun)
    if not trials:
        return "No trial has begun yet."
    if not begun:
        who = f"none of the {pluralize(ended, 'trial')} that ended has a result"
        return f"Nothing won: {who}; the reasons are under failures."
    farthest = max(begun, key=lambda trial: last(trial, trial.along) or 0.0)
    said = f"No trial has a result yet: {pluralize(len(begun), 'trial is', 'trials are')} under way"
    if seconds := last(farthest, farthest.along):
        said += f", {farthest.name} farthest, at {number(seconds)} of {duration(subject.budget_s)}"
    return f"{said}, and {ended} ended without one." if ended else f"{said}."


def _single(subject: ReportContext, winner: TrialRecord) -> list[object]:
    """The result of a search with one run per configuration."""
    metric, base, others = subject.found.metric, subject.stars.baseline, len(subject.found.ranked) - 1
    value, of_base = winner.value(metric) or 0.0, base.value(metric) if base is not None else None
    if base is not None and subject.rival is None:
        itself = el("span", f"The baseline ({base.name})", class_="baseline")
        if not others:
            so_far = "" if subject.over else " so far"
            alone = f" is the only trial with a result{so_far}: {subject.label} {number(value)}."
            return [itself, f"{alone} {subject.unfinished}".rstrip()]
        rest = "the other trial does not beat" if others == 1 else f"none of {others:,} other trials beats"
        mean = subject.known.values.get(base.name, value)
        runs = "" if mean == value else " (mean of its runs)"
        return [itself, f" itself is best: {rest} its {subject.label} of {number(mean)}{runs}."]
    spent = f"{number(float(winner.points[-1][winner.along]))} {subject.found.clock.seconds}"
    after = f"after {spent} its {subject.label} is"
    is_ = f"{rounded(value)} {subject.unit}/s" if subject.found.by_rate else f"{after} {number(value)}"
    better = subject.known.better(winner)
    said: list[object] = [el("span", winner.name, class_="winner"), f" is {'best' if better else 'ahead'}: {is_}"]
    if none := subject.found.no_baseline(winner):
        return [*said, f"; how much better or faster that is than the baseline is not determined: {none}."]
    if base is None or of_base is None or (subject.found.ratios and not of_base):
        return [*said, "; the baseline's result has no ratio to compare it with."]
    itself = el("span", f"the baseline ({base.name})", class_="baseline")
    if not better:
        which = UNTOLD if better is False else "whether that is more than noise is not known"
        return [*said, f" beside the {rounded(of_base)} of ", itself, f": {which}."]
    if subject.found.by_rate:
        return [*said, f", {number(value / of_base)} times the {rounded(of_base)} of ", itself, "."]
    by = percent(abs(1 - value / of_base)) if subject.found.ratios else number(abs(value - of_base))
    said += [f", {by} {'below' if value < of_base else 'above'} the {number(of_base)} of ", itself, "."]
    if subject.crossing_s:
        ratio = base.points[-1][base.along] / subject.crossing_s
        when = f"after {secs(subject.crossing_s)}: {number(ratio)}"
        if subject.crosses_before_first:
            when = f"before its first evaluation, at {secs(subject.crossing_s)}: at least {number(ratio)}"
        said.append(f" It is as good as the baseline at its end {when} times faster.")
    return said


def _best_of_seeds(subject: ReportContext, compared: Comparison, winner: TrialRecord) -> list[object]:
    group = compared.of(winner)
    values, difference = group.values(compared.metric), group.difference
    name = el("span", group.name, class_="winner" if group.changed else "baseline")
    reached = f"{subject.label} {with_sd(values)} over {pluralize(len(values), 'seed')}"
    if not group.changed:
        return ["No configuration is shown to be better than the ", name, f": {reached}."]
    said: list[object] = [name, f" is best: {reached}"]
    if difference.verdict != BETTER:
        return [*said, f" ({difference.verdict})."]
    if (known := interval(difference, compared.ratios)) != OPEN:
        said.append(f", {known} {'times' if compared.ratios else 'beside'} the baseline's")
    return [*said, ". That is better than the baseline by more than the noise, all comparisons counted."]


def _as_good(subject: ReportContext) -> str:
    """Which other trials lie within the noise of the best; '' where there are none, or it is not known."""
    near = [one.name for one in subject.known.near if not subject.known.is_baseline(one)]
    more = f" and {len(near) - MOST_NAMES} more" if len(near) > MOST_NAMES else ""
    return (
        f"Within the noise of the best, and so perhaps as good: {', '.join(near[:MOST_NAMES])}{more}." if near else ""
    )


def _luck(subject: ReportContext) -> str:
    ended, many = len(subject.found.ranked), ""
    if ended > 2:
        many = f"the best of {ended:,} is partly the luckiest"
    if subject.noise is None:
        said = f"One run each: nothing here says how much of that is chance{f', and {many}' if many else ''}. "
    else:
        said = f"Noise: {noise_words(subject.noise, subject.label)}{f'; {many}' if many else ''}. "
    if subject.confirming:
        return said
    if subject.found.space.confirm is not None:
        why = confirmation.nothing_to_confirm(subject.found)
        return f"{said}Nothing to confirm: {why}." if why and subject.over else f"{said}Nothing is confirmed yet."
    if subject.found.space.kind == "search" and not subject.found.by_rate:
        return said + "A search file with confirm: runs the best again on new seeds and says whether they still win."
    again = "runs every configuration several times and compares by the noise between them."
    return f"{said}A search file with seeds: {again}"


def _confirmation(told: Confirmation, files: Files) -> Html:
    """The confirming runs as a table."""
    files.csv("won", told.table())
    header, *rows = confirmation_table(told, compact=False)
    how = f"Runs made after the choice, on seeds that had no part in it. {INTERVALS}. "
    return join(
        el("h3", "On new seeds"),
        table(header, rows, marked(told.compared, told.winner), words=2, stacks=True),
        note(how, files.links("won")),
    )


def _changed(subject: ReportContext, winner: TrialRecord, changed: dict[str, object]) -> Html:
    base, order = cfg.flat(subject.found.space.baseline), subject.by_weight()
    rows = []
    for name in sorted(changed, key=lambda name: order.index(name) if name in order else len(order)):
        idle = winner.not_effective.get(name)
        before = el("span", shown(base[name]) if name in base else "–", class_="baseline")
        mine = el("span", shown(changed[name]), class_="winner")
        rows.append(
            [el("code", breakable(name)), before, join(mine, f" (changes nothing here: {idle})" if idle else "")]
        )
    return table(["knob", "baseline", subject.stars.winner_is], rows, words=3)


def _row(subject: ReportContext, trial: TrialRecord, what: str) -> dict[str, object]:
    measured = {name: last(trial, name) for name in ("train_s", "device_s", "samples", RATE, "peak_memory_mib")}
    value = {"what": what, "trial": trial.name, subject.found.metric: trial.value(subject.found.metric)}
    sooner = speedup_values(subject.known.speedup(trial))
    return {**measured, **value, **{name: sooner[name] for name in ("speedup", "speedup_at_least")}}


# ------------------------------------------------------------------------------------------------------------- pictures
LARGEST = 1024
"""Pixels per side of a picture inside the page."""


def samples(subject: ReportContext, files: Files) -> Html | None:
    """What the last evaluation of both has shown as `samples`; None where the workload shows nothing."""
    if subject.found.by_rate or not subject.stars.pairs():
        return None
    grids, missing = list[Html](), list[str]()
    for trial, _, what in subject.stars.pairs():
        who, kind = f"{what} ({trial.name})", subject.mark(trial)
        if (image := _grid(subject.found.folder / "trials" / trial.name / "samples.png")) is None:
            missing.append(who)
            continue
        files.keep(f"{kind}_samples.png", image)
        at = f" after {secs(trial.points[-1]['train_s'])} of training. " if trial.points else ". "
        caption = el("figcaption", el("span", who, class_=kind), at, files.links(f"{kind}_samples"))
        grids.append(el("figure", picture("png", image, f"samples of the {what}"), caption))
    if not grids:
        return None
    none = f"No picture is kept of {' and '.join(missing)}." if missing else ""
    ends = [last(trial, trial.along) for trial, _, _ in subject.stars.pairs() if trial.points]
    equal = f", after equal {subject.found.clock.seconds}" if len(grids) == 2 and max(ends) < 1.05 * min(ends) else ""
    said = f"From the last evaluation of each{equal}."
    how = f"{measured}. {none}" if (measured := ruler(subject.found)) else none
    return join(lead(said), el("div", *grids, class_="pair"), note(how) if how else None)


def _grid(path: Path) -> bytes | None:
    """The picture of a trial, written anew: a file from elsewhere is decoded as pixels and as nothing else."""
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
