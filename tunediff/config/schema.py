"""Knobs by their dotted names, for any workload: what there are, what they take, what is refused and in which words.

A `Schema` is made of a workload's `Knobs`, a dataclass, and of the sections that every workload has
(`tunediff.config.systems`). A knob's name is its dotted path (`loader.batch_size`): the same string is the YAML key,
the command-line override, the Optuna parameter, the CSV column and the plot axis. Nothing here imports torch or ray, so
that a mistake is refused in milliseconds, before anything starts.

A section may have `check(config)`, which raises `Refusal` for knobs that contradict each other, and
`not_effective(config, device)`, which names knobs that change nothing. Kinds with hyperparameters of their own are
unions over `name`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import inspect
import json
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, dataclass_transform

import pydantic
import pydantic.dataclasses
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, Field, Strict, TypeAdapter

# Strict: "128", True and 1.0 are not whole numbers. A typing slip must not become a silent setting.
Int = Annotated[int, Strict()]
Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Bool = Annotated[bool, Strict()]
Str = Annotated[str, Strict()]
STRICT = {int: Int, float: Float, bool: Bool, str: Str}
_FORBID = ConfigDict(extra="forbid", use_attribute_docstrings=True)
_T = TypeVar("_T")


class ConfigError(ValueError):
    """Bad input from the user: the message names the place, the key, the value and what is allowed."""


class Refusal(Exception):  # noqa: N818 – a rule refuses; ConfigError is the error
    """Raised by a section's `check`: the dotted name of a knob, and why its value is not allowed beside the others."""

    def __init__(self, knob: str, why: str) -> None:
        super().__init__(knob, why)
        self.knob, self.why = knob, why


class Fixed:
    """Marks a knob or a section that no search may vary: what defines the task or the ruler."""


class Ruler:
    """Marks a knob of `evaluation` that further evaluations of a finished model (`final:`) must not change."""


class File:
    """Marks a knob that names a file or folder: made absolute, since workers may run elsewhere."""


@dataclass_transform(frozen_default=True)
def section(cls: type[_T]) -> type[_T]:
    """A frozen dataclass of knobs whose types and bounds are checked; each field's docstring describes it."""
    return typing.cast(type[_T], pydantic.dataclasses.dataclass(frozen=True, config=_FORBID)(cls))


# ------------------------------------------------------------------------------------------------------ knobs by name
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
    ruler: bool = False
    file: bool = False

    @property
    def allowed(self) -> str:
        """What values it takes, in words."""
        if self.choices is not None:
            return "one of " + ", ".join(_show(choice) for choice in self.choices)
        words = {
            "int": "a whole number",
            "float": "a number",
            "bool": "true or false",
            "str": "a string",
            "tuple": "a list of whole numbers",
        }.get(self.kind, self.kind)
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


def _show(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)


def unwrap(annotation: Any) -> tuple[Any, list[Any]]:
    """(bare type, metadata) of a possibly nested Annotated."""
    metadata: list[Any] = []
    while typing.get_origin(annotation) is Annotated:
        annotation, *more = typing.get_args(annotation)
        metadata += more
    return annotation, metadata


def _marked(metadata: list[Any], mark: type) -> bool:
    return any(one is mark or isinstance(one, mark) for one in metadata)


def _bounds(metadata: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for bound in metadata:
        if isinstance(bound, Ge | Gt):
            found |= {"low": getattr(bound, "ge", getattr(bound, "gt", None)), "low_open": isinstance(bound, Gt)}
        elif isinstance(bound, Le | Lt):
            found |= {"high": getattr(bound, "le", getattr(bound, "lt", None)), "high_open": isinstance(bound, Lt)}
    return found


def arms(kind: Any) -> list[Any]:
    """The types of a union but None; empty for anything else."""
    if typing.get_origin(kind) not in (Union, types.UnionType):
        return []
    return [arm for arm in typing.get_args(kind) if arm is not type(None)]


def knobs_of(cls: type, prefix: str = "", member: tuple[str, str] | None = None, free: bool = True) -> Iterator[Knob]:
    """The knobs of a dataclass in the order of its fields; one that several union members share comes for each."""
    hints = typing.get_type_hints(cls, include_extras=True)
    bases = [getattr(base, "__pydantic_fields__", {}) for base in cls.__mro__]  # a new default keeps the old words
    for field in dataclasses.fields(cls):
        name, (kind, metadata) = prefix + field.name, unwrap(hints[field.name])
        searchable = free and not _marked(metadata, Fixed)
        members = arms(kind)
        if members and all(
            dataclasses.is_dataclass(arm) for arm in members
        ):  # a discriminated union: name, then members
            names = tuple(arm().name for arm in members)
            documents = [f"`{n}`: {(arm.__doc__ or '').strip()}" for n, arm in zip(names, members, strict=True)]
            yield Knob(f"{name}.name", "choice", names[0], " · ".join(documents), names, searchable=searchable)
            for arm, arm_name in zip(members, names, strict=True):
                of_arm = knobs_of(arm, name + ".", (f"{name}.name", arm_name), searchable)
                yield from (knob for knob in of_arm if knob.name != f"{name}.name")
            continue
        if members:
            kind, more = unwrap(members[0])
            metadata += more
        if dataclasses.is_dataclass(kind):
            yield from knobs_of(typing.cast(type, kind), name + ".", member, searchable)
            continue
        about = next((words for of in bases if field.name in of and (words := of[field.name].description)), "")
        common: dict[str, Any] = {
            "name": name, "default": field.default, "description": " ".join(about.split()),
            "optional": bool(members), "member": member, "searchable": searchable, "ruler": _marked(metadata, Ruler),
            "file": _marked(metadata, File),
        }  # fmt: skip
        if typing.get_origin(kind) is Literal:
            yield Knob(kind="choice", choices=typing.get_args(kind), **common)
        elif typing.get_origin(kind) is tuple:
            yield Knob(kind="tuple", **common)
        else:
            yield Knob(kind=kind.__name__, **common, **_bounds(metadata))


# ----------------------------------------------------------------------------------------------- one configuration
@section
class Configuration:
    """What every configuration has; `Schema` adds the sections of the systems and of a workload."""

    schema: ClassVar[Schema]

    @functools.cached_property
    def knobs(self) -> Any:
        """The workload's part, an instance of its `Knobs`."""
        own = self.schema.own
        return own(**{field.name: getattr(self, field.name) for field in dataclasses.fields(own)})

    def __reduce__(self) -> Any:
        """Travels as its knobs: its class is made where its workload is found."""
        from tunediff.config.workload import from_dict

        return from_dict, (to_dict(self), "a configuration", False)

    def sections(self) -> Iterator[Any]:
        """The sections in their order."""
        return (value for name in self.schema.order if dataclasses.is_dataclass(value := getattr(self, name)))


class Schema:
    """All knobs of one workload, and what makes configurations of them."""

    def __init__(self, workload: str, own: type, systems: type, version: str = "") -> None:
        """`workload`: the name under which it is found; `own`: its `Knobs`; `systems`: the sections all workloads have.

        A section of `own` with the name of one of `systems` must be a subclass of it and takes its place. `version` is
        what else makes two configurations different, such as the content of a user's file. Raises `ConfigError`.
        """
        self.workload, self.own, self.version = workload, own, version
        self.type = self._build(own, systems)
        first = [field.name for field in dataclasses.fields(own)]
        of_systems = [field.name for field in dataclasses.fields(systems)]
        self.order = [name for name in first if name not in of_systems] + of_systems
        """Names of the sections and of the knobs beside them, in the order in which they are shown."""
        self._adapter: TypeAdapter[Any] = TypeAdapter(self.type)
        self.from_dict(dataclasses.asdict(own()), f"{workload}: Knobs", check=False)  # the defaults

    def _build(self, own: type, systems: type) -> Any:
        """The class of this workload's configurations."""
        from tunediff.config.own import fields_of  # which needs this module

        where = f"{self.workload}: Knobs"
        content = fields_of(own, where) | {"schema": self}
        above = typing.get_type_hints(systems, include_extras=True)
        for name, hint in content["__annotations__"].items():
            if name in ("workload", "knobs", "schema", "sections"):
                raise ConfigError(f"{where}: {name}: is a name that tunediff needs; choose another")
            if name in above:
                kind, metadata = unwrap(above[name])
                if not inspect.isclass(ours := unwrap(hint)[0]) or not issubclass(ours, kind):
                    why = "every workload has a section of this name; it must be a subclass of it"
                    raise ConfigError(f"{where}: {name}: {why}")
                content["__annotations__"][name] = Annotated[hint, *metadata] if metadata else hint
        return section(type("Config", (systems,), content))

    @functools.cached_property
    def _all(self) -> tuple[Knob, ...]:
        found = list(knobs_of(self.type))
        return tuple(sorted(found, key=lambda knob: self.order.index(knob.name.partition(".")[0])))

    @functools.cached_property
    def knobs(self) -> dict[str, Knob]:
        """Every knob by its dotted name, in declaration order. A name shared by several union members appears once."""
        found: dict[str, Knob] = {}
        for knob in self._all:
            found.setdefault(knob.name, knob)
        return found

    @functools.cached_property
    def members(self) -> dict[str, dict[str, frozenset[str]]]:
        """For each union (`timesteps.name`): which knobs each of its members has."""
        unions = {knob.member[0] for knob in self._all if knob.member is not None}
        found = {u: {choice: set[str]() for choice in self.knobs[u].choices or ()} for u in unions}
        for knob in self._all:
            if knob.member is not None:
                found[knob.member[0]][knob.member[1]].add(knob.name)
        return {union: {m: frozenset(names) for m, names in of.items()} for union, of in found.items()}

    def default(self) -> Any:
        """The configuration in which every knob has its default."""
        return self.type()

    def from_dict(self, nested: Mapping[str, Any], where: str, check: bool = True) -> Any:
        """A configuration from a nested dictionary; what is missing takes its default. Raises `ConfigError`."""
        try:
            config = self._adapter.validate_python(dict(nested))
        except pydantic.ValidationError as error:
            raise ConfigError("\n".join(self._explain(detail, where) for detail in error.errors())) from None
        if check:
            check_rules(config, where)
        return config

    def to_dict(self, config: Configuration) -> dict[str, Any]:
        """Nested plain dictionary (JSON types only)."""
        plain = self._adapter.dump_python(config, mode="json")
        return {name: plain[name] for name in self.order}

    def unknown_knob(self, name: str, where: str) -> str:
        """The message for a name that is no knob, with the nearest ones."""
        near = difflib.get_close_matches(name, self.knobs, n=3, cutoff=0.5)
        near = near or [known for known in self.knobs if known.endswith("." + name)]
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; allowed: {', '.join(self.knobs)}"
        return f"{where}: {name}: no such knob{hint}"

    def _explain(self, detail: Any, where: str) -> str:
        """One line for one pydantic error: place, key, value, what is allowed."""
        path = [str(part) for part in detail["loc"]]
        # A union adds its tag to the location: timesteps.loss_second_moment.history → timesteps.history.
        if len(path) > 2 and path[1] in self.members.get(f"{path[0]}.name", {}):
            path.pop(1)
        name, value = ".".join(path), detail.get("input")
        if detail["type"].startswith("union_tag"):
            name += ".name"
            value = value.get("name") if isinstance(value, Mapping) else value
        while name not in self.knobs and "." in name:  # an element of a tuple
            name = name.rpartition(".")[0]
        if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            key = ".".join(path)
            if key in self.knobs and (member := self.knobs[key].member):
                return f"{where}: {key}: belongs to {member[0]} = {member[1]}, which is not chosen here"
            return self.unknown_knob(key, where)
        if name not in self.knobs:
            return f"{where}: {name}: {value!r}: {detail['msg']}"
        knob = self.knobs[name]
        return f"{where}: {name}: {value!r} is not allowed; allowed: {knob.allowed}{knob.yaml_hint(value)}"


# ----------------------------------------------------------------------------------------- what is done with one
def check_rules(config: Configuration, where: str) -> None:
    """Rules that join several knobs; raises `ConfigError` naming the knobs and their values."""
    for part in config.sections():
        if hasattr(part, "check"):
            try:
                part.check(config)
            except Refusal as refusal:
                value = flat(config)[refusal.knob]
                raise ConfigError(f"{where}: {refusal.knob}: {value!r} is not allowed: {refusal.why}") from None


def not_effective(config: Configuration, device: str) -> dict[str, str]:
    """Knobs that are set to something and change nothing on `device` ("cpu" or "cuda"), with the reason."""
    found: dict[str, str] = {}
    for part in config.sections():
        if hasattr(part, "not_effective"):
            found |= part.not_effective(config, device)
    return found


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"loader.workers": 2} → {"loader": {"workers": 2}}."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        functools.reduce(lambda inner, key: inner.setdefault(key, {}), sections, nested)[leaf] = value
    return nested


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"loader": {"workers": 2}} → {"loader.workers": 2}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_dict(config: Configuration) -> dict[str, Any]:
    """Nested plain dictionary of a configuration, its workload first: whoever reads it needs nothing else."""
    return {"workload": config.schema.workload, **config.schema.to_dict(config)}


def flat(config: Configuration) -> dict[str, Any]:
    """Every knob of this configuration by its dotted name, after its workload."""
    return flatten(to_dict(config))


def fingerprint(config: Configuration) -> str:
    """12 hex digits that are equal exactly for equal configurations of equal workloads."""
    content = json.dumps([config.schema.version, to_dict(config)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def differences(config: Configuration, base: Configuration) -> dict[str, Any]:
    """Knobs of `config` whose value differs from `base`, by dotted name."""
    ours, theirs = flat(config), flat(base)
    return {name: value for name, value in ours.items() if name not in theirs or theirs[name] != value}


C = TypeVar("C", bound=Configuration)


def override(config: C, values: Mapping[str, Any], where: str = "override", check: bool = True) -> C:
    """A copy with knobs replaced by dotted name.

    Choosing another union member (`timesteps.name`) drops the knobs of the old one. With `check`, rules that join
    several knobs are applied to the result. Raises `ConfigError` naming `where`, the knob, the value and what is
    allowed.
    """
    schema = config.schema
    values_now = flatten(schema.to_dict(config))
    for name, value in values.items():
        if name not in schema.knobs:
            raise ConfigError(schema.unknown_knob(name, where))
        if name in schema.members and values_now[name] != value:
            prefix = name.removesuffix("name")
            values_now = {known: old for known, old in values_now.items() if not known.startswith(prefix)}
    changed: C = schema.from_dict(nest({**values_now, **values}), where, check)
    return changed


def with_absolute_paths(config: C) -> C:
    """The same files, whatever folder a worker runs in; relative paths are relative to the current one."""
    now, schema = flat(config), config.schema
    named = {name for name, knob in schema.knobs.items() if knob.file and now.get(name) is not None}
    absolute = {name: str(Path(now[name]).expanduser().absolute()) for name in named}
    return override(config, absolute, check=False) if absolute else config
