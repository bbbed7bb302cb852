"""Run the pairs of a comparison of commands, one run at a time, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tunediff.analysis.pairs import Pairs
from tunediff.command import trial
from tunediff.command.workload import CommandSystems
from tunediff.config import Values
from tunediff.core import trial_record as record
from tunediff.core.listeners import Listeners
from tunediff.tuning.rounds import Rounds, writing_to


class SideRun(NamedTuple):
    """One run of A or B, as `Rounds` proposes it."""

    name: str
    folder: Path
    config: CommandSystems
    drawn: Values

    @property
    def number(self) -> int:
        return int(self.name[1:])


def run(comparison: Pairs, rounds: Rounds[SideRun], listeners: Listeners) -> None:
    """Run what `rounds` proposes until it is decided. Raises `StoppedError` where a journal cannot
    be written."""
    with writing_to(comparison.folder):
        while (side := rounds.ask()) is not None:
            command = trial.run_of(side.config, side.folder, comparison.budget_s or None)
            listeners.tell("start", side.name, side.drawn)
            for point in trial.follow(command, side.config, side.drawn, side.number):
                listeners.tell("point", side.name, point.flat)
            rounds.tell(side, record.read_trial(side.folder))
            listeners.tell("end", side.name, side.drawn)


def proposal(folder: Path, name: str, config: CommandSystems, drawn: Values) -> SideRun:
    """Return the run of a side in the folder of its comparison."""
    return SideRun(name, (folder / "trials" / name).absolute(), config, drawn)
