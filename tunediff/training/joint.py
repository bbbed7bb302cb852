"""Clipping, AdamW and the averaged weights as one function for torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tunediff.training import compilation

BETA1, EPS = 0.9, 1e-8


class Joint(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) whose step waits for the average that follows it, if one does.

    Then `step` notes that one is due, and `finish` takes it: the norm of the gradients, then clipping, step and average
    in one pass over gradients, moments, weights and averages, where one after the other reads and writes some of them
    again. The first group holds the network, whose gradients alone are clipped.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, beta2: float, weight_decay: float, clip_norm: float,
        compiler: Callable[..., Any] = torch.compile,
    ) -> None:  # fmt: skip
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "steps": 0})
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            self.state[weight] = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        self._beta2, self._clip_norm, self._due = beta2, clip_norm, False
        self.waits = False
        """Whether an average of the weights follows each step."""
        self._update = compilation.apart(compiler(_update, dynamic=False))

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Gradients are complete, and finite where the loss is scaled."""
        self._due = True
        if not self.waits:
            self.finish([], 0.0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing while a step waits for them."""
        if not self._due:
            super().zero_grad(set_to_none)

    @torch.no_grad()
    def finish(self, averaged: Sequence[Tensor], share: float) -> bool:
        """Take the step that is due, then a ← a + `share`·(w − a) for the weights of the first group.

        False where none is due: loss scaling has found gradients that are not finite.
        """
        if not self._due:
            return False
        for number, group in enumerate(self.param_groups):
            weights, group["steps"] = group["params"], group["steps"] + 1
            numbers = torch.tensor([
                group["lr"] / (1 - BETA1 ** group["steps"]), (1 - self._beta2 ** group["steps"]) ** -0.5,
                1 - group["lr"] * group["weight_decay"], share,
            ])  # fmt: skip
            self._update(
                weights, [weight.grad for weight in weights], [self.state[weight]["exp_avg"] for weight in weights],
                [self.state[weight]["exp_avg_sq"] for weight in weights], [] if number else list(averaged),
                numbers.to(weights[0].device, non_blocking=True), self._beta2, None if number else self._clip_norm,
            )  # fmt: skip
        self._due = False
        super().zero_grad()
        return True


def _update(
    weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor], averaged: list[Tensor],
    numbers: Tensor, beta2: float, clip_norm: float | None,
) -> None:  # fmt: skip
    """In place. `numbers` [4]: rate of the step without first bias, 1/√ of the second bias, 1 − decay, `share`; a
    tensor, since a function is compiled anew for every other float."""
    rate, root, kept, share = numbers.unbind()
    if clip_norm is not None:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        gradients = torch._foreach_mul(gradients, (clip_norm / (norm + 1e-6)).clamp(max=1.0))  # type: ignore[assignment]
    torch._foreach_lerp_(first, gradients, 1 - BETA1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
    below = torch._foreach_add(torch._foreach_mul(torch._foreach_sqrt(second), root), EPS)
    torch._foreach_mul_(weights, kept)
    torch._foreach_sub_(weights, torch._foreach_mul(torch._foreach_div(first, below), rate))
    if averaged:
        torch._foreach_add_(averaged, torch._foreach_mul(torch._foreach_sub(weights, averaged), share))
