"""A training's parts, model and progress, and `Program`: what is done with it."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tunediff.config import Systems
from tunediff.config.code import WorkloadError
from tunediff.config.systems import why_not_captured
from tunediff.core.clock import Budget, Clock
from tunediff.core.point import Point
from tunediff.core.target import TIME_TO_TARGET
from tunediff.data import loader, randomness
from tunediff.distributed import World
from tunediff.training import memory, state, strategies
from tunediff.training.capture.graph import CudaStepGraph, MakeGraph, use_side_stream
from tunediff.training.compilation import Compilation
from tunediff.training.feed import Feed
from tunediff.training.meter import Meter
from tunediff.training.observer import Observer
from tunediff.training.pace import Pace
from tunediff.training.phases import Phases
from tunediff.training.precision import Amp
from tunediff.training.read_tracking import Reads, watched
from tunediff.training.shared_code import SharedCode

Facts = Callable[[], Mapping[str, Any]]
"""What a workload gives to be called at every point: it returns values by name."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Where this rank's items lie within a micro-batch of all ranks."""

    first: int
    count: int
    total: int

    @classmethod
    def of(cls, config: Systems, replicas: World) -> Shard:
        """Return the part of this rank among the ranks that divide a batch."""
        count = config.loader.batch_size // (config.loader.accumulation * replicas.size)
        return cls(replicas.rank * count, count, count * replicas.size)

    @property
    def mine(self) -> slice:
        """Return the slice of this rank's items."""
        return slice(self.first, self.first + self.count)


class TrainingRun:
    """A training without its loop, `Engine`. All ranks have the same parts."""

    meter: Meter
    """Made after the warm-up."""

    def __init__(
        self,
        config: Systems,
        budget: Budget,
        world: World,
        observer: Observer,
        program: Program | None = None,
        *,
        folder: Path | None = None,
        evaluates: bool = True,
        clock: Clock | None = None,
        initial: Mapping[str, torch.Tensor] | None = None,
        compiled: Path | None = None,
        seconds_to_target: Callable[[Sequence[Point]], float | None] | None = None,
        not_captured: str = "",
    ) -> None:
        """Set up the parts, and seed all generators for equal initial weights on all ranks.

        `folder`: of checkpoints, None: none are written. `evaluates`: whether the model is judged;
        without it, points carry throughput only. `initial`: weights to start from. `compiled`:
        folder of code that trainings share; None: they share none. `seconds_to_target`: returns
        when points have met a target, at which the training ends; None: there is no target.
        `not_captured`: why an earlier process could not capture the step.
        """
        self.config, self.budget, self.world, self.device = config, budget, world, world.device
        self.observer, self.folder, self.evaluates = observer, folder, evaluates
        self.program, self.initial = program or Program(), initial
        self.seconds_to_target = seconds_to_target

        # ---- parts
        self.shown_config, self.read_knobs = config, Reads(())
        if config.schema.version:  # a user's workload: note which knobs it reads
            self.shown_config, self.read_knobs = watched(config)
        self.knobs = self.shown_config.knobs
        self.clock = clock or Clock(budget, world.synchronize)
        self.phases, self.pace = Phases(world.device), Pace(budget, self.clock, world)
        self.state, self.strategy = state.State(world), strategies.build(config, world)
        self.amp = Amp(config.precision, world.device)
        self.compilation = Compilation(config.compile)
        self.not_captured = not_captured
        """Why no capture is tried, where the configuration asks for one."""
        if config.compile.capture == "auto" and self.device.type == "cuda" and not not_captured:
            self.not_captured = why_not_captured(config)
        self.make_graph = None if self.not_captured else self.program.step_graph(self)
        """What captures steps; None: they are made in the loop."""
        self.shared_code = SharedCode(compiled if config.compile.active else None)

        # ---- what the workload hands over
        self.model: nn.Module | None = None
        """The prepared model, which is trained."""
        self.result: nn.Module | None = None
        """The model that is judged and saved."""
        self.evaluation: Facts | None = None
        self.description: Facts = dict
        self.flops_per_sample: float | Literal["count"] | None = None
        self.samples_per_step = config.loader.batch_size
        """Samples of an optimizer step, of all ranks."""
        self.feed: Feed | None = None
        self.own_loader = False
        """Whether batches come from a loader of the workload's own."""
        self.adopted = False
        self.notes = list[str]()
        """Whether a framework moves, wraps, calls and compiles the model."""
        self.not_followed = set[str]()
        """Knobs that the workload's framework cannot follow."""

        # ---- how far it is
        self.points: list[Point] = []
        self.pending: Point | None = None
        """A point whose evaluation was interrupted."""
        self.judged: Mapping[str, torch.Tensor] | None = None
        """A host copy of the weights that the last point judged, exported; complete on rank 0."""
        self.judged_digest: str | None = None
        """Digest of the weights that the latest evaluation has judged, on rank 0."""
        self.restart_reason = ""
        """Why an existing checkpoint is of no use."""
        self.warming_up = False
        """Whether steps are made that will be undone: for kernels, autotuning and compilation."""
        self.evaluating = False
        self.done = False
        """Whether the workload gets no further batch."""
        self.seeded = True
        """Whether torch's generator had the configuration's seed when the model was prepared."""

        # ---- nothing stays of an earlier training in this process
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        memory.reset(self.device)
        memory.keep_freed(config.memory.keep_freed, self.device)
        torch.manual_seed(config.seed)
        randomness.seed_libraries(config.seed)
        self.state.rng.manual_seed(config.seed)

    @property
    def complete(self) -> bool:
        """Return whether the last point ended the training: budget spent, or target met."""
        if self.seconds_to_target is not None and self.points and TIME_TO_TARGET in self.points[-1]:
            return True
        return len(self.points) >= self.config.evaluation.points and not self.budget.open_ended

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

    def remove_temporary(self) -> None:
        """Remove the temporary `user_folder`."""
        if self._temporary is not None:
            self._temporary.cleanup()

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


class Program:
    """Train to the end of the budget, and watch nothing: the program of every trial of a search.

    Others check, judge or measure: they override some methods. All ranks run the same one.
    """

    def before_prepare(self, run: TrainingRun, model: nn.Module) -> None:
        """Called with the workload's model before anything is done to it."""

    def after_prepare(self, run: TrainingRun, model: nn.Module, prepared: nn.Module) -> nn.Module:
        """Return what the workload gets as its prepared model; `model` is the plain one inside."""
        return prepared

    def on_source(
        self, run: TrainingRun, source: loader.Source | None, options: Mapping[str, Any]
    ) -> None:
        """Called when the workload requests batches of `source`, None: its own loader.

        `options`: prepare, collate and samples_each of `trial.batches`.
        """

    def begin(self, run: TrainingRun) -> bool:
        """Return whether to train, once everything is set up and the first batch is requested."""
        return True

    def step_graph(self, run: TrainingRun) -> MakeGraph | None:
        """Return what captures this training's steps; None: they are made in the loop."""
        if run.config.compile.capture == "none" or run.device.type != "cuda":
            return None
        use_side_stream(run.device)
        return CudaStepGraph

    def batch(self, run: TrainingRun, batch: Any) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the workload gets this batch and trains it."""
        return contextlib.nullcontext()

    def on_passes(self, run: TrainingRun) -> None:
        """Called when the strategy has run a forward and a backward pass of its own."""

    def judge(
        self, run: TrainingRun, evaluate: Callable[[], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Return what `evaluate()` finds of the model, in plain numbers and words."""
        return evaluate()

    def after_loop(self, run: TrainingRun) -> None:
        """Called when the workload gets no further batch."""

    def before_save(self, run: TrainingRun) -> None:
        """Called before a checkpoint is written."""

    def object_to(self, run: TrainingRun, message: str) -> None:
        """Print a warning of what may be a mistake of the workload: the budget is spent already."""
        if run.world.main:
            print(f"WARNING: {run.mistake(message)}", file=sys.stderr, flush=True)
