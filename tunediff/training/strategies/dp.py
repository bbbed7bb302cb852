"""One process trains on several GPUs: torch.nn.DataParallel. The slow one, here to be compared
with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tunediff.config.knobs import refuse
from tunediff.config.systems import Systems
from tunediff.distributed import World
from tunediff.training.strategies.single import Context, Single


class Dp(Single):
    """Each step copies the model to every GPU and its part of the batch with it, and collects
    outputs and gradients.

    Batch statistics are those of the first GPU's part.
    """

    def __init__(self, config: Systems, world: World) -> None:
        super().__init__(config, world)
        self.devices = config.parallel.workers

    def wrap(self, model: nn.Module, blocks: type[nn.Module] | None = None) -> nn.Module:
        return Copies(model, gpus(self._world.device, self.devices))


def gpus(device: torch.device, count: int) -> list[int]:
    """Indices of `count` GPUs, `device` the first. Raises `ConfigError` where this process has not
    so many."""
    first = device.index or 0
    here = torch.cuda.device_count() - first if device.type == "cuda" else 0
    why = (
        f"parallel.workers = {count} needs as many GPUs, and this process has {here}; allowed: ddp,"
        " fsdp, pipeline"
    )
    refuse(
        here < count, f"parallel.strategy: dp is not allowed: {why}"
    )  # torch would pass it through without a word
    return list(range(first, first + count))


class Copies(nn.DataParallel[nn.Module]):
    """DataParallel whose copies run in the number format of the caller, and draw random numbers of
    their own."""

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        kind = self.src_device_obj.type
        # torch hands on to its threads that there is autocast, and not of which type: bf16 would
        # become float16.
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        cast = functools.partial(torch.autocast, kind, dtype, enabled=enabled)
        if self.training:
            for device in self.device_ids[
                1:
            ]:  # from the seed of all generators: a checkpoint keeps the CPU's
                _seed(device, int(torch.randint(2**31, ())))
        runs: Any = [functools.partial(_within, cast, one) for one in replicas]
        return super().parallel_apply(runs, inputs, kwargs)


def _within(context: Context, run: nn.Module, *inputs: Any, **named: Any) -> Any:
    with context():
        return run(*inputs, **named)


def _seed(device: int, seed: int) -> None:
    torch.cuda.default_generators[device].manual_seed(seed)
