"""The lock of a search, comparison or training, which one process at a time may run."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import psutil

from tunediff.core import disk
from tunediff.core.errors import ConfigError

LOCK = ".lock"
log = logging.getLogger(__name__)


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
        lock.write(f"{socket.gethostname()} {os.getpid()} {psutil.Process().create_time()}")
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


def is_running(folder: Path) -> bool:
    """Return whether a process runs what is in `folder`. Dead ones elsewhere go unnoticed.

    Takes no lock, not even for a moment: the process that wants it would end.
    """
    # none of them: it has not begun, or has ended
    with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
        host, pid, created = (folder / LOCK).read_text().split()
        if host != socket.gethostname():
            return True
        process = psutil.Process(int(pid))
        is_same = abs(process.create_time() - float(created)) < 1.0  # its number may come again
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    return False
