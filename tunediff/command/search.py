"""Search files of commands: `command:` in the place of `workload:`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff.command import trial
from tunediff.command.check import check
from tunediff.command.definition import CommandDefinition, CommandSettings, default_mode
from tunediff.command.workload import common_type, make
from tunediff.config import ConfigError, Lines, flatten
from tunediff.config.knobs import nearest
from tunediff.search_space import SearchSpace
from tunediff.search_space.sections import SearchFile

OF_OBJECTIVE = ("mode", "pattern", "metrics", "reduce", "target")
"""Fields of a definition that stand under `objective:`, beside its name."""
OF_COMMAND = tuple(
    name
    for name in (*CommandSettings.model_fields, "gpus")
    if name not in ("objective", *OF_OBJECTIVE)
)
"""Fields of a definition that are keys of a search file."""


def translated(content: Lines, source: str, folder: Path) -> Lines:
    """Return the search file of a workload that is the command of `content`.

    `folder`: where the command runs. Parameters are what `baseline:` and `fixed:` have; each
    searched one needs a value there. Raises `ConfigError`.
    """
    rest = dict(content)
    objective = rest.pop("objective", None)
    if not isinstance(objective, Mapping) or not isinstance(objective.get("name"), str):
        example = "{name: val_loss, mode: min}"
        raise ConfigError(f"{source}: objective: {objective!r} is not allowed; allowed: {example}")
    _refuse_others(objective, ["name", *OF_OBJECTIVE], f"{source}: objective")
    settings = dict(objective)
    settings["objective"] = settings.pop("name")
    where = f"{source}: objective: mode"
    settings["mode"] = settings.get("mode") or default_mode(settings["objective"], where)
    settings |= {key: rest.pop(key) for key in OF_COMMAND if key in rest}
    if "target" in settings:
        settings.setdefault("outcome", "time")
    settings |= {"command": rest.pop("command"), "folder": str(folder.absolute())}
    definition = CommandDefinition.of(settings, source)
    for key in ("workload", "base"):
        if key in rest:
            raise ConfigError(
                f"{source}: {key}: is not allowed with command:; allowed: one of them"
            )
    common = {field.name for field in dataclasses.fields(SearchFile)} - {"workload", "base"}
    _refuse_others(rest, [*OF_COMMAND, "command", *sorted(common)], source)
    if not {"search", "grid", "trials", "ladder"} & rest.keys():
        raise ConfigError(f"{source}: search: is missing: which parameters to vary, and how")
    parameters = _parameters(rest, source)
    rest.pop("baseline", None)
    rest.pop("fixed", None)
    return {"workload": make(definition, parameters, source).name, **rest}


def check_baseline(space: SearchSpace, say: Callable[[str], None]) -> None:
    """Try the command of a search in its baseline. Raises `ConfigError`."""
    check(trial.run_of(space.baseline, Path(), space.budget.per_trial_s), say)


def _refuse_others(lines: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    """Refuse keys of a file that are none of the allowed ones. Raises `ConfigError`."""
    for key in lines:
        if key not in allowed:
            raise ConfigError(f"{where}: {key}: no such key; {nearest(str(key), allowed)}")


def _parameters(content: Lines, source: str) -> dict[str, Any]:
    """Return the baseline's values, each of a type that its searched values have too."""
    values: dict[str, Any] = {}
    for key in ("fixed", "baseline"):
        values |= flatten(content.get(key) or {}, f"{source}: {key}")
    tried = list(_tried(content))
    for name, _ in tried:
        if name not in values and name != "seed":
            where = f"{source}: {name}: has no value in the baseline"
            near = f" ({nearest(name, values)})" if values else ""
            raise ConfigError(f"{where}; allowed: {name} under baseline:{near}")
    types = {
        name: common_type([value, *(other for key, other in tried if key == name)])
        for name, value in values.items()
    }
    return {name: types[name](value) for name, value in values.items()}


def _tried(content: Lines) -> Iterator[tuple[str, Any]]:
    """Yield (parameter, value) for every value that a search may take, ends of ranges included."""
    for form in ("search", "grid"):
        for name, space in _spaces(content.get(form) or {}):
            if isinstance(space, Mapping):
                space = [
                    *space.get("choice", ()),
                    *(space[k] for k in ("low", "high") if k in space),
                ]
            yield from ((name, value) for value in (space if isinstance(space, list) else [space]))
    for form in ("first", "trials"):
        for point in content.get(form) or []:
            yield from flatten(point).items() if isinstance(point, Mapping) else ()


def _spaces(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield searched parameters by dotted name; a mapping with `low` or `choice` is a space."""
    for key, value in nested.items():
        inner = isinstance(value, Mapping) and not {"low", "high", "choice"} & value.keys()
        if inner:
            yield from _spaces(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
