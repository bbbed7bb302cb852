"""Optimizers and their schedule, for workloads that take theirs from the section `optimizer`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tunediff.training import knobs


def build(
    section: knobs.Optimizer,
    batch_size: int,
    network: nn.Module,
    undecayed: list[nn.Parameter] | None = None,
) -> torch.optim.Optimizer:
    """Return a network's optimizer, and of more parameters without decay; after `prepare`."""
    groups: list[dict[str, Any]] = [{"params": list(network.parameters())}]
    if isinstance(section, knobs.Muon):
        groups = groups_of(network)
    if undecayed:
        groups.append({"params": undecayed, "weight_decay": 0.0})
    options: dict[str, Any] = {
        "lr": peak_learning_rate(section, batch_size),
        "weight_decay": section.weight_decay,
        "foreach": section.implementation == "foreach",
        "fused": section.implementation == "fused",
    }
    if isinstance(section, knobs.Sgd):
        return _sgd(section, network, groups, options)
    options["betas"] = (0.9, section.beta2)
    if isinstance(section, knobs.Muon):
        return MuonAdamW(groups, section.momentum, **options)
    return (torch.optim.Adam if isinstance(section, knobs.Adam) else torch.optim.AdamW)(
        groups, **options
    )


def _sgd(
    section: knobs.Sgd, network: nn.Module, groups: list[dict[str, Any]], options: dict[str, Any]
) -> torch.optim.SGD:
    # torch 2.15 has no fused SGD for divided parameters
    if any(hasattr(parameter, "to_local") for parameter in network.parameters()):
        options["fused"] = False
    sgd = torch.optim.SGD(groups, momentum=section.momentum, nesterov=section.nesterov, **options)
    if options["fused"] and section.momentum:
        # which torch 2.15 leaves unfilled where loss scaling skips a step
        for parameter in (one for group in sgd.param_groups for one in group["params"]):
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd


def peak_learning_rate(section: knobs.Optimizer, batch_size: int) -> float:
    """Return the learning rate after warm-up: scaled by batch/128, by its root, or not."""
    ratio = batch_size / 128
    return section.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[section.lr_scaling]


def learning_rate(section: knobs.Optimizer, batch_size: int, progress: float) -> float:
    """Return the learning rate at a budget's fraction, 0 to 1: warm-up, then the schedule."""
    warmup, peak = section.warmup, peak_learning_rate(section, batch_size)
    rising = progress < warmup
    part = (
        progress / warmup if rising else (progress - warmup) / (1 - warmup) if warmup < 1 else 0.0
    )
    if section.decay == "one_cycle":
        low, high = (1 / 25, 1.0) if rising else (1.0, 1 / 250_000)
        return peak * (high + (low - high) * _cosine(part))
    if rising:
        return peak * part
    return peak * {"constant": 1.0, "linear": 1 - part, "cosine": _cosine(part)}[section.decay]


def _cosine(part: float) -> float:
    """Return half a cosine that falls from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * part))


def set_learning_rate(
    optimizer: torch.optim.Optimizer, section: knobs.Optimizer, batch_size: int, progress: float
) -> None:
    """Set the learning rate of the next step."""
    rate = learning_rate(section, batch_size, progress)
    for group in optimizer.param_groups:
        group["lr"] = rate


# ---- Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for matrices, convolutions
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial of degree 5 that is applied to the singular values."""
ITERATIONS = 5
SHORTEST_SIDE, MOST_ELONGATED = 4, 128.0
"""AdamW updates matrices with a smaller side, or a larger ratio of sides (as in timm)."""


class MuonAdamW(torch.optim.AdamW):
    """Muon for the parameters whose group has `matrices` > 0, AdamW for the others.

    `matrices`: the matrices stacked in each parameter of the group: 3 for a fused query, key and
    value. A convolution [out, in, h, w] is a matrix [out, in·h·w]. A step has a root mean square of
    about 0.2 · lr whatever the shape (arXiv 2502.16982), near that of AdamW.
    """

    def __init__(
        self, groups: list[dict[str, Any]], momentum: float = 0.95, **options: Any
    ) -> None:
        """`options`: `torch.optim.AdamW`'s; `lr` and `weight_decay` hold for matrices too."""
        super().__init__(
            [{"matrices": 0, "momentum": momentum, **group} for group in groups], **options
        )
        # With the fused AdamW, GradScaler would leave steps of infinite gradients to it.
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = torch.enable_grad()(closure)() if closure is not None else None
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group["matrices"]]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group["matrices"]:
                self._step_matrices(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Update a group's parameters: momentum, orthogonalization, weight decay, step."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        for parameter in parameters:
            if not (state := self.state[parameter]):
                state["step"] = torch.zeros(())  # AdamW expects one wherever it restores a state
                state["momentum"] = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters]
        momenta = [self.state[parameter]["momentum"] for parameter in parameters]

        # ---- Nesterov's momentum
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, momenta, group["momentum"])

        # ---- all matrices of one shape at once: many small products are slow one by one
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        for shape, members in _by_shape(updates, group["matrices"]).items():
            # reshape, not view: gradients in channels_last are no contiguous matrices
            stacked = torch.cat(
                [updates[index].reshape(group["matrices"], *shape) for index in members]
            )
            length = 0.2 * math.sqrt(max(shape))
            steps = torch.split(orthogonalized(stacked), group["matrices"])
            targets = [parameters[index] for index in members]
            shaped = [
                step.reshape(target.shape) for step, target in zip(steps, targets, strict=True)
            ]
            if isinstance(group["lr"], Tensor):  # of a captured step, which reads it on the device
                torch._foreach_mul_(shaped, -group["lr"] * length)
                torch._foreach_add_(targets, shaped)
            else:
                torch._foreach_add_(targets, shaped, alpha=-group["lr"] * length)


def _by_shape(
    updates: tuple[Tensor, ...] | list[Tensor], count: int
) -> dict[tuple[int, int], list[int]]:
    """Return positions of the updates by the shape of their matrices, of which each has `count`."""
    positions: dict[tuple[int, int], list[int]] = {}
    for index, update in enumerate(updates):
        rows = len(update) // count
        positions.setdefault((rows, update.numel() // len(update)), []).append(index)
    return positions


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return [n, A, B] with all singular values of each matrix between about 0.7 and 1.2, float32.

    Newton–Schulz iteration X ← aX + (bXXᵀ + c(XXᵀ)²)X; in bfloat16 on a GPU, in float32 elsewhere.
    """
    x = matrices.to(torch.bfloat16 if matrices.device.type == "cuda" else torch.float32)
    if tall := x.shape[-2] > x.shape[-1]:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()


def groups_of(network: nn.Module) -> list[dict[str, Any]]:
    """Return a network's groups for `MuonAdamW`: by matrices in each parameter, 0: AdamW.

    To AdamW: fewer than two dimensions, size 1 in one of the first two, a side below
    `SHORTEST_SIDE`, sides of a ratio above `MOST_ELONGATED`, embeddings, biases of any shape, the
    first convolution, and the last layer in the order of construction.
    """
    ends = _ends(network)
    count_of = {
        name: 0 if id(parameter) in ends else matrix_count(name, parameter)
        for name, parameter in network.named_parameters()
    }
    parameters = dict(network.named_parameters())
    by_count = itertools.groupby(
        sorted(parameters, key=lambda name: count_of[name]), key=lambda name: count_of[name]
    )
    return [
        {"params": [parameters[name] for name in names], "matrices": count}
        for count, names in by_count
    ]


def _ends(network: nn.Module) -> set[int]:
    """Return the identities of weights that read the input or write the output."""
    layers = [
        module
        for module in network.modules()
        if getattr(getattr(module, "weight", None), "ndim", 0) >= 2
    ]
    convolutions = [
        layer for layer in layers if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
    embeddings = [layer for layer in layers if isinstance(layer, nn.Embedding)]
    return {id(layer.weight) for layer in [*convolutions[:1], *embeddings, *layers[-1:]]}


def matrix_count(name: str, parameter: Tensor) -> int:
    """Return the number of matrices in a parameter that Muon updates; 0: AdamW does."""
    if parameter.ndim < 2 or 1 in parameter.shape[:2]:
        return 0
    # Tables of biases and positions are parameters, not the `weight` of a layer (Swin).
    if any(word in name.rpartition(".")[2] for word in ("bias", "pos", "embed")):
        return 0
    rows, columns = len(parameter), parameter.numel() // len(parameter)
    fused = rows == 3 * columns and name.endswith(("qkv.weight", "in_proj_weight"))
    sides = sorted((rows // 3 if fused else rows, columns))
    if sides[0] < SHORTEST_SIDE or sides[1] > MOST_ELONGATED * sides[0]:
        return 0
    return 3 if fused else 1
