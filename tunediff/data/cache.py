"""Cache files that can always be made again; a failure to read or write one never stops a run."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from tunediff.core.files import write_atomically

log = logging.getLogger(__name__)

_T = TypeVar("_T")


def cache_dir() -> Path:
    """Return `$TUNEDIFF_CACHE`, or `~/.cache/tunediff`; absolute, and it may not exist yet."""
    chosen = os.environ.get("TUNEDIFF_CACHE") or "~/.cache/tunediff"
    return Path(chosen).expanduser().absolute()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process of this machine at a time make `path`; the others wait until it exists.

    The lock is a file in the same folder, released when the process that holds it ends. Where it
    cannot be written or locked, every process works for itself.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(open(path.with_name(path.name + ".lock"), "wb"))
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            log.debug("%s: no lock: %s", path, error)
        yield


def once(
    path: Path,
    read: Callable[[Path], _T],
    compute: Callable[[], _T],
    write: Callable[[BinaryIO, _T], object],
) -> _T:
    """Return what `read` reads from `path`, or else what `compute` returns, written to it.

    A damaged file, a full or a read-only disk causes a warning, no error.
    """
    with locked(path):
        try:
            return read(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except Exception as error:  # readers of damaged archives raise nearly anything
            log.warning("%s: cannot be read and is made again: %s", path, error)
        result = compute()
        try:
            write_atomically(path, lambda file: write(file, result))
        except OSError as error:
            log.warning("%s: not cached, it will be made again next time: %s", path, error)
        return result
