"""A Ray cluster on this machine for one search: what it needs to start, and what it would leave behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunediff.core.files import home

KEEP = "TUNEDIFF_KEEP_RAY"
"""Set in the environment, Ray's own logs stay after a search that ended in order."""
START_S = 120.0
"""Seconds that Ray's processes have to start in. Alone Ray waits 30 s, too few beside other work on all cores."""
_TOKEN, _TOKEN_FILE, _MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"
_made: list[str] = []
"""Tokens that this process made: nobody else knows them."""


def ensure_token() -> None:
    """Put a random token into the environment where Ray could not keep one in the home folder.

    Ray makes `~/.ray/auth_token` before it starts, and fails where that cannot be written.
    """
    if not _asks_for_token() or os.environ.get(_TOKEN) or os.environ.get(_TOKEN_FILE):
        return
    folder = home()
    if folder is None and not _readable_token():
        _made.append(secrets.token_hex(32))
        os.environ[_TOKEN] = _made[-1]


@contextlib.contextmanager
def longer_start() -> Iterator[None]:
    """Let a `ray.init` inside wait `START_S` for the processes that it starts.

    Ray has no setting for that: its 30 s stand in the middle of a function, which asks `get_node` whether they are up.
    A Ray without this function keeps its own limit.
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

    `address`: of a cluster that was there before; who reaches its pages, and with which token, is its own matter.
    """
    if address is not None:
        return f"dashboard http://{url} (of the cluster at {address})"
    if not _asks_for_token():
        token = ""
    elif os.environ.get(_TOKEN) in _made:
        token = f"; it asks for a token: set {_TOKEN} before the search, as the home folder cannot keep one"
    elif os.environ.get(_TOKEN):
        token = f"; token: {_TOKEN}"
    else:
        token = "; token: `ray get-auth-token`"
    return f"dashboard http://{url} (loopback only{token})"


def remove_session(context: Any) -> None:
    """Delete the folder of logs and sockets of the cluster that `ray.init` started, unless `KEEP` is set.

    Ray never deletes it, and refuses work once its disk is 95 % full.
    """
    folder = (getattr(context, "address_info", None) or {}).get("session_dir")
    if folder is None or os.environ.get(KEEP):
        return
    session = Path(folder)
    shutil.rmtree(session, ignore_errors=True)
    for link in session.parent.glob("*"):  # such as session_latest
        if link.is_symlink() and Path(os.readlink(link)).is_relative_to(session):
            link.unlink(missing_ok=True)


def _asks_for_token() -> bool:
    return os.environ.get(_MODE, "token").lower() == "token"


def _readable_token() -> bool:
    try:
        return bool((Path.home() / ".ray" / "auth_token").read_text().strip())
    except (OSError, RuntimeError):
        return False
