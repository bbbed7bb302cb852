"""The steps that a user's loop makes by itself: which losses it has, and which optimizer changed the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class OwnStep:
    """What `loss.backward()` and `optimizer.step()` were called with since `begin`, while it watches."""

    loss: Tensor | None = None
    """Sum of the losses, before loss scaling."""
    optimizer: torch.optim.Optimizer | None = None

    def __init__(self, detach: Callable[[Tensor], Tensor]) -> None:
        """`detach`: see `Compilation.detach`."""
        self._detach = detach
        self._watching = contextlib.ExitStack()
        self._unscaled = dict[int, tuple[Tensor, Tensor]]()

    def begin(self) -> None:
        """Forget what was seen: the next step begins."""
        self.loss = self.optimizer = None
        self._unscaled.clear()

    def watch(self) -> None:
        """See every call from now on, until `close`."""
        self._watching.enter_context(self._watched())

    def close(self) -> None:
        """Leave torch as it was."""
        self._watching.close()

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
