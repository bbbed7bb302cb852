"""Track a search with a service for experiments: `--track wandb|mlflow|trackio|tensorboard`.

A process of its own does it: `tracker`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tunediff import cli
from tunediff.config import ConfigError
from tunediff.core import text
from tunediff.core.environment import install_command
from tunediff.integrations import tracker
from tunediff.integrations.companion import Companion, Say
from tunediff.integrations.services import SERVICES
from tunediff.integrations.tracker import TrackedSearch
from tunediff.search_space import SearchSpace

LOG = "tracking.log"
"""File in the folder of a search: what the service's package printed."""


def check(service: str | None) -> None:
    """Raise `ConfigError` for a service that does not exist or whose package is absent."""
    cli.allow(service in (None, *SERVICES), "--track", service, f"one of {', '.join(SERVICES)}")
    if service is not None and importlib.util.find_spec(package := SERVICES[service][0]) is None:
        raise ConfigError(
            f"--track: {service}: {package} is not installed; run: {install_command(service)}"
        )


def start(facts: TrackedSearch, say: Say, module: str = "search") -> Companion:
    """Start the tracker of a search or of a training; `module`: the command that resumes it."""
    folder, output = facts.folder, facts.folder / LOG
    again = [] if module == "search" else ["--track", facts.service]
    rest = text.command(module, "--resume", folder.name, *again, storage=folder.parent)
    rest = "the same command again" if module == "train" else rest
    unfinished = f"not everything was sent ({output}); to send the rest: {rest}"
    return Companion(tracker.__name__, facts, output, say, f"--track {facts.service}", unfinished)


def values(verdict: Mapping[str, Any]) -> str:
    """Return the numbers and texts of a search's result, as the tracker takes them at the end."""
    return json.dumps(
        {
            key: value
            for key, value in verdict.items()
            if isinstance(value, str | bool | int | float)
        }
    )


def settings(space: SearchSpace) -> dict[str, Any]:
    """Return what the run of a search as a whole has for knobs."""
    values = {
        "workload": space.workload.name,
        "objective": space.metric,
        "direction": space.mode,
        "seed": space.seed,
    }
    return values | {f"budget.{name}": value for name, value in space.budget.lines.items()}


@contextlib.contextmanager
def tracked(
    folder: Path,
    service: str | None,
    objective: str,
    config: Mapping[str, Any],
    say: Say,
    module: str = "search",
) -> Iterator[Companion | None]:
    """Track what runs in `folder`; yield None without a service.

    `config`: knobs of the run of the search as a whole; `say`: messages; `module`: the command that
    resumes it.
    """
    if service is None:
        yield None
        return
    companion = start(TrackedSearch(folder, service, objective, config), say, module)
    try:
        yield companion
    finally:
        companion.close()
