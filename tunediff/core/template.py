"""Run functions in processes that are forked from a template.

A template is a process that has imported what its runs need. A run is forked from it, so that it
starts in a fraction of a second and what it does to its process ends with it:

    parent                           base           template           run
    Template(PREPARE, options) ───►  forks  ─────►  calls PREPARE
    .start(function, content) ───────────────────►  forks  ─────────►  function(connection, content)
    run.receive(), run.send()  ◄────────────────────────────────────►  connection
    exit status                ◄────────────────◄────────────────────  ends

The base has imported what is the same for all templates, such as torch, and none of the user's
files. A process lets the base live that it has used last. Parents on one machine that agree
on a name have the same base, and those of them that prepare alike the same template: their runs
share its memory.

Nothing survives its parent. The kernel kills a template when its base dies, and a run when its
template dies, each with its process group. A base ends the templates, and a template the run, of
parents that are gone, and a base ends when all are.

Where a fork is not safe, each run gets a process that prepares anew. Python's
`multiprocessing.forkserver` is the model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from tunediff.core import environment
from tunediff.core.errors import Failure
from tunediff.core.template_server import LONGEST, end_group, is_same_user

_READ_LATER = ("CUDA_", "PYTEST_", "RAY_", "TUNEDIFF_")
"""Beginnings of environment variables that no import reads: a template has its parent's."""
_PACKAGE = str(Path(__file__).resolve().parents[2])
_PROCESS = uuid.uuid4().hex
_turn = threading.Lock()
_held = dict[str, socket.socket]()
"""The base that this process has used last, by name: a connection that lets it live."""


class TemplateError(RuntimeError):
    """A template could not be prepared or has died, or a run has died or raised an error."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class TemplateRun:
    """A run of a template, as the parent sees it."""

    def __init__(self, template: Template, connection: Connection, pid: int) -> None:
        self._template, self._connection, self.pid = template, connection, pid
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message, from any thread; dropped if the run has ended."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.send(message)

    @property
    def sources(self) -> tuple[Any, ...]:
        """Return what is ready for `multiprocessing.connection.wait` once `receive` returns."""
        return (self._connection, self._template.control)

    def receive(self, within_s: float | None = None) -> Any:
        """Return the next message of the run; None once it has returned.

        Raises `TemplateError` if it was killed or has raised an error, and TimeoutError.
        """
        ready = multiprocessing.connection.wait(self.sources, within_s)
        if not ready:
            raise TimeoutError(f"no answer within {within_s:.0f} s")
        if self._connection in ready:
            with contextlib.suppress(EOFError, OSError):
                message = self._connection.recv()
                if isinstance(message, Failure):
                    self._template.wait_for_run()
                    raise TemplateError(message)
                return message
        status = self._template.wait_for_run()
        self._connection.close()
        if status:
            raise TemplateError(_ended("the process of the run", status))
        return None


class Template:
    """A template process, as its parent sees it: begins to prepare at once; a context manager."""

    def __init__(
        self, prepare: Callable[[Any], str | None] | None = None, options: Any = None,
        output: IO[bytes] | None = None, shared: str = "",
        variables: Mapping[str, str] | None = None,
        base: Callable[[Any], object] | None = None,
    ) -> None:  # fmt: skip
        """`prepare`: a function of a module, called with `options` before the first fork; it may
        return why a fork is not safe. `output`: for stdout and stderr of all runs; without it, both
        are this process's stderr. `shared`: name under which processes of this machine share it, if
        they prepare alike, with the `sys.path` and environment of the first of them. `variables`:
        of that environment, unless it has them. `base`: a function of a module, with which the base
        imports what templates need."""
        self._asked = pickle.dumps((prepare, options))
        self._streams = [2 if output is None else output.fileno()] * 2
        self._shared, self._base, self._variables = shared, base, dict(variables or {})
        self.unsafe = ""
        """Why each run gets a process that prepares anew; '' if runs are forked."""
        self._launch()

    def _launch(self) -> None:
        self._ready, self._run_pid, self._is_free = False, 0, not self._shared
        given = self._variables | _environment()
        self.control = _connected(self._shared, self._base, given)
        hello = {"prepare": self._asked, "path": sys.path, "environment": given}
        hello |= {"folder": _folder(), "cores": os.sched_getaffinity(0)}
        self._tell(self._asked if self._shared else b"", hello, self._streams)

    def _tell(self, about: str | bytes, what: Any, descriptors: Sequence[int]) -> None:
        with contextlib.suppress(ConnectionError):  # it has died, as the first reply says
            socket.send_fds(self.control, [pickle.dumps((about, what))], descriptors)

    def ready(self, within_s: float | None = None) -> None:
        """Wait until the template is prepared. Raises `TemplateError` if it fails or dies, and
        TimeoutError."""
        if self._ready:
            return
        if not multiprocessing.connection.wait([self.control], within_s):
            raise TimeoutError(f"not prepared within {within_s:.0f} s")
        facts = self._reply()
        if "failed" in facts:
            self.close()
            raise TemplateError(facts["failed"])
        self.unsafe, self._ready = facts["unsafe"], True

    def start(
        self, function: Callable[[Connection, Any], object], content: Any,
        before: tuple[Callable[[Any], object], Any] | None = None,
        variables: Mapping[str, str] | None = None, within_s: float | None = None,
        streams: Sequence[int] = (),
    ) -> TemplateRun:  # fmt: skip
        """Start a run that calls `function(connection, content)`; one at a time.

        `before`: a function that the template calls before it forks, and its argument.
        `variables`: of the run's environment. `streams`: descriptors of its stdout and stderr,
        instead of the template's. Raises `TemplateError`, and TimeoutError for a template that is
        not prepared in time.
        """
        self.ready(within_s)
        if self.unsafe and not self._is_free:  # each run prepares anew
            self.close()
            self._shared = ""
            self._launch()
            self.ready(within_s)
        ours, theirs = socket.socketpair()
        with theirs:
            self._tell("run", pickle.dumps(before), [theirs.fileno(), *(streams or self._streams)])
        self._run_pid, self._is_free = self._reply(), False
        run = TemplateRun(self, Connection(ours.detach()), self._run_pid)
        given = _environment() | dict(variables or {})
        run.send((given, _folder(), pickle.dumps((function, content))))
        return run

    def wait_for_run(self) -> int:
        """Return the exit status of the run that was started last."""
        status: int = self._reply()
        self._run_pid = 0
        return status

    def terminate_run(self) -> None:
        """Send SIGTERM to the run that was started last."""
        if self._run_pid:
            with contextlib.suppress(OSError):
                os.kill(self._run_pid, signal.SIGTERM)

    def kill_run(self) -> None:
        """End the run at once, in any thread; a template that does not get ready ends instead,
        unless others wait for it."""
        if self._run_pid:
            end_group(self._run_pid)
        elif not self._ready:
            self._hang_up()

    @property
    def alive(self) -> bool:
        """Return whether it can start a run."""
        with contextlib.suppress(OSError, ValueError, TemplateError):  # it was closed
            if not self._ready and multiprocessing.connection.wait([self.control], 0):
                self.ready()
            return bool(self.unsafe) or not multiprocessing.connection.wait([self.control], 0)
        return False

    def close(self) -> None:
        """End the template, unless others share it, its run, and what that has started."""
        self.kill_run()
        self._hang_up()
        self.control.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            self.control.shutdown(socket.SHUT_RDWR)  # also for a thread that waits for a reply

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reply(self) -> Any:
        """Return what the template or the base says next. Raises `TemplateError` if it has died."""
        packet = b""
        with contextlib.suppress(OSError):  # it has died, or was closed
            packet = self.control.recv(LONGEST)
        about, what = pickle.loads(packet) if packet else ("", 0)
        if not about or (about == "template" and not (self.unsafe and self._run_pid)):
            self._run_pid = 0  # the kernel has ended it with its template
            self._hang_up()
            why = "the template of the run"
            raise TemplateError(_ended(why, what) if about else Failure(f"{why} has died"))
        return what


def _ended(process: str, status: int) -> Failure:
    if status < 0:
        return Failure(f"{process} was killed by {signal.Signals(-status).name}")
    return Failure(f"{process} ended with exit code {status}")


# ---- what a process has of its parent
def _environment() -> dict[str, str]:
    """Return the environment of this process, in which this package is found."""
    paths = os.pathsep.join(filter(None, [_PACKAGE, os.environ.get("PYTHONPATH")]))
    return {**environment.of_user(), "PYTHONPATH": paths}


def _folder() -> str:
    with contextlib.suppress(OSError):  # it may be gone
        return os.getcwd()
    return ""


def rank_variables(ranks: int) -> list[dict[str, str]]:
    """Return the environment of every rank of this machine as torchrun describes it; {} of one
    alone, which a file may take for one of several otherwise."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


# ---- the base
def _connected(
    name: str, prepare: Callable[[Any], object] | None, given: Mapping[str, str]
) -> socket.socket:
    """Return a connection to the base of this name, or of this process and environment."""
    if not name:
        read = {name: text for name, text in given.items() if not name.startswith(_READ_LATER)}
        name = json.dumps([os.getpid(), _PROCESS, repr(prepare), read], sort_keys=True)
    with _turn:
        if name not in _held or multiprocessing.connection.wait([_held[name]], 0):
            while _held:
                _held.popitem()[1].close()
            _held[name] = _connected_to(name, prepare, given)
        return _connected_to(name, prepare, given)


def _connected_to(
    name: str, prepare: Callable[[Any], object] | None, given: Mapping[str, str]
) -> socket.socket:
    """Return a connection to the base of this name, which is started if there is none."""
    digest = hashlib.sha256(json.dumps([name, os.getuid()]).encode()).hexdigest()
    address = f"\0tunediff-{digest[:32]}"  # an abstract one leaves no file behind
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if control.connect_ex(address):
        program = "import sys; from tunediff.core.template_server import main; main(*sys.argv[1:])"
        asked = pickle.dumps(prepare).hex()
        # Without the folders of the user's files
        words = [sys.executable, "-P", "-c", program, address[1:], asked]
        variables = {**given, "PYTHONPATH": _PACKAGE}
        subprocess.run(words, stdin=subprocess.DEVNULL, stdout=2, env=variables, check=False)
        control.connect(address)
    if not is_same_user(control):
        raise TemplateError(Failure("another user has the address of the template"))
    return control


# ---- one answer
def ask(
    function: Callable[[Connection, Any], object], content: Any, *, within_s: float, ranks: int = 1,
    prepare: Callable[[Any], str | None] | None = None, options: Any = None,
    output: IO[bytes] | None = None, base: Callable[[Any], object] | None = None,
) -> Any:  # fmt: skip
    """Return the first message of `function(connection, content)`, called in a process for each
    rank, and end the processes.

    Raises TimeoutError, and `TemplateError` if one of them fails or none has a message.
    """
    until = time.monotonic() + within_s
    with contextlib.ExitStack() as stack:
        made = [Template(prepare, options, output, base=base) for _ in range(ranks)]
        for template in made:
            stack.enter_context(template)
        runs = [
            template.start(function, content, None, variables, max(0.0, until - time.monotonic()))
            for template, variables in zip(made, rank_variables(ranks), strict=True)
        ]
        while runs:
            sources = {source: run for run in runs for source in run.sources}
            ready = multiprocessing.connection.wait(sources, max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer within {within_s:.0f} s")
            run = sources[ready[0]]
            if (message := run.receive()) is not None:
                return message
            runs.remove(run)
    raise TemplateError(Failure("it has ended without an answer"))
