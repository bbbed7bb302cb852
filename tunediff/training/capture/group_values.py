"""The numbers of optimizers: on the device while the loop's body runs, on the host in between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tunediff.training.state import State


class GroupValues:
    """Learning rates as scalars on the device, which a captured step reads anew.

    Outside the loop's body a group has its number as ever, so that schedules, checkpoints and
    whatever else reads or sets it know nothing of this.
    """

    def __init__(self, state: State, device: torch.device) -> None:
        self._state, self._device = state, device
        self._rates = dict[tuple[Optimizer, int], tuple[Tensor, float]]()
        """By optimizer and group index: the scalar, and the number outside of the graph."""
        self._inside = False
        self.set_inside = False
        """Whether the loop's body has set a learning rate, which a replay would not."""
        self.factor = 1.0
        """Of all learning rates, to tell steps apart."""

    def prepare(self) -> None:
        """Take in all optimizers that are kept, once each has made a step."""
        cuda = self._device.type == "cuda"
        for optimizer in self._optimizers():
            for index, group in enumerate(optimizer.param_groups):
                movable = group.get("fused") or (cuda and isinstance(optimizer, Adam | AdamW))
                known = (optimizer, index) in self._rates
                if movable and not known and isinstance(group["lr"], int | float):
                    scalar = torch.zeros((), device=self._device)
                    self._rates[optimizer, index] = scalar, group["lr"]
            for state in optimizer.state.values():
                if cuda and isinstance(step := state.get("step"), Tensor):
                    state["step"] = step.to(self._device)

    def _optimizers(self) -> list[Optimizer]:
        return [one for one in self._state.stateful.values() if isinstance(one, Optimizer)]

    # ---- inside the loop's body
    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Give the groups their scalars inside."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Give the groups their numbers inside, for what sets them."""
        was_inside = self._inside
        if was_inside:
            self._leave()
        try:
            yield
        finally:
            if was_inside:
                self._enter()

    def _enter(self) -> None:
        self.fill()
        self._inside = True
        for (optimizer, index), (scalar, _) in self._rates.items():
            optimizer.param_groups[index]["lr"] = scalar
        self._set_capturable(True)

    def _leave(self) -> None:
        self._inside = False
        for (optimizer, index), (scalar, number) in self._rates.items():
            group = optimizer.param_groups[index]
            self.set_inside |= group["lr"] is not scalar
            group["lr"] = number if group["lr"] is scalar else group["lr"]
        self._set_capturable(False)

    def _set_capturable(self, value: bool) -> None:
        """Tell optimizers of a GPU, which refuse otherwise, that their steps are captured."""
        if self._device.type == "cuda":
            for optimizer in self._optimizers():
                if "capturable" in optimizer.defaults and not optimizer.defaults["capturable"]:
                    for group in optimizer.param_groups:
                        group["capturable"] = value

    def fill(self) -> None:
        """Write the numbers that the groups have now to the device."""
        for (optimizer, index), (scalar, _) in self._rates.items():
            number = optimizer.param_groups[index]["lr"]
            self._rates[optimizer, index] = scalar, number
            # At the start of a warm-up it is 0, and all steps would be alike
            scalar.fill_(number if self.factor == 1.0 else self.factor * (number or 1e-3))

    def number(self, optimizer: Optimizer) -> float:
        """Return the learning rate of an optimizer's first group, as the host knows it."""
        known = self._rates.get((optimizer, 0)) if self._inside else None
        return float(known[1] if known is not None else optimizer.param_groups[0]["lr"])

    def constants(self) -> dict[str, Any]:
        """Return the numbers of all groups that a captured step fixes, by name in messages."""
        found: dict[str, Any] = {}
        for optimizer in self._optimizers():
            for index, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    on_device = name == "lr" and (optimizer, index) in self._rates
                    if isinstance(value, int | float | tuple) and not on_device:
                        found[f"{name} of {type(optimizer).__name__} (group {index})"] = value
        return found

    def release(self) -> None:
        """Restore the optimizers: those that read their step on the host find it there."""
        for optimizer in self._optimizers():
            groups = optimizer.param_groups
            if not any(group.get("fused") or group.get("capturable") for group in groups):
                for state in optimizer.state.values():
                    if isinstance(step := state.get("step"), Tensor):
                        state["step"] = step.cpu()

    # ---- what is kept
    def put(self, content: Mapping[str, Any]) -> None:
        """Put back what was learned, and leave the tensors of optimizers where they lie.

        Loading a state gives an optimizer tensors of its own; a captured step uses those before.
        """
        before = [(one, {p: dict(s) for p, s in one.state.items()}) for one in self._optimizers()]
        self._state.put(content)
        for optimizer, states in before:
            for parameter, state in optimizer.state.items():
                for name, new in state.items():
                    old = states.get(parameter, {}).get(name)
                    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
                        continue
                    if old.shape == new.shape and old.dtype == new.dtype:
                        state[name] = old.copy_(new)

    def addresses(self) -> list[int]:
        """Return where everything lies that a captured step changes, as far as it is known."""
        tensors = []
        for stateful in self._state.stateful.values():
            if isinstance(stateful, torch.nn.Module):
                tensors += [*stateful.parameters(), *stateful.buffers()]
        for optimizer in self._optimizers():
            for state in optimizer.state.values():
                tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return [tensor.data_ptr() for tensor in tensors]


@contextlib.contextmanager
def deferred_schedules(defer: Callable[[Callable[[], object]], bool]) -> Iterator[None]:
    """Hand every learning-rate schedule's `step()` to `defer`, which returns whether it takes it.

    A schedule is a count in Python: a replay would leave it where it is.
    """
    kinds = [LRScheduler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    steps = {kind: kind.__dict__["step"] for kind in kinds if "step" in kind.__dict__}

    def deferring(step: Callable[..., object]) -> Callable[..., object]:
        def deferred(scheduler: Any, *args: Any, **options: Any) -> object:
            plain = not args and not options
            if plain and defer(lambda: step(scheduler)):
                return None
            return step(scheduler, *args, **options)

        return deferred

    for kind, step in steps.items():
        kind.step = deferring(step)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for kind, step in steps.items():
            kind.step = step  # type: ignore[method-assign]
