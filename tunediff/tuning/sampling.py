"""The sampler that draws new points: TPE that takes no longer with every trial."""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable
from typing import Any, cast

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from tunediff.config import ConfigError

HISTORY = 1000
"""Number of trials that TPE looks at: the newest ones."""
GOOD = 25
"""Number of best trials that it looks at, of any age: Optuna's `default_gamma`."""


def named(name: str) -> Callable[[int], optuna.samplers.BaseSampler]:
    """Return a factory of Optuna's sampler by seed. Raises `ConfigError` without its package."""
    if name == "TPESampler":
        return default_sampler

    def make(seed: int) -> optuna.samplers.BaseSampler:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                sampler: optuna.samplers.BaseSampler = getattr(optuna.samplers, name)(seed=seed)
                return sampler
        except ImportError as error:
            raise ConfigError(f"sampler: {name}: a package is missing: {error}") from None

    return make


def default_sampler(seed: int) -> optuna.samplers.BaseSampler:
    """Return the sampler that draws new points by default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return Recent(
            seed=seed, multivariate=True, group=True, constant_liar=True, n_startup_trials=5
        )


class Recent(optuna.samplers.TPESampler):
    """TPE over the best and the newest trials: suggestions stay fast after thousands.

    TPE draws where the density of good points is high relative to that of the others. Good are the
    best tenth, 25 at most: with more than 250 trials these are the same 25 as without this class.
    The density of the others is estimated from the newest trials.
    """

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Any:
        return super().infer_relative_search_space(cast(Any, _Seen(study)), trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Any
    ) -> dict[str, Any]:
        return super().sample_relative(cast(Any, _Seen(study)), trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, name: str, distribution: Any
    ) -> Any:
        return super().sample_independent(cast(Any, _Seen(study)), trial, name, distribution)


class _Seen:
    """A study that shows the sampler a part of its trials; everything else passes through."""

    def __init__(self, study: optuna.Study) -> None:
        self._study = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def _get_trials(
        self, deepcopy: bool = True, states: Any = None, use_cache: bool = False
    ) -> list[FrozenTrial]:
        """Return the trials in order of their numbers, as Optuna's samplers request them."""
        trials = self._study._get_trials(deepcopy=deepcopy, states=states, use_cache=use_cache)
        return trials if len(trials) <= HISTORY else _part(trials, self._study.directions)


def _part(trials: list[FrozenTrial], directions: list[StudyDirection]) -> list[FrozenTrial]:
    """Return the newest trials, after the best of the others in each objective."""
    older, newest = trials[:-HISTORY], trials[-HISTORY:]
    done = [trial for trial in older if trial.state == TrialState.COMPLETE]
    good = dict[int, FrozenTrial]()
    for place, direction in enumerate(directions):
        pick = heapq.nsmallest if direction == StudyDirection.MINIMIZE else heapq.nlargest
        good |= {
            trial.number: trial for trial in pick(GOOD, done, key=lambda trial: trial.values[place])
        }
    return [*(good[number] for number in sorted(good)), *newest]
