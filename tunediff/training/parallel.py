"""The processes that train one model together."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tunediff.config import Parallel


@dataclasses.dataclass(frozen=True)
class World:
    """This process's place among the training processes. Size 1 needs no process group."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def agree(self, values: list[float]) -> list[float]:
        """Rank 0's numbers on every rank, as float64. All ranks must call it at the same step."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, src=0)
        return [float(value) for value in tensor.tolist()]

    def largest(self, value: float) -> float:
        """The largest of all ranks' numbers."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor.item())

    def mean(self, value: float) -> float:
        """The mean of all ranks' numbers."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return float(tensor.item()) / self.size

    def average_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Replace the gradients of a few parameters outside `wrap` by their mean over ranks."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.size

    def gather(self, value: Any) -> list[Any]:
        """Every rank's small object, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def wrap(self, model: nn.Module, parallel: Parallel) -> nn.Module:
        """The model as the loop calls it: gradients are averaged over ranks."""
        if self.size == 1:
            return model
        devices = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(
            model,
            device_ids=devices,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # they are constants
            bucket_cap_mb=parallel.bucket_mib,
            static_graph=parallel.static_graph,
        )

    def synchronize(self) -> None:
        """Wait until the device has done what was queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def alone() -> World:
    """One process, on the first GPU if there is one."""
    return World(0, 1, torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))


@contextlib.contextmanager
def from_environment() -> Iterator[World]:
    """The world torchrun describes in the environment; one process without it."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield alone()
        return
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield World(rank, size, device)
    # Only after a success: a rank that failed must not wait for the others. Wrapped models are freed first, because
    # they hold threads of the process group.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def no_gradient_sync(model: nn.Module, active: bool) -> Iterator[None]:
    """Skip averaging gradients in all but the last pass of an accumulation."""
    inner = getattr(model, "_orig_mod", model)  # torch.compile wraps the wrapper
    if active and isinstance(inner, nn.parallel.DistributedDataParallel):
        with inner.no_sync():
            yield
    else:
        yield
