"""A search's Optuna study: what draws its points, and what it learns of trials' ends.

It is made anew in every session, since the journals have all of it.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import optuna
from optuna.trial import FixedTrial, Trial, TrialState

from tunediff.config import ConfigError, Values
from tunediff.core.logs import errors_only
from tunediff.core.outcomes import Status
from tunediff.core.trial_record import TrialRecord
from tunediff.search_space import Draw, SearchSpace, to_params
from tunediff.tuning import knowledge

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
                failed = knowledge.smaller_oom_trial(trial_record.config, records)
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
            results[1] += knowledge.used(failed, self.space.cost)
        pairs = zip(results, self._modes, strict=True)
        return [knowledge.penalty(values, mode) for values, mode in pairs]

    def write(self, path: Path) -> None:
        """Write the study as a file that optuna-dashboard opens."""
        # The disk of temporary files is fast and has locks
        with errors_only("optuna"), tempfile.TemporaryDirectory() as scratch:
            storage = optuna.storages.RDBStorage(f"sqlite:///{scratch}/{path.name}")
            optuna.copy_study(from_study_name=STUDY, from_storage=self._storage, to_storage=storage)
            storage.engine.dispose()
            shutil.copy(Path(scratch, path.name), path)
