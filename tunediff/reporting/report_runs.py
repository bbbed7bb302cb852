"""Sections of the report: what failed, every trial, and how to run it again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from tunediff import config as cfg
from tunediff.cli import STORAGE
from tunediff.reporting import report_numbers
from tunediff.reporting.report_html import Html, el, folded, join, table
from tunediff.reporting.report_subject import Files, Subject
from tunediff.reporting.report_words import cut, duration, is_known, percent, rounded, shown, some

_SPENT = {
    "train": "training", "data_wait": "waiting for images", "setup": "setup", "compile": "compiling",
    "evaluation": "evaluation", "checkpoint": "checkpoints",
}  # fmt: skip
_HARDWARE = {
    "device": "device", "threads": "threads of a worker", "cpu": "CPU", "cpu_cores": "CPU cores",
    "memory_gib": "memory (GiB)", "system": "system", "python": "Python",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ failures
def failures(subject: Subject, files: Files) -> Html | None:
    """How trials ended that have no result, and with which values that happens."""
    found = subject.found
    ended = [trial for trial in found.trials if trial.finished]
    if not ended and not subject.unreadable:
        return None
    failed = sum(trial.status not in ("ok", "pruned") for trial in ended)
    stopped = sum(trial.status == "pruned" for trial in ended)
    said = f"{failed:,} of {some(len(ended), 'trial')} that ended failed" if failed else "No trial failed"
    said += f"; {stopped:,} {'was' if stopped == 1 else 'were'} stopped early" if stopped else ""
    parts: list[object] = [el("p", f"{said}.", class_="lead")]
    frame = report_numbers.failures(found)
    if len(frame):
        files.csv("failures", frame)
        rows = [
            [row["status"], cut(row["reason"], 300), cut(row["names"], 48), row["trials"]]
            for row in frame.to_dict("records")[:30]
        ]
        parts.append(table(["status", "reason (of the first)", "trials", "how many"], rows, words=3))
        parts.append(el("p", files.links("failures"), class_="note"))
    if suspects := report_numbers.suspects(found, subject.effects):
        words = [f"{failed} of {trials} with {knob} = {value}" for knob, value, failed, trials in suspects]
        parts.append(
            el("p", f"More than twice as often as elsewhere trials failed with these values: {'; '.join(words)}.")
        )
    disturbed = sum(any(point.get("disturbed") is True for point in trial.points) for trial in found.trials)
    if disturbed:
        said = (
            f"During {disturbed:,} of {some(len(found.trials), 'trial')} others used the same cores: their speed, and "
            "what they learned in their seconds, may be too low."
        )
        parts.append(el("p", said))
    if left := len(subject.unreadable):
        said = f"{some(left, 'journal was', 'journals were')} not understood and left out:"
        parts += [
            el("p", said),
            table(["trial", "why"], [[*item] for item in subject.unreadable.items()][:20], words=2),
        ]
    return join(parts)


# ---------------------------------------------------------------------------------------------------------- all trials
def trials(subject: Subject, files: Files) -> Html | None:
    """Every trial in a table that sorts and filters itself."""
    found = subject.found
    if not found.trials:
        return None
    frame = found.table()
    files.csv("trials", frame)
    names = [dimension.name for dimension in found.space.dimensions]
    place = {trial.name: i for i, trial in enumerate(found.ranked)}
    stars = {trial.name: "baseline" if what == "baseline" else "winner" for trial, _, what in subject.stars.pairs()}
    rows, marks, reasons = list[list[object]](), list[str](), any(trial.reason for trial in found.trials)
    lines = zip(found.trials, frame.astype(object).to_dict("records"), strict=True)
    for trial, row in sorted(lines, key=lambda line: (place.get(line[0].name, len(place)), line[0].number)):
        rows.append(
            [
                trial.name,
                row["status"],
                _plain(row[found.metric]),
                _two(row["versus_baseline"]),
                *([_two(row["speedup"]), _plain(row["images_per_s"])] if subject.by_frechet else []),
                _plain(row["train_s"]),
                _plain(row["peak_memory_mib"]),
                *(shown(trial.drawn[name]) if name in trial.drawn else "" for name in names),
                *([cut(trial.reason, 100)] if reasons else []),
            ]
        )
        marks.append(stars.get(trial.name, ""))
    header: list[object] = ["trial", "status", subject.label, "× baseline"]
    header += ["speed-up", "images/s"] if subject.by_frechet else []
    header += ["train s", "MiB", *(_on_two_lines(name) for name in names), *(["reason"] if reasons else [])]
    search = el("input", id="trials-filter", type="search", placeholder="for example: bf16 ok", autocomplete="off")
    count = el("span", f"{len(rows)} of {len(rows)}", id="trials-count", class_="soft")
    # The script shows the box: without it there is nothing to filter with.
    box = el("div", el("label", "Show only", search), count, class_="filter", hidden="hidden")
    note = "Empty: the knob does not apply, or nothing was measured. On paper: the first 40. "
    return join(
        [
            el("p", f"{some(len(rows), 'trial')}, the best first. A click on a heading sorts.", class_="lead"),
            box,
            table(header, rows, marks, words=2, id_="trials-table"),
            el("p", note, files.links("trials"), class_="note"),
        ]
    )


def _plain(value: Any) -> str:
    return rounded(float(value)) if is_known(value) else ""


def _two(value: Any) -> str:
    return f"{value:.2f}" if is_known(value) else ""


def _on_two_lines(name: str) -> Html:
    section, dot, leaf = name.rpartition(".")
    return join([section, dot, el("br") if dot else "", leaf])


# ----------------------------------------------------------------------------------------------------------- reproduce
def reproduce(subject: Subject, files: Files) -> Html | None:
    """Commands, hardware, versions and protocol: what it takes to get these numbers again."""
    found, winner = subject.found, subject.stars.winner
    place = f"{subject.storage or STORAGE}/{subject.name}"
    ran = list(dict.fromkeys(_command(session["command"]) for session in subject.sessions if session["command"]))
    parts: list[object] = [
        el("p", "What was run, on what, and how to run it again.", class_="lead"),
        el("h3", "Commands"),
    ]
    if ran:
        parts += [el("p", "The search was started with"), _code(ran)]
    again = shlex.join(
        ["python", "-m", "tunediff.search", f"{place}/search.yaml", "--name", f"{found.folder.name}-again"]
    )
    words = "The same from its folder alone: search.yaml and baseline.yaml hold everything, seeds included"
    parts += [el("p", words), _code([again])]
    if winner is not None and (found.folder / "trials").is_dir():  # of tables alone nothing can be exported
        to, budget_s = shlex.quote(f"{place}/{winner.name}.yaml"), winner.budget_s or found.space.budget.per_trial_s
        parts += [
            el("p", f"{subject.leader.capitalize()} alone, as a configuration and then as a training"),
            _code(
                [
                    f"python -m tunediff.export {subject.call} --trial {winner.name} --to {to}",
                    f"python -m tunediff.train --config {to} --budget {budget_s:.10g}s",
                ]
            ),
        ]
    parts += [el("h3", "Measured on"), _environment(subject)]
    parts += [el("h3", "How"), el("ul", *(el("li", line) for line in _protocol(subject))), _seconds(subject, files)]
    if (text := _text(found.folder / "search.yaml")) is not None:
        parts.append(folded("search.yaml", el("pre", text)))
    if winner is not None:
        content = yaml.safe_dump(cfg.nest(winner.config), sort_keys=False, allow_unicode=True, default_flow_style=None)
        parts.append(folded(f"every knob of {winner.name}", el("pre", content)))
    return join(parts)


def _command(recorded: str) -> str:
    """The command as a user types it: what is recorded begins with the path of a file."""
    try:
        words = shlex.split(recorded)
    except ValueError:
        return recorded
    if words and words[0].replace("\\", "/").endswith("tunediff/search.py"):
        return shlex.join(["python", "-m", "tunediff.search", *words[1:]])
    return recorded


def _code(lines: Sequence[str]) -> Html:
    return el("pre", "\n".join(lines))


def _environment(subject: Subject) -> Html:
    known: dict[str, Any] = dict(subject.sessions[-1]["environment"]) if subject.sessions else {}
    for trial in subject.found.trials:
        known |= trial.environment
        if "device" in trial.environment:
            break
    versions = known.get("versions")
    rows = [[words, str(known[name])] for name, words in _HARDWARE.items() if known.get(name) is not None]
    rows += [[str(name), str(version)] for name, version in versions.items()] if isinstance(versions, dict) else []
    return table(["", ""], rows, words=2) if rows else el("p", "Hardware and versions are not recorded in this folder.")


def _protocol(subject: Subject) -> list[str]:
    found, protocol, budget = subject.found, subject.found.space.baseline.evaluation, subject.found.space.budget
    lines = ["images/s: images trained per second, waiting for images included and compilation not."]
    if subject.by_frechet:
        steps = f", {protocol.steps} steps" if protocol.sampler == "ddim" else ""
        lines[0] = (
            f"{subject.label}: Fréchet distance between {protocol.images:,} generated images and the real ones, in the "
            f"features of {protocol.extractor}; averaged weights, {protocol.sampler.upper()}{steps}, the same noise in "
            "all trials. It depends on the number of images: compare within this search only."
        )
    lines.append(
        f"Budget of a trial: {duration(budget.per_trial_s)} of training in the worker, evaluation and checkpoints "
        f"apart; compiling {'counts' if budget.compile_charged else 'does not count'}."
    )
    drawn = {
        "search": "drawn by Optuna's TPE", "grid": "all combinations that the file allows",
        "trials": "those that the file lists", "ladder": "the rungs of the file, together and alone",
    }  # fmt: skip
    stopping = "" if found.space.early_stopping == "none" else f"; stopped early by {found.space.early_stopping}"
    repeats = f", {found.space.seeds} seeds each" if found.space.seeds > 1 else ""
    return [*lines, f"Points: {drawn[found.space.kind]}{repeats}; seed of the search {found.space.seed}{stopping}."]


def _seconds(subject: Subject, files: Files) -> Html | None:
    parts = {name: spent for name, spent in subject.found.seconds().items() if spent}
    if not parts:
        return None
    whole, wall_s = sum(parts.values()), _wall_s(subject)
    files.csv("seconds", pd.DataFrame([{"part": name, "seconds": spent} for name, spent in parts.items()]))
    rows = [
        [_SPENT.get(name, name), duration(spent), percent(spent / whole)]
        for name, spent in sorted(parts.items(), key=lambda item: -item[1])
    ]
    rows.append(["all workers together", duration(whole), ""])
    rows += [["wall-clock of the search", duration(wall_s), ""]] if wall_s else []
    links = el("p", files.links("seconds"), class_="note")
    return join([el("h3", "Where the seconds went"), table(["", "time", "share"], rows), links])


def _wall_s(subject: Subject) -> float:
    """Of all sessions; one without an end lasted at least until the last line of a journal."""
    last = latest(subject)
    return sum(max(0.0, float(session["end"] or last) - float(session["begin"])) for session in subject.sessions)


def latest(subject: Subject) -> float:
    """Unix time of the last line of any journal; 0 where none has a time."""
    found = subject.found.trials
    stamps = [0.0, *(max(trial.started, trial.ended) for trial in found)]
    return max([*stamps, *(float(point.get("time") or 0.0) for trial in found for point in trial.points)])


def _text(path: Path, most: int = 100_000) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(most)
    except OSError:
        return None
