"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, write: Callable[[BinaryIO], object], durable: bool = False) -> None:
    """Give `write` a temporary file in the folder of `path`, then move that file into place: a kill leaves the old one
    or the new one, whole. `durable`: on disk before it returns. Raises `OSError`; the old file then stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp gives 0600, but others may read results and share a cache
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_text(path: Path, text: str) -> None:
    """`write_atomically` for UTF-8 text."""
    write_atomically(path, lambda file: file.write(text.encode()))


def plain(name: str) -> str:
    """A name as Ray carries it: its names of runs and its metrics take ASCII only."""
    return re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)[:60]


def numbered(folder: Path, stem: str, suffix: str = "") -> Iterator[Path]:
    """The path, and with -2, -3, … for as long as its name is taken."""
    yield folder / f"{stem}{suffix}"
    yield from (folder / f"{stem}-{number}{suffix}" for number in itertools.count(2))
