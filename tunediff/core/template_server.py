"""The process of a template, whose parents `template.py` describes."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import gc
import importlib
import json
import multiprocessing.connection
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn, cast

_PR_SET_PDEATHSIG = 1
_LONGEST_REQUEST = 65536
GRACE_S = 5.0
"""How long a shared template waits for another parent when it has none."""
_PARENT_ENDED = signal.SIGUSR2
"""What the kernel sends to a template when its parent ends."""
_STARTED_WITH = dict(os.environ)


@dataclasses.dataclass(frozen=True)
class Failure:
    """The last message of a run whose function raised an error."""

    reason: str


def end_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send a signal to this process when its parent, of this pid, dies; only on
    Linux.

    It counts the thread that has started this process as the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:  # it has died before the call
            os._exit(1)


def _function(name: str) -> Callable[..., Any]:
    """Return the function that `package.module:function` names."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end is of this user: anybody can use the address."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return bool(user == os.getuid())


def json_line(content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"


def main(descriptor: int, parent: int, address: str) -> None:
    """Prepare, then fork runs, until the parent closes its end, or all parents of a shared one."""
    control, listener = socket.socket(fileno=descriptor), None
    if address:
        if os.fork():
            os._exit(0)
        os.setsid()
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(f"\0{address}")
        except OSError:
            control.sendall(json_line({"taken": True}))
            return
        listener.listen(128)
        control.sendall(json_line({"taken": False}))
    else:
        end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with control.makefile("rb") as lines:
        hello = json.loads(lines.readline())
    began = time.monotonic()
    with _ending_when_alone(control, listener):
        facts = {"unsafe": _prepared(control, hello), "seconds": time.monotonic() - began}
    gc.collect()
    gc.freeze()  # a collection in a run does not copy the template's pages
    server = _Server(control, listener, facts)
    if not address and not facts["unsafe"]:  # what its run has started ends with it, too
        server.take_signals()
        end_with_parent(parent, by=_PARENT_ENDED)
    server.serve()
    _end_group(os.getpid())  # at once, with the fork server of its runs' loader processes


@contextlib.contextmanager
def _ending_when_alone(control: socket.socket, listener: socket.socket | None) -> Iterator[None]:
    """Meanwhile, end a shared template whose first parent is gone, if no other one waits: a file
    may hang while it is imported. The kernel ends one that is not shared."""
    if listener is None:
        yield
        return

    def look(*_: object) -> None:
        is_gone, others = bool(select.select([control], [], [], 0)[0]), [listener]
        if is_gone and not select.select(others, [], [], 0)[0]:
            os._exit(1)

    before = signal.signal(signal.SIGIO, look)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        look()
        yield
    finally:
        fcntl.fcntl(control, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, before)


class _Server:
    """Forks a run for each request of a parent; parents are told of their runs' ends."""

    def __init__(
        self, first: socket.socket, listener: socket.socket | None, facts: Mapping[str, Any]
    ) -> None:
        self._listener, self._facts = listener, facts
        self._runs = dict[socket.socket, int]()
        """Each parent, and the pid of its run; 0: none."""
        self._ends = dict[int, tuple[int, socket.socket]]()
        """Of each run: a descriptor that is readable when it has ended; its pid and parent."""
        self._of_user = dict[signal.Signals, Any]()
        """Handlers that the user's file has set, for its runs."""
        self._welcome(first)

    def take_signals(self) -> None:
        """End with the parent. SIGTERM, which batch systems send to all processes of a job, is for
        the parent, which decides how its run ends."""

        def ignore(*_: object) -> None:  # unlike SIG_IGN, no started program inherits this
            pass

        for number, handler in ((_PARENT_ENDED, self._end), (signal.SIGTERM, ignore)):
            self._of_user[number] = signal.signal(number, handler) or signal.SIG_DFL

    def _end(self, *_: object) -> NoReturn:
        """End at once, with all runs and what they have started."""
        for pid in filter(None, self._runs.values()):
            _end_group(pid)
        os._exit(1)

    def serve(self) -> None:
        while True:
            sources: list[Any] = [*self._runs, *self._ends]
            if self._listener is not None:
                sources.append(self._listener)
            has_any = bool(self._runs or self._ends)
            ready = multiprocessing.connection.wait(sources, None if has_any else GRACE_S)
            if not ready:
                return
            for source in ready:
                if isinstance(source, int):
                    self._reap(source)
                elif source is self._listener:
                    parent, _ = source.accept()
                    if is_same_user(parent):
                        self._welcome(parent)
                elif not self._answer(cast(socket.socket, source)):
                    return

    def _welcome(self, parent: socket.socket) -> None:
        self._runs[parent] = 0
        with contextlib.suppress(OSError):
            parent.sendall(json_line(self._facts))

    def _answer(self, parent: socket.socket) -> bool:
        """Do what a parent asks for; False when the last one is gone."""
        line, descriptors = b"", list[int]()
        with contextlib.suppress(OSError):
            line, descriptors, _, _ = socket.recv_fds(parent, _LONGEST_REQUEST, 3)
        if not line:
            parent.close()
            if pid := self._runs.pop(parent):
                _end_group(pid)
            return self._listener is not None
        request = json.loads(line)
        if request["before"] is not None:
            function, argument = request["before"]
            with contextlib.suppress(Exception):  # the run will raise it as well
                _function(function)(argument)
        if self._facts["unsafe"]:
            _run(descriptors, request["function"])
        template = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            end_with_parent(template)
            for number, handler in self._of_user.items():
                signal.signal(number, handler)
            os.setsid()
            for other in (*self._runs, *filter(None, [self._listener])):
                other.close()
            for end in self._ends:
                os.close(end)
            _run(descriptors, request["function"])
        for descriptor in descriptors:
            os.close(descriptor)
        self._runs[parent] = pid
        self._ends[os.pidfd_open(pid)] = (pid, parent)
        with contextlib.suppress(OSError):
            parent.sendall(json_line({"pid": pid}))
        return True

    def _reap(self, end: int) -> None:
        """Tell a parent that its run has ended, after what is left of its process group."""
        pid, parent = self._ends.pop(end)
        os.close(end)
        _end_group(pid)  # the pid is not given to another process yet
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if parent in self._runs:
            self._runs[parent] = 0
            with contextlib.suppress(OSError):
                parent.sendall(json_line({"status": status}))


def _end_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _prepared(control: socket.socket, hello: dict[str, Any]) -> str:
    """Prepare as the parent asks for; return why a fork is not safe, or ''."""
    sys.path[:] = hello["path"]
    try:
        prepare = _function(hello["prepare"]) if hello["prepare"] else lambda options: ""
        unsafe = prepare(hello["options"]) or ""
    except BaseException as error:
        traceback.print_exc()
        control.sendall(json_line({"failed": _reason(error)}))
        os._exit(1)
    if not unsafe and threading.active_count() > 1:
        names = [thread.name for thread in threading.enumerate()[1:]]
        unsafe = f"it has started threads ({', '.join(names)})"
    return unsafe if sys.platform == "linux" else unsafe or "runs are forked on Linux only"


def _run(descriptors: Sequence[int], function: str) -> NoReturn:
    """Call the function of a run in this process, then end it at once: a user's threads may hold
    up an orderly exit."""
    connection, status = Connection(descriptors[0]), 1
    try:
        for stream, descriptor in enumerate(descriptors[1:], 1):  # of its parent
            os.dup2(descriptor, stream)
            os.close(descriptor)
        environment, folder, content = connection.recv()
        _take_over(environment)
        os.chdir(folder or ".")
        _function(function)(connection, content)
        status = 0
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(Exception):
            connection.send(Failure(_reason(error)))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _take_over(environment: Mapping[str, str]) -> None:
    """Set what the parent's environment has otherwise than this process was started with: what the
    user's file has set stays."""
    for name in environment.keys() | _STARTED_WITH.keys():
        if environment.get(name) != _STARTED_WITH.get(name):
            os.environ.pop(name, None)
            if name in environment:
                os.environ[name] = environment[name]


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


if __name__ == "__main__":
    # By its name: what runs send is of the module that the parent knows, not of `__main__`
    from tunediff.core import template_server

    template_server.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
