"""Run commands on this machine without Ray, torch or templates: a `Backend` that runs programs."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tunediff import config as cfg
from tunediff.analysis.pairs import SIDES
from tunediff.command import trial
from tunediff.command.check import WrittenFiles, shared
from tunediff.command.definition import CommandDefinition
from tunediff.command.workload import CommandSystems, CommandWorkload
from tunediff.config import ConfigError
from tunediff.core.listeners import Listener
from tunediff.core.point import Point
from tunediff.search_space import SearchSpace
from tunediff.tuning import resources
from tunediff.tuning.at_once import RunDevice
from tunediff.tuning.backend import Reported
from tunediff.tuning.resources import Machine, Pool, ResourcePartition
from tunediff.tuning.trial_spec import TrialSpec

MARGIN_S = 5.0
"""Seconds beyond the grace of a command in which an interrupted run has ended."""


class CommandBackend:
    """Runs one command at a time, or one on each of equal devices of this machine."""

    device = "cpu"

    def __init__(
        self, folder: Path, configs: Sequence[CommandSystems], run_devices: Sequence[RunDevice]
    ) -> None:
        """`folder`: of the comparison, whose `configs` run."""
        definitions = [_definition(config) for config in configs]
        self.interrupt_s = MARGIN_S + max(definition.grace_s for definition in definitions)
        here, sizes = resources.local(), sorted({config.parallel.workers for config in configs})
        # Whether it has as many GPUs as a command asks for was checked before
        machine = Machine(max(here.cores, here.gpus, sizes[-1]), here.gpus)
        count = len(run_devices) or 1
        partition = ResourcePartition((machine,), tuple(sizes), False, count == 1, at_once=count)
        self.devices = Pool(partition)
        self._folder, self._run_devices = folder, run_devices
        self._say: Callable[[str], None] = lambda line: None
        self._lock, self._ended = threading.Lock(), 0
        self._written: dict[Path, WrittenFiles] = {}

    def run(self, spec: TrialSpec, check: Callable[[], bool]) -> Iterator[Reported]:
        """Run a command, and yield its points; see `Backend.run`.

        Raises `ConfigError` where runs at the same time write the same files.
        """
        config = spec.config
        assert isinstance(config, CommandSystems)
        command = trial.run_of(config, spec.folder, spec.budget.seconds)
        if self._run_devices:
            device = self._run_devices[spec.run_device]
            device.pin()
            gpus = () if device.gpu is None else (device.gpu,)
            command = dataclasses.replace(command, devices=gpus, threads=device.threads)
        with self._lock:
            runs_in = Path(command.definition.folder)
            if self._ended < len(SIDES) and runs_in not in self._written:
                self._written[runs_in] = WrittenFiles(runs_in, self._folder)
        spec.begin()
        for event in trial.run(command, check):
            if isinstance(event, Point):
                yield event.flat
        with self._lock:
            self._ended += 1
            if self._ended == len(SIDES):
                self._look_at_written()

    def _look_at_written(self) -> None:
        """Warn of files that the first pair has written beside the folders of its runs, in the same
        or in two working folders. Raises `ConfigError` where both write them at the same time."""
        names = sorted({name for files in self._written.values() for name in files.names()})
        if names and self._run_devices and len(self._written) == 1:
            raise ConfigError(
                f"--parallel: {shared(names)}: both sides write them at the same time; allowed:"
                " files in {folder}, or no --parallel"
            )
        if names:
            self._say(f"WARNING: {shared(names)}; runs may overwrite each other's files")

    def release(self, spec: TrialSpec) -> None:
        """Do nothing: no run is stopped early here."""

    def say_through(self, say: Callable[[str], None]) -> None:
        """Call `say` with what concerns the files that runs write."""
        self._say = say

    def show(self, slot: int, line: str) -> None:
        """Do nothing: there are no pages."""

    def listeners(self, folder: Path, space: SearchSpace) -> Sequence[Listener]:
        """Return none."""
        return ()


def _definition(config: CommandSystems) -> CommandDefinition:
    workload = cfg.of(config)
    assert isinstance(workload, CommandWorkload)
    return workload.definition
