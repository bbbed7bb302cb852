"""A step of several optimizers, each with its loss, as in adversarial trainings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Losses = Mapping[torch.optim.Optimizer, Tensor]


def of_step(loss: Any, optimizer: Any) -> Losses:
    """Return `trial.step`'s argument as losses by optimizer. Raises ValueError."""
    if isinstance(loss, Mapping):
        if optimizer is not None:
            raise ValueError(
                "trial.step({optimizer: loss, …}) has the optimizers as its keys; it takes no other"
            )
        if not loss:
            raise ValueError("trial.step got no loss; allowed: {optimizer: loss, …}")
    elif optimizer is None:
        raise ValueError("trial.step(loss, optimizer) needs the optimizer")
    losses: Mapping[Any, Any] = loss if isinstance(loss, Mapping) else {optimizer: loss}
    for value in losses.values():
        if not isinstance(value, Tensor) or value.numel() != 1:
            kind = type(value).__name__
            if isinstance(value, Tensor):
                kind = f"a tensor of shape {list(value.shape)}"
            raise ValueError(f"trial.step takes a loss of one number, not {kind}; loss.mean()?")
    if len(losses) > 1 or isinstance(loss, Mapping):
        for key in losses:
            if not hasattr(key, "param_groups"):
                raise ValueError(
                    f"trial.step({{…: loss}}) takes optimizers as keys, not {type(key).__name__}"
                )
        ids = [id(parameter) for optimizer in losses for parameter in parameters(optimizer)]
        if len(set(ids)) < len(ids):
            raise ValueError("trial.step: two of its optimizers have a parameter in common")
    return losses


def parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer changes."""
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]


def backward(losses: Losses, scaled: Callable[[Tensor], Tensor]) -> None:
    """Add to the gradients of each optimizer's parameters those of its own loss alone.

    `scaled` makes of a loss what is differentiated. The losses may share a graph. Raises ValueError
    for a loss that reaches no parameter of its optimizer.
    """
    for number, (optimizer, loss) in enumerate(losses.items(), 1):
        optimized = parameters(optimizer)
        # With `inputs=own`, DistributedDataParallel's hooks would average at the first loss.
        gradients = torch.autograd.grad(
            scaled(loss), optimized, retain_graph=number < len(losses), allow_unused=True
        )
        if all(gradient is None for gradient in gradients):
            raise ValueError("trial.step: a loss reaches no parameter of its optimizer")
        for parameter, gradient in zip(optimized, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                # A copy: one tensor may be the gradient of several parameters.
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
            else:
                parameter.grad += gradient
