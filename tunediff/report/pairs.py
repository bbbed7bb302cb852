"""Report a comparison of two configurations: sentences, a figure and a short page."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from tunediff import config as cfg
from tunediff.analysis import curve, disturbed, shown
from tunediff.analysis.pairs import SIDES, Pairs
from tunediff.core import environment, text
from tunediff.core.clock import own_s
from tunediff.core.colors import BASELINE, SERIES, WINNER
from tunediff.core.files import write_atomically
from tunediff.core.text import number, pluralize
from tunediff.core.trial_record import TrialRecord
from tunediff.report.context import lead, note
from tunediff.report.files import FOLDER, Files, listed
from tunediff.report.html import Html, breakable, el, folded, join, page, table
from tunediff.report.page import PAGE
from tunediff.report.style import legend, plain_logarithms, plain_numbers, sheet
from tunediff.report.verdicts import disturbed_of, why_stopped
from tunediff.report.words import OPEN, interval, markdown_table, percent, rounded


def sentences(pairs: Pairs) -> list[str]:
    """Return the result in sentences: the verdict, then its reason and what the number of pairs can
    detect."""
    look, b_name = pairs.look, f"B ({pairs.names[1]})"
    if (run := pairs.failure) is not None:
        return [failure(pairs, run)]
    if (resolution := look.differences[0].resolution) is None:
        return [f"{pluralize(look.rounds, 'pair')} so far: too few for a test."]
    difference = _difference(pairs)
    count = f"{pluralize(look.rounds, 'pair')} of runs"
    if pairs.verdict is None:
        return [f"Not decided yet after {count}: {difference}."]
    if pairs.verdict == "no significant difference":
        lines = [
            f"{b_name} shows no significant difference from A ({pairs.names[0]}) by {count}:"
            f" {difference}."
        ]
        why = why_stopped(look, "pairs", equal="any difference is within the requested margin")
        lines.append(f"They can detect differences of about {_size(pairs, resolution)}{why}.")
    else:
        better = f"{b_name} is {pairs.verdict} than A ({pairs.names[0]})"
        lines = [f"{better} by more than the noise of {count}: {difference}."]
    ahead, single = f"B was ahead in {pairs.ahead} of {look.rounds} pairs", ""
    if (least := pairs.one_run_tells) is not None:
        single = (
            f"With one run each, only differences above {_size(pairs, least)} are significant; "
        )
    runs = [run for pair in pairs.runs for run in pair if run is not None]
    remark = disturbed_of(sum(map(disturbed, runs)), pluralize(len(runs), "run"))
    return [*lines, f"{single}{ahead}.", *filter(None, [remark, _setup(pairs)])]


def _setup(pairs: Pairs) -> str:
    """Return a sentence on seconds before the first batch that differ by over 2 % of the budget; ''
    if they do not."""
    a_s, b_s = pairs.setup_s
    shortest_s = own_s(
        pairs.budget_s, pairs.budget_unit, max(config.devices for config in pairs.configs)
    )
    if pairs.setup_charged or a_s is None or b_s is None or abs(a_s - b_s) <= 0.02 * shortest_s:
        return ""
    spent = f"Before its first batch B spends {text.seconds(b_s)} and A {text.seconds(a_s)}"
    return f"{spent}, which the budget does not count: --setup charged counts them."


def failure(pairs: Pairs, run: TrialRecord) -> str:
    """Return which side failed, and why."""
    side = run.drawn["side"]
    return f"{side} ({pairs.names[SIDES.index(side)]}) failed: {run.status}: {run.reason}"


def so_far(pairs: Pairs) -> str:
    """Return the line that is printed after every pair."""
    count = f"after {pluralize(pairs.look.rounds, 'pair')}"
    verdict = pairs.verdict or (
        "not decided yet" if pairs.look.differences[0].resolution else "too few for a test"
    )
    return f"{count}: {_difference(pairs)}: {verdict}"


def _difference(pairs: Pairs) -> str:
    """Return the effect of B relative to A with its interval, in words."""
    effect = interval(pairs.look.differences[0], pairs.look.ratios)
    if effect in ("", OPEN):
        return f"the difference in {pairs.label} is {effect or 'unknown'}"
    return f"{pairs.label} {effect} {'times' if pairs.look.ratios else 'compared with'} A's"


def _size(pairs: Pairs, value: float) -> str:
    return (percent(value) if pairs.look.ratios else number(value)) + _rough(pairs)


def _rough(pairs: Pairs) -> str:
    """Return a remark that few pairs make a size uncertain; '' if there are enough."""
    return (
        f" (a rough estimate, from {pluralize(pairs.look.rounds, 'pair')})" if pairs.rough else ""
    )


# ---- files
def write_all(pairs: Pairs) -> Path:
    """Write the page and its data into the folder of the comparison and return the page's path.
    Raises `OSError`."""
    files = Files(pairs.folder / FOLDER)
    first, *more = sentences(pairs)
    answer = join(lead(first), *(el("p", sentence) for sentence in more))
    sections = [("answer", "The answer", answer), ("pairs", "Every pair", _pairs(pairs, files))]
    if any(
        len(curve(run, pairs.metric.name)) > 1
        for pair in pairs.runs
        for run in pair
        if run is not None
    ):
        alt = f"{pairs.label} against {pairs.clock.seconds} of all runs"
        chart = files.chart(
            "curves", lambda: figure(pairs), alt, "A line for each run; the dots are their ends."
        )
        sections.append(
            ("curves", f"{pairs.label} against {pairs.clock.seconds}", chart or el("p"))
        )
    sections.append(("changes", "What B changes", _changes(pairs)))
    head = join(el("h1", pairs.folder.name), el("p", _about(pairs), class_="soft"))
    again = el(
        "p",
        "Data: ",
        listed([el("a", name, href=f"{FOLDER}/{name}") for name in sorted(files.written)]),
    )
    content = page(f"{pairs.folder.name}: comparison", head, sections, again).encode(
        "utf-8", "replace"
    )
    write_atomically(pairs.folder / PAGE, lambda file: file.write(content))
    files.tidy()
    return pairs.folder / PAGE


def _about(pairs: Pairs) -> str:
    run = next((run for pair in pairs.runs for run in pair if run is not None), None)
    where = environment.hardware(run.environment) if run is not None else ""
    length = (
        f"{text.seconds(pairs.budget_s)} of {pairs.clock.what}" if pairs.budget_s else "its end"
    )
    about = f"{length} per run, judged by {pairs.label}"
    return f"{about}; {where}" if where else about


def frame(pairs: Pairs) -> pd.DataFrame:
    """Return one row per pair: seed, value, samples per second and status of both runs."""
    rows = []
    for place, pair in enumerate(pairs.runs):
        row: dict[str, Any] = {"pair": place + 1}
        for side, run in zip("ab", pair, strict=True):
            value = run.value(pairs.metric.name) if run is not None else None
            rate = (
                run.points[-1].samples / run.points[-1].train_s
                if run is not None and run.points
                else None
            )
            row |= {
                f"{side}_seed": run.config["seed"] if run is not None else None,
                f"{side}_{pairs.metric.name}": value,
                f"{side}_setup_s": (
                    run.points[-1].before_first_batch_s if run is not None and run.points else None
                ),
            }
            row |= {
                f"{side}_{pairs.unit}_per_s": rate,
                f"{side}_status": run.status if run is not None else None,
            }
        rows.append(row)
    return pd.DataFrame(rows)


def comment(pairs: Pairs) -> str:
    """Return verdict, sentences and the table of pairs in Markdown, as a comment of a pull request
    has them."""
    first, *more = sentences(pairs)
    rows = markdown_table(_rows(pairs, frame(pairs)))
    head = f"**tunediff: {pairs.verdict or 'not decided yet'}.** {first}"
    return "\n\n".join(
        [
            head,
            *more,
            f"<details><summary>Every pair</summary>\n\n{rows}\n\n</details>",
            _about(pairs),
        ]
    )


def _rows(pairs: Pairs, values_of_pairs: pd.DataFrame) -> list[list[str]]:
    """Return the table with one row per pair; the first line holds the headings."""
    lines = [["pair", f"A: {pairs.label}", f"B: {pairs.label}", "ahead", f"A: {pairs.unit}/s", f"B: {pairs.unit}/s",
              "A: setup (s)", "B: setup (s)"]]  # fmt: skip
    for row in (
        values_of_pairs.astype(object).where(values_of_pairs.notna(), None).to_dict("records")
    ):
        columns = (pairs.metric.name, f"{pairs.unit}_per_s", "setup_s")
        values, rates, setups = ([row[f"{side}_{column}"] for side in "ab"] for column in columns)
        falls = pairs.metric.mode == "min"
        ahead = (
            ""
            if None in values
            else "–"
            if values[0] == values[1]
            else "AB"[(values[1] < values[0]) == falls]
        )
        ended = [row[f"{side}_status"] or "" for side in "ab"]
        shown_ = [
            word if value is None else rounded(value)
            for value, word in zip(values, ended, strict=True)
        ]
        lines.append([str(row["pair"]), *shown_, ahead, *map(rounded, [*rates, *setups])])
    return lines


def _pairs(pairs: Pairs, files: Files) -> Html:
    """Write pairs.csv and return the table with one row per pair."""
    files.csv("pairs", values_of_pairs := frame(pairs))
    header, *lines = _rows(pairs, values_of_pairs)
    method = (
        "Both runs of a pair begin with the same seed; every other pair ran B first. Interval and"
        " verdict account for a look after every pair (the error of 5 % is spent over the looks,"
        " after Lan and DeMets). "
    )
    return join(table(header, lines, stacks=True), note(method, files.links("pairs")))


def figure(pairs: Pairs) -> Figure:
    """Draw the curve of every run, A and B in their colours."""
    drawn, (axes,) = sheet(1, 3.2)
    positive, sides = True, (BASELINE, WINNER if pairs.verdict == "better" else SERIES[0])
    for pair in pairs.runs:
        for run, color in zip(pair, sides, strict=True):
            if run is not None and (line := curve(run, pairs.metric.name)):
                seconds, values = zip(*line, strict=True)
                positive = positive and min(values) > 0
                axes.plot(seconds, values, color=color, linewidth=1.1, alpha=0.7)
                axes.plot(seconds[-1:], values[-1:], color=color, marker="o", markersize=4)
    for name, color in zip("AB", sides, strict=True):
        axes.plot([], [], color=color, label=name)
    better = "lower" if pairs.metric.mode == "min" else "higher"
    axes.set(xlabel=pairs.clock.seconds, ylabel=f"{pairs.label}, {better} is better")
    if pairs.look.ratios and positive:
        axes.set_yscale("log")
        plain_logarithms(axes.yaxis)
    plain_numbers(axes)
    legend(drawn)
    return drawn


def _changes(pairs: Pairs) -> Html:
    titles = [cfg.of(config).title for config in pairs.configs]
    ours, changed = cfg.flat(pairs.configs[0]) | {"workload": titles[0]}, pairs.changed
    changed |= {"workload": titles[1]} if "workload" in changed else {}
    rows: list[list[object]] = [
        [el("code", breakable(name)), shown(ours[name]) if name in ours else "–", shown(value)]
        for name, value in changed.items()
    ]
    files = [cfg.of(config).file for config in pairs.configs]
    parts: list[object] = [table(["knob", "A", "B"], rows, words=3)] if rows else []
    if files[0] is not None and files[1] is not None and files[0].version != files[1].version:
        texts = [
            file.file.read_text(encoding="utf-8").splitlines() for file in files if file is not None
        ]
        lines = "\n".join(difflib.unified_diff(texts[0], texts[1], "A", "B", lineterm=""))
        parts.append(folded("the file", el("pre", lines or "files that it imports differ")))
    return join(*parts) if parts else el("p", "Nothing but the seeds.")
