"""Ways to search a table, and the searches."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import math
import multiprocessing
import os
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import TrialState
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler

from benchmarks.replay.table import Curve, Table, load
from tunediff.core.point import Point
from tunediff.core.trial_record import End, TrialRecord
from tunediff.search_space import Draw, to_params
from tunediff.tuning.knowledge import penalty
from tunediff.tuning.optuna_proposer import OptunaProposer
from tunediff.tuning.sampling import default_sampler
from tunediff.tuning.search_study import SearchStudy
from tunediff.tuning.stopping import GRACE

REDRAWS = 20
"""Draws of a sampler in a row that may be known before a random new point takes over, as in our `OptunaProposer`."""


@dataclasses.dataclass(frozen=True)
class Stopping:
    """When a trial is stopped early."""

    rule: str = "none"
    """`none`, `asha` or `median`."""
    grace: float = GRACE
    """Share of its budget that every trial gets."""
    reduction: float = 2.0
    """ASHA lets the best 1/reduction of a rung go on."""

    def scheduler(self, mode: str) -> Any:
        """Ray Tune's scheduler, set up as a search sets it up."""
        common: dict[str, Any] = {"time_attr": "fraction", "metric": "objective", "mode": mode}
        common["grace_period"] = self.grace
        if self.rule == "asha":
            return ASHAScheduler(max_t=1, reduction_factor=self.reduction, **common)
        if self.rule == "median":
            return MedianStoppingRule(min_samples_required=3, **common)
        return FIFOScheduler()


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to search."""

    sampler: Callable[[int], BaseSampler]
    """Makes Optuna's sampler from a seed."""
    stopping: Stopping = dataclasses.field(default_factory=Stopping)
    ours: bool = True
    """Whether tunediff's `OptunaProposer` drives it, or Optuna alone."""
    tells_last: bool = False
    """Ours tells Optuna that a stopped trial is pruned; this one, that its last value is its result, as Ray Tune does.
    A GP knows nothing of pruned trials and would propose them again."""


def _tpe(n_startup_trials: int = 5, **changes: Any) -> Callable[[int], BaseSampler]:
    """Our sampler with other settings."""
    settings = {"multivariate": True, "group": True, **changes}
    return lambda seed: TPESampler(seed=seed, n_startup_trials=n_startup_trials, **settings)


def _gp(**settings: Any) -> Callable[[int], BaseSampler]:
    return lambda seed: GPSampler(seed=seed, warn_independent_sampling=False, **settings)


ASHA = Stopping("asha")
STRATEGIES: dict[str, Strategy] = {
    "random": Strategy(lambda seed: RandomSampler(seed=seed), ours=False),
    "TPE": Strategy(lambda seed: TPESampler(seed=seed), ours=False),
    "TPE + ASHA": Strategy(lambda seed: TPESampler(seed=seed), ASHA, ours=False),
    "GP": Strategy(_gp(), ours=False),
    "ours": Strategy(default_sampler),
    "ours + ASHA": Strategy(default_sampler, ASHA),
}
CANDIDATES: dict[str, Strategy] = {
    "3 at random first": Strategy(_tpe(3)),
    "3 at random first, ASHA": Strategy(_tpe(3), ASHA),
    "3 at random first, ASHA from 25 %": Strategy(_tpe(3), Stopping("asha", grace=0.25)),
    "8 at random first": Strategy(_tpe(8)),
    "10 at random first": Strategy(_tpe(10)),
    "univariate": Strategy(_tpe(multivariate=False, group=False)),
    "ungrouped": Strategy(_tpe(group=False)),
    "GP, 5 at random first": Strategy(_gp(n_startup_trials=5)),
    "GP, 5 at random first, ASHA from 25 %": Strategy(
        _gp(n_startup_trials=5), Stopping("asha", grace=0.25), tells_last=True
    ),
    "ASHA, told as results": Strategy(default_sampler, ASHA, tells_last=True),
    "ASHA by thirds": Strategy(default_sampler, Stopping("asha", reduction=3.0)),
    "ASHA from 25 %": Strategy(default_sampler, Stopping("asha", grace=0.25)),
    "ASHA by thirds from 25 %": Strategy(default_sampler, Stopping("asha", grace=0.25, reduction=3.0)),
    "median": Strategy(default_sampler, Stopping("median")),
    "median from 25 %": Strategy(default_sampler, Stopping("median", grace=0.25)),
}
"""Other settings of ours; each changes what its name says."""


class OptunaAlone:
    """A sampler of Optuna, asked and told."""

    def __init__(self, table: Table, strategy: Strategy, seed: int) -> None:
        self._table, self._random = table, random.Random(seed)
        direction = "minimize" if table.space.mode == "min" else "maximize"
        self._study = optuna.create_study(sampler=strategy.sampler(seed), direction=direction)
        self._draw = Draw(table.space.dimensions)
        self._values: dict[str, float] = {}
        self._results: list[float] = []

    def propose(self) -> Curve | None:
        """A point that was not proposed before; None: there is no more."""
        for _ in range(REDRAWS):
            if (curve := self._ask()) is not None:
                return curve
        left = [curve for curve in self._table.curves if curve.fingerprint not in self._values]
        if not left:
            return None
        self._study.enqueue_trial(to_params(self._random.choice(left).knobs))
        return self._ask()

    def _ask(self) -> Curve | None:
        self._trial = self._study.ask()
        curve = self._table.at(self._draw(self._trial))
        if curve is None:
            self._study.tell(self._trial, state=TrialState.FAIL)
        elif curve.fingerprint in self._values:  # as if it were run again
            self._study.tell(self._trial, self._values[curve.fingerprint])
        else:
            return curve
        return None

    def report(self, index: int, seconds: float, value: float) -> None:
        """An evaluation of the proposed point."""

    def end(self, curve: Curve, points: Sequence[tuple[float, float]], status: str) -> None:
        """The proposed point ended."""
        if status in ("ok", "pruned"):
            self._results.append(points[-1][1])
            self._values[curve.fingerprint] = points[-1][1]
        else:
            self._values[curve.fingerprint] = penalty(self._results, self._table.space.mode)
        self._study.tell(self._trial, self._values[curve.fingerprint])


class _TellsLast(SearchStudy):
    """Ours, but that a stopped trial's last value is told as its result."""

    def tell(self, trial: optuna.trial.Trial, trial_record: TrialRecord, records: Sequence[TrialRecord]) -> None:
        if trial_record.status == "pruned":
            self.optuna.tell(trial, trial_record.points[-1][self.space.metric])
        else:
            super().tell(trial, trial_record, records)


class Ours:
    """tunediff's `OptunaProposer`, asked and told as in a search."""

    def __init__(self, table: Table, strategy: Strategy, seed: int) -> None:
        self._table = table
        space = dataclasses.replace(table.space, seed=seed, early_stopping=strategy.stopping.rule)
        storage, sampler = optuna.storages.InMemoryStorage(), strategy.sampler or default_sampler
        # There is no folder: nothing is to be read or written.
        self._proposer = OptunaProposer(space, Path(os.devnull), sampler=sampler, storage=storage)
        if strategy.tells_last:
            self._proposer.study = _TellsLast(space, storage, sampler, space.seed)

    def propose(self) -> Curve | None:
        """A point that was not proposed before; None: there is no more."""
        if (spec := self._proposer.ask()) is None:
            return None
        self._spec = spec
        return self._table.at(spec.drawn)

    def report(self, index: int, seconds: float, value: float) -> None:
        """An evaluation of the proposed point."""
        self._proposer.report(self._spec, {"index": index, "train_s": seconds, "objective": value})

    def end(self, curve: Curve, points: Sequence[tuple[float, float]], status: str) -> None:
        """The proposed point ended."""
        metric = self._table.space.metric
        ended = TrialRecord(
            self._spec.name, self._spec.number, curve.config, curve.knobs, curve.fingerprint,
            budget_s=self._table.budget_s, end=End(status), attempts=1,
            points=[Point(i, s, i, i, metrics={metric: value}) for i, (s, value) in enumerate(points, start=1)],
        )  # fmt: skip
        self._proposer.tell(self._spec, ended, 0.0)


# ------------------------------------------------------------------------------------------------------------ searches
@dataclasses.dataclass(frozen=True)
class Run:
    """One replayed search."""

    strategy: str
    seed: int
    spent_s: tuple[float, ...]
    """Training seconds spent when each of its trials had ended."""
    best: tuple[float, ...]
    """Loss (`Table.loss`) of the best finished trial by then; infinite: none had finished."""
    stopped: int
    """Trials stopped early."""

    def seconds_to(self, loss: float) -> float:
        """Training seconds until the best finished trial is as good; infinite: it never is."""
        return next((s for s, best in zip(self.spent_s, self.best, strict=True) if best <= loss), math.inf)

    def best_after(self, seconds: float) -> float:
        """Loss of the best finished trial after that many training seconds; infinite: none."""
        return next((b for s, b in zip(self.spent_s[::-1], self.best[::-1], strict=True) if s <= seconds), math.inf)


@dataclasses.dataclass(eq=False)
class _Trial:
    """Stands in for Ray Tune's trial before its schedulers."""

    trial_id: str


class _Controller:
    """Stands in for Ray Tune before its schedulers."""

    def get_live_trials(self) -> list[_Trial]:
        """Trials that wait for their turn: with one slot there are none."""
        return []


def replay(table: Table, name: str, strategy: Strategy, seed: int) -> Run:
    """One search of the whole table; ends when its best point has been found, as nothing can change after that."""
    proposer = (Ours if strategy.ours else OptunaAlone)(table, strategy, seed)
    scheduler, controller = strategy.stopping.scheduler(table.space.mode), _Controller()
    spent_s, best, stopped = [0.0], [math.inf], 0
    while best[-1] > table.best and (curve := proposer.propose()) is not None:
        trial = _Trial(f"{len(best):05d}")
        scheduler.on_trial_add(controller, trial)
        taken, status, seconds, result = 0, curve.status, curve.spent_s, {}
        for taken, (reached_s, value) in enumerate(curve.points, start=1):
            proposer.report(taken, reached_s, value)
            result = {"fraction": reached_s / table.budget_s, "objective": value}
            decision = scheduler.on_trial_result(controller, trial, result)
            if decision != TrialScheduler.CONTINUE and reached_s < table.budget_s:  # ASHA also ends whole trials
                status, seconds, stopped = "pruned", reached_s, stopped + 1
                break
        if status in ("ok", "pruned"):
            scheduler.on_trial_complete(controller, trial, result)
        else:
            scheduler.on_trial_error(controller, trial)
        proposer.end(curve, curve.points[:taken], status)
        spent_s.append(spent_s[-1] + seconds)
        best.append(min(best[-1], table.loss(curve.points[-1][1]) if status == "ok" else math.inf))
    return Run(name, seed, tuple(spent_s[1:]), tuple(best[1:]), stopped)


def replay_all(table: Table, names: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """Every strategy with every seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        return [replay(table, name, (STRATEGIES | CANDIDATES)[name], seed) for name in names for seed in seeds]


def _in_process(path: Path, names: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    logging.getLogger("ray").setLevel(logging.ERROR)
    return replay_all(_cached(path), names, seeds)


_cached = functools.lru_cache(maxsize=1)(load)


def replay_in_processes(path: Path, names: Sequence[str], seeds: int, processes: int) -> list[Run]:
    """The same in several processes; the order of the runs does not depend on how many."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when a process starts: the GP's threads would fight
    parts = [(name, range(first, min(first + 10, seeds))) for name in names for first in range(0, seeds, 10)]
    runs: list[Run] = []
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_in_process, path, [name], part) for name, part in parts]
        for (name, part), future in zip(parts, futures, strict=True):
            runs += future.result()
            if part.stop == seeds:
                print(f"{name}: {seeds} seeds", file=sys.stderr, flush=True)
    return runs
