"""Run one training: the loop around a workload's steps, with clock, evaluations, points."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from tunediff import config as cfg
from tunediff.core import text
from tunediff.core.errors import EvaluationStoppedError
from tunediff.core.point import Point
from tunediff.core.target import TIME_TO_TARGET
from tunediff.core.trial_record import REFUSED, NotFiniteError
from tunediff.data import randomness
from tunediff.data.loader_processes import LoaderProcesses
from tunediff.training import checkpoints, evaluation, hardware, memory, outcome
from tunediff.training.capture.step_capture import StepCapture
from tunediff.training.feed import Feed, Position, WarmupReplay
from tunediff.training.meter import Meter
from tunediff.training.step import OptimizerStep
from tunediff.training.training_run import TrainingRun

MOST_LEFT_OUT = 100
"""Batches in a row of a loader of the user's own that a loop may take without a step."""

Build = Callable[[int, Position | None], Feed]
"""Makes the feed that has already given so many batches, or stood at a position."""


class Engine(TrainingRun):
    """Trains until the budget is spent. A workload sees it through `Trial`."""

    def __init__(self, *args: Any, checkpoint_every_s: float = 300.0, **options: Any) -> None:
        """`checkpoint_every_s`: training seconds between checkpoints of a segment."""
        super().__init__(*args, **options)
        self.checkpoint_every_s, self.saved_s = checkpoint_every_s, 0.0
        """Interval of checkpoints, and the last one, in training seconds."""
        self.step = OptimizerStep(self, self.count_step)
        make = self.make_graph
        self.capture = StepCapture(self, self, make) if make is not None else None
        if self.capture is not None:
            self.step.rate_of = self.capture.learning_rate
            self.step.on_update = self.capture.count
        elif self.not_captured and self.world.main:
            self.observer.about(self.capture_facts())
        self.stride = 0.0
        """The part of the training that the last step took, in units of `progress`."""
        self._counted = 0.0  # the furthest schedule after a step
        self.stopping = False
        """Whether it was asked to stop."""
        self.batches_left_out = 0
        """Batches in a row, up to the last one, that the loop took and did not train."""
        self.loader_processes = LoaderProcesses()
        self.setup = contextlib.ExitStack()
        self.setup.enter_context(self.clock.part("setup"))  # until the first batch is requested

    # ---- the loop
    def batches(self, build: Build, *, reseed: bool = True) -> Iterator[Any]:
        """Yield the training's batches; between two segments, judge, save and report.

        `build` makes the feed of the batches. `reseed`: seed the global generators here, which
        differ between ranks from then on, as dropout must.
        """
        # ---- set up
        outcome.check_begun(self)
        self.setup.close()
        self.clock.before_first_batch_s = self.world.agree(self.clock.seconds["setup"])
        if not self.program.begin(self):
            self.done = True
            raise outcome.NotTrainedError
        if reseed:
            torch.manual_seed(self.config.seed + 1 + self.world.rank)
            randomness.seed_libraries(self.config.seed + 1 + self.world.rank)

        # ---- restore a checkpoint, warm up, and put everything back
        checkpoint = self.restore(build)
        # Those of the checkpoint, which fetching the first batch may have drawn from.
        generators = self.state.global_generators()
        yield from self.warm_up(checkpoint)
        self.state.set_global_generators(*generators)
        del checkpoint  # it holds all that is learned once more
        goes_on = [self.report(point) for point in self.points]
        self.stopping = not all(goes_on)
        self.saved_s = self.world.agree(self.clock.read())
        self.meter.restart()

        # ---- train and evaluate, segment by segment
        total = self.config.evaluation.points
        while not self.stopping and not self.complete:
            index = len(self.points) + 1
            with self.clock.part("train"), self.loader_processes.running():
                self.pace.aim(index / total)
                while not self.stopping and not self.pace.reached:
                    yield from self.passes() if self.capture is None else self.capture.step()
                    if not self.batches_left_out:
                        self.after_step()
            if self.pace.reached:
                self.evaluate_point(index, index / total)
            else:  # it was asked to stop
                checkpoints.save(self)

        # ---- the weights that are exported, where the last point was not judged here on all ranks
        if self.world.any(self.judged is None):
            kept = self.judged, self.judged_digest
            with self.clock.part("checkpoint"):
                checkpoints.note_judged(self, last=True)
            if kept[0] is not None:
                self.judged, self.judged_digest = kept
        self.done = True
        self.close()
        self.program.after_loop(self)

    def fetch_batch(self) -> Any:
        """Return the next batch on the device."""
        assert self.feed is not None
        # On a GPU it is the device's waiting that counts, see `Meter.read`
        self.phases.switch("data_wait")
        with contextlib.ExitStack() as waiting:
            if not self.phases.of_device:
                waiting.enter_context(self.clock.part("data_wait", synchronize=False))
            waiting.enter_context(self.loader_processes.tracked())
            fetched = self.feed.fetch()
        self.phases.switch("host_to_device")
        return self.feed.move(fetched)

    def fetch_batches(self) -> list[Any]:
        """Return the batches of all passes of a step."""
        batches = [self.fetch_batch() for _ in range(self.step.accumulation)]
        self.phases.switch(None)
        return batches

    def passes(self, batches: list[Any] | None = None) -> Iterator[Any]:
        """Yield the batches of one optimizer step, the given ones or the next."""
        self.step.begin()
        for index in range(self.step.accumulation):
            self.step.begin_pass(index)
            batch = self.fetch_batch() if batches is None else batches[index]

            # ---- forward and backward pass, in the workload's loop
            self.phases.switch("forward")
            if self.config.compile.active:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            with contextlib.ExitStack() as stack:
                if not self.step.sync_gradients:
                    stack.enter_context(self.strategy.unsynchronized())
                stack.enter_context(self.program.batch(self, batch))
                yield batch
        self.phases.switch(None)

        # ---- was it trained?
        if self.step.updated:
            self.batches_left_out = 0
        elif self._may_leave_out():
            self.batches_left_out += 1
        else:
            raise self.mistake(
                "train(trial): a batch was taken and trial.step(loss, optimizer) not called: every"
                " batch that the loop gets is trained with one call of it, or counted by"
                " trial.record_step(loss, optimizer) after a step that the loop has made itself"
            )

    def _may_leave_out(self) -> bool:
        """Return whether the loop may leave out this batch, such as a shorter last one of a pass.

        Several ranks may not: each could leave out others. Nor may the first batch of a training,
        or too many in a row: a loop that never steps has no end.
        """
        if not self.own_loader or self.world.size > 1 or self.step.loss is not None:
            return False
        position = self.feed.position if self.feed is not None else None
        has_begun = position is not None and position.epoch >= 0
        return has_begun and self.batches_left_out < MOST_LEFT_OUT

    def count_replay(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Count a step that was replayed."""
        self.step.begin()
        self.step.loss, self.step.updated = loss, True
        self.step.learning_rate, self.batches_left_out = learning_rate, 0
        if not self.warming_up:
            self.count_step()

    def capture_facts(self) -> dict[str, Any]:
        """Return `capture`, as a `Point` has it: whether steps are replayed, or why not."""
        if self.capture is not None:
            return self.capture.facts()
        return {"capture": REFUSED + self.not_captured} if self.not_captured else {}

    def note_read(self, name: str) -> None:
        """Note that the workload reads a number that moves from step to step."""
        if self.capture is not None:
            self.capture.note_read(name)

    def count_step(self) -> None:
        """Count one optimizer step, which was queued on the device."""
        assert self.step.loss is not None
        self.meter.add(self.step.loss)
        # A reading of the clock may put the schedule back behind steps that were counted already.
        before = max(self._counted, self.pace.schedule)
        self.pace.step(self.samples_per_step)
        self.stride = max(0.0, self.pace.schedule - before)
        self._counted = before + self.stride

    def after_step(self) -> None:
        """Where the clock was read: check and report the loss, and write a checkpoint."""
        self.observer.after_step()
        pace = self.pace
        if not pace.checked:
            return
        self.meter.read()
        if self.world.any(self.meter.streak >= self.amp.patience):
            steps = text.pluralize(pace.steps, "step")
            raise NotFiniteError(f"the loss is not finite after {steps} ({pace.train_s:.1f} s)")
        if self.world.main:
            loss = float(self.step.loss) if self.step.loss is not None else 0.0
            scalars = {**pace.position(), "loss": loss}
            if math.isfinite(self.step.learning_rate):
                scalars["learning_rate"] = self.step.learning_rate
            self.observer.scalars(scalars)
        if self.world.any(self.observer.asks_to_stop()):
            self.stopping = True
        elif pace.train_s - self.saved_s > self.checkpoint_every_s and not pace.reached:
            self.loader_processes.pause()
            checkpoints.save(self)
            self.loader_processes.resume()
            self.saved_s = pace.train_s

    # ---- before the loop
    def restore(self, build: Build) -> Mapping[str, Any] | None:
        """Find the checkpoint, measure the device's peak, and start loaders at their place."""
        with self.clock.part("setup"):
            checkpoint = checkpoints.find(self)
            peak = hardware.peak_flops_per_s(self.device, self.amp.dtype, self.amp.fastest_matmul)
            self.peak_flops_per_s = self.world.total(peak * self.strategy.devices)
            memory.reset(self.device)  # what was needed until here is not the training's
            self.warm_ups = self.compilation.warm_ups(self.device.type)
            if not (cfg.of(self.config).warms_up or self.config.compile.active):
                self.warm_ups = 0
            batches = 0
            if checkpoint is not None:
                batches = checkpoint["pace"]["steps"] * self.step.accumulation
                self.state.put_generators(checkpoint)
            with self.loader_processes.tracked():
                feed = build(batches, checkpoints.position_in(self, checkpoint))
                self.feed = WarmupReplay(feed, self.step.accumulation, self.warm_ups)
            self.loader_processes.pause()
        if checkpoint is None and self.world.main:
            self.observer.restarted(self.restart_reason)
        return checkpoint

    def warm_up(self, checkpoint: Mapping[str, Any] | None) -> Iterator[Any]:
        """Yield the first batch for steps that load, tune and compile; then undo them.

        Without compilation it counts as setup: libraries and kernels are loaded once.
        """
        with self.clock.part("setup"):
            before = checkpoint or checkpoints.copied(self)
        self.warming_up = True
        with self.clock.part("compile" if self.config.compile.active else "setup"):
            began = time.monotonic()
            if self.warm_ups:
                with self.compilation.noting(), self.counting_flops():
                    yield from self.passes()
            self.world.synchronize()
            first_step_s = time.monotonic() - began
            for _ in range(1, self.warm_ups):
                yield from self.passes()
        if facts := self.shared_code.charge(self.clock, resumed=checkpoint is not None):
            self.observer.about(facts)
        self.warming_up = False
        with self.clock.part("setup"):
            checkpoints.put(self, before)
            if checkpoint is not None:
                self.clock.load_state_dict(checkpoint["clock"])
                self.clock.before_first_batch_s = checkpoint["before_first_batch_s"]
                self.pace.load_state_dict(checkpoint["pace"])
            constant = {
                "first_step_s": first_step_s,
                "peak_flops_per_s": self.peak_flops_per_s,
                "before_first_batch_s": self.clock.before_first_batch_s,
            }
            if isinstance(self.flops_per_sample, float | int):
                constant["flops_per_sample"] = self.flops_per_sample
            devices = self.config.devices
            self.meter = Meter(self.clock, self.pace, self.phases, self.world, devices, constant)
            if checkpoint is not None:
                self.meter.load_state_dict(checkpoint["meter"])

    @contextlib.contextmanager
    def counting_flops(self) -> Iterator[None]:
        """Count a step's arithmetic if the workload asks; compiled models show no operations."""
        if self.flops_per_sample != "count" or self.config.compile.active:
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        flops = self.world.total(float(counter.get_total_flops()))
        self.flops_per_sample = flops / self.samples_per_step

    # ---- every point
    def evaluate_point(self, index: int, fraction: float) -> None:
        """Measure, judge, save and report; the clock of the budget stands still.

        Where the training was asked to stop, what was measured is only saved: the point is judged
        after a resume, when nothing of the steps before could be measured any more.
        """
        if not self.pace.steps:
            what = "setup and compiling" if self.budget.setup_charged else "compiling"
            raise RuntimeError(
                f"no step was trained: {what} took {self.clock.train_s:.0f} s, which the budget is"
                " charged with"
            )

        point = self._measured(index, fraction)
        findings = {} if self.stopping else self._judged()
        if self.stopping:
            checkpoints.save(self, pending=point)
            return

        self.points.append(
            dataclasses.replace(
                point,
                metrics={**point.metrics, **findings},
                seconds=dict(self.clock.seconds),
                weights_digest=self.judged_digest or None,
            )
        )
        self.note_target()
        checkpoints.save(self)
        if self.evaluates:  # what judging and saving need is not what training needs
            memory.restart_peak(self.device, self.points[-1].peak_host_memory_mib)
        self.saved_s = self.pace.train_s
        self.meter.restart()
        self.stopping = not self.report(self.points[-1])

    def _measured(self, index: int, fraction: float) -> Point:
        """Return the point of now, or the one that an earlier process measured after this step.

        Raises `NotFiniteError`.
        """
        point = self.meter.measure(index, fraction, self.points[-1] if self.points else None)
        title = self.config.schema.title
        described = evaluation.plain_findings(self.description(), "describe_with", title)
        metrics = {**point.metrics, **evaluation.finite_findings(described)}
        facts = {**self.compilation.facts(), **self.capture_facts()}
        point = dataclasses.replace(point, metrics=metrics, **facts)
        earlier = self.pending
        if earlier is not None and (earlier.index, earlier.steps) == (index, point.steps):
            point = earlier
        if not math.isfinite(point.loss):
            where = f"up to step {point.steps} ({point.train_s:.1f} s)"
            raise NotFiniteError(f"no loss was finite {where}")
        return point

    def _judged(self) -> Mapping[str, Any]:
        """Return what the evaluation finds; asks the training to stop if it was interrupted."""
        if not self.evaluates or self.evaluation is None:
            return {}
        with self.clock.part("evaluation"):
            self.judged_digest = None
            try:
                findings = self.program.judge(self, lambda: evaluation.evaluate(self))
                if self.judged_digest is None:
                    self.note_judged()
                return findings
            except EvaluationStoppedError:
                self.stopping = True
                return {}

    def note_judged(self) -> None:
        """Take the weights as they are now for those that this point judges. All ranks call it.

        The engine calls it after an evaluation; one that swaps weights in calls it meanwhile.
        """
        last = len(self.points) + 1 == self.config.evaluation.points and not self.budget.open_ended
        # With a target any point may be the last: what is found of it is not known here yet.
        checkpoints.note_judged(self, last or self.seconds_to_target is not None)

    def note_target(self) -> None:
        """Add to the last point when rank 0's values met the target, if they did."""
        if self.seconds_to_target is None:
            return
        seconds = self.seconds_to_target(self.points)
        if (seconds := self.world.agree(math.nan if seconds is None else seconds)) == seconds:
            metrics = {**self.points[-1].metrics, TIME_TO_TARGET: seconds}
            self.points[-1] = dataclasses.replace(self.points[-1], metrics=metrics)

    def report(self, point: Point) -> bool:
        """Report a point; returns whether to train on after it, equal on all ranks."""
        return bool(self.world.agree(float(self.observer.point(point)) if self.world.main else 0.0))

    # ---- the end
    def close(self) -> None:
        """Stop what loads data, and the clock's part that is running before the first batch."""
        self.setup.close()
        if self.capture is not None:
            self.capture.close()
        self.phases.switch(None)
        self.loader_processes.close()
        if self.feed is not None:
            self.feed.close()
