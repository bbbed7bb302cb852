"""Fields of a user's dataclass as checked knobs: their types made strict, their descriptions."""

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

from tunediff.config.knobs import STRICT, ConfigError, arms, made_section, refuse, unwrap

SUPPORTED = (
    "int, float, bool, str, Literal[…], tuple[int, …], each of these or None, a dataclass, a union"
    " of dataclasses"
)


def fields_of(cls: type, where: str) -> dict[str, Any]:
    """Return annotations and defaults for a checked dataclass. Raises `ConfigError`."""
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        kind = "frozen" if dataclasses.is_dataclass(cls) else "a dataclass"
        raise ConfigError(f"{where}: is not {kind}; write @dataclass(frozen=True) above it")
    content: dict[str, Any] = {"__annotations__": {}, "__doc__": cls.__doc__}
    hints, words = typing.get_type_hints(cls, include_extras=True), _words(cls)
    for field in dataclasses.fields(cls):
        name, place = field.name, f"{where}: {field.name}"
        make_default = field.default_factory
        default = field.default if make_default is dataclasses.MISSING else make_default()
        refuse(default is dataclasses.MISSING, f"{place}: has no default; the baseline needs one")
        hint = _checked(hints[name], place)
        content["__annotations__"][name] = Annotated[hint, Field(description=words.get(name))]
        content[name] = default
        if dataclasses.is_dataclass(default) and not is_pydantic_dataclass(type(default)):
            make = TypeAdapter(hint).validate_python
            plain = dataclasses.asdict(typing.cast(Any, default))
            content[name] = dataclasses.field(default_factory=functools.partial(make, plain))
    return content


def _checked(hint: Any, where: str) -> Any:
    """Return the type with strict checks of all its parts. Raises `ConfigError`."""
    kind, metadata = unwrap(hint)
    unsupported = f"{where}: unsupported type {hint}; allowed: {SUPPORTED}"
    if members := arms(kind):
        have_names = [
            dataclasses.is_dataclass(arm) and "name" in typing.get_type_hints(arm)
            for arm in members
        ]
        optional = len(members) < len(typing.get_args(kind))
        if any(map(dataclasses.is_dataclass, members)):
            needed = 'a field  name: Literal["…"] = "…"  in each, and no None'
            refuse(
                optional or not all(have_names), f"{where}: a union of dataclasses needs {needed}"
            )
            if not any(isinstance(mark, FieldInfo) for mark in metadata):
                metadata.append(Field(discriminator="name"))
        else:
            refuse(len(members) > 1, unsupported)
        kind = Union[tuple(_checked(arm, where) for arm in members) + ((None,) if optional else ())]  # noqa: UP007
    elif dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not is_pydantic_dataclass(kind):
            kind = made_section(kind.__name__, kind, fields_of(kind, where))
    elif typing.get_origin(kind) is tuple and typing.get_args(kind)[1:] == (...,):
        kind = types.GenericAlias(tuple, (_checked(typing.get_args(kind)[0], where), ...))
    elif typing.get_origin(kind) is not Literal:
        refuse(kind not in STRICT, unsupported)
        kind = STRICT[kind]
    return Annotated[kind, *metadata] if metadata else kind


def _words(cls: type) -> dict[str, str]:
    """Return the docstring below each field, where the source can be read."""
    docstrings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            body = typing.cast(
                ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            ).body
        except (OSError, TypeError, SyntaxError):
            continue
        for pair in itertools.pairwise(body):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    docstrings[name] = text
    return docstrings
