"""One optimizer step: backward passes and updates, in all the ways that workloads ask."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tunediff.config.code import WorkloadError
from tunediff.config.systems import Systems
from tunediff.distributed import World
from tunediff.training.compilation import Compilation
from tunediff.training.meter import Phases
from tunediff.training.precision import Amp
from tunediff.training.read_tracking import Reads
from tunediff.training.strategies import Single

LossOf = Callable[..., Tensor]
"""Gives the loss of each item [b], float32, from the model's output and the targets."""


class StepParts(Protocol):
    """What a step uses of the engine."""

    config: Systems
    world: World
    device: torch.device
    model: nn.Module | None
    strategy: Single
    amp: Amp
    phases: Phases
    compilation: Compilation
    capture: Any
    read_knobs: Reads
    warming_up: bool

    def mistake(self, message: str) -> WorkloadError: ...
    def autocast(self) -> contextlib.AbstractContextManager[object]: ...


class OptimizerStep:
    """Backward passes and updates between two optimizer steps, under loss scaling and
    accumulation. The methods with the names of `Trial`'s are described there."""

    def __init__(self, engine: StepParts) -> None:
        self.engine = engine
        self.accumulation = engine.config.loader.accumulation
        self.pass_index = 0
        self.loss: Tensor | None = None
        """Of this step so far, a scalar on the device."""
        self.learning_rate = math.nan
        self.updated = False
        self.stepped = False
        """Whether the workload has called `step` for this batch."""
        self._listed: tuple[nn.Module, list[nn.Parameter]] | None = None

    def begin(self) -> None:
        """Begin the next optimizer step."""
        self.loss, self.updated = None, False

    @property
    def sync_gradients(self) -> bool:
        """Return whether this batch is the last of its step."""
        return self.pass_index == self.accumulation - 1

    # ---- backward passes
    def backward(self, loss: Tensor) -> None:
        engine = self.engine
        if engine.strategy.owns_passes:
            raise engine.mistake(
                "parallel.strategy = pipeline needs trial.forward_backward(…) in place of"
                " trial.step"
            )
        engine.phases.switch("backward")
        share = loss / self.accumulation if self.accumulation > 1 else loss
        engine.amp.scaler.scale(share).backward()  # type: ignore[no-untyped-call]
        self._add_loss(engine.compilation.detach(share))
        engine.phases.switch(None)

    def backward_beside(self, loss: Tensor) -> None:
        self.engine.amp.scaler.scale(loss / self.accumulation).backward()  # type: ignore[no-untyped-call]

    def forward_backward(
        self,
        inputs: tuple[Tensor, ...],
        targets: tuple[Tensor, ...],
        loss_of: LossOf,
        weights: Tensor | None,
    ) -> Tensor:
        engine = self.engine
        assert engine.model is not None, "trial.prepare(model) comes first"
        if not engine.strategy.owns_passes:
            with engine.autocast():
                output = engine.model(*inputs)
            item_losses = loss_of(output, *targets)
            self.backward((item_losses if weights is None else weights * item_losses).mean())
            return item_losses.detach()
        count = len(inputs[0])
        factors = torch.ones(count, device=engine.device) if weights is None else weights
        factors = factors / (count * self.accumulation)
        item_losses = engine.strategy.passes(inputs, targets, loss_of, factors, engine.autocast)
        self._add_loss((factors * item_losses).sum())
        engine.phases.switch(None)
        return item_losses

    def _add_loss(self, share: Tensor) -> None:
        self.engine.read_knobs.add("loader.accumulation")
        self.loss = share if self.loss is None else self.loss + share

    # ---- updates
    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = type(loss).__name__
            if isinstance(loss, Tensor):
                kind = f"a tensor of shape {list(loss.shape)}"
            raise self.engine.mistake(
                f"trial.step takes a loss of one number, not {kind}; loss.mean()?"
            )
        self._refuse_second("step", self.stepped)
        self.stepped = True
        self.backward(loss)
        if self.sync_gradients:
            self.update(optimizer, clip_norm)

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        beside: Iterable[nn.Parameter] = (),
    ) -> None:
        self._mark_updated("update")
        engine = self.engine
        with engine.phases("optimizer"):
            engine.world.average_gradients(beside)
            scaler = engine.amp.scaler
            scaler.unscale_(optimizer)
            if clip_norm is not None and engine.model is not None:
                engine.strategy.clip(self._parameters(engine.model), clip_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        self._finish(optimizer)

    def _parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the model's parameters, listed once: walking its modules costs host time."""
        if self._listed is None or self._listed[0] is not model:
            self._listed = model, list(model.parameters())
        return self._listed[1]

    def record(self, loss: Tensor, optimizer: torch.optim.Optimizer | None) -> None:
        """Count a step that the workload has made by itself; see `Trial.record_step`."""
        if self.accumulation > 1:
            raise self.engine.mistake(
                "loader.accumulation needs trial.step(loss, optimizer) instead of"
                " trial.record_step(loss)"
            )
        self._mark_updated("record_step")
        self.loss = self.engine.compilation.detach(loss)
        self._finish(optimizer)

    def _finish(self, optimizer: torch.optim.Optimizer | None) -> None:
        learning_rate = math.nan
        if optimizer is not None:
            learning_rate = self.engine.capture.learning_rate(optimizer)
        if self.engine.warming_up:
            return
        if self.loss is None:
            raise self.engine.mistake("trial.update without trial.backward(loss)")
        self.learning_rate = learning_rate
        self.engine.capture.count()

    def _mark_updated(self, call: str) -> None:
        self._refuse_second(call, self.updated)
        self.updated = True

    def _refuse_second(self, call: str, done: bool) -> None:
        if done:
            raise self.engine.mistake(
                f"trial.{call} was called twice for one batch; a loop of several optimizers makes"
                " its own updates and calls trial.record_step(loss) after them"
            )
