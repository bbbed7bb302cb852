"""A search's Optuna study: its stored points, and what it learns of trials' ends."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.trial import FixedTrial, FrozenTrial, Trial, TrialState

from tunediff.config import ConfigError, Values
from tunediff.core.trial_record import Role, TrialRecord
from tunediff.search_space import Draw, SearchSpace, to_params
from tunediff.tuning import knowledge
from tunediff.tuning.study_file import STUDY


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
    """Adds points and results to an Optuna study.

    Attributes of its trials: `trial`, the name of the run; `from`, a trial of an earlier search;
    `seed`, of a repeat, which Optuna does not search; `status`, `reason`, `penalty`, how it ended;
    `refused`, `same_as`, `ruled_out`, why a point was not run.
    """

    def __init__(
        self,
        space: SearchSpace,
        storage: optuna.storages.BaseStorage,
        seed: int,
        name: str = STUDY,
    ) -> None:
        """Open or make the study `name` in `storage`; `seed`: of the sampler."""
        self.space, self._storage, self._draws = space, storage, Draw(space.dimensions)
        self._modes = [space.mode] if space.cost is None else [space.mode, "min"]
        self._reported: dict[int, dict[int, float]] = {}
        """Points that the study has, by number of the trial and index."""
        self.optuna = optuna.create_study(
            storage=storage,
            study_name=name,
            load_if_exists=True,
            pruner=optuna.pruners.NopPruner(),
            directions=["minimize" if mode == "min" else "maximize" for mode in self._modes],
            sampler=sampler_named(space.sampler, seed),
        )

    # ---- points
    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return its trials, those in these states only if there are any."""
        return self.optuna.get_trials(deepcopy=False, states=states or None)

    def running(self, frozen: FrozenTrial) -> Trial:
        """Return the handle of a trial that Optuna takes for running."""
        study = self._storage.get_study_id_from_name(self.optuna.study_name)
        number = self._storage.get_trial_id_from_study_id_trial_number(study, frozen.number)
        self._reported[frozen.number] = dict(frozen.intermediate_values)
        return Trial(self.optuna, number)

    def run(self, trial: Trial | FrozenTrial) -> tuple[Role, Values]:
        """Return role and drawn values of a trial: what its parameters and its seed say."""
        drawn = self._draws(trial if isinstance(trial, Trial) else FixedTrial(trial.params))
        if (seed := trial.user_attrs.get("seed")) is None:
            return "draw", drawn
        return "repeat", {**drawn, "seed": seed}

    def enqueue(self, drawn: Values, **attributes: object) -> None:
        """Put a point into the queue, which is emptied before Optuna draws."""
        params, seed = self._split(drawn)
        self.optuna.enqueue_trial(params, user_attrs=attributes | seed)

    def is_queued(self, drawn: Values) -> bool:
        """Return whether a point waits in the queue."""
        params, seed = self._split(drawn)
        return any(
            frozen.system_attrs.get("fixed_params") == params
            and frozen.user_attrs.get("seed") == seed.get("seed")
            for frozen in self.trials(TrialState.WAITING)
        )

    def add(
        self,
        drawn: Values,
        state: TrialState,
        attributes: Mapping[str, object],
        values: list[float] | None = None,
    ) -> None:
        """Add a trial that Optuna did not suggest; its queue stays as it is."""
        params, seed = self._split(drawn)
        self._draws(fixed := FixedTrial(params))
        trial = optuna.trial.create_trial(
            state=state,
            params=fixed.params,
            distributions=fixed.distributions,
            user_attrs={**attributes, **seed},
            values=values,
        )
        self.optuna.add_trial(trial)

    def _split(self, drawn: Values) -> tuple[Values, Values]:
        """Return Optuna's parameters of a point, and a repeat's seed as an attribute."""
        searched = any(dimension.name == "seed" for dimension in self.space.dimensions)
        seed = {} if searched else {name: drawn[name] for name in drawn if name == "seed"}
        return to_params({name: drawn[name] for name in drawn if name not in seed}), seed

    # ---- results
    def report(self, trial: Trial, result: Mapping[str, Any]) -> None:
        """Keep a curve's point by index; with two objectives Optuna keeps none."""
        index, reported = int(result["index"]), self._reported.setdefault(trial.number, {})
        # After a restart and at the end a point comes again, of which Optuna would warn.
        if self.space.cost is not None or index in reported:
            return
        with contextlib.suppress(optuna.exceptions.OptunaError, ValueError):
            trial.report(result["objective"], step=index)
            reported[index] = result["objective"]

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
        # Tune does not pass on the point after which it stops a trial, by which TPE sorts pruned
        # trials. A study that was rebuilt has no points at all.
        metric, status = self.space.metric, trial_record.status
        points = {point.index: point[metric] for point in trial_record.points if metric in point}
        reported = self._reported.get(trial.number, {})
        if status == "pruned" and not reported.items() <= points.items():
            trial = self._replaced(trial)
        for index, value in points.items():
            self.report(trial, {"index": index, "objective": value})
        trial.set_user_attr("status", status)
        if trial_record.reason:
            trial.set_user_attr("reason", trial_record.reason)
        if (values := self.values(trial_record)) is not None:
            trial.set_user_attr("train_s", trial_record.points[-1].train_s)
            self.optuna.tell(trial, values)
        elif status == "pruned":
            self.optuna.tell(trial, state=TrialState.PRUNED)
        elif trial_record.external_cause:
            self.optuna.tell(trial, state=TrialState.FAIL)
        else:
            trial.set_user_attr("penalty", True)
            failed: TrialRecord | None = trial_record
            if status == "skipped":
                failed = knowledge.smaller_oom_trial(trial_record.config, records)
            self.optuna.tell(trial, self.penalty(failed))

    def _replaced(self, trial: Trial) -> Trial:
        """End a trial that began again; return a new one without its void points."""
        self.add(self.run(trial)[1], TrialState.RUNNING, trial.user_attrs)
        self.drop(trial)
        return self.running(self.trials()[-1])

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
            for trial in self.trials(TrialState.COMPLETE)
            if trial.user_attrs.get("status") == "ok" and "penalty" not in trial.user_attrs
        ]
        results = [[values[i] for values in done] for i in range(len(self._modes))]
        if self.space.cost is not None and failed is not None:
            results[1] += knowledge.used(failed, self.space.cost)
        pairs = zip(results, self._modes, strict=True)
        return [knowledge.penalty(values, mode) for values, mode in pairs]
