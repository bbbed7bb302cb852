"""Steps that a user's loop makes itself: losses, optimizer, and the parts' times."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tunediff.training.phases import Phases


class OwnStep:
    """The arguments of `loss.backward()` and `optimizer.step()` since `begin`.

    It counts their time as the phases `backward` and `optimizer` of a step. Nothing is counted
    outside the step's `forward`, as in an evaluation or a user's phase.
    """

    loss: Tensor | None = None
    """Sum of the losses, before loss scaling."""
    optimizer: torch.optim.Optimizer | None = None

    def __init__(self, detach: Callable[[Tensor], Tensor], phases: Phases) -> None:
        """`detach`: see `Compilation.detach`."""
        self._detach, self._phases = detach, phases
        self._watches, self._watching = False, contextlib.ExitStack()
        self._unscaled = dict[int, tuple[Tensor, Tensor]]()
        self._stepping = list[tuple[torch.optim.Optimizer, bool]]()
        """Optimizers in `step`, innermost last, and whether that began the phase `optimizer`."""

    def begin(self) -> None:
        """Forget what was seen: the next step begins."""
        self.loss = self.optimizer = None
        self._unscaled.clear()
        self._stepping.clear()  # torch calls no hook after a `step` that raised an error

    def watch(self, *, losses: bool) -> None:
        """See all calls until `close`. `losses`: note losses and optimizer, not only time."""
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

    def _in_forward(self) -> bool:
        """Return whether a call of the loop counts as a phase of its own, instead of `forward`."""
        if self._phases.now != "forward":
            return False
        # While the loop captures a CUDA graph of its own, the event of a phase becomes part of that
        # graph and cannot be read
        return self._phases.in_capture or not (
            self._phases.of_device and torch.cuda.is_current_stream_capturing()
        )

    @contextlib.contextmanager
    def _timed_backward(self) -> Iterator[None]:
        backward, phases = Tensor.backward, self._phases

        def timed_backward(tensor: Tensor, *args: Any, **options: Any) -> None:
            with phases("backward") if self._in_forward() else contextlib.nullcontext():
                backward(tensor, *args, **options)  # type: ignore[no-untyped-call]

        Tensor.backward = timed_backward  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Tensor.backward = backward  # type: ignore[method-assign]

    @contextlib.contextmanager
    def _timed_optimizers(self) -> Iterator[None]:
        phases, stepping = self._phases, self._stepping

        def begin(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> Any:
            begins = self._in_forward()
            stepping.append((optimizer, begins))
            if not begins:
                return None
            phases.switch("optimizer")
            if len(args) > 1:
                return (args[0], _in_phase(args[1], phases), *args[2:]), options
            if "closure" in options:
                return args, {**options, "closure": _in_phase(options["closure"], phases)}
            return None

        def end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            while stepping:
                innermost, began = stepping.pop()
                # those within it that are still listed raised an error, which it caught
                if innermost is optimizer:
                    if began:
                        phases.switch("forward")
                    return

        hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        backward, scale = Tensor.backward, torch.amp.GradScaler.scale
        # by the id of a scaled loss, which is held: no other tensor gets its id
        unscaled = self._unscaled

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


def _in_phase(closure: Any, phases: Phases) -> Any:
    """Count a closure, which computes the loss inside the optimizer's step, as the forward pass.

    Other arguments of a `step`, such as a model or a function, are returned as they are.
    """
    if not (inspect.isroutine(closure) or isinstance(closure, functools.partial)):
        return closure
    try:
        parameters = inspect.signature(closure).parameters.values()
    except ValueError:  # functions in C have none
        return closure
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    if any(
        parameter.default is parameter.empty and parameter.kind not in variadic
        for parameter in parameters
    ):
        return closure

    @functools.wraps(closure)
    def counted(*args: Any, **options: Any) -> Any:
        with phases("forward"):
            return closure(*args, **options)

    return counted
