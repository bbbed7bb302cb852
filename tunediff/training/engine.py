"""Run one training: the loop around a workload's steps, with its clock, evaluations, checkpoints
and points."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from tunediff.config import of
from tunediff.core import text
from tunediff.core.errors import EvaluationStoppedError
from tunediff.core.point import Point
from tunediff.core.trial_record import NotFiniteError
from tunediff.data import loader, randomness
from tunediff.data.gate import Gate
from tunediff.training import checkpoints, evaluation, hardware, memory, read_tracking
from tunediff.training.feed import Feed, Position, RepeatingLoader, WarmupReplay
from tunediff.training.meter import Meter
from tunediff.training.own_step import OwnStep
from tunediff.training.prefetched import Prefetched
from tunediff.training.step import OptimizerStep
from tunediff.training.training_run import TrainingRun

MOST_LEFT_OUT = 100
"""Batches in a row of a loader of the user's own that a loop may take without a step."""

CHANGED = (
    "train(trial) changes weights ({}) after the last evaluation; the weights that were judged are"
    " exported, without this change"
)


@dataclasses.dataclass(frozen=True)
class TrainingOutcome:
    """A training that ended."""

    points: list[Point]
    finished: bool
    """False: asked to stop before the budget was spent, as an open-ended training always is."""
    seconds: dict[str, float]
    steps: int
    samples: int
    peak: dict[str, float]
    """Peak memory in MiB, by the names of `Point`."""
    weights: Mapping[str, torch.Tensor]
    """What is exported: the weights as the last point has judged them; whole on rank 0."""
    reason: str = ""
    """What its user should know of a training that is in order."""
    unread: tuple[str, ...] = ()
    """Knobs that a user's workload never looked at, by dotted name: they change nothing."""


class NotTrainedError(BaseException):
    """Leaves `train(trial)` where nothing is trained: what follows its loop, such as saving,
    belongs to a training.

    No `Exception`, which workloads and frameworks may catch.
    """


class Engine(TrainingRun):
    """Trains until the budget is spent. A workload sees it through `Trial`."""

    saved_s = 0.0
    """Training seconds at the last checkpoint."""

    def __init__(self, *args: Any, checkpoint_every_s: float = 300.0, **options: Any) -> None:
        """`checkpoint_every_s`: training seconds between checkpoints within a segment; the rest as
        `TrainingRun` has it."""
        super().__init__(*args, **options)
        self.checkpoint_every_s = checkpoint_every_s
        self.step = OptimizerStep(self, self.count_step)
        self.own_step = OwnStep(self.compilation.detach, self.phases)
        self.stride = 0.0
        """The part of the training that the last step took, in units of `progress`."""
        self._counted = 0.0  # the furthest schedule after a step
        self.training = True
        """False once it was asked to stop."""
        self.done = False
        self.batches_left_out = 0
        """Batches in a row, up to the last one, that the loop took and did not train."""
        self.prefetched = Prefetched(self.clock, self.phases, Gate())
        self.setup = contextlib.ExitStack()
        self.setup.enter_context(self.clock.part("setup"))  # until the first batch is asked for

    # ---- what the workload trains on
    def batches_of_source(
        self,
        source: loader.Source,
        prepare: loader.Prepare | None,
        collate: Callable[[list[Any]], Any] | None,
        samples_each: int,
    ) -> Iterator[Any]:
        """Return the batches of a data set; see `Trial.batches`."""
        section, replicas = self.config.loader, self.strategy.replicas
        options = {"prepare": prepare, "collate": collate, "samples_each": samples_each}
        self.program.on_source(self, source, options)
        self.samples_per_step = section.batch_size * samples_each
        if (length := loader.length(source)) == 0:
            raise self.mistake("trial.batches: the data set is empty")
        order = loader.Order(
            length or 1,
            section.batch_size,
            section.accumulation,
            replicas.rank,
            replicas.size,
            self.config.seed,
        )
        return self.batches(
            lambda start, _: loader.build(
                source, section, order, self.device, start, prepare, collate
            )
        )

    def batches_of_loader(self, batches: Iterable[Any], samples: int | None) -> Iterator[Any]:
        """Return the batches of the user's own loader; see `Trial.steps`."""
        self.program.on_source(self, None, {})
        self.own_loader = True

        def build(start: int, position: Position | None) -> RepeatingLoader:
            feed = RepeatingLoader(batches, self.device, position=position)
            count = int(self.world.agree(samples if samples is not None else feed.samples))
            parts = self.strategy.replicas.size * self.step.accumulation
            self.samples_per_step = count * parts
            return feed

        return self.batches(build)

    # ---- the loop
    def batches(
        self, build: Callable[[int, Position | None], Feed], *, reseed: bool = True
    ) -> Iterator[Any]:
        """Yield all batches of the training; between two segments the model is judged, saved and
        reported.

        `build(start, position)` makes the feed that has already given `start` batches, or stood at
        `position`. `reseed`: let the global generators begin anew here.
        """
        # ---- set up: everything must have been said; what is seeded here differs between ranks, as
        # dropout must
        self.check_begun()
        self.setup.close()
        self.clock.before_first_batch_s = self.world.agree(self.clock.seconds["setup"])
        if self.own_loader:
            self.own_step.watch(losses=True)
        if not self.program.begin(self):
            self.done = True
            raise NotTrainedError
        if reseed:
            torch.manual_seed(self.config.seed + 1 + self.world.rank)
            randomness.seed_libraries(self.config.seed + 1 + self.world.rank)

        # ---- restore a checkpoint, warm up, and put everything back
        checkpoint = self.restore(build)
        drawn = self.state.own()
        yield from self.warm_up(checkpoint)
        self.state.set_own(
            *drawn
        )  # fetching the first batch may have drawn from the generators of the checkpoint
        del checkpoint  # it holds all that is learned once more
        self.training = all([self.report(point) for point in self.points])  # noqa: C419 – every point is reported
        self.saved_s = self.world.agree(self.clock.read())
        self.meter.restart()

        # ---- train and evaluate, segment by segment
        total = self.config.evaluation.points
        for index in itertools.count(len(self.points) + 1):
            if not self.training or (index > total and not self.budget.open_ended):
                break
            with self.clock.part("train"), self.prefetched.at_work():
                self.pace.aim(index / total)
                while self.training and not self.pace.reached:
                    yield from self.passes()
                    if not self.batches_left_out:
                        self.after_step()
            if self.pace.reached:
                self.evaluate_point(index, index / total)
            else:  # it was asked to stop
                checkpoints.save(self)
        # It was asked to stop, or resumed after its last point, whose weights rank 0 alone has;
        # gathering is for all.
        if self.world.any(self.judged is None):
            kept = self.judged, self.judged_digest
            with self.clock.part("checkpoint"):
                checkpoints.note_judged(self, last=True)
            if kept[0] is not None:
                self.judged, self.judged_digest = kept
        self.done = True
        self.close()
        self.program.after_loop(self)

    def passes(self) -> Iterator[Any]:
        """Yield the batches of one optimizer step."""
        assert self.feed is not None
        self.step.begin()
        self.own_step.begin()
        for index in range(self.step.accumulation):
            self.step.begin_pass(index)
            # ---- fetch: a host that waits while its device has work to do waits for nothing, see
            # `Meter.read`
            self.phases.switch("data_wait")
            host = not self.phases.of_device
            with (
                self.clock.part("data_wait", synchronize=False)
                if host
                else contextlib.nullcontext()
            ):
                fetched = self.prefetched.fetch(self.feed)
            self.phases.switch("host_to_device")
            batch = self.feed.move(fetched)

            # ---- forward and backward pass, in the workload's loop
            self.phases.switch("forward")
            if self.config.compile.active:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            synchronized = (
                contextlib.nullcontext()
                if self.step.sync_gradients
                else self.strategy.unsynchronized()
            )
            with synchronized, self.program.batch(self, batch):
                yield batch
        self.phases.switch(None)
        if not self.step.updated and self.own_step.loss is not None:
            self.step.record(self.own_step.loss, self.own_step.optimizer)
            if self.adopted:
                self.program.on_passes(self)
        if self._left_out():
            self.batches_left_out += 1
        elif self.step.updated:
            self.batches_left_out = 0
        else:
            took = "a batch was taken and trial.step(loss, optimizer) not called"
            raise self.mistake(
                f"train(trial): {took}: every batch that the loop gets is trained with one call"
                " of it"
            )

    def _left_out(self) -> bool:
        """Return whether the loop has left out this batch of its own loader, such as a shorter last
        one of a pass.

        Several ranks may not: each could leave out others. Nor may the first batch of a training,
        or too many in a row: a loop that never steps has no end.
        """
        position = (
            self.feed.position
            if self.own_loader and self.world.size == 1 and self.feed is not None
            else None
        )
        may = position is not None and position.epoch >= 0 and self.batches_left_out < MOST_LEFT_OUT
        return may and not self.step.updated and self.step.loss is None

    def count_step(self) -> None:
        """Count one optimizer step, which was queued on the device."""
        assert self.step.loss is not None
        self.meter.add(self.step.loss)
        # A reading of the clock may put the schedule back to where earlier steps were counted
        # already.
        before = max(self._counted, self.pace.schedule)
        self.pace.step(self.samples_per_step)
        self.stride = max(0.0, self.pace.schedule - before)
        self._counted = before + self.stride

    def after_step(self) -> None:
        """Look at the loss, report it and write a checkpoint, where the clock was read: the device
        was waited for."""
        self.observer.after_step()
        pace = self.pace
        if not pace.checked:
            return
        self.meter.read()
        if self.world.any(self.meter.streak >= self.amp.patience):
            steps = text.pluralize(pace.steps, "step")
            raise NotFiniteError(f"the loss is not finite after {steps} ({pace.train_s:.1f} s)")
        if self.world.main:
            loss = self.step.loss
            rates = {
                "loss": float(loss if loss is not None else 0.0),
                "learning_rate": self.step.learning_rate,
            }
            finite = {
                name: value
                for name, value in rates.items()
                if math.isfinite(value) or name == "loss"
            }
            self.observer.scalars({**pace.position(), **finite})
        if self.world.any(self.observer.asks_to_stop()):
            self.training = False
        elif pace.train_s - self.saved_s > self.checkpoint_every_s and not pace.reached:
            self.prefetched.hold()
            checkpoints.save(self)
            self.prefetched.release()
            self.saved_s = pace.train_s

    # ---- before the loop
    def restore(self, build: Callable[[int, Position | None], Feed]) -> Mapping[str, Any] | None:
        """Find the checkpoint, measure the device's peak, and start the loaders where the training
        goes on."""
        with self.clock.part("setup"):
            checkpoint = checkpoints.find(self)
            peak = hardware.peak_flops_per_s(self.device, self.amp.dtype, self.amp.fastest_matmul)
            self.peak_flops_per_s = self.world.total(peak * self.strategy.devices)
            memory.reset(
                self.device
            )  # its matrices, and what was needed to get here, are not the training's
            steps = checkpoint["pace"]["steps"] if checkpoint is not None else 0
            self.warm_ups = self.compilation.warm_ups(self.device.type)
            if checkpoint is not None:
                self.state.put_generators(checkpoint)
            with self.prefetched.gate.over_loaders():
                feed = build(
                    steps * self.step.accumulation, checkpoints.position_in(self, checkpoint)
                )
                self.feed = WarmupReplay(feed, self.step.accumulation, self.warm_ups)
            self.prefetched.hold()
        if checkpoint is None and self.world.main:
            checkpoints.remove_files(self)
            self.observer.restarted(self.restart_reason)
        return checkpoint

    def warm_up(self, checkpoint: Mapping[str, Any] | None) -> Iterator[Any]:
        """Yield the first batch for steps that load kernels, tune and compile; then everything is
        as it was.

        Without compilation this is setup: only the first trial of a process loads libraries and
        kernels.
        """
        with self.clock.part("setup"):
            before = checkpoint or checkpoints.copied(self)
        self.warming_up = True
        with self.clock.part("compile" if self.config.compile.active else "setup"):
            began = time.monotonic()
            with self.compilation.noting():
                yield from self.passes()
            self.world.synchronize()
            first_step_s = time.monotonic() - began
            for _ in range(1, self.warm_ups):
                yield from self.passes()
        self.warming_up = False
        with self.clock.part("setup"):
            checkpoints.put(self, before)
            if checkpoint is not None:
                self.clock.load_state_dict(checkpoint["clock"])
                self.clock.before_first_batch_s = checkpoint.get("before_first_batch_s", 0.0)
                self.pace.load_state_dict(checkpoint["pace"])
            constant = {
                "first_step_s": first_step_s, "peak_flops_per_s": self.peak_flops_per_s,
                "before_first_batch_s": self.clock.before_first_batch_s,
            }  # fmt: skip
            if self.flops_per_sample is not None:
                constant["flops_per_sample"] = self.flops_per_sample
            devices = self.config.devices
            self.meter = Meter(self.clock, self.pace, self.phases, self.world, devices, constant)
            self.meter.load_state_dict((checkpoint or {}).get("meter", {}))

    # ---- every point
    def evaluate_point(self, index: int, fraction: float) -> None:
        """Measure, judge, save and report; the clock of the budget stands still.

        Where the training was asked to stop, what was measured is only saved: the point is judged
        after a resume, when nothing of the steps before could be measured any more.
        """
        if not self.pace.steps:
            what = "setup and compiling" if self.budget.setup_charged else "compiling"
            spent_s = self.clock.train_s
            raise RuntimeError(
                f"no step was trained: {what} took {spent_s:.0f} s, which the budget is charged"
                " with"
            )
        point = self.meter.measure(index, fraction, self.points[-1] if self.points else None)
        described = evaluation.finite_findings(
            evaluation.plain_findings(self.description(), "describe_with", self.config.schema.title)
        )
        point = dataclasses.replace(point, **self.compilation.facts(), **self.prefetched.facts())
        pending = self.pending
        if pending is not None and (pending.index, pending.steps) == (
            index,
            point.steps,
        ):  # nothing was trained since
            point, described = pending, {}
        if not math.isfinite(point.loss):
            raise NotFiniteError(
                f"no loss was finite up to step {point.steps} ({point.train_s:.1f} s)"
            )
        point = dataclasses.replace(point, metrics={**point.metrics, **described})
        if self.training and self.evaluates and self.evaluation is not None:
            with self.clock.part("evaluation"):
                self.judged_digest = None
                try:
                    point = dataclasses.replace(point, metrics={**point.metrics, **self.judge()})
                    if self.judged_digest is None:
                        self.note_judged()
                except EvaluationStoppedError:
                    self.training = False
        if not self.training:
            checkpoints.save(self, pending=point)
            return
        self.points.append(
            dataclasses.replace(
                point, seconds=dict(self.clock.seconds), weights_digest=self.judged_digest or None
            )
        )
        checkpoints.write_files(self, index)
        checkpoints.save(self)
        if self.evaluates:
            # What judging and saving need is not what training needs
            memory.restart_peak(self.device, self.points[-1].peak_host_memory_mib)
        self.saved_s = self.pace.train_s
        self.meter.restart()
        self.training = self.report(self.points[-1])

    def judge(self) -> Mapping[str, Any]:
        """Return what the workload's evaluation finds; see `evaluation.evaluate`."""
        return self.program.judge(self, lambda: evaluation.evaluate(self))

    def note_judged(self) -> None:
        """Take the weights as they are now for those that this point judges. All ranks call it.

        The engine calls it after an evaluation; one that swaps weights in calls it while they are
        there.
        """
        last = len(self.points) + 1 == self.config.evaluation.points and not self.budget.open_ended
        checkpoints.note_judged(self, last)

    def report(self, point: Point) -> bool:
        """Report a point; returns whether to train on after it, on all ranks alike."""
        return bool(self.world.agree(float(self.observer.point(point)) if self.world.main else 0.0))

    # ---- the end
    def close(self) -> None:
        """Stop what loads data, and the clock's part that is running before the first batch."""
        self.setup.close()
        self.own_step.close()
        self.phases.switch(None)
        self.prefetched.gate.open()  # a process that waits there would not hear that it shall end
        if self.feed is not None:
            self.feed.close()

    def outcome(self) -> TrainingOutcome:
        """Return how it ended. Raises `WorkloadError` if it did not run as a training does."""
        self.check_done()
        last = self.points[-1].flat if self.points else {}
        return TrainingOutcome(
            points=self.points,
            finished=len(self.points) == self.config.evaluation.points
            and not self.budget.open_ended,
            seconds=dict(self.clock.seconds),
            steps=self.pace.steps,
            samples=self.pace.samples,
            peak={
                name: value
                for name, value in last.items()
                if name.startswith("peak_") and name.endswith("_mib")
            },
            weights=self.judged or {},
            reason=CHANGED.format(name) if (name := checkpoints.changed_weight(self)) else "",
            unread=read_tracking.unread(
                self.config, self.read_knobs, self.not_followed, self.own_loader
            ),
        )

    # ---- mistakes of a workload
    def check_begun(self) -> None:
        """Raise `WorkloadError` for what must have been said before the first batch."""
        if self.feed is not None:
            once = (
                "train(trial) asked twice for batches; one loop lasts for the whole budget, over"
                " all epochs"
            )
            raise self.mistake(once)
        if self.model is None:
            raise self.mistake(
                "train(trial): net = trial.prepare(net) must come before the loop over its batches"
            )
        if not self.state.names:
            keep = "trial.keep(net=net, optimizer=optimizer)"
            raise self.mistake(
                f"train(trial): {keep} must come before the loop: a resumed training needs them"
            )
        if self.evaluates and self.evaluation is None:
            judge = f'trial.evaluate_with(lambda: {{"{of(self.config).objective.name}": …}})'
            raise self.mistake(
                f"train(trial): {judge} must come before the loop: nothing else judges the model"
            )

    def check_done(self) -> None:
        """Raise `WorkloadError` unless the training has run to its end, or was asked to stop."""
        if self.model is None:
            raise self.mistake("train(trial) never called trial.prepare(model)")
        if self.feed is None and not self.done:
            raise self.mistake(
                "train(trial) never asked for a batch: for batch in trial.batches(data): …"
            )
        if not self.done:
            left = f"train(trial) left its loop after {text.pluralize(self.pace.steps, 'step')}"
            raise self.mistake(f"{left}, before its budget was spent; trial.batches ends by itself")
