"""The processes between a parent and its runs, which `template.py` describes: base and template."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tunediff.core.errors import Failure

LONGEST = 1 << 18
"""Bytes of a packet on a control connection."""
GRACE_S = 5.0
"""How long a base waits for another parent when it has none."""
_started_with = dict(os.environ)
"""The environment that this process was given."""


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end is of this user: anybody can use the address."""
    return _peer(connection)[1] == os.getuid()


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of the process at the other end."""
    size = struct.calcsize("3i")
    pid, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return pid, user


def end_group(pid: int) -> None:
    """End a process group at once."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


# ---- both
class _Server:
    """Forks a child for what its parents ask for; they are told of its end, with which its process
    group ends, and it ends when they are gone. The kernel ends all with this process."""

    child = ""

    def __init__(self, source: socket.socket) -> None:
        """`source`: of new parents."""
        self._poll, self._handlers = select.poll(), dict[int, Callable[[], object]]()
        self._parents = dict[socket.socket, int]()
        """Each parent, and the pid of its child; 0: none."""
        self._ends = dict[socket.socket, int]()
        """A descriptor that is readable when the parent's process has ended: what that has forked
        may hold its connection open."""
        self._alive = os.pipe()
        self._watch(source.fileno(), lambda: self.welcome(source))

        def ignore(*_: object) -> None:  # unlike SIG_IGN, no started program inherits this
            pass

        # Batch systems send it to all processes of a job: the parent decides how its run ends
        self._on_sigterm = signal.signal(signal.SIGTERM, ignore) or signal.SIG_DFL

    def serve(self) -> None:
        """Serve until there is no parent for a while."""
        while ready := self._poll.poll(None if self._parents else GRACE_S * 1000):
            self._handlers[ready[0][0]]()  # one at a time: it may close what is ready as well

    def welcome(self, source: socket.socket) -> None:
        """Take a new parent."""
        raise NotImplementedError

    def answer(self, message: Any, descriptors: list[int], parent: socket.socket) -> int:
        """Do what a parent asks for; return the pid of its child."""
        raise NotImplementedError

    def _watch(self, descriptor: int, handler: Callable[[], object]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.POLLIN)

    def _forget(self, descriptor: int) -> None:
        del self._handlers[descriptor]
        self._poll.unregister(descriptor)

    def add(self, parent: socket.socket) -> None:
        """Serve a parent until it hangs up or its process ends."""
        self._parents[parent] = 0
        self._watch(parent.fileno(), functools.partial(self._read, parent))
        with contextlib.suppress(OSError):  # it has ended, or its pid is of another namespace
            self._ends[parent] = os.pidfd_open(_peer(parent)[0])
            self._watch(self._ends[parent], functools.partial(self._gone, parent))

    def _read(self, parent: socket.socket) -> None:
        message, descriptors = b"", list[int]()
        with contextlib.suppress(OSError):
            message, descriptors, _, _ = socket.recv_fds(parent, LONGEST, 3)
        if not message:
            self._gone(parent)
            return
        self._parents[parent] = self.answer(pickle.loads(message), descriptors, parent)
        for descriptor in descriptors:
            os.close(descriptor)

    def fork(self) -> int:
        """Return the pid of a child, in a process group that the kernel ends with this process; 0
        in the child itself."""
        sys.stdout.flush()
        sys.stderr.flush()
        above = os.getpid()
        if pid := os.fork():
            end = os.pidfd_open(pid)
            self._watch(end, functools.partial(self._reap, end, pid))
            return pid
        os.setsid()
        # The last reader of the pipe ends with the parent: the kernel signals to the writers'
        # groups. Opened anew, since owner and flags belong to an open file, not to a descriptor
        tie = os.open(f"/proc/self/fd/{self._alive[1]}", os.O_WRONLY)
        fcntl.fcntl(tie, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(tie, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(tie, fcntl.F_SETFL, fcntl.fcntl(tie, fcntl.F_GETFL) | os.O_ASYNC)
        self.leave()
        if os.getppid() != above:  # it has died before
            os._exit(1)
        return 0

    def leave(self) -> None:
        """Let this process be a server no more."""
        for descriptor in (*self._handlers, *self._alive):
            os.close(descriptor)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _reap(self, end: int, pid: int) -> None:
        """Tell the parents that their child has ended, after what is left of its group."""
        self._forget(end)
        os.close(end)
        end_group(pid)  # the pid is not given to another process yet
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for parent in [one for one, child in self._parents.items() if child == pid]:
            self._parents[parent] = 0
            tell(parent, self.child, status)

    def _gone(self, parent: socket.socket) -> None:
        """End the child of a parent that is gone, unless others have it, too."""
        if end := self._ends.pop(parent, 0):
            self._forget(end)
            os.close(end)
        self._forget(parent.fileno())
        parent.close()
        child = self._parents.pop(parent)
        if child and child not in self._parents.values():
            end_group(child)


def tell(connection: socket.socket, about: str, what: Any, descriptors: Sequence[int] = ()) -> None:
    """Send a packet, unless the other end is gone."""
    with contextlib.suppress(ConnectionError):
        socket.send_fds(connection, [pickle.dumps((about, what))], descriptors)


# ---- the base
def main(address: str, prepare: str) -> None:
    """Serve as the base at an abstract address, unless there is one, in a process that is nobody's
    child. `prepare`: a function or None, pickled."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{address}")
    except OSError:  # another process was first
        return
    listener.listen(128)
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(Exception):  # templates raise it as well
        if (function := pickle.loads(bytes.fromhex(prepare))) is not None:
            function(None)
    _freeze()
    _Base(listener).serve()
    os._exit(0)


def _freeze() -> None:
    gc.collect()
    gc.freeze()  # a collection in a child does not copy the pages of this process


class _Base(_Server):
    """Forks templates; parents that ask for the same shared one get the same."""

    child = "template"

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener)
        self._templates = dict[int, tuple[bytes, socket.socket]]()
        """Of each pid: what a shared one is known by; where it gets new parents from."""

    def welcome(self, source: socket.socket) -> None:
        parent, _ = source.accept()
        if is_same_user(parent):
            self.add(parent)

    def answer(self, message: Any, descriptors: list[int], parent: socket.socket) -> int:
        key, hello = message
        living = {pid: self._templates[pid] for pid in self._parents.values() if pid}
        pid = next((pid for pid, (known, _) in living.items() if key and known == key), 0)
        if not pid:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if (pid := self.fork()) == 0:
                ours.close()
                _serve_template(theirs, hello, descriptors)
            theirs.close()
            living[pid] = key, ours
        self._templates = living
        tell(living[pid][1], "parent", None, [parent.fileno()])
        # From now on the template reads what it sends: only that it hangs up matters here
        self._poll.modify(parent.fileno(), 0)
        self._handlers[parent.fileno()] = functools.partial(self._gone, parent)
        return pid


# ---- a template
def _serve_template(
    source: socket.socket, hello: Mapping[str, Any], streams: list[int]
) -> NoReturn:
    """Prepare, then fork runs until the base ends this process."""
    for stream, descriptor in enumerate(streams, 1):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    _take_over(hello["environment"], hello["folder"])
    _started_with.clear()
    _started_with.update(os.environ)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, hello["cores"])
    facts = dict[str, Any]()
    try:
        sys.path[:] = hello["path"]
        prepare, options = pickle.loads(hello["prepare"])
        facts["unsafe"] = (prepare(options) if prepare is not None else "") or ""
    except BaseException as error:
        traceback.print_exc()
        facts["failed"] = Failure.of(error)
    if threading.active_count() > 1 and not facts.get("unsafe"):
        names = [thread.name for thread in threading.enumerate()[1:]]
        facts["unsafe"] = f"it has started threads ({', '.join(names)})"
    _freeze()
    _Template(source, facts).serve()
    os._exit(0)


class _Template(_Server):
    """Forks runs, one at a time for each parent."""

    child = "run"

    def __init__(self, source: socket.socket, facts: Mapping[str, Any]) -> None:
        super().__init__(source)
        self._facts = facts

    def welcome(self, source: socket.socket) -> None:
        _, (descriptor,), _, _ = socket.recv_fds(source, LONGEST, 1)
        parent = socket.socket(fileno=descriptor)
        self.add(parent)
        tell(parent, "ready", self._facts)

    def answer(self, message: Any, descriptors: list[int], parent: socket.socket) -> int:
        _, before = message
        with contextlib.suppress(Exception):  # the run will raise it as well
            function, argument = pickle.loads(before)
            function(argument)
        if self._facts["unsafe"]:  # each run prepares anew
            tell(parent, "started", os.getpid())
            self.leave()
            _call(descriptors)
        if (pid := self.fork()) == 0:
            _call(descriptors)
        tell(parent, "started", pid)
        return pid


# ---- a run
def _call(descriptors: Sequence[int]) -> NoReturn:
    """Call the function of a run in this process, then end it at once: a user's threads may hold
    up an orderly exit."""
    connection, status = Connection(descriptors[0]), 1
    try:
        for stream, descriptor in enumerate(descriptors[1:], 1):  # of its parent
            os.dup2(descriptor, stream)
            os.close(descriptor)
        environment, folder, called = connection.recv()
        _take_over(environment, folder)
        function, content = pickle.loads(called)
        function(connection, content)
        status = 0
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(Exception):
            connection.send(Failure.of(error))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _take_over(environment: Mapping[str, str], folder: str) -> None:
    """Set what the parent's environment has otherwise than this process was given: what the user's
    file has set stays. `folder`: to work in, or ''."""
    for name in environment.keys() | _started_with.keys():
        if environment.get(name) != _started_with.get(name):
            os.environ.pop(name, None)
            if name in environment:
                os.environ[name] = environment[name]
    os.chdir(folder or ".")
