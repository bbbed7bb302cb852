"""Show the result of a search: the best configuration, its confirmation, what it changes, and its
samples."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd
from PIL import Image

from tunediff import config as cfg
from tunediff.analysis import RATE, last, shown
from tunediff.analysis.comparison import speedup_values
from tunediff.analysis.confirmation import Confirmation, nothing_to_confirm
from tunediff.analysis.outcome import without_seed
from tunediff.core.trial_record import TrialRecord
from tunediff.report import headline
from tunediff.report.context import ReportContext, lead, marked, note, protocol
from tunediff.report.files import Files
from tunediff.report.html import Html, breakable, el, join, picture, table
from tunediff.report.verdicts import (
    INTERVALS,
    confirmation_table,
    details,
    noise_words,
    unmoved_words,
)
from tunediff.report.words import secs

MOST_NAMES = 8
"""Maximum number of trial names in a sentence."""


# ---- the answer
def won(context: ReportContext, files: Files) -> Html:
    """Return the section with the result and what the winner changes."""
    winner = context.highlights.winner
    sentence = headline.parts(context.evidence, context.over)
    parts: list[object] = [
        lead(*(el("span", text, class_=role) if role else text for text, role in sentence))
    ]
    if winner is None:
        return join(*parts)
    if context.evidence.confirmation is not None:
        parts += [el("p", sentence) for sentence in details(context.evidence.confirmation)]
        parts.append(_confirmation(context.evidence.confirmation, files))
    elif context.evidence.compared is None:
        parts += [
            *(el("p", sentence) for sentence in [_as_good(context)] if sentence),
            note(_chance(context)),
        ]
        files.csv(
            "won",
            pd.DataFrame(
                [_row(context, trial, role) for trial, _, role in context.highlights.pairs()]
            ),
        )
    # Remarks, and the changed knobs.
    if context.confirming:
        parts.append(note(context.confirming))
    if remark := unmoved_words(context.results):
        parts.append(el("p", remark))
    if context.rival is not None and (changed := without_seed(context.results.changed(winner))):
        parts += [el("h3", f"What {context.leader} changes"), _changed(context, winner, changed)]
    return join(*parts)


def _as_good(context: ReportContext) -> str:
    """Return which other trials are within the noise of the best; '' if there are none or the noise
    is unknown."""
    near = [
        trial.name for trial in context.evidence.near if not context.evidence.is_baseline(trial)
    ]
    more = f" and {len(near) - MOST_NAMES} more" if len(near) > MOST_NAMES else ""
    return (
        "Within the noise of the best, and so possibly as good:"
        f" {', '.join(near[:MOST_NAMES])}{more}."
        if near
        else ""
    )


def _chance(context: ReportContext) -> str:
    """Return how much of the result may be chance, and which search would test it."""
    ended, many = len(context.results.ranked), ""
    if ended > 2:
        many = f"the best of {ended:,} is biased by its selection"
    if context.evidence.noise is None:
        sentence = (
            "One run each: how much of that is chance is"
            f" unknown{f', and {many}' if many else ''}. "
        )
    else:
        sentence = (
            "Noise:"
            f" {noise_words(context.evidence.noise, context.label)}{f'; {many}' if many else ''}. "
        )
    if context.confirming:
        return sentence
    if context.results.space.confirm is not None:
        why = nothing_to_confirm(context.results)
        return (
            f"{sentence}Nothing to confirm: {why}."
            if why and context.over
            else f"{sentence}Nothing is confirmed yet."
        )
    if context.results.space.kind == "search" and not context.results.by_rate:
        return (
            sentence
            + "A search file with confirm: runs the best again on new seeds and tests them against"
            " the baseline."
        )
    again = "runs every configuration several times and compares by the noise between them."
    return f"{sentence}A search file with seeds: {again}"


def _confirmation(confirmation: Confirmation, files: Files) -> Html:
    files.csv("won", confirmation.table())
    header, *rows = confirmation_table(confirmation, compact=False)
    method = (
        f"These runs were made after the selection, on seeds that it did not use. {INTERVALS}. "
    )
    return join(
        el("h3", "On new seeds"),
        table(
            header, rows, marked(confirmation.compared, confirmation.winner), words=2, stacks=True
        ),
        note(method, files.links("won")),
    )


def _changed(context: ReportContext, winner: TrialRecord, changed: dict[str, object]) -> Html:
    """Return a table of the changed knobs, the most important first."""
    base, order = cfg.flat(context.results.space.baseline), context.by_weight()
    rows = []
    for name in sorted(
        changed, key=lambda name: order.index(name) if name in order else len(order)
    ):
        idle = winner.not_effective.get(name)
        before = el("span", shown(base[name]) if name in base else "–", class_="baseline")
        mine = el("span", shown(changed[name]), class_="winner")
        rows.append(
            [
                el("code", breakable(name)),
                before,
                join(mine, f" (changes nothing here: {idle})" if idle else ""),
            ]
        )
    return table(["knob", "baseline", context.highlights.winner_is], rows, words=3)


def _row(context: ReportContext, trial: TrialRecord, role: str) -> dict[str, object]:
    measured = {
        name: last(trial, name)
        for name in ("train_s", "device_s", "samples", RATE, "peak_memory_mib")
    }
    value = {
        "what": role,
        "trial": trial.name,
        context.results.metric: trial.value(context.results.metric),
    }
    speedup = speedup_values(context.evidence.speedup(trial))
    return {
        **measured,
        **value,
        **{name: speedup[name] for name in ("speedup", "speedup_at_least")},
    }


# ---- pictures
LARGEST = 1024
"""Maximum pixels per side of a picture in the page."""


def samples(context: ReportContext, files: Files) -> Html | None:
    """Return the samples of the last evaluation of baseline and winner; None if the workload has
    none."""
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
        caption = el(
            "figcaption", el("span", title, class_=kind), at, files.links(f"{kind}_samples")
        )
        grids.append(el("figure", picture("png", image, f"samples of the {role}"), caption))
    if not grids:
        return None
    none = f"No picture is kept of {' and '.join(missing)}." if missing else ""
    ends = [last(trial, trial.along) for trial, _, _ in context.highlights.pairs() if trial.points]
    equal = (
        f", after equal {context.results.clock.seconds}"
        if len(grids) == 2 and max(ends) < 1.05 * min(ends)
        else ""
    )
    sentence = f"From the last evaluation of each{equal}."
    method = f"{measured}. {none}" if (measured := protocol(context.results)) else none
    return join(lead(sentence), el("div", *grids, class_="pair"), note(method) if method else None)


def _grid(path: Path) -> bytes | None:
    """Return the picture of a trial as PNG, None if it is missing or unreadable.

    It is decoded and encoded again, so that the page contains pixels and nothing else that a file
    may hold.
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
