"""Pause DataLoader workers while the training clock is stopped, so that no batch is free.

A stopped process (SIGSTOP) makes nothing, whatever its data set does, and goes on where it was
(SIGCONT). What an item locks between processes stays locked meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import multiprocessing
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data import DataLoader


class LoaderProcesses:
    """The processes of all DataLoaders whose iteration begins within `tracked`, wrapped or not.

    Other loaders, such as an evaluation's, are left alone, and so are other iterations of the same
    loader: a training has iterators, and persistent processes, of its own.
    """

    def __init__(self) -> None:
        self._iterators = weakref.WeakSet[Any]()
        self._persistent = weakref.WeakKeyDictionary[DataLoader[Any], Any]()
        self._paused = list[Any]()  # held: none is shut down, which waits for its processes

    @contextlib.contextmanager
    def tracked(self) -> Iterator[None]:
        """Take in the processes of every DataLoader whose iteration begins inside."""
        # By its class, since frameworks wrap loaders and begin them themselves.
        begin = DataLoader.__iter__

        def begin_tracked(loader: DataLoader[Any]) -> Any:
            if not loader.num_workers:
                return begin(loader)
            theirs, init = loader._iterator, loader.worker_init_fn
            loader._iterator = self._persistent.get(loader)
            loader.worker_init_fn = functools.partial(begin_worker, init)
            try:
                iterator = begin(loader)
                if loader._iterator is not None:
                    self._persistent[loader] = loader._iterator
            finally:
                loader._iterator, loader.worker_init_fn = theirs, init
            self._iterators.add(iterator)
            return iterator

        DataLoader.__iter__ = begin_tracked  # type: ignore[method-assign]
        try:
            yield
        finally:
            DataLoader.__iter__ = begin  # type: ignore[method-assign]

    def pause(self) -> None:
        """Stop the processes: the clock stands still."""
        self._paused = list(self._iterators)
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the processes go on; one that was never paused does not notice."""
        self._signal(signal.SIGCONT)
        self._paused.clear()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the processes load inside, while the clock runs."""
        self.resume()
        yield
        self.pause()  # not after an error: they are to end then

    def close(self) -> None:
        """Let the processes go on, and let go of what the training alone has begun."""
        self.resume()  # a stopped process would not hear that it shall end
        self._persistent.clear()

    def _signal(self, number: int) -> None:
        if sys.platform != "linux":  # nothing ends a stopped process there; see `begin_worker`
            return
        for iterator in self._paused:
            for worker in iterator._workers:
                if worker.is_alive():
                    os.kill(worker.pid, number)


def begin_worker(init: Callable[[int], object] | None, worker: int) -> None:
    """Let the kernel kill this loader process when its training ends, also where it is stopped.

    It holds one end of a pipe whose other end the training has; a signal tells that it is closed.
    The parent in the system's sense may be a fork server, which lives on.
    """
    training = multiprocessing.parent_process()
    if training is not None and sys.platform == "linux":
        pipe: Any = training.sentinel
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
        if wait([pipe], 0):  # closed before
            os._exit(1)
    if init is not None:
        init(worker)
