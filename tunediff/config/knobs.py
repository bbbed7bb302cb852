"""Knobs, one by one: what a dataclass may declare, what each takes, and in which words it is refused.

A section may have `check(config)`, which raises `Refusal` for knobs that contradict each other, and
`not_effective(config, device)`, which yields knobs that change nothing, and why. Kinds with hyperparameters of their
own are unions over `name`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import textwrap
import types
import typing
from collections.abc import Collection, Iterator
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform

import pydantic.dataclasses
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, Field, Strict, TypeAdapter
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

# Strict: "128", True and 1.0 are not whole numbers. A typing slip must not become a silent setting.
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
"""`key: value` lines of a file, nested: knobs by section, or what else it says."""


class ConfigError(ValueError):
    """Bad input from the user: the message names the place, the key, the value and what is allowed."""


class Refusal(Exception):  # noqa: N818 – a rule refuses; ConfigError is the error
    """Raised by a section's `check`: the dotted name of a knob, and why its value is not allowed beside the others."""

    def __init__(self, knob: str, why: str) -> None:
        super().__init__(knob, why)
        self.knob, self.why = knob, why


def refuse(broken: object, why: str) -> None:
    """Raise `ConfigError` if a rule is broken."""
    if broken:
        raise ConfigError(why)


class Fixed:
    """Marks a knob or a section that no search may vary: what defines the task or the ruler."""


class EvaluationProtocol:
    """Marks a knob of `evaluation` that further evaluations of a finished model (`final:`) must not change."""


class File:
    """Marks a knob that names a file or folder: made absolute, since workers may run elsewhere."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers between which a search without a file of its own draws a knob, beside its default:

    `lr: Annotated[float, Range(1e-4, 1e-2, log=True)] = 1e-3`. Other values may still be set by hand.
    """

    low: float
    high: float
    log: bool = False
    """Equal chances for equal ratios."""
    step: float | None = None


class Choice:
    """The values that such a search chooses from: `Annotated[int, Choice(32, 64, 128)]`."""

    def __init__(self, *values: Any) -> None:
        self.values = values


@dataclass_transform(frozen_default=True)
def section(cls: type[_T]) -> type[_T]:
    """A frozen dataclass of knobs whose types and bounds are checked; each field's docstring describes it."""
    return typing.cast(type[_T], pydantic.dataclasses.dataclass(frozen=True, config=_FORBID)(cls))


# ------------------------------------------------------------------------------------------------------ knobs by name
_TAKES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a string"}
_TAKES |= {"tuple": "a list of whole numbers"}


@dataclasses.dataclass(frozen=True)
class Knob:
    """One leaf of a configuration, as the search space, the help text and the documentation see it."""

    name: str
    kind: str
    """int, float, bool, str, choice or tuple."""
    default: Any
    description: str
    choices: tuple[Any, ...] | None = None
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    """Whether the bound itself is not allowed."""
    high_open: bool = False
    optional: bool = False
    """Whether null is allowed."""
    member: tuple[str, str] | None = None
    """("timesteps.name", "speed") when it belongs to a member of a union."""
    searchable: bool = True
    protocol: bool = False
    """Whether it is a part of the evaluation protocol, which further evaluations must not change."""
    file: bool = False
    space: Lines | None = None
    """Where it is searched unless a search file says so, as one would say it."""

    @property
    def allowed(self) -> str:
        """What values it takes, in words."""
        if self.choices is not None:
            return "one of " + ", ".join(one if isinstance(one, str) else json.dumps(one) for one in self.choices)
        words = _TAKES.get(self.kind, self.kind)
        if self.low is not None:
            words += f" {'above' if self.low_open else 'of at least'} {self.low:.10g}"
        if self.high is not None:
            words += " and" if self.low is not None else ""
            words += f" {'below' if self.high_open else 'at most'} {self.high:.10g}"
        return words + (", or null" if self.optional else "")

    def yaml_hint(self, value: Any) -> str:
        """What YAML 1.1 may have done to this value, or ''."""
        if isinstance(value, str) and self.kind in ("int", "float"):
            try:
                number = float(value)
            except ValueError:
                return ""
            mantissa, _, exponent = f"{number:.6e}".partition("e")
            return f" (YAML 1.1 reads {value!r} as text; write {float(mantissa)}e{int(exponent):+d})"
        if isinstance(value, bool) and self.kind in ("choice", "str"):
            return " (YAML 1.1 reads off, no, on and yes as true or false: write none, or quote the word)"
        return ""


def nearest(name: str, known: Collection[str]) -> str:
    """`did you mean …?` with what is most like a name that is not known, else all that is."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or [one for one in known if one.endswith(f".{name}")]
    return f"did you mean {' or '.join(near)}?" if near else f"allowed: {', '.join(known)}"


def unwrap(annotation: Any) -> tuple[Any, list[Any]]:
    """(bare type, metadata) of a type that may be Annotated."""
    if typing.get_origin(annotation) is not Annotated:
        return annotation, []
    kind, *metadata = typing.get_args(annotation)
    return kind, metadata


def _bounds(metadata: list[Any]) -> Values:
    found: Values = {}
    for bound in metadata:
        if isinstance(bound, Ge | Gt):
            found |= {"low": getattr(bound, "ge", getattr(bound, "gt", None)), "low_open": isinstance(bound, Gt)}
        elif isinstance(bound, Le | Lt):
            found |= {"high": getattr(bound, "le", getattr(bound, "lt", None)), "high_open": isinstance(bound, Lt)}
    return found


def _space(metadata: list[Any]) -> Lines | None:
    """What a `Range` or a `Choice` says, as a search file would."""
    for one in metadata:
        if isinstance(one, Choice):
            return {"choice": [list(value) if isinstance(value, tuple) else value for value in one.values]}
        if isinstance(one, Range):
            return {name: value for name, value in vars(one).items() if value is not None and value is not False}
    return None


def arms(kind: Any) -> list[Any]:
    """The types of a union but None; empty for anything else."""
    if typing.get_origin(kind) not in (Union, types.UnionType):
        return []
    return [arm for arm in typing.get_args(kind) if arm is not type(None)]


def knobs_of(cls: type, prefix: str = "", member: tuple[str, str] | None = None, free: bool = True) -> Iterator[Knob]:
    """The knobs of a dataclass in the order of its fields; one that several union members share comes for each.

    A field that a subclass declares again keeps the marks that it had, and its words if it gets no others.
    """
    bases = [base for base in cls.__mro__ if dataclasses.is_dataclass(base)]
    hints = [typing.get_type_hints(base, include_extras=True) for base in bases]
    words = [getattr(base, "__pydantic_fields__", {}) for base in bases]
    for field in dataclasses.fields(cls):
        name, declared = prefix + field.name, [unwrap(of[field.name]) for of in hints if field.name in of]
        said = [metadata + [one for arm in arms(of) for one in unwrap(arm)[1]] for of, metadata in declared]
        marks = {one if isinstance(one, type) else type(one) for metadata in said for one in metadata}
        searchable = free and Fixed not in marks
        kind, members = declared[0][0], arms(declared[0][0])
        if members and all(map(dataclasses.is_dataclass, members)):  # a discriminated union: name, then members
            names = tuple(arm().name for arm in members)
            documents = [f"`{n}`: {(arm.__doc__ or '').strip()}" for n, arm in zip(names, members, strict=True)]
            yield Knob(f"{name}.name", "choice", names[0], " · ".join(documents), names, searchable=searchable,
                       space=_space(said[0]))  # fmt: skip
            for arm, arm_name in zip(members, names, strict=True):
                of_arm = knobs_of(arm, name + ".", (f"{name}.name", arm_name), searchable)
                yield from (knob for knob in of_arm if knob.name != f"{name}.name")
            continue
        if members:
            kind, _ = unwrap(members[0])
        if dataclasses.is_dataclass(kind):
            yield from knobs_of(typing.cast(type, kind), name + ".", member, searchable)
            continue
        about = next((text for of in words if field.name in of and (text := of[field.name].description)), "")
        choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else None
        yield Knob(
            name, "choice" if choices else kind.__name__, field.default, " ".join(about.split()), choices,
            optional=bool(members), member=member, searchable=searchable, protocol=EvaluationProtocol in marks,
            file=File in marks,
            space=_space(said[0]), **_bounds(said[0]),
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------- anybody's dataclass
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
        refuse(default is dataclasses.MISSING, f"{at}: has no default; the baseline needs one")
        hint = _checked(hints[name], at)
        content["__annotations__"][name] = Annotated[hint, Field(description=words.get(name))]
        content[name] = default
        if dataclasses.is_dataclass(default) and not is_pydantic_dataclass(type(default)):
            make, plain = TypeAdapter(hint).validate_python, dataclasses.asdict(typing.cast(Any, default))
            content[name] = dataclasses.field(default_factory=functools.partial(make, plain))
    return content


def _checked(hint: Any, where: str) -> Any:
    """The same type; what has parts is checked in all of them."""
    (kind, metadata), odd = unwrap(hint), f"{where}: {hint} is no kind of knob; allowed: {KINDS}"
    if members := arms(kind):
        of_names = [dataclasses.is_dataclass(arm) and "name" in typing.get_type_hints(arm) for arm in members]
        optional = len(members) < len(typing.get_args(kind))
        if any(map(dataclasses.is_dataclass, members)):
            needed = 'a field  name: Literal["…"] = "…"  in each, and no None'
            refuse(optional or not all(of_names), f"{where}: a union of dataclasses needs {needed}")
            if not any(isinstance(one, FieldInfo) for one in metadata):
                metadata.append(Field(discriminator="name"))
        else:
            refuse(len(members) > 1, odd)
        kind = Union[tuple(_checked(arm, where) for arm in members) + ((None,) if optional else ())]  # noqa: UP007
    elif dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not is_pydantic_dataclass(kind):
            kind = section(type(kind.__name__, (kind,), fields_of(kind, where)))
    elif typing.get_origin(kind) is tuple and typing.get_args(kind)[1:] == (...,):
        kind = types.GenericAlias(tuple, (_checked(typing.get_args(kind)[0], where), ...))
    elif typing.get_origin(kind) is not Literal:
        refuse(kind not in STRICT, odd)
        kind = STRICT[kind]
    return Annotated[kind, *metadata] if metadata else kind


def _words(cls: type) -> dict[str, str]:
    """The docstring under each field, where the source can be read."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]).body
        except (OSError, TypeError, SyntaxError):
            continue
        for pair in itertools.pairwise(body):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = text
    return found
