"""Run the pairs of a comparison of commands, without Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tunediff import config as cfg
from tunediff.analysis.pairs import SIDES, Pairs
from tunediff.command import trial
from tunediff.command.check import WrittenFiles, shared
from tunediff.command.workload import CommandSystems, CommandWorkload
from tunediff.config import ConfigError, Values
from tunediff.core import trial_record as record
from tunediff.core.listeners import Listeners
from tunediff.core.point import Point
from tunediff.tuning.at_once import AtOnce, OneByOne, RunDevice, Running
from tunediff.tuning.rounds import Rounds, writing_to


class SideRun(NamedTuple):
    """One run of A or B, as `Rounds` proposes it."""

    name: str
    folder: Path
    config: CommandSystems
    drawn: Values
    run_device: int

    @property
    def number(self) -> int:
        return int(self.name[1:])


def run(
    comparison: Pairs,
    rounds: Rounds[SideRun],
    listeners: Listeners,
    run_devices: Sequence[RunDevice],
    say: Callable[[str], None],
) -> None:
    """Run what `rounds` proposes until it is decided: one command at a time, or one on each of
    `run_devices` of this machine. Raises `StoppedError` where a journal cannot be written, and
    `ConfigError` where runs at the same time write the same files."""
    written: dict[Path, WrittenFiles] = {}
    ended = 0
    sides = dict[str, SideRun]()
    several = AtOnce[str, Point]() if run_devices else None
    running: Running[str, Point] = several or OneByOne()
    with writing_to(comparison.folder), several.ended() if several else contextlib.nullcontext():
        while True:
            while (several or not sides) and (side := rounds.ask()) is not None:
                sides[side.name] = side
                if ended < len(SIDES):
                    workload = cfg.of(side.config)
                    assert isinstance(workload, CommandWorkload)
                    runs_in = Path(workload.definition.folder)
                    written.setdefault(runs_in, WrittenFiles(runs_in, comparison.folder))
                listeners.tell("start", side.name, side.drawn)
                if several is None:
                    iterate = functools.partial(_follow, comparison, side)
                else:
                    device = run_devices[side.run_device]
                    iterate = functools.partial(_follow, comparison, side, device, several.check)
                running.start(side.name, iterate)
            if not sides:
                return
            name, point = running.next()
            if point is not None:
                listeners.tell("point", name, point.flat)
                continue
            side = sides.pop(name)
            rounds.tell(side, record.read_trial(side.folder))
            ended += 1
            if ended == len(SIDES):
                _look_at_written([*written.values()], several is not None, say)
            listeners.tell("end", name, side.drawn)


def _look_at_written(
    written: Sequence[WrittenFiles], at_once: bool, say: Callable[[str], None]
) -> None:
    """Warn of files that the first pair has written beside the folders of its runs, in the same or
    in two working folders. Raises `ConfigError` where both sides write them at the same time."""
    names = sorted({name for files in written for name in files.names()})
    if names and at_once and len(written) == 1:
        raise ConfigError(
            f"--parallel: {shared(names)}: both sides write them at the same time; allowed: files"
            " in {folder}, or no --parallel"
        )
    if names:
        say(f"WARNING: {shared(names)}; runs may overwrite each other's files")


def _follow(
    comparison: Pairs, side: SideRun, device: RunDevice | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Point]:  # fmt: skip
    """Run one side, on a device of the machine if it is given, and yield its points."""
    command = trial.run_of(side.config, side.folder, comparison.budget_s or None)
    if device is not None:
        device.pin()
        devices = () if device.gpu is None else (device.gpu,)
        command = dataclasses.replace(command, devices=devices, threads=device.threads)
    yield from trial.follow(command, side.config, side.drawn, side.number, stopped)


def proposal(
    folder: Path, name: str, config: CommandSystems, drawn: Values, run_device: int
) -> SideRun:
    """Return the run of a side in the folder of its comparison."""
    return SideRun(name, (folder / "trials" / name).absolute(), config, drawn, run_device)
