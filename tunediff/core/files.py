"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO


class _DiskFile(io.BufferedWriter):
    """A file that remembers the first error of the disk: a writer may raise another one instead of it."""

    fault: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.fault = self.fault or error
            raise


def write_atomically(path: Path, write: Callable[[BinaryIO], object], durable: bool = False) -> None:
    """Give `write` a temporary file in the folder of `path`, then move that file into place: a kill leaves the old one
    or the new one, whole. `durable`: on disk before it returns. Raises `OSError` for any error of the disk, even where
    `write` turns it into another one; the old file then stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    # Not tempfile: its files are private to the user, whatever the umask allows.
    file = _DiskFile(io.FileIO(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb"))
    try:
        with file:
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if file.fault is not None and isinstance(error, Exception):
            raise file.fault from (None if error is file.fault else error)
        raise


def write_text(path: Path, text: str) -> None:
    """`write_atomically` for UTF-8 text."""
    write_atomically(path, lambda file: file.write(text.encode()))


def has_locks(folder: Path) -> bool:
    """Return whether the file system of this folder can lock files; NFS and Lustre may be mounted without."""
    try:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed below
    except OSError:  # where nothing can be written there is nothing to lock
        return True
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def home() -> Path | None:
    """Return the user's home folder; None where there is none, or where nothing can be written."""
    try:
        folder = Path.home()
        existing = next(one for one in (folder, *folder.parents) if one.is_dir())
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"0")  # an exhausted quota allows the file, but nothing in it
            file.flush()
    except (OSError, RuntimeError):  # no $HOME, and no entry of this user in passwd
        return None
    return folder


def private_temporary() -> Path:
    """Return a folder of this user's own in the temporary folder; it is made there."""
    folder = Path(tempfile.gettempdir()) / f"tunediff-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():  # put there by somebody else
        return Path(tempfile.mkdtemp(prefix="tunediff-"))
    return folder


def plain(name: str) -> str:
    """A name as Ray carries it: its names of runs and its metrics take ASCII only."""
    return re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)[:60]


def numbered(folder: Path, stem: str, suffix: str = "") -> Iterator[Path]:
    """The path, and with -2, -3, … for as long as its name is taken."""
    yield folder / f"{stem}{suffix}"
    yield from (folder / f"{stem}-{number}{suffix}" for number in itertools.count(2))
