"""Search strategies against a recorded table: `python benchmarks/replay.py RESULT_FOLDER [--seeds 100] [--out DIR]`.

A grid that was searched once is a table: every point of it has its real curve, the objective at
fractions of its training seconds.

    python -m tunediff.search replay_digits --name replay-digits
    python benchmarks/replay.py ray_results/replay-digits --candidates

A strategy that proposes a point reads its curve instead of training, and pays the training seconds up to where the
curve was stopped. So a search of minutes is replayed in a fraction of a second, with many seeds. RESULT_FOLDER may also
be one that holds only table.csv, or such a file: what is kept of a table, the knobs that vary and the curves. Beside a
table of another workload than diffusion lies its baseline.yaml.

Rules, the same for all strategies:

- One trial at a time, each point once: a point that was proposed before costs nothing and is drawn again.
- What a search has found is the best *finished* trial. Regret is its value over the best one of the table, minus 1;
  where ratios mean nothing (accuracies, values below 0), how far it is from the best as a share of how far the worst
  is. A search without a finished trial has found the worst. A trial that failed costs its seconds and counts as bad.
- Early stopping is Ray Tune's own, fed with the points as Ray Tune feeds them.

random, TPE and GP are Optuna's samplers with their defaults, told the last value of a stopped trial as Ray Tune tells
it. "ours" is `tunediff.tuning.searcher.Searcher` as a search runs it: it tries the baseline, the first point of the
table, first. --candidates adds other settings of ours.

Writes replay.md, replay.png, table.csv and baseline.yaml. A ratio compares median seconds; its interval is a bootstrap
over the seeds. A table is one measurement of one seed: its best is partly the luckiest, for every strategy alike.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import dataclasses
import functools
import importlib.util
import json
import logging
import math
import multiprocessing
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import TrialState
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler

from tunediff import cli, colors, environment, record
from tunediff import config as cfg
from tunediff import space as spaces
from tunediff.config import ConfigError, Systems
from tunediff.record import End, Point, TrialRecord
from tunediff.space import Draw, SearchSpace, to_params
from tunediff.space.model import combinations
from tunediff.tuning.knowledge import penalty
from tunediff.tuning.messages import drawn
from tunediff.tuning.pool import Pool
from tunediff.tuning.resources import Machine, Share
from tunediff.tuning.sampling import default_sampler
from tunediff.tuning.searcher import GRACE, Searcher

TABLE, BASELINE = "table.csv", "baseline.yaml"
TARGET = 0.02
"""Regret at which a search is done."""
SHARES = (0.25, 0.5, 1.0)
"""Shares of the table's seconds after which regret is told."""
REDRAWS = 20
"""Draws of a sampler in a row that may be known before a random new point takes over, as in our `Searcher`."""
RESAMPLED = 2000
"""Bootstrap samples of a ratio."""


# --------------------------------------------------------------------------------------------------------------- table
@dataclasses.dataclass(frozen=True)
class Curve:
    """What a trial of one point measured."""

    knobs: dict[str, Any]
    """Every searched knob that applies, by dotted name."""
    config: dict[str, Any]
    """Every knob by dotted name."""
    fingerprint: str
    points: tuple[tuple[float, float], ...]
    """(training seconds, objective) of every evaluation, in order."""
    status: str
    spent_s: float
    """Training seconds of the whole trial."""

    @property
    def value(self) -> float | None:
        """The objective at the end; None: it failed."""
        return self.points[-1][1] if self.status == "ok" else None


class Table:
    """A recorded grid: the curve of every point, the baseline first."""

    def __init__(self, space: SearchSpace, curves: Sequence[Curve], budget_s: float) -> None:
        self.space, self.curves, self.budget_s = space, tuple(curves), budget_s
        self._by_fingerprint = {curve.fingerprint: curve for curve in curves}
        losses = [self.loss(curve.value) for curve in curves if curve.value is not None]
        self.best, self.worst = min(losses), max(losses)
        """Of the finished curves, as `loss` has them."""
        self.ratios = space.mode == "min" and all(value > 0 for curve in curves for _, value in curve.points)
        """Whether values are compared by their ratios."""
        self.total_s = sum(curve.spent_s for curve in curves)

    def loss(self, value: float) -> float:
        """The objective turned so that smaller is better."""
        return value if self.space.mode == "min" else -value

    def regret(self, loss: float) -> float:
        """How far that is from the best: in parts of the best, or of the way from the best to the worst."""
        if self.ratios:
            return loss / self.best - 1
        return (loss - self.best) / ((self.worst - self.best) or 1.0)

    def at(self, values: Mapping[str, Any]) -> Curve | None:
        """The curve of a drawn point; None: its knobs contradict each other."""
        try:
            return self._by_fingerprint[cfg.fingerprint(self.space.config(values))]
        except ConfigError:
            return None


def load(path: Path, out: Path | None = None) -> Table:
    """The table of a search's folder, of a folder that holds table.csv, or of such a file.

    That of a search is written to `out`/table.csv first. Raises `ConfigError` if there is none or a curve is missing.
    """
    file = path / TABLE if path.is_dir() else path
    if (path / "trials").is_dir():
        file = (out or path) / TABLE
        space, trials = _recorded(path)
        write(file, path, space.metric, trials)
        if not (kept := file.with_name(BASELINE)).exists():
            kept.write_text(cfg.dump(space.baseline), encoding="utf-8")
    if not file.is_file():
        raise ConfigError(f"{path}: no table there; record one with `python -m tunediff.search replay_digits`")
    return _read(file)


def _recorded(folder: Path) -> tuple[SearchSpace, list[TrialRecord]]:
    """A search and its trials, one for each point of its grid. Raises `ConfigError` if some are missing."""
    wanted = spaces.load(spaces.of_search(folder))
    if wanted.kind != "grid" or wanted.seeds > 1 or not wanted.evaluates or wanted.early_stopping != "none":
        needed = f"a grid: of one seed, objective {wanted.workload.objective.name}, nothing stopped"
        raise ConfigError(f"{folder.name}: no table: it needs {needed}")
    found = record.read_trials(folder)
    done = {trial.fingerprint for trial in found if trial.finished}
    missing = [point for point in wanted.candidates if cfg.fingerprint(wanted.config(point)) not in done]
    full = len(list(combinations(wanted.dimensions))) - len(wanted.skipped)
    if missing or len(wanted.candidates) < full:
        raise ConfigError(
            f"{folder.name}: {full - len(wanted.candidates) + len(missing)} of {full} points are not recorded; "
            f"python -m tunediff.search --resume {folder.name} --trials {full}"
        )
    return wanted, found


def measured(metric: str) -> tuple[str, str, str]:
    """Columns of a table beside its knobs: training seconds, objective, how the trial ended (`record.STATUSES`)."""
    return "train_s", metric, "status"


def write(path: Path, folder: Path, metric: str, trials: Sequence[TrialRecord]) -> None:
    """Write the table of a search's trials: one row per evaluation, one more without a value where a trial failed."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.drawn))
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow([*names, *measured(metric)])
        for trial in trials:
            knobs = [_cell(trial.drawn[name]) if name in trial.drawn else "" for name in names]
            for point in trial.points:
                rows.writerow([*knobs, f"{point.train_s:.4f}", f"{point[metric]:.6g}", trial.status])
            if trial.status != "ok":
                rows.writerow([*knobs, f"{_cost_s(folder / 'trials' / trial.name, trial):.4f}", "", trial.status])


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cost_s(folder: Path, trial: TrialRecord) -> float:
    """Training seconds of a trial that failed. Its journal has them at its last point; from there on, wall-clock."""
    reached_s = trial.points[-1].train_s if trial.points else 0.0
    since = max([trial.started, *(line["time"] for line in record.events(folder) if line["event"] == "point")])
    return min(reached_s + max(0.0, trial.ended - since), max(reached_s, trial.budget_s or math.inf))


def _read(path: Path) -> Table:
    with open(path, newline="") as file:
        lines = list(csv.DictReader(file))
    kept = path.with_name(BASELINE)
    baseline = cfg.load(kept) if kept.is_file() else cfg.baseline("digits")
    columns = measured(cfg.of(baseline).objective.name)
    names = [name for name in (lines[0] if lines else {}) if name not in columns]
    if not names or any(column not in lines[0] for column in columns):
        raise ConfigError(f"{path}: no table; it needs columns of knobs and {', '.join(columns)}, and rows")
    for name in names:
        baseline.schema.knob(name, str(path))
    rows: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for line in lines:
        rows.setdefault(tuple(line[name] or "" for name in names), []).append(line)
    points = [{n: _value(cell) for n, cell in zip(names, cells, strict=True) if cell} for cells in rows]
    space = _space(points, str(path), {"base": str(kept)} if kept.is_file() else {"workload": "digits"})
    curves = [_curve(space, point, lines, str(path)) for point, lines in zip(points, rows.values(), strict=True)]

    # Complete: a curve for every point that can be drawn, and evaluations at the same fractions in all of them.
    done = [curve for curve in curves if curve.status == "ok"]
    lengths = {len(curve.points) for curve in done}
    if len(done) < 2 or len(lengths) > 1 or any(len(curve.points) > max(lengths) for curve in curves):
        raise ConfigError(f"{path}: incomplete: {len(done)} finished curves, of {sorted(lengths)} evaluations")
    possible = {cfg.fingerprint(config): values for values, config in _configs(space)}
    if missing := [values for key, values in possible.items() if key not in {curve.fingerprint for curve in curves}]:
        raise ConfigError(
            f"{path}: incomplete: {len(missing)} of {len(possible)} points of the grid have no curve, "
            f"e.g. {cli.knobs(missing[0])}"
        )
    # Evaluations lie at equal fractions of the budget, or a step later: the largest budget of which that is true.
    budget_s = min(s * len(curve.points) / i for curve in done for i, (s, _) in enumerate(curve.points, start=1))
    limits = dataclasses.replace(space.budget, per_trial_s=budget_s)
    return Table(dataclasses.replace(space, budget=limits), curves, budget_s)


def _value(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def _space(points: Sequence[dict[str, Any]], source: str, origin: Mapping[str, str]) -> SearchSpace:
    """The space that holds just these points, the first of them its baseline; what is not searched does not matter."""
    content = {**origin, "fixed": points[0], "trials": list(points), "budget": {"per_trial": "1s"}}
    space = spaces.parse(content, source)
    budget = dataclasses.replace(space.budget, trials=len(points))
    return dataclasses.replace(space, kind="search", candidates=space.candidates[:1], budget=budget)


def _curve(space: SearchSpace, point: dict[str, Any], lines: Sequence[dict[str, str]], source: str) -> Curve:
    where = f"{source}: {cli.knobs(point)}"
    statuses = {line["status"] for line in lines}
    if len(statuses) > 1 or (status := statuses.pop()) not in record.STATUSES or status in ("pruned", "skipped"):
        raise ConfigError(f"{where}: incomplete: status {', '.join(sorted({line['status'] for line in lines}))}")
    try:
        seconds = [float(line["train_s"]) for line in lines]
        pairs = zip(seconds, (line[space.metric] for line in lines), strict=True)
        values = tuple((s, float(value)) for s, value in pairs if value)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: train_s and {space.metric} must be numbers") from None
    if seconds != sorted(seconds) or (status == "ok" and len(values) < len(lines)):
        needed = f"rows must rise in train_s, and those of status ok have a {space.metric}"
        raise ConfigError(f"{where}: incomplete: {needed}")
    config, drawn = space.config(point), space.expand(point, where)
    return Curve(drawn, cfg.flat(config), cfg.fingerprint(config), values, status, seconds[-1])


def _configs(space: SearchSpace) -> Iterator[tuple[dict[str, Any], Systems]]:
    for values in combinations(space.dimensions):
        try:
            yield values, space.config(values)
        except ConfigError:
            continue


# ---------------------------------------------------------------------------------------------------------- strategies
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
    """Whether tunediff's `Searcher` drives it, or Optuna alone."""
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
        self._told: dict[str, float] = {}
        self._results: list[float] = []

    def propose(self) -> Curve | None:
        """A point that was not proposed before; None: there is no more."""
        for _ in range(REDRAWS):
            if (curve := self._ask()) is not None:
                return curve
        left = [curve for curve in self._table.curves if curve.fingerprint not in self._told]
        if not left:
            return None
        self._study.enqueue_trial(to_params(self._random.choice(left).knobs))
        return self._ask()

    def _ask(self) -> Curve | None:
        self._trial = self._study.ask()
        curve = self._table.at(self._draw(self._trial))
        if curve is None:
            self._study.tell(self._trial, state=TrialState.FAIL)
        elif curve.fingerprint in self._told:  # as if it were run again
            self._study.tell(self._trial, self._told[curve.fingerprint])
        else:
            return curve
        return None

    def report(self, index: int, seconds: float, value: float) -> None:
        """An evaluation of the proposed point."""

    def end(self, curve: Curve, points: Sequence[tuple[float, float]], status: str) -> None:
        """The proposed point ended."""
        if status in ("ok", "pruned"):
            self._results.append(points[-1][1])
            self._told[curve.fingerprint] = points[-1][1]
        else:
            self._told[curve.fingerprint] = penalty(self._results, self._table.space.mode)
        self._study.tell(self._trial, self._told[curve.fingerprint])


class _InMemory(Searcher):
    """Ours, but that a trial's record is handed over and not read from its journal."""

    ended: TrialRecord
    tells_last = False

    def _settled(self, folder: Path) -> TrialRecord | None:
        return self.ended

    def _tell(self, trial: optuna.trial.Trial, known: TrialRecord) -> None:
        if self.tells_last and known.status == "pruned":
            self.study.tell(trial, known.points[-1][self.space.metric])
        else:
            super()._tell(trial, known)


class Ours:
    """tunediff's `Searcher`, asked and told as Ray Tune does."""

    def __init__(self, table: Table, strategy: Strategy, seed: int) -> None:
        self._table = table
        space = dataclasses.replace(table.space, seed=seed, early_stopping=strategy.stopping.rule)
        storage = optuna.storages.InMemoryStorage()
        one = Pool(Share((Machine(1, 0),), (1,), gpu=False, whole=True))  # room for one trial at a time
        # There is no folder: nothing is to be read or written.
        self._searcher = _InMemory(space, Path(os.devnull), one, sampler=strategy.sampler, storage=storage)
        self._searcher.tells_last = strategy.tells_last

    def propose(self) -> Curve | None:
        """A point that was not proposed before; None: there is no more."""
        suggestion = self._searcher.suggest("trial")
        if not isinstance(suggestion, dict):
            return None
        self._name = suggestion["trial"]
        return self._table.at(drawn(suggestion))

    def report(self, index: int, seconds: float, value: float) -> None:
        """An evaluation of the proposed point."""
        self._searcher.on_trial_result("trial", {"index": index, "train_s": seconds, "objective": value})

    def end(self, curve: Curve, points: Sequence[tuple[float, float]], status: str) -> None:
        """The proposed point ended."""
        metric = self._table.space.metric
        self._searcher.ended = TrialRecord(
            self._name, int(self._name[1:]), curve.config, curve.knobs, curve.fingerprint,
            budget_s=self._table.budget_s, end=End(status), attempts=1,
            points=[Point(i, s, i, i, found={metric: value}) for i, (s, value) in enumerate(points, start=1)],
        )  # fmt: skip
        self._searcher.on_trial_complete("trial", {})


# -------------------------------------------------------------------------------------------------------------- replay
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
    found: list[Run] = []
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_in_process, path, [name], part) for name, part in parts]
        for (name, part), future in zip(parts, futures, strict=True):
            found += future.result()
            if part.stop == seeds:
                print(f"{name}: {seeds} seeds", file=sys.stderr, flush=True)
    return found


# -------------------------------------------------------------------------------------------------------------- report
Numbers = NDArray[np.float64]


def quantile(values: Numbers, q: float) -> float:
    """A quantile that is one of the values: some are infinite."""
    return float(np.quantile(values, q, method="inverted_cdf"))


def ratio(ours: Numbers, theirs: Numbers) -> tuple[float, float, float]:
    """Ratio of the medians and its 95 % interval, by a bootstrap over the seeds of both."""
    draw = np.random.default_rng(0)

    def medians(values: Numbers) -> Numbers:
        drawn = draw.choice(values, (RESAMPLED, len(values)))
        return np.asarray(np.quantile(drawn, 0.5, axis=1, method="inverted_cdf"), np.float64)

    with np.errstate(invalid="ignore"):
        resampled = np.nan_to_num(medians(ours) / medians(theirs), nan=1.0, posinf=math.inf)
        middle = quantile(ours, 0.5) / quantile(theirs, 0.5)
    return middle, quantile(resampled, 0.025), quantile(resampled, 0.975)


def regret(table: Table, runs: Sequence[Run], seconds: float) -> Numbers:
    """Regret of each run after that many training seconds."""
    return np.array([table.regret(min(run.best_after(seconds), table.worst)) for run in runs])


def told_regret(table: Table, which: str) -> str:
    """What regret is, in words."""
    label = table.space.label
    if table.ratios:
        return f"{label} of the best {which} over that of the table's best, minus 1"
    return f"how far {label} of the best {which} is from the table's best, as a share of how far the worst is"


def summary(table: Table, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per strategy, in their order."""
    grouped = _grouped(runs)
    # The way back from regret to a loss.
    target = table.best + TARGET * (table.best if table.ratios else table.worst - table.best)
    seconds = {name: np.array([run.seconds_to(target) for run in mine]) for name, mine in grouped.items()}
    rows = []
    for name, mine in grouped.items():
        needed = seconds[name]
        rows.append(
            {
                "strategy": name,
                "median_s": quantile(needed, 0.5),
                "quartiles_s": (quantile(needed, 0.25), quantile(needed, 0.75)),
                "ratio": ratio(needed, seconds["random"]) if "random" in seconds and name != "random" else None,
                "regret": [float(np.median(regret(table, mine, share * table.total_s))) for share in SHARES],
                "reached": int(np.isfinite(needed).sum()),
                "stopped": sum(run.stopped for run in mine) / sum(len(run.best) for run in mine),
            }
        )
    return rows


def _grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.strategy, []).append(run)
    return grouped


def markdown(table: Table, rows: Sequence[dict[str, Any]], name: str, seeds: int) -> str:
    """What replay.md holds."""

    def of(seconds: float) -> str:
        return f"{seconds:.0f}" if math.isfinite(seconds) else "never"

    done = [table.loss(curve.value) for curve in table.curves if curve.value is not None]
    close, sign = sum(table.regret(loss) <= TARGET for loss in done), table.loss(1.0)
    within = f"{TARGET:.0%} of the best" if table.ratios else f"{TARGET:.0%} of the table's range from the best"
    failed = sum(curve.value is None for curve in table.curves)
    versions = environment.describe()["versions"]
    lines = [
        f"# {name}: search strategies replayed",
        "",
        f"{len(table.curves)} points of up to {table.budget_s:.1f} training seconds, {table.total_s:.0f} s in all; "
        f"{table.space.label} {sign * table.best:.3g} to {sign * table.worst:.3g}, {close} within {within}, "
        f"{failed} failed. {seeds} seeds; Optuna {versions['optuna']}, Ray {versions['ray']}.",
        "",
        f"| strategy | seconds to within {within}: median (quartiles) | ratio to random (95 % interval)"
        + "".join(f" | regret after {share:.0%}" for share in SHARES)
        + " | seeds that reached it | trials stopped |",
        "|---|---|---|" + "---|" * len(SHARES) + "---|---|",
    ]
    for row in rows:
        low, high = row["quartiles_s"]
        words = [row["strategy"], f"{of(row['median_s'])} ({of(low)} … {of(high)})"]
        words.append("" if row["ratio"] is None else "{:.2f} ({:.2f} … {:.2f})".format(*row["ratio"]))
        words += [f"{value:.1%}" for value in row["regret"]]
        words += [f"{row['reached']} of {seeds}", f"{row['stopped']:.0%}"]
        lines.append("| " + " | ".join(words) + " |")
    shares = ", ".join(f"{share:.0%}" for share in SHARES)
    lines += [
        "",
        f"Seconds are training seconds. Regret: {told_regret(table, 'finished trial')}; "
        f"medians after {shares} of the table's seconds. Ratio: of the medians; interval by a bootstrap over seeds.",
    ]
    return "\n".join(lines) + "\n"


def figure(table: Table, runs: Sequence[Run], path: Path) -> None:
    """Regret against training seconds: median over the seeds, and the quartiles as a band. Writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no window, also where there is a screen
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    image, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    seconds = np.linspace(0.0, table.total_s, 400)
    grouped = _grouped(runs)
    main = {name: mine for name, mine in grouped.items() if name in STRATEGIES}  # more would hide each other
    for i, (name, mine) in enumerate((main or grouped).items()):
        curves = 100 * np.array([regret(table, mine, s) for s in seconds])
        style: dict[str, Any] = {"color": colors.OTHER if name == "random" else colors.SERIES[i % len(colors.SERIES)]}
        low, middle, high = np.quantile(curves, (0.25, 0.5, 0.75), axis=1)
        axes.fill_between(seconds, low, high, step="post", alpha=0.12, linewidth=0, **style)
        axes.step(
            seconds,
            middle,
            where="post",
            label=name,
            linewidth=1.8,
            linestyle=("-", "--")[i // len(colors.SERIES) % 2],
            **style,
        )
    axes.axhline(100 * TARGET, color="0.5", linestyle=":", linewidth=1.0)
    axes.set_yscale("symlog", linthresh=1.0)  # the end of a search is 0
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g %%"))
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("training seconds spent")
    axes.set_ylabel(f"regret: {told_regret(table, 'so far')}")
    axes.set_title(f"{len(table.curves)} recorded points; median and quartiles of the seeds", fontsize=10)
    axes.legend(fontsize=9)
    image.savefig(path, dpi=120)
    plt.close(image)


# ------------------------------------------------------------------------------------------------------------- command
def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="RESULT_FOLDER", help="a search's folder, or where table.csv is")
    parser.add_argument("--seeds", type=int, default=100, help="searches per strategy (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="where the results go (default: RESULT_FOLDER)")
    parser.add_argument("--candidates", action="store_true", help="other settings of ours as well")
    parser.add_argument("--only", action="append", metavar="STRATEGY", help="this strategy; may be repeated")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Replay; see `--help`."""
    return cli.guarded(_main)(argv)


def _main(argv: Sequence[str] | None) -> int:
    args = arguments(argv)
    known = STRATEGIES | CANDIDATES
    names = args.only or list(known if args.candidates else STRATEGIES)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--only: {unknown[0]!r} is not allowed; allowed: {', '.join(known)}")
    if args.seeds < 2 or args.processes < 1:
        raise ConfigError("--seeds, --processes: allowed: at least 2 seeds and 1 process")
    if missing := [package for package in ("torch", "scipy") if importlib.util.find_spec(package) is None]:
        print(f"GP is left out: it needs {' and '.join(missing)}", file=sys.stderr)
        names = [name for name in names if not name.startswith("GP")]
    out = args.out or (args.table if args.table.is_dir() else args.table.parent)
    table = load(args.table, out)
    path = out / TABLE if (out / TABLE).is_file() else args.table
    if args.processes == 1:
        runs = replay_all(table, names, range(args.seeds))
    else:
        runs = replay_in_processes(path, names, args.seeds, args.processes)
    title = args.table.resolve().name if args.table.is_dir() else args.table.stem
    text = markdown(table, summary(table, runs), title, args.seeds)
    out.mkdir(parents=True, exist_ok=True)
    (out / "replay.md").write_text(text)
    figure(table, runs, out / "replay.png")
    print(text, end="")
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
