"""Say what differs between a command and a workload, in plans and in reports."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tunediff.command.definition import CommandDefinition

CLIENTS = ("docker", "podman", "ssh", "kubectl")
"""Programs whose work is done by processes that are none of their children."""


def honesty(definitions: Iterable[CommandDefinition]) -> list[str]:
    """Return a sentence for whatever a result of these commands lacks that one of workloads has."""
    commands = list(definitions)
    lines = []
    first_words = [command.template.words[0].split()[0] for command in commands]
    if client := next((word for word in first_words if Path(word).name in CLIENTS), None):
        lines.append(
            f"WARNING: {client}: what it starts elsewhere goes on when its client is ended at the"
            " budget, beside the next run: let it end by itself (outcome: final)."
        )
    if any(command.outcome == "budget" for command in commands):
        lines.append(
            "The value at the budget counts. Start-up, evaluations and checkpoints are inside it,"
            " unless the command prints TUNEDIFF start, pause and go, or its own seconds (time). A"
            " schedule by a number of steps is cut where it is still high: compare such commands by"
            " their final values (outcome: final)."
        )
    return lines
