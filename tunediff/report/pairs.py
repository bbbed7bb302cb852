"""What a comparison of two configurations says: words, a figure and a short page."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from tunediff import config as cfg
from tunediff.analysis import curve, shown
from tunediff.analysis.pairs import SIDES, Pairs
from tunediff.analysis.statistics import is_wide
from tunediff.core import environment, text
from tunediff.core.colors import BASELINE, SERIES, WINNER
from tunediff.core.text import number, pluralize
from tunediff.core.trial_record import TrialRecord
from tunediff.report.context import lead, note
from tunediff.report.files import FOLDER, Files, listed, write
from tunediff.report.html import Html, breakable, el, folded, join, page, table
from tunediff.report.page import PAGE
from tunediff.report.style import legend, plain_logarithms, plain_numbers, sheet
from tunediff.report.words import OPEN, interval, percent, rounded, with_sd

_WHY = {
    "hopeless": "more pairs, up to {most}, would most likely not tell them apart either",
    "spent": "all {most} pairs are used",
    "equal": "no difference is larger than was asked for",
    "open": "more pairs may tell",
}


def block(told: Pairs) -> dict[str, Any]:
    """`key: value` for people; `--json` is `result_json.compare`."""
    look, values = told.look, told.values
    said: dict[str, Any] = {"comparison": told.folder.name, "a": told.asked[0], "b": told.asked[1]}
    said["verdict"] = told.verdict
    if (run := told.failure) is not None:
        said["failure"] = failure(told, run)
    for place, side in enumerate("ab"):
        known = [float(value) for value in values[place] if value == value]
        said[f"{side}_{told.label}"] = with_sd(known) or None
    difference, effect = look.differences[0], "ratio" if look.ratios else "difference"
    open_ = look.ratios and is_wide(difference.low, difference.high)
    ends = (None,) * 3 if open_ else (difference.estimate, difference.low, difference.high)
    said |= dict(zip((effect, f"{effect}_low", f"{effect}_high"), ends, strict=True))
    for name, size in (("resolution", look.resolution), ("one_run_each_tells", told.one_run_tells)):
        said[name] = None if size is None else f"{number(size)}{_rough(told)}"
    said["stopped"] = look.state
    ended = [run for pair in told.runs for run in pair if run is not None and run.finished]
    return said | {"pairs": look.rounds, "runs": len(ended), "training_s": told.trained_s, "results": str(told.folder)}


def sentences(told: Pairs) -> list[str]:
    """The result in words, the plain answer first."""
    look, asked = told.look, f"B ({told.asked[1]})"
    if (run := told.failure) is not None:
        return [failure(told, run)]
    if look.resolution is None:
        return [f"{pluralize(look.rounds, 'pair')} so far: too few to tell anything."]
    known = _difference(told)
    pairs = f"{pluralize(look.rounds, 'pair')} of runs"
    if told.verdict == "no significant difference":
        said = [f"{asked} shows no significant difference from A ({told.asked[0]}) by {pairs}: {known}."]
        why = f"; {_WHY[look.state].format(most=look.most)}" if look.state in _WHY else ""
        said.append(f"They can tell differences of about {_size(told, look.resolution)}{why}.")
    else:
        said = [f"{asked} is {told.verdict} than A ({told.asked[0]}) by more than the noise of {pairs}: {known}."]
    if (least := told.one_run_tells) is not None:
        lucky = f"B was ahead in {told.ahead} of {look.rounds} pairs"
        said.append(f"One run each tells only differences above {_size(told, least)}; {lucky}.")
    return said


def failure(told: Pairs, run: TrialRecord) -> str:
    """Say which side failed, and why."""
    side = run.drawn["side"]
    return f"{side} ({told.asked[SIDES.index(side)]}) failed: {run.status}: {run.reason}"


def so_far(told: Pairs) -> str:
    """One line after a pair."""
    pairs = f"after {pluralize(told.look.rounds, 'pair')}"
    return f"{pairs}: {_difference(told)}: {told.verdict if told.over or told.look.resolution else 'too few to tell'}"


def _difference(told: Pairs) -> str:
    known = interval(told.look.differences[0], told.look.ratios)
    if known in ("", OPEN):
        return f"the difference in {told.label} is {known or 'unknown'}"
    return f"{told.label} {known} {'times' if told.look.ratios else 'beside'} A's"


def _size(told: Pairs, value: float) -> str:
    return (percent(value) if told.look.ratios else number(value)) + _rough(told)


def _rough(told: Pairs) -> str:
    """What is to be said of a size that few pairs have measured; '' of enough."""
    return f" (a rough estimate, from {pluralize(told.look.rounds, 'pair')})" if told.rough else ""


# -------------------------------------------------------------------------------------------------------------- files
def write_all(told: Pairs) -> Path:
    """Write the page and its data into the folder of the comparison; returns the page. Raises `OSError`."""
    files = Files(told.folder / FOLDER)
    first, *more = sentences(told)
    answer = join(lead(first), *(el("p", sentence) for sentence in more))
    sections = [("answer", "The answer", answer), ("pairs", "Every pair", _pairs(told, files))]
    if any(len(curve(run, told.metric.name)) > 1 for pair in told.runs for run in pair if run is not None):
        alt = f"{told.label} against {told.clock.seconds} of all runs"
        chart = files.chart("curves", lambda: figure(told), alt, "A line for each run; the dots are their ends.")
        sections.append(("curves", f"{told.label} against {told.clock.seconds}", chart or el("p")))
    sections.append(("changes", "What B changes", _changes(told)))
    head = join(el("h1", told.folder.name), el("p", _about(told), class_="soft"))
    again = el("p", "Data: ", listed([el("a", name, href=f"{FOLDER}/{name}") for name in sorted(files.written)]))
    text = page(f"{told.folder.name}: comparison", head, sections, again)
    write(told.folder / PAGE, text.encode("utf-8", "replace"))
    files.tidy()
    return told.folder / PAGE


def _about(told: Pairs) -> str:
    run = next((run for pair in told.runs for run in pair if run is not None), None)
    where = environment.hardware(run.environment) if run is not None else ""
    about = f"{text.seconds(told.budget_s)} of {told.clock.what} per run, judged by {told.label}"
    return f"{about}; {where}" if where else about


def _pairs(told: Pairs, files: Files) -> Html:
    rows, lines = [], []
    for place, pair in enumerate(told.runs):
        row: dict[str, Any] = {"pair": place + 1}
        for side, run in zip("ab", pair, strict=True):
            value = run.value(told.metric.name) if run is not None else None
            rate = run.points[-1].samples / run.points[-1].train_s if run is not None and run.points else None
            row |= {
                f"{side}_seed": run.config["seed"] if run is not None else None,
                f"{side}_{told.metric.name}": value,
            }
            row |= {f"{side}_{told.unit}_per_s": rate, f"{side}_status": run.status if run is not None else None}
        rows.append(row)
        values, rates = ([row[f"{side}_{of}"] for side in "ab"] for of in (told.metric.name, f"{told.unit}_per_s"))
        falls = told.metric.mode == "min"
        ahead = "" if None in values else "B" if (values[1] < values[0]) == falls else "A"
        ended = [row[f"{side}_status"] or "" for side in "ab"]
        shown_ = [word if value is None else rounded(value) for value, word in zip(values, ended, strict=True)]
        lines.append([str(place + 1), *shown_, ahead, *map(rounded, rates)])
    files.csv("pairs", pd.DataFrame(rows))
    header = ["pair", f"A: {told.label}", f"B: {told.label}", "ahead", f"A: {told.unit}/s", f"B: {told.unit}/s"]
    how = (
        "Both runs of a pair begin with the same seed; every other pair ran B first. Interval and verdict allow for "
        "having looked after every pair (equal parts of 5 % spent on each look, after Lan and DeMets). "
    )
    return join(table(header, lines, stacks=True), note(how, files.links("pairs")))


def figure(told: Pairs) -> Figure:
    """Every run's curve, A and B in their colours."""
    drawn, (axes,) = sheet(1, 3.2)
    positive, sides = True, (BASELINE, WINNER if told.verdict == "better" else SERIES[0])
    for pair in told.runs:
        for run, color in zip(pair, sides, strict=True):
            if run is not None and (line := curve(run, told.metric.name)):
                seconds, values = zip(*line, strict=True)
                positive = positive and min(values) > 0
                axes.plot(seconds, values, color=color, linewidth=1.1, alpha=0.7)
                axes.plot(seconds[-1:], values[-1:], color=color, marker="o", markersize=4)
    for name, color in zip("AB", sides, strict=True):
        axes.plot([], [], color=color, label=name)
    better = "lower" if told.metric.mode == "min" else "higher"
    axes.set(xlabel=told.clock.seconds, ylabel=f"{told.label}, {better} is better")
    if told.look.ratios and positive:
        axes.set_yscale("log")
        plain_logarithms(axes.yaxis)
    plain_numbers(axes)
    legend(drawn)
    return drawn


def _changes(told: Pairs) -> Html:
    """Knobs, and lines of a user's file."""
    titles = [cfg.of(config).title for config in told.configs]
    ours, changed = cfg.flat(told.configs[0]) | {"workload": titles[0]}, told.changed
    changed |= {"workload": titles[1]} if "workload" in changed else {}
    rows: list[list[object]] = [
        [el("code", breakable(name)), shown(ours[name]) if name in ours else "–", shown(value)]
        for name, value in changed.items()
    ]
    files = [cfg.of(config).file for config in told.configs]
    parts: list[object] = [table(["knob", "A", "B"], rows, words=3)] if rows else []
    if files[0] is not None and files[1] is not None and files[0].version != files[1].version:
        texts = [file.file.read_text(encoding="utf-8").splitlines() for file in files if file is not None]
        lines = "\n".join(difflib.unified_diff(texts[0], texts[1], "A", "B", lineterm=""))
        parts.append(folded("the file", el("pre", lines or "files that it imports differ")))
    return join(*parts) if parts else el("p", "Nothing but the seeds.")
