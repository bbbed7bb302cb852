"""Say what differs between a command and a workload, in plans and in reports."""

from __future__ import annotations

from collections.abc import Iterable

from tunediff.command.definition import CommandDefinition


def honesty(definitions: Iterable[CommandDefinition], systems_knobs: bool = True) -> list[str]:
    """Return a sentence for whatever a result of these commands lacks that one of workloads has.

    systems_knobs: whether to say that a search of them finds no batch size or precision by itself.
    """
    commands = list(definitions)
    lines = []
    if any(command.outcome == "budget" for command in commands):
        lines.append(
            "The value at the budget counts. Start-up, evaluations and checkpoints are inside it,"
            " unless the command prints TUNEDIFF start, pause and go, or its own seconds (time)."
        )
        lines.append(
            "A schedule by a number of steps is cut where it is still high: compare such commands"
            " by their final values (outcome: final)."
        )
    if any(command.outcome == "final" for command in commands):
        lines.append(
            "The value at the command's own end counts, whatever it took: seconds are beside it."
        )
    lines.append(
        "A run that is interrupted begins again from its start, unless it has printed CHECKPOINT"
        " path."
    )
    if systems_knobs:
        lines.append(
            "Knobs of the system (precision, compilation, loaders, workers) are those that the"
            " command has options for."
        )
    return lines
