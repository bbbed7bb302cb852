"""Run functions in processes that are forked from a template.

A template is a process that has imported what its runs need. A run is forked from it, so that it
starts in a fraction of a second and what it does to its process ends with it:

    parent                            template                     run
    Template(PREPARE, options) ────►  calls PREPARE(options)
    .start(function, content) ─────►  forks  ───────────────────►  function(connection, content)
    run.receive(), run.send()  ◄────────────────────────────────►  connection
                               ◄────  exit status  ◄─────────────  ends

Nothing survives its parent: the kernel kills the template when its parent dies, and the run when
its template dies. What a run has started in its process group ends with the run.

A shared template has several parents on one machine, whose runs share the memory of what it has
prepared. It ends the run of a parent that is gone, and itself when all are.

Where a fork is not safe, each run gets a process that prepares anew. Python's
`multiprocessing.forkserver` is the model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

from tunediff.core.errors import Failure
from tunediff.core.template_process import Base, TemplateProcess, environment_of_templates, spawned
from tunediff.core.template_run import name_of
from tunediff.core.template_server import is_same_user, json_line


class TemplateError(RuntimeError):
    """A template could not be prepared or has died, or a run has died or raised an error."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


# ---- the parent's side
class TemplateRun:
    """A run of a template, as the parent sees it."""

    def __init__(self, template: Template, connection: Connection, pid: int) -> None:
        self._template, self._connection, self.pid = template, connection, pid
        self._sending = threading.Lock()

    def control(self) -> socket.socket:
        """Return its connection as a socket: that of a run which is a template itself."""
        return socket.socket(fileno=os.dup(self._connection.fileno()))

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
        self, prepare: Callable[[Any], str | None] | None = None, options: Any = None, output: IO[bytes] | None = None,
        shared: str = "", path: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None, base: Base | None = None,
    ) -> None:  # fmt: skip
        """`prepare`: a function of a module, called with `options` (of JSON) before the first
        fork; it may return why a fork is not safe. `output`: for stdout and stderr of all runs;
        without it, both are this process's stderr. `shared`: name under which processes of
        this machine share it, if they prepare alike. `path`: its `sys.path`; None: that of this
        process. `variables`: of the environment that it is started with. `base`: forks
        it from a process that has imported what it needs, unless it is shared."""
        self._prepare = name_of(prepare) if prepare is not None else ""
        self._options, self._output = options, output
        self._path, self._variables = path, dict(variables or {})
        self._shared = shared if sys.platform == "linux" else ""
        self._base = base if sys.platform == "linux" and not shared else None
        self.unsafe = ""
        """Why each run gets a process that prepares anew; '' if runs are forked."""
        self.prepared_s = 0.0
        """Seconds that it took to prepare, once a run has started."""
        self._launch()

    def _launch(self) -> None:
        self._ready, self._run_pid = False, 0
        self._process: TemplateProcess | None = None
        hello = {"prepare": self._prepare, "options": self._options}
        hello["path"] = list(sys.path if self._path is None else self._path)
        address = _address(self._shared, hello) if self._shared else ""
        while not (address and self._connect(address)):
            self._start_process(address, hello)
            # Another process may have been first to start the shared one
            if not (address and self._reply().get("taken")):
                break
            self.hang_up()

    def _connect(self, address: str) -> bool:
        """Connect to a shared template, if there is one."""
        self.control = socket.socket(socket.AF_UNIX)
        self._replies = self.control.makefile("rb", 0)  # a second line stays where `wait` sees it
        try:
            self.control.connect(address)
        except OSError:
            self.hang_up()
            return False
        if not is_same_user(self.control):
            raise TemplateError(Failure("another user has the address of the template"))
        return True

    def hang_up(self) -> None:
        """End the connection to its process, and so one that is not shared, and its run."""
        self._replies.close()
        self.control.close()

    def _start_process(self, address: str, hello: Mapping[str, Any]) -> None:
        environment = self._variables | environment_of_templates()
        forked = self._base(self._output, environment) if self._base is not None else None
        self._process, self.control = forked or spawned(self._output, environment, address)
        self._replies = self.control.makefile("rb", 0)
        if address:  # it has forked itself, so that it is nobody's child
            self._process.wait()
            self._process = None
        with contextlib.suppress(OSError):  # it has died, as the first reply says
            self.control.sendall(json_line(hello))

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
            raise TemplateError(Failure(**reply["failed"]))
        self.unsafe, self.prepared_s, self._ready = reply["unsafe"], reply["seconds"], True
        if self.unsafe and self._shared:  # each run prepares anew
            self.hang_up()
            self._shared = ""
            self._launch()
            self.ready(within_s)

    def start(
        self, function: Callable[[Connection, Any], object], content: Any,
        before: tuple[Callable[[Any], object], Any] | None = None,
        variables: Mapping[str, str] | None = None, within_s: float | None = None,
        streams: Sequence[int] = (),
    ) -> TemplateRun:  # fmt: skip
        """Start a run that calls `function(connection, content)`; one at a time.

        `before`: a function that the template calls before it forks, and its argument, of JSON.
        `variables`: of the run's environment. `streams`: descriptors of its stdout and stderr,
        instead of the template's. Raises `TemplateError`, and TimeoutError for a template that is
        not prepared in time.
        """
        if self.unsafe and not self._lives:  # it was used for a run
            self.close()
            self._launch()
        self.ready(within_s)
        ours, theirs = socket.socketpair()
        first = (name_of(before[0]), before[1]) if before is not None else None
        request = json_line({"function": name_of(function), "before": first})
        environment = environment_of_templates() | dict(variables or {})
        if self._shared and not streams:
            streams = [1, 2] if self._output is None else [self._output.fileno()] * 2
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self.control, [request], [theirs.fileno(), *streams])
        if not self.unsafe:
            self._run_pid = self._reply()["pid"]
        run = TemplateRun(self, Connection(ours.detach()), self._run_pid)
        folder = ""
        with contextlib.suppress(OSError):  # it may be gone
            folder = os.getcwd()
        run.send((environment, folder, content))
        return run

    def wait_for_run(self) -> int:
        """Return the exit status of the run that was started last."""
        if self.unsafe:
            assert self._process is not None
            status = self._process.wait()
            self._kill_groups()
        else:
            status = self._reply()["status"]
        self._run_pid = 0
        return status

    def terminate_run(self) -> None:
        """Send SIGTERM to the run that was started last."""
        pid = self._process.pid if self.unsafe and self._process is not None else self._run_pid
        if pid:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)

    def kill_run(self) -> None:
        """End the run at once, in any thread; a template that does not get ready ends instead."""
        if self._process is not None and (self.unsafe or not self._ready):
            self._process.kill()
        elif not self._ready:  # a shared one, which others wait for
            with contextlib.suppress(OSError):
                self.control.shutdown(socket.SHUT_RDWR)
        elif self._run_pid:
            with contextlib.suppress(OSError):
                os.killpg(self._run_pid, signal.SIGKILL)

    @property
    def alive(self) -> bool:
        """Return whether it can start a run."""
        return bool(self.unsafe) or self._lives

    @property
    def _lives(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        with contextlib.suppress(OSError, ValueError):  # it was closed
            ready = multiprocessing.connection.wait([self.control], 0)
            return not ready or bool(self.control.recv(1, socket.MSG_PEEK))
        return False

    def close(self) -> None:
        """End the template, unless it is shared, its run, and what that has started."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._kill_groups()
        self.hang_up()

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kill_groups(self) -> None:
        template = self._process.pid if self._process is not None else 0
        for group in filter(None, (template, self._run_pid)):
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)

    def _reply(self) -> dict[str, Any]:
        line = b""
        with contextlib.suppress(ConnectionError, ValueError):  # it has died, or was closed
            line = self._replies.readline()
        if not line:
            self._kill_groups()  # of a run that the kernel has ended with its template
            if self._process is None:
                raise TemplateError(Failure("the template of the run has died"))
            raise TemplateError(_ended("the template of the run", self._process.wait()))
        reply: dict[str, Any] = json.loads(line)
        return reply


def _ended(process: str, status: int) -> Failure:
    if status < 0:
        return Failure(f"{process} was killed by {signal.Signals(-status).name}")
    return Failure(f"{process} ended with exit code {status}")


def _address(name: str, hello: Mapping[str, Any]) -> str:
    """Return the address of a shared template: an abstract one, which leaves no file behind."""
    digest = hashlib.sha256(json.dumps([name, hello, os.getuid()]).encode()).hexdigest()
    return f"\0tunediff-{digest[:32]}"
