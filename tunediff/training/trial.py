"""What a workload sees of its training, which is fair, distributed, resumable, measured.

A workload is `train(trial)`, called on every rank:

    net = trial.prepare(Net(trial.knobs.width))
    optimizer = torch.optim.AdamW(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer)
    trial.evaluate_with(lambda: {"accuracy": accuracy(net)})
    for images, labels in trial.batches(train_set):
        with trial.autocast():
            loss = F.cross_entropy(net(images), labels)
        trial.step(loss, optimizer)

`run` calls it and returns the `TrainingOutcome`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn
from unittest import mock

import torch
from torch import Tensor, nn

from tunediff.config import Systems, of
from tunediff.core import text
from tunediff.data import items, loader
from tunediff.distributed import World, described_in_environment
from tunediff.training import loop, model_setup, outcome, state
from tunediff.training.capture import captured
from tunediff.training.capture.steps import await_default_stream
from tunediff.training.engine import DataRequest, Engine, Facts, Feed, Shown
from tunediff.training.outcome import TrainingOutcome

__all__ = ["Facts", "Shard", "TrainingOutcome", "Trial", "run"]


log = logging.getLogger(__name__)
MakeFeed = Callable[[Sequence[Any]], tuple[Feed, int]]
"""Makes a feed, and says how many samples one of its items has on this rank. It is given what
`position` of each rank's feed was in the checkpoint; [] without one."""


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


class Trial:
    """One training as its workload sees it. All ranks make the same calls in the same order."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.config: Systems = engine.shown_config
        """Every knob, those of the system included."""
        self.knobs: Any = self.config.knobs
        """The workload's own `Knobs`."""
        self.world: World = engine.world
        self.device: torch.device = engine.device
        self.evaluates: bool = engine.evaluates
        """Whether the model will be judged; where it is not, nothing for that need be built."""

    # ---- what it has
    @property
    def folder(self) -> Path:
        """Return the folder for the workload's files, which no other run has."""
        return self.engine.user_folder

    @property
    def rng(self) -> torch.Generator:
        """Return a generator on the device, of equal state on all ranks.

        Draw for the complete batch and use this rank's part, so that the number of workers changes
        the speed and not what is learned.
        """
        return self.engine.state.rng

    @property
    def progress(self) -> float:
        """Return the fraction of the budget that is spent, 0 to 1, which schedules follow."""
        self.engine.capture.note_read("trial.progress")
        return min(1.0, self.engine.pace.schedule)

    @property
    def schedule(self) -> float:
        """Return `progress`, which goes on above 1 in an open-ended training."""
        self.engine.capture.note_read("trial.schedule")
        return self.engine.pace.schedule

    @property
    def stride(self) -> float:
        """Return by how much the last step raised `progress`."""
        self.engine.capture.note_read("trial.stride")
        return self.engine.stride

    @property
    def step_count(self) -> int:
        """Return the number of optimizer steps so far, those before a resume included."""
        self.engine.capture.note_read("trial.step_count")
        return self.engine.pace.steps

    @property
    def warming_up(self) -> bool:
        """Return whether this step will be undone: the first ones load kernels and compile."""
        self.engine.capture.note_read("trial.warming_up")
        return self.engine.warming_up

    @property
    def sync_gradients(self) -> bool:
        """Return whether this batch is the last of its optimizer step."""
        return self.engine.step.sync_gradients

    @property
    def shard(self) -> Shard:
        """Return this rank's part of every micro-batch."""
        return Shard.of(self.config, self.replicas)

    @property
    def replicas(self) -> World:
        """Return the ranks that divide every batch: `world`, but with `pipeline` one."""
        return self.engine.strategy.replicas

    # ---- before training
    def prepare(
        self,
        model: nn.Module,
        *,
        blocks: type[nn.Module] | None = None,
        flops_per_sample: float | Literal["count"] | None = None,
        export: nn.Module | None = None,
        **kept: state.Stateful,
    ) -> nn.Module:
        """Return the model on its device, under the parallel strategy and torch.compile; make the
        optimizer after this.

        `model` itself stays the plain one inside. `blocks`: the class of the parts that repeat in
        it, for `compile.scope` and `memory.checkpoint`; `flops_per_sample`: of a training step, for
        the MFU; "count": by torch's counter, in the step that is undone. `kept`: an optimizer and
        what else was made before, which `keep` takes with the model; `export`: averaged weights,
        kept as well, for `export_model`.
        """
        return model_setup.prepare(self.engine, model, blocks, flops_per_sample, export, kept)

    def keep(self, **objects: state.Stateful) -> None:
        """Keep in checkpoints what is learned: anything with `state_dict`, `load_state_dict`."""
        self.engine.keep(objects)

    def export_model(self, model: nn.Module) -> None:
        """Set the result where it is not the prepared model, such as averaged weights."""
        self.engine.result = model

    def evaluate_with(self, judge: Facts) -> Facts:
        """Call `judge` at every point, while the budget's clock stands still.

        The prepared model and the exported one are in evaluation mode, no gradients are kept, and
        everything is computed in IEEE float32, whatever the training's format. `judge` returns a
        dictionary of numbers, the objective among them. Also a decorator: returns `judge`.
        """
        self.engine.evaluation = judge
        return judge

    def captured(self, network: nn.Module) -> Callable[..., Tensor]:
        """Return `network` for the many passes of an evaluation such as a sampler's: captured and
        replayed where `compile.capture = step` is in effect.

        It takes tensors and returns one, without gradients, and draws no random numbers.
        """
        return captured(network, self.engine.capture.make_graph)

    def describe_with(self, describe: Facts) -> None:
        """Call `describe` at every point, evaluated or not, for facts that cost little."""
        self.engine.description = describe

    def about(self, **facts: Any) -> None:
        """Write facts about the data or the model to the trial's record, once."""
        self.engine.about(facts)

    def show(self, name: str, what: Shown) -> None:
        """Keep images uint8 [n, C, H, W] or a table, columns by name; the latest of a name."""
        for observer in self.engine.listeners:
            observer.show(name, what)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Measure the part of the step inside by itself, under its name."""
        return self.engine.phases(name)

    # ---- every batch
    def before_step(self, call: Callable[[], object]) -> None:
        """Call what sets numbers by `progress`, such as a learning rate, now.

        With `compile.capture = step` the loop's body runs no more once it is captured; this goes on
        to be called before every step.
        """
        self.engine.capture.before(call)

    def after_step(self, call: Callable[..., object], *tensors: Tensor) -> None:
        """Call what learns or counts on the host, with tensors of this step.

        At once; with `compile.capture = step` after the step, whether it is replayed or not.
        """
        self.engine.capture.after(call, *tensors)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of forward passes in `precision.amp`; none in an evaluation."""
        return self.engine.autocast()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of one pass's mean loss, under loss scaling and accumulation."""
        self.engine.step.backward(loss)

    def backward_beside(self, loss: Tensor) -> None:
        """Compute gradients of parameters outside the prepared model from a loss of theirs."""
        self.engine.step.backward_beside(loss)

    def forward_backward(
        self,
        inputs: tuple[Tensor, ...],
        targets: tuple[Tensor, ...],
        loss_of: Callable[..., Tensor],
        weights: Tensor | None = None,
    ) -> Tensor:
        """Make forward and backward pass in one call, for strategies that must own both.

        `loss_of(output, *targets)` gives the loss of each item [b], float32, outside autocast;
        their mean, weighted by `weights` [b], is minimised. Returns the items' losses, detached.
        `pipeline` takes all three tensors from rank 0, and needs batches of one length.
        """
        return self.engine.step.forward_backward(inputs, targets, loss_of, weights)

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        beside: Iterable[nn.Parameter] = (),
    ) -> None:
        """Make the optimizer's step, after the last pass.

        `clip_norm` bounds the global norm of the prepared model's gradients; `beside`: parameters
        outside it, whose gradients are averaged over ranks here.
        """
        self.engine.step.update(optimizer, clip_norm, beside)

    def step(
        self,
        loss: Tensor,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
    ) -> None:
        """Call `backward`, and `update` after the last pass; one call for each batch.

        A loop of several losses and optimizers makes its own updates; see `record_step`.
        """
        self.engine.step.step(loss, optimizer, clip_norm)

    def record_step(self, loss: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Count a step whose backward passes and updates the loop has made itself: one call for
        each batch, after them.

        `loss` is recorded, with the learning rate of `optimizer`. Loss scaling and the parts of the
        step, `with trial.phase("backward")`, are then the loop's own affair. Raises `WorkloadError`
        with accumulation, which needs `step`.
        """
        self.engine.step.record(loss, optimizer)

    def randn_like(self, mine: Tensor) -> Tensor:
        """Return standard normal numbers of the shape of this rank's part of a batch.

        They are drawn for the complete batch from `rng`, so that the number of ranks does not
        change them. Raises `WorkloadError` for more rows than `loader.batch_size` gives to a rank.
        """
        # not `self.config`: what the workload reads itself counts as read
        shard = Shard.of(self.engine.config, self.replicas)
        if len(mine) > shard.count:
            self.fail(
                f"trial.randn_like: {text.pluralize(len(mine), 'row')}, and this rank's part of"
                f" loader.batch_size is {shard.count}; a loader of your own takes"
                " trial.loader_options"
            )
        numbers = torch.randn(shard.total, *mine.shape[1:], generator=self.rng, device=mine.device)
        return numbers[shard.mine][: len(mine)]

    # ---- the loop
    def batches(
        self,
        source: loader.Source,
        prepare: loader.Prepare | None = None,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        samples_each: int = 1,
    ) -> Iterator[Any]:
        """Yield batches of `source` on the device until the budget is spent, by `loader`.

        `source`: a tensor, a tuple or dictionary of tensors, a list of items, or any dataset,
        iterable ones too. The items of an iterable are dealt out to ranks and loader processes by
        their place, and begin anew at a resume. `collate` makes a batch of items, as DataLoader has
        it; `prepare(batch, uniform)` makes of a batch on the device what the loop gets, with random
        numbers that no way of dividing the batch changes. `samples_each`: what one item counts as
        in `UNIT`, such as the tokens of a sequence.
        """
        engine, section, ranks = self.engine, self.engine.config.loader, self.replicas
        engine.data = DataRequest(source, prepare, collate, samples_each)
        if (length := loader.length(source)) == 0:
            self.fail("trial.batches: the data set is empty")
        size, seed = section.batch_size, engine.config.seed
        engine.samples_per_step = size * samples_each
        order = loader.Order(length or 1, size, section.accumulation, ranks.rank, ranks.size, seed)
        return loop.batches(
            engine,
            lambda start, _: loader.build(
                source, section, order, engine.device, start, prepare, collate
            ),
        )

    def train_on(
        self, make: MakeFeed, *, by_itself: bool = False, complete_steps: bool = False
    ) -> Iterator[Any]:
        """Yield the items of a feed of the caller's own until the budget is spent: what
        `tunediff.steps`, `tunediff.epochs` and the adapters of frameworks are made of.

        `by_itself`: the caller hands out the batches, so that steps are not captured, and what is
        drawn is what it would draw without tunediff, but on several ranks. `complete_steps`: an
        item is all that a step trains on.
        """
        engine = self.engine
        engine.own_loader = True
        if by_itself:
            why = "a loop by epochs and a framework hand out batches by themselves"
            engine.capture.refuse(why)
        if complete_steps:
            engine.step.accumulation = 1

        def build(start: int, positions: Sequence[Any]) -> Feed:
            feed, samples = make(positions)
            parts = self.replicas.size * engine.step.accumulation
            engine.samples_per_step = int(engine.world.agree(samples)) * parts
            return feed

        return loop.batches(engine, build, reseed=not by_itself or self.world.size > 1)

    def to_device(self, batch: Any, *, non_blocking: bool = False) -> Any:
        """Return a batch that was made outside the engine with its tensors on the device."""
        moved = items.to_device(batch, self.device, non_blocking)
        await_default_stream(items.tensors_in(moved), self.device)
        return moved

    @property
    def loader_options(self) -> dict[str, Any]:
        """Return the knobs of `loader` as options of a torch DataLoader, for one rank."""
        section = self.config.loader
        options: dict[str, Any] = {
            "batch_size": self.shard.count,
            "num_workers": section.workers,
            "pin_memory": section.pin_memory and self.device.type == "cuda",
        }
        if section.workers:
            options["prefetch_factor"] = section.prefetch_factor
            options["persistent_workers"] = section.persistent_workers
        return options

    # ---- what frameworks ask that wrap the model and own the loop
    def fail(self, message: str) -> NoReturn:
        """Raise the `WorkloadError` that names the workload and what is wrong in it."""
        raise self.engine.mistake(message) from None

    def warn(self, message: str) -> None:
        """Say what the framework does otherwise here: the check before a search tells the user."""
        self.engine.notes.append(message)
        if self.world.main:
            log.warning("%s", message)

    def adopt(self, model: nn.Module) -> None:
        """Take a model that the framework wraps, compiles and calls, instead of `prepare`."""
        model_setup.adopt(self.engine, model)

    def ignores(self, *knobs: str) -> None:
        """Note knobs, by dotted name, that the framework cannot follow."""
        self.engine.not_followed.update(knobs)

    @property
    def evaluator(self) -> Facts | None:
        """Return what `evaluate_with` was given, if anything."""
        return self.engine.evaluation

    @property
    def exported(self) -> nn.Module | None:
        """Return the model that is judged and saved."""
        return self.engine.result

    @property
    def has_begun(self) -> bool:
        """Return whether the first batch was requested and something is trained."""
        return self.engine.feed is not None

    @property
    def is_over(self) -> bool:
        """Return whether the workload gets no further batch."""
        return self.engine.done

    @property
    def replays(self) -> int:
        """Return how often the warm-up trains the first batch; 0 once it is over."""
        return self.engine.warm_ups if self.engine.warming_up else 0

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """Return the scaler of losses, which is kept in checkpoints and enabled for float16."""
        return self.engine.amp.scaler

    def note_judged(self) -> None:
        """Note the present weights as the judged ones, for evaluations that swap weights."""
        loop.note_judged(self.engine)


def run(engine: Engine) -> TrainingOutcome:
    """Train as the workload says. All ranks call it.

    Raises what the training raises, and `NotFiniteError` when the loss is NaN or infinite, on all
    ranks at the same step.
    """
    workload = of(engine.config)
    try:
        with (
            described_in_environment(engine.world),
            mock.patch.object(sys, "argv", [workload.name]),  # as of a script without arguments
            contextlib.suppress(outcome.NotTrainedError),
        ):
            workload.code.train(Trial(engine))
    except RuntimeError as error:
        engine.capture.fail(error)
        raise
    finally:
        engine.close()
        engine.remove_temporary()
    return outcome.of_run(engine, loop.is_complete(engine))
