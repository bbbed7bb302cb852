"""Report a comparison of two configurations: sentences, a figure and a short page."""

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
from tunediff.core.record import TrialRecord
from tunediff.core.text import number, pluralize
from tunediff.report.context import lead, note
from tunediff.report.files import FOLDER, Files, listed, write
from tunediff.report.html import Html, breakable, el, folded, join, page, table
from tunediff.report.page import PAGE
from tunediff.report.style import legend, plain_logarithms, plain_numbers, sheet
from tunediff.report.words import OPEN, interval, percent, rounded, with_sd

_WHY = {
    "hopeless": "up to {most} pairs would most likely show no significant difference either",
    "spent": "all {most} pairs have been run",
    "equal": "any difference is within the requested margin",
    "open": "more pairs may show one",
}


def block(comparison: Pairs) -> dict[str, Any]:
    """Return the result as values by name, for printing; `result_json.compare` is the form for `--json`."""
    look, values = comparison.look, comparison.values
    entries: dict[str, Any] = {"comparison": comparison.folder.name, "a": comparison.asked[0], "b": comparison.asked[1]}
    entries["verdict"] = comparison.verdict
    if (run := comparison.failure) is not None:
        entries["failure"] = failure(comparison, run)
    for place, side in enumerate("ab"):
        numbers = [float(value) for value in values[place] if value == value]
        entries[f"{side}_{comparison.label}"] = with_sd(numbers) or None
    difference, effect = look.differences[0], "ratio" if look.ratios else "difference"
    open_ = look.ratios and is_wide(difference.low, difference.high)
    ends = (None,) * 3 if open_ else (difference.estimate, difference.low, difference.high)
    entries |= dict(zip((effect, f"{effect}_low", f"{effect}_high"), ends, strict=True))
    for name, size in (("resolution", look.resolution), ("one_run_each_tells", comparison.one_run_tells)):
        entries[name] = None if size is None else f"{number(size)}{_rough(comparison)}"
    entries["stopped"] = look.state
    ended = [run for pair in comparison.runs for run in pair if run is not None and run.finished]
    return entries | {
        "pairs": look.rounds,
        "runs": len(ended),
        "training_s": comparison.trained_s,
        "results": str(comparison.folder),
    }


def sentences(comparison: Pairs) -> list[str]:
    """Return the result in sentences: the verdict, then its reason and what the number of pairs can detect."""
    look, b_name = comparison.look, f"B ({comparison.asked[1]})"
    if (run := comparison.failure) is not None:
        return [failure(comparison, run)]
    if look.resolution is None:
        return [f"{pluralize(look.rounds, 'pair')} so far: too few for a test."]
    difference = _difference(comparison)
    pairs = f"{pluralize(look.rounds, 'pair')} of runs"
    if comparison.verdict == "no significant difference":
        lines = [f"{b_name} shows no significant difference from A ({comparison.asked[0]}) by {pairs}: {difference}."]
        why = f"; {_WHY[look.state].format(most=look.most)}" if look.state in _WHY else ""
        lines.append(f"They can detect differences of about {_size(comparison, look.resolution)}{why}.")
    else:
        lines = [
            f"{b_name} is {comparison.verdict} than A ({comparison.asked[0]}) by more than the noise of {pairs}: {difference}."
        ]
    if (least := comparison.one_run_tells) is not None:
        ahead = f"B was ahead in {comparison.ahead} of {look.rounds} pairs"
        lines.append(f"With one run each, only differences above {_size(comparison, least)} are significant; {ahead}.")
    return lines


def failure(comparison: Pairs, run: TrialRecord) -> str:
    """Return which side failed, and why."""
    side = run.drawn["side"]
    return f"{side} ({comparison.asked[SIDES.index(side)]}) failed: {run.status}: {run.reason}"


def so_far(comparison: Pairs) -> str:
    """Return the line that is printed after every pair."""
    pairs = f"after {pluralize(comparison.look.rounds, 'pair')}"
    return f"{pairs}: {_difference(comparison)}: {comparison.verdict if comparison.over or comparison.look.resolution else 'too few for a test'}"


def _difference(comparison: Pairs) -> str:
    effect = interval(comparison.look.differences[0], comparison.look.ratios)
    if effect in ("", OPEN):
        return f"the difference in {comparison.label} is {effect or 'unknown'}"
    return f"{comparison.label} {effect} {'times' if comparison.look.ratios else 'compared with'} A's"


def _size(comparison: Pairs, value: float) -> str:
    return (percent(value) if comparison.look.ratios else number(value)) + _rough(comparison)


def _rough(comparison: Pairs) -> str:
    """Return a remark that few pairs make a size uncertain; '' if there are enough."""
    return f" (a rough estimate, from {pluralize(comparison.look.rounds, 'pair')})" if comparison.rough else ""


# -------------------------------------------------------------------------------------------------------------- files
def write_all(comparison: Pairs) -> Path:
    """Write the page and its data into the folder of the comparison and return the page's path. Raises `OSError`."""
    files = Files(comparison.folder / FOLDER)
    first, *more = sentences(comparison)
    answer = join(lead(first), *(el("p", sentence) for sentence in more))
    sections = [("answer", "The answer", answer), ("pairs", "Every pair", _pairs(comparison, files))]
    if any(len(curve(run, comparison.metric.name)) > 1 for pair in comparison.runs for run in pair if run is not None):
        alt = f"{comparison.label} against {comparison.clock.seconds} of all runs"
        chart = files.chart("curves", lambda: figure(comparison), alt, "A line for each run; the dots are their ends.")
        sections.append(("curves", f"{comparison.label} against {comparison.clock.seconds}", chart or el("p")))
    sections.append(("changes", "What B changes", _changes(comparison)))
    head = join(el("h1", comparison.folder.name), el("p", _about(comparison), class_="soft"))
    again = el("p", "Data: ", listed([el("a", name, href=f"{FOLDER}/{name}") for name in sorted(files.written)]))
    text = page(f"{comparison.folder.name}: comparison", head, sections, again)
    write(comparison.folder / PAGE, text.encode("utf-8", "replace"))
    files.tidy()
    return comparison.folder / PAGE


def _about(comparison: Pairs) -> str:
    run = next((run for pair in comparison.runs for run in pair if run is not None), None)
    where = environment.hardware(run.environment) if run is not None else ""
    about = f"{text.seconds(comparison.budget_s)} of {comparison.clock.what} per run, judged by {comparison.label}"
    return f"{about}; {where}" if where else about


def _pairs(comparison: Pairs, files: Files) -> Html:
    rows, lines = [], []
    for place, pair in enumerate(comparison.runs):
        row: dict[str, Any] = {"pair": place + 1}
        for side, run in zip("ab", pair, strict=True):
            value = run.value(comparison.metric.name) if run is not None else None
            rate = run.points[-1].samples / run.points[-1].train_s if run is not None and run.points else None
            row |= {
                f"{side}_seed": run.config["seed"] if run is not None else None,
                f"{side}_{comparison.metric.name}": value,
            }
            row |= {f"{side}_{comparison.unit}_per_s": rate, f"{side}_status": run.status if run is not None else None}
        rows.append(row)
        values, rates = (
            [row[f"{side}_{of}"] for side in "ab"] for of in (comparison.metric.name, f"{comparison.unit}_per_s")
        )
        falls = comparison.metric.mode == "min"
        ahead = "" if None in values else "B" if (values[1] < values[0]) == falls else "A"
        ended = [row[f"{side}_status"] or "" for side in "ab"]
        shown_ = [word if value is None else rounded(value) for value, word in zip(values, ended, strict=True)]
        lines.append([str(place + 1), *shown_, ahead, *map(rounded, rates)])
    files.csv("pairs", pd.DataFrame(rows))
    header = [
        "pair",
        f"A: {comparison.label}",
        f"B: {comparison.label}",
        "ahead",
        f"A: {comparison.unit}/s",
        f"B: {comparison.unit}/s",
    ]
    method = (
        "Both runs of a pair begin with the same seed; every other pair ran B first. Interval and verdict account for "
        "a look after every pair (the error of 5 % is spent in equal parts over the looks, after Lan and DeMets). "
    )
    return join(table(header, lines, stacks=True), note(method, files.links("pairs")))


def figure(comparison: Pairs) -> Figure:
    """Draw the curve of every run, A and B in their colours."""
    drawn, (axes,) = sheet(1, 3.2)
    positive, sides = True, (BASELINE, WINNER if comparison.verdict == "better" else SERIES[0])
    for pair in comparison.runs:
        for run, color in zip(pair, sides, strict=True):
            if run is not None and (line := curve(run, comparison.metric.name)):
                seconds, values = zip(*line, strict=True)
                positive = positive and min(values) > 0
                axes.plot(seconds, values, color=color, linewidth=1.1, alpha=0.7)
                axes.plot(seconds[-1:], values[-1:], color=color, marker="o", markersize=4)
    for name, color in zip("AB", sides, strict=True):
        axes.plot([], [], color=color, label=name)
    better = "lower" if comparison.metric.mode == "min" else "higher"
    axes.set(xlabel=comparison.clock.seconds, ylabel=f"{comparison.label}, {better} is better")
    if comparison.look.ratios and positive:
        axes.set_yscale("log")
        plain_logarithms(axes.yaxis)
    plain_numbers(axes)
    legend(drawn)
    return drawn


def _changes(comparison: Pairs) -> Html:
    """Return the changed knobs as a table, and the changed lines of a user's file."""
    titles = [cfg.of(config).title for config in comparison.configs]
    ours, changed = cfg.flat(comparison.configs[0]) | {"workload": titles[0]}, comparison.changed
    changed |= {"workload": titles[1]} if "workload" in changed else {}
    rows: list[list[object]] = [
        [el("code", breakable(name)), shown(ours[name]) if name in ours else "–", shown(value)]
        for name, value in changed.items()
    ]
    files = [cfg.of(config).file for config in comparison.configs]
    parts: list[object] = [table(["knob", "A", "B"], rows, words=3)] if rows else []
    if files[0] is not None and files[1] is not None and files[0].version != files[1].version:
        texts = [file.file.read_text(encoding="utf-8").splitlines() for file in files if file is not None]
        lines = "\n".join(difflib.unified_diff(texts[0], texts[1], "A", "B", lineterm=""))
        parts.append(folded("the file", el("pre", lines or "files that it imports differ")))
    return join(*parts) if parts else el("p", "Nothing but the seeds.")
