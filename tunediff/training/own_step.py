"""The steps that a user's loop makes by itself: their losses, their optimizer, and the time of their parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tunediff.training.phases import Phases


class OwnStep:
    """What `loss.backward()` and `optimizer.step()` were called with since `begin`, while it watches.

    It counts their time as the phases `backward` and `optimizer` of a step. Outside a step, as in an evaluation that
    trains a probe, nothing is counted.
    """

    loss: Tensor | None = None
    """Sum of the losses, before loss scaling."""
    optimizer: torch.optim.Optimizer | None = None

    def __init__(self, detach: Callable[[Tensor], Tensor], phases: Phases) -> None:
        """`detach`: see `Compilation.detach`."""
        self._detach, self._phases = detach, phases
        self._watches, self._watching = False, contextlib.ExitStack()
        self._unscaled = dict[int, tuple[Tensor, Tensor]]()

    def begin(self) -> None:
        """Forget what was seen: the next step begins."""
        self.loss = self.optimizer = None
        self._unscaled.clear()

    def watch(self, *, losses: bool) -> None:
        """See every call from now on, until `close`. `losses`: note losses and optimizer too, not only the time."""
        if self._watches:
            return
        self._watches = True
        self._watching.enter_context(self._timed_optimizers())
        self._watching.enter_context(self._timed_backward())
        if losses:
            self._watching.enter_context(self._watched())

    def close(self) -> None:
        """Leave torch as it was."""
        self._watching.close()

    @contextlib.contextmanager
    def _timed_backward(self) -> Iterator[None]:
        backward, phases = Tensor.backward, self._phases

        def timed_backward(tensor: Tensor, *args: Any, **options: Any) -> None:
            before = phases.switch("backward") if phases.now else None
            try:
                backward(tensor, *args, **options)  # type: ignore[no-untyped-call]
            finally:
                phases.switch(before)

        Tensor.backward = timed_backward  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Tensor.backward = backward  # type: ignore[method-assign]

    @contextlib.contextmanager
    def _timed_optimizers(self) -> Iterator[None]:
        phases = self._phases
        before = list[str | None]()  # phases that calls of `step` interrupt: one optimizer may call another

        def in_forward(argument: Any) -> Any:
            """Count a closure, which computes the loss inside the optimizer's step, as the forward pass."""

            def closure() -> Any:
                with phases("forward"):
                    return argument()

            return closure if callable(argument) else argument

        def begin(_: Any, args: Any, options: Any) -> Any:
            before.append(phases.switch("optimizer") if phases.now else None)
            if before[-1] is None or not any(map(callable, (*args[1:], *options.values()))):
                return None
            return (args[0], *map(in_forward, args[1:])), {name: in_forward(given) for name, given in options.items()}

        def end(*_: Any) -> None:
            phases.switch(before.pop())

        hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        backward, scale = Tensor.backward, torch.amp.GradScaler.scale
        unscaled = self._unscaled  # by the id of a scaled loss, which is held: no other tensor gets its id

        def note_backward(tensor: Tensor, *args: Any, **options: Any) -> None:
            loss = self._detach(unscaled.pop(id(tensor), (tensor, tensor))[1])
            self.loss = loss if self.loss is None else self.loss + loss
            backward(tensor, *args, **options)  # type: ignore[no-untyped-call]

        def note_scale(scaler: Any, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            several = isinstance(outputs, list | tuple)
            pairs = zip(scaled, outputs, strict=True) if several else [(scaled, outputs)]
            unscaled.update((id(pair[0]), pair) for pair in pairs)
            return scaled

        def note_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self.optimizer = optimizer

        hook = register_optimizer_step_post_hook(note_optimizer)
        Tensor.backward, torch.amp.GradScaler.scale = note_backward, note_scale  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Tensor.backward, torch.amp.GradScaler.scale = backward, scale  # type: ignore[method-assign]
            hook.remove()
