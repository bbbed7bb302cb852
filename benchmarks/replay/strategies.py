"""Ways to search a table: how configurations are drawn, and how the time is divided among them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import TrialState

from benchmarks.replay.table import Table, load
from tunediff.core.trial_record import End, TrialRecord
from tunediff.search_space import Draw, SearchSpace, to_params
from tunediff.tuning.sampling import default_sampler
from tunediff.tuning.stopping import EarlyStopping


# ------------------------------------------------------------------------------------------------------ configurations
class AtRandom:
    """Draws the configurations of a table in random order."""

    def __init__(self, table: Table, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self, left: list[int]) -> int:
        """Return one of the places that are left."""
        return self._random.choice(left)

    def report(self, trial: TrialRecord) -> None:
        """Take a new point of a trial, or its end."""


class Sampled:
    """Draws with a sampler of Optuna, and takes the nearest configuration of the table that was not drawn yet."""

    def __init__(self, table: Table, seed: int, sampler: Callable[[int], BaseSampler]) -> None:
        self._table, self._space = table, table.space
        direction = "minimize" if table.space.mode == "min" else "maximize"
        self._study = optuna.create_study(sampler=sampler(seed), direction=direction)
        self._draw, self._trials = Draw(table.space.dimensions), list[optuna.Trial]()
        self.draw([0])  # the baseline is tried first

    def draw(self, left: list[int]) -> int:
        """Return one of the places that are left: the nearest one to what the sampler draws."""
        place = left[0]
        if len(left) > 1:
            place = self._table.nearest(self._draw(drawn := self._study.ask()), left)
            self._study.tell(drawn, state=TrialState.FAIL)  # it was not run
        self._study.enqueue_trial(to_params(self._table.configurations[place].knobs))
        self._draw(trial := self._study.ask())
        self._trials.append(trial)
        return place

    def report(self, trial: TrialRecord) -> None:
        """Take a new point of a trial, or its end."""
        drawn, value = (
            self._trials[trial.number],
            trial.points[-1][self._space.metric] if trial.points else None,
        )
        if trial.status == "ok":
            self._study.tell(drawn, value)
        elif trial.finished:
            self._study.tell(
                drawn, state=TrialState.PRUNED if trial.status == "pruned" else TrialState.FAIL
            )
        else:
            drawn.report(value, step=trial.points[-1].index)


# ---------------------------------------------------------------------------------------------------------------- time
class ToTheEnd:
    """Trains every trial to its end."""

    def goes_on(self, trial: TrialRecord) -> bool:
        """Return whether a trial goes on after its last point."""
        return True


class Stopping(ToTheEnd):
    """Ends trials as `early_stopping: asha` does."""

    def __init__(self, space: SearchSpace) -> None:
        self._space, self._rule = space, EarlyStopping(space)

    def goes_on(self, trial: TrialRecord) -> bool:
        point, points = trial.points[-1], self._space.baseline.evaluation.points
        spec: Any = SimpleNamespace(name=trial.name, drawn=trial.drawn, role=trial.role)
        result = {"fraction": point.index / points, "objective": point[self._space.metric]}
        return not self._rule.stops(spec, result | {"index": point.index, "train_s": point.train_s})


# ------------------------------------------------------------------------------------------------------------ together
@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to search."""

    rule: Callable[[SearchSpace], ToTheEnd]
    sampler: Callable[[int], BaseSampler] | None = None
    """Makes Optuna's sampler from a seed; None: random order."""

    def draws(self, table: Table, seed: int) -> Any:
        """Return what draws configurations."""
        return AtRandom(table, seed) if self.sampler is None else Sampled(table, seed, self.sampler)


def _tpe(seed: int) -> BaseSampler:
    return TPESampler(seed=seed)


def _rest(space: SearchSpace) -> ToTheEnd:
    return ToTheEnd()


STRATEGIES: dict[str, Strategy] = {
    "random": Strategy(_rest),
    "TPE": Strategy(_rest, _tpe),
    "TPE + ASHA": Strategy(Stopping, _tpe),
    "ours + ASHA": Strategy(Stopping, default_sampler),
}


def replay(table: Table, strategy: Strategy, seed: int) -> float:
    """Return the training seconds of one search until its best finished trial reaches the target; infinite: never.

    The best is what the search takes for it, by one run each; whether it reaches the target, the mean of its seeds
    says. The baseline is trained first, to its end. One trial at a time.
    """
    space, rng = table.space, random.Random(seed)
    draws, rule = strategy.draws(table, seed), strategy.rule(space)
    places, curves = [0], [rng.choice(one.curves) for one in table.configurations]
    left, current = list(range(1, len(table.configurations))), begin(table, 0, 0)
    spent_s, best = 0.0, (math.inf, math.inf)
    while True:
        # ---- one more point
        curve, before = (
            curves[places[current.number]],
            current.points[-1].train_s if current.points else 0.0,
        )
        if len(current.points) < len(curve.points):
            current.points.append(curve.points[len(current.points)])
            spent_s += current.points[-1].train_s - before
            last = len(current.points) == table.points
            goes_on = last or current.number == 0 or rule.goes_on(current)
            status = "ok" if last else None if goes_on else "pruned"
        else:
            status = curve.status
        current.end = End(status) if status else None
        draws.report(current)
        # ---- is it found?
        if status == "ok":
            value = current.points[-1][space.metric]
            loss = (
                math.inf if not math.isfinite(value) else value if space.mode == "min" else -value
            )
            best = min(best, (loss, table.configurations[places[current.number]].mean))
            if best[1] <= table.target:
                return spent_s
        # ---- which trial is next
        if current.finished:
            if not left:
                return math.inf
            places.append(place := draws.draw(left))
            left.remove(place)
            current = begin(table, len(places) - 1, place)


def begin(table: Table, number: int, place: int) -> TrialRecord:
    """Return a trial of the configuration at that place, before its first point."""
    one = table.configurations[place]
    return TrialRecord(f"t{number:04d}", number, dict(one.config), dict(one.knobs), one.fingerprint)


_load = functools.lru_cache(maxsize=1)(load)


def replay_seed(folder: Path, name: str, seed: int) -> float:
    """Return the seconds of one search of the table in `folder`; a function that a process of its own can run."""
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("ray").setLevel(logging.ERROR)
    return replay(_load(folder), STRATEGIES[name], seed)
