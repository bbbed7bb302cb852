"""Commands in calls from Python: `run_comparison(command=…)` and `run_search(command=…)`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.api import notebook
from tunediff.api.calls import folder, options_of
from tunediff.api.command_options import CommandCompareOptions, CommandSettings
from tunediff.api.options import TargetOptions
from tunediff.command.search import DURATIONS, OF_COMMAND, OF_OBJECTIVE
from tunediff.command.template import shown
from tunediff.config import ConfigError
from tunediff.core.files import write_text
from tunediff.core.options import option

Command = str | list[str]
"""A command line, or its words."""


@dataclasses.dataclass(kw_only=True)
class CommandKeywords(CommandSettings):
    """Keywords of calls that take a command in the place of a workload."""

    command: Command | tuple[Command, Command] | None = option(
        None, "a command line or a list of its words, in the place of a workload"
    )

    def check_unused(self) -> None:
        """Raise `ConfigError` for a setting of commands where there is no command."""
        for field in dataclasses.fields(CommandSettings):
            if field.name in TargetOptions.__dataclass_fields__:
                continue
            if (value := getattr(self, field.name)) != field.default:
                raise ConfigError(f"{field.name}: {value!r} is not allowed without command=")


@dataclasses.dataclass(kw_only=True)
class CommandSearchKeywords(CommandKeywords):
    """Keywords of `run_search` that a search file has as keys."""

    search: Mapping[str, Any] | None = option(
        None, "with command=: the searched parameters, as `search:` of a search file"
    )
    baseline: Mapping[str, Any] | None = option(
        None, "with command=: the values of its parameters in the baseline"
    )


def comparison(call: Any, a: Any, b: Any) -> CommandCompareOptions:
    """Return the options of a comparison of commands; `call`: its keywords. Raises
    `ConfigError`."""
    commands = call.command if isinstance(call.command, tuple) else (call.command,)
    if call.compile is not None:
        raise ConfigError(f"compile: {call.compile!r} is not allowed with command=; allowed: none")
    words = [*_parameters("a", a), *_parameters("b", b)]
    return options_of(call, CommandCompareOptions, words=words, run=commands)


def _parameters(side: str, values: Any) -> list[str]:
    if values is not None and not isinstance(values, Mapping):
        allowed = "values of the command's parameters by name, e.g. {'lr': 1e-3}"
        raise ConfigError(f"{side}: {values!r} is not allowed with command=; allowed: {allowed}")
    return [f"{name}={shown(value)}" for name, value in (values or {}).items()]


def search_file(call: Any) -> Path:
    """Write the search file that the keywords of a call describe; return its path. Raises
    `ConfigError`."""
    settings = {**call.settings, "grace": float(call.grace), "timeout": call.timeout}
    defaults = {field.name: field.default for field in dataclasses.fields(CommandSettings)}
    given = {name: value for name, value in settings.items() if value != defaults.get(name)}
    objective = {"name": call.objective} | ({"mode": call.mode} if call.mode else {})
    content = {
        "command": call.command,
        "objective": objective | {key: given[key] for key in OF_OBJECTIVE if key in given},
        **{key: given[key] for key in (*OF_COMMAND, *DURATIONS) if key in given},
        "budget": {"per_trial": f"{float(call.budget or 60.0):g}s", "trials": call.trials or 20},
        "baseline": dict(call.baseline or {}),
        "search": dict(call.search or {}),
    }
    text = cfg.to_yaml(content)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    path = folder(call.storage) / notebook.FOLDER / f"command-{digest}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return path
