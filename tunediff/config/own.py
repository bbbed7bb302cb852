"""Anybody's dataclass as sections whose types and bounds are checked, and which are still of his classes."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from typing import Annotated, Any, Literal, Union

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from tunediff.config.schema import STRICT, ConfigError, arms, section, unwrap

KINDS = "int, float, bool, str, Literal[…], tuple[int, …], each of these or None, a dataclass, a union of dataclasses"


def fields_of(cls: type, where: str) -> dict[str, Any]:
    """Annotations and defaults of a dataclass, for a class that checks them. Raises `ConfigError`."""
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        kind = "frozen" if dataclasses.is_dataclass(cls) else "a dataclass"
        raise ConfigError(f"{where}: is not {kind}; write @dataclass(frozen=True) above it")
    content: dict[str, Any] = {"__annotations__": {}, "__doc__": cls.__doc__}
    hints, words = typing.get_type_hints(cls, include_extras=True), _words(cls)
    for field in dataclasses.fields(cls):
        name, at = field.name, f"{where}: {field.name}"
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is dataclasses.MISSING:
            raise ConfigError(f"{at}: has no default; the baseline needs one")
        hint = _checked(hints[name], at)
        content["__annotations__"][name] = Annotated[hint, Field(description=words.get(name))]
        content[name] = default
        if dataclasses.is_dataclass(default) and not is_pydantic_dataclass(type(default)):
            make, plain = TypeAdapter(hint).validate_python, dataclasses.asdict(typing.cast(Any, default))
            content[name] = dataclasses.field(default_factory=functools.partial(make, plain))
    return content


def _checked(hint: Any, where: str) -> Any:
    """The same type; what has parts is checked in all of them."""
    kind, metadata = unwrap(hint)
    if members := arms(kind):
        of_names = [dataclasses.is_dataclass(arm) and "name" in typing.get_type_hints(arm) for arm in members]
        optional = len(members) < len(typing.get_args(kind))
        if any(map(dataclasses.is_dataclass, members)):
            if optional or not all(of_names):
                needed = 'a field  name: Literal["…"] = "…"  in each, and no None'
                raise ConfigError(f"{where}: a union of dataclasses needs {needed}")
            if not any(isinstance(one, FieldInfo) for one in metadata):
                metadata.append(Field(discriminator="name"))
        elif len(members) > 1:
            raise ConfigError(f"{where}: {hint} is no kind of knob; allowed: {KINDS}")
        kind = Union[tuple(_checked(arm, where) for arm in members) + ((None,) if optional else ())]  # noqa: UP007
    elif dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not is_pydantic_dataclass(kind):
            kind = section(type(kind.__name__, (kind,), fields_of(kind, where)))
    elif typing.get_origin(kind) is tuple and typing.get_args(kind)[1:] == (...,):
        kind = types.GenericAlias(tuple, (_checked(typing.get_args(kind)[0], where), ...))
    elif kind in STRICT:
        kind = STRICT[kind]
    elif typing.get_origin(kind) is not Literal:
        raise ConfigError(f"{where}: {hint} is no kind of knob; allowed: {KINDS}")
    return Annotated[kind, *metadata] if metadata else kind


def _words(cls: type) -> dict[str, str]:
    """The docstring under each field, where the source can be read."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_pydantic_dataclass(base):
            fields: dict[str, FieldInfo] = base.__pydantic_fields__
            found |= {name: field.description for name, field in fields.items() if field.description}
        elif dataclasses.is_dataclass(base):
            try:
                body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]).body
            except (OSError, TypeError, SyntaxError):
                continue
            for line, below in itertools.pairwise(body):
                text = below.value if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr) else None
                if isinstance(line, ast.AnnAssign) and isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found[ast.unparse(line.target)] = text.value
    return found
