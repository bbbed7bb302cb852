"""Which point is tried next: Optuna through Ray Tune's `OptunaSearch`, with our journals as its memory."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState
from ray.tune.search import Searcher as RaySearcher
from ray.tune.search.optuna import OptunaSearch
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from tunediff import config as cfg
from tunediff import record, results
from tunediff import space as spaces
from tunediff.config import Config, ConfigError
from tunediff.record import TrialRecord
from tunediff.space import Dimension, Draw, SearchSpace, to_params
from tunediff.tuning import knowledge

log = logging.getLogger(__name__)

STUDY = "tunediff"
REDRAWS = 20
"""Draws of TPE in a row that may be impossible or known before random ones take over: TPE stays near what is good."""
FAULTS = (optuna.exceptions.StorageInternalError, SQLAlchemyError, OSError)
"""What a full, read-only or vanished disk looks like here."""
GRACE = 0.5
"""Share of its budget that every trial gets before it may be stopped early."""
WARM_POINTS = 3
"""Points of an earlier search with another ruler or budget that are tried first."""
RANDOM_REDRAWS = 500
"""Random draws in a row that may be impossible or known before the space counts as used up."""


def default_sampler(seed: int) -> optuna.samplers.BaseSampler:
    """What draws new points unless told otherwise."""
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True, n_startup_trials=5)


class Searcher(OptunaSearch):  # type: ignore[misc]
    """Suggests names, slots and knobs; tells Optuna how each trial ended, from its journal.

    A study that is opened again keeps its queue; trials that were running are handed out first, under their old name,
    so that they continue from their checkpoint. `sampler` makes Optuna's sampler from a seed; `storage` keeps the
    study, by default as study.db in the experiment's folder.
    """

    def __init__(
        self,
        space: SearchSpace,
        experiment: Path,
        slots: int,
        spent_s: float = 0.0,
        sampler: Callable[[int], optuna.samplers.BaseSampler] | None = None,
        storage: optuna.storages.BaseStorage | None = None,
    ) -> None:
        self.space, self.experiment = space, experiment
        records = {known.name: known for known in record.read_trials(experiment)}
        self._known = {r.fingerprint: r.name for r in records.values()}
        self._records = list(records.values())
        self._next = 1 + max((r.number for r in records.values()), default=-1)
        super().__init__(
            Draw(space.dimensions),
            metric="objective" if space.cost is None else ["objective", space.cost],
            mode=space.mode if space.cost is None else [space.mode, "min"],
            points_to_evaluate=None,
            # The seed moves on: a resumed search must not draw its first points again.
            sampler=(sampler or default_sampler)(space.seed + self._next),
            study_name=STUDY,
            storage=storage or _open_study(experiment / "study.db"),
        )
        self.broken: Exception | None = None
        """Why journals or study could not be written: no further trial is suggested."""
        self._free = list(range(slots))
        self._live: dict[str, tuple[str, int, float]] = {}  # Tune's trial id → (our name, slot, when it began)
        self._started, self._spent_s = time.monotonic(), spent_s
        self._durations: list[float] = []
        self._unfinished: list[tuple[str, optuna.trial.Trial]] = []
        new = not self._study.get_trials(deepcopy=False)
        self._replay(records)
        # An existing study still has those that were not run in its queue, but for those of a limit raised since.
        waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        known_points = [frozen.system_attrs.get("fixed_params") for frozen in waiting]
        known_points += [to_params(known.drawn) for known in records.values()]
        known_points += [to_params(self._space(trial)) for _, trial in self._unfinished]
        for point in (to_params(point) for point in space.points):
            if point not in known_points:
                self._study.enqueue_trial(point)
        if new and not records and space.warm_start is not None:
            self._start_warm(Path(space.warm_start))

    @property
    def _study(self) -> optuna.Study:
        study: optuna.Study = self._ot_study
        return study

    # ---- an earlier search
    def _start_warm(self, folder: Path) -> None:
        """Let Optuna know the trials of an earlier search that this space can express.

        Measured with the same ruler and budget they count as results, and none of them is run again but the baseline.
        Otherwise their values mean nothing here: the best of them are tried first.
        """
        earlier = results.read(folder)
        like = _ruler(earlier.space) == _ruler(self.space)
        first = cfg.fingerprint(self.space.baseline)
        best = 0
        for known in [*earlier.ranked, *(t for t in earlier.trials if t.status in ("oom", "nan", "timeout"))]:
            config = cfg.from_dict(cfg.nest(known.config), known.name)
            point = self._point(config)
            if point is None or cfg.fingerprint(self.space.config(point)) in (first, *self._known):
                continue
            origin = f"{folder.name}/{known.name}"
            if like and cfg.fingerprint(config) == cfg.fingerprint(self.space.config(point)):
                self._study.add_trial(
                    optuna.trial.create_trial(
                        params=to_params(point),
                        distributions={d.name: _distribution(d) for d in self.space.dimensions if d.name in point},
                        values=self._values(known) or self._penalty(),
                        user_attrs={"from": origin, "status": known.status},
                    )
                )
                self._known[known.fingerprint] = origin
                self._records.append(known)
            elif known.status == "ok" and best < WARM_POINTS:
                best += 1
                self._study.enqueue_trial(to_params(point), user_attrs={"from": origin})

    def _point(self, config: Config) -> dict[str, Any] | None:
        """The point of this space that is `config` in every searched knob; None: it lies outside."""
        values, point = cfg.flat(config), dict[str, Any]()
        for dimension in self.space.dimensions:
            if dimension.active(point):
                if dimension.name not in values or not dimension.contains(values[dimension.name]):
                    return None
                point[dimension.name] = values[dimension.name]
        try:
            self.space.config(point)
        except ConfigError:
            return None
        return point

    # ---- resume
    def _replay(self, records: dict[str, TrialRecord]) -> None:
        """Bring the study to what the journals say, and find the trials that are to be continued."""
        told: set[str] = set()
        for frozen in self._study.get_trials(deepcopy=False):
            name = frozen.user_attrs.get("trial")
            if name is None and "from" in frozen.user_attrs and frozen.state.is_finished():
                values = self._space(optuna.trial.FixedTrial(frozen.params))
                self._known.setdefault(cfg.fingerprint(self.space.config(values)), frozen.user_attrs["from"])
                continue
            if name is None:
                if frozen.state == TrialState.RUNNING:  # killed between ask and naming
                    self._study.tell(frozen.number, state=TrialState.FAIL)
                continue
            told.add(name)
            # It may have been killed before its journal began: the journals do not know all names.
            self._next = max(self._next, int(name[1:]) + 1)
            if frozen.state != TrialState.RUNNING:
                continue
            trial = optuna.trial.Trial(self._study, frozen._trial_id)
            known = records.get(name)
            self._known.setdefault(cfg.fingerprint(self.space.config(self._space(trial))), name)
            if known is not None and known.finished:
                self._tell(trial, known)
            else:
                self._unfinished.append((name, trial))
        for name, known in records.items():  # the study file was lost, or is of an older run
            if name not in told:
                self._study.enqueue_trial(to_params(known.drawn))
                trial = self._study.ask()
                self._space(trial)
                trial.set_user_attr("trial", name)
                if known.finished:
                    self._tell(trial, known)
                else:
                    self._unfinished.append((name, trial))

    # ---- Tune's interface
    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The next trial's knobs, name and slot; FINISHED when a limit is reached or nothing new is left."""
        try:
            return self._suggest(trial_id) if self.broken is None else str(RaySearcher.FINISHED)
        except FAULTS as error:
            self.broken = error
            return str(RaySearcher.FINISHED)

    def _suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        if not self._free:
            return None
        if not self._unfinished and (self._next >= self.space.budget.trials or self._time_is_up()):
            return str(RaySearcher.FINISHED)
        drawn = self._draw()
        if drawn is None:
            return str(RaySearcher.FINISHED)
        name, trial, values = drawn
        slot = self._free.pop(0)
        self._ot_trials[trial_id], self._live[trial_id] = trial, (name, slot, time.monotonic())
        return {**values, "trial": name, "slot": slot}

    def _draw(self) -> tuple[str, optuna.trial.Trial, dict[str, Any]] | None:
        if self._unfinished:
            name, trial = self._unfinished.pop(0)
            return name, trial, self._space(trial)
        sampler = self._study.sampler
        try:
            return self._draw_new()
        finally:
            self._study.sampler = sampler

    def _draw_new(self) -> tuple[str, optuna.trial.Trial, dict[str, Any]] | None:
        if len(self._known) >= spaces.size(self.space):  # every point was run: no draw can be new
            return None
        for attempt in range(REDRAWS + RANDOM_REDRAWS):
            if attempt == REDRAWS:
                self._study.sampler = optuna.samplers.RandomSampler(seed=self.space.seed + self._next)
            trial = self._study.ask()
            values = self._space(trial)
            try:
                config = self.space.config(values)
            except ConfigError as error:  # knobs that contradict each other
                trial.set_user_attr("refused", str(error))
                self._study.tell(trial, state=TrialState.FAIL)
                continue
            fingerprint = cfg.fingerprint(config)
            if (twin := self._known.get(fingerprint)) is not None:  # a run would only repeat a known result
                trial.set_user_attr("same_as", twin)
                self._study.tell(trial, state=TrialState.FAIL)
                continue
            why = knowledge.ruled_out(cfg.flat(config), self._records)
            if why and values not in self.space.points:  # Optuna's own idea
                self._known[fingerprint] = "ruled out"
                trial.set_user_attr("ruled_out", why)
                self._study.tell(trial, self._penalty())
                continue
            name = f"t{self._next:04d}"
            self._next += 1
            self._known[fingerprint] = name
            trial.set_user_attr("trial", name)
            if not why:
                return name, trial, values
            self._record_ruled_out(name, trial, values, config, why)
            if self._next >= self.space.budget.trials:
                return None
        return None

    def _record_ruled_out(
        self, name: str, trial: optuna.trial.Trial, drawn: dict[str, Any], config: Config, why: str
    ) -> None:
        """A point of the file that is not worth a run is in the record all the same."""
        journal = record.Journal(self.experiment / "trials" / name)
        journal.write(
            "start", name=name, number=int(name.lstrip("t")), config=cfg.flat(config), drawn=drawn,
            fingerprint=cfg.fingerprint(config), budget_s=self.space.budget.per_trial_s,
            environment=environment.describe(),
        )  # fmt: skip
        journal.write("end", status="oom", reason=why)
        known = record.read_trial(self.experiment / "trials" / name)
        assert known is not None
        self._tell(trial, known)

    def _time_is_up(self) -> bool:
        total = self.space.budget.total_s
        if total is None:
            return False
        expected = max([*self._durations, self.space.budget.per_trial_s])
        return self._spent_s + (time.monotonic() - self._started) + expected > total

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Keep the curve in the study, by evaluation point; Optuna keeps none where there are two objectives."""
        if self.space.cost is not None:
            return
        with contextlib.suppress(optuna.exceptions.OptunaError, ValueError):  # a point told again after a restart
            self._ot_trials[trial_id].report(result["objective"], step=int(result["index"]))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tell Optuna what the journal says; a trial without an end was stopped early, or lost its driver."""
        if trial_id not in self._live:  # Tune tells an end again when telling it failed
            return
        name, slot, began = self._live.pop(trial_id)
        self._free.append(slot)
        try:
            self._settle(trial_id, name, began, error)
        except FAULTS as fault:  # the journals know; the study is brought up to them on resume
            self.broken = fault

    def _settle(self, trial_id: str, name: str, began: float, error: bool) -> None:
        self._durations.append(time.monotonic() - began)
        folder = self.experiment / "trials" / name
        known = self._settled(folder)
        if known is None or not known.finished:
            if error and (why := record.unwritable(self.experiment)) is not None:
                raise OSError(why)  # no fault of the trial: it stays without an end, and a resumed search takes it up
            end = {"status": "error", "reason": "its driver died"} if error else self._pruned(known)
            record.Journal(folder).write("end", **end)
            known = record.read_trial(folder)
        trial = self._ot_trials[trial_id]
        if known is None:  # no start line: the driver died before it began
            self._study.tell(trial, state=TrialState.FAIL)
            return
        self._records.append(known)
        self._tell(trial, known)

    def _pruned(self, known: TrialRecord | None) -> dict[str, str]:
        """The end of a trial that the scheduler stopped, and why that was no hasty judgement."""
        grace_s = GRACE * self.space.budget.per_trial_s
        after = f" after {known.points[-1]['train_s']:.1f} s" if known is not None and known.points else ""
        return {
            "status": "pruned",
            "reason": f"stopped by {self.space.early_stopping}{after}; no trial is stopped before {grace_s:.1f} s, "
            "while compilation, warm-up and EMA still make curves cross",
        }

    def _settled(self, folder: Path, patience_s: float = 60.0) -> TrialRecord | None:
        """The record; a scheduler may end a trial at its last point, a moment before its worker has written the end."""
        until = time.monotonic() + patience_s
        while (known := record.read_trial(folder)) is not None and not known.finished:
            if len(known.points) < self.space.baseline.evaluation.points or time.monotonic() > until:
                break
            time.sleep(0.05)
        return known

    def _tell(self, trial: optuna.trial.Trial, known: TrialRecord) -> None:
        """A result counts; a known failure counts as bad, never as unknown, or Optuna would draw it again."""
        trial.set_user_attr("status", known.status)
        if known.reason:
            trial.set_user_attr("reason", known.reason)
        if (values := self._values(known)) is not None:
            trial.set_user_attr("train_s", known.points[-1]["train_s"])
            self._study.tell(trial, values)
        elif known.status == "pruned":
            self._study.tell(trial, state=TrialState.PRUNED)
        elif known.status == "error" and "died" in known.reason:  # the machine's fault, perhaps: nothing was learned
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, self._penalty())

    def _values(self, known: TrialRecord) -> list[float] | None:
        """The objectives of a trial that ended ok."""
        values = [known.value(metric) for metric in (self.space.metric, self.space.cost) if metric is not None]
        return [value for value in values if value is not None] if None not in values else None

    def _penalty(self) -> list[float]:
        """As bad as the worst trial so far, and then some; in every objective."""
        done = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        modes = (self.space.mode,) if self.space.cost is None else (self.space.mode, "min")
        return [
            0.0 if mode == "max" else 2.0 * max((trial.values[i] for trial in done if trial.values), default=500.0)
            for i, mode in enumerate(modes)
        ]


def _open_study(path: Path) -> optuna.storages.RDBStorage:
    """The study file, for optuna-dashboard to read too. A damaged one is put aside: the journals hold all it held.

    SQLite does not wait for the disk: a kill loses nothing all the same, a power cut at worst this file, and a draw
    takes 18 ms in place of 140.
    """
    if path.exists() and (damage := _damage(path)):
        number = len(list(path.parent.glob(f"{path.name}.damaged*")))
        aside = path.rename(path.with_name(f"{path.name}.damaged{number or ''}"))
        path.with_name(f"{path.name}-journal").unlink(missing_ok=True)  # SQLite's, of the transaction cut short
        log.warning("%s is damaged (%s): rebuilt from the journals; the old one is %s", path, damage, aside.name)
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")

    def relax(connection: sqlite3.Connection, _: Any) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    event.listen(storage.engine, "connect", relax)
    storage.engine.dispose()  # connections made so far
    return storage


def _damage(path: Path) -> str | None:
    """What is wrong with an SQLite file; None: nothing."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            found = str(connection.execute("PRAGMA quick_check").fetchone()[0])
    except sqlite3.DatabaseError as error:
        return str(error)
    return None if found == "ok" else found.splitlines()[0]


def _ruler(space: SearchSpace) -> dict[str, Any]:
    """What values of two searches must have in common to be comparable: data, protocol, budget, objective."""
    values = cfg.flat(space.baseline)
    ruler = {name: value for name, value in values.items() if name.startswith(("data.", "evaluation."))}
    return ruler | {
        "metric": space.metric, "cost": space.cost,
        "per_trial_s": space.budget.per_trial_s, "compile": space.budget.compile_charged,
    }  # fmt: skip


def _distribution(dimension: Dimension) -> optuna.distributions.BaseDistribution:
    """The distribution that `Dimension.suggest` draws from."""
    trial = _Asked()
    dimension.suggest(trial)
    return trial.distribution


class _Asked:
    """Stands in for a trial, to hear which distribution it is asked for."""

    distribution: optuna.distributions.BaseDistribution

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        self.distribution = optuna.distributions.CategoricalDistribution(choices)
        return choices[0]

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        self.distribution = optuna.distributions.IntDistribution(low, high, log, step)
        return low

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        self.distribution = optuna.distributions.FloatDistribution(low, high, log, step)
        return low
