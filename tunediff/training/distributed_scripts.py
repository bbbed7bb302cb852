"""Run scripts written for DistributedDataParallel under a trial, which makes the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from tunediff.distributed import World


@contextlib.contextmanager
def process_group_of_trial(world: World) -> Iterator[None]:
    """Let `torch.distributed.init_process_group` join the ranks of this trial.

    With several ranks the group exists: the call does nothing. A trial of one rank gets a group of
    that rank, in which `get_rank`, `barrier`, collectives and `DistributedDataParallel` work.
    `destroy_process_group` leaves either to the trial, which still evaluates.
    """
    torch_distributed: Any = dist  # exports no name of its own to type checkers
    make, destroy = dist.init_process_group, dist.destroy_process_group
    made = False

    def init_process_group(*_: Any, **__: Any) -> None:
        nonlocal made
        if not dist.is_initialized():
            backend = "nccl" if world.device.type == "cuda" else "gloo"
            make(backend, store=torch_distributed.HashStore(), rank=0, world_size=1)
            made = True

    torch_distributed.init_process_group = init_process_group
    torch_distributed.destroy_process_group = lambda group=None: None
    try:
        yield
    finally:
        torch_distributed.init_process_group = make
        torch_distributed.destroy_process_group = destroy
        if made:
            destroy()
