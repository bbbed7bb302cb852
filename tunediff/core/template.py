"""Run functions in processes that are forked from a template.

A template is a process that has imported what its runs need. A run is forked from it, so that it
starts in a fraction of a second and what it does to its process ends with it:

    parent                            template                     run
    Template(PREPARE, options) ────►  calls PREPARE(options)
    .start("module:function") ─────►  forks  ───────────────────►  function(connection, content)
    run.receive(), run.send()  ◄────────────────────────────────►  connection
                               ◄────  exit status  ◄─────────────  ends

Nothing survives its parent: the kernel kills the template when its parent dies, and the run when
its template dies. What a run has started in its process group ends with the run.

Where a fork is not safe, each run gets a process that prepares anew. Python's
`multiprocessing.forkserver` is the model.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import json
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn

_PR_SET_PDEATHSIG = 1
_LONGEST_REQUEST = 65536


class TemplateError(RuntimeError):
    """A template could not be prepared or has died, or a run has died or raised an error."""


@dataclasses.dataclass(frozen=True)
class _Failure:
    """The last message of a run whose function raised an error."""

    reason: str


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent, of this pid, dies; only on Linux.

    It counts the thread that has started this process as the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has died before the call
            os._exit(1)


def _function(name: str) -> Callable[..., Any]:
    """Return the function that `package.module:function` names."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


# ---- the parent's side
class Run:
    """A run of a template, as the parent sees it."""

    def __init__(self, template: Template, connection: Connection) -> None:
        self._template, self._connection = template, connection
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
                if isinstance(message, _Failure):
                    self._template.wait_for_run()
                    raise TemplateError(message.reason)
                return message
        status = self._template.wait_for_run()
        self._connection.close()
        if status:
            raise TemplateError(_described("the process of the run", status))
        return None


class Template:
    """A template process, as its parent sees it: begins to prepare at once; a context manager."""

    def __init__(
        self, prepare: str = "", options: Any = None, output: IO[bytes] | None = None
    ) -> None:
        """`prepare`: `package.module:function`, called with `options` (of JSON) before the first
        fork; it may return why a fork is not safe. `output`: for stdout and stderr of all runs;
        without it, both are this process's stderr."""
        self._prepare, self._options, self._output = prepare, options, output
        self.unsafe = ""
        """Why each run gets a process that prepares anew; '' if runs are forked."""
        self.prepared_s = 0.0
        """Seconds that it took to prepare, once a run has started."""
        self._launch()

    def _launch(self) -> None:
        self.control, theirs = socket.socketpair()
        self._replies = self.control.makefile("rb")
        self._ready, self._run_pid = False, 0
        package = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tunediff.core.template", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                stdout=self._output or 2, stderr=self._output or 2,
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,  # Ctrl-C is for the parent
            )  # fmt: skip
        hello = {"prepare": self._prepare, "options": self._options, "path": sys.path}
        with contextlib.suppress(OSError):  # it has died, as the first reply says
            self.control.sendall(_line(hello))

    def ready(self, within_s: float | None = None) -> None:
        """Wait until the template is prepared. Raises `TemplateError` if it fails or dies, and
        TimeoutError."""
        if self._ready:
            return
        if not multiprocessing.connection.wait([self.control], within_s):
            raise TimeoutError(f"not prepared within {within_s:.0f} s")
        reply = self._reply()
        if "failed" in reply:
            self.close()
            raise TemplateError(reply["failed"])
        self.unsafe, self.prepared_s, self._ready = reply["unsafe"], reply["seconds"], True

    def start(
        self, function: str, content: Any, before: str = "",
        variables: Mapping[str, str] | None = None, within_s: float | None = None,
    ) -> Run:  # fmt: skip
        """Start a run that calls `function(connection, content)`; one at a time.

        `before`: a function without arguments that the template calls before it forks. `variables`:
        of the run's environment. Raises `TemplateError`, and TimeoutError for a template that is
        not prepared in time.
        """
        if self.unsafe and self._process.poll() is not None:  # it was used for a run
            self.close()
            self._launch()
        self.ready(within_s)
        ours, theirs = socket.socketpair()
        facts = {"function": function, "before": before, "variables": dict(variables or {})}
        request = _line(facts)
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self.control, [request], [theirs.fileno()])
        if not self.unsafe:
            self._run_pid = self._reply()["pid"]
        run = Run(self, Connection(ours.detach()))
        run.send(content)
        return run

    def wait_for_run(self) -> int:
        """Return the exit status of the run that was started last."""
        if self.unsafe:
            status = self._process.wait()
            self._kill_groups()
        else:
            status = self._reply()["status"]
        self._run_pid = 0
        return status

    def kill_run(self) -> None:
        """End the run at once, in any thread; a template that does not get ready ends instead."""
        if self.unsafe or not self._ready:
            self._process.kill()
        elif self._run_pid:
            with contextlib.suppress(OSError):
                os.killpg(self._run_pid, signal.SIGKILL)

    @property
    def alive(self) -> bool:
        """Return whether it can start a run."""
        return bool(self.unsafe) or self._process.poll() is None

    def close(self) -> None:
        """End the template, its run, and what that has started."""
        self._process.kill()
        self._process.wait()
        self._kill_groups()
        self._replies.close()
        self.control.close()

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kill_groups(self) -> None:
        for group in filter(None, (self._process.pid, self._run_pid)):
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)

    def _reply(self) -> dict[str, Any]:
        line = b""
        with contextlib.suppress(ConnectionError, ValueError):  # it has died, or was closed
            line = self._replies.readline()
        if not line:
            raise TemplateError(_described("the template of the run", self._process.wait()))
        reply: dict[str, Any] = json.loads(line)
        return reply


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


def ask(
    function: str, content: Any, *, within_s: float, ranks: int = 1, prepare: str = "",
    options: Any = None, output: IO[bytes] | None = None,
) -> Any:  # fmt: skip
    """Return the first message of `function(connection, content)`, called in a process for each
    rank, and end the processes.

    Raises TimeoutError, and `TemplateError` if one of them fails or none has a message.
    """
    until = time.monotonic() + within_s
    with contextlib.ExitStack() as stack:
        made = [Template(prepare, options, output) for _ in range(ranks)]
        for template in made:
            stack.enter_context(template)
        runs = [
            template.start(function, content, "", variables, max(0.0, until - time.monotonic()))
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
    raise TemplateError("it has ended without an answer")


def _described(process: str, status: int) -> str:
    if status < 0:
        return f"{process} was killed by {signal.Signals(-status).name}"
    return f"{process} ended with exit code {status}"


def _line(content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"


# ---- the template's side
def main(descriptor: int, parent: int) -> None:
    """Prepare, then fork a run for each request, until the parent closes its end."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    control = socket.socket(fileno=descriptor)
    with control.makefile("rb") as lines:
        hello = json.loads(lines.readline())
    began = time.monotonic()
    unsafe = _prepared(control, hello)
    control.sendall(_line({"unsafe": unsafe, "seconds": time.monotonic() - began}))
    gc.collect()
    gc.freeze()  # a collection in a run does not copy the template's pages
    while True:
        line, descriptors, _, _ = socket.recv_fds(control, _LONGEST_REQUEST, 1)
        if not line:
            return
        request = json.loads(line)
        if request["before"]:
            _function(request["before"])()
        if unsafe:
            _run(descriptors[0], request)
        template = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            end_with_parent(template)
            os.setsid()
            control.close()
            _run(descriptors[0], request)
        os.close(descriptors[0])
        control.sendall(_line({"pid": pid}))
        control.sendall(_line({"status": _reaped(pid)}))


def _prepared(control: socket.socket, hello: dict[str, Any]) -> str:
    """Prepare as the parent asks for; return why a fork is not safe, or ''."""
    sys.path[:] = hello["path"]
    try:
        prepare = _function(hello["prepare"]) if hello["prepare"] else lambda options: ""
        unsafe = prepare(hello["options"]) or ""
    except BaseException as error:
        traceback.print_exc()
        control.sendall(_line({"failed": _reason(error)}))
        os._exit(1)
    if not unsafe and threading.active_count() > 1:
        names = [thread.name for thread in threading.enumerate()[1:]]
        unsafe = f"it has started threads ({', '.join(names)})"
    return unsafe if sys.platform == "linux" else unsafe or "runs are forked on Linux only"


def _run(descriptor: int, request: Mapping[str, Any]) -> NoReturn:
    """Call the function of a run in this process, then end it at once: a user's threads may hold
    up an orderly exit."""
    connection, status = Connection(descriptor), 1
    try:
        os.environ.update(request["variables"])
        _function(request["function"])(connection, connection.recv())
        status = 0
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(Exception):
            connection.send(_Failure(_reason(error)))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _reaped(pid: int) -> int:
    """Wait for a run, end what is left of its process group, and return its exit status."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)  # the pid is not given to another process yet
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    # By its name: what runs send is of the module that the parent knows, not of `__main__`
    from tunediff.core import template

    template.main(int(sys.argv[1]), int(sys.argv[2]))
