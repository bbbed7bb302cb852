"""Signals of a training outside any search: it writes a checkpoint and stops."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from typing import Any


class _StopSignals(list[int]):
    """The received signals; called as their handler."""

    def __call__(self, number: int, frame: Any) -> None:
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
    _end_forked_processes_by_sigterm()
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@functools.cache
def _end_forked_processes_by_sigterm() -> None:
    """Let forked processes be without the handler of `stop_signals` from their first moment on.

    Python drops signals of a process that has just been forked, so SIGTERM is blocked until then.
    """

    def noted() -> bool:
        return isinstance(signal.getsignal(signal.SIGTERM), _StopSignals)

    def block(how: int) -> None:
        if noted():
            signal.pthread_sigmask(how, [signal.SIGTERM])

    def begin() -> None:
        if noted():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    os.register_at_fork(
        before=lambda: block(signal.SIG_BLOCK),
        after_in_parent=lambda: block(signal.SIG_UNBLOCK),
        after_in_child=begin,
    )
