"""Find, import and copy workloads in files of the user, with what they import from their folder."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import linecache
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from tunediff.config.knobs import ConfigError, refuse
from tunediff.config.script_arguments import script_arguments
from tunediff.core.errors import TunediffError
from tunediff.core.text import shown, truncate

FOLDER = "workload"
"""Name of the folder with a copy of the workload: inside the folder of a search or a training, and
beside an exported configuration."""
_LOOKS_BESIDE = (b"__file__", b"__path__", b"importlib.resources")
"""Texts in files that read data relative to their own location."""
_NO_DATA = ("__pycache__", "ray_results")
"""Folders that are not data: Python and tunediff itself write them."""
_PACKAGE = Path(__file__).resolve().parents[1]
_imported: dict[str, dict[str, ModuleType]] = {}
"""Modules that were imported from users' files, by version and name: a copy is not imported beside
its original."""
_roots: list[Path] = []
"""Folders of these files."""
_names: set[str] = set()
"""Names of these modules and of those that they import."""
announces = False
"""Whether to name on stderr a workload file inside the folder of a search, a training or an export
before it is run. Commands do, for a user who may have wanted only to read results."""


class WorkloadError(TunediffError, RuntimeError):
    """A workload's `train(trial)` breaks the contract with a training; the message says what to
    write."""


@dataclasses.dataclass(frozen=True, eq=False)
class Code:
    """A file and everything that it imports from its folder, at any depth, also inside
    functions."""

    root: Path
    """Folder for the import path: the folder of the file, or the one above its outermost
    package."""
    file: Path
    """Absolute path."""
    contents: Mapping[Path, bytes]
    """Content of each file, by its path relative to `root`."""

    @functools.cached_property
    def version(self) -> str:
        """Return 12 hex digits that are equal exactly for equal contents."""
        digest = hashlib.sha256()
        for path, content in sorted(self.contents.items()):
            digest.update(repr((path.as_posix(), content)).encode())
        return digest.hexdigest()[:12]

    @property
    def module(self) -> str:
        """Return the module name for the import."""
        return _name(self.file.relative_to(self.root))

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
        for path, content in self.contents.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        if any(word in content for content in self.contents.values() for word in _LOOKS_BESIDE):
            self._link_data(folder)
        return folder / self.file.relative_to(self.root)

    def remove_copy(self, folder: Path) -> None:
        """Remove the copies of these files from `folder`, where their content may be another by
        now."""
        for path in self.contents:
            (folder / path).unlink(missing_ok=True)

    def _link_data(self, folder: Path) -> None:
        """Link all data files beside the files, which the code may read by its own path; no hidden
        ones."""
        for place in {self.root / path.parent for path in self.contents} | {self.root}:
            for entry in place.iterdir():
                target = folder / entry.relative_to(self.root)
                no_data = (
                    entry.suffix == ".py"
                    or entry.name in _NO_DATA
                    or (entry / "__init__.py").exists()
                )
                # A link to a folder that contains the copy would be a circle.
                contains_copy = folder.resolve().is_relative_to(entry.resolve())
                if (
                    no_data
                    or contains_copy
                    or entry.name.startswith(".")
                    or target.exists()
                    or target.is_symlink()
                ):
                    continue
                with contextlib.suppress(
                    OSError
                ):  # a file system without links: an error later names the missing file
                    target.symlink_to(entry.resolve())


def locate(name: str, where: str, folder: Path) -> Path:
    """Return the file that `mine.py`, relative to `folder`, or `package.module` names. Raises
    `ConfigError`."""
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


def read(file: Path, root: Path | None = None) -> Code:
    """Read a file with everything that it imports from its folder. Raises `ConfigError` for what is
    not Python.

    `root`: folder for the import path, for a package without `__init__.py`.
    """
    above, packages = file.parent, list[Path]()
    while (above / "__init__.py").is_file():
        packages.append(above / "__init__.py")
        above = above.parent
    root = root or above
    contents: dict[Path, bytes] = {}
    # A package needs its __init__.py files, which run as well; from inside it, on the import path,
    # they do not.
    waiting = [file, *(path for path in packages if root in path.parent.parents)]
    while waiting:
        path = waiting.pop()
        if (relative := path.relative_to(root)) in contents:
            continue
        # Read and parse the file
        try:
            contents[relative] = path.read_bytes()
            tree = ast.parse(contents[relative], str(path))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"{shown(path)}: does not import: {described(error, root)}") from None
        # Follow its imports: every prefix of a dotted name may be a module or a package in this
        # folder
        for name in _imports(tree, relative):
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                stem = root.joinpath(*parts[:end])
                candidates = (stem.with_name(f"{stem.name}.py"), stem / "__init__.py")
                waiting += [candidate for candidate in candidates if candidate.is_file()]
    return Code(root, file, contents)


def _imports(tree: ast.AST, relative: Path) -> Iterator[str]:
    """Yield the dotted names of everything that an import may refer to."""
    package = relative.parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ([base] if base else [])
            yield from (f"{base}.{alias.name}".strip(".") for alias in node.names)


def load(code: Code) -> ModuleType:
    """Import the module, once for equal contents. Raises `ConfigError` that shows the user's own
    line.

    Afterwards the names of its modules refer to this version: another one may have been imported
    since, and functions import later, as loader processes do.
    """
    modules = _imported.get(code.version)
    if modules is None:
        _check_name(code)
        if announces and FOLDER in code.file.parts:
            print(f"runs {shown(code.file)}", file=sys.stderr)
        _put_first(code)
        module = _import(code)
        names = [name for name in map(_name, code.contents) if name in sys.modules]
        modules = _imported[code.version] = {name: sys.modules[name] for name in names} | {
            code.module: module
        }
    elif sys.modules.get(code.module) is not modules[code.module]:
        _put_first(code)
        sys.modules.update(modules)
    return modules[code.module]


def _put_first(code: Code) -> None:
    """Make sure that the names of these files refer to these files, not to modules of another
    workload."""
    for name in map(_name, code.contents):
        if name in _names:  # of another workload, or of an earlier version of this one
            sys.modules.pop(name, None)
        _names.add(name)
    if str(code.root) in sys.path:
        sys.path.remove(str(code.root))
    _roots.append(code.root)
    sys.path.insert(0, str(code.root))  # as Python does for a script; loader processes inherit it
    importlib.invalidate_caches()


def _import(code: Code) -> ModuleType:
    """Import the module. Raises `ConfigError` for any error, and for an exit, of the user's
    code."""
    try:
        with script_arguments(code.file):
            return importlib.import_module(code.module)
    except ConfigError:
        raise
    except BaseException as error:  # a script that ends with sys.exit() too
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(
            f"{shown(code.file)}: does not import: {described(error, code.root)}"
        ) from error


def _check_name(code: Code) -> None:
    """Raise `ConfigError` if the file has the name of an installed module or of one of the standard
    library."""
    top = code.module.partition(".")[0]
    spec = (
        None if top in sys.stdlib_module_names or top in _names else importlib.util.find_spec(top)
    )
    installed = spec is not None and not {"site-packages", "dist-packages"}.isdisjoint(
        Path(spec.origin or "").parts
    )
    own = installed and spec is not None and Path(spec.origin or "").is_relative_to(code.root)
    shadowed = top in sys.stdlib_module_names or (installed and not own)
    refuse(
        shadowed,
        f"{shown(code.file)}: shadows the module {top} that is installed; give the file another"
        " name",
    )


def _name(relative: Path) -> str:
    return ".".join(relative.with_suffix("").parts).removesuffix(".__init__")


# ---- what went wrong
def described(error: BaseException, *roots: Path) -> str:
    """Describe an error with the innermost line of the user's code: `ValueError: … (mine.py, line
    12: x = read())`.

    The user's code is what lies below one of `roots` or of the folders from which workloads were
    imported.
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
    """Return why a file is missing beside the copy of a workload, as a clause; '' for any other
    error."""
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
    """Return type and message of an error; of a loader process's error, the last line of its
    traceback."""
    above, torch_says, _ = str(error).partition("Original Traceback")
    if torch_says:
        return f"{str(error).strip().splitlines()[-1]} ({above.strip().removesuffix('.')})"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _own(file: str, roots: Iterable[Path]) -> bool:
    """Return whether a file belongs to the user: below one of the folders, and not an installed
    package or this one."""
    inside = any(Path(file).is_relative_to(root) for root in (*roots, *_roots))
    return (
        inside
        and "site-packages" not in Path(file).parts
        and not Path(file).resolve().is_relative_to(_PACKAGE)
    )


def trace(error: BaseException) -> str:
    """Return the traceback without tunediff's own frames, unless there are no others."""
    link: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    whole = link
    while link is not None:  # the error, then its causes
        others = [
            frame for frame in link.stack if not Path(frame.filename).is_relative_to(_PACKAGE)
        ]
        if others and others != list(link.stack):
            link.stack = traceback.StackSummary.from_list(others)
        link = link.__cause__ or link.__context__
    assert whole is not None
    return "".join(whole.format())
