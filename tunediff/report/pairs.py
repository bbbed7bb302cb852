"""Report a comparison of two configurations: a figure and a short page."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from tunediff import config as cfg
from tunediff.analysis import curve, shown, sides
from tunediff.analysis.comparison import Comparison
from tunediff.core import environment
from tunediff.core.colors import BASELINE, SERIES, WINNER
from tunediff.core.files import write_csv
from tunediff.core.outcomes import Verdict
from tunediff.report import page, pair_words, style
from tunediff.report.figures import Figures
from tunediff.report.html import PAGE, Html, breakable, el, folded, join, lead, note, table
from tunediff.report.words import markdown_table, rounded


# ---- files
def write_all(pairs: Comparison) -> Path:
    """Write page and data into the comparison's folder; return the page. Raises `OSError`."""
    metric, clocked = pairs.metric, sides.clocked(pairs)
    first, *more = pair_words.sentences(pairs)
    chart = None
    if any(len(curve(run, metric)) > 1 for run in pairs.runs):
        title = f"{pairs.label} against {sides.clock(pairs).seconds} of all runs"
        caption = "A line for each run; the dots are their ends."
        chart = Figures().chart("curves", lambda: figure(pairs), title, caption)
    answer = join(lead(first), chart, *(el("p", sentence) for sentence in more))
    sections = [("answer", "The answer", answer), ("pairs", "Every pair", _pairs(pairs))]
    sections.append(("changes", "What B changes", _changes(pairs)))
    if clock := [*clocked.sentences, *_notes(pairs)]:
        sections.append(("clock", "Which seconds count", join(*(el("p", line) for line in clock))))
    head = join(el("h1", pairs.folder.name), el("p", _about(pairs), class_="soft"))
    foot = el("p", "Data: pairs.csv in this folder")
    page.write(pairs.folder, f"{pairs.folder.name}: comparison", head, sections, foot)
    return pairs.folder / PAGE


def _notes(pairs: Comparison) -> list[str]:
    """Return what results of these workloads lack, each sentence once."""
    workloads = map(cfg.of, pairs.configs)
    return list(dict.fromkeys(note for workload in workloads for note in workload.notes))


def _about(pairs: Comparison) -> str:
    machine = environment.hardware(pairs.runs[0].environment) if pairs.runs else ""
    about = f"{sides.run_length(pairs)} per run, judged by {pairs.label}"
    if pairs.rules.by_time:
        about = f"{about}, and its time"
    return f"{about}; {machine}" if machine else about


def frame(pairs: Comparison) -> pd.DataFrame:
    """Return one row per pair: seed, value, samples per second and status of both runs."""
    rows, outcomes, unit = [], pairs.values, sides.unit(pairs)
    for number, pair in enumerate(pairs.rounds, 1):
        row: dict[str, Any] = {"pair": number}
        for side, run, outcome in zip("ab", pair, outcomes[:, number - 1], strict=True):
            last = run.points[-1] if run is not None and run.points else None
            seconds = {"seconds": None if np.isnan(outcome) else outcome}
            cells = {
                **(seconds if pairs.rules.by_time else {}),
                "seed": run.config["seed"] if run is not None else None,
                pairs.metric: run.value(pairs.metric) if run is not None else None,
                "setup_s": last.before_first_batch_s if last is not None else None,
                f"{unit}_per_s": last.samples / last.train_s if last and last.train_s else None,
                "status": run.status if run is not None else None,
            }
            row |= {f"{side}_{name}": value for name, value in cells.items()}
        rows.append(row)
    frame = pd.DataFrame(rows)
    setups = [name for name in ("a_setup_s", "b_setup_s") if name in frame]
    return frame.drop(columns=setups if frame[setups].isna().all(axis=None) else [])


def comment(pairs: Comparison) -> str:
    """Return verdict, sentences and table of pairs in Markdown, for a pull request."""
    first, *more = pair_words.sentences(pairs)
    rows = markdown_table(_rows(pairs, frame(pairs)))
    head = f"**tunediff: {pairs.verdict}.** {first}"
    details = f"<details><summary>Every pair</summary>\n\n{rows}\n\n</details>"
    return "\n\n".join([head, *more, details, _about(pairs)])


def _rows(pairs: Comparison, values_of_pairs: pd.DataFrame) -> list[list[str]]:
    """Return the table with one row per pair; the first line holds the headings."""
    unit = sides.unit(pairs)
    quantities = {
        **({"seconds": sides.outcome_label(pairs)} if pairs.rules.by_time else {}),
        pairs.metric: pairs.label,
        f"{unit}_per_s": f"{unit}/s",
        **({"setup_s": "setup (s)"} if "a_setup_s" in values_of_pairs else {}),
    }
    a, b, *rest = [f"{side}: {label}" for label in quantities.values() for side in "AB"]
    lines = [["pair", a, b, "ahead", *rest]]
    filled = values_of_pairs.astype(object).where(values_of_pairs.notna(), None)
    for row in filled.to_dict("records"):
        values, *others = ([row[f"{side}_{name}"] for side in "ab"] for name in quantities)
        ahead = ""
        if None not in values:
            b_is_ahead = (values[1] < values[0]) == pairs.lower_is_better
            ahead = "–" if values[0] == values[1] else "AB"[b_is_ahead]
        # A run without a value shows how it ended.
        ends = [row[f"{side}_status"] or "" for side in "ab"]
        cells = [rounded(v) if v is not None else end for v, end in zip(values, ends, strict=True)]
        lines.append(
            [str(row["pair"]), *cells, ahead, *(rounded(value) for two in others for value in two)]
        )
    return lines


def _pairs(pairs: Comparison) -> Html:
    """Write pairs.csv and return the table with one row per pair."""
    values = frame(pairs)
    rows = values.itertuples(index=False, name=None)
    write_csv(pairs.folder / "pairs.csv", values.columns, rows)
    header, *lines = _rows(pairs, values)
    order = "every other pair ran B first"
    if pairs.at_once > 1:
        order = "they ran at the same time, on two devices that they swap"
    method = (
        f"Both runs of a pair begin with the same seed; {order}. Interval and"
        " verdict account for a test after every pair (the error of 5 % is spent over all of them,"
        " after Lan and DeMets)."
    )
    return join(table(header, lines, stacks=True), note(method))


def figure(pairs: Comparison) -> Figure:
    """Draw the curve of every run, A and B in their colours."""
    drawn, (axes,) = style.sheet(1, 3.2)
    colors = (BASELINE, WINNER if pairs.verdict == Verdict.BETTER else SERIES[0])
    positive = True
    for pair in pairs.rounds:
        for run, color in zip(pair, colors, strict=True):
            if run is not None and (line := curve(run, pairs.metric)):
                seconds, values = zip(*line, strict=True)
                positive = positive and min(values) > 0
                axes.plot(seconds, values, color=color, linewidth=1.1, alpha=0.7)
                axes.plot(seconds[-1:], values[-1:], color=color, marker="o", markersize=4)
    for name, color in zip("AB", colors, strict=True):
        axes.plot([], [], color=color, label=name)
    better = "lower" if pairs.mode == "min" else "higher"
    axes.set(xlabel=sides.clock(pairs).seconds, ylabel=f"{pairs.label}, {better} is better")
    if pairs.ratios and positive:
        axes.set_yscale("log")
        style.plain_logarithms(axes.yaxis)
    style.plain_numbers(axes)
    style.legend(drawn)
    return drawn


def _changes(pairs: Comparison) -> Html:
    """Return the knobs that B changes, and the changed lines of a workload's file."""
    configs, changed = pairs.configs, sides.changed(pairs)
    workloads, before = [cfg.of(config) for config in configs], cfg.flat(configs[0])
    if "workload" in changed:
        before["workload"], changed["workload"] = (workload.title for workload in workloads)
    rows: list[list[object]] = [
        [el("code", breakable(name)), shown(before[name]) if name in before else "–", shown(value)]
        for name, value in changed.items()
    ]
    parts: list[object] = [table(["knob", "A", "B"], rows, words=3)] if rows else []
    a, b = (workload.file for workload in workloads)
    if a is not None and b is not None and a.version != b.version:
        old, new = (one.file.read_text(encoding="utf-8").splitlines() for one in (a, b))
        lines = "\n".join(difflib.unified_diff(old, new, "A", "B", lineterm=""))
        parts.append(folded("the file", el("pre", lines or "files that it imports differ")))
    return join(*parts) if parts else el("p", "Nothing but the seeds.")
