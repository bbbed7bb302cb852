"""Refuse bad options before work begins, in the form `KEY: VALUE is not allowed; allowed: …`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunediff.core import text
from tunediff.core.errors import ConfigError

MAX_NAME_BYTES = 200
"""Of a folder's name, of which names of files are made; file systems take 255 bytes."""


def allow(fits: bool, key: str, value: Any, allowed: str) -> None:
    """Refuse the value of an option or a knob unless it fits. Raises `ConfigError`."""
    if not fits:
        quoted = text.truncate(repr(str(value) if isinstance(value, Path) else value), 60)
        raise ConfigError(f"{key}: {quoted} is not allowed; allowed: {allowed}")


def check_name(name: str) -> None:
    """Refuse a name that is no plain folder name or looks like an option. Raises `ConfigError`."""
    plain = name.isprintable() and not set(name) & set("/\\") and name[:1] not in ("", ".", "-")
    allowed = (
        f"a plain folder name of at most {MAX_NAME_BYTES} bytes, without / and \\, that begins"
        " with neither . nor -"
    )
    allow(plain and len(os.fsencode(name)) <= MAX_NAME_BYTES, "--name", name, allowed)


def timed_name(stem: str) -> str:
    """Return a name with this millisecond, as `digits-20261128-133439-512`."""
    now = time.time()
    second = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return f"{stem}-{second}-{int(now % 1 * 1000):03d}"


def check_new(folder: Path, resumes: str = "") -> None:
    """Refuse a folder that exists; one with this file can be resumed. Raises `ConfigError`."""
    if folder.exists():
        name = folder.name
        resume = f", or --resume {name}" if resumes and (folder / resumes).is_file() else ""
        raise ConfigError(
            f"--name: {name!r} exists in {folder.parent}; choose another name{resume}"
        )


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turn an error of the disk inside into a `ConfigError` that names the option."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror}") from None


def check_writable(option: str, path: Path) -> None:
    """Refuse a path whose folder cannot be made or written to. Raises `ConfigError`."""
    with writing(option, path):
        path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option}: {path} cannot be written: no permission in {path.parent}")
