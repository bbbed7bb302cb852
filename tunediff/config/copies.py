"""Copies of users' workloads, which their trials run: the original may be edited meanwhile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

MARK = "tunediff_modules.json"
"""File in a folder with a copy, which is no part of it."""
MOST_FILES, MOST_VISITED = 300, 20_000
"""Python files below a folder that a copy takes, and files of all kinds that are looked at; of a
larger folder it has what was loaded alone."""
_LOOKS_BESIDE = (b"__file__", b"__path__", b"importlib.resources")
"""Texts in files that read data relative to their own location."""
_SKIPPED = ("__pycache__", "ray_results", "node_modules", "site-packages")
"""Folders that Python, tunediff and package managers write themselves."""


def below(root: Path) -> dict[Path, Path]:
    """Return the readable Python files below a folder, by their paths relative to it; {} where
    they are too many."""
    found, visited = list[Path](), 0
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not _is_skipped(Path(folder) / name)]
        # an editor's lock is a link to nowhere
        files = (Path(folder) / name for name in names if name.endswith(".py"))
        found += [file for file in files if os.access(file, os.R_OK)]
        if len(found) > MOST_FILES or (visited := visited + len(names)) > MOST_VISITED:
            return {}
    return {file.relative_to(root): file for file in found}


def _is_skipped(folder: Path) -> bool:
    """Return whether a folder is hidden, an environment, or a copy."""
    marks = (MARK, "pyvenv.cfg")
    hidden = folder.name.startswith(".") or folder.name in _SKIPPED
    return hidden or any((folder / mark).is_file() for mark in marks)


def write(contents: Mapping[Path, bytes], root: Path, folder: Path) -> None:
    """Write files into a copy, with links to the data that lie beside them in `root`."""
    for path, content in contents.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f".{target.name}.{os.getpid()}")
        new.write_bytes(content)
        new.replace(target)  # several processes may write it
    (folder / MARK).touch()
    if any(word in content for content in contents.values() for word in _LOOKS_BESIDE):
        _link_data(root, folder, folder)


def _link_data(source: Path, target: Path, copy: Path) -> None:
    """Link data files next to a file, which its code may read by path; no hidden ones."""
    for entry in source.iterdir():
        link = target / entry.name
        no_data = entry.suffix == ".py" or entry.name == MARK or _is_skipped(entry)
        # a link to a folder that contains the copy would be a circle
        if no_data or link.is_symlink() or copy.resolve().is_relative_to(entry.resolve()):
            continue
        if link.is_dir():  # modules are no data
            _link_data(entry, link, copy)
        else:
            with contextlib.suppress(OSError):  # a file system without links
                link.symlink_to(entry.resolve())
