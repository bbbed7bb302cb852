"""Show the result of a search: its best configuration, confirming runs, changes and samples."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from tunediff import config as cfg
from tunediff.analysis import last, shown
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.confirming_runs import nothing_to_confirm
from tunediff.core import text
from tunediff.core.environment import hardware
from tunediff.core.trial_record import TrialRecord
from tunediff.report import headline
from tunediff.report.context import ReportContext, marked, objective_meaning, protocol
from tunediff.report.figures import Figures
from tunediff.report.html import Html, breakable, el, join, lead, note, picture, table
from tunediff.report.sections import curves
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
def won(context: ReportContext, figures: Figures) -> Html:
    """Return the section with the result and what the winner changes."""
    winner, confirmation = context.highlights.winner, context.evidence.confirmation
    sentence = headline.parts(context.evidence, context.over)
    parts: list[object] = [
        lead(*(el("span", text, class_=role) if role else text for text, role in sentence))
    ]
    parts += [curves.of_verdict(context, figures), note(_measured(context))]
    if winner is None:
        return join(*parts)
    if confirmation is None and context.evidence.compared is None:
        parts += [_near(context), note(_chance(context))]
    if context.confirming:
        parts.append(note(context.confirming))
    if remark := unmoved_words(context.evidence):
        parts.append(el("p", remark))
    changed = context.results.changed(winner)
    if changed and context.highlights.baseline is not None:
        parts.append(el("h3", f"What {context.best_words} changes"))
        parts.append(_changed(context, winner, changed))
    if confirmation is not None:
        parts.append(_confirmation(confirmation))
    return join(*parts)


def _measured(context: ReportContext) -> str:
    """Return what the objective is, and on which machines it was measured."""
    # Trials on different machines are not comparable; instruction sets and power limits tell two
    # machines of one name apart.
    used = filter(None, (hardware(trial.environment) for trial in context.results.trials))
    machines = " and ".join(dict.fromkeys(used))
    measured = f" Measured on {machines}." if machines else ""
    return f"{objective_meaning(context)}{measured}"


def _near(context: ReportContext) -> Html | None:
    """Return which other trials are within the noise of the best."""
    evidence = context.evidence
    names = [trial.name for trial in evidence.near if not evidence.is_baseline(trial)]
    if not names:
        return None
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    words = f"{', '.join(names[:MOST_NAMES])}{more}"
    return el("p", f"Within the noise of the best, and so possibly as good: {words}.")


def _chance(context: ReportContext) -> str:
    """Return how much of the result may be chance, and which search would test it."""
    results, noise, ended = context.results, context.evidence.noise, len(context.results.ranked)
    biased = f"the best of {ended:,} is biased by its selection" if ended > 2 else ""
    if noise is None:
        chance = "One run each: how much of that is chance is unknown"
        chance += f", and {biased}" if biased else ""
    else:
        chance = f"Noise: {noise_words(noise, context.label)}"
        chance += f"; {biased}" if biased else ""
    test = ""
    if context.confirming:
        pass  # its own sentence follows
    elif results.space.confirm is not None:
        why = nothing_to_confirm(results) if context.over else ""
        test = f"Nothing to confirm: {why}." if why else "Nothing is confirmed yet."
    elif results.space.workload.same_seed:
        test = "One run each, repeated: the noise of a training is not known without {seed}."
    elif results.space.kind == "search" and not results.by_rate:
        words = ("--resume", results.folder.name, "--confirm", "1")
        again = text.command("search", *words, storage=results.folder.parent)
        test = f"{again} runs the best again on new seeds and tests them against the baseline."
    else:
        test = (
            "A search file with seeds: runs every configuration several times and compares by the"
            " noise between them."
        )
    return f"{chance}. {test}"


def _confirmation(confirmation: Comparison) -> Html:
    header, *rows = confirmation_table(confirmation)
    marks = marked(confirmation, confirmation.winner)
    method = "These runs were made after the selection, on seeds that it did not use."
    return join(
        el("h3", "On new seeds"),
        *(el("p", sentence) for sentence in details(confirmation)),
        table(header, rows, marks, words=2, stacks=True),
        note(f"{method} {INTERVALS}."),
    )


def _changed(context: ReportContext, winner: TrialRecord, changed: dict[str, object]) -> Html:
    """Return a table of the changed knobs, the most important first."""
    base, order = cfg.flat(context.results.space.baseline), context.by_weight()
    places = {name: place for place, name in enumerate(order)}
    rows = []
    for name in sorted(changed, key=lambda name: places.get(name, len(order))):
        idle = winner.not_effective.get(name)
        before = el("span", shown(base[name]) if name in base else "–", class_="baseline")
        now = el("span", shown(changed[name]), class_="winner")
        remark = f" (changes nothing here: {idle})" if idle else ""
        rows.append([el("code", breakable(name)), before, join(now, remark)])
    return table(["knob", "baseline", context.highlights.winner_is], rows, words=3)


# ---- pictures
LARGEST = 1024
"""Maximum pixels per side of a picture in the page."""


def samples(context: ReportContext, figures: Figures) -> Html | None:
    """Return the samples of the last evaluation of baseline and winner; None without any."""
    results, pairs = context.results, context.highlights.pairs()
    if results.by_rate:
        return None
    grids, missing, ends = list[Html](), list[str](), list[float]()
    for trial, _, role in pairs:
        title, kind = f"{role} ({trial.name})", context.highlights.mark(trial)
        if trial.points:
            ends.append(last(trial, trial.along))
        image = _picture(results.folder / "trials" / trial.name / "samples.png")
        if image is None:
            missing.append(title)
            continue
        at = f" after {secs(trial.points[-1]['train_s'])} of training." if trial.points else "."
        caption = el("figcaption", el("span", title, class_=kind), at)
        grids.append(el("figure", picture("png", image, f"samples of the {role}"), caption))
    if not grids:
        return None
    equal = ""
    if len(grids) == 2 and max(ends) < 1.05 * min(ends):
        equal = f", after equal {results.clock.seconds}"
    remarks = [f"{measured}." if (measured := protocol(results)) else ""]
    remarks.append(f"No picture is kept of {' and '.join(missing)}." if missing else "")
    return join(
        lead(f"From the last evaluation of each{equal}."),
        el("div", *grids, class_="pair"),
        note(" ".join(remarks)) if any(remarks) else None,
    )


def _picture(path: Path) -> bytes | None:
    """Return the picture of a trial as PNG, None if it is missing or unreadable.

    It is decoded and encoded again, so that the page contains pixels and nothing else.
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
