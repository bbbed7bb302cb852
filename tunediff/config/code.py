"""Find, import and copy workloads in files of the user, with all that these load of the user's."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import linecache
import sys
import traceback
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from unittest import mock

from tunediff.config import copies, modules
from tunediff.config.knobs import ConfigError, refuse
from tunediff.core.errors import TunediffError
from tunediff.core.text import shown, truncate

FOLDER = "workload"
"""Folder with a copy of the workload, of a search, a training or an export."""
_roots: list[Path] = []
"""Folders of the files that were imported."""
announces = False
"""Whether to name on stderr a workload file inside the folder of a search, a training or an export
before it is run. Commands do, for a user who may have wanted only to read results."""


class WorkloadError(TunediffError, RuntimeError):
    """A workload's `train(trial)` breaks its contract; the message says what to write."""


@dataclasses.dataclass(frozen=True, eq=False)
class Code:
    """A file and everything of the user's that it loads."""

    root: Path
    """Folder for the import path: the file's, or the one above its outermost package."""
    file: Path
    """Absolute path."""
    contents: Mapping[Path, bytes]
    """Content of each file, by its path relative to `root`, or to a copy."""
    sources: Mapping[Path, Path] = dataclasses.field(default_factory=dict)
    """The files that were loaded, by these paths, unless all are in `root`."""
    origins: tuple[str, ...] = ()
    """Folders of the import path from which modules were loaded."""
    is_copy: bool = False

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
    def package(self) -> str:
        """Return the outermost package of the module, if it is in one."""
        return self.module.partition(".")[0] if "." in self.module else ""

    def source(self, path: Path) -> Path:
        """Return the file that is copied to a path."""
        return self.sources.get(path, self.root / path)

    def with_files(self, files: Mapping[Path, Path], read: Mapping[str, bytes]) -> Code:
        """Return the code with further files, by their paths; `read`: contents that were loaded."""
        contents = {path: read.get(str(file)) or file.read_bytes() for path, file in files.items()}
        roots = {modules.import_root(path, file) for path, file in files.items()} - {None}
        return dataclasses.replace(
            self, contents={**self.contents, **contents}, sources={**self.sources, **files},
            origins=tuple(sorted({str(self.root), *self.origins, *map(str, roots)})),
        )  # fmt: skip

    @property
    def is_current(self) -> bool:
        """Return whether all files are as they were loaded."""
        try:
            return all(
                self.source(path).read_bytes() == content for path, content in self.contents.items()
            )
        except OSError:
            return False

    def copy(self, folder: Path) -> Path:
        """Copy all files into `folder` and return the new path of the file.

        Data files beside the originals are linked if the code seems to read them. Raises
        `ConfigError` if `folder` contains another file at one of these paths.
        """
        for path, content in self.contents.items():  # all of them before the first is written
            target = folder / path
            conflict = target.exists() and target.read_bytes() != content
            refuse(
                conflict, f"{target}: is a file of another workload already; choose another folder"
            )
        copies.write(self.contents, {path: self.source(path) for path in self.contents}, folder)
        copies.note(folder, self.entry, list(self.contents), () if self.is_copy else self.origins)
        return folder / self.entry

    def remove_copy(self, folder: Path) -> None:
        """Remove the copies of these files from `folder`: their content may have changed."""
        for path in {*self.contents, *copies.counted(folder, self.entry)}:
            (folder / path).unlink(missing_ok=True)
        (folder / copies.MANIFEST).unlink(missing_ok=True)


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
    """Return a file with all of the user's that it loads on import, or its original has loaded.

    Imports a file that is no copy, unless nothing of it has changed since this process did. Raises
    `ConfigError` that shows the user's line.
    """
    if (root := copies.root_of(file)) is not None:
        paths = copies.counted(root, file.relative_to(root))
        try:
            contents = {path: (root / path).read_bytes() for path in paths}
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from None
        where = copies.origins(root, file.relative_to(root))
        return Code(root, file, contents, origins=where, is_copy=True)
    for earlier in _imports:
        if earlier.code.file == file and earlier.code.is_current:
            return earlier.code
    root = file.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return _import(Code(root, file, {})).code


def signature(file: Path) -> str:
    """Return what tells whether a file or something that it loads has changed; imports nothing."""
    if copies.root_of(file) is not None:
        return read(file).version
    of_file = [one.code for one in _imports if one.code.file == file]
    paths = {file}.union(*(code.sources.values() for code in of_file))
    contents = [path.read_bytes() for path in sorted(paths) if path.is_file()]
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def load(code: Code) -> ModuleType:
    """Import the module, once for equal contents. Raises `ConfigError` with the user's line.

    Afterwards the names of its modules refer to this version: another one may have been imported
    since, and functions import later, as loader processes do.
    """
    equal = (one for one in reversed(_imports) if _is_import_of(one.code, code))
    done = next(equal, None) or _import(code)
    is_first = sys.path[:1] == [str(code.root)] or not code.is_copy
    if not is_first or any(sys.modules.get(name) is not one for name, one in done.modules.items()):
        _put_first(code)
        sys.modules.update(done.modules)
    return done.modules[code.module]


def _is_import_of(done: Code, code: Code) -> bool:
    """Return whether an import equals this code, or is the original of this copy."""
    is_part = done.contents.items() <= code.contents.items()
    is_equal = len(done.contents) == len(code.contents) or str(done.root) in code.origins
    return done.entry == code.entry and is_part and is_equal


def _import(code: Code) -> _Import:
    """Import a file anew. Raises `ConfigError` for any error or exit of the user's code."""
    _check_name(code)
    if announces and FOLDER in code.file.parts:
        print(f"runs {shown(code.file)}", file=sys.stderr)
    _put_first(code)
    try:
        with mock.patch.object(sys, "argv", [str(code.file)]):  # as of a script without any
            loaded, sources = modules.import_anew(code.module, code.package)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a script that ends with sys.exit() too
        raise ConfigError(
            f"{shown(code.file)}: does not import: {described(error, code.root)}"
        ) from error
    if not code.is_copy:
        code = code.with_files(_files(loaded, code.root), sources)
    _imports.append(_Import(code, loaded))
    return _imports[-1]


def _files(loaded: Mapping[str, ModuleType], root: Path) -> dict[Path, Path]:
    """Return the files of these modules, by their paths in a copy."""
    files = {name: module.__dict__.get("__file__") for name, module in loaded.items()}
    return {
        path: Path(file)
        for name, file in files.items()
        if file is not None
        for path in modules.relative_paths(name, Path(file), root)
    }


def loaded_files(code: Code | None) -> dict[Path, Path]:
    """Return the files of the user's that this process has loaded, by their paths in a copy."""
    return _files(modules.loaded(code.package), code.root) if code is not None else {}


def extend(code: Code | None, files: Mapping[Path, Path], before_s: float) -> None:
    """Let the version and the copies of a file include what a training has loaded later, besides
    what its import has. `files`: as `loaded_files` returns them, of a process that started at
    `before_s`. Raises `ConfigError` if one was changed since.
    """
    done = next((one for one in _imports if code and _is_import_of(one.code, code)), None)
    if code is None or code.is_copy or done is None:
        return
    late = {path: file for path, file in files.items() if path not in code.contents}
    for file in late.values():
        why = "was changed while the workload was tried; start again"
        refuse(file.stat().st_mtime > before_s, f"{shown(file)}: {why}")
    done.code = code.with_files(late, {})


def count_added(copy: Code) -> None:
    """Let the version of a copy include what a training has imported by name since its import."""
    for done in _imports:
        if done.code.file == copy.file and done.code.version == copy.version:
            done.code = read(copy.file)


def _put_first(code: Code) -> None:
    """Let imports by name find the files in this folder first."""
    if str(code.root) in sys.path:
        sys.path.remove(str(code.root))
    if code.root not in _roots:
        _roots.append(code.root)
    sys.path.insert(0, str(code.root))  # as Python does for a script; loader processes inherit it
    if code.is_copy:
        copies.isolate(code.root, code.entry)


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
    message, inner = _named(error) + missing_beside(error, *roots), error
    while (
        below := inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)
    ) is not None:
        inner = below
    message += f", from {_named(inner)}" * (inner is not error)
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
    where = f"{truncate(str(error.filename), 60)}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}{missing_beside(error)}"


def missing_beside(error: BaseException, *roots: Path) -> str:
    """Return why a copied workload lacks a file, as a clause; '' for any other error."""
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, str):
        return ""
    path = Path(error.filename).absolute()
    copies = [
        root for root in (*roots, *_roots) if root.name == FOLDER and path.is_relative_to(root)
    ]
    if not copies:
        return ""
    parents = [part for part in (path, *path.parents) if part.is_relative_to(copies[0])]
    if (link := next((part for part in parents if part.is_symlink()), None)) is None:
        when = "data that lay beside the original when it was copied are linked there"
        return f"; the workload runs as a copy: {when}, if their names do not begin with a dot"
    if link.exists():
        return ""  # it is missing beside the original as well
    return (
        f"; {link.name} beside the copy of the workload is a link to {link.readlink()}, which is"
        " not there"
    )


def _named(error: BaseException) -> str:
    """Return an error's type and message; of a loader process's, its traceback's last line."""
    above, torch_says, _ = str(error).partition("Original Traceback")
    if torch_says:
        return f"{str(error).strip().splitlines()[-1]} ({above.strip().removesuffix('.')})"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _own(file: str, roots: Iterable[Path]) -> bool:
    """Return whether a file is the user's: in one of the folders, and no installed package."""
    inside = any(Path(file).is_relative_to(root) for root in (*roots, *_roots))
    return inside and modules.is_users(file)


def trace(error: BaseException) -> str:
    """Return the traceback without tunediff's own frames, unless there are no others."""
    link: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    first = link
    while link is not None:  # the error, then its causes
        others = [
            frame
            for frame in link.stack
            if not Path(frame.filename).is_relative_to(modules.PACKAGE)
        ]
        if others and others != list(link.stack):
            link.stack = traceback.StackSummary.from_list(others)
        link = link.__cause__ or link.__context__
    assert first is not None
    return "".join(first.format())
