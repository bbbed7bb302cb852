"""Show how to reproduce a search: commands, hardware, versions, protocol, and where the seconds
went."""

from __future__ import annotations

import itertools

import pandas as pd
import yaml

from tunediff import config as cfg
from tunediff.analysis.speed import repeating_budget
from tunediff.analysis.statistics import totals
from tunediff.core import text
from tunediff.core.text import number
from tunediff.report.context import ReportContext, lead, note, protocol
from tunediff.report.files import Files
from tunediff.report.html import Html, el, folded, join, table
from tunediff.report.words import duration, percent
from tunediff.tuning import sessions

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


def reproduce(context: ReportContext, files: Files) -> Html:
    """Return the section with everything that is needed to reproduce the results."""
    winner, path = context.highlights.winner, context.results.folder / "search.yaml"
    parts: list[object] = [
        lead("Commands, hardware and protocol that reproduce these results."),
        el("h3", "Commands"),
    ]
    for words, lines in _commands(context):
        parts += [el("p", words), el("pre", "\n".join(lines))]
    parts += [el("h3", "Measured on"), _environment(context)]
    parts += [
        el("h3", "How"),
        el("ul", *(el("li", line) for line in _protocol(context))),
        _seconds(context, files),
    ]
    parts.append(folded("search.yaml", el("pre", path.read_text("utf-8", "replace")[:100_000])))
    if winner is not None:
        content = yaml.safe_dump(
            cfg.nest(winner.config), sort_keys=False, allow_unicode=True, default_flow_style=None
        )
        parts.append(folded(f"every knob of {winner.name}", el("pre", content)))
    return join(*parts)


def _commands(context: ReportContext) -> list[tuple[str, list[str]]]:
    """Return (description, command lines) of what was run and of what repeats it."""
    winner, place = context.highlights.winner, context.storage / context.name
    ran = list(dict.fromkeys(session.command for session in context.sessions if session.command))
    commands = [("The search was started with", ran)] if ran else []
    name = f"{context.results.folder.name}-again"
    words_run = ran[-1].split() if ran else []
    pairs = itertools.pairwise(words_run)
    machine = [
        word for pair in pairs if pair[0] in ("--address", "--cpus", "--gpus") for word in pair
    ]
    again = text.command(
        "search", place / "search.yaml", "--name", name, *machine, storage=context.storage
    )
    words = (
        "To repeat it from its folder alone: search.yaml and baseline.yaml hold everything, seeds"
        " included"
    )
    commands.append((words, [again]))
    if winner is not None:
        out, budget = place / f"{winner.name}.yaml", repeating_budget(context.results, winner)
        words = f"{context.leader.capitalize()} alone, as a configuration and then as a training"
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
    versions = environment.get("versions")
    rows = [
        [words, _listed(environment[name])]
        for name, words in _HARDWARE.items()
        if environment.get(name) not in (None, [])
    ]
    rows += (
        [[str(name), str(version)] for name, version in versions.items()]
        if isinstance(versions, dict)
        else []
    )
    return (
        table(["", ""], rows, words=2)
        if rows
        else el("p", "Hardware and versions are not recorded in this folder.")
    )


def _listed(value: object) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def _protocol(context: ReportContext) -> list[str]:
    """Return how the objective, the budget and the configurations are defined, one sentence
    each."""
    space, budget = context.results.space, context.results.space.budget
    lines = [
        f"{(unit := context.unit)}/s: {unit} trained per second, waiting for {unit} included and"
        " compilation not."
    ]
    if not context.results.by_rate:
        quantity, better = (
            context.results.quantity(context.results.metric),
            "lower" if context.results.falls else "higher",
        )
        named = [quantity.label] * (quantity.label != context.label)
        details = filter(
            None, [*named, protocol(context.results), f"{better} is better", quantity.meaning]
        )
        lines[0] = f"{context.label}: {'; '.join(details)}."
    shared = ", shared by its devices" if budget.unit == "device" else ""
    lines.append(
        f"Budget of a trial: {duration(budget.per_trial_s)} of {budget.clock.what} in the"
        f" worker{shared}, evaluation "
        "and checkpoints apart; compiling"
        f" {'counts' if budget.compile_charged else 'does not count'}"
        f"{', what a training does before its first batch counts' if budget.setup_charged else ''}."
    )
    stopping = (
        "" if space.early_stopping == "none" else f"; stopped early by {space.early_stopping}"
    )
    repeats = f", {space.seeds} seeds each" if space.seeds > 1 else ""
    return [
        *lines,
        (
            f"Configurations: {_DRAWN[space.kind]}{repeats}; seed of the search"
            f" {space.seed}{stopping}."
        ),
    ]


def _seconds(context: ReportContext, files: Files) -> Html | None:
    """Return a table of where the seconds of all workers went; None if none are recorded.

    All totals include the confirming runs, as those of `summary.values` do.
    """
    counted = [context.results, *context.confirming_results]
    parts = {
        name: spent for name, spent in totals([runs.seconds() for runs in counted]).items() if spent
    }
    if not parts:
        return None
    confirming_s = sum(sessions.spent_s(runs.folder) for runs in context.confirming_results)
    whole, wall_s = sum(parts.values()), sessions.spent_s(context.results.folder) + confirming_s
    files.csv("seconds", pd.DataFrame(list(parts.items()), columns=["part", "seconds"]))
    longest = sorted(parts.items(), key=lambda item: -item[1])
    rows = [
        [_SPENT.get(name, name).format(unit=context.unit), duration(spent), percent(spent / whole)]
        for name, spent in longest
    ]
    rows.append(["all workers together", duration(whole), ""])
    rows += [["wall-clock of the search", duration(wall_s), ""]] if wall_s else []
    if confirming_s:
        rows.append(
            ["of that, the confirming runs", duration(confirming_s), percent(confirming_s / wall_s)]
        )
    used = totals([runs.used() for runs in counted])
    energy = f"{number(used['energy_wh'])} Wh" if "energy_wh" in used else "not measured"
    device_s = used.get("device_s", 0.0)
    rows += [
        ["training seconds × devices", duration(device_s), ""],
        ["energy of training", energy, ""],
    ]
    if "price" in used:
        rate = (
            f"at {number(context.results.space.budget.price_per_device_hour)} per device-hour of"
            " training"
        )
        rows.append(["price of training", number(used["price"]), rate])
    links = note(files.links("seconds"))
    return join(el("h3", "Where the seconds went"), table(["", "time", "share"], rows), links)


def latest(context: ReportContext) -> float:
    """Return the Unix time of the last line of any journal; 0 if none has a time."""
    return max((trial.last_written for trial in context.results.trials), default=0.0)
