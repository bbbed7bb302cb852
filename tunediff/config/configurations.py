"""Change and compare configurations: by dotted names, and as plain dictionaries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tunediff.config.knobs import Values
from tunediff.config.schema import Configuration, flatten, nest, to_dict

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
