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

from tunediff.config import ConfigError
from tunediff.core import text
from tunediff.integrations import tracker
from tunediff.integrations.companion import Companion, Say
from tunediff.integrations.services import SERVICES
from tunediff.integrations.tracker import TrackedSearch
from tunediff.search_space import SearchSpace

LOG = "tracking.log"
"""File in the folder of a search: what the service's package printed."""


def check(service: str | None) -> None:
    """Raise `ConfigError` where the package of a service is absent."""
    if service is not None and importlib.util.find_spec(package := SERVICES[service][0]) is None:
        raise ConfigError(f"--track: {service}: {package} is not installed; run: pip install tunediff[{service}]")


def start(facts: TrackedSearch, say: Say) -> Companion:
    """Start the tracker of a search."""
    folder, output = facts.folder, facts.folder / LOG
    rest = text.command("search", "--resume", folder.name, storage=folder.parent)
    unfinished = f"--track {facts.service}: not everything was sent ({output}); to send the rest: {rest}"
    return Companion(tracker.__name__, facts, output, say, unfinished)


def values(verdict: Mapping[str, Any]) -> str:
    """Return the numbers and texts of a search's result, as the tracker takes them at the end."""
    return json.dumps({key: value for key, value in verdict.items() if isinstance(value, str | bool | int | float)})


@contextlib.contextmanager
def tracked(folder: Path, space: SearchSpace, say: Say) -> Iterator[Companion | None]:
    """Track the search in `folder` with the service that its file names; yield None for none. `say`: its messages."""
    if (service := space.track) is None:
        yield None
        return
    config = {"workload": space.workload.name, "objective": space.metric, "direction": space.mode, "seed": space.seed}
    config |= {f"budget.{name}": value for name, value in space.budget.lines.items()}
    companion = start(TrackedSearch(folder, service, space.metric, config), say)
    try:
        yield companion
    finally:
        companion.close()
