"""One training: its parts, what its workload hands over, how far it is; and what observes it.

`tunediff.training.loop` runs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from tunediff.config import Systems
from tunediff.config.code import WorkloadError
from tunediff.config.systems import why_not_captured
from tunediff.core.clock import Budget, Clock
from tunediff.core.outcomes import CaptureOutcome
from tunediff.core.point import Point
from tunediff.data import loader, randomness
from tunediff.data.loader_processes import LoaderProcesses
from tunediff.distributed import World
from tunediff.training import memory, state, strategies, weights
from tunediff.training.capture import steps_of
from tunediff.training.capture.steps import MakeGraph
from tunediff.training.compilation import Compilation, SharedCode
from tunediff.training.meter import Meter, Phases
from tunediff.training.pace import Pace
from tunediff.training.precision import Amp
from tunediff.training.read_tracking import Reads, watched
from tunediff.training.step import OptimizerStep

Facts = Callable[[], Mapping[str, Any]]
"""What a workload gives to be called at every point: it returns values by name."""
Shown = torch.Tensor | Mapping[str, Sequence[float]]
"""A picture, images uint8 [n, C, H, W] with C = 1 or 3; or a table, columns by name."""


class Feed(Protocol):
    """Batches without end: fetched early, moved to the device when trained."""

    def fetch(self) -> Any:
        """Return the next batch where it lies; wait until it is loaded."""
        ...

    def move(self, fetched: Any) -> Any:
        """Return a fetched batch on the device, as the training gets it."""
        ...

    @property
    def position(self) -> Any:
        """Return what a checkpoint needs to go on behind the last moved batch, in plain data; None:
        the number of batches tells."""
        ...

    def close(self) -> None:
        """Stop what loads."""
        ...


@dataclasses.dataclass(frozen=True)
class DataRequest:
    """What `trial.batches` was given."""

    source: loader.Source
    prepare: loader.Prepare | None
    collate: Callable[[list[Any]], Any] | None
    samples_each: int


class Observer:
    """Watch a training and steer it; this one lets it train to the end of its budget.

    Methods after `asks_to_stop` are called on rank 0 only, the others on all ranks.
    """

    def __init__(self, stop_requests: Sequence[object] = ()) -> None:
        """`stop_requests`: a list, say of signals, that stops the training if not empty."""
        self._stop_requests = stop_requests

    def after_prepare(self, engine: Engine, model: nn.Module, prepared: nn.Module) -> nn.Module:
        """Return what the workload gets as its prepared model; `model` is the plain one inside."""
        return prepared

    def begin(self, engine: Engine) -> bool:
        """Return whether to train, once everything is set up and the first batch is requested."""
        return True

    def batch(self, engine: Engine, batch: Any) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the workload gets this batch and trains it."""
        return contextlib.nullcontext()

    def evaluate(self, engine: Engine, evaluate: Facts) -> Mapping[str, Any]:
        """Return what `evaluate()` finds of the model, in plain numbers and words."""
        return evaluate()

    def after_step(self) -> None:
        """Called after every optimizer step, as torch's profiler needs it."""

    def after_loop(self, engine: Engine) -> None:
        """Called when the workload gets no further batch."""

    def asks_to_stop(self) -> bool:
        """Return whether to stop; if any rank is asked to, all save a checkpoint and return."""
        return bool(self._stop_requests)

    # ---- on rank 0
    def restarted(self, reason: str) -> None:
        """Note that the training begins at its first step, so that points reported before are void.

        `reason`: why a checkpoint is of no use; "" where there is none.
        """

    def point(self, point: Point) -> bool:
        """Take an evaluation's point; return whether to go on. Resumes report points again."""
        return True

    def scalars(self, values: Mapping[str, float]) -> None:
        """Take train_s, samples, steps, loss and learning_rate, whenever the clock was read."""

    def about(self, facts: Mapping[str, Any]) -> None:
        """Take facts about data and model, once."""

    def captured(self, outcome: CaptureOutcome, reason: str) -> None:
        """Take whether steps are replayed from now on, or the reason why they are not."""

    def show(self, name: str, what: Shown) -> None:
        """Take images or a table to look at."""


class Engine:
    """Trains until the budget is spent. All ranks have the same parts. A workload sees it through
    `Trial`, which describes the methods of the same names."""

    meter: Meter
    """Made after the warm-up."""

    # ---- what the workload hands over
    model: nn.Module | None = None
    """The prepared model, which is trained."""
    result: nn.Module | None = None
    """The model that is judged and saved."""
    evaluation: Facts | None = None
    description: Facts = dict
    flops_per_sample: float | Literal["count"] | None = None
    data: DataRequest | None = None
    """None: batches come from a loader of the workload's own."""
    feed: Feed | None = None
    own_loader = False
    """Whether batches come from a loader of the workload's own."""
    adopted = False
    """Whether a framework moves, wraps, calls and compiles the model."""

    # ---- how far it is
    judged: Mapping[str, torch.Tensor] | None = None
    """A host copy of the weights that the last point judged, exported; complete on rank 0."""
    judged_digest: str | None = None
    """Digest of the weights that the latest evaluation has judged, on rank 0."""
    restart_reason = ""
    """Why an existing checkpoint is of no use."""
    warming_up = False
    """Whether steps are made that will be undone: for kernels, autotuning and compilation."""
    evaluating = False
    stopping = False
    """Whether it was asked to stop."""
    done = False
    """Whether the workload gets no further batch."""
    seeded = True
    """Whether torch's generator had the configuration's seed when the model was prepared."""
    stride = 0.0
    """The part of the training that the last step took, in units of `progress`."""
    warm_ups = 0
    """Steps until all is compiled, which are undone."""
    peak_flops_per_s = 0.0
    """Of all devices, measured."""
    saved_s = 0.0
    """Training seconds at the last checkpoint."""
    _counted = 0.0  # the furthest schedule after a step
    _temporary: tempfile.TemporaryDirectory[str] | None = None

    def __init__(
        self,
        config: Systems,
        budget: Budget,
        world: World,
        *observers: Observer,
        folder: Path | None = None,
        evaluates: bool = True,
        clock: Clock | None = None,
        initial: Mapping[str, torch.Tensor] | None = None,
        compiled: Path | None = None,
        seconds_to_target: Callable[[Sequence[Point]], float | None] | None = None,
        not_captured: str = "",
        make_graph: MakeGraph | None = None,
        checkpoint_every_s: float = 300.0,
    ) -> None:
        """Set up the parts, and seed all generators for equal initial weights on all ranks.

        `folder`: of checkpoints, None: none are written. `evaluates`: whether the model is judged;
        without it, points carry throughput only. `initial`: weights to start from. `compiled`:
        folder of code that trainings share; None: they share none. `seconds_to_target`: returns
        when points have met a target, at which the training ends; None: there is no target.
        `not_captured`: why an earlier process could not capture the step; `make_graph`: captures
        it, whatever the configuration says; None: CUDA, where it asks for that.
        `checkpoint_every_s`: training seconds between checkpoints of a segment.
        """
        self.config, self.budget, self.world, self.device = config, budget, world, world.device
        self.observers, self.folder, self.evaluates = observers, folder, evaluates
        self.initial, self.seconds_to_target = initial, seconds_to_target
        self.checkpoint_every_s = checkpoint_every_s
        self.samples_per_step = config.loader.batch_size
        """Samples of an optimizer step, of all ranks."""
        self.points, self.notes, self.not_followed = list[Point](), list[str](), set[str]()
        """Points so far, notes for the check, knobs that the workload's framework cannot follow."""

        # ---- parts
        self.shown_config, self.read_knobs = config, Reads(())
        if config.schema.version:  # a user's workload: note which knobs it reads
            self.shown_config, self.read_knobs = watched(config)
        self.clock = clock or Clock(budget, world.synchronize)
        self.phases, self.pace = Phases(world.device), Pace(budget, self.clock, world)
        self.strategy, self.amp = (
            strategies.build(config, world),
            Amp(config.precision, self.device),
        )
        self.state = state.State(world, self.strategy, self.amp.scaler)
        self.compilation = Compilation(config.compile)
        self.shared_code = SharedCode(compiled if config.compile.active else None)
        self.loader_processes, self.step = LoaderProcesses(), OptimizerStep(self)
        asked = config.compile.capture if self.device.type == "cuda" else "none"
        if asked == "auto" and not not_captured:
            not_captured = why_not_captured(config)
        self.capture = steps_of(self, asked != "none", make_graph, not_captured)

        # ---- nothing stays of an earlier training in this process
        memory.reset(self.device)
        memory.keep_freed(config.memory.keep_freed, self.device)
        torch.manual_seed(config.seed)
        randomness.seed_libraries(config.seed)
        self.state.rng.manual_seed(config.seed)
        self.setup = contextlib.ExitStack()
        self.setup.enter_context(self.clock.part("setup"))  # until the first batch is requested

    @property
    def user_folder(self) -> Path:
        """Return the folder for the workload's files; a temporary one without `folder`."""
        if self.folder is None:
            self._temporary = self._temporary or tempfile.TemporaryDirectory(
                prefix="tunediff-files-"
            )
            return Path(self._temporary.name)
        path = self.folder.absolute() / "files"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def keep(self, objects: Mapping[str, state.Stateful]) -> None:
        """Register what is learned for checkpoints."""
        self.state.keep(objects)
        for stateful in objects.values():
            self.strategy.keeps(stateful)

    def mistake(self, message: str) -> WorkloadError:
        """Return the error that names the workload and what is wrong in it."""
        return WorkloadError(f"{self.config.schema.title}: {message}")

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of forward passes in `precision.amp`; none in an evaluation."""
        if self.evaluating:
            return contextlib.nullcontext()
        self.read_knobs.add("precision.amp")
        return self.amp.autocast()

    @contextlib.contextmanager
    def exported(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield the weights that would be exported now, not copied. All ranks enter it; inside, the
        states of rank 0 alone are complete."""
        assert self.result is not None
        self.strategy.complete(self.result)
        with self.strategy.states_for_file():
            yield weights.state_of(self.result)

    # ---- observers
    @property
    def listeners(self) -> Sequence[Observer]:
        """Return the observers that hear of points and facts here: rank 0's."""
        return self.observers if self.world.main else ()

    def about(self, facts: Mapping[str, Any]) -> None:
        """Tell observers facts about data and model."""
        for observer in self.listeners:
            observer.about(facts)

    def decided(self, outcome: CaptureOutcome, reason: str = "") -> None:
        """Tell observers whether steps are replayed."""
        for observer in self.listeners:
            observer.captured(outcome, reason)

    def asks_to_stop(self) -> bool:
        """Return whether an observer of this rank asks to stop."""
        return any(observer.asks_to_stop() for observer in self.observers)

    # ---- one step
    @property
    def loss(self) -> torch.Tensor | None:
        """Return the loss of the step that is made, a scalar on the device."""
        return self.step.loss

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
            self.step.pass_index, self.step.stepped = index, False
            batch = self.fetch_batch() if batches is None else batches[index]

            # ---- forward and backward pass, in the workload's loop
            self.phases.switch("forward")
            if self.config.compile.active:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            with contextlib.ExitStack() as stack:
                if not self.step.sync_gradients:
                    stack.enter_context(self.strategy.unsynchronized())
                for observer in self.observers:
                    stack.enter_context(observer.batch(self, batch))
                yield batch
        self.phases.switch(None)

        # ---- was it trained?
        if not self.step.updated:
            raise self.mistake(
                "train(trial): a batch was taken and trial.step(loss, optimizer) not called: every"
                " batch that the loop gets is trained with one call of it, or counted by"
                " trial.record_step(loss, optimizer) after a step that the loop has made itself"
            )

    def count_replay(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Count a step that was replayed."""
        self.step.begin()
        self.step.loss, self.step.updated = loss, True
        self.step.learning_rate = learning_rate
        if not self.warming_up:
            self.count_step()

    def count_step(self) -> None:
        """Count one optimizer step, which was queued on the device."""
        assert self.step.loss is not None
        self.meter.add(self.step.loss)
        # A reading of the clock may put the schedule back behind steps that were counted already.
        before = max(self._counted, self.pace.schedule)
        self.pace.step(self.samples_per_step)
        self.stride = max(0.0, self.pace.schedule - before)
        self._counted = before + self.stride

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Make steps inside that are no part of the training: its clock counts compilation. What
        they change is put back by the caller."""
        self.loader_processes.pause()
        with self.pace.left_out_of_schedule(), self.clock.part("compile"):
            self.warming_up = True
            try:
                yield
            finally:
                self.warming_up = False
        self.loader_processes.resume()

    # ---- the end
    def close(self) -> None:
        """Stop what loads data, and the clock's part that is running before the first batch."""
        self.setup.close()
        self.capture.close()
        self.phases.switch(None)
        self.loader_processes.close()
        if self.feed is not None:
            self.feed.close()

    def remove_temporary(self) -> None:
        """Remove the temporary `user_folder`."""
        if self._temporary is not None:
            self._temporary.cleanup()
