"""Run a command as a trial: its journal, where a run that was interrupted goes on, and the backend
of comparisons, which has neither Ray nor torch nor templates."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.command import worktrees
from tunediff.command.check import WrittenFiles, shared
from tunediff.command.run import CHECKPOINT, CommandRun, State, execute
from tunediff.command.workload import CommandSystems
from tunediff.config import ConfigError
from tunediff.core import machine, trial_record
from tunediff.core.journal import Journal
from tunediff.core.outcomes import Status
from tunediff.core.point import Point
from tunediff.core.progress import DOING, ProgressFile
from tunediff.core.trial_record import End
from tunediff.tuning import resources
from tunediff.tuning.at_once import RunDevice
from tunediff.tuning.backend import Backend, Reported
from tunediff.tuning.resources import Machine, Pool, ResourcePartition
from tunediff.tuning.trial_spec import TrialSpec

INTERRUPTED = "it was interrupted, and printed no CHECKPOINT to go on from"
TIMEOUT, LEAST_S = 10.0, 6.0
"""Factor of the longest process after which one that has not ended is ended; seconds that are taken
for the longest one at least."""
MARGIN_S = 5.0
"""Seconds beyond the grace of a command in which an interrupted run has ended."""
PAIR = 2
"""Runs after which it is known which files the sides of a comparison write."""


def run_of(
    config: CommandSystems, folder: Path, budget_s: float | None, threads: int | None = None
) -> CommandRun:
    """Return the run of a configuration in a folder of its own.

    It sees as many of the GPUs of this process as its command asks for. `threads`: its share of the
    cores; None: all, unless the user has chosen.
    """
    definition = config.definition
    flat = cfg.flat(config)
    values = {name: flat[name] for name in flat if name not in ("workload", "seed")}
    devices = machine.gpus()
    return CommandRun(
        definition, values, config.seed, folder, budget_s,
        devices=devices[: definition.gpus or len(devices)],
        threads=machine.threads() if threads is None else threads,
    )  # fmt: skip


def run(command: CommandRun, stopped: Callable[[], bool]) -> Iterator[Point | End]:
    """Run one trial whose journal has its start, and yield its points and its end, each of which
    the journal has then. `stopped`: asked several times a second whether to end it (`pruned`).

    A run that was interrupted begins again, or goes on from its last checkpoint if its program has
    printed `CHECKPOINT path`. Raises `OSError` where the journal cannot be written, or the program
    was edited meanwhile: then the run has no end, and goes on later.
    """
    folder, journal = command.folder, Journal(command.folder)
    has_run = any(line["event"] == "worker" for line in trial_record.events(folder))
    if (state := resumable(folder)) is not None:
        journal.resumed(state.values)
    elif has_run:
        journal.restarted(INTERRUPTED)
    device = "cuda" if command.devices else "cpu"
    journal.write("worker", device=device, threads=command.threads or os.cpu_count())
    progress = ProgressFile(folder)  # for the console, where a run prints no value for long
    command = dataclasses.replace(command, resumed=state, timeout_s=_timeout_s(command))
    progress.part("train")
    worktrees.check_unedited(folder)

    for event in execute(command, stopped, journal.write):
        if isinstance(event, Point):
            journal.point(event)
        else:
            worktrees.check_unedited(folder)
            if event.status == Status.OK and (why := _other_unit(folder)):
                event = dataclasses.replace(event, status=Status.ERROR, reason=why)
            journal.end_trial(event)
            (folder / DOING).unlink(missing_ok=True)
        yield event


def _timeout_s(run: CommandRun) -> float | None:
    """Return the seconds after which a process has failed: a multiple of the longest run that ended
    ok, its earlier processes included, and of the budget."""
    if run.definition.timeout is not None:
        return run.definition.timeout
    others = trial_record.read_trials(run.folder.parents[1])
    ends = (other.end for other in others if other.end is not None and other.status == Status.OK)
    longest_s = max((sum(end.seconds.values()) for end in ends), default=0.0)
    if run.limit_s is not None:
        return TIMEOUT * max(longest_s, run.limit_s, 10 * LEAST_S)
    return TIMEOUT * max(longest_s, LEAST_S) if longest_s else None


def _other_unit(folder: Path) -> str:
    """Return that the values of a run have another unit than those of the first one; '': no."""
    runs = (trial_record.read_trial(run) for run in (folder, folder.parent / "t0000"))
    ours, theirs = (run.clock.get("unit") if run is not None else None for run in runs)
    if theirs is None or ours == theirs:
        return ""
    return f"its values are in {ours or 'no unit'}, those of t0000 in {theirs or 'no unit'}"


def command_line(config: CommandSystems) -> str:
    """Return the command of a configuration, to be run by hand; capitals are to be filled in."""
    run = run_of(config, Path("FOLDER"), None)
    places = {
        "seed": config.seed, "folder": run.folder, "gpus": run.definition.gpus or "GPUS",
        "port": "PORT", "budget_s": "SECONDS",
    }  # fmt: skip
    words = run.definition.template.render(run.values, places)
    line = words[-1] if run.definition.shell else shlex.join(words)
    folder = Path(run.definition.folder).resolve()
    return line if folder == Path.cwd() else f"cd {shlex.quote(str(folder))} && {line}"


def resumable(folder: Path) -> State | None:
    """Return what was known at the last checkpoint of a run without an end; None: it begins anew.

    This is all that a process which goes on knows of those before it.
    """
    state = None
    for line in trial_record.events(folder):
        if line["event"] == CHECKPOINT and line.get("state"):
            state = State(**line["state"])
        elif line["event"] in ("restarted", "end"):
            state = None
    return state


def artifacts(folder: Path) -> list[Path]:
    """Return what a run left: its lines `ARTIFACT path`, or else its last `CHECKPOINT path`."""
    lines: list[dict[str, Any]] = []
    for line in trial_record.events(folder):
        if line["event"] == "restarted":
            lines = []
        elif line["event"] == CHECKPOINT:
            lines.append(line)
    chosen = [line for line in lines if line.get("state") is None] or lines[-1:]
    return [folder / path for path in dict.fromkeys(line["path"] for line in chosen)]


# ---- comparisons
class CommandBackend(Backend):
    """Runs one command at a time, or one on each of equal devices of this machine."""

    def __init__(
        self, folder: Path, configs: Sequence[CommandSystems], run_devices: Sequence[RunDevice]
    ) -> None:
        """`folder`: of the comparison, whose `configs` run."""
        self.interrupt_s = MARGIN_S + max(config.definition.grace for config in configs)
        here, sizes = resources.local(), sorted({config.parallel.workers for config in configs})
        # Whether it has as many GPUs as a command asks for was checked before
        machine = Machine(max(here.cores, here.gpus, sizes[-1]), here.gpus)
        count = len(run_devices) or 1
        partition = ResourcePartition((machine,), tuple(sizes), False, count == 1, at_once=count)
        self.devices = Pool(partition)
        self._folder, self._run_devices = folder, run_devices
        self._cache: Path | None = None
        self._say: Callable[[str], None] = lambda line: None
        self._lock, self._ended = threading.Lock(), 0
        self._written: dict[Path, WrittenFiles] = {}

    def run(self, spec: TrialSpec, check: Callable[[], bool]) -> Iterator[Reported]:
        """Run a command, and yield its points; see `Backend.run`.

        Raises `ConfigError` where runs at the same time write the same files.
        """
        config = cfg.configuration_of(trial_record.read_begun(spec.folder))
        assert isinstance(config, CommandSystems)
        command = run_of(config, spec.folder, spec.budget.seconds)
        command = dataclasses.replace(command, cache=self._cache)
        if self._run_devices:
            device = self._run_devices[spec.run_device]
            device.pin()
            gpus = () if device.gpu is None else (device.gpu,)
            command = dataclasses.replace(command, devices=gpus, threads=device.threads)
        with self._lock:
            runs_in = Path(command.definition.folder)
            if self._ended < PAIR and runs_in not in self._written:
                self._written[runs_in] = WrittenFiles(runs_in, self._folder)
        for event in run(command, check):
            if isinstance(event, Point):
                yield event.flat
        with self._lock:
            self._ended += 1
            if self._ended == PAIR:
                self._look_at_written()

    def warm_up(
        self,
        configs: Mapping[str, CommandSystems],
        budget_s: float | None,
        say: Callable[[str], None],
    ) -> None:
        """Run each side once, which does not count, so that all runs share what it has compiled."""
        self._cache = self._folder / "cache"
        for side, config in configs.items():
            if (place := self._folder / "warm-up" / side).with_suffix(".done").exists():
                continue
            shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
            command = dataclasses.replace(run_of(config, place, budget_s), cache=self._cache)
            *_, end = execute(command)
            assert isinstance(end, End)
            say(f"{side}: one run to compile, which does not count: {end.status} {end.reason}")
            place.with_suffix(".done").touch()

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

    def say_through(self, say: Callable[[str], None]) -> None:
        """Call `say` with what concerns the files that runs write."""
        self._say = say
