"""Storage at an address such as `s3://bucket/prefix`: a local folder, and its copy.

All work is done in the local folder, whose file `.address` says where its copy is. `push_run`
copies what is new here, `pull` fetches what is missing here.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator

from tunediff.core import trial_record
from tunediff.core.errors import ConfigError
from tunediff.core.files import ADDRESS, STORAGE, address_of, plain, write_text
from tunediff.core.options import Options, option

log = logging.getLogger(__name__)

COPIED = ".copied"
"""File in the folder of a run that was written when it was last copied."""
HEAVY = (".safetensors", ".pt")
"""Endings of the files that are fetched only where they are needed."""
_OF_RAY, _PASSING = ("tune", "train"), ("doing.json",)
"""Folders of a search and names of files that are of no use elsewhere."""
_JOURNALS = ("journal.jsonl", "sessions.jsonl")
"""Files that only grow: of two the longer one is the newer."""
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

    try:
        system, path = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"--storage: {address}: {error}") from None
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
    """Fetch what the copy of a file or folder has and this machine lacks.

    A folder whose journal is longer at the address was continued elsewhere: its files are those of
    the address. `heavy`: weights and checkpoints as well. Does nothing without an address. Raises
    `ConfigError`.
    """
    if (place := storage_and_run(path)) is None:
        return
    storage, run = place
    was_there = run.is_dir()  # then what is here may never have been copied
    address = str(address_of(storage))
    system, root = connect(address)
    try:
        inside = path.absolute().relative_to(storage).as_posix()
        there = _files_there(system, f"{root}/{inside}", storage, root)
        continued = _continued(there)
        for file in sorted(there, key=lambda file: (file.name in _JOURNALS, file)):
            is_heavy = file.name.endswith(HEAVY) and not heavy
            if is_heavy and file.parent in continued:
                file.unlink(missing_ok=True)  # of what ran here before
            if is_heavy or (file.exists() and file.parent not in continued):
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(f".{file.name}.fetched")
            system.get_file(f"{root}/{file.relative_to(storage).as_posix()}", str(partial))
            partial.replace(file)
        if not was_there and run.is_dir():
            (run / COPIED).touch()
    except Exception as error:
        raise ConfigError(f"--storage: {address} cannot be read: {short_error(error)}") from None


def push_run(run: Path) -> None:
    """Copy the files of a run that were written since the last time.

    Raises what the service raises, and `OSError` if another machine runs it as well, whose files
    stay.
    """
    storage, begun = run.parent, time.time()
    copied = (run if run.is_dir() else storage) / COPIED
    since = copied.stat().st_mtime if copied.exists() else 0.0
    address = str(address_of(storage))
    system, root = connect(address)
    there = _files_there(system, f"{root}/{run.name}", storage, root)
    continued = _continued(there)
    for file in _files_here(run):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            status = file.stat()  # a file that was renamed into place may have been written before
            is_new = max(status.st_mtime, status.st_ctime) >= since
            if is_new and file.parent not in continued:
                _put(system, address, file, f"{root}/{file.relative_to(storage).as_posix()}")
    for file in there:  # checkpoints, which a training removes at its end; a program's own stay
        is_gone = file.name == trial_record.CHECKPOINT and not file.exists()
        trial = is_gone and trial_record.read_trial(file.parent)
        if trial and trial.finished and not trial.clock:
            system.rm_file(f"{root}/{file.relative_to(storage).as_posix()}")
    copied.touch()
    os.utime(copied, (begun, begun))
    if continued:
        names = ", ".join(str(folder.relative_to(storage)) for folder in sorted(continued))
        raise OSError(f"{names}: longer at the address: another machine runs this as well")


def push_or_warn(path: Path) -> None:
    """Copy a file or folder that a command has written; a failure is logged: it is here."""
    if (place := storage_and_run(path)) is None:
        return
    try:
        push_run(place[1])
    except Exception as error:
        log.warning("--storage: %s is not copied to its address: %s", path, short_error(error))


def _put(system: FileSystem, address: str, file: Path, target: str) -> None:
    make_folder(system, address, target.rpartition("/")[0])
    system.put_file(str(file), target)


def _files_there(system: FileSystem, path: str, storage: Path, root: str) -> dict[Path, int]:
    """Return the sizes of an address's files by where they are here."""
    system.invalidate_cache()
    found = system.find(path, detail=True)
    sizes = {
        storage / name.removeprefix(root).strip("/"): int(info["size"])
        for name, info in found.items()
    }
    return {
        file: size
        for file, size in sizes.items()
        if not file.name.startswith(".") and ".." not in file.parts
    }


def _continued(there: Mapping[Path, int]) -> set[Path]:
    """Return the folders whose journal is longer at the address than here."""
    return {
        file.parent
        for file, size in there.items()
        if file.name in _JOURNALS and file.exists() and file.stat().st_size < size
    }


def make_folder(system: FileSystem, address: str, path: str) -> None:
    """Make a folder where a file system has them."""
    if address.partition("://")[0] in _WITH_FOLDERS:
        system.makedirs(path, exist_ok=True)


def _files_here(run: Path) -> list[Path]:
    """Return a run's files to copy: journals after what they describe, small before large."""
    result = [run] if run.is_file() else []  # what an export has written beside the runs
    for name, folders, files in os.walk(run):
        of_ray = _OF_RAY if Path(name) == run else ()
        folders[:] = [one for one in folders if not one.startswith(".") and one not in of_ray]
        wanted = (one for one in files if not one.startswith(".") and one not in _PASSING)
        result += [Path(name) / one for one in wanted]
    return sorted(
        result, key=lambda file: (file.name in _JOURNALS, file.name.endswith(HEAVY), file)
    )


def short_error(error: Exception) -> str:
    """Return type and beginning of an error's message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class StorageOptions(Options):
    """Where results are."""

    storage: Annotated[str | Path, AfterValidator(local)] = option(
        STORAGE,
        "folder of all searches, comparisons and trainings, or its address, e.g."
        f" s3://bucket/prefix (default: {STORAGE})",
    )
