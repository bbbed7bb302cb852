"""Copies of users' workloads: what they hold, and what is added to them later.

A copy has all modules that its original has loaded, and those beside them in their packages. What
a training imports by name only later is added by the process that first imports it, as long as it
is as it was when the copy was made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from tunediff.config import modules

MANIFEST = "tunediff_modules.json"
"""File in a copy: of each workload in it, its files and where they come from."""
_LOOKS_BESIDE = (b"__file__", b"__path__", b"importlib.resources")
"""Texts in files that read data relative to their own location."""
_NO_DATA = ("__pycache__", "ray_results")
"""Folders that are not data: Python and tunediff itself write them."""
isolated = False
"""Whether copies are imported without their original folders: in processes that train."""


# ---- what a copy holds
def root_of(file: Path) -> Path | None:
    """Return the folder of the copied workload that a file belongs to, or None."""
    for folder in file.parents:
        if (folder / MANIFEST).is_file():
            return folder if _entry(folder, file.relative_to(folder)) else None
    return None


def _entry(folder: Path, entry: Path) -> dict[str, Any]:
    """Return what the manifest says of a workload; {} where there is none."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((folder / MANIFEST).read_text()).get(entry.as_posix(), {}))
    return {}


def counted(folder: Path, entry: Path) -> list[Path]:
    """Return the files that make the version of the workload in a copy, relative to it."""
    return [Path(path) for path in _entry(folder, entry).get("files", ())]


def origins(folder: Path, entry: Path) -> tuple[str, ...]:
    """Return the folders of the import path that a copy comes from."""
    return tuple(_entry(folder, entry).get("origins", ()))


def changed(folder: Path, entry: Path) -> Iterator[Path]:
    """Yield the files of a copy that are otherwise now where they come from."""
    for path in counted(folder, entry):
        for source in (Path(origin) / path for origin in origins(folder, entry)):
            if source.is_file() and source.read_bytes() != (folder / path).read_bytes():
                yield path


def note(folder: Path, entry: Path, files: Iterable[Path], where: Sequence[str] = ()) -> None:
    """Write to the manifest which files make the version of a workload, beside those that it names
    already. `where`: the folders that they come from."""
    manifest = folder / MANIFEST
    content = json.loads(manifest.read_text()) if manifest.is_file() else {}
    before = content.get(entry.as_posix(), {"origins": list(where), "made_s": time.time()})
    names = {path.as_posix() for path in files} | {*before.get("files", ())}
    content[entry.as_posix()] = {**before, "files": sorted(names)}
    new = manifest.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(manifest)


def write(contents: Mapping[Path, bytes], sources: Mapping[Path, Path], folder: Path) -> None:
    """Write files into a copy, with the modules beside them in packages, which may be imported by
    name, and links to the data beside them. `sources`: where the files come from."""
    others = dict[Path, Path]()
    for path, source in sources.items():
        if path.parent.parts and (source.parent / "__init__.py").is_file():
            for beside in modules.package_files(source.parent):
                others[path.parent / beside.relative_to(source.parent)] = beside
    written = {path: source.read_bytes() for path, source in others.items()} | dict(contents)
    for path, content in written.items():
        target = folder / path
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f".{target.name}.{os.getpid()}")
        new.write_bytes(content)
        new.replace(target)  # several processes may write it
    if any(word in content for content in written.values() for word in _LOOKS_BESIDE):
        for path, source in {**others, **sources}.items():
            _link_data(source.parent, folder / path.parent, folder)
            if (root := modules.import_root(path, source)) is not None:
                _link_data(root, folder, folder)


def _link_data(source: Path, target: Path, copy: Path) -> None:
    """Link data files next to a file, which its code may read by path; no hidden ones."""
    for entry in source.iterdir():
        link = target / entry.name
        no_data = (
            entry.suffix == ".py"
            or entry.name in (*_NO_DATA, MANIFEST)
            or (entry / "__init__.py").exists()
        )
        # A link to a folder that contains the copy would be a circle.
        contains_copy = copy.resolve().is_relative_to(entry.resolve())
        is_there = link.exists() or link.is_symlink()
        if no_data or contains_copy or entry.name.startswith(".") or is_there:
            continue
        if entry.is_dir() and any(entry.glob("*.py")):  # modules are no data
            link.mkdir()
            _link_data(entry, link, copy)
            continue
        with contextlib.suppress(OSError):  # a file system without links: an error names the file
            link.symlink_to(entry.resolve())


# ---- modules that are imported by name later
def isolate(folder: Path, entry: Path) -> None:
    """Take folders that a copy comes from off this process's import path."""
    added = Addition(folder, entry)
    if isolated and added not in sys.meta_path:
        taken = {origin for origin in origins(folder, entry) if modules.is_users(f"{origin}/x")}
        sys.path[:] = [path for path in sys.path if str(Path(path).absolute()) not in taken]
        sys.meta_path.append(added)


@contextlib.contextmanager
def adding(folder: Path, entry: Path) -> Iterator[None]:
    """Import modules of the folder that a copy comes from by way of the copy, and count them in its
    version: for the training that the copy is made for."""
    added = Addition(folder, entry, counts=True)
    sys.meta_path.insert(0, added)
    try:
        yield
    finally:
        sys.meta_path.remove(added)


@dataclasses.dataclass(frozen=True)
class Addition(MetaPathFinder):
    """Adds modules to a copy that are imported by name, such as one of many models."""

    folder: Path
    entry: Path
    counts: bool = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that the copy may lack, in the folder that it comes from, and copy it.

        Raises ImportError if the module has changed since the copy was made.
        """
        where = [*map(Path, origins(self.folder, self.entry))]
        below = [Path()] if path is None else list[Path]()
        for part in map(Path, path or ()):
            root = next((one for one in (self.folder, *where) if part.is_relative_to(one)), None)
            below += [part.relative_to(root)] if root is not None else []
        inside = [str(self.folder / one) for one in below]
        spec = PathFinder.find_spec(name, inside) or PathFinder.find_spec(
            name, [str(root / one) for root in where for one in below]
        )
        if spec is None or (spec.origin and Path(spec.origin).is_relative_to(self.folder)):
            return self._counted(spec)
        if spec.origin is None:  # a package without `__init__.py`
            (self.folder / Path(*name.split("."))).mkdir(parents=True, exist_ok=True)
        elif not modules.is_users(spec.origin):
            return None
        else:
            self._add(name, Path(spec.origin))
        importlib.invalidate_caches()
        return self._counted(PathFinder.find_spec(name, inside))

    def _counted(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        if self.counts and spec is not None and spec.origin is not None:
            note(self.folder, self.entry, [Path(spec.origin).relative_to(self.folder)])
        return spec

    def _add(self, name: str, file: Path) -> None:
        if file.stat().st_mtime > _entry(self.folder, self.entry)["made_s"]:
            raise ImportError(
                f"{name}: {file} has changed since the copy in {self.folder} was made, which lacks"
                " it: it was imported by name only later",
                name=name,
            )
        copied = next(reversed(list(modules.relative_paths(name, file, self.folder))))
        write({copied: file.read_bytes()}, {copied: file}, self.folder)
