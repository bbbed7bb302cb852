"""Collect the knobs of a workload by dotted name, and make, change and compare its configurations.

A `Schema` combines a workload's `Knobs`, a dataclass, with the sections of all workloads
(`tunediff.config.systems`). A knob's name is its dotted path (`loader.batch_size`): the same string
is the YAML key, the command-line override, the Optuna parameter, the CSV column and the plot axis.
Nothing here imports torch or ray, so that a mistake is reported within milliseconds, before
anything starts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pydantic
from pydantic import TypeAdapter

from tunediff.config import removed
from tunediff.config.knobs import (
    ConfigError,
    Knob,
    Lines,
    Refusal,
    Values,
    fields_of,
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
    """Base class of all configurations; `Schema` adds the sections of the systems and of a
    workload."""

    schema: ClassVar[Schema]

    @functools.cached_property
    def knobs(self) -> Any:
        """Return the workload's own part, an instance of its `Knobs`."""
        own = self.schema.own
        return own(**{field.name: getattr(self, field.name) for field in dataclasses.fields(own)})

    def __reduce__(self) -> Any:
        """Pickle the knobs instead of the class, which another process builds anew from the
        workload."""
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
        own: type,
        systems: type,
        version: str = "",
        title: str = "",
        rebuild: Callable[[Lines, str, bool], Any] | None = None,
    ) -> None:
        """Build the configuration class of a workload from its own knobs and the sections that all
        workloads have.

        `workload`: the name under which it is found. `own`: its class `Knobs`; a section there that
        has the name of a section of `systems` must be a subclass of it and replaces it. `systems`:
        the sections of all workloads. `version`: of a user's file; two configurations differ if the
        content of the file differs, not its path. `title`: the name in messages. `rebuild`: the
        function that makes a configuration from what `to_dict` returns; a pickle refers to it (here
        `workload.from_dict`, which this module cannot import). Raises `ConfigError`.
        """
        self.workload, self.own, self.version, self.title = (
            workload,
            own,
            version,
            title or workload,
        )
        self.rebuild = rebuild
        self.type = self._build(own, systems)
        of_systems = {field.name for field in dataclasses.fields(systems)}
        self.order = sorted(
            (field.name for field in dataclasses.fields(self.type)), key=of_systems.__contains__
        )
        """Names of the sections and of the knobs beside them, in the order in which they are
        shown."""
        self._adapter: TypeAdapter[Any] = TypeAdapter(self.type)
        self.from_dict(
            dataclasses.asdict(own()), f"{self.title}: Knobs", check=False
        )  # the defaults
        self._check_spaces()

    def _build(self, own: type, systems: type) -> Any:
        where = f"{self.title}: Knobs"
        content = fields_of(own, where) | {"schema": self}
        above = typing.get_type_hints(systems)
        for name, hint in content["__annotations__"].items():
            taken = name in ("workload", "knobs", "schema", "sections")
            refuse(taken, f"{where}: {name}: is a name that tunediff needs; choose another")
            own_type, needed = unwrap(hint)[0], above.get(name, object)
            why = (
                "every workload has a section of this name; rename the knob, or make it a subclass"
                " of that section"
            )
            refuse(
                name in above and not (inspect.isclass(own_type) and issubclass(own_type, needed)),
                f"{where}: {name}: {why}",
            )
        return made_section("Config", systems, content)

    def _check_spaces(self) -> None:
        """Raise `ConfigError` if a default lies outside the space of its knob: the baseline is the
        first trial."""
        for knob in self.knobs.values():
            space, place = knob.space or {}, f"{self.title}: Knobs: {knob.name}"
            if "choice" in space:
                default = (
                    list(knob.default) if isinstance(knob.default, tuple) else knob.default
                )  # as in a file
                inside = default in space["choice"]
                refuse(
                    not inside,
                    f"{place}: its default {knob.default!r} is not among"
                    f" Choice{tuple(space['choice'])}",
                )
            elif space:
                refuse(
                    knob.kind not in ("int", "float"),
                    f"{place}: a Range needs a number; use Choice(…)",
                )
                low, high = space.get("low"), space.get("high")
                between = f"Range({low!r}, {high!r})"
                numbers = isinstance(low, int | float) and isinstance(high, int | float)
                refuse(not numbers, f"{place}: {between} is not allowed; allowed: two numbers")
                refuse(
                    knob.default is None,
                    f"{place}: a Range needs a default that is a number, not None",
                )
                outside = not low <= knob.default <= high
                refuse(outside, f"{place}: its default {knob.default!r} lies outside {between}")

    @functools.cached_property
    def _all(self) -> tuple[Knob, ...]:
        return tuple(
            sorted(
                knobs_of(self.type), key=lambda knob: self.order.index(knob.name.partition(".")[0])
            )
        )

    @functools.cached_property
    def knobs(self) -> dict[str, Knob]:
        """Return every knob by dotted name in declaration order; one that union members share,
        once."""
        knobs: dict[str, Knob] = {}
        for knob in self._all:
            knobs.setdefault(knob.name, knob)
        return knobs

    @functools.cached_property
    def members(self) -> dict[str, dict[str, set[str]]]:
        """Return for each union (`timesteps.name`) the names of the knobs of each of its
        members."""
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
        """Return the knobs that keep their values when `old` is replaced by `new`: both have them,
        with one default."""
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
        if gone := removed.reason(name):
            return f"{where}: {name}: no such knob: {gone}"
        hint = nearest(name, self.knobs)
        if hint.startswith("allowed:"):  # too many to list
            hint = (
                "sections:"
                f" {', '.join(dict.fromkeys(knob.partition('.')[0] for knob in self.knobs))}"
            )
        return f"{where}: {name}: no such knob; {hint}"

    def default(self) -> Any:
        """Return the configuration in which every knob has its default."""
        return self.type()

    def from_dict(self, nested: Mapping[str, Any], where: str, check: bool = True) -> Any:
        """Return the configuration of nested sections; missing knobs take their defaults. Raises
        `ConfigError`.

        A section that has become a union since it was written is taken for the union's first
        member.
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
        # A union adds its tag to the location: timesteps.loss_second_moment.history →
        # timesteps.history.
        if len(path) > 2 and path[1] in self.members.get(f"{path[0]}.name", {}):
            path.pop(1)
        name, value = ".".join(path), detail.get("input")
        if detail["type"].startswith("union_tag"):  # an unknown member
            name += ".name"
            value = value.get("name") if isinstance(value, Mapping) else value
        while name not in self.knobs and "." in name:  # an element of a tuple
            name = name.rpartition(".")[0]
        if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            key = ".".join(path)
            if key in self.knobs and (member := self.knobs[key].member):
                return (
                    f"{where}: {key}: belongs to {member[0]} = {member[1]}, which is not chosen"
                    " here"
                )
            return self._unknown(key, where)
        if name not in self.knobs:
            return f"{where}: {name}: {value!r}: {detail['msg']}"
        if gone := removed.reason(name, value):
            return f"{where}: {name}: {value!r} is not allowed: {gone}"
        knob = self.knobs[name]
        return (
            f"{where}: {name}: {value!r} is not allowed; allowed: {knob.allowed}{knob.hint(value)}"
        )


# ---- what is
# done with one
C = TypeVar("C", bound=Configuration)


def check_rules(config: Configuration, where: str) -> None:
    """Check the rules that join several knobs. Raises `ConfigError` that names the knobs and their
    values."""
    for part in config.sections():
        if hasattr(part, "check"):
            try:
                part.check(config)
            except Refusal as refusal:
                value = flat(config)[refusal.knob]
                raise ConfigError(
                    f"{where}: {refusal.knob}: {value!r} is not allowed: {refusal.why}"
                ) from None


def not_effective(config: Configuration, device: str) -> dict[str, str]:
    """Return the knobs that are set but have no effect on `device` ("cpu" or "cuda"), with the
    reason."""
    parts = [part for part in config.sections() if hasattr(part, "not_effective")]
    return dict(pair for part in parts for pair in part.not_effective(config, device))


_STANDS_FOR = {"compile.mode": "default"}
"""The value as which a knob acts where its own value has no effect, if that is not its default."""


def neutral(config: C, names: Iterable[str]) -> C:
    """Return the configuration with each of these knobs at a fixed value: switches off, others at
    their default.

    The result is equal for configurations that differ only in knobs without effect
    (`not_effective`).
    """
    knobs, now = config.schema.knobs, flat(config)
    values = {
        name: _STANDS_FOR.get(name, False if isinstance(now[name], bool) else knobs[name].default)
        for name in names
        if name in now
    }
    return override(config, values, check=False) if values else config


def effective(config: C, device: str) -> C:
    """Return what `config` amounts to on `device` ("cpu" or "cuda"): equal for two that train
    alike."""
    return neutral(config, not_effective(config, device))


def nest(values: Mapping[str, Any]) -> Lines:
    """Return nested sections: {"loader.workers": 2} → {"loader": {"workers": 2}}."""
    nested: Lines = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        functools.reduce(lambda inner, key: inner.setdefault(key, {}), sections, nested)[leaf] = (
            value
        )
    return nested


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def flatten(
    nested: Mapping[str, Any],
    where: str = "knobs",
    prefix: str = "",
    is_section: Callable[[Any], bool] = _is_mapping,
) -> Values:
    """Return knobs by dotted name: {"loader": {"workers": 2}} → {"loader.workers": 2}.

    `is_section`: whether a value contains knobs. Raises `ConfigError` for a knob that is given both
    nested and dotted.
    """
    flat: Values = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        inner = (
            flatten(value, where, f"{name}.", is_section) if is_section(value) else {name: value}
        )
        for twice in inner.keys() & flat.keys():
            both = f"{flat[twice]!r} and {inner[twice]!r}"
            raise ConfigError(
                f"{where}: {twice}: is given twice, {both}; allowed: once, nested or dotted"
            )
        flat |= inner
    return flat


def to_dict(config: Configuration) -> Lines:
    """Return a configuration as a dictionary with its workload first: `from_dict` needs nothing
    else."""
    return {"workload": config.schema.workload, **config.schema.to_dict(config)}


def flat(config: Configuration) -> Values:
    """Return the workload and every knob of this configuration by dotted name."""
    return flatten(to_dict(config))


def fingerprint(config: Configuration) -> str:
    """Return 12 hex digits that are equal exactly for equal configurations of equal workloads."""
    schema = config.schema
    name = (
        Path(schema.workload).name if schema.version else schema.workload
    )  # a copy of the file counts as equal
    content = json.dumps([schema.version, {**to_dict(config), "workload": name}], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def differences(of: Configuration | Mapping[str, Any], base: Configuration) -> Values:
    """Return the knobs of a configuration, or those of these values by dotted name, that differ
    from `base`.

    `override(base, …)` with the result gives the configuration again. So defaults that come with
    another union member (`timesteps.name`) are not included.
    """
    ours, theirs = flat(of) if isinstance(of, Configuration) else of, flat(base)
    members = base.schema.members
    chosen = {
        name: ours[name]
        for name in members
        if ours.get(name) in members[name] and ours[name] != theirs[name]
    }
    theirs = flat(override(base, chosen, check=False)) | {name: theirs[name] for name in chosen}
    changed = {
        name: value for name, value in ours.items() if name not in theirs or theirs[name] != value
    }
    if Path(str(changed.get("workload", ""))).name == Path(theirs["workload"]).name:
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
    values_now = flatten(schema.to_dict(config))
    for name, value in values.items():
        if schema.knob(name, where).name in schema.members and values_now[name] != value:
            prefix, kept = (
                name.removesuffix("name"),
                schema.kept_knobs(name, values_now[name], value),
            )
            values_now = {
                other: old
                for other, old in values_now.items()
                if not other.startswith(prefix) or other in kept
            }
    changed: C = schema.from_dict(nest({**values_now, **values}), where, check)
    return changed


def with_absolute_paths(config: C) -> C:
    """Return the configuration with absolute paths of its files; relative ones start from the
    current folder."""
    return _with_paths(config, lambda path: path.expanduser().absolute())


def with_relative_paths(config: C) -> C:
    """Return the configuration with files inside the current folder as relative, portable paths."""
    current = Path.cwd()
    return _with_paths(
        config, lambda path: path.relative_to(current) if path.is_relative_to(current) else path
    )


def _with_paths(config: C, change: Callable[[Path], Path]) -> C:
    now, schema = flat(config), config.schema
    named = {name for name, knob in schema.knobs.items() if knob.file and now.get(name) is not None}
    changed = {name: str(change(Path(now[name]))) for name in named}
    return override(config, changed, check=False) if changed else config
