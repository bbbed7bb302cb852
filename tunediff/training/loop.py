"""Run one training: the loop around a workload's steps, with clock, evaluations, points."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils.flop_counter import FlopCounterMode

from tunediff import config as cfg
from tunediff.config.code import described
from tunediff.core import text
from tunediff.core.point import Point
from tunediff.core.target import TIME_TO_TARGET
from tunediff.core.trial_record import CHECKPOINT, NotFiniteError
from tunediff.data import randomness
from tunediff.training import evaluation, hardware, memory, outcome, state, weights
from tunediff.training.engine import Engine, Facts, Feed
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
    while not engine.stopping and not is_complete(engine):
        index = len(engine.points) + 1
        with engine.clock.part("train"), engine.loader_processes.running():
            engine.pace.aim(index / total)
            while not engine.stopping and not engine.pace.reached:
                yield from engine.capture.step()
                after_step(engine)
        if engine.stopping:  # a point that is due is measured and judged after a resume
            save_checkpoint(engine)
        else:
            evaluate_point(engine, index, index / total)

    # ---- the weights that are exported, where no last point was judged
    if engine.judged is None:
        with engine.clock.part("checkpoint"):
            note_judged(engine, keep=True)
    engine.done = True
    engine.close()
    for observer in engine.observers:
        observer.after_loop(engine)


def is_complete(engine: Engine) -> bool:
    """Return whether the last point has ended the training: budget spent, or target met."""
    if (
        engine.seconds_to_target is not None
        and engine.points
        and TIME_TO_TARGET in engine.points[-1]
    ):
        return True
    return len(engine.points) >= engine.config.evaluation.points and not engine.budget.open_ended


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
        save_checkpoint(engine)
        engine.loader_processes.resume()
        engine.saved_s = pace.train_s


# ---- before the loop
class WarmupReplay:
    """A feed whose first `count` batches are fetched at once and come again: for each of the
    `warm_ups` steps that are undone, and then for the first real step."""

    def __init__(self, feed: Feed, count: int, warm_ups: int) -> None:
        self._feed, first = feed, [feed.fetch() for _ in range(count)]
        self._start = feed.position
        # Copies: the loop may write into a batch.
        self._waiting = [
            *(batch for _ in range(warm_ups) for batch in copy.deepcopy(first)),
            *first,
        ]
        self._replays = warm_ups * count

    def fetch(self) -> Any:
        return self._waiting.pop(0) if self._waiting else self._feed.fetch()

    def move(self, fetched: Any) -> Any:
        moved = self._feed.move(fetched)
        if self._replays:
            self._replays -= 1
        else:
            self._start = None
        return moved

    @property
    def position(self) -> Any:
        """Return the position of the last batch that is no replay; first, the feed's start."""
        return self._start if self._start is not None else self._feed.position

    def close(self) -> None:
        self._feed.close()


def restore(engine: Engine, build: Build) -> Mapping[str, Any] | None:
    """Find the checkpoint, measure the device's peak, and start loaders at their place."""
    with engine.clock.part("setup"):
        checkpoint = find_checkpoint(engine)
        peak = hardware.peak_flops_per_s(engine.device, engine.amp.dtype, engine.amp.fastest_matmul)
        engine.peak_flops_per_s = engine.world.total(peak * engine.strategy.devices)
        memory.reset(engine.device)  # what was needed until here is not the training's
        engine.warm_ups = engine.compilation.warm_ups(engine.device.type)
        if not (
            engine.config.compile.active
            or getattr(cfg.of(engine.config).declared, "WARM_UP", True)  # a step that is undone
        ):
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
            with counting_flops(engine):
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


# ---- checkpoints
def save_checkpoint(engine: Engine) -> None:
    """Write all that the training has learned and measured. All ranks call it.

    Raises `OSError` where the disk is full.
    """
    if engine.folder is None:
        return
    with engine.clock.part("checkpoint"):
        with engine.exported() as now:
            content = engine.state.take()
            # What is kept anyway shares its memory, and is written once.
            content["result"] = engine.judged if engine.judged is not None else now
        content |= {
            "config": cfg.to_dict(engine.config),
            "clock": engine.clock.state_dict(),
            "before_first_batch_s": engine.clock.before_first_batch_s,
            "pace": engine.pace.state_dict(),
            "meter": engine.meter.state_dict(),
            "positions": engine.world.gather(engine.feed.position if engine.feed else None),
            "points": [point.flat for point in engine.points],
        }
        if engine.world.main:
            state.save(content, engine.folder)
        engine.world.barrier()


def find_checkpoint(engine: Engine) -> Mapping[str, Any] | None:
    """Return the checkpoint to go on from; None: the training begins at its first step.

    Rank 0 reads it and tells the others, so that none can go on alone. One that is of no use is set
    aside, and `engine.restart_reason` says why.
    """
    if engine.folder is None:
        return None
    reasons: list[str] = []
    content = state.load(engine.folder, reasons.append) if engine.world.main else None
    result = content.pop("result", {}) if content is not None else {}  # rank 0 has it alone
    content, reasons = state.broadcast(content, engine.world), engine.world.tell(reasons)
    if content is not None and (misfit := _misfit(engine, content)):
        if engine.world.main:
            state.set_aside(engine.folder)
        content, reasons = None, [misfit]
        engine.points = []
    if is_complete(engine):
        engine.judged, engine.judged_digest = result, engine.points[-1].weights_digest
    engine.restart_reason = "".join(reasons)
    return content


def _misfit(engine: Engine, content: Mapping[str, Any]) -> str:
    """Return why this training cannot take a checkpoint (version, model), or "".

    Tries it with a copy and undoes that: the warm-up must not change the checkpoint's own tensors.
    """
    before = engine.state.copied()
    error: Exception | None = None
    try:
        engine.points = [Point.of(flat) for flat in content["points"]]
        engine.state.put(state.copied(content))
    except Exception as raised:
        if memory.is_oom(raised):
            raise
        error = raised
    fails = engine.world.any(error is not None)
    engine.state.put(before)
    if not fails:
        return ""
    notes = ["on another rank"]
    if error is not None:
        notes = [described(error), *getattr(error, "__notes__", ())]
    return f"{CHECKPOINT} does not fit: {' '.join(', '.join(notes).split())}"


# ---- every point
def evaluate_point(engine: Engine, index: int, fraction: float) -> None:
    """Measure, judge, save and report; the clock of the budget stands still."""
    if not engine.pace.steps:
        what = "setup and compiling" if engine.budget.setup_charged else "compiling"
        raise RuntimeError(
            f"no step was trained: {what} took {engine.clock.train_s:.0f} s, which the budget is"
            " charged with"
        )

    point = _measured(engine, index, fraction)
    findings = _judged(engine)
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
    save_checkpoint(engine)
    if engine.evaluates:  # what judging and saving need is not what training needs
        memory.restart_peak(engine.device, engine.points[-1].peak_host_memory_mib)
    engine.saved_s = engine.pace.train_s
    engine.stopping = not report(engine, engine.points[-1])


def _measured(engine: Engine, index: int, fraction: float) -> Point:
    """Return the point of now. Raises `NotFiniteError`."""
    point = engine.meter.measure(index, fraction, engine.points[-1] if engine.points else None)
    title = engine.config.schema.title
    description = evaluation.plain_findings(engine.description(), "describe_with", title)
    metrics = {**point.metrics, **evaluation.finite_findings(description)}
    facts = {**engine.compilation.facts(), **engine.capture.facts()}
    point = dataclasses.replace(point, metrics=metrics, **facts)
    if not math.isfinite(point.loss):
        where = f"up to step {point.steps} ({point.train_s:.1f} s)"
        raise NotFiniteError(f"no loss was finite {where}")
    return point


def _judged(engine: Engine) -> Mapping[str, Any]:
    """Return what the evaluation finds."""
    if not engine.evaluates or engine.evaluation is None:
        return {}
    with engine.clock.part("evaluation"):
        engine.judged_digest = None
        evaluate: Facts = functools.partial(evaluation.evaluate, engine)
        for observer in engine.observers:
            evaluate = functools.partial(observer.evaluate, engine, evaluate)
        findings = evaluate()
        if engine.judged_digest is None:
            note_judged(engine)
        return findings


def note_judged(engine: Engine, keep: bool = False) -> None:
    """Take the weights as they are now for those that this point judges: rank 0 notes their digest,
    and of the last point, or to `keep` it, a copy. All ranks call it.

    The engine calls it after an evaluation; one that swaps weights in calls it meanwhile.
    """
    last = (
        len(engine.points) + 1 == engine.config.evaluation.points and not engine.budget.open_ended
    )
    # With a target any point may be the last: what is found of it is not known here yet.
    keep = keep or last or engine.seconds_to_target is not None
    with engine.exported() as now:
        engine.judged_digest = weights.digest(now) if engine.world.main else ""
        engine.judged = cast("dict[str, Any]", state.copied(now)) if keep else None


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
