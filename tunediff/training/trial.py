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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tunediff.config import of
from tunediff.data import loader
from tunediff.distributed import World
from tunediff.training import hardware, losses, memory, state
from tunediff.training.feed import Endless
from tunediff.training.loop import Facts, Loop, Outcome
from tunediff.training.observer import Shown

__all__ = ["Facts", "Outcome", "Place", "Trial", "run"]


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


class Trial(Loop):
    """One training of one configuration, as a workload sees it. All ranks make the same calls in the same order."""

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
    def step_count(self) -> int:
        """Optimizer steps so far, those before a resume included."""
        return self._pace.steps

    @property
    def place(self) -> Place:
        """This rank's part of every micro-batch."""
        count = self.config.loader.batch_size // (self.config.loader.accumulation * self.replicas.size)
        return Place(self.replicas.rank * count, count, count * self.replicas.size)

    @property
    def replicas(self) -> World:
        """The ranks that have a part of every batch each: `world`, but with `pipeline`, where each sees the whole."""
        return self._strategy.replicas

    def should_stop(self) -> bool:
        """Whether this rank was asked to stop; a long evaluation may raise TimeoutError, on all ranks at once."""
        return self._observer.asks_to_stop()

    # ------------------------------------------------------------------------------------------------- before training
    def prepare(
        self, model: nn.Module, *, blocks: type[nn.Module] | None = None, flops_per_sample: float | None = None
    ) -> nn.Module:
        """The model on its device, under the parallel strategy and torch.compile; the optimizer is made after this.

        `model` itself stays the plain one inside. `blocks`: the class of the parts that repeat in it, for
        `compile.scope` and `memory.checkpoint`; `flops_per_sample`: of a training step, for the share of the
        device's peak.
        """
        if not isinstance(model, nn.Module):
            raise self._mistake(f"trial.prepare takes a torch.nn.Module, not {type(model).__name__}")
        if self._model is not None:
            raise self._mistake("trial.prepare was called twice; put the models into one nn.ModuleDict")
        self._seeded = torch.initial_seed() == self.config.seed
        model.to(self.device)
        if self._channels_last(model):
            model.to(memory_format=torch.channels_last)
        if (share := self.config.memory.checkpoint) > 0:
            memory.checkpoint(model, blocks, share)
        if self._initial is not None:
            model.load_state_dict(self._initial)
        self._model = self._compilation.apply(self._strategy.wrap(model, blocks), model, blocks)
        self._result, self._flops = model, flops_per_sample
        return self._model

    def _channels_last(self, model: nn.Module) -> bool:
        """Whether it is trained in NHWC: on all ranks as rank 0 has measured."""
        wanted = self.config.memory.channels_last
        if wanted != "auto":
            return wanted
        divided = self.config.parallel.strategy == "fsdp" and self.world.size > 1  # takes weights in their usual order
        faster = not divided and hardware.faster_in_nhwc(model, wanted, self._amp.dtype)
        faster = bool(self.world.agree(faster))
        self.about(channels_last=faster)
        return faster

    def keep(self, **kept: state.Stateful) -> None:
        """What is learned and belongs in a checkpoint: anything with `state_dict` and `load_state_dict`."""
        self._state.keep(kept)
        for one in kept.values():
            self._strategy.keeps(one)

    def exports(self, model: nn.Module) -> None:
        """The model that is the result, where it is not the prepared one: averaged weights, for example."""
        self._result = model

    def evaluate_with(self, judge: Facts) -> None:
        """Call `judge` at every point, while the budget's clock stands still.

        The prepared model and the exported one are in evaluation mode, no gradients are kept, and everything is
        computed in IEEE float32, whatever number format the training has. `judge` returns a dictionary of numbers, the
        objective among them.
        """
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
        """The context of forward passes, in the number format of `precision.amp`; in an evaluation it changes nothing,
        so that all trials are judged in one format."""
        if self._judging:
            return contextlib.nullcontext()
        self._autocast_entered = True
        return self._amp.autocast()

    def backward(self, loss: Tensor) -> None:
        """The gradients of one pass's mean loss, under loss scaling and accumulation."""
        if self._strategy.owns_passes:
            raise self._mistake("parallel.strategy = pipeline needs trial.forward_backward(…) in place of trial.step")
        self._phases.switch("backward")
        accumulation = self.config.loader.accumulation
        share = loss / accumulation if accumulation > 1 else loss
        self._amp.scaler.scale(share).backward()  # type: ignore[no-untyped-call]
        self._note(share.detach())
        self._phases.switch(None)

    def _note(self, share: Tensor) -> None:
        """One pass's share of the step's loss."""
        self._loss = share if self._loss is None else self._loss + share

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
        if self._strategy.owns_passes:
            count = len(inputs[0]) * self.config.loader.accumulation
            factors = (torch.ones(len(inputs[0]), device=self.device) if weights is None else weights) / count
            losses = self._strategy.passes(inputs, targets, loss_of, factors, self.autocast)
            self._note((factors * losses).sum())
            self._phases.switch(None)
            return losses
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
        self._mark_updated("update")
        with self._phases("optimizer"):
            self.world.average_gradients(beside)
            self._amp.scaler.unscale_(optimizer)
            if clip_norm is not None and self._model is not None:
                self._strategy.clip(self._model.parameters(), clip_norm)
            self._amp.scaler.step(optimizer)
            self._amp.scaler.update()
            optimizer.zero_grad(set_to_none=True)
        if self._warming:
            return
        self._count(optimizer.param_groups[0]["lr"])

    def _mark_updated(self, call: str) -> None:
        """Note that the step of these batches was made. Raises `WorkloadError` if it was already."""
        self._refuse_second(call, self._updated)
        self._updated = True

    def _refuse_second(self, call: str, done: bool) -> None:
        if done:
            raise self._mistake(
                f"trial.{call} was called twice for one batch; several losses and optimizers go into one call: "
                "trial.step({g_optimizer: g_loss, d_optimizer: d_loss})"
            )

    def _count(self, learning_rate: float) -> None:
        """One optimizer step was queued."""
        if self._loss is None:
            raise self._mistake("trial.update without trial.backward(loss)")
        self._meter.add(self._loss)
        before, self._learning_rate = self._pace.schedule, learning_rate
        self._pace.step(self._counts)
        self.stride = self._pace.schedule - before

    def step(
        self, loss: Tensor | losses.Losses, optimizer: torch.optim.Optimizer | None = None, *,
        clip_norm: float | None = None,
    ) -> None:  # fmt: skip
        """`backward`, and `update` after the last pass; one call for each batch.

        Several optimizers take their losses in one call, `trial.step({g_optimizer: g_loss, d_optimizer: d_loss})`. Each
        loss reaches the parameters of its own optimizer alone, `clip_norm` bounds the gradients of each optimizer by
        themselves, and all are updated at once, after the last backward pass. It is one step; its recorded loss is the
        sum and its learning rate that of the first optimizer.
        """
        try:
            by_optimizer = losses.of_step(loss, optimizer)
        except ValueError as error:
            raise self._mistake(str(error)) from None
        self._refuse_second("step", self._stepped)
        self._stepped = True
        if isinstance(loss, Tensor):
            self.backward(loss)
            if self.last_pass:
                assert optimizer is not None
                self.update(optimizer, clip_norm=clip_norm)
            return
        self._backward_each(by_optimizer)
        if self.last_pass:
            self._update_each(by_optimizer, clip_norm)

    def _backward_each(self, by_optimizer: losses.Losses) -> None:
        """The gradients of several losses, each of its own optimizer's parameters."""
        strategy = self.config.parallel.strategy
        if not self._strategy.separate_losses:
            raise self._mistake(
                f"parallel.strategy: {strategy} is not allowed with several losses: it averages gradients in one "
                "backward pass; allowed: ddp, dp, single"
            )
        self._phases.switch("backward")
        count = self.config.loader.accumulation
        try:
            losses.backward(by_optimizer, lambda one: self._amp.scaler.scale(one / count))
        except ValueError as error:
            raise self._mistake(str(error)) from None
        for one in by_optimizer.values():
            self._note(one.detach() / count)
        self._phases.switch(None)

    def _update_each(self, by_optimizer: losses.Losses, clip_norm: float | None) -> None:
        """The steps of several optimizers, counted as one."""
        self._mark_updated("step")
        with self._phases("optimizer"):
            for optimizer in by_optimizer:
                own = losses.parameters(optimizer)
                self._strategy.average(own)
                self._amp.scaler.unscale_(optimizer)
                if clip_norm is not None:
                    self._strategy.clip(own, clip_norm)
                self._amp.scaler.step(optimizer)
            self._amp.scaler.update()
            for optimizer in by_optimizer:
                optimizer.zero_grad(set_to_none=True)
        if not self._warming:
            self._count(next(iter(by_optimizer)).param_groups[0]["lr"])

    def stepped(self, loss: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Instead of `step`: the workload has called `loss.backward()` and its optimizer itself.

        `optimizer`: whose learning rate is recorded. Loss scaling is then its own affair. Raises `WorkloadError` with
        accumulation, which needs `step`.
        """
        if self.config.loader.accumulation > 1:
            raise self._mistake("loader.accumulation needs trial.step(loss, optimizer) instead of trial.stepped(loss)")
        self._mark_updated("stepped")
        self._loss = loss.detach()
        if not self._warming:
            self._count(optimizer.param_groups[0]["lr"] if optimizer is not None else float("nan"))

    def randn_like(self, mine: Tensor) -> Tensor:
        """Standard normal numbers of the shape of this rank's part of a batch, drawn for the whole batch from `rng`, so
        that the number of ranks does not change them."""
        whole = (self.place.total, *mine.shape[1:])
        return torch.randn(whole, generator=self.rng, device=mine.device)[self.place.mine]

    # ------------------------------------------------------------------------------------------------------ the loop
    def batches(
        self, source: loader.Source, prepare: loader.Prepare | None = None, *,
        collate: Callable[[list[Any]], Any] | None = None, samples_each: int = 1,
    ) -> Iterator[Any]:  # fmt: skip
        """Batches of `source` on the device until the budget is spent, as the section `loader` says.

        `source`: a tensor, a tuple or dictionary of tensors, a list of items, or any dataset, iterable ones too.
        The items of an iterable are dealt out to ranks and loader processes by their place, and begin anew at a resume.
        `collate` makes a batch of items, as DataLoader has it; `prepare(batch, uniform)` makes of a batch on the device
        what the loop gets, with random numbers that no way of dividing the batch changes. `samples_each`: what one item
        counts as in `UNIT`, such as the tokens of a sequence.
        """
        section, world = self.config.loader, self.replicas
        self._counts = section.batch_size * samples_each
        if (length := loader.length(source)) == 0:
            raise self._mistake("trial.batches: the data set is empty")
        order = loader.Order(
            length or 1, section.batch_size, section.accumulation, world.rank, world.size, self.config.seed
        )
        return self._loop(lambda start: loader.build(source, section, order, self.device, start, prepare, collate))

    def steps(self, batches: Iterable[Any], *, samples: int | None = None) -> Iterator[Any]:
        """A loader of one's own, run through again and again until the budget is spent; begun anew at a resume.

        `samples` of one of its batches, counted in `UNIT`; None: as many as the first tensor of the first batch has
        rows. The knobs of `loader` have no effect but where the loader is made of them.
        """

        def build(start: int) -> Endless:
            feed = Endless(batches, self.device)
            each = samples if samples is not None else feed.samples
            self._counts = int(self.world.agree(each)) * self.replicas.size * self.config.loader.accumulation
            return feed

        self._own_loader = True
        return self._loop(build)


def run(trial: Trial) -> Outcome:
    """Train it, as its workload says. All ranks call it; raises what the training raises, and `NotFiniteError` when the
    loss is NaN or infinite, on all ranks at the same step."""
    try:
        of(trial.config).code.train(trial)
    finally:
        trial.close()
    return trial.outcome()
