"""The worker processes of a search: a group of Ray Train workers that take one job after the other
from their slot.

`serve` is the loop of one worker, `work` trains one job, and `ReportingObserver` reports its points
to the driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy
import ray
import ray.train
import ray.train.torch
import torch
from ray.exceptions import RayError

from tunediff import config as cfg
from tunediff.config import code
from tunediff.config.systems import Precision, Systems
from tunediff.core import environment
from tunediff.core import trial_record as record
from tunediff.core.clock import Clock
from tunediff.core.journal import Journal
from tunediff.core.point import Point
from tunediff.core.progress import DOING, ProgressFile, subscribe
from tunediff.core.trial_record import End
from tunediff.distributed import World
from tunediff.training import memory, precision, process_settings, state, weights
from tunediff.training.compilation import cold_cache
from tunediff.training.engine import Engine
from tunediff.training.judging import judged
from tunediff.training.observer import Recorder, Shown
from tunediff.training.run_trial import TrialResult, run_trial
from tunediff.training.trial import TrainingOutcome, run
from tunediff.tuning import cluster
from tunediff.tuning.messages import Lost, get
from tunediff.tuning.trial_spec import TrialSpec


class Setup(TypedDict):
    """Settings that the workers of a group are started with."""

    slot: str
    generation: str
    threads: int
    """torch threads of each worker."""
    here: str
    """Folder to work in: that of the search's command."""


class SlotLostError(RuntimeError):
    """The slot was restarted and does not know the job; its driver will submit it again."""


def serve(setup: Setup) -> None:
    """Run one worker: take jobs from the slot until it says to leave. An exception ends the
    group."""
    # ---- set up this process, so that no trial pays for it
    context = ray.train.get_context()
    world = World(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    with contextlib.suppress(OSError):  # on another node there may be no such folder
        os.chdir(setup["here"])
    torch.set_num_threads(setup["threads"])  # Ray sets one thread by default
    memory.await_freed(world.device)
    _import_what_trials_need(world.device)

    # ---- take one job after the other
    slot, done = get(setup["slot"]), ""
    while True:
        assignment = ray.get(slot.take.remote(setup["generation"], done))
        if assignment is None:
            continue
        if assignment.job is None:
            return
        done = assignment.serial
        if work(assignment.job, done, slot, world):
            if world.main:
                ray.get(slot.renew.remote(setup["generation"]))
            return


def _import_what_trials_need(device: torch.device) -> None:
    """Import the modules that torch imports on first use: the first trial, the baseline, must not
    pay for it."""
    parameter = torch.nn.Parameter(torch.zeros(1, device=device))
    torch.optim.AdamW([parameter], lr=0.0)  # takes seconds the first time: it imports torch._dynamo
    import torchvision  # noqa: F401


class ReportingObserver(Recorder):
    """Write a job's points to its journal, report them to its driver, and wait for the driver's
    decision."""

    def __init__(
        self, job: TrialSpec, serial: str, slot: Any, points: int, stop_requests: Sequence[object]
    ) -> None:
        """`stop_requests`: a non-empty list stops the training, with a checkpoint."""
        super().__init__(job.folder, stop_requests)
        self._job, self._serial, self._slot, self._points = job, serial, slot, points

    def point(self, point: Point) -> bool:
        super().point(point)
        ray.get(self._slot.post.remote(self._serial, point))
        if point.index == self._points:
            return True  # the curve is complete: there is nothing to decide
        while (answer := ray.get(self._slot.decision.remote(self._serial, point.index))) is None:
            pass
        if answer == "unknown":
            raise SlotLostError(f"the slot was restarted and knows nothing of {self._job.name}")
        return bool(answer == "go")

    def show(self, name: str, what: Shown) -> None:
        if self._job.keeps:
            super().show(name, what)


def work(job: TrialSpec, serial: str, slot: Any, world: World) -> bool:
    """Train one job and write its `end` event; then raise a fault that may have harmed the process.

    Returns whether the training has changed settings of the process, on any rank. They are put
    back, but objects that were made under them may live on: the next job needs other processes.
    Raises what says nothing about the configuration (a lost rank, a full disk, a slot that is gone)
    without an `end`.
    """
    print(f"{job.name}: {job.folder}", file=sys.stderr, flush=True)  # Ray's page of this process

    # ---- a trial that has ended meanwhile is only reported
    trial = record.read_trial(job.folder)
    if world.agree(float(trial is not None and trial.finished)):
        # Workers whose slot was killed live on for seconds, and may end a trial that was handed out
        # again meanwhile.
        if world.main and trial is not None:
            ray.get(slot.post.remote(serial, trial.end))
        return False

    settings, draining = dict[str, Any](), list[str]()

    def train() -> TrainingOutcome:
        _ = cfg.of(
            job.config
        ).code  # a file is imported once: what it sets meanwhile stays set for all its trials
        settings.update(process_settings.read())
        nodes = job.group.place.nodes if world.main else ()
        progress = ProgressFile(job.folder if world.main else None)
        with subscribe(progress), cluster.watched(nodes) as draining_nodes:
            outcome = _train(job, serial, slot, world, progress.part, draining_nodes)
        draining.extend(draining_nodes)
        return outcome

    try:
        # The slot's or the cluster's fault says nothing about this trial.
        result = run_trial(
            train, world, job.folder, (SlotLostError, RayError), job.group.place.per_gpu
        )
        if job.profile_steps and result.end is not None and result.end.status == "ok":
            result = _profiled(result, job, world)
        _conclude(result, job, serial, slot, world, draining)
    finally:
        changed = process_settings.restore(settings)
        _reset(world.device)
    if changed:
        message = f"train(trial) has changed the process: {', '.join(changed)}"
        print(
            f"{job.name}: {message}; put back, and the next trial gets other workers",
            file=sys.stderr,
            flush=True,
        )
    return world.any(bool(changed))


def _profiled(result: TrialResult, job: TrialSpec, world: World) -> TrialResult:
    """Profile a few further steps. Where that fails the trial stays `ok`, with the failure as its
    reason."""
    from tunediff.profiling import trace

    memory.reset(world.device)
    try:
        trace.write_operations(job.config, world, job.folder, job.profile_steps)
    except Exception as error:
        assert result.end is not None
        end = dataclasses.replace(
            result.end, reason=f"its operations were not profiled: {code.described(error)}"
        )
        return dataclasses.replace(result, end=end, error=error)  # the process may have been harmed
    return result


def _conclude(
    result: TrialResult,
    job: TrialSpec,
    serial: str,
    slot: Any,
    world: World,
    draining: Sequence[str],
) -> None:
    """End the trial, unless it goes on elsewhere or its failure says nothing about it; raise what
    broke it."""
    if result.error is not None:
        if result.end is not None:
            _write_traceback(result.error, job.folder, world.rank)
            _end(job, serial, slot, result.end, workers_end=True)
        raise result.error
    assert result.end is not None
    if world.main and draining and result.end.status == "pruned":
        # Its checkpoint is written, and its driver continues it on other nodes.
        ray.get(slot.post.remote(serial, Lost(f"node {', '.join(draining)} is draining")))
    elif world.main:
        _end(job, serial, slot, _with_reason_of_search(result.end, job.folder))


def _with_reason_of_search(end: End, folder: Path) -> End:
    """Return the end of a stopped trial with the reason that the search has written: this line
    replaces that one."""
    before = record.read_trial(folder) if end.status == "pruned" else None
    return (
        end
        if before is None or before.status != "pruned"
        else dataclasses.replace(end, reason=before.reason)
    )


def _write_traceback(error: Exception, folder: Path, rank: int) -> None:
    """Write what broke the training on this rank beside the trial's journal."""
    with contextlib.suppress(OSError):  # a full disk may be what went wrong
        (folder / f"traceback-rank{rank}.txt").write_text(
            code.trace(error), encoding="utf-8", errors="backslashreplace"
        )


def _end(job: TrialSpec, serial: str, slot: Any, end: End, workers_end: bool = False) -> None:
    """Write the end of the trial to its journal, then report it to its driver; `workers_end`: see
    `Slot.post`."""
    with contextlib.suppress(OSError):  # the driver still gets it
        Journal(job.folder).end_trial(end)
        (job.folder / DOING).unlink(missing_ok=True)
    ray.get(slot.post.remote(serial, end, workers_end))


def _reset(device: torch.device) -> None:
    """Undo what tunediff sets for the whole process, and free the memory that a trial left."""
    precision.set_backends(Precision(), device.type)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    torch.compiler.reset()
    memory.reset(device)


def _train(
    job: TrialSpec, serial: str, slot: Any, world: World, on_part: Callable[[str], object],
    stop_requests: Sequence[object],
) -> TrainingOutcome:  # fmt: skip
    """Train, and run the job's final evaluation.

    `on_part` is called with the name of each part of the time that begins; a non-empty list
    `stop_requests` stops the training with a checkpoint.
    """
    # ---- record who trains, on what
    config, clock = job.config, Clock(job.budget, world.synchronize, on_part=on_part)
    observer = ReportingObserver(job, serial, slot, config.evaluation.points, stop_requests)
    if world.main:
        device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
        observer.journal.write(
            "worker", pid=os.getpid(), threads=torch.get_num_threads(), device=device,
            environment=environment.describe(),  # of this node, which the driver's need not be
            not_effective=cfg.not_effective(config, world.device.type),
        )  # fmt: skip

    # ---- train
    with cold_cache(config.compile):
        folder = job.folder if job.keeps else None
        outcome = run(
            Engine(
                config,
                job.budget,
                world,
                observer,
                folder=folder,
                evaluates=job.evaluates,
                clock=clock,
            )
        )
    if world.main and outcome.unread:
        Journal(job.folder).write("unread", knobs=outcome.unread)
    return _after_training(job, outcome, clock, world) if outcome.finished else outcome


def _after_training(
    job: TrialSpec, outcome: TrainingOutcome, clock: Clock, world: World
) -> TrainingOutcome:
    """Keep the weights and judge them once more, as the job asks for."""
    if world.main and job.keeps:
        about = weights.about(job.config, job.folder, outcome.steps)
        weights.save(outcome.weights, job.folder / weights.NAME, about)
    if job.final:
        with clock.part("evaluation"):
            evaluate_finally(job.config, job.final, outcome, world, job.folder)
        outcome = dataclasses.replace(outcome, seconds=dict(clock.seconds))
    return outcome


def evaluate_finally(
    config: Systems,
    protocol: Mapping[str, Any],
    outcome: TrainingOutcome,
    world: World,
    folder: Path,
) -> None:
    """Judge the finished model once more with other `evaluation.` knobs and write the journal's
    `final` event.

    Does nothing where an earlier attempt, which was killed later, has done so already.
    """
    judged_steps = (
        event.get("steps") for event in record.events(folder) if event["event"] == "final"
    )
    if world.agree(float(outcome.steps in judged_steps)):
        return
    whole = state.broadcast(outcome.weights, world)
    findings = judged(cfg.override(config, protocol), whole, world, guarded=False)
    if world.main:
        Journal(folder).write("final", steps=outcome.steps, **findings)
