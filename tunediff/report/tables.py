"""The tables of a page: trials, failures, a study, what reproduces a search, and pairs of runs."""

from __future__ import annotations

import difflib
import itertools
import re
from collections import ChainMap
from typing import Any

import pandas as pd
import yaml

from tunediff import config as cfg
from tunediff.analysis import RATE, curve, disturbed, last, shown, sides, speed
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.evidence import Evidence
from tunediff.analysis.outcome import failed
from tunediff.core import text
from tunediff.core.outcomes import Status
from tunediff.core.text import number, percent, pluralize, rounded, seconds, times
from tunediff.core.trial_record import TrialRecord
from tunediff.experiment.model import FILE
from tunediff.report import charts, sentences
from tunediff.report import study as studies
from tunediff.report.context import ReportContext
from tunediff.report.result import Result
from tunediff.report.sections import Block, block, figure, table
from tunediff.report.text import pair_rows

SPENT = {
    "train": "training", "data_wait": "waiting for {unit}", "setup": "setup",
    "compile": "compiling", "evaluation": "evaluation", "checkpoint": "checkpoints",
}  # fmt: skip
HARDWARE = {
    "device": "device", "threads": "threads of a worker", "cpu": "CPU", "cpu_cores": "CPU cores",
    "usable_cores": "CPU cores it may use", "cpu_features": "instruction sets", "gpus": "GPUs",
    "code": "code (hash)", "memory_gib": "memory (GiB)", "system": "system", "python": "Python",
}  # fmt: skip


# ---- trials
def trials(about: ReportContext) -> list[Block]:
    """Return the table of all trials: best first, repeats below their baseline, failures last."""
    results, evidence = about.results, about.evidence
    if not results.trials:
        return []
    near = {trial.name for trial in evidence.near}
    knobs = [dimension.name for dimension in results.space.dimensions]
    if any(trial.role == "repeat" for trial in results.trials):
        knobs = ["seed", *knobs]
    ranks = {run.name: rank for rank, outcome in enumerate(results.ranked) for run in outcome.done}
    ordered = sorted(results.trials, key=lambda one: (ranks.get(one.name, len(ranks)), one.number))
    rows, tested, unequal = [], about.tested, len(about.result.workers) > 1
    for trial in ordered:
        mark = " ≈" * (trial.name in near) + " †" * disturbed(trial)
        outcome, value = results.outcome_of(trial), last(trial, results.metric)
        note = "" if value is None else outcome.failure_note
        found = evidence.speedup(trial) if trial.status == Status.OK else None
        # One run's speed-up does not count for a trial that new seeds did not show to be better
        rejected = tested is not None and tested.is_conclusive and not tested.candidate_of(trial)
        faster = "" if found is None or rejected else times(found.bound or found.mean)
        row = {
            "trial": trial.name,
            "status": ", ".join(filter(None, [f"{trial.status or 'running'}{mark}", note])),
            results.title: rounded(value),
            results.versus_heading: text.versus(results.versus_baseline(trial), results.ratios),
            "speed-up": "≥ " * (found is not None and found.at_least and bool(faster)) + faster,
            f"{results.unit}/s": rounded(last(trial, RATE)),
            results.clock.short: rounded(last(trial, results.clock.along)),
            "MiB": rounded(last(trial, "peak_memory_mib")),
            "threads": rounded(trial.environment.get("threads")) if unequal else "",
            **{name: shown(trial.drawn[name]) if name in trial.drawn else "" for name in knobs},
            "reason": text.truncate(sentences.of_trial(trial), 300),
        }
        rows.append(row)
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    marks = [about.highlights.mark(trial) for trial in ordered]
    legend = "≈: within the noise of the best. " * bool(near)
    legend += f"†: {sentences.OTHERS}. " * any(map(disturbed, ordered))
    return [
        block("lead", f"{pluralize(len(rows), 'trial')}, the best first."),
        table(
            [names, *([row[name] for name in names] for row in rows)],
            marks,
            words=2,
            id="trials-table",
        ),
        block("note", f"{legend}Empty: the knob does not apply, or nothing was measured."),
    ]


def trials_frame(evidence: Evidence) -> pd.DataFrame:
    """Return one row per trial, as trials.csv has them: `reason` is in words."""
    reasons = [sentences.of_trial(trial) for trial in evidence.results.trials]
    return evidence.table().assign(reason=reasons)


def failures(about: ReportContext) -> list[Block]:
    """Return what failed, was stopped or was skipped; nothing before a trial has ended."""
    ended = [trial for trial in about.results.trials if trial.finished]
    if not ended:
        return []
    bad, kinds = sum(map(failed, ended)), dict[tuple[str, str], list[TrialRecord]]()
    sentence = (
        f"{bad:,} of {pluralize(len(ended), 'trial')} that ended failed"
        if bad
        else "No trial failed"
    )
    stopped = sum(trial.status in (Status.PRUNED, Status.SKIPPED) for trial in ended)
    sentence += f"; {stopped:,} stopped early or not run" if stopped else ""
    for trial in (one for one in ended if one.status != Status.OK):
        # Numbers differ between trials; without them, equal causes have equal reasons.
        reason = "" if trial.status == Status.PRUNED else re.sub(r"[\d.]+", "#", trial.reason)[:80]
        kinds.setdefault((str(trial.status), reason), []).append(trial)
    rows = [
        [
            status,
            text.truncate(sentences.of_trial(found[0]) or "stopped early", 300),
            " ".join(one.name for one in found)[:48],
            len(found),
        ]
        for (status, _), found in sorted(kinds.items(), key=lambda kind: -len(kind[1]))[:30]
    ]
    head = ["status", "reason (of the first)", "trials", "how many"]
    return [block("lead", f"{sentence}."), *([table([head, *rows], words=3)] if rows else [])]


def study(about: ReportContext) -> list[Block]:
    """Return the table and the figure of a study."""
    results = about.results
    if results.space.study is None or not results.trials:
        return []
    found = studies.table(results)
    drawn = figure(
        "study",
        lambda: studies.figure(found, studies.measured_on(results)),
        "the figure of the study",
    )
    notes = [block("note", note) for note in found.notes()]
    return [
        block("lead", found.study.title or "The study's own table."),
        *[drawn] * found.study.has_figure,
        table(found.cells(1000)),
        *notes,
    ]


# ---- reproduce
def reproduce(about: ReportContext) -> list[Block]:
    """Return everything that is needed to reproduce the results: commands, hardware, seconds."""
    results, winner, folder = about.results, about.highlights.winner, about.storage / about.name
    ran = list(dict.fromkeys(session.command for session in about.sessions if session.command))
    # The same machine or cluster, in a folder of another name.
    options = ["--name", f"{results.folder.name}-again"]
    for option, value in itertools.pairwise(ran[-1].split() if ran else []):
        options += [option, value] if option in ("--address", "--cpus", "--gpus") else []
    file = results.folder / FILE
    again = text.command("search", folder / file.name, *options, storage=about.storage)
    blocks = [block("lead", "Commands and hardware that reproduce these results.")]
    if ran:
        blocks += [block("p", "The search was started with"), block("pre", "\n".join(ran))]
    blocks += [
        block("p", "To repeat it from its folder alone, seeds included:"),
        block("pre", again),
    ]
    if winner is not None:
        out, budget = folder / f"{winner.name}.yaml", speed.repeating_budget(results, winner)
        export = about.command("export", "--trial", winner.name, "--out", out)
        blocks.append(
            block(
                "p",
                f"{about.best_words.capitalize()} alone, as a configuration and then as a"
                " training:",
            )
        )
        blocks.append(block("pre", f"{export}\n{text.command('train', '--config', out, *budget)}"))
    ran_on = [one.environment for one in results.trials if "device" in one.environment]
    # Of what differs the first trial's, but for threads
    environment = ChainMap[str, Any](*ran_on, *(one.environment for one in about.sessions[-1:]))
    known: dict[str, Any] = {words: environment.get(name) for name, words in HARDWARE.items()} | {
        HARDWARE["threads"]: [*{one["threads"]: None for one in ran_on if "threads" in one}]
    }
    versions = environment.get("versions")
    known |= versions if isinstance(versions, dict) else {}
    cells = [
        [name, "; ".join(map(str, value)) if isinstance(value, list) else str(value)]
        for name, value in known.items()
        if value not in (None, [])
    ]
    blocks += [block("h3", "Measured on"), table([["", ""], *cells], words=2)]
    blocks += _seconds(about)
    if file.is_file():
        blocks.append(
            block("details", file.read_text("utf-8", "replace")[:100_000], title=file.name)
        )
    if winner is not None:
        content = yaml.safe_dump(
            cfg.nest(winner.config), sort_keys=False, allow_unicode=True, default_flow_style=None
        )
        blocks.append(block("details", content, title=f"every knob of {winner.name}"))
    return blocks


def _seconds(about: ReportContext) -> list[Block]:
    """Return a table of where the seconds of all workers went, confirming runs included."""
    found, unit = about.result, about.results.unit
    parts = {part: spent_s for part, spent_s in found.seconds.items() if part != "wall" and spent_s}
    if not (total_s := sum(parts.values())):
        return []
    wall_s = found.seconds["wall"]
    confirming_s = sum(runs.seconds["wall"] for runs in found.confirmations)
    share = percent(confirming_s / wall_s) if confirming_s else ""
    rows = [
        *(
            [SPENT.get(part, part).format(unit=unit), seconds(spent_s), percent(spent_s / total_s)]
            for part, spent_s in sorted(parts.items(), key=lambda item: -item[1])
        ),
        ["all workers together", seconds(total_s), ""],
        ["wall-clock of the search", seconds(wall_s), ""],
        ["of that, the confirming runs", seconds(confirming_s) if confirming_s else "", share],
        ["training seconds × devices", seconds(found.device_s or 0.0), ""],
        ["price of training", number(found.price) if found.price is not None else "", ""],
    ]
    shown_rows = [row for row in rows if row[1]]
    return [block("h3", "Where the seconds went"), table([["", "time", "share"], *shown_rows])]


# ---- two sides
def pairs_frame(comparison: Comparison) -> pd.DataFrame:
    """Return one row per pair: seed, value, samples per second and status of both runs."""
    rows, unit = [], sides.unit(comparison)
    for number_of, (pair, values) in enumerate(
        zip(comparison.rounds, comparison.values.T, strict=True), 1
    ):
        row: dict[str, Any] = {"pair": number_of}
        for side, run, compared in zip("ab", pair, values.tolist(), strict=True):
            end = run.points[-1] if run is not None and run.points else None
            row |= {f"{side}_seconds": compared} if comparison.rules.by_time else {}
            row |= {
                f"{side}_seed": run.config["seed"] if run is not None else None,
                f"{side}_{comparison.metric}": run.value(comparison.metric)
                if run is not None
                else None,
                f"{side}_{unit}_per_s": end.samples / end.train_s if end and end.train_s else None,
                f"{side}_setup_s": end.before_first_batch_s if end is not None else None,
                f"{side}_status": run.status if run is not None else None,
            }
        rows.append(row)
    return pd.DataFrame(rows).dropna(axis="columns", how="all")


def of_sides(comparison: Comparison, found: Result) -> list[tuple[str, str, list[Block]]]:
    """Return the sections of the page of a comparison: (id, heading, blocks)."""
    first, *more = found.summary
    blocks, metric = [block("lead", first)], comparison.objective
    if any(len(curve(run, metric)) > 1 for run in comparison.runs):
        blocks.append(
            figure(
                "curves",
                lambda: charts.of_sides(comparison),
                "curves of all runs",
                "A line for each run; the dots are their ends.",
            )
        )
    workloads = [cfg.of(config) for config in comparison.configs]
    blocks += [block("p", sentence) for sentence in more]
    before, changed = cfg.flat(comparison.configs[0]), found.candidates[1].configuration
    rows = [
        [name, shown(before[name]) if name in before else "–", shown(value)]
        for name, value in changed.items()
        if name != "workload"
    ]
    changes = [table([["knob", "A", "B"], *rows], words=3, code=True)] if rows else []
    a, b = (workload.file for workload in workloads)
    if a is not None and b is not None and a.version != b.version:
        old, new = (one.file.read_text(encoding="utf-8").splitlines() for one in (a, b))
        lines = "\n".join(difflib.unified_diff(old, new, "A", "B", lineterm=""))
        changes.append(block("details", lines or "files that it imports differ", title="the file"))
    # Where there are no seeds, the summary says so
    method = "" if comparison.rules.unseeded else "Both runs of a pair begin with the same seed. "
    return [
        ("result", "Result", blocks),
        (
            "pairs",
            "Every pair",
            [
                table(pair_rows(comparison), stacks=True),
                block("note", method + sentences.INTERVALS),
            ],
        ),
        ("changes", "What B changes", changes or [block("p", "Nothing but the seeds.")]),
    ]
