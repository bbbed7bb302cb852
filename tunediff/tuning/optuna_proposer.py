"""Propose the trials of a search: points from Optuna, with the journals as the truth.

The study holds nothing that cannot be rebuilt from the journals (`_read_study`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import Trial, TrialState

from tunediff import config as cfg
from tunediff.config import ConfigError, Systems, Values
from tunediff.core import trial_record as record
from tunediff.core.trial_record import End, Role, TrialRecord
from tunediff.search_space import SearchSpace
from tunediff.tuning import knowledge, sessions, warm_start
from tunediff.tuning.experiment import durations, time_is_up
from tunediff.tuning.search_study import SearchStudy
from tunediff.tuning.study_file import FAULTS, STUDY, study_in
from tunediff.tuning.trial_spec import TrialSpec
from tunediff.tuning.tried import Tried

REDRAWS = 20
"""Known or impossible draws of TPE in a row after which random draws replace them."""
RANDOM_REDRAWS = 500
"""Random draws in a row that may be impossible or known before the space counts as used up."""
WARM_POINTS = 3
"""Points of an earlier search with another evaluation protocol or budget that are tried first."""
WARM_STARTED = "warm_started"
"""Attribute of a study that has taken in all of the earlier search."""


class OptunaProposer:
    """Proposes points that are new, possible and not ruled out; a `loop.Proposer`.

    In this order: trials that were running when the search ended, under their old names, so that
    they continue from their checkpoints; the candidates of the search file and of an earlier
    search, which wait in Optuna's queue; draws.
    """

    FAULTS = FAULTS

    def __init__(
        self,
        space: SearchSpace,
        experiment: Path,
        spent_s: float = 0.0,
        storage: optuna.storages.BaseStorage | None = None,
        device: str = "cpu",
        here: Mapping[str, Any] | None = None,
    ) -> None:
        """`spent_s`: wall-clock of the sessions before this one; `storage` keeps the study, by
        default what the space names; `device`: "cpu" or "cuda", what trials train on; `here`: on
        what machine, see `environment.differences`."""
        self.space, self.experiment = space, experiment
        self._started, self._spent_s, self._time_was_up = time.monotonic(), spent_s, False
        self._running: dict[str, Trial] = {}
        """Optuna's trials of all that have not ended, by name."""
        self._unfinished: list[TrialSpec] = []
        self._records = record.read_trials(experiment)
        self._durations = durations(self._records)
        self._next = 1 + max((trial.number for trial in self._records), default=-1)
        self._tried = Tried(space, device, self._records)
        name, storage = study_in(space.storage, experiment) if storage is None else (STUDY, storage)
        # The seed moves on: a resumed search must not draw its first points again.
        seed = space.seed + self._next
        self.study = SearchStudy(space, storage, seed, name)

        # A kill may end any of these steps: each adds only what the study does not hold yet.
        self._add_from_journals()
        self._read_study()
        known = [trial.drawn for trial in self._records] + [run.drawn for run in self._unfinished]
        for drawn_values in space.candidates:
            if drawn_values not in known and not self.study.is_queued(drawn_values):
                self.study.enqueue(drawn_values)
        if space.warm_start is not None and not self.study.optuna.user_attrs.get(WARM_STARTED):
            self._start_warm(warm_start.prior_trials(space, Path(space.warm_start), device, here))
            self.study.optuna.set_user_attr(WARM_STARTED, True)

    # ---- what is known from the start
    def _add_from_journals(self) -> None:
        """Add trials that only the journals have: the study was lost, or they run again."""
        names = {frozen.user_attrs.get("trial") for frozen in self.study.trials()}
        running = self.study.trials(TrialState.RUNNING)
        running_names = {frozen.user_attrs.get("trial") for frozen in running}
        for trial in self._records:
            if trial.name not in (names if trial.finished else running_names):
                self.study.add(trial.drawn, TrialState.RUNNING, {"trial": trial.name})

    def _read_study(self) -> None:
        """Read the study; tell it ends in the journals, and find trials to continue."""
        records = {trial.name: trial for trial in self._records}
        for frozen in self.study.trials():
            name, running = frozen.user_attrs.get("trial"), frozen.state == TrialState.RUNNING
            if name is not None:
                role, drawn = self.study.run(frozen)
                # A trial may have been killed before its journal began: only the study has its name
                self._next = max(self._next, int(name[1:]) + 1)
                if running and (ended := records.get(name)) is not None and ended.finished:
                    self.study.tell(self.study.running(frozen), ended, self._records)
                elif running:
                    config = self.space.config(drawn)
                    self._tried.add(config, name)
                    trial = self.study.running(frozen)
                    self._unfinished.append(self._spec(name, trial, config, drawn, role))
            elif "from" in frozen.user_attrs and frozen.state.is_finished():
                config = self.space.config(self.study.run(frozen)[1])
                self._tried.add(config, origin := frozen.user_attrs["from"])
                # A reused failure goes on ruling out others
                if status := frozen.user_attrs.get("status"):
                    knobs, end = cfg.flat(config), End(status)
                    self._records.append(TrialRecord(origin, -1, knobs, {}, "", end=end))
            elif running:  # killed between ask and naming
                self.study.drop(self.study.running(frozen))

    def _start_warm(self, priors: list[warm_start.PriorTrial]) -> None:
        """Add the trials of an earlier search that this space can express to the study.

        Trials with the same evaluation protocol, budget and machine count as results, and none but
        the baseline is run again. The best of other trials are only tried first.
        """
        best, added = 0, {frozen.user_attrs.get("from") for frozen in self.study.trials()}
        for prior in priors:
            if prior.origin in added:
                best += not prior.counts
                continue
            trial, config = prior.trial, self.space.config(prior.drawn)
            if self._tried.is_baseline(config) or self._tried.equivalent(config) is not None:
                continue
            if prior.counts:
                values = self.study.values(trial)
                attributes = {"from": prior.origin, "status": str(trial.status)}
                if values is None:
                    attributes["penalty"] = "yes"
                    values = self.study.penalty(trial)
                self.study.add(prior.drawn, TrialState.COMPLETE, attributes, values)
                self._tried.add(config, prior.origin)
                self._records.append(trial)
            elif trial.status == "ok" and best < WARM_POINTS:
                best += 1
                self.study.enqueue(prior.drawn, **{"from": prior.origin})

    # ---- the next trial
    def ask(self) -> TrialSpec | None:
        """Return the next trial; None when a limit is reached or nothing new is left."""
        if self._unfinished:
            return self._unfinished.pop(0)
        spec = self._draw() if self._may_draw() else None
        if spec is None and not self._time_was_up and self._time_is_up():
            self._time_was_up = True
            sessions.note_time_is_up(self.experiment)
        return spec

    def _may_draw(self) -> bool:
        """Return whether number and time leave room for a new configuration.

        The first trial runs in any case: start-up may take what a short limit leaves over.
        """
        trials = self.space.budget.trials  # it may have been lowered since
        return self._next < trials and (self._next == 0 or not self._time_is_up())

    def _draw(self) -> TrialSpec | None:
        """Ask Optuna for a point to run; None: space or number of trials are used up."""
        if self._tried.used_up():
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
            return None
        finally:
            self.study.optuna.sampler = sampler

    def _draw_once(self) -> TrialSpec | None:
        """Ask Optuna for one point; None, after Optuna knows why, if it is not run."""
        trial = self.study.optuna.ask()
        role, drawn = self.study.run(trial)
        try:
            config: Systems = self.space.config(drawn)
        except ConfigError as error:  # knobs that contradict each other
            self.study.drop(trial, refused=str(error))
            return None
        # The search file asks for the very run that it lists, even if it trains as another does
        listed = drawn in self.space.candidates
        twin = self._tried.exact(config) or (None if listed else self._tried.equivalent(config))
        if twin is not None:  # a run would only repeat a known result
            self.study.drop(trial, same_as=twin)
            return None
        why = knowledge.ruled_out(cfg.flat(config), self._records)
        # Another point replaces a draw, or a repeated baseline, that would fail
        if why and (role == "repeat" or not listed):
            self._tried.add(config, "ruled out")
            failed = knowledge.smaller_oom_trial(cfg.flat(config), self._records)
            self.study.rule_out(trial, why, failed)
            return None
        name = self._next_name()
        self._tried.add(config, name)
        trial.set_user_attr("trial", name)
        spec = self._spec(name, trial, config, drawn, role)
        if why:
            self._skip(spec, why)
            return None
        return spec

    def _next_name(self) -> str:
        self._next += 1
        return f"t{self._next - 1:04d}"

    def _spec(
        self, name: str, trial: Trial, config: Systems, drawn: Values, role: Role
    ) -> TrialSpec:
        self._running[name] = trial
        return TrialSpec.of_space(self.space, self.experiment, name, config, drawn, role)

    def _skip(self, spec: TrialSpec, why: str) -> None:
        """Write the journal of a listed point that is not run; report it to Optuna."""
        spec.begin().end(End("skipped", why))
        trial_record = record.read_trial(spec.folder)
        assert trial_record is not None
        self.study.tell(self._running.pop(spec.name), trial_record, self._records)

    def _time_is_up(self) -> bool:
        """Return whether another trial does not fit into `budget: total` any more."""
        spent_s = self._spent_s + (time.monotonic() - self._started)
        return time_is_up(self.space, self._durations, spent_s)

    # ---- how a trial goes
    def report(self, spec: TrialSpec, result: Mapping[str, Any]) -> None:
        """Keep a point of a trial's curve in the study."""
        self.study.report(self._running[spec.name], result)

    def tell(self, spec: TrialSpec, trial_record: TrialRecord | None, wall_s: float) -> None:
        """Report to Optuna how a trial ended; no record: its driver died before it began."""
        trial = self._running[spec.name]
        if trial_record is None:
            self.study.drop(trial)
        else:
            # Listed points run again on a resume, under their names
            listed, end = spec.drawn in self.space.candidates, trial_record.end
            if end is not None and end.process_died and not listed:
                self._tried.forget(spec.config, spec.name)
            self.study.tell(trial, trial_record, [*self._records, trial_record])
            self._records.append(trial_record)
            self._tried.note_refusal(trial_record)
        del self._running[spec.name]  # after what a full disk refuses: it can be told again
        self._durations.append(wall_s)
