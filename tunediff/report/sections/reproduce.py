"""Show how to reproduce a search: commands, hardware, versions, and its seconds."""

from __future__ import annotations

import itertools
from typing import Any

import yaml

from tunediff import config as cfg
from tunediff.analysis.speed import repeating_budget
from tunediff.analysis.statistics import totals
from tunediff.core import text
from tunediff.core.text import number
from tunediff.experiment.model import FILE
from tunediff.report.context import ReportContext
from tunediff.report.figures import Figures
from tunediff.report.html import Html, el, folded, join, lead, table
from tunediff.report.words import duration, percent
from tunediff.tuning import sessions

_SPENT = {
    "train": "training", "data_wait": "waiting for {unit}", "setup": "setup",
    "compile": "compiling", "evaluation": "evaluation", "checkpoint": "checkpoints",
}  # fmt: skip
_HARDWARE = {
    "device": "device", "threads": "threads of a worker", "cpu": "CPU", "cpu_cores": "CPU cores",
    "usable_cores": "CPU cores it may use", "cpu_features": "instruction sets", "gpus": "GPUs",
    "code": "code (hash)", "memory_gib": "memory (GiB)", "system": "system", "python": "Python",
}  # fmt: skip


def reproduce(context: ReportContext, figures: Figures) -> Html:
    """Return the section with everything that is needed to reproduce the results."""
    winner, path = context.highlights.winner, context.results.folder / FILE
    parts: list[object] = [
        lead("Commands and hardware that reproduce these results."),
        el("h3", "Commands"),
    ]
    for words, lines in _commands(context):
        parts += [el("p", words), el("pre", "\n".join(lines))]
    parts += [el("h3", "Measured on"), _environment(context)]
    results = context.results
    parts += [el("p", line) for line in [*results.clocked.sentences, *results.space.workload.notes]]
    parts.append(_seconds(context))
    parts.append(folded(FILE, el("pre", path.read_text("utf-8", "replace")[:100_000])))
    if winner is not None:
        look: dict[str, Any] = {
            "sort_keys": False,
            "allow_unicode": True,
            "default_flow_style": None,
        }
        content = yaml.safe_dump(cfg.nest(winner.config), **look)
        parts.append(folded(f"every knob of {winner.name}", el("pre", content)))
    return join(*parts)


def _commands(context: ReportContext) -> list[tuple[str, list[str]]]:
    """Return (description, command lines) of what was run and of what repeats it."""
    winner, folder = context.highlights.winner, context.storage / context.name
    ran = list(dict.fromkeys(session.command for session in context.sessions if session.command))
    commands = [("The search was started with", ran)] if ran else []
    # The same machine or cluster, in a folder of another name.
    machine = list[str]()
    for option, value in itertools.pairwise(ran[-1].split() if ran else []):
        if option in ("--address", "--cpus", "--gpus"):
            machine += [option, value]
    options = ["--name", f"{context.results.folder.name}-again", *machine]
    again = text.command("search", folder / FILE, *options, storage=context.storage)
    everything = f"{FILE} and baseline.yaml hold everything, seeds included"
    commands.append((f"To repeat it from its folder alone: {everything}", [again]))
    if winner is not None:
        out, budget = folder / f"{winner.name}.yaml", repeating_budget(context.results, winner)
        words = (
            f"{context.best_words.capitalize()} alone, as a configuration and then as a training"
        )
        export = context.command("export", "--trial", winner.name, "--out", out)
        commands.append((words, [export, text.command("train", "--config", out, *budget)]))
    return commands


def _environment(context: ReportContext) -> Html:
    """Return a table of hardware and versions, from the first trial that recorded its device."""
    environment = dict(context.sessions[-1].environment) if context.sessions else {}
    for trial in context.results.trials:
        environment |= trial.environment
        if "device" in trial.environment:
            break
    rows = [
        [words, "; ".join(map(str, value)) if isinstance(value, list) else str(value)]
        for name, words in _HARDWARE.items()
        if (value := environment.get(name)) not in (None, [])
    ]
    if isinstance(versions := environment.get("versions"), dict):
        rows += [[str(name), str(version)] for name, version in versions.items()]
    if not rows:
        return el("p", "Hardware and versions are not recorded in this folder.")
    return table(["", ""], rows, words=2)


def _seconds(context: ReportContext) -> Html | None:
    """Return a table of where the seconds of all workers went, confirming runs included."""
    counted, budget = [context.results, *context.confirming_results], context.results.space.budget
    measured = totals([runs.seconds() for runs in counted])
    parts = {name: spent for name, spent in measured.items() if spent}
    if not parts:
        return None
    total_s = sum(parts.values())
    most_first = sorted(parts.items(), key=lambda item: -item[1])
    names = {name: _SPENT.get(name, name).format(unit=context.unit) for name in parts}
    rows = [[names[name], duration(s), percent(s / total_s)] for name, s in most_first]
    rows.append(["all workers together", duration(total_s), ""])
    confirming_s = sum(sessions.spent_s(runs.folder) for runs in context.confirming_results)
    if wall_s := sessions.spent_s(context.results.folder) + confirming_s:
        rows.append(["wall-clock of the search", duration(wall_s), ""])
    if confirming_s:
        share = percent(confirming_s / wall_s)
        rows.append(["of that, the confirming runs", duration(confirming_s), share])
    used = totals([runs.used() for runs in counted])
    rows.append(["training seconds × devices", duration(used.get("device_s", 0.0)), ""])
    if "price" in used:
        rate = f"at {number(budget.price_per_device_hour)} per device-hour of training"
        rows.append(["price of training", number(used["price"]), rate])
    heading = el("h3", "Where the seconds went")
    return join(heading, table(["", "time", "share"], rows))
