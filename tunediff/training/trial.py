"""The seam between a workload and everything that makes its training fair, distributed, resumable and measured.

A workload is `train(trial)`, called on every rank:

    net = trial.prepare(Net(trial.knobs.width))
    optimizer = torch.optim.AdamW(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer)
    trial.evaluate_with(lambda: {"accuracy": accuracy(net)})
    for images, labels in trial.batches(train_set):
        with trial.autocast():
            loss = F.cross_entropy(net(images), labels)
        trial.step(loss, optimizer)

`run` builds the trial, calls it and returns its `Outcome`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tunediff.clock import Budget, Clock
from tunediff.config import Systems, of, to_dict
from tunediff.data import loader
from tunediff.distributed import World
from tunediff.record import NotFiniteError, Point
from tunediff.training import hardware, memory, state, strategies
from tunediff.training.compilation import compiled, graphs
from tunediff.training.feed import Endless, Feed, Primed
from tunediff.training.meter import Meter
from tunediff.training.observer import Observer, Shown
from tunediff.training.pace import Pace
from tunediff.training.phases import Phases
from tunediff.training.precision import Amp

Facts = Callable[[], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A training that ended."""

    points: list[Point]
    finished: bool
    """False: asked to stop before the budget was spent, as an open-ended training always is."""
    seconds: dict[str, float]
    steps: int
    samples: int
    peak: dict[str, float]
    """Peak memory in MiB, by the names of `Point`."""
    model: nn.Module
    """What was learned, as it is evaluated and exported."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where this rank's items lie within a micro-batch of all ranks."""

    first: int
    count: int
    total: int

    @property
    def mine(self) -> slice:
        """This rank's items."""
        return slice(self.first, self.first + self.count)


class Trial:
    """One training of one configuration, as a workload sees it. All ranks make the same calls in the same order."""

    def __init__(
        self, config: Systems, budget: Budget, world: World, observer: Observer, *, folder: Path | None = None,
        evaluates: bool = True, clock: Clock | None = None, checkpoint_every_s: float = 300.0,
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Without `folder` nothing is written; without `evaluates` points carry throughput only, for measurements.

        `initial`: weights to start from. `checkpoint_every_s`: training seconds between checkpoints within a segment.
        """
        self.config, self.knobs, self.world, self.device = config, config.knobs, world, world.device
        self.evaluates = evaluates
        self._budget, self._observer, self._folder = budget, observer, folder
        self._clock, self._phases = clock or Clock(budget, world.synchronize), Phases(world.device)
        self._pace, self._state = Pace(budget, self._clock, world), state.State(world)
        self._strategy, self._amp = strategies.build(config, world), Amp(config.precision, world.device)
        self._checkpoint_every_s, self._initial = checkpoint_every_s, initial
        self._judge: Facts | None = None
        self._describe: Facts = dict
        self._model: nn.Module | None = None
        self._result: nn.Module | None = None
        self._flops: float | None = None
        self._graphs_before = graphs()
        self._points: list[Point] = []
        self._pending: Point | None = None  # its evaluation was interrupted
        self._going_on, self._warming, self._pass = True, False, 0
        self._loss: Tensor | None = None  # of this step so far
        self.stride = 0.0
        """The part of the training that the last step took, in units of `progress`."""
        self._feed: Feed | None = None
        self._setup = contextlib.ExitStack()
        self._setup.enter_context(self._clock.part("setup"))  # until the first batch is asked for
        memory.reset(world.device)
        memory.keep_freed(config.memory.keep_freed, world.device)
        torch.manual_seed(config.seed)  # equal initial weights on all ranks
        self._state.rng.manual_seed(config.seed)

    # ---------------------------------------------------------------------------------------------------- what it has
    @property
    def rng(self) -> torch.Generator:
        """A generator on the device, of equal state on all ranks: draw for the whole batch and use one's own part, so
        that the number of workers changes the speed and not what is learned."""
        return self._state.rng

    @property
    def progress(self) -> float:
        """Fraction of the training there is time for, 0 to 1: what schedules follow."""
        return self._pace.schedule

    @property
    def place(self) -> Place:
        """This rank's part of every micro-batch."""
        count = self.config.loader.batch_size // (self.config.loader.accumulation * self.world.size)
        return Place(self.world.rank * count, count, count * self.world.size)

    @property
    def last_pass(self) -> bool:
        """Whether this batch is the last of its optimizer step: where gradients are complete and weights change."""
        return self._pass == self.config.loader.accumulation - 1

    def should_stop(self) -> bool:
        """Whether this rank was asked to stop; a long evaluation may raise TimeoutError, on all ranks at once."""
        return self._observer.asks_to_stop()

    # ------------------------------------------------------------------------------------------------- before training
    def prepare(
        self, model: nn.Module, *, blocks: type[nn.Module] | None = None, flops_per_sample: float | None = None
    ) -> nn.Module:
        """The model on its device, under the parallel strategy and torch.compile; the optimizer is made after this.

        `model` itself stays the plain one inside. `blocks`: the class of the parts that repeat in it, for
        `compile.scope`; `flops_per_sample`: of a training step, for the share of the device's peak.
        """
        model.to(self.device)
        if self._initial is not None:
            model.load_state_dict(self._initial)
        self._model = compiled(self._strategy.wrap(model), model, self.config.compile, blocks)
        self._result, self._flops = model, flops_per_sample
        return self._model

    def keep(self, **kept: state.Stateful) -> None:
        """What is learned and belongs in a checkpoint: anything with `state_dict` and `load_state_dict`."""
        self._state.keep(kept)

    def exports(self, model: nn.Module) -> None:
        """The model that is the result, where it is not the prepared one: averaged weights, for example."""
        self._result = model

    def evaluate_with(self, judge: Facts) -> None:
        """Call `judge` at every point, the clock of the budget standing still; the objective is among what it finds."""
        self._judge = judge

    def describe_with(self, describe: Facts) -> None:
        """Call `describe` at every point, also where nothing is evaluated, for facts that cost next to nothing."""
        self._describe = describe

    def about(self, **facts: Any) -> None:
        """Facts about the data or the model that belong in the trial's record, once."""
        if self.world.main:
            self._observer.about(facts)

    def show(self, name: str, what: Shown) -> None:
        """Something to look at: images uint8 [n, C, H, W], or a table, columns by name. The latest of a name stays."""
        if self.world.main:
            self._observer.show(name, what)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A part of the step of its own, measured and shown by its name."""
        return self._phases(name)

    # ----------------------------------------------------------------------------------------------------- every batch
    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context of forward passes, in the number format of `precision.amp`."""
        return self._amp.autocast()

    def backward(self, loss: Tensor) -> None:
        """The gradients of one pass's mean loss, under loss scaling and accumulation."""
        self._phases.switch("backward")
        accumulation = self.config.loader.accumulation
        share = loss / accumulation if accumulation > 1 else loss
        self._amp.scaler.scale(share).backward()  # type: ignore[no-untyped-call]
        self._loss = share.detach() if self._loss is None else self._loss + share.detach()
        self._phases.switch(None)

    def backward_beside(self, loss: Tensor) -> None:
        """Gradients of parameters outside the prepared model, which learn from a loss of their own."""
        self._amp.scaler.scale(loss / self.config.loader.accumulation).backward()  # type: ignore[no-untyped-call]

    def forward_backward(
        self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...], loss_of: Callable[..., Tensor],
        weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Forward and backward pass in one call, for strategies that must own both.

        `loss_of(output, *targets)` gives the loss of each item [b], float32, outside autocast; their mean, weighted by
        `weights` [b], is what is minimised. Returns the items' losses, detached.
        """
        assert self._model is not None, "trial.prepare(model) comes first"
        with self.autocast():
            output = self._model(*inputs)
        losses = loss_of(output, *targets)
        self.backward((losses if weights is None else weights * losses).mean())
        return losses.detach()

    def update(
        self, optimizer: torch.optim.Optimizer, *, clip_norm: float | None = None, beside: Iterable[nn.Parameter] = ()
    ) -> None:
        """The optimizer's step, after the last pass.

        `clip_norm` bounds the global norm of the prepared model's gradients; `beside`: parameters outside it, whose
        gradients are averaged over ranks here.
        """
        with self._phases("optimizer"):
            self.world.average_gradients(beside)
            self._amp.scaler.unscale_(optimizer)
            if clip_norm is not None and self._model is not None:
                nn.utils.clip_grad_norm_(self._model.parameters(), clip_norm)
            self._amp.scaler.step(optimizer)
            self._amp.scaler.update()
            optimizer.zero_grad(set_to_none=True)
        if self._warming:
            return
        assert self._loss is not None, "trial.update without trial.backward"
        self._meter.add(self._loss)
        before, self._learning_rate = self._pace.schedule, optimizer.param_groups[0]["lr"]
        self._pace.step(self.config.loader.batch_size)
        self.stride = self._pace.schedule - before

    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer, *, clip_norm: float | None = None) -> None:
        """`backward`, and `update` after the last pass."""
        self.backward(loss)
        if self.last_pass:
            self.update(optimizer, clip_norm=clip_norm)

    # ------------------------------------------------------------------------------------------------------ the loop
    def batches(self, source: loader.Source, prepare: loader.Prepare | None = None) -> Iterator[Any]:
        """Batches of `source` on the device until the budget is spent, as the section `loader` says.

        `source`: a tensor, a tuple of tensors or a dataset with a length; `prepare(batch, uniform)` makes of a batch on
        the device what the loop gets, with random numbers that no way of dividing the batch changes.
        """
        section, world = self.config.loader, self.world
        length = len(source[0] if isinstance(source, tuple) else source)  # type: ignore[arg-type]
        order = loader.Order(length, section.batch_size, section.accumulation, world.rank, world.size, self.config.seed)
        return self._loop(lambda start: loader.build(source, section, order, self.device, start, prepare))

    def steps(self, batches: Iterable[Any]) -> Iterator[Any]:
        """A loader of one's own, run through again and again until the budget is spent; begun anew at a resume."""
        return self._loop(lambda start: Endless(batches, self.device))

    def _loop(self, build: Callable[[int], Feed]) -> Iterator[Any]:
        """All passes of the training; between two segments the model is judged, saved and reported."""
        self._setup.close()
        torch.manual_seed(self.config.seed + 1 + self.world.rank)  # dropout differs between ranks
        with self._clock.part("setup"):
            found = self._found()
            accumulation, done = self.config.loader.accumulation, found["pace"]["steps"] if found is not None else 0
            feed = self._feed = Primed(build(done * accumulation), accumulation)  # starts loader processes
        if found is None and self.world.main:
            self._observer.anew()
        yield from self._warm_up(feed, found)
        del found  # it holds all that is learned once more
        self._going_on = all([self._tell(point) for point in self._points])  # noqa: C419 – every point is told
        self._saved_s = self.world.agree(self._clock.read())
        self._meter.restart()
        total = self.config.evaluation.points
        for index in itertools.count(len(self._points) + 1):
            if not self._going_on or (index > total and not self._budget.open_ended):
                break
            with self._clock.part("train"):
                self._pace.aim(index / total)
                while self._going_on and not self._pace.reached:
                    yield from self._passes(feed)
                    self._after_step()
            if not self._going_on:
                self._save()
                break
            self._evaluate(index, index / total)
        self.close()

    def _passes(self, feed: Feed) -> Iterator[Any]:
        """The batches of one optimizer step."""
        self._loss = None
        for self._pass in range(self.config.loader.accumulation):  # noqa: B020 – an attribute, not the iterable
            self._phases.switch("data_wait")
            with self._clock.part("data_wait", synchronize=False):
                fetched = feed.fetch()
            self._phases.switch("host_to_device")
            batch = feed.move(fetched)
            self._phases.switch("forward")
            if self.config.compile.active:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            with contextlib.nullcontext() if self.last_pass else self._strategy.unsynchronized():
                yield batch
        self._phases.switch(None)

    def _warm_up(self, feed: Feed, found: Mapping[str, Any] | None) -> Iterator[Any]:
        """One step on the first batch for kernels, autotuning and compilation; then everything as it was.

        Without compilation this is setup: only the first trial of a process loads libraries and kernels.
        """
        with self._clock.part("setup"):
            before = found or state.copied(self._learned())
        self._warming = True
        with self._clock.part("compile" if self.config.compile.active else "setup"):
            began = time.monotonic()
            yield from self._passes(feed)
            self.world.synchronize()
            first_step_s = time.monotonic() - began
        self._warming = False
        with self._clock.part("setup"):
            self._state.put(before)
            self._amp.scaler.load_state_dict(before["scaler"])
            if found is not None:
                self._clock.load_state_dict(found["clock"])
                self._pace.load_state_dict(found["pace"])
            peak = hardware.peak_flops_per_s(self.device, self._amp.dtype, self.config.precision.matmul)
            constant = {"first_step_s": first_step_s, "peak_flops_per_s": self.world.total(peak)}
            if self._flops is not None:
                constant["flops_per_sample"] = self._flops
            self._meter = Meter(self._clock, self._pace, self._phases, self.world, constant)

    def _after_step(self) -> None:
        """What follows an optimizer step; more of it where the clock was read, since the device was waited for."""
        self._observer.stepped()
        pace = self._pace
        if not pace.checked:
            return
        self._meter.read()
        if self.world.any(self._meter.streak >= self._amp.patience):
            raise NotFiniteError(f"the loss is not finite after {pace.steps} steps ({pace.train_s:.1f} s)")
        if self.world.main:
            rates = {"loss": float(self._loss or 0.0), "learning_rate": self._learning_rate}
            self._observer.scalars({**pace.position(), **rates})
        if self.world.any(self._observer.asks_to_stop()):
            self._going_on = False
        elif pace.train_s - self._saved_s > self._checkpoint_every_s and not pace.reached:
            self._save()
            self._saved_s = pace.train_s

    # ---------------------------------------------------------------------------------------------------- every point
    def _evaluate(self, index: int, fraction: float) -> None:
        """Measure, judge, save and report; the clock of the budget stands still."""
        point = self._meter.measure(index, fraction)
        about = dict(self._describe())
        if self.config.compile.active:
            point = dataclasses.replace(point, compiled_graphs=graphs() - self._graphs_before)
        if self._pending is not None and self._pending.steps == point.steps:  # nothing was trained since
            point, about = self._pending, {}
        if not math.isfinite(point.loss):
            raise NotFiniteError(f"no loss was finite up to step {point.steps} ({point.train_s:.1f} s)")
        point = dataclasses.replace(point, found={**point.found, **about})
        if self.evaluates and self._judge is not None:
            with self._clock.part("evaluation"):
                try:
                    found = self._judge()
                except TimeoutError:  # asked to stop: it will be measured when the training goes on
                    self._going_on = False
            if not self._going_on:
                self._save(pending=point)
                return
            point = dataclasses.replace(point, found={**point.found, **found})
            memory.restart_peak(self.device)  # what judging needs is not what training needs
        self._points.append(dataclasses.replace(point, seconds=dict(self._clock.seconds)))
        self._save()
        self._saved_s = self._pace.train_s
        self._meter.restart()
        self._going_on = self._tell(self._points[-1])

    def _tell(self, point: Point) -> bool:
        """Whether to train on after this point."""
        return bool(self.world.agree(float(self._observer.point(point)) if self.world.main else 0.0))

    # ----------------------------------------------------------------------------------------------------- checkpoints
    def _save(self, pending: Point | None = None) -> None:
        if self._folder is None:
            return
        with self._clock.part("checkpoint"):
            result = self._result.state_dict() if self._result is not None else {}  # shares what is kept anyway
            content = self._learned() | {
                "config": to_dict(self.config), "result": result,
                "clock": self._clock.state_dict(), "pace": self._pace.state_dict(),
                "points": [point.flat for point in self._points],
                "pending": pending.flat if pending is not None else None,
            }  # fmt: skip
            if self.world.main:
                state.save(content, self._folder)
            self.world.barrier()

    def _learned(self) -> dict[str, Any]:
        return self._state.take() | {"scaler": self._amp.scaler.state_dict()}

    def _found(self) -> Mapping[str, Any] | None:
        """The checkpoint to go on from: rank 0 reads it and tells the others, so that none can go on alone."""
        if self._folder is None:
            return None
        found: Mapping[str, Any] | None = state.load(self._folder) if self.world.main else None
        found = self.world.tell(found)
        if found is not None:
            self._points = [Point.of(flat) for flat in found["points"]]
            self._pending = Point.of(found["pending"]) if found["pending"] is not None else None
        return found

    def close(self) -> None:
        """Stop what loads data, and the clock's part that is running before the first batch."""
        self._setup.close()
        self._phases.switch(None)
        if self._feed is not None:
            self._feed.close()

    def outcome(self) -> Outcome:
        """How it ended. Raises RuntimeError if nothing was prepared."""
        if self._result is None:
            raise RuntimeError(f"{of(self.config).name}: train(trial) never called trial.prepare(model)")
        last = self._points[-1].flat if self._points else {}
        return Outcome(
            points=self._points,
            finished=len(self._points) == self.config.evaluation.points and not self._budget.open_ended,
            seconds=dict(self._clock.seconds),
            steps=self._pace.steps,
            samples=self._pace.samples,
            peak={name: value for name, value in last.items() if name.startswith("peak_") and name.endswith("_mib")},
            model=self._result,
        )


def run(trial: Trial) -> Outcome:
    """Train it, as its workload says. All ranks call it; raises what the training raises, and `NotFiniteError` when the
    loss is NaN or infinite, on all ranks at the same step."""
    try:
        of(trial.config).code.train(trial)
    finally:
        trial.close()
    return trial.outcome()
