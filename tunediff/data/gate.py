"""A gate for loader processes: while the clock of a training is stopped, they load nothing."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

POLL_S = 0.002
"""Interval at which a waiting process checks the gate. It is no lock: a killed process would never release one."""


class Gate:
    """Open or closed, for all loader processes of a training; it is sent to them with the data set.

    Without it they would fill their queues while a model is evaluated or saved, and the training would get these
    batches without their time being counted: the more, the larger `loader.prefetch_factor` is.
    """

    def __init__(self, workers: int) -> None:
        self._closed = torch.zeros((), dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self._batches = torch.zeros(workers, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._owner = os.getpid()

    def close(self) -> None:
        """Let each process finish the item that it is loading, and start no other."""
        self._closed.fill_(1)

    def open(self) -> None:
        """Let the processes load."""
        self._closed.fill_(0)

    @property
    def batches(self) -> int:
        """Return how many batches the loader processes have finished."""
        return int(self._batches.sum())

    def wait(self) -> None:
        """Return when the gate is open, or when the process that would open it has ended."""
        while self._closed.item() and _lives(self._owner):
            time.sleep(POLL_S)

    def count(self) -> None:
        """Count a batch, in the loader process that has finished it."""
        if (info := get_worker_info()) is not None:
            self._batches[info.id] += 1


def _lives(process: int) -> bool:
    """Return whether a process with this id exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


class GatedItems:
    """The items of a data set, each of which is loaded only while the gate is open."""

    def __init__(self, gate: Gate, source: Any) -> None:
        self._gate, self._source = gate, source

    def __getitem__(self, index: int) -> Any:
        self._gate.wait()
        return self._source[index]

    def __iter__(self) -> Iterator[Any]:
        for item in self._source:
            self._gate.wait()
            yield item


class GatedCollate:
    """Makes a batch while the gate is open, and counts it."""

    def __init__(self, gate: Gate, collate: Callable[[Any], Any]) -> None:
        self._gate, self._collate = gate, collate

    def __call__(self, items: Any) -> Any:
        self._gate.wait()
        batch = self._collate(items)
        self._gate.count()
        return batch


def gated(loader: Any) -> tuple[Any, Gate | None]:
    """Return a loader of a user's with a gate before its batches; itself and None where it has no loader processes."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return loader, None
    twin = copy.copy(loader)
    twin._iterator = None  # persistent processes of a loader that was iterated before know no gate
    if (inner := vars(loader).get("base_dataloader")) is not None:  # accelerate iterates the loader that it wraps
        twin.base_dataloader, gate = gated(inner)
        return twin, gate
    gate = Gate(loader.num_workers)
    twin.collate_fn = GatedCollate(gate, loader.collate_fn)
    return twin, gate
