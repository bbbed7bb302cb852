"""Propose the trials of a search: points from Optuna, with the journals as the truth.

The study is made anew in every session, since the journals have all of it.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import optuna
from optuna.trial import FixedTrial, Trial, TrialState

from tunediff import config as cfg
from tunediff.config import ConfigError, Systems, Values
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.core.logs import errors_only
from tunediff.core.outcomes import Status
from tunediff.core.trial_record import End, Role, TrialRecord
from tunediff.search_space import Draw, SearchSpace, to_params
from tunediff.tuning import evaluated, sessions
from tunediff.tuning.evaluated import EvaluatedConfigurations
from tunediff.tuning.experiment import durations, time_is_up
from tunediff.tuning.trial_spec import TrialSpec

STUDY = "tunediff"


def sampler_named(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """Return Optuna's sampler of that name. Raises `ConfigError` without its package."""
    # Groups, since knobs of a union's member are drawn only with it; five points at random first
    how = {"multivariate": True, "group": True, "constant_liar": True, "n_startup_trials": 5}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler: optuna.samplers.BaseSampler = getattr(optuna.samplers, name)(
                seed=seed, **(how if name == "TPESampler" else {})
            )
            return sampler
    except ImportError as error:
        raise ConfigError(f"sampler: {name}: a package is missing: {error}") from None


class SearchStudy:
    """Draws points and takes results.

    Attributes of its trials: `trial`, the name of the run; `seed`, of a repeat, which Optuna does
    not search; `status`, `reason`, `penalty`, how it ended; `refused`, `same_as`, `ruled_out`, why
    a point was not run.
    """

    def __init__(self, space: SearchSpace, seed: int) -> None:
        """`seed`: of the sampler."""
        self.space, self._draws = space, Draw(space.dimensions)
        self._modes = [space.mode] if space.cost is None else [space.mode, "min"]
        self._storage = optuna.storages.InMemoryStorage()
        self.optuna = optuna.create_study(
            storage=self._storage,
            study_name=STUDY,
            pruner=optuna.pruners.NopPruner(),
            directions=["minimize" if mode == "min" else "maximize" for mode in self._modes],
            sampler=sampler_named(space.sampler, seed),
        )

    # ---- points
    def draw(self) -> tuple[Trial, Values]:
        """Return a trial of Optuna and the values that it draws."""
        trial = self.optuna.ask()
        return trial, self._draws(trial)

    def begin(self, drawn: Values) -> Trial:
        """Return a trial that Optuna did not suggest. A repeat's seed becomes an attribute."""
        searched = any(dimension.name == "seed" for dimension in self.space.dimensions)
        seed = {} if searched else {name: drawn[name] for name in drawn if name == "seed"}
        fixed = FixedTrial(to_params({name: drawn[name] for name in drawn if name not in seed}))
        self._draws(fixed)
        trial = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=fixed.params,
            distributions=fixed.distributions,
            user_attrs=seed,
        )
        study = self._storage.get_study_id_from_name(STUDY)
        return Trial(self.optuna, self._storage.create_new_trial(study, template_trial=trial))

    # ---- results
    def drop(self, trial: Trial, **why: str) -> None:
        """End a trial of which nothing is learned, with the reason as an attribute."""
        for name, value in why.items():
            trial.set_user_attr(name, value)
        self.optuna.tell(trial, state=TrialState.FAIL)

    def rule_out(self, trial: Trial, why: str, failed: TrialRecord | None) -> None:
        """End a trial that is not run because `failed` has run out of memory."""
        trial.set_user_attr("ruled_out", why)
        self.optuna.tell(trial, self.penalty(failed))

    def tell(self, trial: Trial, trial_record: TrialRecord, records: Sequence[TrialRecord]) -> None:
        """Report a trial's end: its result, or a penalty; `records`: of all ended trials.

        A failure without a value would be unknown to Optuna, which would draw its point again.
        """
        metric, status = self.space.metric, trial_record.status
        if self.space.cost is None:  # by the last one TPE sorts pruned trials
            for point in trial_record.points:
                if point.get(metric) is not None:
                    trial.report(point[metric], step=point.index)
        trial.set_user_attr("status", status)
        if trial_record.reason:
            trial.set_user_attr("reason", trial_record.reason)
        if (values := self.values(trial_record)) is not None:
            trial.set_user_attr("train_s", trial_record.points[-1].train_s)
            self.optuna.tell(trial, values)
        elif status == Status.PRUNED:
            self.optuna.tell(trial, state=TrialState.PRUNED)
        elif trial_record.external_cause:
            self.optuna.tell(trial, state=TrialState.FAIL)
        else:
            trial.set_user_attr("penalty", True)
            failed: TrialRecord | None = trial_record
            if status == Status.SKIPPED:
                failed = evaluated.smaller_oom_trial(trial_record.config, records)
            self.optuna.tell(trial, self.penalty(failed))

    def values(self, trial_record: TrialRecord) -> list[float] | None:
        """Return the objectives of a trial that ended ok; None for any other end."""
        metrics = filter(None, (self.space.metric, self.space.cost))
        values = [trial_record.value(metric) for metric in metrics]
        known = [value for value in values if value is not None]
        return known if len(known) == len(values) else None

    def penalty(self, failed: TrialRecord | None) -> list[float]:
        """Return values worse than every result in all objectives, and than `failed`'s cost.

        Earlier penalties are no results: else each one would double the next.
        """
        done = [
            trial.values
            for trial in self.optuna.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            if trial.user_attrs.get("status") == Status.OK and "penalty" not in trial.user_attrs
        ]
        results = [[values[i] for values in done] for i in range(len(self._modes))]
        if self.space.cost is not None and failed is not None:
            results[1] += evaluated.used(failed, self.space.cost)
        pairs = zip(results, self._modes, strict=True)
        return [evaluated.penalty(values, mode) for values, mode in pairs]

    def write(self, path: Path) -> None:
        """Write the study as a file that optuna-dashboard opens."""
        # The disk of temporary files is fast and has locks
        with errors_only("optuna"), tempfile.TemporaryDirectory() as scratch:
            storage = optuna.storages.RDBStorage(f"sqlite:///{scratch}/{path.name}")
            optuna.copy_study(from_study_name=STUDY, from_storage=self._storage, to_storage=storage)
            storage.engine.dispose()
            shutil.copy(Path(scratch, path.name), path)


REDRAWS = 20
"""Known or impossible draws of TPE in a row after which random draws replace them."""
RANDOM_REDRAWS = 500
"""Random draws in a row that may be impossible or known before the space counts as used up."""


class OptunaProposer:
    """Proposes points that are new, possible and not ruled out; a `loop.Proposer`.

    In this order: trials that were running when the search ended, under their old names, so that
    they continue from their checkpoints; the candidates of the search file; draws.
    """

    def __init__(
        self,
        space: SearchSpace,
        experiment: Path,
        spent_s: float = 0.0,
        device: str = "cpu",
    ) -> None:
        """`spent_s`: wall-clock of the sessions before this one; `device`: "cpu" or "cuda", what
        trials train on."""
        self.space, self.experiment = space, experiment
        self._started, self._spent_s, self._time_was_up = time.monotonic(), spent_s, False
        self._nothing_new = False
        self._running: dict[str, Trial] = {}
        """Optuna's trials of all that have not ended, by name."""
        self._records = record.read_trials(experiment)
        self._durations = durations(self._records)
        self._numbers = {trial.number for trial in self._records}
        self._evaluated = EvaluatedConfigurations(space, device, self._records)
        # The seed moves on: a resumed search must not draw its first points again.
        self.study = SearchStudy(space, space.seed + self._next)
        self._unfinished: list[TrialSpec] = []
        for trial in self._records:
            begun = self.study.begin(trial.drawn)
            begun.set_user_attr("trial", trial.name)
            if trial.finished:
                self.study.tell(begun, trial, self._records)
            else:
                config = space.config(trial.drawn)
                self._evaluated.add(config, trial.name)
                spec = self._spec(trial.name, begun, config, trial.role)
                self._unfinished.append(spec)
        known = [trial.drawn for trial in self._records]
        self._listed = [point for point in space.candidates if point not in known]
        """Points of the search file that have not begun."""

    # ---- the next trial
    def ask(self) -> TrialSpec | None:
        """Return the next trial; None when a limit is reached or nothing new is left."""
        if self._unfinished:
            unfinished = self._unfinished.pop(0)
            Journal(unfinished.folder).write("start")
            return unfinished
        spec = self._draw() if self._may_draw() else None
        if spec is None and not self._time_was_up and self._time_is_up():
            self._time_was_up = True
            sessions.note_time_is_up(self.experiment)
        return spec

    def _may_draw(self) -> bool:
        """Return whether number and time leave room for a new configuration.

        The first trial runs in any case: start-up may take what a short limit leaves over.
        """
        is_first = self._next == 0
        return self._next < self.space.budget.trials and (is_first or not self._time_is_up())

    @property
    def _next(self) -> int:
        """Return the number of the next trial; one that was killed before its journal began has
        left a gap."""
        return next(number for number in itertools.count() if number not in self._numbers)

    def _draw(self) -> TrialSpec | None:
        """Ask Optuna for a point to run; None: space or number of trials are used up."""
        if self._nothing_new or self._evaluated.used_up():
            return None
        sampler = self.study.optuna.sampler
        try:
            for attempt in range(REDRAWS + RANDOM_REDRAWS):
                if self._next >= self.space.budget.trials:
                    return None
                if attempt == REDRAWS:
                    seed = self.space.seed + self._next
                    self.study.optuna.sampler = optuna.samplers.RandomSampler(seed=seed)
                if (spec := self._draw_once()) is not None:
                    return spec
            self._nothing_new = True  # each further call would add as many dropped trials
            return None
        finally:
            self.study.optuna.sampler = sampler

    def _draw_once(self) -> TrialSpec | None:
        """Take the next listed point, or ask Optuna for one; None, after Optuna knows why, if it is
        not run."""
        listed = bool(self._listed)
        if listed:
            drawn = self._listed.pop(0)
            trial = self.study.begin(drawn)
        else:
            trial, drawn = self.study.draw()
        role: Role = "repeat" if "seed" in trial.user_attrs else "draw"
        try:
            config: Systems = cfg.override(self.space.baseline, drawn, where=self.space.source)
        except ConfigError as error:  # knobs that contradict each other
            self.study.drop(trial, refused=str(error))
            return None
        # The search file asks for the very run that it lists, even if it trains as another does
        twin = self._evaluated.exact(config) or (
            None if listed else self._evaluated.equivalent(config)
        )
        if twin is not None:  # a run would only repeat a known result
            self.study.drop(trial, same_as=twin)
            return None
        why = evaluated.ruled_out(cfg.flat(config), self._records)
        # Another point replaces a draw, or a repeated baseline, that would fail
        if why and (role == "repeat" or not listed):
            self._evaluated.add(config, "ruled out")
            failed = evaluated.smaller_oom_trial(cfg.flat(config), self._records)
            self.study.rule_out(trial, why, failed)
            return None
        self._numbers.add(number := self._next)
        name = f"t{number:04d}"
        self._evaluated.add(config, name)
        trial.set_user_attr("trial", name)
        spec = self._spec(name, trial, config, role)
        journal = spec.begin(config, drawn)
        if why:  # a listed point that is not run
            journal.end(End(Status.SKIPPED, why))
            skipped = record.read_begun(spec.folder)
            self.study.tell(self._running.pop(name), skipped, self._records)
            return None
        return spec

    def _spec(self, name: str, trial: Trial, config: Systems, role: Role) -> TrialSpec:
        self._running[name] = trial
        return TrialSpec.of_space(self.space, self.experiment, name, config, role)

    def _time_is_up(self) -> bool:
        """Return whether another trial does not fit into `budget: total` any more."""
        spent_s = self._spent_s + (time.monotonic() - self._started)
        return time_is_up(self.space, self._durations, spent_s)

    # ---- how a trial goes
    def tell(self, spec: TrialSpec, trial_record: TrialRecord, wall_s: float) -> None:
        """Report to Optuna how a trial ended."""
        self.study.tell(self._running[spec.name], trial_record, [*self._records, trial_record])
        self._records.append(trial_record)
        self._evaluated.note_refusal(trial_record)
        del self._running[spec.name]  # after what a full disk refuses: it can be told again
        self._durations.append(wall_s)
