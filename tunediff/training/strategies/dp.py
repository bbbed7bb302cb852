"""One process trains on several GPUs: torch.nn.DataParallel. Slow; to be compared with."""

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
    outputs and gradients. Batch statistics are those of the first GPU's part."""

    def __init__(self, config: Systems, world: World) -> None:
        super().__init__(config, world)
        self.devices = config.parallel.workers

    def wrap(self, model: nn.Module, blocks: type[nn.Module] | None = None) -> nn.Module:
        return Copies(model, gpus(self._world.device, self.devices))


def gpus(device: torch.device, count: int) -> list[int]:
    """Return the indices of `count` GPUs, `device` the first. Raises `ConfigError` where this
    process has fewer: torch would train on these without a word."""
    first = device.index or 0
    visible = torch.cuda.device_count() - first if device.type == "cuda" else 0
    refuse(
        visible < count,
        f"parallel.strategy: dp is not allowed: parallel.workers = {count} needs as many GPUs, and"
        f" this process has {visible}; allowed: ddp, fsdp, pipeline",
    )
    return list(range(first, first + count))


class Copies(nn.DataParallel[nn.Module]):
    """DataParallel whose copies have the caller's number format, and random numbers."""

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        # torch's threads learn that autocast is on, not its type: bf16 would become float16.
        kind = self.src_device_obj.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        autocast = functools.partial(torch.autocast, kind, dtype, enabled=enabled)
        if self.training:
            for device in self.device_ids[1:]:
                # From the CPU's generator, which a checkpoint keeps.
                _seed(device, int(torch.randint(2**31, ())))
        runs: Any = [functools.partial(_call_in, autocast, replica) for replica in replicas]
        return super().parallel_apply(runs, inputs, kwargs)


def _call_in(context: Context, replica: nn.Module, *inputs: Any, **named: Any) -> Any:
    with context():
        return replica(*inputs, **named)


def _seed(device: int, seed: int) -> None:
    torch.cuda.default_generators[device].manual_seed(seed)
