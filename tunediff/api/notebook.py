"""Workloads given as objects: their code is written to a file, for workers and resumes.

What `Knobs`, `OBJECTIVE` and `train` of a script or of a notebook's cells use is looked up at the
top level of that code: definitions and imports are copied as they stand there, plain values as they
are now.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import cmath
import dataclasses
import dis
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
OF_IPYTHON = ("exit", "get_ipython", "open", "quit")
"""Names that IPython itself binds in a notebook."""
FOLDER, FILE = ".notebook", "notebook.py"


def named(workload: Any, storage: Path) -> str:
    """Return the name of a workload's file; code without one is written into `storage`.

    Raises `ConfigError` for an object that is no workload, and for code that a file cannot hold.
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
    train = members["train"]
    if not isinstance(train, types.FunctionType):
        raise ConfigError(f"train: {train!r} is not allowed; allowed: a function of one argument")
    module = _ModuleText(_scope_of(members))
    for name, value in members.items():
        module.add(name, value, "workload")
    version = hashlib.sha256(module.text().encode()).hexdigest()[:12]
    path = storage / FOLDER / version / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, module.text())
    return str(path)


def _scope_of(members: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the program's global names: those of `train`, unless it is imported."""
    train: types.FunctionType = inspect.unwrap(members["train"])
    modules = {getattr(value, "__module__", None) for value in members.values()}
    if train.__module__ != "__main__" and "__main__" in modules:
        return vars(sys.modules["__main__"])
    return train.__globals__


class _ModuleText:
    """The text of a module in the making: every statement after those that it uses."""

    def __init__(self, scope: Mapping[str, Any]) -> None:
        """`scope`: the global names of the program."""
        self._scope, self._definitions = scope, _definitions(scope)
        self._added: set[str] = set()
        self._imports: list[str] = []
        self._statements: list[str] = []
        if scope.get("annotations") is __future__.annotations:
            self._imports.append("from __future__ import annotations")

    def text(self) -> str:
        return "\n".join(self._imports) + "\n\n\n" + "\n\n\n".join(self._statements) + "\n"

    def add(self, name: str, value: Any, user: str) -> None:
        """Add what binds `name` to `value` for `user`, and its needs. Raises `ConfigError`."""
        if name in self._added:
            return
        self._added.add(name)
        # A member of the workload may have another name than in the program, where that name may
        # be something else.
        source = self._definitions.get(name, "") if self._scope.get(name) is value else ""
        if source.startswith(("import ", "from ")):
            self._imports.append(source)
        elif source:  # decorators may have made it any object
            self._copy(name, source)
        elif isinstance(value, types.ModuleType):
            self._imports.append(f"import {value.__name__} as {name}")
        elif isinstance(value, type | types.FunctionType):
            self._define(name, value)
        else:
            try:
                classes = list[type]()
                statement = f"{name} = {_expression(value, classes)}"
            except TypeError:
                raise ConfigError(
                    f"{user}: uses the variable {name}, a {type(value).__name__}, which no file can"
                    " hold; make it inside train(trial) or in a function, or import it from a file"
                ) from None
            for kind in classes:
                self.add(kind.__name__, kind, name)
            self._statements.append(statement)

    def _define(self, name: str, value: Any) -> None:
        """Add a class or function that the program has not bound to this name, or its import."""
        defined, top = value.__name__, value.__qualname__.partition(".")[0]
        if value.__module__ != self._scope.get("__name__"):
            self._imports.append(f"from {value.__module__} import {top} as {name}")
            return
        # The workload may hold what an earlier run of the cell has made: the last definition
        # counts.
        source = self._definitions.get(defined, "")
        if value.__qualname__ == defined and source and not source.startswith(("import ", "from ")):
            if defined == name or defined not in self._added:
                self._added.add(defined)
                self._copy(defined, source)
            if defined != name:
                self._statements.append(f"{name} = {defined}")
            return
        if getattr(value, "__closure__", None):
            outer = ", ".join(value.__code__.co_freevars)
            why = f"uses {outer} of the function around it; make that a knob or a global name"
        else:
            where = "write it at the top level of a cell or a file"
            why = f"the definition of {value.__qualname__} is not found; {where}"
        raise ConfigError(f"{name}: {why}")

    def _copy(self, name: str, source: str) -> None:
        """Add the definition of a class or function from the program, after what it uses."""
        for used in _globals_of(source):
            if used != name and self._is_bound(used):
                self.add(used, self._scope[used], name)
        self._statements.append(source)

    def _is_bound(self, name: str) -> bool:
        """Return whether the program binds a name, which may be that of a builtin: `input = 64`."""
        if name not in self._scope:
            return False
        if name in self._definitions:
            return True
        if name in OF_IPYTHON or (name.startswith("__") and hasattr(builtins, name)):
            return False
        return not hasattr(builtins, name) or self._scope[name] is not getattr(builtins, name)


# ---- what the program defines
def _definitions(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return the source of the program's top-level definitions and imports by name."""
    cells = scope.get("In")  # of IPython: the source of every cell that was run
    if not isinstance(cells, list):
        file = Path(scope.get("__file__") or "/")
        cells = [file.read_text(encoding="utf-8")] if file.is_file() else []
    sources: dict[str, str] = {}
    for cell in cells:
        try:
            tree = ast.parse(cell)
        except (SyntaxError, ValueError):  # it did not run either
            continue
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                _add_imports(sources, node)
            elif isinstance(node, ast.ClassDef | ast.FunctionDef):
                first = min(part.lineno for part in (node, *node.decorator_list))
                sources[node.name] = "\n".join(cell.splitlines()[first - 1 : node.end_lineno])
            else:
                for name in _assigned(node):
                    sources.pop(name, None)  # a variable now
    return sources


def _add_imports(sources: dict[str, str], node: ast.Import | ast.ImportFrom) -> None:
    aliases, start = node.names, ""
    if isinstance(node, ast.ImportFrom):
        start = f"from {'.' * node.level}{node.module or ''} "
        if aliases[0].name == "*":
            content = vars(sys.modules[node.module]) if node.module in sys.modules else {}
            public = [name for name in content if not name.startswith("_")]
            aliases = [ast.alias(name) for name in content.get("__all__", public)]
    for alias in aliases:
        name = alias.asname or alias.name.partition(".")[0]
        line = f"{start}import {ast.unparse(alias)}"
        lines = sources.get(name, "").splitlines()
        # `import a.b` and `import a.c` both bind `a`.
        dotted = [one for one in (*lines, line) if one.startswith("import ") and " as " not in one]
        sources[name] = "\n".join(dict.fromkeys(dotted)) if line in dotted else line


def _assigned(node: ast.stmt) -> set[str]:
    """Return the names that a statement assigns to, without those of comprehensions."""
    parts = list(ast.walk(node))
    local = {
        id(inner)
        for part in parts
        if isinstance(part, ast.comprehension)
        for inner in ast.walk(part.target)
    }
    names = [part for part in parts if isinstance(part, ast.Name) and id(part) not in local]
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def _globals_of(source: str) -> list[str]:
    """Return the global names that a definition uses, in its own body and in those inside it."""
    names: set[str] = set()
    bodies = [compile(source, "<definition>", "exec", dont_inherit=True)]
    while bodies:
        body, bound = bodies.pop(), set[str]()
        for step in dis.get_instructions(body):
            if step.opname == "STORE_NAME":
                bound.add(step.argval)
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval not in bound:
                names.add(step.argval)  # also in `width: int = width` of a class
        bodies += [constant for constant in body.co_consts if isinstance(constant, types.CodeType)]
    return sorted(names)


def _expression(value: Any, classes: list[type]) -> str:
    """Return Python's text for a plain value, and add the classes that it names to `classes`.

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
        pairs = [f"{_expression(k, classes)}: {_expression(value[k], classes)}" for k in value]
        return f"{{{', '.join(pairs)}}}"
    if kind in (list, tuple, set):
        texts = [_expression(part, classes) for part in value]
        items = f"[{', '.join(sorted(texts) if kind is set else texts)}]"
        return items if kind is list else f"{kind.__name__}({items})"
    if dataclasses.is_dataclass(value) and kind.__module__.partition(".")[0] == "tunediff":
        names = [field.name for field in dataclasses.fields(value)]
        parts = ", ".join(f"{name}={_expression(getattr(value, name), classes)}" for name in names)
        classes.append(kind)
        return f"{kind.__name__}({parts})"
    raise TypeError(f"{kind.__name__} has no literal")
