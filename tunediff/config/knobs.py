"""Declare and check single knobs: what a dataclass may declare, the values of each knob, error
messages.

A section may have a method `check(config)`, which raises `Refusal` for knobs that contradict each
other, and a method `not_effective(config, device)`, which yields knobs that have no effect, and
why. Alternatives that have hyperparameters of their own are unions of dataclasses, distinguished by
their field `name`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform

import pydantic.dataclasses
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, Field, Strict, TypeAdapter

from tunediff.core.errors import ConfigError as ConfigError
from tunediff.core.errors import refuse as refuse

# Strict: "128", True and 1.0 are not whole numbers. A typing error must not silently become a
# setting.
Int = Annotated[int, Strict()]
Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Bool = Annotated[bool, Strict()]
Str = Annotated[str, Strict()]
STRICT = {int: Int, float: Float, bool: Bool, str: Str}
_FORBID = ConfigDict(extra="forbid", use_attribute_docstrings=True)
_T = TypeVar("_T")
Values = dict[str, Any]
"""Knobs by dotted name."""
Lines = dict[str, Any]
"""`key: value` lines of a file, nested: knobs by section, or other keys."""


class Refusal(Exception):  # noqa: N818 – raised by rules; ConfigError is the error
    """Raised by a section's `check`: a knob by dotted name, and why its value is not allowed with
    the others."""

    def __init__(self, knob: str, why: str) -> None:
        super().__init__(knob, why)
        self.knob, self.why = knob, why


class Fixed:
    """Marks a knob or section that no search may vary: it defines the task or its evaluation."""


class EvaluationProtocol:
    """Marks a knob of `evaluation` that later evaluations of a model (`final:`) must not change."""


class File:
    """Marks a knob that names a file or folder; made absolute: workers may run in another one."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The range in which a search without a search file draws a knob, declared with its default:

    `lr: Annotated[float, Range(1e-4, 1e-2, log=True)] = 1e-3`. Other values may still be set by
    hand.
    """

    low: float
    high: float
    log: bool = False
    """Draw on a logarithmic scale: equal probability for equal ratios."""
    step: float | None = None


class Choice:
    """The values from which such a search draws a knob: `Annotated[int, Choice(32, 64, 128)]`."""

    def __init__(self, *values: Any) -> None:
        self.values = values


@dataclass_transform(frozen_default=True)
def section(cls: type[_T]) -> type[_T]:
    """Make a frozen dataclass of knobs whose types and bounds are checked; each field's docstring
    describes it."""
    return typing.cast(type[_T], pydantic.dataclasses.dataclass(frozen=True, config=_FORBID)(cls))


def made_section(name: str, base: type, content: dict[str, Any]) -> type:
    """Return a section that no source file has, in which pydantic would look for docstrings."""
    made = type(name, (base,), content)
    return pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))(made)


# ---- knobs by name
_TAKES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a string"}
_ITEMS = {"int": "whole numbers", "float": "numbers", "bool": "true and false", "str": "strings"}


@dataclasses.dataclass(frozen=True)
class Knob:
    """One knob of a configuration, as the search space, help and documentation use it."""

    name: str
    kind: str
    """int, float, bool, str, choice or tuple."""
    default: Any
    description: str
    choices: tuple[Any, ...] | None = None
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    """Whether `low` itself is not allowed; `high_open` likewise."""
    high_open: bool = False
    optional: bool = False
    """Whether null is allowed."""
    member: tuple[str, str] | None = None
    """("timesteps.name", "speed") if it belongs to a member of a union."""
    searchable: bool = True
    protocol: bool = False
    """Whether it is part of the evaluation protocol, which further evaluations must not change."""
    file: bool = False
    space: Lines | None = None
    """Its space in a search without a search file, written as in one."""
    items: str = ""
    """The kind of the items of a tuple."""

    @property
    def allowed(self) -> str:
        """Return in words which values it takes."""
        if self.choices is not None:
            names = (one if isinstance(one, str) else json.dumps(one) for one in self.choices)
            return f"one of {', '.join(names)}"
        items = f"a list of {_ITEMS.get(self.items, 'values')}"
        words = items if self.kind == "tuple" else _TAKES.get(self.kind, self.kind)
        if self.low is not None:
            words += f" {'above' if self.low_open else 'of at least'} {self.low:.10g}"
        if self.high is not None:
            words += " and" if self.low is not None else ""
            words += f" {'below' if self.high_open else 'at most'} {self.high:.10g}"
        return words + (", or null" if self.optional else "")


def nearest(name: str, names: Collection[str]) -> str:
    """Return `did you mean …?` with the most similar of `names`, or else all of them."""
    similar = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    similar = similar or [candidate for candidate in names if candidate.endswith(f".{name}")]
    allowed = ", ".join(names) or "none"
    return f"did you mean {' or '.join(similar)}?" if similar else f"allowed: {allowed}"


def validated(kind: type[_T], content: Mapping[str, Any], where: str) -> _T:
    """Return the section that has a file's content. Raises `ConfigError` with a line for each
    key."""
    try:
        return TypeAdapter(kind).validate_python(content)
    except pydantic.ValidationError as error:
        lines = (_explain(detail, kind, where) for detail in error.errors())
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _explain(detail: Any, section: type, where: str) -> str:
    """Return one line for one pydantic error: place, value, what is allowed."""
    path, kind, value = detail["loc"], detail["type"], detail["input"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument", "invalid_key"):
        hint = nearest(str(path[0]), vars(section)["__pydantic_fields__"])
        return f"{where}: {path[0]}: no such key; {hint}"
    place = where + "".join(f"[{part}]" if isinstance(part, int) else f": {part}" for part in path)
    if kind == "missing":
        return f"{place}: is missing"
    if kind == "value_error":
        return f"{place}: {value!r} {detail['ctx']['error']}"
    allowed = "`key: value` lines" if kind in ("dict_type", "dataclass_type") else detail["msg"]
    return f"{place}: {value!r} is not allowed; allowed: {allowed}"


def unwrap(annotation: Any) -> tuple[Any, list[Any]]:
    """Return (bare type, metadata) of a type that may be Annotated."""
    if typing.get_origin(annotation) is not Annotated:
        return annotation, []
    kind, *metadata = typing.get_args(annotation)
    return kind, metadata


def _bounds(marks: list[Any]) -> Values:
    """Return the bounds among the marks of a type, as fields of `Knob`."""
    limits: Values = {}
    for mark in marks:
        match mark:
            case Ge(ge=limit) | Gt(gt=limit):
                limits |= {"low": limit, "low_open": isinstance(mark, Gt)}
            case Le(le=limit) | Lt(lt=limit):
                limits |= {"high": limit, "high_open": isinstance(mark, Lt)}
    return limits


def _space(marks: list[Any]) -> Lines | None:
    """Return the space that a `Range` or a `Choice` declares, as in a search file."""
    for mark in marks:
        if isinstance(mark, Choice):
            values = (list(value) if isinstance(value, tuple) else value for value in mark.values)
            return {"choice": list(values)}
        if isinstance(mark, Range):
            # By identity: 0 is a bound, although it equals False.
            fields = vars(mark).items()
            return {
                name: value for name, value in fields if value is not None and value is not False
            }
    return None


def arms(kind: Any) -> list[Any]:
    """Return the types of a union except None; an empty list for any other type."""
    if typing.get_origin(kind) not in (Union, types.UnionType):
        return []
    return [arm for arm in typing.get_args(kind) if arm is not type(None)]


def knobs_of(
    cls: type, prefix: str = "", member: tuple[str, str] | None = None, free: bool = True
) -> Iterator[Knob]:
    """Yield the knobs of a dataclass in field order; one that several union members share, for
    each.

    A field that a subclass declares again keeps its marks, and its description if the subclass
    gives no other.
    """
    # Every declaration of a field counts, that of the subclass first
    bases = [base for base in cls.__mro__ if dataclasses.is_dataclass(base)]
    hints = [typing.get_type_hints(base, include_extras=True) for base in bases]
    words = [getattr(base, "__pydantic_fields__", {}) for base in bases]
    for field in dataclasses.fields(cls):
        # Marks: the metadata of all declarations, those inside `X | None` included
        name = prefix + field.name
        declared = [unwrap(hint[field.name]) for hint in hints if field.name in hint]
        metadata = [
            marks + [mark for arm in arms(bare) for mark in unwrap(arm)[1]]
            for bare, marks in declared
        ]
        marks = {
            mark if isinstance(mark, type) else type(mark) for part in metadata for mark in part
        }
        searchable = free and Fixed not in marks
        kind, members = declared[0][0], arms(declared[0][0])
        if members and all(map(dataclasses.is_dataclass, members)):
            yield from _union_knobs(name, members, searchable, _space(metadata[0]))
            continue
        # A section, or a single knob, which may be optional
        if members:
            kind, _ = unwrap(members[0])
        if dataclasses.is_dataclass(kind):
            yield from knobs_of(typing.cast(type, kind), name + ".", member, searchable)
            continue
        texts = (fields[field.name].description for fields in words if field.name in fields)
        description = next(filter(None, texts), "")
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        choices = args if origin is Literal else None
        items = getattr(unwrap(args[0])[0], "__name__", "") if origin is tuple else ""
        yield Knob(
            name, "choice" if choices else kind.__name__, field.default,
            " ".join(description.split()), choices,
            optional=bool(members), member=member, searchable=searchable,
            protocol=EvaluationProtocol in marks,
            file=File in marks, items=items,
            space=_space(metadata[0]), **_bounds(metadata[0]),
        )  # fmt: skip


def _union_knobs(
    name: str, members: list[Any], searchable: bool, space: Lines | None
) -> Iterator[Knob]:
    """Yield the knobs of a discriminated union: its name, then those of its members."""
    names = tuple(arm().name for arm in members)
    documents = [
        f"`{n}`: {' '.join((arm.__doc__ or '').split())}"
        for n, arm in zip(names, members, strict=True)
    ]
    words = " · ".join(documents)
    yield Knob(f"{name}.name", "choice", names[0], words, names, searchable=searchable, space=space)
    for arm, arm_name in zip(members, names, strict=True):
        arm_knobs = knobs_of(arm, name + ".", (f"{name}.name", arm_name), searchable)
        yield from (knob for knob in arm_knobs if knob.name != f"{name}.name")
