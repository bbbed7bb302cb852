"""Storage at an address such as `s3://bucket/prefix`: a local folder, and its copy.

All work is done in the local folder, whose file `.address` says where its copy is. `push` copies
what has changed here, `pull` fetches what has changed there. `.copied.json` in the folder of a
search says which files are equal, as what.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tunediff.core.environment import install_command
from tunediff.core.errors import ConfigError
from tunediff.core.files import ADDRESS, STORAGE, address_of, plain, write_text

log = logging.getLogger(__name__)

COPIED = ".copied.json"
HEAVY = (".safetensors", ".pt")
"""Endings of the files that are fetched only where they are needed."""
_OF_RAY, _PASSING = ("tune", "train"), ("doing.json",)
"""Folders of a search and names of files that are of no use elsewhere."""
_LATE = ("study.db", "study.db-journal")
"""Files that a search uses while it runs; they follow from journals and are copied last."""
_JOURNAL = "journal.jsonl"
_LAST = (_JOURNAL, "sessions.jsonl")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Extras of this package by protocol."""
_WITH_FOLDERS = ("file", "local", "sftp", "ssh", "smb", "ftp", "hdfs")
"""Protocols where a folder has to be made before a file is put there."""

FileSystem = Any
"""A file system of fsspec, which has no types."""


def local(storage: str | Path) -> Path:
    """Return the folder of a storage: a path itself, or the local folder of an address."""
    address = str(storage).rstrip("/")
    if "://" not in address:
        return Path(storage)
    if urlsplit(address).password is not None:  # folders, logs and files have the address
        raise ConfigError(
            f"--storage: {re.sub('://[^/@]+@', '://…@', address)}: a password is not allowed;"
            " allowed: an address without one, and credentials as the library of the service reads"
            " them"
        )
    digest = hashlib.sha256(address.encode()).hexdigest()[:6]
    folder = STORAGE / f"{plain(address.replace('://', '-').replace('/', '-'))}-{digest}"
    if address_of(folder) != address:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / ADDRESS, address)
    return folder


def storage_and_run(path: Path) -> tuple[Path, Path] | None:
    """Return the storage with an address that `path` is in, and its search or run, or None."""
    inside = path.absolute()
    for run, storage in zip((inside, *inside.parents), inside.parents, strict=False):
        if (storage / ADDRESS).is_file():
            return storage, run
    return None


def connect(address: str) -> tuple[FileSystem, str]:
    """Return file system and path of an address. Raises `ConfigError` without its package."""
    import fsspec  # comes with torch

    protocol = address.partition("://")[0]
    try:
        system, path = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        extra = f"; run: {install_command(_EXTRAS[protocol])}" if protocol in _EXTRAS else ""
        raise ConfigError(f"--storage: {address}: {error}{extra}") from None
    return system, path.rstrip("/")


def check(storage: Path) -> None:
    """Refuse a storage whose address cannot be written now. Raises `ConfigError`."""
    if (address := address_of(storage)) is None:
        return
    system, path = connect(address)
    try:
        make_folder(system, address, path)
        system.put_file(str(storage / ADDRESS), f"{path}/{ADDRESS}")
    except Exception as error:  # every service has its own
        raise ConfigError(f"--storage: {address} cannot be written: {short_error(error)}") from None


def pull(path: Path, heavy: bool = False) -> None:
    """Fetch what a copy of a file or folder has that is missing here, or newer.

    `heavy`: weights and checkpoints as well. Does nothing without an address. Raises `ConfigError`.
    """
    if (place := storage_and_run(path)) is None:
        return
    storage, run = place
    address = str(address_of(storage))
    system, root = connect(address)
    inside = path.absolute().relative_to(storage).as_posix()
    try:
        system.invalidate_cache()
        files = system.find(f"{root}/{inside}", detail=True)
        copied = _Copied(run)
        for name, info in sorted(files.items()):
            file = storage / name.removeprefix(root).strip("/")
            is_heavy = file.name.endswith(HEAVY) and not heavy
            if is_heavy or file.name.startswith(".") or ".." in file.parts:
                continue
            if copied.is_newer_at_address(file, info):
                file.parent.mkdir(parents=True, exist_ok=True)
                partial = file.with_name(f".{file.name}.fetched")
                system.get_file(name, str(partial))
                partial.replace(file)
                copied.note(file, info)
        copied.save()
    except Exception as error:
        raise ConfigError(f"--storage: {address} cannot be read: {short_error(error)}") from None


def push(path: Path, last: bool = True, before_file: Callable[[], object] = lambda: None) -> int:
    """Copy all files of the run that `path` is in that have changed here; return how many.

    `last`: nothing runs in it any more, so that all files are at rest; `before_file`: called before
    each is copied. Raises what the service and `before_file` raise.
    """
    if (place := storage_and_run(path)) is None:
        return 0
    storage, run = place
    address = str(address_of(storage))
    system, root = connect(address)
    copied, count, continued = _Copied(run), 0, set[Path]()
    system.invalidate_cache()

    def target(file: Path) -> str:
        return f"{root}/{file.relative_to(storage).as_posix()}"

    try:
        for file in _files(run, last):
            if copied.is_equal(file):
                continue
            before_file()
            if _put(system, address, file, target(file), copied):
                count += 1
                continued |= {file.parent} if file.name == _JOURNAL else set()
        # What trainings remove: checkpoints at their end, and weights and averages that a resumed
        # one outdates. Weights of a trial that has not continued were removed for their room here,
        # and stay at the address.
        for file in copied.gone(HEAVY):
            if file.suffix == ".pt" or not continued.isdisjoint(file.parents):
                with contextlib.suppress(FileNotFoundError):
                    system.rm_file(target(file))
                copied.forget(file)
    finally:
        copied.save()
    return count


def _put(system: Any, address: str, file: Path, target: str, copied: _Copied) -> bool:
    """Copy a file; return False for an older journal, and a file that is gone meanwhile."""
    if file.suffix == ".jsonl":  # of two journals the longer one counts
        # `exists` is False for every error of a service.
        with contextlib.suppress(FileNotFoundError):
            if copied.is_newer_at_address(file, system.info(target)):
                return False
    before = copied.state(file)
    make_folder(system, address, target.rpartition("/")[0])
    try:
        system.put_file(str(file), target)
    except FileNotFoundError:
        if file.exists():
            raise
        return False
    copied.note(file, system.info(target), before)
    # Now: a `pull` at this moment would fetch the copy over a file that is written again.
    copied.save()
    return True


def push_or_warn(path: Path) -> None:
    """Copy what has changed in a run; a failure is logged, since everything is here."""
    try:
        push(path)
    except Exception as error:
        log.warning("--storage: %s is not copied to its address: %s", path, short_error(error))


def make_folder(system: FileSystem, address: str, path: str) -> None:
    """Make a folder where a file system has them."""
    if address.partition("://")[0] in _WITH_FOLDERS:
        system.makedirs(path, exist_ok=True)


def _files(run: Path, last: bool) -> list[Path]:
    """Return a run's files to copy: journals after what they describe, small before large."""
    result: list[Path] = []
    skipped = (*_PASSING, *(() if last else _LATE))
    for name, folders, files in os.walk(run):
        of_ray = _OF_RAY if Path(name) == run else ()
        folders[:] = [one for one in folders if not one.startswith(".") and one not in of_ray]
        wanted = (one for one in files if not one.startswith(".") and one not in skipped)
        result += [Path(name) / one for one in wanted]
    return sorted(result, key=lambda file: (file.name in _LAST, file.name.endswith(HEAVY), file))


class _Copied:
    """What is equal here and at the address: size and time by file name, and its copy's mark."""

    def __init__(self, run: Path) -> None:
        self._run, self._path = run, run / COPIED
        self._entries: dict[str, list[Any]] = {}
        self._changed = False
        with contextlib.suppress(OSError, ValueError):
            self._entries = json.loads(self._path.read_text())

    @staticmethod
    def state(file: Path) -> list[int]:
        """Return size and time of a file; [] where it is gone."""
        with contextlib.suppress(OSError):
            status = file.stat()
            return [status.st_size, status.st_mtime_ns]
        return []

    def is_equal(self, file: Path) -> bool:
        return bool(self._entries.get(self._key(file), [None])[0] == self.state(file))

    def is_newer_at_address(self, file: Path, info: dict[str, Any]) -> bool:
        """Return whether to fetch a file: missing here, or newer at the address."""
        entry, state = self._entries.get(self._key(file)), self.state(file)
        if not state or (entry is not None and entry[1] == _mark(info)):
            return not state
        unchanged = entry is not None and entry[0] == state
        return unchanged or file.suffix != ".jsonl" or bool(info["size"] > state[0])

    def note(self, file: Path, info: dict[str, Any], state: list[int] | None = None) -> None:
        """Note that a file, as it was in `state`, is equal to its copy."""
        self._entries[self._key(file)] = [self.state(file) if state is None else state, _mark(info)]
        self._changed = True

    def gone(self, endings: tuple[str, ...]) -> list[Path]:
        """Return the copied files with one of these endings that are not here any more."""
        files = [self._run / key for key in self._entries if key.endswith(endings)]
        return [file for file in files if not file.exists()]

    def forget(self, file: Path) -> None:
        """Forget a file whose copy was removed."""
        del self._entries[self._key(file)]
        self._changed = True

    def save(self) -> None:
        if self._changed and self._run.is_dir():
            write_text(self._path, json.dumps(self._entries))
            self._changed = False

    def _key(self, file: Path) -> str:
        return file.relative_to(self._run).as_posix()


def _mark(info: dict[str, Any]) -> str:
    """Return what changes when a copy is rewritten: hash, version, or else its time."""
    names = ("ETag", "etag", "md5Hash", "mtime", "created", "LastModified")
    return (
        f"{info['size']} {next((info[name] for name in names if info.get(name) is not None), '')}"
    )


def short_error(error: Exception) -> str:
    """Return type and beginning of an error's message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
