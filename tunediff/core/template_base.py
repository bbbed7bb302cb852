"""Fork templates from a base: a process that has imported what is the same for all of them.

A process has one base at most, from its first template on. A base is a shared template without
another parent; each template is one of its runs, so that it ends with the base, and when its
parent ends or hangs up. Its file is imported after the fork: what the base has imported is of the
environment alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing.connection
import os
import signal
import site
import socket
import sys
import sysconfig
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from tunediff.core.template import Template, TemplateError
from tunediff.core.template_process import Base
from tunediff.core.template_server import serve_forked

_READ_LATER = ("CUDA_", "PYTEST_", "RAY_", "TUNEDIFF_")
"""Beginnings of environment variables that no import reads: a template has its parent's."""
_PROCESS = uuid.uuid4().hex
_turn = threading.Lock()
_held: tuple[str, Template] | None = None
"""Name of this process's base, and a connection that lets it live."""


class _ForkedTemplate:
    """A template that was forked from the base, with the methods of `subprocess.Popen`."""

    def __init__(self, base: Template, output: IO[bytes] | None, environment: Mapping[str, str]):
        self._base, self._turn = base, threading.Lock()
        self._status: int | None = None
        streams = [2 if output is None else output.fileno()] * 2
        cores = sorted(os.sched_getaffinity(0))
        run = base.start(serve_forked, cores, variables=environment, streams=streams)
        self.pid, self.control = run.pid, run.control()

    def poll(self) -> int | None:
        """Return its exit status, None while it lives."""
        with self._turn:
            if self._status is None and multiprocessing.connection.wait([self._base.control], 0):
                self._end()
            return self._status

    def wait(self) -> int:
        """Return its exit status once it has ended."""
        with self._turn:
            return self._end() if self._status is None else self._status

    def kill(self) -> None:
        """End it at once, in any thread."""
        if self._status is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def _end(self) -> int:
        try:
            status = self._base.wait_for_run()
        except TemplateError:  # it has died with the base
            status = -signal.SIGKILL
        self._status = status
        self._base.hang_up()
        return status


def base(prepare: Callable[[Any], str | None]) -> Base:
    """Return what forks templates from this process's base. `prepare`: a function of a module,
    which the base calls before the first fork; it may return why a fork is not safe."""
    return functools.partial(_forked, prepare)


def _forked(
    prepare: Callable[[Any], str | None], output: IO[bytes] | None, environment: Mapping[str, str]
) -> tuple[_ForkedTemplate, socket.socket] | None:
    """Return a template that was forked from this process's base, and the connection to it; the
    base is started if there is none of this environment. None: it cannot be prepared or forked."""
    global _held
    read = {name: text for name, text in environment.items() if not name.startswith(_READ_LATER)}
    name = json.dumps([os.getpid(), _PROCESS, read], sort_keys=True)
    with _turn, contextlib.suppress(TemplateError):
        if _held is None or _held[0] != name or not _held[1].alive:
            if _held is not None:
                _held[1].close()
            _held = name, _connected(prepare, name)
            _held[1].ready()
        if not _held[1].unsafe:
            template = _ForkedTemplate(_connected(prepare, name), output, environment)
            return template, template.control
    return None


def _connected(prepare: Callable[[Any], str | None], name: str) -> Template:
    return Template(prepare, shared=name, path=_path_of_environment())


def _path_of_environment() -> list[str]:
    """Return this package's folder and those of `sys.path` that belong to the environment, not to
    the user's files."""
    paths = sysconfig.get_paths()
    of_environment = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    of_environment |= {*site.getsitepackages(), site.getusersitepackages()}
    inside = (f"{paths['stdlib']}{os.sep}", f"{paths['platstdlib']}{os.sep}")
    folders = [path for path in sys.path if path in of_environment or path.startswith(inside)]
    return [str(Path(__file__).resolve().parents[2]), *folders]
