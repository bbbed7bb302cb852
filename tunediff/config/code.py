"""Workloads in files of the user's own: found, imported, and taken along with what they import from their folder."""

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

FOLDER = "workload"
"""Where a copy lies in the folder of a search, of a training, and beside an exported configuration."""
_LOOKS_BESIDE = (b"__file__", b"__path__", b"importlib.resources")
"""What stands in files that read data by the place where they lie themselves."""
_NO_DATA = ("__pycache__", "ray_results")
"""Folders that are not read as data: what Python and tunediff itself write."""
_PACKAGE = Path(__file__).resolve().parents[1]
_imported: dict[str, dict[str, ModuleType]] = {}
"""What was imported from users' files, by version and name: a copy is not imported beside its original."""
_roots: list[Path] = []
"""Where these files lie."""
_names: set[str] = set()
"""What these modules and those that they import are called."""
announces = False
"""Whether stderr names a file that lies in the folder of a search, a training or an export before it is run: commands
do, for a user who may have meant to look at results only."""


class WorkloadError(RuntimeError):
    """A workload's `train(trial)` does not keep to what a training needs; the message says what to write."""


@dataclasses.dataclass(frozen=True, eq=False)
class Code:
    """A file and all that it imports from its folder, at any depth, also inside functions."""

    root: Path
    """What is put on the path of imports: the folder of the file, or the one above its outermost package."""
    file: Path
    """Absolute."""
    contents: Mapping[Path, bytes]
    """By path relative to `root`."""

    @functools.cached_property
    def version(self) -> str:
        """12 hex digits that are equal exactly for equal contents."""
        digest = hashlib.sha256()
        for path, content in sorted(self.contents.items()):
            digest.update(repr((path.as_posix(), content)).encode())
        return digest.hexdigest()[:12]

    @property
    def module(self) -> str:
        """What it is imported as."""
        return _name(self.file.relative_to(self.root))

    def copy(self, folder: Path) -> Path:
        """Put it all into `folder`; returns where the file lies then. Raises `ConfigError` if another lies there."""
        for path, content in self.contents.items():
            there = folder / path
            taken = there.exists() and there.read_bytes() != content
            refuse(taken, f"{there}: is a file of another workload already; choose another folder")
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(content)
        if any(word in content for content in self.contents.values() for word in _LOOKS_BESIDE):
            self._link_data(folder)
        return folder / self.file.relative_to(self.root)

    def _link_data(self, folder: Path) -> None:
        """Link what lies beside the files and is neither code nor hidden: they may read it by their own path."""
        for place in {self.root / path.parent for path in self.contents} | {self.root}:
            for entry in place.iterdir():
                there = folder / entry.relative_to(self.root)
                no_data = entry.suffix == ".py" or entry.name in _NO_DATA or (entry / "__init__.py").exists()
                # A link to a folder that holds the copy would let it contain itself.
                around = folder.resolve().is_relative_to(entry.resolve())
                if no_data or around or entry.name.startswith(".") or there.exists() or there.is_symlink():
                    continue
                with contextlib.suppress(OSError):  # a file system without links: what is missing is told by its name
                    there.symlink_to(entry.resolve())


def locate(name: str, where: str, folder: Path) -> Path:
    """The file that `mine.py`, relative to `folder`, or `package.module` names. Raises `ConfigError`."""
    if name.endswith(".py"):
        path = (folder / Path(name).expanduser()).absolute()
        refuse(not path.is_file(), f"{where}: workload: {name}: no such file in {path.parent}")
        return path
    try:
        if "" not in sys.path:
            sys.path.append("")  # as `python -m` has it
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{where}: workload: {name}: cannot be imported: {error}") from None
    origin = Path(spec.origin or "") if spec is not None else Path()
    refuse(origin.suffix != ".py", f"{where}: workload: {name}: no such module; allowed: a file such as mine.py too")
    return origin.absolute()


def read(file: Path) -> Code:
    """A file with what it imports from its folder. Raises `ConfigError` for what is not Python."""
    root, packages = file.parent, list[Path]()
    while (root / "__init__.py").is_file():
        packages.append(root / "__init__.py")
        root = root.parent
    contents: dict[Path, bytes] = {}
    waiting = [file, *packages]  # they run too, and without them a copy would be no package
    while waiting:
        path = waiting.pop()
        if (relative := path.relative_to(root)) in contents:
            continue
        try:
            contents[relative] = path.read_bytes()
            tree = ast.parse(contents[relative], str(path))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"{shown(path)}: does not import: {described(error, root)}") from None
        for name in _imports(tree, relative):
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                stem = root.joinpath(*parts[:end])
                waiting += [one for one in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py") if one.is_file()]
    return Code(root, file, contents)


def _imports(tree: ast.AST, relative: Path) -> Iterator[str]:
    """Dotted names of all that may be a module."""
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
    """The module, imported once for equal contents. Raises `ConfigError` with the user's own line.

    From now on its names mean its own modules: another version of it may have been imported meanwhile, and functions
    import later, as loader processes do.
    """
    known = _imported.get(code.version)
    if known is None:
        _check_name(code)
        if announces and code.root.name == FOLDER:
            print(f"runs {shown(code.file)}", file=sys.stderr)
        _put_first(code)
        module = _import(code)
        names = [name for name in map(_name, code.contents) if name in sys.modules]
        known = _imported[code.version] = {name: sys.modules[name] for name in names} | {code.module: module}
    elif sys.modules.get(code.module) is not known[code.module]:
        _put_first(code)
        sys.modules.update(known)
    return known[code.module]


def _put_first(code: Code) -> None:
    """Nothing of another workload is imported in the place of its modules."""
    for name in map(_name, code.contents):
        if name in _names:  # of another workload, or of what this one was before
            sys.modules.pop(name, None)
        _names.add(name)
    if str(code.root) in sys.path:
        sys.path.remove(str(code.root))
    _roots.append(code.root)
    sys.path.insert(0, str(code.root))  # as Python does for a script; loader processes get it from here
    importlib.invalidate_caches()


def _import(code: Code) -> ModuleType:
    try:
        return importlib.import_module(code.module)
    except ConfigError:
        raise
    except BaseException as error:  # a script that ends with sys.exit() too
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(f"{shown(code.file)}: does not import: {described(error, code.root)}") from error


def _check_name(code: Code) -> None:
    top = code.module.partition(".")[0]
    spec = None if top in sys.stdlib_module_names or top in _names else importlib.util.find_spec(top)
    installed = spec is not None and any(part in ("site-packages", "dist-packages") for part in _parts(spec.origin))
    ours = installed and spec is not None and Path(spec.origin or "").is_relative_to(code.root)
    hidden = top in sys.stdlib_module_names or (installed and not ours)
    refuse(hidden, f"{shown(code.file)}: hides the module {top} that is installed; give the file another name")


def _parts(origin: str | None) -> tuple[str, ...]:
    return Path(origin or "").parts


def _name(relative: Path) -> str:
    return ".".join(relative.with_suffix("").parts).removesuffix(".__init__")


def near(name: str, folder: Path) -> str:
    """Where the user's file that a journal in `folder` names lies now, should that folder or its search have moved."""
    if name.endswith(".py"):
        inside = Path(name.rpartition(f"/{FOLDER}/")[2])
        for place in (folder, folder.parent.parent):
            if not inside.is_absolute() and (place / FOLDER / inside).is_file():
                return str((place / FOLDER / inside).absolute())
    return name


# -------------------------------------------------------------------------------------------------- what went wrong
def shown(path: Path) -> str:
    """A path as a person would type it here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def described(error: BaseException, *roots: Path) -> str:
    """`ValueError: no such file (mine.py, line 12: x = read())`: an error with the innermost line of the user's own,
    which stands below one of `roots` or of the folders that workloads were imported from."""
    words, inner = _named(error) + missing_beside(error, *roots), error
    while (below := inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)) is not None:
        inner = below
    words += f", from {_named(inner)}" * (inner is not error)
    if isinstance(error, SyntaxError) and error.filename and _own(error.filename, roots):
        text = (error.text or linecache.getline(error.filename, error.lineno or 0)).strip()
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}, line {error.lineno}: {text})"
    frames = [one for one in traceback.extract_tb(error.__traceback__) if _own(one.filename, roots)]
    if not frames:
        return words
    return f"{words} ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})"


def missing_beside(error: BaseException, *roots: Path) -> str:
    """Return why a file is not there beside the copy of a workload, as a clause; "" for any other error."""
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, str):
        return ""
    path = Path(error.filename).absolute()
    copies = [root for root in (*roots, *_roots) if root.name == FOLDER and path.is_relative_to(root)]
    if not copies:
        return ""
    below = [part for part in (path, *path.parents) if part.is_relative_to(copies[0])]
    if (link := next((part for part in below if part.is_symlink()), None)) is None:
        when = "data that lay beside the original when it was copied are linked there"
        return f"; the workload runs as a copy: {when}, if their names do not begin with a dot"
    if link.exists():
        return ""  # it is missing beside the original, too
    return f"; {link.name} beside the copy of the workload is a link to {link.readlink()}, which is not there"


def _named(error: BaseException) -> str:
    """`ValueError: no such file`; what a loader process raised brings its traceback, of which the last line says it."""
    above, torch_says, _ = str(error).partition("Original Traceback")
    if torch_says:
        return f"{str(error).strip().splitlines()[-1]} ({above.strip().removesuffix('.')})"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _own(file: str, roots: Iterable[Path]) -> bool:
    inside = any(Path(file).is_relative_to(root) for root in (*roots, *_roots))
    return inside and "site-packages" not in Path(file).parts


def trace(error: BaseException) -> str:
    """The traceback without our own frames, where there are others: the user's, and those of what he calls."""
    told: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    whole = told
    while told is not None:
        others = [one for one in told.stack if not Path(one.filename).is_relative_to(_PACKAGE)]
        if others and others != list(told.stack):
            told.stack = traceback.StackSummary.from_list(others)
        told = told.__cause__ or told.__context__
    assert whole is not None
    return "".join(whole.format())
