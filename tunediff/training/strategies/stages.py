"""The stages of a pipeline: a model's links, where they are cut, and the module of one stage."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tunediff.config.knobs import refuse
from tunediff.training.strategies.single import Context


class Stage(nn.Module):
    """Some links, one after the other; takes and gives what is carried."""

    def __init__(self, links: Sequence[nn.Module], autocast: Context) -> None:
        super().__init__()
        self.links, self._autocast = nn.ModuleList(links), autocast

    def forward(self, *carried: Tensor) -> Tensor | tuple[Tensor, ...]:
        now: Any = carried
        with self._autocast():
            for link in self.links:
                now = link(*now)
                now = now if isinstance(now, tuple) else (now,)
        # What is only handed on is no result of this stage, and gets a gradient all the same.
        results = [
            one.view_as(one) if any(one is other for other in carried) else one.contiguous()
            for one in now
        ]
        return tuple(results) if len(results) > 1 else results[0]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def shape_of(tensor: Tensor) -> Tensor:
    needs_gradient = tensor.is_floating_point()
    return torch.empty(
        tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=needs_gradient
    )


def chain(model: nn.Module) -> list[nn.Module]:
    """Return a model's links: its `chain()`, or nn.Sequential's parts. Raises `ConfigError`."""
    links: list[nn.Module] = []
    if isinstance(model, nn.Sequential):
        links = list(model.children())
    elif (make := getattr(model, "chain", None)) is not None:
        links = list(make())
    refuse(
        not links,
        f"parallel.strategy: pipeline is not allowed: {type(model).__name__} is no nn.Sequential"
        " and has no chain(); allowed: ddp, fsdp, single",
    )
    return links


def cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Return the cuts at which the dearest stage costs least: 0, …, number of links."""

    @functools.cache
    def best(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return sum(costs[first:]), (len(costs),)
        options = []
        for end in range(first + 1, len(costs) - left + 2):
            rest, ends = best(end, left - 1)
            options.append((max(sum(costs[first:end]), rest), (end, *ends)))
        return min(options)

    return [0, *best(0, stages)[1]]
