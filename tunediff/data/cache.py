"""Files that can always be made again: never the reason for a failed run."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tunediff.files import write_atomically

log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """`$TUNEDIFF_CACHE`, or `~/.cache/tunediff`; absolute, and not necessarily there yet."""
    return Path(os.environ.get("TUNEDIFF_CACHE") or "~/.cache/tunediff").expanduser().absolute()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process of this machine at a time make `path`; the others wait, then find it made.

    The lock is a file beside `path` and falls with the process that holds it. Where no such file can be written
    (a folder without write permission, a file system without locks), every process works for itself.
    """
    handle: BinaryIO | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open(path.with_name(path.name + ".lock"), "wb")  # noqa: SIM115 - open while the caller works
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        log.debug("%s: no lock: %s", path, error)
    try:
        yield
    finally:
        if handle is not None:
            handle.close()


def keep(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """`write_atomically` for a cache: a full or read-only disk costs a warning, not the run."""
    try:
        write_atomically(path, write)
    except OSError as error:
        log.warning("%s: not cached, it will be made again next time: %s", path, error)
