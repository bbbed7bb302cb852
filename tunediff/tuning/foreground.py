"""Train or profile for the command or the call that asks for it, in a process of its own.

    command, or call from Python            run, forked from a template of the workload
    call(function, content, …)  ─────────►  function(content, lines)
    lines.say(…), logging       ◄─────────  lines.say(…), logging
    SIGINT, SIGTERM             ─────────►  SIGTERM
    returns, or raises          ◄─────────  its result, or its error

What the function does to its process ends with it. Imports neither torch nor Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from typing import Any

from tunediff.core import machine
from tunediff.core.errors import Failure, RunError, TunediffError
from tunediff.core.progress import EventLines
from tunediff.core.template import Template, TemplateError, TemplateRun
from tunediff.core.template_run import name_of
from tunediff.tuning.templates import kept

_PACKAGE = logging.getLogger("tunediff")
_NOWHERE = open(os.devnull, "wb")  # noqa: SIM115 – stays
"""For what a user's file prints while a template imports it: its import here has printed it."""


@dataclasses.dataclass(frozen=True)
class _Said:
    """A line, as `EventLines.say` takes it."""

    on_stderr: bool
    message: str
    timed: bool


_Last = tuple[Any, BaseException | None, str]
"""The last message of a run: what its function has returned, or else raised, and the traceback."""


# ---- the process that asks
def call(
    function: Callable[[Any, EventLines], Any], content: Any, workload: str, lines: EventLines
) -> Any:
    """Return what `function(content, lines)` returns, called in a run of a template of `workload`;
    raise what it raises. `function`: of a module.

    The first SIGINT or SIGTERM becomes a SIGTERM of the run; the second SIGINT ends it. Raises
    `TunediffError` for a run that was killed, and `KeyboardInterrupt`.
    """
    templates, signals = kept(name_of(function)), list[int]()
    templates.output = _NOWHERE
    settings = (pickle.dumps((function, content)), _threads_of_program(), lines)
    try:
        template = templates.ready(workload)
        level = _PACKAGE.getEffectiveLevel()
        run = template.start(start, (*settings, level), streams=[1, 2])
        with _passed_on(template, signals):
            result, error, trace = _last_message(run, lines)
    except BaseException as lost:
        templates.close()
        if not isinstance(lost, TemplateError):
            raise
        if signals:
            raise KeyboardInterrupt("interrupted") from None
        raise TunediffError(f"its process has ended: {lost}") from None
    if error is not None:
        raise error from RunError(trace)
    return result


def _threads_of_program() -> int | None:
    """Return this process's torch threads, if the program has set fewer than its share."""
    if (torch := sys.modules.get("torch")) is None:
        return None
    count: int = torch.get_num_threads()
    is_set = count < (machine.threads() or count) and count != machine.TORCH_DEFAULT_THREADS
    return count if is_set else None


def _last_message(run: TemplateRun, lines: EventLines) -> _Last:
    """Return the last message of a run; print and log the others."""
    last: _Last | None = None
    while (message := run.receive()) is not None:
        if isinstance(message, _Said):
            to = lines.aside if message.on_stderr else lines
            to.say(message.message, message.timed)
        elif isinstance(message, logging.LogRecord):
            logging.getLogger(message.name).handle(message)
        else:
            last = message
    if last is None:
        raise TemplateError(Failure("it has no result"))
    return last


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
@dataclasses.dataclass(frozen=True)
class _SentLines(EventLines):
    """Lines that the process prints that has asked for the run."""

    send: Callable[[Any], None] = lambda message: None

    def say(self, message: str, timed: bool = True) -> None:
        self.send(_Said(self.on_stderr, message, timed))


class _SentRecords(logging.handlers.QueueHandler):
    """Passes on what the package logs; its queue is a function."""

    def enqueue(self, record: logging.LogRecord) -> None:
        self.queue(record)  # type: ignore[operator]


def start(connection: Connection, content: tuple[bytes, int | None, EventLines, int]) -> None:
    """Call a function and send its result; the function of a template's run. `content`: the
    function, its argument, and torch's threads, lines and level of logging of the parent."""
    from tunediff.training import prepared  # imports torch

    pickled, threads, lines, level = content
    sending = threading.Lock()

    def send(message: Any) -> None:
        with sending, contextlib.suppress(OSError):  # the kernel ends this run with its parent
            connection.send(message)

    prepared.begin(threads)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _PACKAGE.addHandler(_SentRecords(send))  # type: ignore[arg-type]
    _PACKAGE.setLevel(level)
    try:
        function, argument = pickle.loads(pickled)
        send((function(argument, _SentLines(**vars(lines), send=send)), None, ""))
    except BaseException as error:
        send((None, _picklable(error), traceback.format_exc()))


def _picklable(error: BaseException) -> BaseException:
    """Return an error as another process can read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return TunediffError(f"{type(error).__name__}: {error}")
    return error
