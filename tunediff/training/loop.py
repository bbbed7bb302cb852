"""What happens between a workload's batches: the budget, the clock, checkpoints, points of the curve."""

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

from tunediff import cli
from tunediff.clock import Budget, Clock
from tunediff.config import Systems, flatten, of, to_dict
from tunediff.config.code import WorkloadError
from tunediff.distributed import World
from tunediff.points import Point
from tunediff.record import NotFiniteError
from tunediff.training import compilation, hardware, memory, state, strategies
from tunediff.training.compilation import Compilation
from tunediff.training.feed import Feed, Primed
from tunediff.training.meter import Meter
from tunediff.training.observer import Observer
from tunediff.training.pace import Pace
from tunediff.training.phases import Phases
from tunediff.training.precision import Amp, one_ruler
from tunediff.training.watched import watched

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
    unread: tuple[str, ...] = ()
    """Knobs that a user's workload never looked at, by dotted name: they change nothing."""


class Loop:
    """The part of a `Trial` that its workload does not see."""

    def __init__(
        self, config: Systems, budget: Budget, world: World, observer: Observer, *, folder: Path | None = None,
        evaluates: bool = True, clock: Clock | None = None, checkpoint_every_s: float = 300.0,
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Without `folder` nothing is written; without `evaluates` points carry throughput only, for measurements.

        `initial`: weights to start from. `checkpoint_every_s`: training seconds between checkpoints within a segment.
        """
        self.config, self.world, self.device = config, world, world.device
        self.knobs, self._read = watched(config.knobs) if config.schema.version else (config.knobs, set[str]())
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
        self._compilation = Compilation(config.compile)
        self._warm_ups = self._compilation.warm_ups(world.device.type)
        self._points: list[Point] = []
        self._pending: Point | None = None  # its evaluation was interrupted
        self._going_on, self._warming, self._judging, self._pass = True, False, False, 0
        self._loss: Tensor | None = None  # of this step so far
        self._counts = config.loader.batch_size
        """Samples of an optimizer step, of all ranks."""
        self._stepped, self._updated, self._done = False, False, False  # this batch; this step; the training
        self._learning_rate = math.nan
        self._own_loader, self._autocast_entered, self._seeded = False, False, True
        self.stride = 0.0
        """The part of the training that the last step took, in units of `progress`."""
        self._feed: Feed | None = None
        self._batches_ahead = self._batches_then = 0  # of loader processes: while the clock stood still; in all
        self._setup = contextlib.ExitStack()
        self._setup.enter_context(self._clock.part("setup"))  # until the first batch is asked for
        memory.reset(world.device)
        memory.keep_freed(config.memory.keep_freed, world.device)
        torch.manual_seed(config.seed)  # equal initial weights on all ranks
        self._state.rng.manual_seed(config.seed)

    @property
    def last_pass(self) -> bool:
        """Whether this batch is the last of its optimizer step: where gradients are complete and weights change."""
        return self._pass == self.config.loader.accumulation - 1

    def _loop(self, build: Callable[[int], Feed]) -> Iterator[Any]:
        """All passes of the training; between two segments the model is judged, saved and reported."""
        if self._feed is not None:
            raise self._mistake(
                "train(trial) asked twice for batches; one loop lasts for the whole budget, over all epochs"
            )
        self._check_begun()
        self._setup.close()
        torch.manual_seed(self.config.seed + 1 + self.world.rank)  # dropout differs between ranks
        with self._clock.part("setup"):
            found = self._found()
            roof = hardware.peak_flops_per_s(self.device, self._amp.dtype, self._amp.fastest_matmul)
            self._roof = self.world.total(roof * self._strategy.devices)
            memory.reset(self.device)  # its matrices, and what was needed to get here, are not the training's
            accumulation, done = self.config.loader.accumulation, found["pace"]["steps"] if found is not None else 0
            feed = self._feed = Primed(build(done * accumulation), accumulation, self._warm_ups)  # starts loaders
            self._hold_loaders()
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
            with self._clock.part("train"), self._loaders_at_work():
                self._pace.aim(index / total)
                while self._going_on and not self._pace.reached:
                    yield from self._passes(feed)
                    self._after_step()
            if not self._going_on:
                self._save()
                break
            self._evaluate(index, index / total)
        self._done = True
        self.close()

    def _mistake(self, what: str) -> WorkloadError:
        return WorkloadError(f"{self.config.schema.title}: {what}")

    def _check_begun(self) -> None:
        """What must have been said before the first batch. Raises `WorkloadError`."""
        if self._model is None:
            raise self._mistake("train(trial): net = trial.prepare(net) must come before the loop over its batches")
        if not self._state.names:
            keep = "trial.keep(net=net, optimizer=optimizer)"
            raise self._mistake(f"train(trial): {keep} must come before the loop: a resumed training needs them")
        if self.evaluates and self._judge is None:
            metric = of(self.config).objective.name
            judge = f'trial.evaluate_with(lambda: {{"{metric}": …}})'
            raise self._mistake(f"train(trial): {judge} must come before the loop: nothing else judges the model")

    def _check_done(self) -> None:
        """Raises `WorkloadError` unless the training has run to its end, or was asked to stop."""
        if self._model is None:
            raise self._mistake("train(trial) never called trial.prepare(model)")
        if self._feed is None and not self._done:
            raise self._mistake("train(trial) never asked for a batch: for batch in trial.batches(data): …")
        if not self._done:
            left = f"train(trial) left its loop after {cli.some(self._pace.steps, 'step')}, before its budget was spent"
            raise self._mistake(f"{left}; trial.batches ends by itself")

    def _passes(self, feed: Feed) -> Iterator[Any]:
        """The batches of one optimizer step."""
        self._loss, self._updated = None, False
        for self._pass in range(self.config.loader.accumulation):  # noqa: B020 – an attribute, not the iterable
            self._phases.switch("data_wait")
            # A host that waits while its device has work to do waits for nothing: see `Meter.read`.
            host = not self._phases.of_device
            with self._clock.part("data_wait", synchronize=False) if host else contextlib.nullcontext():
                fetched = feed.fetch()
            self._phases.switch("host_to_device")
            batch = feed.move(fetched)
            self._phases.switch("forward")
            if self.config.compile.active:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            self._stepped = False
            with contextlib.nullcontext() if self.last_pass else self._strategy.unsynchronized():
                yield batch
        self._phases.switch(None)
        if not self._updated:
            took = "a batch was taken and trial.step(loss, optimizer) not called"
            raise self._mistake(f"train(trial): {took}: every batch that the loop gets is trained with one call of it")

    @contextlib.contextmanager
    def _loaders_at_work(self) -> Iterator[None]:
        """Loader processes load inside, while the clock runs, and nothing outside: that would be training for free."""
        self._release_loaders()
        try:
            yield
        finally:
            self._hold_loaders()

    def _hold_loaders(self) -> None:
        if self._feed is not None and (gate := self._feed.gate) is not None:
            gate.close()
            self._batches_then = gate.batches

    def _release_loaders(self) -> None:
        if self._feed is not None and (gate := self._feed.gate) is not None:
            self._batches_ahead += gate.batches - self._batches_then
            gate.open()

    def _warm_up(self, feed: Feed, found: Mapping[str, Any] | None) -> Iterator[Any]:
        """Steps on the first batch for kernels, autotuning, compilation and CUDA graphs; then everything as it was.

        Without compilation this is setup: only the first trial of a process loads libraries and kernels.
        """
        with self._clock.part("setup"):
            before = found or state.copied(self._learned())
        self._warming, others_s = True, compilation.apart_s()
        with self._clock.part("compile" if self.config.compile.active else "setup"):
            began = time.monotonic()
            with self._compilation.noting():
                yield from self._passes(feed)
            self.world.synchronize()
            first_step_s = time.monotonic() - began
            for _ in range(1, self._warm_ups):
                yield from self._passes(feed)
        self._warming = False
        if self.config.compile.active:  # the optimizer's own is setup, as it is where the network is not compiled
            self._clock.move(compilation.apart_s() - others_s, "compile", "setup")
        with self._clock.part("setup"):
            self._state.put(before)
            self._amp.scaler.load_state_dict(before["scaler"])
            if found is not None:
                self._clock.load_state_dict(found["clock"])
                self._pace.load_state_dict(found["pace"])
            constant = {"first_step_s": first_step_s, "peak_flops_per_s": self._roof}
            if self._flops is not None:
                constant["flops_per_sample"] = self._flops
            self._meter = Meter(self._clock, self._pace, self._phases, self.world, self.config.devices, constant)
            self._meter.load_state_dict((found or {}).get("meter", {}))

    def _after_step(self) -> None:
        """What follows an optimizer step; more of it where the clock was read, since the device was waited for."""
        self._observer.stepped()
        pace = self._pace
        if not pace.checked:
            return
        self._meter.read()
        if self.world.any(self._meter.streak >= self._amp.patience):
            raise NotFiniteError(f"the loss is not finite after {cli.some(pace.steps, 'step')} ({pace.train_s:.1f} s)")
        if self.world.main:
            rates = {"loss": float(self._loss or 0.0), "learning_rate": self._learning_rate}
            known = {name: value for name, value in rates.items() if math.isfinite(value) or name == "loss"}
            self._observer.scalars({**pace.position(), **known})
        if self.world.any(self._observer.asks_to_stop()):
            self._going_on = False
        elif pace.train_s - self._saved_s > self._checkpoint_every_s and not pace.reached:
            self._hold_loaders()
            self._save()
            self._release_loaders()
            self._saved_s = pace.train_s

    # ---------------------------------------------------------------------------------------------------- every point
    def _evaluate(self, index: int, fraction: float) -> None:
        """Measure, judge, save and report; the clock of the budget stands still."""
        if not self._pace.steps:
            spent = self._clock.seconds["compile"]
            raise RuntimeError(f"no step was trained: compiling took {spent:.0f} s, which the budget is charged with")
        point = self._meter.measure(index, fraction)
        about = dict(self._describe())
        point = dataclasses.replace(point, **self._compilation.facts(), batches_ahead=self._batches_ahead)
        self._batches_ahead = 0
        if self._pending is not None and self._pending.steps == point.steps:  # nothing was trained since
            point, about = self._pending, {}
        if not math.isfinite(point.loss):
            raise NotFiniteError(f"no loss was finite up to step {point.steps} ({point.train_s:.1f} s)")
        point = dataclasses.replace(point, found={**point.found, **about})
        if self.evaluates and self._judge is not None:
            with self._clock.part("evaluation"):
                try:
                    found = self._judged()
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

    def _judged(self) -> Mapping[str, Any]:
        """What the workload's evaluation finds, in plain numbers and words.

        Raises `WorkloadError` without the objective among it, `NotFiniteError` where that is NaN or infinite.
        """
        assert self._judge is not None
        assert self._model is not None
        for buffer in self._model.buffers() if self._strategy.replicas.size > 1 else ():
            self.world.first(buffer)  # such as batch statistics: all ranks judge the model that is saved
        metric = of(self.config).objective.name
        models = [model for model in (self._model, self._result) if model is not None]
        alone = self._strategy.callable_alone(*dict.fromkeys(state.plain(model) for model in models))
        with _evaluating(models), alone, torch.no_grad(), self._fixed_conditions(), self._compilation.noting():
            found = self._judge()
        if not isinstance(found, Mapping):
            raise self._mistake(f"evaluate_with: its function returned {found!r}; it needs a dictionary of numbers")
        plain = {name: _plain(value) for name, value in found.items()}
        if taken := sorted(plain.keys() & Point.__dataclass_fields__.keys()):
            other = f"validation_{taken[0]}"
            raise self._mistake(f'evaluate_with: "{taken[0]}" has a meaning of its own; choose another name, "{other}"')
        if metric not in plain:
            raise self._mistake(f'evaluate_with: found {", ".join(plain) or "nothing"}, and not OBJECTIVE "{metric}"')
        if isinstance(plain[metric], bool) or not isinstance(plain[metric], int | float):
            raise self._mistake(f'evaluate_with: "{metric}" is {plain[metric]!r}; it must be one number')
        if self.world.any(not math.isfinite(plain[metric])):
            raise NotFiniteError(f"{metric} is {plain[metric]} after {cli.some(self._pace.steps, 'step')}")
        finite = {name: value for name, value in plain.items() if not isinstance(value, float) or math.isfinite(value)}
        return finite

    @contextlib.contextmanager
    def _fixed_conditions(self) -> Iterator[None]:
        """The same number format and random numbers for all trials, without trace in the training."""
        self._judging = True
        try:
            with one_ruler(self.device), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                torch.manual_seed(0)
                yield
        finally:
            self._judging = False

    def _tell(self, point: Point) -> bool:
        """Whether to train on after this point."""
        return bool(self.world.agree(float(self._observer.point(point)) if self.world.main else 0.0))

    # ----------------------------------------------------------------------------------------------------- checkpoints
    def _save(self, pending: Point | None = None) -> None:
        if self._folder is None:
            return
        with self._clock.part("checkpoint"):
            self._strategy.complete(*([self._result] if self._result is not None else []))
            result = self._result.state_dict() if self._result is not None else {}  # shares what is kept anyway
            content = self._learned() | {
                "config": to_dict(self.config), "result": result,
                "clock": self._clock.state_dict(), "pace": self._pace.state_dict(),
                "meter": self._meter.state_dict(),
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
        """How it ended. Raises `WorkloadError` if it did not run as a training does."""
        self._check_done()
        assert self._result is not None
        last = self._points[-1].flat if self._points else {}
        return Outcome(
            points=self._points,
            finished=len(self._points) == self.config.evaluation.points and not self._budget.open_ended,
            seconds=dict(self._clock.seconds),
            steps=self._pace.steps,
            samples=self._pace.samples,
            peak={name: value for name, value in last.items() if name.startswith("peak_") and name.endswith("_mib")},
            model=self._strategy.whole(self._result),
            unread=self._unread(),
        )

    def _unread(self) -> tuple[str, ...]:
        """Knobs of a user's workload that its training has never looked at, on this rank."""
        if not self.config.schema.version:
            return ()
        own = {field.name for field in dataclasses.fields(self.config.schema.own)}
        names = [name for name in flatten(to_dict(self.config)) if name.partition(".")[0] in own]
        unread = [name for name in names if name not in self._read]
        unread += [] if self._autocast_entered else ["precision.amp"]
        code = of(self.config).file
        mentioned = code is not None and any(b".config" in text for text in code.contents.values())
        if self._own_loader and not mentioned:  # a loader of one's own may be made of `trial.config.loader`
            unread += [f"loader.{field.name}" for field in dataclasses.fields(self.config.loader)]
        return tuple(unread)


@contextlib.contextmanager
def _evaluating(models: Iterable[nn.Module]) -> Iterator[None]:
    """Put the models into evaluation mode; afterwards each of their modules is in the mode that it had."""
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _plain(value: Any) -> Any:
    """The number inside a tensor or an array that holds one; anything else as it is."""
    one = getattr(value, "numel", None) or (lambda: getattr(value, "size", 0))
    return value.item() if hasattr(value, "item") and one() == 1 else value
