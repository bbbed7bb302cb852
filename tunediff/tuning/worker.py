"""One trial on one rank, in a process of its own that is forked from a template of its workload.

`training/prepared.py` makes the template; `tuning/templates.py` is both's parent. No Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tunediff import config as cfg
from tunediff.config import code, workload
from tunediff.config.systems import Systems
from tunediff.core import environment
from tunediff.core import trial_record as record
from tunediff.core.clock import Clock
from tunediff.core.journal import Journal
from tunediff.core.outcomes import Status
from tunediff.core.point import Point
from tunediff.core.progress import DOING, ProgressFile, subscribe
from tunediff.core.trial_record import End
from tunediff.distributed import World, world_of_environment
from tunediff.training import compilation, memory, prepared, state, weights
from tunediff.training.engine import Engine
from tunediff.training.judging import judged
from tunediff.training.observer import Observer, Recorder, Shown
from tunediff.training.outcome import TrainingOutcome, TrialResult, run_trial
from tunediff.training.trial import run
from tunediff.tuning.trial_spec import TrialSpec


# ---- a trial
class ParentLostError(RuntimeError):
    """The process that has started this one does not answer."""


class ReportingObserver(Recorder):
    """Write a trial's points to its journal, report them, and wait for the decision after each."""

    def __init__(self, job: TrialSpec, connection: Connection) -> None:
        super().__init__(job.folder)
        self._job, self._connection = job, connection

    def point(self, point: Point) -> bool:
        super().point(point)
        self._connection.send(point)
        return _goes_on(self._job, point, self._connection)

    def show(self, name: str, what: Shown) -> None:
        if self._job.keeps:
            super().show(name, what)


def _goes_on(job: TrialSpec, point: Point, connection: Connection) -> bool:
    """Wait for the decision after a point that was sent; return whether the trial goes on."""
    if point.index >= job.points:
        return True  # the curve is complete: there is nothing to decide
    try:
        return bool(connection.recv() == "go")
    except (EOFError, OSError) as error:
        raise ParentLostError("its parent process is gone") from error


def start(connection: Connection, job: TrialSpec) -> None:
    """Train a trial as one of its ranks; the function of a template's run."""
    prepared.begin(job.group.place.threads)
    with world_of_environment() as world:
        work(job, connection, world)


def work(job: TrialSpec, connection: Connection, world: World, *observers: Observer) -> None:
    """Train one trial, write its `end` event and send it. `observers`: watch its training.

    Raises what says nothing about the configuration (a lost rank, a full disk) without an `end`.
    """
    print(f"{job.name}: {job.folder}", file=sys.stderr, flush=True)

    # ---- a trial that has ended meanwhile is only reported
    trial = record.read_trial(job.folder)
    if world.agree(float(trial is not None and trial.finished)):
        # Workers outlive their slot by seconds, and may end a trial that was handed out again.
        if world.main and trial is not None:
            connection.send(trial.end)
        return

    not_captured = trial.not_captured if trial is not None else ""
    if cfg.is_command(job.workload):
        _run_command(job, connection)
        return
    reporting = ReportingObserver(job, connection)

    def train() -> TrainingOutcome:
        progress = ProgressFile(job.folder if world.main else None)
        with subscribe(progress):
            return _train(job, reporting, observers, world, progress.part, not_captured)

    # A parent that is gone says nothing about this trial.
    result = run_trial(train, world, job.folder, (ParentLostError,), job.target)
    if job.profile_steps and result.end is not None and result.end.status == Status.OK:
        result = _profiled(result, job, world)
    _conclude(result, job, connection, world)


def _run_command(job: TrialSpec, connection: Connection) -> None:
    """Run a trial that is a command, and report it."""
    stopped: list[Point] = []
    config, threads = cfg.configuration_of(record.read_begun(job.folder)), job.group.place.threads
    asked = config, job.folder, job.budget.seconds, threads
    for event in workload.commands.run(*asked, lambda: bool(stopped)):
        connection.send(event)
        if isinstance(event, Point) and not _goes_on(job, event, connection):
            stopped.append(event)


def _profiled(result: TrialResult, job: TrialSpec, world: World) -> TrialResult:
    """Profile a few further steps; if that fails, the trial stays `ok` with the reason."""
    from tunediff.profiling import trace  # imports torch's profiler

    memory.reset(world.device)
    try:
        trace.write_operations(
            cfg.configuration_of(record.read_begun(job.folder)),
            world,
            job.folder,
            job.profile_steps,
        )
    except Exception as error:
        assert result.end is not None
        end = dataclasses.replace(
            result.end, reason=f"its operations were not profiled: {code.described(error)}"
        )
        return dataclasses.replace(result, end=end, error=error)
    return result


def _conclude(
    result: TrialResult,
    job: TrialSpec,
    connection: Connection,
    world: World,
) -> None:
    """End the trial, unless it goes on elsewhere or its failure says nothing about it."""
    if result.end is None:
        assert result.error is not None
        raise result.error
    if result.error is not None:
        _write_traceback(result.error, job.folder, world.rank)
        _end(job, connection, result.end)
        if world.size > 1:  # the other ranks wait for this one in a collective
            raise result.error
    elif world.main:
        _end(job, connection, result.end)


def _write_traceback(error: Exception, folder: Path, rank: int) -> None:
    """Write what broke the training on this rank beside the trial's journal."""
    with contextlib.suppress(OSError):  # a full disk may be what went wrong
        (folder / f"traceback-rank{rank}.txt").write_text(
            code.trace(error), encoding="utf-8", errors="backslashreplace"
        )


def _end(job: TrialSpec, connection: Connection, end: End) -> None:
    """Write the end of the trial to its journal, then report it to its driver."""
    with contextlib.suppress(OSError):  # the driver still gets it
        Journal(job.folder).end_trial(end)
        (job.folder / DOING).unlink(missing_ok=True)
    connection.send(end)


def _train(
    job: TrialSpec, reporting: ReportingObserver, others: Sequence[Observer], world: World,
    on_part: Callable[[str], object], not_captured: str,
) -> TrainingOutcome:  # fmt: skip
    """Train, and run the job's final evaluation; `on_part` is called with the name of each part of
    the time that begins. `not_captured`: why an earlier process could not capture the step."""
    # ---- record who trains, on what
    config: Systems = cfg.configuration_of(record.read_begun(job.folder))
    clock = Clock(job.budget, world.synchronize, on_part=on_part)
    if world.main:
        device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
        reporting.journal.write(
            "worker", pid=os.getpid(), threads=torch.get_num_threads(), device=device,
            environment=environment.describe(),  # of this node, which the driver's need not be
            not_effective=cfg.not_effective(config, world.device.type),
        )  # fmt: skip

    # ---- train
    with compilation.cold_cache(config.compile):
        folder = job.folder if job.keeps else None
        outcome = run(
            Engine(
                config,
                job.budget,
                world,
                reporting,
                *others,
                folder=folder,
                evaluates=job.evaluates,
                clock=clock,
                compiled=compilation.code_folder(job.folder),
                seconds_to_target=job.seconds_to_target,
                not_captured=not_captured,
            )
        )
    if world.main and outcome.unread:
        Journal(job.folder).write("unread", knobs=outcome.unread)
    return _after_training(job, config, outcome, clock, world) if outcome.finished else outcome


def _after_training(
    job: TrialSpec, config: Systems, outcome: TrainingOutcome, clock: Clock, world: World
) -> TrainingOutcome:
    """Keep the weights and judge them once more, as the job asks for."""
    if world.main and job.keeps:
        about = weights.about(config, job.folder, outcome.steps)
        weights.save(outcome.weights, job.folder / weights.NAME, about)
    if job.final:
        with clock.part("evaluation"):
            evaluate_finally(config, job.final, outcome, world, job.folder)
        outcome = dataclasses.replace(outcome, seconds=dict(clock.seconds))
    return outcome


def evaluate_finally(
    config: Systems,
    protocol: Mapping[str, Any],
    outcome: TrainingOutcome,
    world: World,
    folder: Path,
) -> None:
    """Judge the finished model by other `evaluation.` knobs: the journal's `final` event.

    Does nothing where an earlier attempt, which was killed later, has done so already.
    """
    judged_steps = (
        event.get("steps") for event in record.events(folder) if event["event"] == "final"
    )
    if world.agree(float(outcome.steps in judged_steps)):
        return
    of_rank_0 = state.broadcast(outcome.weights, world)
    findings = judged(cfg.override(config, protocol), of_rank_0, world)
    if world.main:
        Journal(folder).write("final", steps=outcome.steps, **findings)
