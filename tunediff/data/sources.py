"""Find the files of a set of images without reading them.

Nothing here imports torch, so that a wrong path is refused at once.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from tunediff.config import ConfigError
from tunediff.data.cache import cache_dir
from tunediff.data.knobs import Data

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR10_FOLDER = "cifar-10-batches-py"
NETWORK_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True)
class Listing:
    """The image files of one split, in sorted order, and every file that was skipped."""

    path: Path
    """The folder or zip, absolute."""
    names: tuple[str, ...]
    """Image files, relative to `path`, with forward slashes."""
    labels: tuple[int, ...] | None
    """Class number of each file by its folder; None unless all are in two or more folders."""
    class_names: tuple[str, ...]
    skipped: tuple[str, ...]
    """Files that are no images by their name, or lie outside the splits."""
    stamp: str
    """Hex digest that changes when a file is added, removed or rewritten."""


def check(data: Data) -> None:
    """Raise `ConfigError` for a set that cannot be loaded, quickly and without decoding.

    Where CIFAR-10 is still to be downloaded, its server is asked for an answer.
    """
    source = find(data)
    if isinstance(source, Path) and not holds_cifar10(source):
        require_cifar10_server(data)


def find(data: Data) -> Listing | Path | None:
    """Return image files, CIFAR-10's folder, or None for the digits. Raises `ConfigError`."""
    if data.name == "digits":
        if data.split != "all":
            refuse("split", data.split, "the digits have no train and test part; allowed: all")
        return None
    return cifar10_root(data) or listing(data)


def has_labels(data: Data) -> bool:
    """Return whether every image will have a class. Raises `ConfigError` as `check` does."""
    source = find(data)
    return not isinstance(source, Listing) or source.labels is not None


def refuse(key: str, value: object, why: str) -> NoReturn:
    """Raise the `ConfigError` for one key of `data`."""
    shown = str(value) if isinstance(value, Path) else value
    raise ConfigError(f"data.{key}: {shown!r} is not allowed: {why}") from None


# ---- CIFAR-10
def cifar10_root(data: Data) -> Path | None:
    """Return torchvision's CIFAR-10 folder, which may not exist; None for image files."""
    if data.name != "cifar10":
        return None
    if data.path is None:
        return cache_dir() / "cifar10"
    path = Path(data.path).expanduser().absolute()
    if path.name == CIFAR10_FOLDER:
        return path.parent
    if os.path.isfile(path) or path.suffix == ".zip":
        return None
    if os.path.isdir(path) and not holds_cifar10(path):
        has_images = any(_is_image(name) for name, _ in _folder_files(path))
        return None if has_images else path
    return path


def holds_cifar10(root: Path) -> bool:
    """Return whether torchvision's CIFAR-10, unpacked or as its archive, lies in this folder."""
    return (root / CIFAR10_FOLDER).is_dir() or (root / "cifar-10-python.tar.gz").is_file()


def require_cifar10_server(data: Data) -> None:
    """Raise `ConfigError` soon if CIFAR-10 cannot be downloaded; torchvision would hang."""
    request = urllib.request.Request(CIFAR10_URL, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=NETWORK_TIMEOUT_S).close()
    except OSError as error:
        refuse(
            "path",
            data.path,
            f"CIFAR-10 is missing and cannot be downloaded from {CIFAR10_URL} ({error}); allowed:"
            f" run once with a network, or set data.path to a folder with {CIFAR10_FOLDER}/, or to"
            " a folder or .zip of its images",
        )


# ---- image files
def listing(data: Data) -> Listing:
    """Return `data`'s image files. Raises `ConfigError` for under two, or a missing split.

    Images that do not lie in train/ and test/ are all of `train`.
    """
    if data.path is None:
        refuse("path", None, f"data.name = {data.name} needs a folder or .zip of images")
    path = Path(data.path).expanduser().absolute()
    if os.path.isfile(path):
        return zip_listing(data, path, _stat(path))
    return _listing(data, path, dict(sorted(_folder_files(path))))


@functools.lru_cache(maxsize=4)
def zip_listing(data: Data, path: Path, status: tuple[int, int]) -> Listing:
    """List a zip; cached, since large ones take long; `status` changes with the file."""
    return _listing(data, path, dict(sorted(_zip_files(path))))


def _listing(data: Data, path: Path, files: dict[str, tuple[int, int]]) -> Listing:
    """Return the listing of one split.

    `files`: every file below `path`, sorted, with two numbers that a rewrite changes.
    """
    names = [name for name in files if _is_image(name)]
    skipped = [name for name in files if not _is_image(name)]

    # ---- splits. Archives often wrap everything: cifar10-images/train/airplane/0001.jpg.
    both, depth = {"train", "test"}, 0
    while len(tops := {_part(name, depth) for name in names}) == 1 and not tops & {None, *both}:
        depth += 1
    if tops & both:
        splits = both if data.split == "all" else {data.split}
        skipped += [name for name in names if _part(name, depth) not in both]
        skipped = [name for name in skipped if _part(name, depth) not in both - splits]
        names = [name for name in names if _part(name, depth) in splits]
        depth += 1
    elif names and data.split == "test":
        refuse("split", data.split, f"{path} has no train/ and test/ folders; allowed: train, all")
    if len(names) < 2:
        found = f"{len(names)} image files ({' '.join(SUFFIXES)}) beside {len(skipped)} others"
        refuse("path", path, f"split {data.split} has {found}; allowed: at least 2")

    # ---- classes: the folder of every image, if there are two or more
    classes = [part for name in names if (part := _part(name, depth)) is not None]
    number = {name: index for index, name in enumerate(sorted(set(classes)))}
    labelled = len(classes) == len(names) and len(number) > 1
    return Listing(
        path=path,
        names=tuple(names),
        labels=tuple(number[name] for name in classes) if labelled else None,
        class_names=tuple(number) if labelled else (),
        skipped=tuple(sorted(skipped)),
        stamp=hashlib.sha256(repr(files).encode()).hexdigest(),
    )


def _is_image(name: str) -> bool:
    """Return whether a file is an image by its name, and not hidden."""
    is_hidden = name.startswith((".", "__MACOSX/")) or "/." in name or "/__MACOSX/" in name
    return not is_hidden and name.lower().endswith(SUFFIXES)


def _part(name: str, depth: int) -> str | None:
    """Return the folder at this depth on the path to a file; None where it has fewer folders."""
    folders = name.split("/")[:-1]
    return folders[depth] if depth < len(folders) else None


def _stat(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _folder_files(path: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (relative name, (bytes, modified ns)) of each file; links are followed once."""
    if not os.path.isdir(path):
        refuse("path", path, "there is no such file or folder; allowed: a folder or .zip of images")

    def unreadable(error: OSError) -> None:  # os.walk would pass over it in silence
        raise error

    seen: set[str] = set()  # by its real path: a link may lead back to a folder above it
    for folder, inner, files in os.walk(path, followlinks=True, onerror=unreadable):
        if (real := os.path.realpath(folder)) in seen:
            inner.clear()
            continue
        seen.add(real)
        for file in files:
            full = Path(folder, file)
            # A dangling link stays in the list: it will be counted as unreadable.
            yield full.relative_to(path).as_posix(), _stat(full) if full.exists() else (0, 0)


def _zip_files(path: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        why = f"it cannot be opened as a zip ({error}); allowed: a folder or .zip of images"
        refuse("path", path, why)
    return ((info.filename, (info.file_size, info.CRC)) for info in infos if not info.is_dir())
