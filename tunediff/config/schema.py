"""Collect the knobs of a workload by dotted name, and make, change and compare its configurations.

A `Schema` combines a workload's `Knobs`, a dataclass, with the sections of all workloads
(`tunediff.config.systems`). A knob's name is its dotted path (`loader.batch_size`): the same string
is the YAML key, the command-line override, the Optuna parameter, the CSV column and the plot axis.
Imports neither torch nor ray: a mistake is reported within milliseconds.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union

import pydantic
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from tunediff.config.knobs import (
    STRICT,
    ConfigError,
    Knob,
    Lines,
    Refusal,
    Values,
    arms,
    knobs_of,
    made_section,
    nearest,
    refuse,
    section,
    unwrap,
)


# ---- one configuration
@section
class Configuration:
    """Base class of all configurations; `Schema` adds the sections of systems and workload."""

    schema: ClassVar[Schema]

    @functools.cached_property
    def knobs(self) -> Any:
        """Return the workload's own part, an instance of its `Knobs`."""
        fields = dataclasses.fields(self.schema.knobs_type)
        return self.schema.knobs_type(**{field.name: getattr(self, field.name) for field in fields})

    def __reduce__(self) -> Any:
        """Pickle the knobs instead of the class, which a workload rebuilds in any process."""
        return self.schema.rebuild, (to_dict(self), "a configuration", False)

    def sections(self) -> Iterator[Any]:
        """Yield the sections in their order."""
        return (
            value
            for name in self.schema.order
            if dataclasses.is_dataclass(value := getattr(self, name))
        )


class Schema:
    """All knobs of one workload; makes its configurations."""

    def __init__(
        self,
        workload: str,
        knobs_type: type,
        systems: type,
        version: str = "",
        title: str = "",
        rebuild: Callable[[Lines, str, bool], Any] | None = None,
    ) -> None:
        """Build a workload's configuration class from its knobs and the sections of all.

        `workload`: the name under which it is found. `knobs_type`: its class `Knobs`; a section in
        it with the name of a section of `systems` is a subclass of that one and replaces it.
        `systems`: the sections of all workloads. `version`: of a user's file; two configurations
        differ if the content of the file differs, not its path. `title`: the name in messages.
        `rebuild`: makes a configuration from what `to_dict` returns; a pickle refers to it (here
        `workload.from_dict`, which this module cannot import). Raises `ConfigError`.
        """
        self.workload, self.knobs_type, self.version = workload, knobs_type, version
        self.title, self.rebuild = title or workload, rebuild
        self.type = self._build(knobs_type, systems)
        of_systems = {field.name for field in dataclasses.fields(systems)}
        names = (field.name for field in dataclasses.fields(self.type))
        self.order = sorted(names, key=of_systems.__contains__)
        """Names of the sections and of top-level knobs, in the order in which they are shown."""
        self._adapter: TypeAdapter[Any] = TypeAdapter(self.type)
        defaults = dataclasses.asdict(knobs_type())
        self.from_dict(defaults, f"{self.title}: Knobs", check=False)

    def _build(self, knobs_type: type, systems: type) -> Any:
        where = f"{self.title}: Knobs"
        content = _fields_of(knobs_type, where) | {"schema": self}
        sections = typing.get_type_hints(systems)
        for name, hint in content["__annotations__"].items():
            reserved = name in ("workload", "knobs", "schema", "sections")
            refuse(reserved, f"{where}: {name}: is a name that tunediff needs; choose another")
            kind = unwrap(hint)[0]
            if name in sections and not (
                inspect.isclass(kind) and issubclass(kind, sections[name])
            ):
                why = "every workload has a section of this name; rename the knob, or make it a"
                raise ConfigError(f"{where}: {name}: {why} subclass of that section")
        return made_section("Config", systems, content)

    @functools.cached_property
    def _all(self) -> tuple[Knob, ...]:
        def position(knob: Knob) -> int:
            return self.order.index(knob.name.partition(".")[0])

        return tuple(sorted(knobs_of(self.type), key=position))

    @functools.cached_property
    def knobs(self) -> dict[str, Knob]:
        """Return every knob by dotted name in order; knobs that union members share, once."""
        knobs: dict[str, Knob] = {}
        for knob in self._all:
            knobs.setdefault(knob.name, knob)
        return knobs

    @functools.cached_property
    def members(self) -> dict[str, dict[str, set[str]]]:
        """Return, for each union (`timesteps.name`), the names of each member's knobs."""
        members: dict[str, dict[str, set[str]]] = {}
        for knob in self._all:
            if knob.member is not None:
                union, member = knob.member
                empty: dict[str, set[str]] = {
                    name: set() for name in self.knobs[union].choices or ()
                }
                members.setdefault(union, empty)[member].add(knob.name)
        return members

    def kept_knobs(self, union: str, old: str, new: str) -> set[str]:
        """Return the knobs that stay when `new` replaces `old`: both have them, one default."""
        defaults = {knob.name: knob.default for knob in self._all if knob.member == (union, old)}
        others = [
            knob for knob in self._all if knob.member == (union, new) and knob.name in defaults
        ]
        return {knob.name for knob in others if knob.default == defaults[knob.name]}

    def knob(self, name: str, where: str) -> Knob:
        """Return the knob of that name. Raises `ConfigError` that lists the most similar names."""
        if name not in self.knobs:
            raise ConfigError(self._unknown(name, where))
        return self.knobs[name]

    def _unknown(self, name: str, where: str) -> str:
        if inside := [knob for knob in self.knobs if knob.startswith(f"{name}.")]:
            return f"{where}: {name}: is a section, not a knob; its knobs: {', '.join(inside)}"
        hint = nearest(name, self.knobs)
        if hint.startswith("allowed:"):  # too many to list
            sections = dict.fromkeys(knob.partition(".")[0] for knob in self.knobs)
            hint = f"sections: {', '.join(sections)}"
        return f"{where}: {name}: no such knob; {hint}"

    def default(self) -> Any:
        """Return the configuration in which every knob has its default."""
        return self.type()

    def from_dict(self, nested: Mapping[str, Any], where: str, check: bool = True) -> Any:
        """Return the configuration of sections, completed by defaults. Raises `ConfigError`.

        A section that is a union and names no member is taken for its first one.
        """
        content = dict(nested)
        for union in self.members:
            section_name, default = union.partition(".")[0], self.knobs[union].default
            if isinstance(values := content.get(section_name), Mapping) and union.count(".") == 1:
                content[section_name] = {"name": default, **values}
        try:
            config = self._adapter.validate_python(content)
        except pydantic.ValidationError as error:
            raise ConfigError(
                "\n".join(self._explain(detail, where) for detail in error.errors())
            ) from None
        if check:
            check_rules(config, where)
        return config

    def to_dict(self, config: Configuration) -> Lines:
        """Return a configuration as a dictionary of JSON types."""
        plain = self._adapter.dump_python(config, mode="json")
        return {name: plain[name] for name in self.order}

    def _explain(self, detail: Any, where: str) -> str:
        """Return one line for one pydantic error: place, key, value, allowed values."""
        path = [str(part) for part in detail["loc"]]
        # A union adds its tag to the location: timesteps.NAME.history → timesteps.history.
        if len(path) > 2 and path[1] in self.members.get(f"{path[0]}.name", {}):
            path.pop(1)
        key, value = ".".join(path), detail.get("input")
        if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            if key in self.knobs and (member := self.knobs[key].member):
                of = f"belongs to {member[0]} = {member[1]}, which is not chosen here"
                return f"{where}: {key}: {of}"
            return self._unknown(key, where)
        name = key
        if detail["type"].startswith("union_tag"):  # an unknown member
            name += ".name"
            value = value.get("name") if isinstance(value, Mapping) else value
        while name not in self.knobs and "." in name:  # an element of a tuple
            name = name.rpartition(".")[0]
        if name not in self.knobs:
            return f"{where}: {name}: {value!r}: {detail['msg']}"
        knob = self.knobs[name]
        return f"{where}: {name}: {value!r} is not allowed; allowed: {knob.allowed}"


# ---- fields of a user's dataclass as checked knobs
_SUPPORTED = (
    "int, float, bool, str, Literal[…], tuple[int, …], each of these or None, a dataclass, a union"
    " of dataclasses"
)


def _fields_of(cls: type, where: str) -> dict[str, Any]:
    """Return annotations and defaults for a checked dataclass. Raises `ConfigError`."""
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        kind = "frozen" if dataclasses.is_dataclass(cls) else "a dataclass"
        raise ConfigError(f"{where}: is not {kind}; write @dataclass(frozen=True) above it")
    content: dict[str, Any] = {"__annotations__": {}, "__doc__": cls.__doc__}
    hints, words = typing.get_type_hints(cls, include_extras=True), _docstrings_of(cls)
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
    unsupported = f"{where}: unsupported type {hint}; allowed: {_SUPPORTED}"
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
            kind = made_section(kind.__name__, kind, _fields_of(kind, where))
    elif typing.get_origin(kind) is tuple and typing.get_args(kind)[1:] == (...,):
        kind = types.GenericAlias(tuple, (_checked(typing.get_args(kind)[0], where), ...))
    elif typing.get_origin(kind) is not Literal:
        refuse(kind not in STRICT, unsupported)
        kind = STRICT[kind]
    return Annotated[kind, *metadata] if metadata else kind


def _docstrings_of(cls: type) -> dict[str, str]:
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


# ---- values of all knobs
def check_rules(config: Configuration, where: str) -> None:
    """Check the rules that join knobs. Raises `ConfigError` with the knobs and values."""
    for part in config.sections():
        try:
            getattr(part, "check", lambda config: None)(config)
        except Refusal as refusal:
            value = flatten(to_dict(config))[refusal.knob]
            why = f"{refusal.knob}: {value!r} is not allowed: {refusal.why}"
            raise ConfigError(f"{where}: {why}") from None


def nest(values: Mapping[str, Any]) -> Lines:
    """Return nested sections: {"loader.workers": 2} → {"loader": {"workers": 2}}."""
    nested: Lines = {}
    for name, value in values.items():
        *sections, knob = name.split(".")
        inner = nested
        for name_of_section in sections:
            inner = inner.setdefault(name_of_section, {})
        inner[knob] = value
    return nested


def flatten(
    nested: Mapping[str, Any],
    where: str = "knobs",
    prefix: str = "",
    is_section: Callable[[Any], bool] = lambda value: isinstance(value, Mapping),
) -> Values:
    """Return knobs by dotted name: {"loader": {"workers": 2}} → {"loader.workers": 2}.

    `is_section`: whether a value contains knobs. Raises `ConfigError` for a knob given both ways.
    """
    flat: Values = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        has_knobs = is_section(value)
        inner = flatten(value, where, f"{name}.", is_section) if has_knobs else {name: value}
        if not flat.keys().isdisjoint(inner):
            twice = next(name for name in inner if name in flat)
            both = f"is given twice, {flat[twice]!r} and {inner[twice]!r}"
            raise ConfigError(f"{where}: {twice}: {both}; allowed: once, nested or dotted")
        flat |= inner
    return flat


def to_dict(config: Configuration) -> Lines:
    """Return a configuration as a dictionary, workload first, for `from_dict`."""
    return {"workload": config.schema.workload, **config.schema.to_dict(config)}


# ---- change and compare configurations
C = TypeVar("C", bound=Configuration)


def not_effective(config: Configuration, device: str) -> dict[str, str]:
    """Return the set knobs without effect on `device` ("cpu", "cuda"), with the reason."""
    parts = [part for part in config.sections() if hasattr(part, "not_effective")]
    return dict(pair for part in parts for pair in part.not_effective(config, device))


_STANDS_FOR = {"compile.mode": "default"}
"""The value as which a knob acts where its own value has no effect, if that is not its default."""


def neutral(config: C, names: Collection[str]) -> C:
    """Return the configuration with these knobs fixed: switches off, others at default.

    Equal for configurations that differ only in knobs without effect (`not_effective`).
    """
    values: Values = {}
    for name, value in flat(config).items():
        if name in names:
            default = False if isinstance(value, bool) else config.schema.knobs[name].default
            values[name] = _STANDS_FOR.get(name, default)
    return override(config, values, check=False) if values else config


def effective(config: C, device: str) -> C:
    """Return what `config` amounts to on `device`: equal for two that train alike."""
    return neutral(config, not_effective(config, device))


def flat(config: Configuration) -> Values:
    """Return the workload and every knob of this configuration by dotted name."""
    return flatten(to_dict(config))


def fingerprint(config: Configuration) -> str:
    """Return 12 hex digits that are equal exactly for equal configurations of equal workloads."""
    schema = config.schema
    # A copy of a user's file counts as equal.
    name = Path(schema.workload).name if schema.version else schema.workload
    content = json.dumps([schema.version, {**to_dict(config), "workload": name}], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def identity(config: Configuration) -> tuple[Values, str]:
    """Return what a journal has of a configuration: its knobs by dotted name, its fingerprint."""
    return flat(config), fingerprint(config)


def differences(of: Configuration | Mapping[str, Any], base: Configuration) -> Values:
    """Return a configuration's knobs, or these values, that differ from `base`.

    `override(base, …)` with the result gives the configuration again. So defaults that come with
    another union member (`timesteps.name`) are not included.
    """
    values, base_values = flat(of) if isinstance(of, Configuration) else of, flat(base)
    chosen = {
        name: values[name]
        for name, members in base.schema.members.items()
        if values.get(name) in members and values[name] != base_values[name]
    }
    with_members = flat(override(base, chosen, check=False)) if chosen else base_values
    expected = with_members | {name: base_values[name] for name in chosen}
    changed = {
        name: value
        for name, value in values.items()
        if name not in expected or expected[name] != value
    }
    if Path(str(changed.get("workload", ""))).name == Path(base_values["workload"]).name:
        del changed["workload"]  # the same file in another folder, such as a search's copy
    return changed


def override(
    config: C, values: Mapping[str, Any], where: str = "override", check: bool = True
) -> C:
    """Return a copy with knobs replaced by dotted name.

    Another union member (`timesteps.name`) removes the knobs of the old one, but for those that
    both have with one default. With `check`, rules that join several knobs are applied to the
    result. Raises `ConfigError` that names `where`, the knob, the value and the allowed values.
    """
    schema = config.schema
    now = flatten(schema.to_dict(config))
    for name, value in values.items():
        if schema.knob(name, where).name in schema.members and now[name] != value:
            kept, section = schema.kept_knobs(name, now[name], value), name.removesuffix("name")
            now = {
                other: old
                for other, old in now.items()
                if not other.startswith(section) or other in kept
            }
    changed: C = schema.from_dict(nest({**now, **values}), where, check)
    return changed


def with_absolute_paths(config: C) -> C:
    """Return the configuration with absolute paths; relative ones are of the current folder."""
    return _with_paths(config, lambda path: path.expanduser().absolute())


def with_relative_paths(config: C) -> C:
    """Return the configuration with files inside the current folder as relative, portable paths."""
    return _with_paths(
        config,
        lambda path: path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path,
    )


def _with_paths(config: C, change: Callable[[Path], Path]) -> C:
    now, knobs = flat(config), config.schema.knobs.values()
    paths = {knob.name: now[knob.name] for knob in knobs if knob.file and now.get(knob.name)}
    changed = {name: str(change(Path(path))) for name, path in paths.items()}
    return override(config, changed, check=False) if changed else config
