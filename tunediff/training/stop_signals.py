"""Signals of a training outside any search: it writes a checkpoint and stops."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any


class _StopSignals(list[int]):
    """The received signals; called as their handler."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    def __call__(self, number: int, frame: Any) -> None:
        if number == signal.SIGTERM and os.getpid() != self._process:  # forked, as by a Pool
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.append(number)


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Yield received signals: the first SIGINT or SIGTERM saves a checkpoint and stops.

    A second SIGINT ends the process at once. SIGTERM ends a process that was forked inside, as
    without a handler: a user's `multiprocessing.Pool` ends its workers with it.
    """
    received = _StopSignals()
    try:
        before = {
            number: signal.signal(number, received) for number in (signal.SIGINT, signal.SIGTERM)
        }
    except ValueError:  # not the main thread, which alone may handle signals
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
