"""A gate for loader processes: while the clock of a training stands still, they begin no batch.

They finish the one in hand, and note how long they worked on it meanwhile; `training.prefetched`
charges these seconds.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, _DatasetKind

POLL_S = 0.002
"""Interval of checks by a waiting process. No lock: a killed process would hold it."""


class Gate:
    """Holds the processes of all DataLoaders that begin within `over_loaders`.

    The clock of a training stands still when its gate is made.
    """

    def __init__(self) -> None:
        self._still = _shared(1)  # see `_still_s`
        self._still.fill_(-time.monotonic())
        self._closed = _shared(1)
        self._worked: list[Tensor] = []  # one for each loader, an entry for each process
        self._gone_s = 0.0  # what loaders had noted that are gone
        self._twins = weakref.WeakKeyDictionary[DataLoader[Any], DataLoader[Any]]()
        self.only_in_process = False
        """Whether the loop makes batches itself: none while the clock stands still."""

    def close(self) -> None:
        """Let processes finish their batch and begin no other: the clock stands still."""
        self._closed.fill_(1)
        if self._still.item() >= 0:
            self._still.fill_(self._still.item() - time.monotonic())

    def open(self) -> None:
        """Let the processes load; the clock runs."""
        self._still.fill_(_still_s(self._still))
        self._closed.fill_(0)

    @property
    def processes(self) -> int:
        """Return how many processes the largest loader has."""
        return max((len(worked) for worked in self._worked), default=0)

    @property
    def worked_s(self) -> float | None:
        """Return the seconds for which the processes have worked while the clock stood still, as
        noted at the end of each batch; None where there are no processes that note it. It is the
        mean over the processes of a loader, which work at the same time.
        """
        worked_s = max((float(worked.mean()) for worked in self._worked), default=0.0)
        return self._gone_s + worked_s if self._worked else self._gone_s or None

    def _forget(self, worked: Tensor) -> None:
        """Keep what a loader had noted whose user has let it go."""
        self._gone_s += float(worked.mean())
        self._worked = [other for other in self._worked if other is not worked]

    @contextlib.contextmanager
    def over_loaders(self) -> Iterator[None]:
        """Hold the processes of every DataLoader whose iteration begins inside, wrapped or not."""
        # By its class, since frameworks wrap loaders and begin them themselves.
        begin, thread = DataLoader.__iter__, threading.get_ident()

        def begin_held(loader: DataLoader[Any]) -> Any:
            in_process = not loader.num_workers and threading.get_ident() == thread
            self.only_in_process = in_process and not self._worked
            return begin(self.twin(loader))

        DataLoader.__iter__ = begin_held  # type: ignore[method-assign]
        try:
            yield
        finally:
            DataLoader.__iter__ = begin  # type: ignore[method-assign]

    def twin(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a copy whose processes wait at the gate; the user's own loader is unchanged."""
        if not loader.num_workers:
            return loader
        if (earlier := self._twins.get(loader)) is not None:
            return earlier
        # Its processes are started by its own iterator: the user's loader may have some already.
        twin, worked = copy.copy(loader), _shared(loader.num_workers)
        twin._iterator = None
        twin.worker_init_fn = _WaitInit(self._still, self._closed, worked, loader.worker_init_fn)
        self._worked.append(worked)
        self._twins[loader] = twin
        weakref.finalize(loader, self._forget, worked)
        return twin


class _WaitInit:
    """Makes a loader process wait before each batch, and note work while the clock stands."""

    def __init__(
        self, still: Tensor, closed: Tensor, worked: Tensor, init: Callable[[int], None] | None
    ) -> None:
        self._still, self._closed, self._worked, self._init = still, closed, worked, init
        self._owner = os.getpid()

    def __call__(self, worker: int) -> None:
        """Begin in the process itself, which has no fetcher yet."""
        # A process makes one fetcher, right after this, and asks it for every batch.
        create: Callable[..., Any] = _DatasetKind.create_fetcher

        def create_held(*args: Any) -> Any:
            fetcher = create(*args)
            fetch = fetcher.fetch

            def held_fetch(index: Any) -> Any:
                while self._closed.item() and _exists(self._owner):
                    time.sleep(POLL_S)
                # The work while the clock stands still, whenever that begins or ends.
                still_s = _still_s(self._still)
                try:
                    return fetch(index)
                finally:
                    self._worked[worker] += _still_s(self._still) - still_s

            fetcher.fetch = held_fetch
            return fetcher

        _DatasetKind.create_fetcher = staticmethod(create_held)  # type: ignore[method-assign]
        if self._init is not None:
            self._init(worker)


def _shared(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float64).share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def _still_s(still: Tensor) -> float:
    """Return the seconds for which the clock has stood still so far.

    They are one number, which a process reads whole: while the clock stands still, the seconds
    before less the moment at which that began, which is negative.
    """
    return value if (value := still.item()) >= 0 else value + time.monotonic()


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
