"""Run it again: commands, hardware, versions and protocol, and where the seconds went."""

from __future__ import annotations

import shlex

import pandas as pd
import yaml

from tunediff import config as cfg
from tunediff.core import text
from tunediff.core.text import number
from tunediff.report.context import ReportContext, lead, note, ruler
from tunediff.report.files import Files
from tunediff.report.html import Html, el, folded, join, table
from tunediff.report.words import duration, percent

_SPENT = {
    "train": "training", "data_wait": "waiting for {unit}", "setup": "setup", "compile": "compiling",
    "evaluation": "evaluation", "checkpoint": "checkpoints",
}  # fmt: skip
_HARDWARE = {
    "device": "device", "threads": "threads of a worker", "cpu": "CPU", "cpu_cores": "CPU cores",
    "usable_cores": "CPU cores it may use", "cpu_features": "instruction sets", "gpus": "GPUs", "code": "code (hash)",
    "memory_gib": "memory (GiB)", "system": "system", "python": "Python",
}  # fmt: skip
_DRAWN = {
    "search": "drawn by Optuna's TPE", "grid": "all combinations that the file allows",
    "trials": "those that the file lists", "ladder": "the rungs of the file, together and alone",
}  # fmt: skip


def reproduce(subject: ReportContext, files: Files) -> Html:
    """What it takes to get these numbers again."""
    winner, path = subject.stars.winner, subject.found.folder / "search.yaml"
    parts: list[object] = [lead("What was run, on what, and how to run it again."), el("h3", "Commands")]
    for words, lines in _commands(subject):
        parts += [el("p", words), el("pre", "\n".join(lines))]
    parts += [el("h3", "Measured on"), _environment(subject)]
    parts += [el("h3", "How"), el("ul", *(el("li", line) for line in _protocol(subject))), _seconds(subject, files)]
    parts.append(folded("search.yaml", el("pre", path.read_text("utf-8", "replace")[:100_000])))
    if winner is not None:
        content = yaml.safe_dump(cfg.nest(winner.config), sort_keys=False, allow_unicode=True, default_flow_style=None)
        parts.append(folded(f"every knob of {winner.name}", el("pre", content)))
    return join(*parts)


def _commands(subject: ReportContext) -> list[tuple[str, list[str]]]:
    """What was run, and what runs it again, with words about it."""
    winner, place = subject.stars.winner, subject.storage / subject.name
    ran = list(dict.fromkeys(_typed(session.command) for session in subject.sessions if session.command))
    said = [("The search was started with", ran)] if ran else []
    name = f"{subject.found.folder.name}-again"
    again = text.command("search", place / "search.yaml", "--name", name, storage=subject.storage)
    words = "The same from its folder alone: search.yaml and baseline.yaml hold everything, seeds included"
    said.append((words, [again]))
    if winner is not None:
        out, budget = place / f"{winner.name}.yaml", text.format_exact(winner.budget_s or subject.budget_s)
        words = f"{subject.leader.capitalize()} alone, as a configuration and then as a training"
        export = subject.command("export", "--trial", winner.name, "--out", out)
        said.append((words, [export, text.command("train", "--config", out, "--budget", budget)]))
    return said


def _typed(recorded: str) -> str:
    """The command as a user types it: what is recorded begins with the path of a file."""
    try:
        words = shlex.split(recorded)
    except ValueError:
        return recorded
    if words and words[0].replace("\\", "/").endswith("tunediff/search.py"):
        return shlex.join(["python", "-m", "tunediff.search", *words[1:]])
    return recorded


def _environment(subject: ReportContext) -> Html:
    known = dict(subject.sessions[-1].environment) if subject.sessions else {}
    for trial in subject.found.trials:
        known |= trial.environment
        if "device" in trial.environment:
            break
    versions = known.get("versions")
    rows = [[words, _listed(known[name])] for name, words in _HARDWARE.items() if known.get(name) not in (None, [])]
    rows += [[str(name), str(version)] for name, version in versions.items()] if isinstance(versions, dict) else []
    return table(["", ""], rows, words=2) if rows else el("p", "Hardware and versions are not recorded in this folder.")


def _listed(value: object) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def _protocol(subject: ReportContext) -> list[str]:
    wanted, budget = subject.found.space, subject.found.space.budget
    lines = [f"{(unit := subject.unit)}/s: {unit} trained per second, waiting for {unit} included and compilation not."]
    if not subject.found.by_rate:
        what, better = subject.found.quantity(subject.found.metric), "lower" if subject.found.falls else "higher"
        named = [what.label] * (what.label != subject.label)
        said = filter(None, [*named, ruler(subject.found), f"{better} is better", what.meaning])
        lines[0] = f"{subject.label}: {'; '.join(said)}."
    shared = ", shared by its devices" if budget.unit == "device" else ""
    lines.append(
        f"Budget of a trial: {duration(budget.per_trial_s)} of {budget.clock.what} in the worker{shared}, evaluation "
        f"and checkpoints apart; compiling {'counts' if budget.compile_charged else 'does not count'}."
    )
    stopping = "" if wanted.early_stopping == "none" else f"; stopped early by {wanted.early_stopping}"
    repeats = f", {wanted.seeds} seeds each" if wanted.seeds > 1 else ""
    return [*lines, f"Configurations: {_DRAWN[wanted.kind]}{repeats}; seed of the search {wanted.seed}{stopping}."]


def _seconds(subject: ReportContext, files: Files) -> Html | None:
    parts = {name: spent for name, spent in subject.found.seconds().items() if spent}
    if not parts:
        return None
    whole, wall_s = sum(parts.values()), _wall_s(subject)
    files.csv("seconds", pd.DataFrame(list(parts.items()), columns=["part", "seconds"]))
    longest = sorted(parts.items(), key=lambda item: -item[1])
    rows = [
        [_SPENT.get(name, name).format(unit=subject.unit), duration(spent), percent(spent / whole)]
        for name, spent in longest
    ]
    rows.append(["all workers together", duration(whole), ""])
    rows += [["wall-clock of the search", duration(wall_s), ""]] if wall_s else []
    used = subject.found.used()
    energy = "not measured" if used["energy_wh"] is None else f"{number(used['energy_wh'])} Wh"
    rows += [["training seconds × devices", duration(used["device_s"] or 0.0), ""], ["energy of training", energy, ""]]
    if used["price"] is not None:
        each = f"at {number(subject.found.space.budget.price_per_device_hour)} per device-hour of training"
        rows.append(["price of training", number(used["price"]), each])
    links = note(files.links("seconds"))
    return join(el("h3", "Where the seconds went"), table(["", "time", "share"], rows), links)


def _wall_s(subject: ReportContext) -> float:
    """Of all sessions; one without an end lasted at least until the last line of a journal."""
    last = latest(subject)
    return sum(max(0.0, float(session.end or last) - float(session.begin)) for session in subject.sessions)


def latest(subject: ReportContext) -> float:
    """Unix time of the last line of any journal; 0 where none has a time."""
    return max((trial.heard for trial in subject.found.trials), default=0.0)
