"""What an earlier search teaches a new one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff import record
from tunediff import space as spaces
from tunediff.config import ConfigError, Values
from tunediff.record import TrialRecord
from tunediff.space import SearchSpace


@dataclasses.dataclass(frozen=True)
class Lesson:
    """A trial of an earlier search that a space can express."""

    origin: str
    """`FOLDER/t0007`."""
    trial: TrialRecord
    point: Values
    """The knobs that the space searches."""
    counts: bool
    """Whether its result means here what it meant there: the same objective, budget and configuration."""


def lessons(space: SearchSpace, folder: Path) -> list[Lesson]:
    """The trials of the search in `folder` that ended in a result, the best first, and then known failures.

    Raises `ConfigError` if it cannot be read.
    """
    earlier, trials = spaces.load(spaces.of_search(folder)), record.read_trials(folder)
    metric, most = earlier.metric, earlier.mode == "max"
    done = [trial for trial in trials if trial.value(metric) is not None]
    ranked = sorted(done, key=lambda trial: trial.value(metric) or 0.0, reverse=most)
    found = []
    for trial in [*ranked, *(trial for trial in trials if trial.status in ("oom", "nan", "timeout"))]:
        again = earlier.seeds == 1 and "seed" in trial.drawn  # it taught how much runs differ, nothing of its point
        if again or not _alike(trial, space) or (point := _point(space, trial.config)) is None:
            continue
        same = _ruler(earlier) == _ruler(space) and trial.fingerprint == cfg.fingerprint(space.config(point))
        found.append(Lesson(f"{folder.name}/{trial.name}", trial, point, same))
    return found


def _alike(trial: TrialRecord, space: SearchSpace) -> bool:
    """Whether it trained the workload that is searched here: of a user's file, one of that name."""
    theirs, ours = trial.config["workload"], space.workload.name
    return theirs == ours or (cfg.is_users(ours) and Path(theirs).name == Path(ours).name)


def _ruler(space: SearchSpace) -> tuple[Any, ...]:
    """What values of two equal configurations must have in common to be comparable."""
    return space.metric, space.cost, space.budget.per_trial_s, space.budget.compile_charged


def _point(space: SearchSpace, config: Mapping[str, Any]) -> Values | None:
    """The point of this space that is `config`, by dotted names, in every searched knob; None: it lies outside."""
    point: Values = {}
    for dimension in space.dimensions:
        if dimension.active(point):
            if dimension.name not in config or not dimension.contains(config[dimension.name]):
                return None
            point[dimension.name] = config[dimension.name]
    try:
        space.config(point)
    except ConfigError:
        return None
    return point
