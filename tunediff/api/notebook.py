"""Workloads given as objects: their code is written to a file, for workers and resumes.

What `Knobs`, `OBJECTIVE` and `train` of a script or of a notebook's cells use is looked up at the
top level of that code: definitions and imports are copied as they stand there, plain values as they
are now.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import hashlib
import inspect
import pickle
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tunediff.config import ConfigError
from tunediff.config.workload import OPTIONAL
from tunediff.core.files import write_text

NEEDED = ("Knobs", "OBJECTIVE", "train")
MEMBERS = (*NEEDED, "BASELINE", "SEARCH", "PRESETS", "UNIT", "QUANTITIES", *OPTIONAL)
"""What a workload may declare."""
FOLDER, FILE = ".notebook", "notebook.py"
MOST_BYTES = 2**16
"""Of a value that is written into the file."""
PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, dict, list, tuple, set, np.generic)


class _NoTextError(Exception):
    """A file cannot hold this value."""


def named(workload: Any, storage: Path) -> str:
    """Return the name of a workload's file; code without one is written into `storage`.

    Raises `ConfigError` for an object that is no workload, and for a member that no file can hold.
    """
    if isinstance(workload, str | Path):
        return str(workload)
    if isinstance(workload, types.ModuleType) and workload.__name__ != "__main__":
        return str(workload.__file__)
    if missing := [name for name in NEEDED if not hasattr(workload, name)]:
        allowed = "a path, a module, or an object with Knobs, OBJECTIVE and train"
        raise ConfigError(
            f"workload: {workload!r} is not allowed: it has no {missing[0]}; allowed: {allowed}"
        )
    text = _text({name: getattr(workload, name) for name in MEMBERS if hasattr(workload, name)})
    version = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = storage / FOLDER / version / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return str(path)


def _text(members: Mapping[str, Any]) -> str:
    """Return the text of a module with these members: every statement after those that it uses.

    A name that is not found in the program, or whose value no file can hold, is one of a function's
    own, or is missed when it is used. Raises `ConfigError` for such a member.
    """
    scope = _scope_of(members)
    sources, statements, added = _sources(scope), ["import pickle"], set[str]()
    if scope.get("annotations") is __future__.annotations:
        statements.insert(0, "from __future__ import annotations")

    def add(name: str, value: Any) -> None:
        if name in added:
            return
        added.add(name)
        # A member of the workload may have another name than in the program, and be what an
        # earlier run of its cell has made: the last definition counts.
        is_own = getattr(value, "__module__", None) == scope.get("__name__")
        defined = getattr(value, "__qualname__", "") if is_own else ""
        if scope.get(name) is value and name in sources:
            source = sources[name]
        elif defined in sources:
            source = sources[name] if name == defined else f"{name} = {defined}"
        else:
            source = _line(name, value)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name) and node.id in scope and node.id[:2] != "__":
                with contextlib.suppress(_NoTextError):
                    add(node.id, scope[node.id])
        statements.append(source)

    for name, value in members.items():
        try:
            add(name, value)
        except _NoTextError:
            raise ConfigError(
                f"{name}: {value!r} is not allowed; allowed: a plain value, or a class or function"
                " that stands at the top level of a cell or a file"
            ) from None
    return "\n\n\n".join(statements) + "\n"


def _scope_of(members: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the program's global names: those of `train`, unless it is imported."""
    train = inspect.unwrap(members["train"])
    modules = {getattr(value, "__module__", None) for value in members.values()}
    if getattr(train, "__module__", None) != "__main__" and "__main__" in modules:
        return vars(sys.modules["__main__"])
    return getattr(train, "__globals__", {})


def _sources(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return the source of the program's top-level definitions and imports by name."""
    cells = scope.get("In")  # of IPython: the source of every cell that was run
    if not isinstance(cells, list):
        file = Path(scope.get("__file__") or "/")
        cells = [file.read_text(encoding="utf-8")] if file.is_file() else []
    sources = dict[str, str]()
    for cell in cells:
        tree = ast.Module([], [])
        with contextlib.suppress(SyntaxError, ValueError):  # it did not run either
            tree = ast.parse(cell)
        for node in tree.body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    # `import a.b` and `import a.c` both bind `a`
                    earlier = "" if alias.asname else sources.get(name, "")
                    lines = [earlier] * earlier.startswith("import ")
                    sources[name] = "\n".join([*lines, ast.unparse(ast.Import([alias]))])
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    line = ast.unparse(ast.ImportFrom(node.module, [alias], node.level))
                    sources[alias.asname or alias.name] = line
            elif isinstance(node, ast.ClassDef | ast.FunctionDef):
                first = min(part.lineno for part in (node, *node.decorator_list))
                sources[node.name] = "\n".join(cell.splitlines()[first - 1 : node.end_lineno])
            else:
                for target in getattr(node, "targets", [getattr(node, "target", None)]):
                    sources.pop(getattr(target, "id", ""), None)  # a variable now
    return sources


def _line(name: str, value: Any) -> str:
    """Return the statement that binds a name to a module, to what a module has at its top level, or
    to a plain value. Raises `_NoTextError` for any other."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module, top = getattr(value, "__module__", ""), getattr(value, "__name__", "")
    if module != "__main__" and top and getattr(sys.modules.get(module), top, None) is value:
        return f"from {module} import {top} as {name}"
    with contextlib.suppress(SyntaxError, ValueError):
        literal = ast.literal_eval(repr(value))
        if type(literal) is type(value) and literal == value:
            return f"{name} = {value!r}"
    if isinstance(value, PLAIN) or type(value).__module__.startswith("tunediff."):
        with contextlib.suppress(Exception):  # of a value inside that has no pickle
            pickled = pickle.dumps(value)
            if len(pickled) < MOST_BYTES and b"__main__" not in pickled:
                return f"{name} = pickle.loads({pickled!r})"
    raise _NoTextError
