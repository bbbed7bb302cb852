"""Write files atomically (complete or absent), read them, and find free names for them."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import itertools
import json
import math
import numbers
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tunediff.core.errors import ConfigError, refuse

FORMAT = 1
"""Format of all that is written to be read again (docs/reference/formats.md). It rises when an
older version would misread a file."""
CODE = "workload"
"""Folder with a copy of the user's files, of a search, a training or an export."""
STORAGE = Path("ray_results")
"""Default folder of all searches."""
ADDRESS = ".address"
"""File in a local storage folder that names the address of its copy, such as `s3://bucket/x`."""


def check_format(value: Any, where: str) -> None:
    """Refuse a file of a newer format, or whose format is no number. Raises `ConfigError`."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    newer = "; a newer version of tunediff has written it" if is_number and value > FORMAT else ""
    allowed = is_number and 1 <= value <= FORMAT
    refuse(not allowed, f"{where}: {value!r} is not allowed; allowed: 1 to {FORMAT}{newer}")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file of the folder; {}: there is none. Raises `ConfigError` for
    one that is damaged."""
    file = folder / name
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{file}: is damaged: {error}") from None


@contextlib.contextmanager
def naming_file(path: str | Path) -> Iterator[None]:
    """Give an `OSError` from inside the name of this file if it has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_atomically(
    path: Path, write: Callable[[BinaryIO], object], durable: bool = False
) -> None:
    """Call `write` with a temporary file in the folder of `path`, then move that file to `path`.

    After a kill at any moment, `path` has its complete old or its complete new content. `durable`:
    wait until the disk has the data. Raises `OSError` for any error of the disk, even if `write`
    turns it into another error; the old file then stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    # Not tempfile: it ignores the umask and makes its files readable by this user only.
    try:
        with naming_file(path), open(temporary, "xb") as file:
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        behind: BaseException | None = error
        while behind is not None:  # a writer may hide an error of the disk behind one of its own
            if isinstance(behind, OSError) and behind.filename in (None, str(path)):
                behind.filename = str(path)
                raise behind from (None if behind is error else error)
            behind = behind.__cause__ or behind.__context__
        raise


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text with `write_atomically`."""
    write_atomically(path, lambda file: file.write(text.encode()))


def write_csv(
    path: Path, columns: Iterable[str], rows: Iterable[Iterable[object]], digits: int | None = None
) -> None:
    """Write a table with `write_atomically`.

    None and NaN become empty cells. `digits`: significant ones of floats; None: all.
    """

    def cell(value: object) -> object:
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return ""
        is_real = isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)
        return f"{value:.{digits}g}" if is_real and digits is not None else value

    csv.writer(table := io.StringIO(), lineterminator="\n").writerows(
        map(cell, row) for row in (columns, *rows)
    )
    write_atomically(path, lambda file: file.write(table.getvalue().encode("utf-8", "replace")))


def study_url(path: Path) -> str:
    """Return the URL of an Optuna study in a file; `%` and `?` in its path are quoted."""
    return f"sqlite:///{path}".replace("%", "%25").replace("?", "%3F")


def plain(name: str) -> str:
    """Return a name that Ray accepts for runs and metrics: ASCII, at most 60 characters."""
    return re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)[:60]


def numbered(folder: Path, stem: str, suffix: str = "") -> Iterator[Path]:
    """Yield the path of `stem` and `suffix`, then with -2, -3, …: the caller takes a free one."""
    yield folder / f"{stem}{suffix}"
    yield from (folder / f"{stem}-{number}{suffix}" for number in itertools.count(2))


def write_numbered(path: Path, text: str) -> Path:
    """Write UTF-8 text under this name, or with -2, -3, …; return the name. Raises `OSError`."""
    for name in numbered(path.parent, path.stem, path.suffix):
        with contextlib.suppress(FileExistsError), open(name, "x", encoding="utf-8") as file:
            file.write(text)
            return name
    raise AssertionError("a number is always free")


def address_of(storage: Path) -> str | None:
    """Return the address of a storage folder whose copy is at one; None for any other folder."""
    with contextlib.suppress(OSError):
        return (storage / ADDRESS).read_text()
    return None
