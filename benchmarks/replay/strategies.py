"""Ways to search a table: how configurations are drawn, and how the time is divided among them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import TrialState
from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from benchmarks.replay.table import Table, load
from tunediff.config import Values
from tunediff.core.trial_record import End, TrialRecord
from tunediff.search_space import Draw, SearchSpace, to_params
from tunediff.tuning.allocation import Decision, Promotion, is_baseline, loss
from tunediff.tuning.curve_model import propose
from tunediff.tuning.sampling import default_sampler
from tunediff.tuning.stopping import GRACE, BaselineExemptScheduler
from tunediff.tuning.trial import SPEC


# ------------------------------------------------------------------------------------------------------ configurations
class AtRandom:
    """Draws the configurations of a table in random order."""

    def __init__(self, table: Table, seed: int) -> None:
        self._random, self._table = random.Random(seed), table

    def draw(self, left: list[int], wanted: Values | None = None) -> int:
        """Return one of the places that are left: the nearest one to what is wanted."""
        return self._random.choice(left) if wanted is None else self._table.nearest(wanted, left)

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

    def draw(self, left: list[int], wanted: Values | None = None) -> int:
        """Return one of the places that are left: the nearest one to what is wanted, or to what the sampler draws."""
        place = left[0] if wanted is None else self._table.nearest(wanted, left)
        if len(left) > 1 and wanted is None:
            place = self._table.nearest(self._draw(drawn := self._study.ask()), left)
            self._study.tell(drawn, state=TrialState.FAIL)  # it was not run
        self._study.enqueue_trial(to_params(self._table.configurations[place].knobs))
        self._draw(trial := self._study.ask())
        self._trials.append(trial)
        return place

    def report(self, trial: TrialRecord) -> None:
        """Take a new point of a trial, or its end."""
        drawn, value = self._trials[trial.number], trial.points[-1][self._space.metric] if trial.points else None
        if trial.status == "ok":
            self._study.tell(drawn, value)
        elif trial.finished:
            self._study.tell(drawn, state=TrialState.PRUNED if trial.status == "pruned" else TrialState.FAIL)
        else:
            drawn.report(value, step=trial.points[-1].index)


# ---------------------------------------------------------------------------------------------------------------- time
END = "end"
"""What `after_point` of a rule may return beside a `Decision`: the trial ends as `pruned`."""


class ToTheEnd:
    """Trains every trial to its end."""

    def after_point(self, trial: TrialRecord, trials: Sequence[TrialRecord]) -> Decision | str:
        return Decision.GO_ON

    def next_trial(self, trials: Sequence[TrialRecord], may_draw: bool) -> str | None:
        return None


class Stopping(ToTheEnd):
    """Ends trials by Ray Tune's ASHA, set up as `early_stopping: asha` sets it up."""

    def __init__(self, space: SearchSpace) -> None:
        rule = ASHAScheduler(time_attr="fraction", max_t=1, grace_period=GRACE, reduction_factor=2.0)
        self._space, self._scheduler = space, BaselineExemptScheduler(rule, space)
        self._scheduler.set_search_properties("objective", space.mode)

    def after_point(self, trial: TrialRecord, trials: Sequence[TrialRecord]) -> Decision | str:
        point, points = trial.points[-1], self._space.baseline.evaluation.points
        stands_for = SimpleNamespace(config={SPEC: SimpleNamespace(name=trial.name, drawn=trial.drawn)})
        result = {"fraction": point.index / points, "objective": point[self._space.metric]}
        result |= {"index": point.index, "train_s": point.train_s}
        decision = self._scheduler.on_trial_result(None, stands_for, result)
        return Decision.GO_ON if decision == TrialScheduler.CONTINUE else END


class BestOfGroup(ToTheEnd):
    """Train every trial to its first point; then continue the best one of every `size` trials to its end.

    A group is `size` trials by their numbers, the baseline's runs not counted. Those that are left over continue none,
    unless they are all there are. A trial that was continued and failed before its second point is replaced by the next
    best. Source of the rule: «one epoch, then the best k», arXiv 2307.15422.
    """

    def __init__(self, space: SearchSpace, size: int = 6) -> None:
        self._space, self._size = space, size

    def after_point(self, trial: TrialRecord, trials: Sequence[TrialRecord]) -> Decision:
        """Pause every trial at its first point."""
        return Decision.PAUSE if len(trial.points) == 1 else Decision.GO_ON

    def next_trial(self, trials: Sequence[TrialRecord], may_draw: bool) -> str | None:
        """Return the best trial of the first group that has no trial beyond its first point, and none that runs."""
        compared = sorted(
            (trial for trial in trials if not is_baseline(self._space, trial.drawn)), key=lambda trial: trial.number
        )
        for first in range(0, len(compared), self._size):
            group = compared[first : first + self._size]
            if len(group) < self._size and (may_draw or first):
                return None
            paused = [trial for trial in group if trial.paused]
            if paused and all((trial.paused or trial.finished) and len(trial.points) <= 1 for trial in group):
                return min(paused, key=lambda trial: loss(self._space, trial)).name
        return None


# ------------------------------------------------------------------------------------------------------------ together
@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to search."""

    rule: Callable[[SearchSpace], ToTheEnd | Promotion]
    sampler: Callable[[int], BaseSampler] | None = None
    """Makes Optuna's sampler from a seed; None: random order."""
    models: bool = False
    """Whether a model of curves draws new configurations as soon as it can (`curve_model.propose`)."""

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
    "one point each, then the best": Strategy(BestOfGroup),
    "promotion, random": Strategy(Promotion),
    "promotion, ours": Strategy(Promotion, default_sampler),
    "pause": Strategy(Promotion, default_sampler, models=True),
}


def replay(table: Table, strategy: Strategy, seed: int) -> float:
    """Return the training seconds of one search until its best finished trial reaches the target; infinite: never.

    The best is what the search takes for it, by one run each; whether it reaches the target, the mean of its seeds
    says. The baseline is trained first, to its end. One trial at a time.
    """
    space, rng = table.space, random.Random(seed)
    seeded = dataclasses.replace(space, seed=seed)
    draws, rule = strategy.draws(table, seed), strategy.rule(space)
    places, curves = [0], [rng.choice(one.curves) for one in table.configurations]
    left, trials = list(range(1, len(table.configurations))), [begin(table, 0, 0)]
    spent_s, best, current = 0.0, (math.inf, math.inf), trials[0]
    while True:
        # ---- one more point
        curve, before = curves[places[current.number]], current.points[-1].train_s if current.points else 0.0
        current.paused = False
        if len(current.points) < len(curve.points):
            current.points.append(curve.points[len(current.points)])
            spent_s += current.points[-1].train_s - before
            last = len(current.points) == table.points
            decision = Decision.GO_ON if last or current.number == 0 else rule.after_point(current, trials)
            status = "ok" if last else "pruned" if decision == END else None
        else:
            status, decision = curve.status, END
        current.paused, current.end = decision is Decision.PAUSE, End(status) if status else None
        draws.report(current)
        # ---- is it found?
        if status == "ok":
            best = min(best, (loss(space, current), table.configurations[places[current.number]].mean))
            if best[1] <= table.target:
                return spent_s
        # ---- which trial is next
        if current.paused or current.finished:
            name = rule.next_trial(trials, bool(left))
            if name is None and not left:  # the search would end: how much longer would it have taken?
                paused = [trial for trial in trials if trial.paused]
                if not paused:
                    return math.inf
                name = min(paused, key=lambda trial: (loss(space, trial), trial.number)).name
            if name is None:
                wanted = propose(seeded, trials, len(trials)) if strategy.models else None
                places.append(place := draws.draw(left, wanted))
                left.remove(place)
                trials.append(begin(table, len(trials), place))
            current = next(trial for trial in trials if trial.name == (name or trials[-1].name))


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
