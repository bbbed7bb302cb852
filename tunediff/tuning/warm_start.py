"""Use an earlier search's trials: results if comparable, else their best points."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tunediff import analysis
from tunediff import config as cfg
from tunediff.analysis.outcome import Outcome
from tunediff.config import ConfigError, Values
from tunediff.core import environment
from tunediff.core.trial_record import TrialRecord
from tunediff.search_space import SearchSpace
from tunediff.tuning import knowledge


@dataclasses.dataclass(frozen=True)
class PriorTrial:
    """A trial of an earlier search that a space can express."""

    origin: str
    """`FOLDER/t0007`."""
    trial: TrialRecord
    drawn: Values
    """The knobs that the space searches."""
    doubts: tuple[str, ...]
    """Why its result is not comparable: another objective, budget or machine; empty: it is."""

    @property
    def counts(self) -> bool:
        """Return whether its result is reused."""
        return not self.doubts


def prior_trials(
    space: SearchSpace, folder: Path, device: str = "cpu", here: Mapping[str, Any] | None = None
) -> list[PriorTrial]:
    """Return the trials in `folder` with results, best first, then known failures.

    `device`: "cpu" or "cuda", what this search trains on; `here`: on what machine, see
    `environment.differences`. Raises `ConfigError` if the search cannot be read.
    """
    # Results from best to worst, then failures that say something about their configuration. A
    # value of a configuration that fails on a seed is no result.
    results, priors = analysis.read(folder), list[PriorTrial]()
    stable = [outcome for outcome in results.ranked if not outcome.failures]
    done = [trial for outcome in stable for trial in outcome.samples if trial in outcome.done]
    failures = [trial for outcome in results.outcomes for trial in _known_failures(outcome)]
    differences = [
        f"{quantity} {theirs} there, {ours} here"
        for quantity, theirs, ours in _compared(results.space, space)
        if theirs != ours
    ]
    for trial in [*done, *failures]:
        if not _trains_workload_of(space, trial):
            continue
        if (drawn := _values_in(space, trial.config)) is None:
            continue
        doubts = list(differences)
        if not doubts and trial.fingerprint != cfg.fingerprint(space.config(drawn)):
            doubts = ["knobs that are not searched have other values"]
        doubts += environment.differences(trial.environment, device, here)
        priors.append(PriorTrial(f"{folder.name}/{trial.name}", trial, drawn, tuple(doubts)))
    return priors


def _known_failures(outcome: Outcome) -> list[TrialRecord]:
    """Return a configuration's planned runs, as they ended if it failed by its own fault."""
    failures = [
        run
        for run in outcome.runs
        if run.status in ("nan", "timeout") or knowledge.ran_out_of_memory(run)
    ]
    if failures and outcome.seeds == 1:  # it may have failed when it was repeated
        return [dataclasses.replace(outcome.runs[0], end=failures[0].end)]
    return failures


def describe(space: SearchSpace, device: str, here: Mapping[str, Any] | None = None) -> str:
    """Return a line on what is reused of the earlier search, or why nothing; '': none."""
    if space.warm_start is None:
        return ""
    folder = Path(space.warm_start)
    priors, name = prior_trials(space, folder, device, here), folder.name
    if not priors:
        return f"warm start: {name} has no trial that this search can express"
    if reused := sum(prior.counts for prior in priors):
        return f"warm start: {reused} of {len(priors)} results of {name} are reused"
    none = f"warm start: none of the {len(priors)} results of {name} is reused"
    return f"{none} ({'; '.join(priors[0].doubts)}); its best are tried first"


def _trains_workload_of(space: SearchSpace, trial: TrialRecord) -> bool:
    """Return whether a trial trained this search's workload; users' files count by name."""
    theirs, ours = trial.config["workload"], space.workload.name
    return theirs == ours or (cfg.is_users(ours) and Path(theirs).name == Path(ours).name)


def _compared(a: SearchSpace, b: SearchSpace) -> Iterator[tuple[str, Any, Any]]:
    """Yield name and both values of what comparable searches must have in common."""
    yield "objective", a.metric, b.metric
    yield "target", str(a.target), str(b.target)
    yield "cost", a.cost, b.cost
    theirs, ours = (f"{s.budget.per_trial_s:g} {s.budget.clock.short}" for s in (a, b))
    yield "budget", theirs, ours
    yield "trials per GPU:", a.trials_per_gpu, b.trials_per_gpu
    yield "compilation charged:", a.budget.compile_charged, b.budget.compile_charged
    yield "setup charged:", a.budget.setup_charged, b.budget.setup_charged


def _values_in(space: SearchSpace, config: Mapping[str, Any]) -> Values | None:
    """Return `config`'s values that this space would draw; None: it lies outside."""
    drawn: Values = {}
    for dimension in space.dimensions:
        if dimension.active(drawn):
            if dimension.name not in config or not dimension.contains(config[dimension.name]):
                return None
            drawn[dimension.name] = config[dimension.name]
    try:
        space.config(drawn)
    except ConfigError:
        return None
    return drawn
