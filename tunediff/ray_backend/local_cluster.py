"""A Ray cluster on this machine for one search: its start, and what it would leave."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tunediff.core.files import private_temporary
from tunediff.ray_backend import remains

KEEP = "TUNEDIFF_KEEP_RAY"
"""Set in the environment, Ray's own logs stay after a search that ended in order."""
START_S = 120.0
"""Seconds for Ray's processes to start; Ray's 30 s are too few on busy cores."""
_TOKEN, _TOKEN_FILE, _MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"
_files: list[Path] = []
"""The file with the random token of the cluster that runs, if it has one."""


@contextlib.contextmanager
def random_token() -> Iterator[None]:
    """Give the cluster that starts inside a random token, in a file for its user alone.

    Ray's token is for all clusters of a user, in a file that others may read. A user's stays.
    """
    if not _asks_for_token() or os.environ.get(_TOKEN) or os.environ.get(_TOKEN_FILE):
        yield
        return
    token, file = secrets.token_hex(32), private_temporary() / f"ray-token-{os.getpid()}"
    with open(os.open(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as output:
        output.write(token)
    os.environ[_TOKEN] = token
    _files.append(file)
    _forget_token()
    try:
        yield
    finally:
        os.environ.pop(_TOKEN, None)
        file.unlink(missing_ok=True)
        _files.remove(file)
        _forget_token()


def _forget_token() -> None:
    """Let Ray read the token again, which it keeps once it was read in this process."""
    from ray._private.authentication import authentication_token_setup as setup

    setup.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def longer_start() -> Iterator[None]:
    """Let a `ray.init` inside wait `START_S` for the processes that it starts.

    Ray has no setting for that: its 30 s stand in the middle of a function, which asks `get_node`
    whether they are up. A Ray without this function keeps its own limit.
    """
    from ray._private import services

    get_node, deadline = getattr(services, "get_node", None), time.monotonic() + START_S
    if get_node is None:
        yield
        return

    def wait_for_node(*args: Any) -> Any:
        while True:
            try:
                return get_node(*args)
            except RuntimeError:  # it is not there yet
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.1)

    services.get_node = wait_for_node
    try:
        yield
    finally:
        services.get_node = get_node


def dashboard(url: str, address: str | None = None) -> str:
    """Return the line that says where Ray's pages are, and how to open them.

    `address`: of an existing cluster; who reaches its pages is its own matter.
    """
    if address is not None:
        return f"dashboard http://{url} (of the cluster at {address})"
    return (
        f"dashboard http://{url} (loopback; Ray's other ports: all interfaces;"
        f" {_described_token()})"
    )


def _described_token() -> str:
    """Return in words where the token is that Ray asks for."""
    if not _asks_for_token():
        return "no token"
    if _files:
        return f"token: cat {_files[-1]}"
    named = next((name for name in (_TOKEN, _TOKEN_FILE) if os.environ.get(name)), None)
    return f"token: {named}"


@contextlib.contextmanager
def no_remains() -> Iterator[Callable[[Any], None]]:
    """Let no process of the cluster outlive this one, also after `kill -9`; see `remains`.

    Yields a function that takes Ray's context once the cluster has started.
    """
    mark = secrets.token_hex(16)
    command = [sys.executable, "-I", "-S", remains.__file__, mark, str(os.getpid())]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def write(line: str) -> None:
        with contextlib.suppress(OSError):  # the watcher is gone: Ray's own ways must do
            assert watcher.stdin is not None
            watcher.stdin.write(f"{line}\n".encode())
            watcher.stdin.flush()

    def started(context: Any) -> None:
        os.environ.pop(remains.MARK, None)  # what else this process starts may outlive Ray
        if (folder := _session_of(context)) is not None:
            write(os.path.realpath(folder))

    os.environ[remains.MARK] = mark
    try:
        yield started
    finally:
        os.environ.pop(remains.MARK, None)
        write(remains.ENDED)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            watcher.communicate(timeout=remains.LIMIT_S)


def _session_of(context: Any) -> str | None:
    """Return the folder of logs and sockets of the cluster that `ray.init` started."""
    folder: str | None = (getattr(context, "address_info", None) or {}).get("session_dir")
    return folder


def remove_session(context: Any) -> None:
    """Delete the logs and sockets of `ray.init`'s cluster, unless `KEEP` is set.

    Ray never deletes it, and refuses work once its disk is 95 % full.
    """
    folder = _session_of(context)
    if folder is None or os.environ.get(KEEP):
        return
    session = Path(folder)
    shutil.rmtree(session, ignore_errors=True)
    for link in session.parent.glob("*"):  # such as session_latest
        if link.is_symlink() and Path(os.readlink(link)).is_relative_to(session):
            link.unlink(missing_ok=True)


def _asks_for_token() -> bool:
    return os.environ.get(_MODE, "token").lower() == "token"
