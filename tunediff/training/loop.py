"""Run one training: the loop around a workload's steps, with clock, evaluations, points."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from tunediff import config as cfg
from tunediff.core import text
from tunediff.core.errors import EvaluationStoppedError
from tunediff.core.point import Point
from tunediff.core.target import TIME_TO_TARGET
from tunediff.core.trial_record import NotFiniteError
from tunediff.data import randomness
from tunediff.training import checkpoints, evaluation, hardware, memory, outcome
from tunediff.training.engine import Engine, Facts
from tunediff.training.feed import Feed, WarmupReplay
from tunediff.training.meter import Meter

Build = Callable[[int, Sequence[Any]], Feed]
"""Makes the feed that has already given so many batches, or stood at each rank's position."""


def batches(engine: Engine, build: Build, *, reseed: bool = True) -> Iterator[Any]:
    """Yield the training's batches; between two segments, judge, save and report.

    `build` makes the feed of the batches. `reseed`: seed the global generators here, which
    differ between ranks from then on, as dropout must.
    """
    # ---- set up
    outcome.check_begun(engine)
    engine.setup.close()
    engine.clock.before_first_batch_s = engine.world.agree(engine.clock.seconds["setup"])
    if not all(observer.begin(engine) for observer in engine.observers):
        engine.done = True
        raise outcome.NotTrainedError
    if reseed:
        torch.manual_seed(engine.config.seed + 1 + engine.world.rank)
        randomness.seed_libraries(engine.config.seed + 1 + engine.world.rank)

    # ---- restore a checkpoint, warm up, and put everything back
    checkpoint = restore(engine, build)
    # Those of the checkpoint, which fetching the first batch may have drawn from.
    generators = engine.state.global_generators()
    yield from warm_up(engine, checkpoint)
    engine.state.set_global_generators(*generators)
    del checkpoint  # it holds all that is learned once more
    goes_on = [report(engine, point) for point in engine.points]
    engine.stopping = not all(goes_on)
    engine.saved_s = engine.world.agree(engine.clock.read())

    # ---- train and evaluate, segment by segment
    total = engine.config.evaluation.points
    while not engine.stopping and not engine.complete:
        index = len(engine.points) + 1
        with engine.clock.part("train"), engine.loader_processes.running():
            engine.pace.aim(index / total)
            while not engine.stopping and not engine.pace.reached:
                yield from engine.capture.step()
                after_step(engine)
        if engine.pace.reached:
            evaluate_point(engine, index, index / total)
        else:  # it was asked to stop
            checkpoints.save(engine)

    # ---- the weights that are exported, where the last point was not judged here on all ranks
    if engine.world.any(engine.judged is None):
        kept = engine.judged, engine.judged_digest
        with engine.clock.part("checkpoint"):
            checkpoints.note_judged(engine, last=True)
        if kept[0] is not None:
            engine.judged, engine.judged_digest = kept
    engine.done = True
    engine.close()
    for observer in engine.observers:
        observer.after_loop(engine)


def after_step(engine: Engine) -> None:
    """Where the clock was read: check and report the loss, and write a checkpoint."""
    for observer in engine.observers:
        observer.after_step()
    pace = engine.pace
    if not pace.checked:
        return
    engine.meter.read()
    if engine.world.any(engine.meter.streak >= engine.amp.patience):
        steps = text.pluralize(pace.steps, "step")
        raise NotFiniteError(f"the loss is not finite after {steps} ({pace.train_s:.1f} s)")
    for observer in engine.listeners:
        loss = float(engine.step.loss) if engine.step.loss is not None else 0.0
        scalars = {**pace.position(), "loss": loss}
        if math.isfinite(engine.step.learning_rate):
            scalars["learning_rate"] = engine.step.learning_rate
        observer.scalars(scalars)
    if engine.world.any(engine.asks_to_stop()):
        engine.stopping = True
    elif pace.train_s - engine.saved_s > engine.checkpoint_every_s and not pace.reached:
        engine.loader_processes.pause()
        checkpoints.save(engine)
        engine.loader_processes.resume()
        engine.saved_s = pace.train_s


# ---- before the loop
def restore(engine: Engine, build: Build) -> Mapping[str, Any] | None:
    """Find the checkpoint, measure the device's peak, and start loaders at their place."""
    with engine.clock.part("setup"):
        checkpoint = checkpoints.find(engine)
        peak = hardware.peak_flops_per_s(engine.device, engine.amp.dtype, engine.amp.fastest_matmul)
        engine.peak_flops_per_s = engine.world.total(peak * engine.strategy.devices)
        memory.reset(engine.device)  # what was needed until here is not the training's
        engine.warm_ups = engine.compilation.warm_ups(engine.device.type)
        if not (cfg.of(engine.config).warms_up or engine.config.compile.active):
            engine.warm_ups = 0
        batches, positions = 0, list[Any]()
        if checkpoint is not None:
            batches = checkpoint["pace"]["steps"] * engine.step.accumulation
            positions = checkpoint["positions"]
            engine.state.put_generators(checkpoint)
        with engine.loader_processes.tracked():
            feed = build(batches, positions)
            engine.feed = WarmupReplay(feed, engine.step.accumulation, engine.warm_ups)
        engine.loader_processes.pause()
    for observer in engine.listeners if checkpoint is None else ():
        observer.restarted(engine.restart_reason)
    return checkpoint


def warm_up(engine: Engine, checkpoint: Mapping[str, Any] | None) -> Iterator[Any]:
    """Yield the first batch for steps that load, tune and compile; then undo them.

    Without compilation it counts as setup: libraries and kernels are loaded once.
    """
    with engine.clock.part("setup"):
        before = checkpoint or engine.state.copied()
    engine.warming_up = True
    with engine.clock.part("compile" if engine.config.compile.active else "setup"):
        began = time.monotonic()
        if engine.warm_ups:
            with engine.compilation.noting(), counting_flops(engine):
                yield from engine.passes()
        engine.world.synchronize()
        first_step_s = time.monotonic() - began
        for _ in range(1, engine.warm_ups):
            yield from engine.passes()
    if facts := engine.shared_code.charge(engine.clock, resumed=checkpoint is not None):
        engine.about(facts)
    engine.warming_up = False
    with engine.clock.part("setup"):
        engine.state.put(before)
        if checkpoint is not None:
            engine.clock.load_state_dict(checkpoint["clock"])
            engine.clock.before_first_batch_s = checkpoint["before_first_batch_s"]
            engine.pace.load_state_dict(checkpoint["pace"])
        constant = {
            "first_step_s": first_step_s,
            "peak_flops_per_s": engine.peak_flops_per_s,
            "before_first_batch_s": engine.clock.before_first_batch_s,
        }
        if isinstance(engine.flops_per_sample, float | int):
            constant["flops_per_sample"] = engine.flops_per_sample
        engine.meter = Meter(
            engine.clock, engine.pace, engine.phases, engine.world, engine.config.devices, constant
        )
        if checkpoint is not None:
            engine.meter.load_state_dict(checkpoint["meter"])


@contextlib.contextmanager
def counting_flops(engine: Engine) -> Iterator[None]:
    """Count a step's arithmetic if the workload asks; compiled models show no operations."""
    if engine.flops_per_sample != "count" or engine.config.compile.active:
        yield
        return
    with FlopCounterMode(display=False) as counter:
        yield
    flops = engine.world.total(float(counter.get_total_flops()))
    engine.flops_per_sample = flops / engine.samples_per_step


# ---- every point
def evaluate_point(engine: Engine, index: int, fraction: float) -> None:
    """Measure, judge, save and report; the clock of the budget stands still.

    Where the training was asked to stop, the point is measured and judged after a resume.
    """
    if not engine.pace.steps:
        what = "setup and compiling" if engine.budget.setup_charged else "compiling"
        raise RuntimeError(
            f"no step was trained: {what} took {engine.clock.train_s:.0f} s, which the budget is"
            " charged with"
        )

    point = _measured(engine, index, fraction)
    findings = {} if engine.stopping else _judged(engine)
    if engine.stopping:
        checkpoints.save(engine)
        return

    engine.points.append(
        dataclasses.replace(
            point,
            metrics={**point.metrics, **findings},
            seconds=dict(engine.clock.seconds),
            weights_digest=engine.judged_digest or None,
        )
    )
    note_target(engine)
    engine.meter.restart()
    checkpoints.save(engine)
    if engine.evaluates:  # what judging and saving need is not what training needs
        memory.restart_peak(engine.device, engine.points[-1].peak_host_memory_mib)
    engine.saved_s = engine.pace.train_s
    engine.stopping = not report(engine, engine.points[-1])


def _measured(engine: Engine, index: int, fraction: float) -> Point:
    """Return the point of now. Raises `NotFiniteError`."""
    point = engine.meter.measure(index, fraction, engine.points[-1] if engine.points else None)
    title = engine.config.schema.title
    described = evaluation.plain_findings(engine.description(), "describe_with", title)
    metrics = {**point.metrics, **evaluation.finite_findings(described)}
    facts = {**engine.compilation.facts(), **engine.capture.facts()}
    point = dataclasses.replace(point, metrics=metrics, **facts)
    if not math.isfinite(point.loss):
        where = f"up to step {point.steps} ({point.train_s:.1f} s)"
        raise NotFiniteError(f"no loss was finite {where}")
    return point


def _judged(engine: Engine) -> Mapping[str, Any]:
    """Return what the evaluation finds; asks the training to stop if it was interrupted."""
    if not engine.evaluates or engine.evaluation is None:
        return {}
    with engine.clock.part("evaluation"):
        engine.judged_digest = None
        try:
            evaluate: Facts = functools.partial(evaluation.evaluate, engine)
            for observer in engine.observers:
                evaluate = functools.partial(observer.evaluate, engine, evaluate)
            findings = evaluate()
            if engine.judged_digest is None:
                note_judged(engine)
            return findings
        except EvaluationStoppedError:
            engine.stopping = True
            return {}


def note_judged(engine: Engine) -> None:
    """Take the weights as they are now for those that this point judges. All ranks call it.

    The engine calls it after an evaluation; one that swaps weights in calls it meanwhile.
    """
    last = (
        len(engine.points) + 1 == engine.config.evaluation.points and not engine.budget.open_ended
    )
    # With a target any point may be the last: what is found of it is not known here yet.
    checkpoints.note_judged(engine, last or engine.seconds_to_target is not None)


def note_target(engine: Engine) -> None:
    """Add to the last point when rank 0's values met the target, if they did."""
    if engine.seconds_to_target is None:
        return
    seconds = engine.seconds_to_target(engine.points)
    if (seconds := engine.world.agree(math.nan if seconds is None else seconds)) == seconds:
        metrics = {**engine.points[-1].metrics, TIME_TO_TARGET: seconds}
        engine.points[-1] = dataclasses.replace(engine.points[-1], metrics=metrics)


def report(engine: Engine, point: Point) -> bool:
    """Report a point; returns whether to train on after it, equal on all ranks."""
    goes_on = [observer.point(point) for observer in engine.listeners]  # all hear of it
    return bool(engine.world.agree(float(all(goes_on))))
