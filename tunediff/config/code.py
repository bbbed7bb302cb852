"""Find, import and copy workloads in files of the user, with all that these load of the user's.

Trials run the copy: the original may be edited meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import linecache
import operator
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from unittest import mock

from tunediff.config.knobs import ConfigError, refuse
from tunediff.core.errors import TunediffError
from tunediff.core.files import write_atomically
from tunediff.core.text import shown, truncate

MARK = "tunediff_modules.json"
"""File in a folder with a copy, which is no part of it."""
MOST_FILES, MOST_VISITED = 300, 20_000
"""Python files below a folder that a copy takes, and files of all kinds that are looked at; of a
larger folder it has what was loaded alone."""
_LOOKS_BESIDE = (b"__file__", b"__path__", b"importlib.resources")
"""Texts in files that read data relative to their own location."""
_SKIPPED = ("__pycache__", "ray_results", "node_modules", "site-packages")
"""Folders that Python, tunediff and package managers write themselves."""
_PACKAGE = Path(__file__).resolve().parents[1]
_PATHS = sysconfig.get_paths()
_FOLDERS = [_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_FOLDERS += [*map(os.path.realpath, _FOLDERS), site.getusersitepackages(), str(_PACKAGE)]
_ENVIRONMENT = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_roots: list[Path] = []
"""Folders of the files that were imported."""


class WorkloadError(TunediffError, RuntimeError):
    """A workload's `train(trial)` breaks its contract; the message says what to write."""


@dataclasses.dataclass(frozen=True, eq=False)
class Code:
    """A file, the user's modules that it loads, and the Python files below its folder, which it may
    import by name later."""

    root: Path
    """Folder for the import path: the file's, or the one above its outermost package."""
    file: Path
    """Absolute path."""
    contents: Mapping[Path, bytes]
    """Content of each file, by its path relative to `root`, or to a copy."""
    sources: Mapping[Path, Path] = dataclasses.field(default_factory=dict)
    """The files by these paths, unless all are in `root`."""

    @functools.cached_property
    def version(self) -> str:
        """Return 12 hex digits that are equal exactly for equal contents."""
        digest = hashlib.sha256()
        for path, content in sorted(self.contents.items()):
            digest.update(repr((path.as_posix(), content)).encode())
        return digest.hexdigest()[:12]

    @property
    def entry(self) -> Path:
        """Return the path of the file relative to `root`."""
        return self.file.relative_to(self.root)

    @property
    def module(self) -> str:
        """Return the module name for the import."""
        return ".".join(self.entry.with_suffix("").parts).removesuffix(".__init__")

    @property
    def is_copy(self) -> bool:
        """Return whether it was copied for a search, a training or an export."""
        return (self.root / MARK).is_file()

    def with_files(self, files: Mapping[Path, Path]) -> Code:
        """Return the code with further files, by their paths."""
        contents = {path: file.read_bytes() for path, file in files.items()}
        return dataclasses.replace(
            self, contents={**self.contents, **contents}, sources={**self.sources, **files}
        )

    @property
    def is_current(self) -> bool:
        """Return whether all files are as they were read."""
        return all(
            self.sources[path].is_file() and self.sources[path].read_bytes() == content
            for path, content in self.contents.items()
        )

    def copy(self, folder: Path) -> Path:
        """Copy all files into `folder`, link data beside them, and return the file's new path.

        Raises `ConfigError` if `folder` holds another workload.
        """
        conflict = any(
            self.contents.get(path) != file.read_bytes() for path, file in below(folder).items()
        )
        refuse(conflict, f"{folder}: is of another workload already; choose another folder")
        for path, content in self.contents.items():
            # several processes may write it
            write_atomically(folder / path, operator.methodcaller("write", content))
        (folder / MARK).touch()
        if any(word in content for content in self.contents.values() for word in _LOOKS_BESIDE):
            _link_data(self.root, folder, folder)
        read_copy.cache_clear()  # a folder of that name may have held other code
        return folder / self.entry


@dataclasses.dataclass
class _Import:
    """A file that was imported, and the user's modules that it has loaded, by name."""

    code: Code
    modules: Mapping[str, ModuleType]


_imports: list[_Import] = []


def locate(name: str, where: str, folder: Path) -> Path:
    """Return the file of `mine.py` in `folder` or `package.module`. Raises `ConfigError`."""
    if name.endswith(".py"):
        path = (folder / Path(name).expanduser()).absolute()
        refuse(not path.is_file(), f"{where}: workload: {name}: no such file in {path.parent}")
        return path
    try:
        if "" not in sys.path:
            sys.path.append("")  # like `python -m`
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{where}: workload: {name}: cannot be imported: {error}") from None
    origin = Path(spec.origin or "") if spec is not None else Path()
    refuse(
        origin.suffix != ".py",
        f"{where}: workload: {name}: no such module; allowed: a file such as mine.py too",
    )
    return origin.absolute()


def read(file: Path) -> Code:
    """Return a file with all that belongs to it, see `Code`.

    Imports a file that is no copy, unless nothing of it has changed since this process did. Raises
    `ConfigError` that shows the user's line.
    """
    root = next((one for one in file.parents if (one / MARK).is_file()), None)
    if root is not None:
        return read_copy(root, file)
    for earlier in _imports:
        if earlier.code.file == file and earlier.code.is_current:
            return earlier.code
    root = file.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return _import(Code(root, file, {})).code


# ---- the files of a copy
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


@functools.cache
def read_copy(root: Path, file: Path) -> Code:
    """Return a file of a copy, which nobody edits."""
    return Code(root, file, {}).with_files(below(root))


def signature(file: Path) -> str:
    """Return what tells whether a file or something that it loads has changed; imports nothing."""
    of_file = [one.code for one in _imports if one.code.file == file]
    paths = {file}.union(*(code.sources.values() for code in of_file))
    contents = [path.read_bytes() for path in sorted(paths) if path.is_file()]
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def load(code: Code) -> ModuleType:
    """Import the module, once for equal contents. Raises `ConfigError` with the user's line.

    Afterwards the names of its modules refer to this version: another one may have been imported
    since, and functions import later, as loader processes do.
    """
    # a copy equals its original
    content = code.entry, code.contents
    equal = (one for one in reversed(_imports) if (one.code.entry, one.code.contents) == content)
    done = next(equal, None) or _import(code)
    is_first = sys.path[:1] == [str(code.root)] or not code.is_copy
    if not is_first or any(sys.modules.get(name) is not one for name, one in done.modules.items()):
        _put_first(code)
        sys.modules.update(done.modules)
    return done.modules[code.module]


def _import(code: Code) -> _Import:
    """Import a file anew. Raises `ConfigError` for any error or exit of the user's code."""
    _check_name(code)
    _put_first(code)
    try:
        with mock.patch.object(sys, "argv", [str(code.file)]):  # as of a script without any
            loaded = _import_anew(code.module)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a script that ends with sys.exit() too
        raise ConfigError(
            f"{shown(code.file)}: does not import: {described(error, code.root)}"
        ) from error
    if not code.is_copy:
        code = code.with_files({**below(code.root), **_files(loaded, code.root)})
    _imports.append(_Import(code, loaded))
    return _imports[-1]


def _files(loaded: Mapping[str, ModuleType], root: Path) -> dict[Path, Path]:
    """Return the files of these modules, by their paths in a copy."""
    files = {name: module.__dict__.get("__file__") for name, module in loaded.items()}
    return {
        path: Path(file)
        for name, file in files.items()
        if file is not None
        for path in _relative_paths(name, Path(file), root)
    }


# ---- which modules of a process are the user's
def is_users(file: str) -> bool:
    """Return whether a file is the user's: neither Python's, nor installed, nor of this package."""
    installed = any(part in file for part in _INSTALLED)
    return os.path.isabs(file) and not installed and not file.startswith(_ENVIRONMENT)


def _loaded(package: str) -> dict[str, ModuleType]:
    """Return the user's modules in this process, by name.

    `package`: one that counts as the user's wherever it is installed.
    """
    found = {}
    for name, module in list(sys.modules.items()):
        content = getattr(module, "__dict__", {})
        # A package without `__init__.py` has no file
        files = [content.get("__file__") or "", *list(content.get("__path__") or ())]
        file = next(filter(None, files), "")
        mine = name == package or name.startswith(f"{package}.") if package else False
        if not name.startswith(("__main__", "__mp_main__")) and (mine or is_users(str(file))):
            found[name] = module
    return found


def _import_anew(name: str) -> dict[str, ModuleType]:
    """Import a module and all that it imports of the user's, as their files are now.

    Returns these modules by name. Modules of the program's that have these names are replaced; the
    others stay.
    """
    package = name.partition(".")[0] if "." in name else ""  # the user's, wherever it is installed
    before = _loaded(package)
    for other in before:
        del sys.modules[other]
    try:
        importlib.invalidate_caches()
        # bytecode tells contents apart by size and whole seconds, so that an edit can be missed
        with mock.patch.object(sys, "dont_write_bytecode", True):
            importlib.import_module(name)
        return _loaded(package)
    except BaseException:
        for other in _loaded(package):
            del sys.modules[other]
        raise
    finally:
        for other, module in before.items():
            sys.modules.setdefault(other, module)


def _relative_paths(name: str, file: Path, root: Path) -> Iterator[Path]:
    """Yield the places where a module's copy needs its file: by folder, and by import."""
    if file.is_relative_to(root):
        yield file.relative_to(root)
    parts = Path(*name.split("."))
    yield parts / file.name if file.name.startswith("__init__.") else parts.parent / file.name


def _put_first(code: Code) -> None:
    """Let imports by name find the files in this folder first."""
    if str(code.root) in sys.path:
        sys.path.remove(str(code.root))
    if code.root not in _roots:
        _roots.append(code.root)
    sys.path.insert(0, str(code.root))  # as Python does for a script; loader processes inherit it


def _check_name(code: Code) -> None:
    """Raise `ConfigError` if an installed or standard module has the name of the file."""
    top = code.module.partition(".")[0]
    installed = [
        path for path in sys.path if {"site-packages", "dist-packages"} & {*Path(path).parts}
    ]
    spec = PathFinder.find_spec(top, [path for path in installed if Path(path) != code.root])
    refuse(
        top in sys.stdlib_module_names or (spec is not None and spec.origin is not None),
        f"{shown(code.file)}: shadows the module {top} that is installed; give the file another"
        " name",
    )


# ---- what went wrong
def described(error: BaseException, *roots: Path) -> str:
    """Describe an error with the user's innermost line: `… (mine.py, line 12: x = read())`.

    The user's code is below one of `roots` or of the folders of imported workloads.
    """
    message = _named(error)
    if isinstance(error, SyntaxError) and error.filename and _own(error.filename, roots):
        text = (error.text or linecache.getline(error.filename, error.lineno or 0)).strip()
        return (
            f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}, line"
            f" {error.lineno}: {text})"
        )
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _own(frame.filename, roots)
    ]
    if not frames:
        return message
    return (
        f"{message} ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})"
    )


def system_message(error: OSError) -> str:
    """Return the message about an error of the system: the file, and why."""
    where = f"{truncate(str(error.filename), 160)}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}"


def _named(error: BaseException) -> str:
    """Return an error's type and message; of a loader process's, its traceback's last line."""
    above, torch_says, _ = str(error).partition("Original Traceback")
    if torch_says:
        return f"{str(error).strip().splitlines()[-1]} ({above.strip().removesuffix('.')})"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _own(file: str, roots: Iterable[Path]) -> bool:
    """Return whether a file is the user's: in one of the folders, and no installed package."""
    inside = any(Path(file).is_relative_to(root) for root in (*roots, *_roots))
    return inside and is_users(file)


def trace(error: BaseException) -> str:
    """Return the traceback without tunediff's own frames, unless there are no others."""
    link: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    first = link
    while link is not None:  # the error, then its causes
        others = [
            frame for frame in link.stack if not Path(frame.filename).is_relative_to(_PACKAGE)
        ]
        if others and others != list(link.stack):
            link.stack = traceback.StackSummary.from_list(others)
        link = link.__cause__ or link.__context__
    assert first is not None
    return "".join(first.format())
