"""Workloads given as objects: their code is written to a file, for workers and resumes.

What `Knobs`, `OBJECTIVE` and `train` of a script or of a notebook's cells use is looked up at the
top level of that code: definitions and imports are copied as they stand there, plain values as they
are now.
"""

from __future__ import annotations
import __future__

import ast
import cmath
import dataclasses
import hashlib
import inspect
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
    members = {name: getattr(workload, name) for name in MEMBERS if hasattr(workload, name)}
    module = _ModuleText(_scope_of(members))
    for name, value in members.items():
        if not module.add(name, value):
            raise ConfigError(
                f"{name}: {value!r} is not allowed; allowed: a plain value, or a class or function"
                " that stands at the top level of a cell or a file"
            )
    version = hashlib.sha256(module.text().encode()).hexdigest()[:12]
    path = storage / FOLDER / version / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, module.text())
    return str(path)


def _scope_of(members: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the program's global names: those of `train`, unless it is imported."""
    train = inspect.unwrap(members["train"])
    modules = {getattr(value, "__module__", None) for value in members.values()}
    if getattr(train, "__module__", None) != "__main__" and "__main__" in modules:
        return vars(sys.modules["__main__"])
    return getattr(train, "__globals__", {})


class _ModuleText:
    """The text of a module in the making: every statement after those that it uses."""

    def __init__(self, scope: Mapping[str, Any]) -> None:
        """`scope`: the global names of the program."""
        self._scope = scope
        self._imports, self._definitions = _definitions(scope)
        self._added = set[str]()
        self._statements = list[str]()

    def text(self) -> str:
        return "\n".join(self._imports) + "\n\n\n" + "\n\n\n".join(self._statements) + "\n"

    def add(self, name: str, value: Any) -> bool:
        """Add what binds `name` to `value`, after what that uses; return whether a file can."""
        if name in self._added:
            return True
        self._added.add(name)
        defined = name
        # A member of the workload may have another name than in the program, and be what an
        # earlier run of its cell has made: the last definition counts.
        if self._scope.get(name) is not value:
            is_own = getattr(value, "__module__", None) == self._scope.get("__name__")
            defined = getattr(value, "__qualname__", "") if is_own else ""
        if (source := self._definitions.get(defined)) is not None:
            if defined != name:
                self.add(defined, self._scope[defined])
                source = f"{name} = {defined}"
            self._copy(source)
        elif isinstance(value, types.ModuleType):
            self._imports.append(f"import {value.__name__} as {name}")
        elif isinstance(value, type | types.FunctionType):
            top = value.__qualname__.partition(".")[0]
            if value.__module__ == self._scope.get("__name__") or not top.isidentifier():
                return False
            self._imports.append(f"from {value.__module__} import {top} as {name}")
        else:
            try:
                self._copy(f"{name} = {_expression(value, self._imports)}")
            except TypeError:
                return False
        return True

    def _copy(self, source: str) -> None:
        """Add a statement of the program, after what it uses; a name that is not found there, or
        whose value no file can hold, is one of a function's own, or is missed when it is used."""
        for node in ast.walk(tree := ast.parse(source)):
            if isinstance(node, ast.Name) and node.id in self._scope and node.id[:2] != "__":
                self.add(node.id, self._scope[node.id])
        imports = isinstance(tree.body[0], ast.Import | ast.ImportFrom)
        (self._imports if imports else self._statements).append(source)


# ---- what the program defines
def _definitions(scope: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Return imports of everything, and the source of the program's top-level definitions and
    other imports by name."""
    cells = scope.get("In")  # of IPython: the source of every cell that was run
    if not isinstance(cells, list):
        file = Path(scope.get("__file__") or "/")
        cells = [file.read_text(encoding="utf-8")] if file.is_file() else []
    everything, sources = list[str](), dict[str, str]()
    if scope.get("annotations") is __future__.annotations:
        everything.append("from __future__ import annotations")
    for cell in cells:
        try:
            tree = ast.parse(cell)
        except (SyntaxError, ValueError):  # it did not run either
            continue
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                _add_imports(everything, sources, node)
            elif isinstance(node, ast.ClassDef | ast.FunctionDef):
                first = min(part.lineno for part in (node, *node.decorator_list))
                sources[node.name] = "\n".join(cell.splitlines()[first - 1 : node.end_lineno])
            else:
                for target in getattr(node, "targets", [getattr(node, "target", None)]):
                    sources.pop(getattr(target, "id", ""), None)  # a variable now
    return everything, sources


def _add_imports(
    everything: list[str], sources: dict[str, str], node: ast.Import | ast.ImportFrom
) -> None:
    for alias in node.names:
        line = ast.unparse(node) if alias.name == "*" else f"import {ast.unparse(alias)}"
        if alias.name == "*":
            everything.append(line)
            continue
        name = alias.asname or alias.name.partition(".")[0]
        if isinstance(node, ast.ImportFrom):
            line = f"from {'.' * node.level}{node.module or ''} {line}"
        elif alias.asname is None and sources.get(name, "").startswith("import "):
            line = f"{sources[name]}\n{line}"  # `import a.b` and `import a.c` both bind `a`
        sources[name] = line


def _expression(value: Any, imports: list[str]) -> str:
    """Return Python's text for a plain value, and add the classes that it names to `imports`.

    Types count exactly: the `repr` of a named tuple, an `IntEnum` or a `torch.Size` uses names that
    the file does not have. Raises TypeError for such values.
    """
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if kind in (float, complex) and not cmath.isfinite(value):  # its `repr` is a name: inf, nan
        return f"{kind.__name__}({str(value)!r})"
    if kind in (bool, int, float, complex, str, bytes, types.NoneType):
        return repr(value)
    if kind is dict:
        pairs = [
            f"{_expression(key, imports)}: {_expression(value[key], imports)}" for key in value
        ]
        return f"{{{', '.join(pairs)}}}"
    if kind in (list, tuple, set):
        texts = [_expression(part, imports) for part in value]
        items = f"[{', '.join(sorted(texts) if kind is set else texts)}]"
        return items if kind is list else f"{kind.__name__}({items})"
    if dataclasses.is_dataclass(value) and kind.__module__.partition(".")[0] == "tunediff":
        values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        parts = ", ".join(f"{name}={_expression(values[name], imports)}" for name in values)
        imports.append(f"from {kind.__module__} import {kind.__name__}")
        return f"{kind.__name__}({parts})"
    raise TypeError(f"{kind.__name__} has no literal")
