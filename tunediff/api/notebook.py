"""Workloads that a program hands over as objects: their code is written to a file, which workers
and resumes read.

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tunediff.config import ConfigError, code
from tunediff.config.workload import OPTIONAL
from tunediff.core.files import write_text

NEEDED = ("Knobs", "OBJECTIVE", "train")
MEMBERS = (*NEEDED, "BASELINE", "SEARCH", "PRESETS", "UNIT", "QUANTITIES", *OPTIONAL)
"""What a workload may declare."""
OF_IPYTHON = ("exit", "get_ipython", "open", "quit")
"""Names that IPython itself binds in a notebook."""
DEFINES = ast.ClassDef | ast.FunctionDef
"""Statements that define what can be copied."""
FOLDER, FILE = ".notebook", "notebook.py"


def named(workload: Any, storage: Path) -> str:
    """Return what names a workload on a command line; code that is in no file of its own is written
    into `storage`.

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
    if not isinstance(members["train"], types.FunctionType):
        raise ConfigError(
            f"train: {members['train']!r} is not allowed; allowed: a function of one argument"
        )
    module = _Module(_scope_of(members))
    for name, value in members.items():
        module.add(name, value, "workload")
    version = hashlib.sha256(
        repr([module.text(), sorted(own.version for own in module.own)]).encode()
    ).hexdigest()[:12]
    path = storage / FOLDER / version / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, module.text())
    for own in module.own:
        own.copy(path.parent)
    return str(path)


def _scope_of(members: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the global names of the program: of `train`, unless it is imported and others are of
    the program."""
    train: types.FunctionType = inspect.unwrap(members["train"])
    imported = train.__module__ != "__main__"
    if imported and any(
        getattr(value, "__module__", None) == "__main__" for value in members.values()
    ):
        return vars(sys.modules["__main__"])
    return train.__globals__


@dataclasses.dataclass(frozen=True)
class _Definition:
    """A statement at the top level of a program that binds a name."""

    node: ast.stmt
    source: str
    """The text of the statement, with its decorators."""


class _Module:
    """The text of a module to be: every statement after those that it uses."""

    def __init__(self, scope: Mapping[str, Any]) -> None:
        """`scope`: the global names of the program."""
        self._scope, self._definitions = scope, _definitions(scope)
        self._seen: set[str] = set()
        self._imports: list[str] = []
        self._statements: list[str] = []
        self.own: list[code.Code] = []
        """Files of the user that are imported."""
        if scope.get("annotations") is __future__.annotations:
            self._imports.append("from __future__ import annotations")

    def text(self) -> str:
        return "\n".join(self._imports) + "\n\n\n" + "\n\n\n".join(self._statements) + "\n"

    def add(self, name: str, value: Any, user: str) -> None:
        """Add what binds `name` to `value`, which `user` uses, and everything that it uses. Raises
        `ConfigError`."""
        if name in self._seen:
            return
        self._seen.add(name)
        # A member of the workload may have another name than in the program, where that name may be
        # something else
        definition = self._definitions.get(name) if self._scope.get(name) is value else None
        if definition is not None and isinstance(definition.node, ast.Import | ast.ImportFrom):
            self._import(definition.source)
        elif definition is not None:  # decorators may have made it any object
            self._copy(name, definition.source)
        elif isinstance(value, types.ModuleType):
            self._import(f"import {value.__name__} as {name}")
        elif isinstance(value, type | types.FunctionType):
            self._define(name, value)
        elif (plain := _expression(value)) is not None:
            expression, classes = plain
            for kind in classes:
                self.add(kind.__name__, kind, name)
            self._statements.append(f"{name} = {expression}")
        else:
            called = type(value).__name__
            advice = "make it inside train(trial) or in a function, or import it from a file"
            raise ConfigError(
                f"{user}: uses the variable {name}, a {called}, which no file can hold; {advice}"
            )

    def _define(self, name: str, value: Any) -> None:
        """Add a class or a function that the program does not bind to this name, or its import from
        elsewhere."""
        own = value.__name__
        if value.__module__ != self._scope.get("__name__"):
            self._import(
                f"from {value.__module__} import {value.__qualname__.partition('.')[0]} as {name}"
            )
            return
        definition = self._definitions.get(own)
        # The workload may hold what an earlier run of the cell has made: the last definition counts
        if (
            value.__qualname__ == own
            and definition is not None
            and isinstance(definition.node, DEFINES)
        ):
            if own == name or own not in self._seen:
                self._seen.add(own)
                self._copy(own, definition.source)
            if own != name:
                self._statements.append(f"{name} = {own}")
            return
        if getattr(value, "__closure__", None):
            outer = ", ".join(value.__code__.co_freevars)
            raise ConfigError(
                f"{name}: uses {outer} of the function around it; make that a knob or a global name"
            )
        where = "at the top level of a cell or a file"
        raise ConfigError(
            f"{name}: the definition of {value.__qualname__} is not found; write it {where}"
        )

    def _copy(self, name: str, source: str) -> None:
        """Add the definition of a class or a function as it stands in the program, after what it
        uses."""
        for used in _globals_of(source):
            if used != name and self._is_bound(used):
                self.add(used, self._scope[used], name)
        self._statements.append(source)

    def _is_bound(self, name: str) -> bool:
        """Return whether the program binds a name, which may be that of a builtin: `input = 64`."""
        if name not in self._scope or not (hasattr(builtins, name) or name in OF_IPYTHON):
            return name in self._scope
        unchanged = (
            name in OF_IPYTHON
            or name.startswith("__")
            or self._scope[name] is getattr(builtins, name)
        )
        return name in self._definitions or not unchanged

    def _import(self, statements: str) -> None:
        """Add imports, one a line; remember files of the user, which lie in or below the working
        directory."""
        self._imports.append(statements)
        for module in _modules(statements):
            origin = getattr(sys.modules.get(module), "__file__", None)
            path = Path(origin or "/")
            own = module.partition(".")[0] != "tunediff" and path.is_relative_to(Path.cwd())
            if own and not set(path.parts) & {"site-packages", "dist-packages"}:
                depth = module.count(".") + (path.name == "__init__.py")
                self.own.append(code.read(path, path.parents[depth]))


def _modules(statements: str) -> Iterator[str]:
    """Yield the names of all modules that imports may load: in `from package import name` both may
    be one."""
    for line in statements.splitlines():
        node = ast.parse(line).body[0]
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _definitions(scope: Mapping[str, Any]) -> dict[str, _Definition]:
    """Return what the program defines and imports at its top level, by name; the last statement
    counts."""
    cells = scope.get("In")  # of IPython: the source of every cell that was run
    if not isinstance(cells, list):
        file = scope.get("__file__")
        cells = (
            [Path(file).read_text(encoding="utf-8")]
            if file is not None and Path(file).is_file()
            else []
        )
    definitions: dict[str, _Definition] = {}
    for cell in cells:
        try:
            tree = ast.parse(cell)
        except (SyntaxError, ValueError):  # it did not run either
            continue
        for node in tree.body:
            for name, statement in _bound(node, cell):
                earlier = definitions.get(name)
                if (
                    statement.startswith("import ")
                    and earlier is not None
                    and isinstance(earlier.node, ast.Import)
                ):
                    lines = [*earlier.source.splitlines(), statement]
                    if not any(
                        " as " in line for line in lines
                    ):  # `import a.b` and `import a.c` both bind `a`
                        statement = "\n".join(dict.fromkeys(lines))
                if statement:
                    definitions[name] = _Definition(node, statement)
                else:
                    definitions.pop(name, None)  # a variable now
    return definitions


def _bound(node: ast.stmt, cell: str) -> Iterator[tuple[str, str]]:
    """Yield the names that a statement binds, and the source that binds each; '' for variables."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        start = (
            f"from {'.' * node.level}{node.module or ''} "
            if isinstance(node, ast.ImportFrom)
            else ""
        )
        for alias in _imported(node):
            yield (
                alias.asname or alias.name.partition(".")[0],
                f"{start}import {ast.unparse(alias)}",
            )
    elif isinstance(node, DEFINES):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        yield node.name, "\n".join(cell.splitlines()[first - 1 : node.end_lineno])
    else:
        parts = list(ast.walk(node))
        loops = [part.target for part in parts if isinstance(part, ast.comprehension)]
        local = {id(inner) for target in loops for inner in ast.walk(target)}
        for inner in parts:
            if (
                isinstance(inner, ast.Name)
                and isinstance(inner.ctx, ast.Store)
                and id(inner) not in local
            ):
                yield inner.id, ""


def _imported(node: ast.Import | ast.ImportFrom) -> list[ast.alias]:
    """Return what an import statement names; for a `*`, each name that it stands for."""
    if not isinstance(node, ast.ImportFrom) or node.names[0].name != "*":
        return node.names
    module = sys.modules.get(node.module or "")
    content = {} if module is None else vars(module)
    return [
        ast.alias(name)
        for name in content.get("__all__", [name for name in content if not name.startswith("_")])
    ]


def _globals_of(source: str) -> list[str]:
    """Return the global names that a definition uses, in its own body and in those inside it."""
    names: dict[str, None] = {}
    waiting = [compile(source, "<definition>", "exec", dont_inherit=True)]
    while waiting:
        body = waiting.pop()
        bound = set()
        for step in dis.get_instructions(body):
            if step.opname == "STORE_NAME":
                bound.add(step.argval)
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval not in bound:
                names[step.argval] = None  # also in `width: int = width` of a class
        waiting += [constant for constant in body.co_consts if isinstance(constant, types.CodeType)]
    return sorted(names)


def _expression(value: Any) -> tuple[str, list[type]] | None:
    """Return Python's text for a plain value, and the classes that it names; None for any other
    value.

    Types count exactly: the `repr` of a named tuple, an `IntEnum` or a `torch.Size` names what the
    file has not.
    """
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if kind in (float, complex) and not cmath.isfinite(value):  # its `repr` is a name: inf, nan
        return f"{kind.__name__}({str(value)!r})", []
    if kind in (bool, int, float, complex, str, bytes, types.NoneType):
        return repr(value), []
    if kind is dict:
        parts = [*value.keys(), *value.values()]
    elif kind in (list, tuple, set):
        parts = list(value)
    elif dataclasses.is_dataclass(value) and kind.__module__.partition(".")[0] == "tunediff":
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return None
    inside = [expression for part in parts if (expression := _expression(part)) is not None]
    if len(inside) < len(parts):
        return None
    texts, classes = [text for text, _ in inside], [own for _, classes in inside for own in classes]
    if kind is dict:
        return (
            (
                f"{{{', '.join(map(': '.join, zip(texts[: len(value)], texts[len(value) :], strict=True)))}}}"
            ),
            classes,
        )
    if kind is list:
        return f"[{', '.join(texts)}]", classes
    if kind is tuple:
        return f"({''.join(f'{text}, ' for text in texts).rstrip()})", classes
    if kind is set:
        return f"set([{', '.join(sorted(texts))}])", classes
    names = [field.name for field in dataclasses.fields(value)]
    return f"{kind.__name__}({', '.join(map('='.join, zip(names, texts, strict=True)))})", [
        *classes,
        kind,
    ]
