"""Train or profile for the command or the call that asks for it, in a process of its own.

    command, or call from Python            run, forked from a template of the workload
    call(function, content, …)  ─────────►  function(content, lines), lines on inherited streams
    logging                     ◄─────────  logging
    SIGINT, SIGTERM             ─────────►  SIGTERM
    returns, or raises          ◄─────────  its result, or its error

What the function does to its process ends with it. Imports neither torch nor Ray.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from tunediff.core.errors import RunError, TunediffError
from tunediff.core.progress import EventLines
from tunediff.core.template import Template, TemplateError
from tunediff.tuning.templates import kept

C = TypeVar("C")
R = TypeVar("R")
_PACKAGE = logging.getLogger("tunediff")
_NOWHERE = open(os.devnull, "wb")  # noqa: SIM115 – stays
"""For what a user's file prints while a template imports it: its import here has printed it."""


# ---- the process that asks
def call(function: Callable[[C, EventLines], R], content: C, workload: str, lines: EventLines) -> R:
    """Return what `function(content, lines)` returns, called in a run of a template of `workload`;
    raise what it raises.

    The first SIGINT or SIGTERM becomes a SIGTERM of the run; the second SIGINT ends it. Raises
    `TunediffError` for a run that was killed, and `KeyboardInterrupt`.
    """
    templates, signals, last = kept(function), list[int](), None
    templates.output = _NOWHERE
    asked = (pickle.dumps((function, content, lines)), _PACKAGE.getEffectiveLevel())
    try:
        template = templates.ready(workload)
        run = template.start(start, asked, streams=[1, 2])
        with _passed_on(template, signals):
            while (message := run.receive()) is not None:
                if isinstance(message, logging.LogRecord):
                    logging.getLogger(message.name).handle(message)
                else:
                    last = message
    except BaseException as error:
        templates.close()
        if not isinstance(error, TemplateError):
            raise
        if signals:
            raise KeyboardInterrupt("interrupted") from None
        raise TunediffError(f"its process has ended: {error}") from None
    assert last is not None
    result: R
    result, raised, trace = last
    if raised is not None:
        raise raised from RunError(trace)
    return result


@contextlib.contextmanager
def _passed_on(template: Template, received: list[int]) -> Iterator[None]:
    """Pass signals of this process on to its run, which writes a checkpoint and stops."""

    def handle(number: int, frame: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        template.terminate_run()

    if threading.current_thread() is not threading.main_thread():  # it alone may handle signals
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- the run
class _SentRecords(logging.handlers.QueueHandler):
    """Passes on what the package logs; its queue is a function."""

    def enqueue(self, record: logging.LogRecord) -> None:
        self.queue(record)  # type: ignore[operator]


def start(connection: Connection, asked: tuple[bytes, int]) -> None:
    """Call a function and send (its result, None, "") or (None, its error, the traceback); the
    function of a template's run. `asked`: the function with its arguments, and the parent's level
    of logging."""
    from tunediff.training import prepared  # imports torch

    pickled, level = asked
    sending = threading.Lock()

    def send(message: Any) -> None:
        with sending, contextlib.suppress(OSError):  # the kernel ends this run with its parent
            connection.send(message)

    prepared.begin()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _PACKAGE.addHandler(_SentRecords(send))  # type: ignore[arg-type]
    _PACKAGE.setLevel(level)
    try:
        function, content, lines = pickle.loads(pickled)
        send((function(content, lines), None, ""))
    except BaseException as error:
        send((None, _picklable(error), traceback.format_exc()))


def _picklable(error: BaseException) -> BaseException:
    """Return an error as another process can read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return TunediffError(f"{type(error).__name__}: {error}")
    return error
