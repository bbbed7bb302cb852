"""Everything that one training has: its parts, its model, how far it is; and the program, what is
done with it."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tunediff.config import Systems
from tunediff.config.code import WorkloadError
from tunediff.core.clock import Budget, Clock
from tunediff.core.point import Point
from tunediff.data import loader, randomness
from tunediff.distributed import World
from tunediff.training import memory, state, strategies
from tunediff.training.compilation import Compilation
from tunediff.training.feed import Feed
from tunediff.training.meter import Meter
from tunediff.training.observer import Observer
from tunediff.training.pace import Pace
from tunediff.training.phases import Phases
from tunediff.training.precision import Amp
from tunediff.training.read_tracking import Reads, watched

Facts = Callable[[], Mapping[str, Any]]
"""What a workload gives to be called at every point: it returns values by name."""


class Session:
    """One training of one configuration, as the engine runs it. All ranks have the same parts."""

    config: Systems
    budget: Budget
    world: World
    device: torch.device
    observer: Observer
    program: Program
    folder: Path | None
    """Where checkpoints are written; None: nowhere."""
    evaluates: bool
    """Whether the model is judged; without it, points carry throughput only."""
    initial: Mapping[str, torch.Tensor] | None
    """Weights to start from."""
    clock: Clock
    pace: Pace
    phases: Phases
    state: state.State
    strategy: strategies.Single
    amp: Amp
    compilation: Compilation
    meter: Meter
    """Made after the warm-up."""

    def __init__(
        self, config: Systems, budget: Budget, world: World, observer: Observer, program: Program | None = None, *,
        folder: Path | None = None, evaluates: bool = True, clock: Clock | None = None,
        initial: Mapping[str, torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Set up the parts, and seed all generators for equal initial weights on all ranks."""
        self.config, self.budget, self.world, self.device = config, budget, world, world.device
        self.program = program or Program()
        self.observer, self.folder, self.evaluates, self.initial = (
            observer,
            folder,
            evaluates,
            initial,
        )
        self.shown_config, self.read_knobs = (
            watched(config) if config.schema.version else (config, Reads(()))
        )
        self.knobs = self.shown_config.knobs
        self.clock, self.phases = clock or Clock(budget, world.synchronize), Phases(world.device)
        self.pace, self.state = Pace(budget, self.clock, world), state.State(world)
        self.strategy, self.amp = (
            strategies.build(config, world),
            Amp(config.precision, world.device),
        )
        self.compilation = Compilation(config.compile)

        # ---- what the workload hands over
        self.model: nn.Module | None = None
        """The prepared model, which is trained."""
        self.result: nn.Module | None = None
        """The model that is judged and saved."""
        self.judged: Mapping[str, torch.Tensor] | None = None
        """A copy, in host memory, of the weights that the last point has judged: what is exported.
        Whole on rank 0."""
        self.judged_digest: str | None = None
        """Digest of the weights that the latest evaluation has judged, on rank 0."""
        self.evaluation: Facts | None = None
        self.description: Facts = dict
        self.files_of_points: dict[str, Callable[[], Mapping[str, torch.Tensor]]] = {}
        """What is written at every point, by the name of its folder."""
        self.flops_per_sample: float | None = None
        self.samples_per_step = config.loader.batch_size
        """Samples of an optimizer step, of all ranks."""
        self.feed: Feed | None = None
        self.own_loader = False
        """Whether batches come from a loader of the workload's own."""

        self.adopted = False
        """Whether a framework moves, wraps, calls and compiles the model."""
        self.not_followed = set[str]()
        """Knobs that the workload's framework cannot follow."""

        # ---- how far it is
        self.points: list[Point] = []
        self.pending: Point | None = None
        """A point whose evaluation was interrupted."""
        self.restart_reason = ""
        """Why a checkpoint that was there is of no use."""
        self.warming_up = False
        """Whether steps are made that will be undone: for kernels, autotuning and compilation."""
        self.evaluating = False
        self.seeded = True
        """Whether torch's generator had the configuration's seed when the model was prepared."""

        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Leave nothing of an earlier training in this process: neither memory nor the state of
        generators."""
        memory.reset(self.device)
        memory.keep_freed(self.config.memory.keep_freed, self.device)
        torch.manual_seed(self.config.seed)
        randomness.seed_libraries(self.config.seed)
        self.state.rng.manual_seed(self.config.seed)

    @property
    def user_folder(self) -> Path:
        """Return where the workload writes files of its own; without `folder`, one of this rank
        that goes with the run."""
        if self.folder is None:
            self._temporary = self._temporary or tempfile.TemporaryDirectory(
                prefix="tunediff-files-"
            )
            return Path(self._temporary.name)
        path = self.folder.absolute() / "files"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def remove_temporary(self) -> None:
        """Remove the files that the workload wrote where the run has no `folder`."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def mistake(self, message: str) -> WorkloadError:
        """Return the error that names the workload and what is wrong in it."""
        return WorkloadError(f"{self.config.schema.title}: {message}")

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of forward passes, in the number format of `precision.amp`.

        In an evaluation it changes nothing, so that all trials are judged in one format.
        """
        if self.evaluating:
            return contextlib.nullcontext()
        self.read_knobs.add("precision.amp")
        return self.amp.autocast()


class Program:
    """Train to the end of the budget, and watch nothing: the program of every trial of a search.

    Others look at a training, judge or measure it: they override some of these methods. All ranks
    run the same one.
    """

    def before_prepare(self, session: Session, model: nn.Module) -> None:
        """Called with the workload's model before anything is done to it."""

    def after_prepare(self, session: Session, model: nn.Module, prepared: nn.Module) -> nn.Module:
        """Return what the workload gets as its prepared model; `model` is the plain one inside."""
        return prepared

    def on_source(
        self, session: Session, source: loader.Source | None, options: Mapping[str, Any]
    ) -> None:
        """Called when the workload requests batches of `source`, None: its own loader.

        `options`: prepare, collate and samples_each of `trial.batches`.
        """

    def begin(self, session: Session) -> bool:
        """Return whether to train, once everything is set up and the first batch is asked for."""
        return True

    def batch(self, session: Session, batch: Any) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the workload gets this batch and trains it."""
        return contextlib.nullcontext()

    def on_passes(self, session: Session) -> None:
        """Called when the strategy has run a forward and a backward pass of its own."""

    def judge(
        self, session: Session, evaluate: Callable[[], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Return what `evaluate()` finds of the model, in plain numbers and words."""
        return evaluate()

    def after_loop(self, session: Session) -> None:
        """Called when the workload gets no further batch."""

    def before_save(self, session: Session) -> None:
        """Called before a checkpoint is written."""

    def object_to(self, session: Session, message: str) -> None:
        """Called with what may be a mistake of the workload. Prints a warning: the budget is spent
        already."""
        if session.world.main:
            print(f"WARNING: {session.mistake(message)}", file=sys.stderr, flush=True)
