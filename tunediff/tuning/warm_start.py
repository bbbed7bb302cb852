"""What an earlier search teaches a new one: results, where they mean here what they meant there, else good points."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff import search_space as spaces
from tunediff.config import ConfigError, Values
from tunediff.core import environment, record
from tunediff.core.record import TrialRecord
from tunediff.search_space import SearchSpace
from tunediff.tuning import knowledge


@dataclasses.dataclass(frozen=True)
class PriorTrial:
    """A trial of an earlier search that a space can express."""

    origin: str
    """`FOLDER/t0007`."""
    trial: TrialRecord
    point: Values
    """The knobs that the space searches."""
    doubts: tuple[str, ...]
    """Why its result does not mean here what it meant there: another objective, budget or machine; empty: it does."""

    @property
    def counts(self) -> bool:
        """Whether its result is reused."""
        return not self.doubts


def lessons(space: SearchSpace, folder: Path, device: str = "cpu") -> list[PriorTrial]:
    """The trials of the search in `folder` that ended in a result, the best first, and then known failures.

    `device`: "cpu" or "cuda", what this search trains on. Raises `ConfigError` if it cannot be read.
    """
    earlier, trials = spaces.load(spaces.of_search(folder)), record.read_trials(folder)
    metric, most = earlier.metric, earlier.mode == "max"
    done = [trial for trial in trials if trial.value(metric) is not None]
    ranked = sorted(done, key=lambda trial: trial.value(metric) or 0.0, reverse=most)
    priors = []
    failures = [trial for trial in trials if trial.status in ("nan", "timeout") or knowledge.teaches_memory(trial)]
    for trial in [*ranked, *failures]:
        again = earlier.seeds == 1 and "seed" in trial.drawn  # it taught how much runs differ, nothing of its point
        if again or not _alike(trial, space) or (point := _point(space, trial.config)) is None:
            continue
        doubts = [f"{quantity} {a} there, {b} here" for quantity, a, b in _compared(earlier, space) if a != b]
        if not doubts and trial.fingerprint != cfg.fingerprint(space.config(point)):
            doubts = ["knobs that are not searched have other values"]
        doubts += environment.differences(trial.environment, device)
        priors.append(PriorTrial(f"{folder.name}/{trial.name}", trial, point, tuple(doubts)))
    return priors


def said(space: SearchSpace, device: str) -> str:
    """How much of the earlier search is reused, and if nothing why, in a line; '' without one."""
    if space.warm_start is None:
        return ""
    priors, name = lessons(space, Path(space.warm_start), device), Path(space.warm_start).name
    if not priors:
        return f"warm start: {name} has no trial that this search can express"
    if believed := sum(prior.counts for prior in priors):
        return f"warm start: {believed} of {len(priors)} results of {name} are reused"
    why = "; ".join(priors[0].doubts)
    return f"warm start: none of the {len(priors)} results of {name} is reused ({why}); its best are tried first"


def _alike(trial: TrialRecord, space: SearchSpace) -> bool:
    """Whether it trained the workload that is searched here: of a user's file, one of that name."""
    theirs, ours = trial.config["workload"], space.workload.name
    return theirs == ours or (cfg.is_users(ours) and Path(theirs).name == Path(ours).name)


def _compared(*two: SearchSpace) -> Iterator[tuple[str, Any, Any]]:
    """What values of two equal configurations on one machine must have in common to be comparable, with its name."""
    a, b = two
    yield "objective", a.metric, b.metric
    yield "cost", a.cost, b.cost
    there, here = (f"{space.budget.per_trial_s:g} {space.budget.clock.short}" for space in two)
    yield "budget", there, here
    yield "compilation charged:", a.budget.compile_charged, b.budget.compile_charged


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
