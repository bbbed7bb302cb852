"""How the processes of a training share its work. To add one: a class with the members of `Strategy`."""

from __future__ import annotations

import contextlib
from typing import Protocol

from torch import nn

from tunediff.config.systems import Systems
from tunediff.distributed import World


class Strategy(Protocol):
    """One object per training."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as the training calls it, on its device; the optimizer is made after this."""
        ...

    def unsynchronized(self) -> contextlib.AbstractContextManager[object]:
        """The context of all but the last pass of an accumulation: gradients need not be averaged yet."""
        ...


class Single:
    """One process."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def unsynchronized(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


class DataParallel:
    """Every process has the model and a part of each batch; DistributedDataParallel averages the gradients."""

    def __init__(self, config: Systems, world: World) -> None:
        self._options, self._world = config.parallel, world
        self._wrapped: nn.parallel.DistributedDataParallel | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        self._wrapped = nn.parallel.DistributedDataParallel(
            model,
            device_ids=[self._world.device.index] if self._world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # they are constants, or their mean would not be what one process has
            bucket_cap_mb=self._options.bucket_mib,
            static_graph=self._options.static_graph,
        )
        return self._wrapped

    def unsynchronized(self) -> contextlib.AbstractContextManager[object]:
        return self._wrapped.no_sync() if self._wrapped is not None else contextlib.nullcontext()


def build(config: Systems, world: World) -> Strategy:
    """The strategy that the configuration asks for."""
    return DataParallel(config, world) if world.size > 1 else Single()
