"""The process of a template, whose parents `template.py` describes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
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
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tunediff.core import template_run
from tunediff.core.errors import Failure
from tunediff.core.template_run import function_named, name_of

_PR_SET_PDEATHSIG = 1
_LONGEST_REQUEST = 65536
GRACE_S = 5.0
"""How long a shared template waits for another parent when it has none."""
_PARENT_ENDED = signal.SIGUSR2
"""What the kernel sends to a template when its parent ends."""


def end_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send a signal to this process when its parent, of this pid, dies; only on
    Linux.

    It counts the thread that has started this process as the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:  # it has died before the call
            os._exit(1)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of the process at the other end."""
    size = struct.calcsize("3i")
    pid, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return pid, user


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end is of this user: anybody can use the address."""
    return _peer(connection)[1] == os.getuid()


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
    _serve(control, listener, parent)


def serve_forked(connection: Connection, affinity: Sequence[int]) -> None:
    """Be a template that was forked from a base, with which it ends; the function of a base's run.
    `affinity`: cores of its parent."""
    template_run.STARTED_WITH.clear()
    template_run.STARTED_WITH.update(os.environ)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, affinity)
    _serve(socket.socket(fileno=os.dup(connection.fileno())), None, os.getppid())


def _serve(control: socket.socket, listener: socket.socket | None, parent: int) -> None:
    """Prepare as the parent at `control` asks for, then fork runs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with control.makefile("rb") as lines:
        try:
            hello = json.loads(lines.readline())
        except (ConnectionError, ValueError):  # the parent was interrupted and is gone
            return
    began = time.monotonic()
    with _ending_when_alone(control, listener):
        facts = {"unsafe": _prepared(control, hello), "seconds": time.monotonic() - began}
    gc.collect()
    gc.freeze()  # a collection in a run does not copy the template's pages
    server = _Server(control, listener, facts)
    if listener is None and not facts["unsafe"]:  # what its run has started ends with it, too
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
        with contextlib.suppress(BlockingIOError):
            is_gone = not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            if is_gone and not select.select([listener], [], [], 0)[0]:
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
        self._parents = dict[int, socket.socket]()
        """The same of each parent: what it has forked may hold its connection open."""
        self._templates = set[int]()
        """Runs that fork runs themselves."""
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
            sources: list[Any] = [*self._runs, *self._ends, *self._parents]
            if self._listener is not None:
                sources.append(self._listener)
            has_any = bool(self._runs or self._ends)
            if not has_any and self._listener is None:
                return
            ready = multiprocessing.connection.wait(sources, None if has_any else GRACE_S)
            if not ready:
                return
            source: Any = ready[0]  # one at a time: what it closes may be ready as well
            if source in self._ends:
                self._reap(source)
            elif source in self._parents:
                self._gone(self._parents[source])
            elif self._listener is not None and source is self._listener:
                parent, _ = self._listener.accept()
                if is_same_user(parent):
                    self._welcome(parent)
            else:
                self._answer(source)

    def _welcome(self, parent: socket.socket) -> None:
        self._runs[parent] = 0
        with contextlib.suppress(OSError):  # it has ended, or its pid is of another namespace
            self._parents[os.pidfd_open(_peer(parent)[0])] = parent
        with contextlib.suppress(OSError):
            parent.sendall(json_line(self._facts))

    def _gone(self, parent: socket.socket) -> None:
        """End the run of a parent that is gone; one that is a template ends its own run first."""
        parent.close()
        for end in [end for end, other in self._parents.items() if other is parent]:
            del self._parents[end]
            os.close(end)
        run = self._runs.pop(parent)
        if run in self._templates:
            os.kill(run, _PARENT_ENDED)
        elif run:
            _end_group(run)

    def _answer(self, parent: socket.socket) -> None:
        """Do what a parent asks for."""
        line, descriptors = b"", list[int]()
        with contextlib.suppress(OSError):
            line, descriptors, _, _ = socket.recv_fds(parent, _LONGEST_REQUEST, 3)
        if not line:
            self._gone(parent)
            return
        request = json.loads(line)
        if request["before"] is not None:
            function, argument = request["before"]
            with contextlib.suppress(Exception):  # the run will raise it as well
                function_named(function)(argument)
        if self._facts["unsafe"]:
            template_run.call(descriptors, request["function"])
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
            for end in (*self._ends, *self._parents):
                os.close(end)
            template_run.call(descriptors, request["function"])
        for descriptor in descriptors:
            os.close(descriptor)
        self._runs[parent] = pid
        if request["function"] == name_of(serve_forked):
            self._templates.add(pid)
        self._ends[os.pidfd_open(pid)] = (pid, parent)
        with contextlib.suppress(OSError):
            parent.sendall(json_line({"pid": pid}))

    def _reap(self, end: int) -> None:
        """Tell a parent that its run has ended, after what is left of its process group."""
        pid, parent = self._ends.pop(end)
        os.close(end)
        self._templates.discard(pid)
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
        prepare = function_named(hello["prepare"]) if hello["prepare"] else lambda options: ""
        unsafe = prepare(hello["options"]) or ""
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):  # the parent is gone
            control.sendall(json_line({"failed": vars(Failure.of(error))}))
        os._exit(1)
    if not unsafe and threading.active_count() > 1:
        names = [thread.name for thread in threading.enumerate()[1:]]
        unsafe = f"it has started threads ({', '.join(names)})"
    return unsafe if sys.platform == "linux" else unsafe or "runs are forked on Linux only"


if __name__ == "__main__":
    # By its name: what runs send is of the module that the parent knows, not of `__main__`
    from tunediff.core import template_server

    template_server.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
