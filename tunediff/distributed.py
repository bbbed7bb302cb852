"""Exchange numbers, tensors and objects between the processes that train one model together.

The only file with torch.distributed's collectives. All ranks call each method equally often.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tunediff.config.knobs import refuse
from tunediff.core import environment, machine

COLLECTIVE_S = 1800.0
"""Seconds that ranks wait in a collective: one of them may judge a model meanwhile."""


@dataclasses.dataclass(frozen=True)
class World:
    """The rank of this process among the training processes. Size 1 needs no process group."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Return whether this process writes files and reports."""
        return self.rank == 0

    # ---- numbers
    def agree(self, value: float) -> float:
        """Return rank 0's number on every rank, as float64."""
        return float(self.first(self._number(value))) if self.size > 1 else value

    def largest(self, value: float) -> float:
        """Return the largest of all ranks' numbers."""
        if self.size == 1:
            return value
        tensor = self._number(value)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor)

    def any(self, holds: bool) -> bool:
        """Return whether it holds on any rank."""
        return self.largest(float(holds)) > 0

    def total(self, value: float) -> float:
        """Return the sum of all ranks' numbers."""
        return float(self.sum(self._number(value))) if self.size > 1 else value

    def _number(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64, device=self.device)

    # ---- tensors
    def sum(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by the sum over all ranks and return it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean over all ranks; `tensor` is overwritten."""
        return self.sum(tensor) / self.size if self.size > 1 else tensor

    def first(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by rank 0's and return it."""
        return self.of(0, tensor)

    def of(self, rank: int, tensor: Tensor) -> Tensor:
        """Replace `tensor` by that rank's and return it."""
        if self.size > 1:
            dist.broadcast(tensor, src=rank)
        return tensor

    def stack(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors, of one shape, in rank order: [ranks, …] on every rank."""
        if self.size == 1:
            return tensor[None]
        every = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(every, tensor)
        return torch.stack(every)

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients of parameters outside the model by their mean over ranks."""
        for parameter in parameters if self.size > 1 else ():
            if parameter.grad is not None:
                self.sum(parameter.grad).div_(self.size)

    # ---- small objects
    def gather(self, value: Any) -> list[Any]:
        """Return all ranks' objects in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def tell(self, value: Any) -> Any:
        """Return rank 0's object on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def alone(device: torch.device | str | None = None) -> World:
    """Return the world of one process; without `device`, on the first GPU if there is one."""
    if device is None:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return World(0, 1, torch.device(device))


@contextlib.contextmanager
def described_in_environment(world: World) -> Iterator[None]:
    """Describe ranks in the environment as torchrun does; a lone process has no entry."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    rank, local = str(world.rank), str(world.device.index)
    if world.device.index is None:
        local = os.environ.get("LOCAL_RANK", rank)
    with environment.restored((*names, "MASTER_ADDR")):
        for name in names:
            os.environ.pop(name, None)
        if world.size > 1:
            os.environ.update(RANK=rank, WORLD_SIZE=str(world.size), LOCAL_RANK=local)
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        yield


@contextlib.contextmanager
def from_environment() -> Iterator[World]:
    """Yield the world that torchrun describes in the environment; without torchrun, that of one
    process. Inside, torch has its share of the cores: by itself it knows of no quota."""
    before = torch.get_num_threads()
    torch.set_num_threads(machine.threads() or before)
    try:
        with world_of_environment() as world:
            yield world
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def world_of_environment() -> Iterator[World]:
    """Yield the world that torchrun describes in the environment."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield alone()
        return
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        # One GPU where each process was given its own: then all have LOCAL_RANK 0.
        count = torch.cuda.device_count()
        refuse(
            local >= count,
            f"LOCAL_RANK: {local} is not allowed: each process needs a GPU of its own, and this one"
            f" sees {count}; allowed: 0 to {count - 1}",
        )
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=COLLECTIVE_S))
    yield World(rank, size, device)
    # Only after a success: a rank that failed must not wait for the others. Wrapped models are
    # freed first, because they hold threads of the process group.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
