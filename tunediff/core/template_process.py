"""Start the process of a template."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Protocol

from tunediff.core import environment


class TemplateProcess(Protocol):
    """The process of a template: a `subprocess.Popen`, or one that was forked from a base."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...


Base = Callable[[IO[bytes] | None, Mapping[str, str]], tuple[TemplateProcess, socket.socket] | None]
"""Forks a template, for its output and environment; also returns the connection to it."""


def spawned(
    output: IO[bytes] | None, environment: Mapping[str, str], address: str
) -> tuple[TemplateProcess, socket.socket]:
    """Start a template that imports everything anew; return it and the connection to it.
    `address`: of a shared one, or ''."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tunediff.core.template_server", str(theirs.fileno()),
             str(os.getpid()), address.removeprefix("\0")],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            stdout=output or 2, stderr=output or 2, env=environment,
            start_new_session=True,  # Ctrl-C is for the parent
        )  # fmt: skip
    return process, ours


def environment_of_templates() -> dict[str, str]:
    """Return the environment of this process, in which this package is found."""
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return {**environment.of_user(), "PYTHONPATH": paths}
