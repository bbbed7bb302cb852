"""The lock of a search, comparison or training, which one process at a time may run."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import psutil

from tunediff.core import disk
from tunediff.core.errors import ConfigError

LOCK = ".lock"
log = logging.getLogger(__name__)


class Runner(NamedTuple):
    """The process that runs a search."""

    host: str
    pid: int
    created: float
    """Unix time of its start: another process may get its number later."""


@contextlib.contextmanager
def exclusive_lock(
    folder: Path, option: str = "--storage", busy: str | None = None
) -> Iterator[None]:
    """Hold the lock of what runs in `folder`; it ends with the process.

    `option`: the one that names the folder, for messages; `busy`: what another process does there,
    by default that it runs a search. Where the file system has no locks, a warning is logged.
    Raises `ConfigError` if another process has the lock.
    """
    if (fault := disk.unwritable(folder)) is not None:
        raise ConfigError(f"{option}: {folder} cannot be written: {fault.strerror}")
    with open(folder / LOCK, "a+") as lock:
        try:
            _lock(lock, folder, busy)
        except OSError as error:
            why = f"no file can be locked in {folder.parent} ({error.strerror})"
            log.warning(
                "%s: %s: nothing prevents that two processes run %s at once",
                option,
                why,
                folder.name,
            )
        lock.truncate(0)
        lock.write(identity(os.getpid()))
        lock.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the disk may be gone
                lock.truncate(0)
            # A forked process that lives on has the open file, and would keep the lock.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


def check_free(folder: Path) -> None:
    """Raise the `ConfigError` of `exclusive_lock` if another process has the lock."""
    with contextlib.suppress(OSError), open(folder / LOCK, "r+") as lock:  # or nobody has begun
        _lock(lock, folder, None)


def _lock(lock: TextIO, folder: Path, busy: str | None) -> None:
    """Lock an open file. Raises `ConfigError` if it is locked, `OSError` if it cannot be."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        busy = busy or f"--resume: {folder.name} is running in another process"
        raise ConfigError(f"{busy}; wait for it, or stop it") from None


def runner(folder: Path) -> Runner | None:
    """Return who runs what is in `folder`, or None. Dead processes elsewhere go unnoticed.

    Takes no lock, not even for a moment: the process that wants it would end.
    """
    return alive(folder / LOCK)


def identity(pid: int) -> str:
    """Return what `alive` reads of a process of this machine. Raises `psutil.NoSuchProcess`."""
    return f"{socket.gethostname()} {pid} {psutil.Process(pid).create_time()}"


def alive(file: Path) -> Runner | None:
    """Return the process that a file names with its `identity`; None: it has ended, or no file."""
    try:
        host, pid, created = file.read_text().split()
        holder = Runner(host, int(pid), float(created))
    except (OSError, ValueError):  # it has not begun, or has ended
        return None
    if host != socket.gethostname():
        return holder
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(holder.pid)
        is_same = abs(process.create_time() - holder.created) < 1.0
        if is_same and process.status() != psutil.STATUS_ZOMBIE:
            return holder
    return None
