"""What a training writes outside its folder: while watched, it overwrites nothing."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tunediff.config.code import WorkloadError
from tunediff.core import text

_ELSEWHERE = ("/dev", "/proc", "/sys", sys.prefix, sys.base_prefix, tempfile.gettempdir())
_CACHES = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "TORCH_HOME",
    "XDG_CACHE_HOME",
    "MPLCONFIGDIR",
)
"""Variables of the environment with folders that libraries write as they please."""
_WRITING = os.O_WRONLY | os.O_RDWR
_UNAUDITED = ((torch, "save", 1, "f"), (safetensors.torch, "serialize_file", 1, "filename"))
"""Functions that write files without `open`: position and name of the path argument."""
SHOWN = 3
"""Most files that are named."""


class WriteWatch:
    """Notes the files that trainings of this process write outside their folders."""

    def __init__(self, after_others: bool) -> None:
        self._runs: list[set[Path]] = [set()] if after_others else []
        self._created = set[Path]()
        self._folder: Path | None = None
        self._is_running = False

    @contextlib.contextmanager
    def run(self, folder: Path | None) -> Iterator[None]:
        """Note what is written inside, but for what lies in `folder`."""
        self._runs.append(set())
        self._folder, self._is_running = folder and folder.absolute(), True
        try:
            yield
        finally:
            self._is_running = False

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        """Note an event of `sys.audit`. Raises `WorkloadError` if an existing file would go."""
        path, destroys = _written(event, args)
        if path is None or not self._is_running or not self._is_watched(path):
            return
        if destroys and self._would_lose(path):
            raise WorkloadError(
                f"{_shown(path)}: train(trial) would write over it or remove it, and it was there"
                " before; write to trial.folder, of which each run has its own, or move it away"
            )
        if not path.exists():
            self._created.add(path)
        self._runs[-1].add(path)

    def _would_lose(self, path: Path) -> bool:
        if path.is_dir():
            return any(map(self._would_lose, path.iterdir()))
        return path not in self._created and path.is_file() and path.stat().st_size > 0

    def _is_watched(self, path: Path) -> bool:
        if path.name.endswith(".lock") or (
            self._folder is not None and path.is_relative_to(self._folder)
        ):
            return False
        working_folder = Path.cwd()
        if path.is_relative_to(working_folder):
            path = path.relative_to(working_folder)
        elif any(
            path.is_relative_to(root)
            for root in (*_ELSEWHERE, *filter(None, map(os.environ.get, _CACHES)))
        ):
            return False
        return not any(part.startswith(".") or part == "__pycache__" for part in path.parts)

    def clean(self) -> list[str]:
        """Remove files that later runs made again, unlike caches; return a warning."""
        repeated = set().union(*(self._runs[1:] or self._runs))
        files = sorted(path for path in repeated if not path.is_dir())
        for path in self._created & set(files) if len(self._runs) > 1 else ():
            path.unlink(missing_ok=True)
        for path in sorted(self._created, reverse=True):
            with contextlib.suppress(OSError):  # a file, or a folder that is not empty
                path.rmdir()
        if not files:
            return []
        names = [_shown(path) for path in files]
        more = (
            f" and {text.pluralize(len(names) - SHOWN, 'other file')}" if len(names) > SHOWN else ""
        )
        where = f"train(trial) writes {', '.join(names[:SHOWN])}{more} outside trial.folder"
        return [
            f"{where}: runs may write over each other's files; give trial.folder to what writes"
            " them"
        ]


def _shown(path: Path) -> str:
    working_folder = Path.cwd()
    return str(path.relative_to(working_folder) if path.is_relative_to(working_folder) else path)


def _written(event: str, args: tuple[Any, ...]) -> tuple[Path | None, bool]:
    """Return what an event of `sys.audit` writes, and whether that removes what was there."""
    if event == "open":
        path, destroys = args[0] if args[2] & _WRITING else None, bool(args[2] & os.O_TRUNC)
    elif event in ("os.remove", "shutil.rmtree", "os.mkdir"):
        path, destroys = args[0] if args[-1] in (-1, None) else None, event != "os.mkdir"
    elif event == "os.rename":
        path, destroys = args[1] if args[3] == -1 else None, True
    else:
        return None, False
    return (
        Path(os.path.abspath(os.fsdecode(path)))
        if isinstance(path, str | bytes | os.PathLike)
        else None
    ), destroys


def _audited(function: Callable[..., Any], place: int, name: str) -> Callable[..., Any]:
    """Return a function that opens its file as Python does: with an event of `sys.audit`."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        path = args[place] if len(args) > place else options.get(name)
        if isinstance(path, str | os.PathLike):
            sys.audit("open", path, "wb", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        return function(*args, **options)

    return call


_watch: WriteWatch | None = None
_hooked = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _watch is not None:
        _watch.note(event, args)


@contextlib.contextmanager
def watching(after_others: bool = False) -> Iterator[WriteWatch]:
    """Watch the trainings that this process runs inside, in all of its threads.

    `after_others`: another process has run the training already, and filled the caches that it has.
    """
    global _watch, _hooked
    if not _hooked:
        sys.addaudithook(_hook)  # it stays as long as the process
        _hooked = True
    before, _watch = _watch, WriteWatch(after_others)
    with contextlib.ExitStack() as stack:
        for owner, name, place, keyword in _UNAUDITED:
            function = getattr(owner, name)
            stack.callback(setattr, owner, name, function)
            setattr(owner, name, _audited(function, place, keyword))
        try:
            yield _watch
        finally:
            _watch = before


def run_of(folder: Path | None) -> contextlib.AbstractContextManager[None]:
    """Return the context of a run whose folder this is."""
    return _watch.run(folder) if _watch is not None else contextlib.nullcontext()
