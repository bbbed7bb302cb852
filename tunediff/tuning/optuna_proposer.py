"""Propose the trials of a search: points from Optuna, with the journals as the truth."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import optuna
from optuna.trial import Trial

from tunediff import config as cfg
from tunediff.config import ConfigError, Systems, Values
from tunediff.core import trial_record as record
from tunediff.core.outcomes import Status
from tunediff.core.trial_record import End, Role, TrialRecord
from tunediff.search_space import SearchSpace
from tunediff.tuning import knowledge, sessions
from tunediff.tuning.experiment import durations, time_is_up
from tunediff.tuning.search_study import SearchStudy
from tunediff.tuning.trial_spec import TrialSpec
from tunediff.tuning.tried import Tried

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
        self._running: dict[str, Trial] = {}
        """Optuna's trials of all that have not ended, by name."""
        self._records = record.read_trials(experiment)
        self._durations = durations(self._records)
        self._numbers = {trial.number for trial in self._records}
        self._tried = Tried(space, device, self._records)
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
                self._tried.add(config, trial.name)
                spec = self._spec(trial.name, begun, config, trial.drawn, trial.role)
                self._unfinished.append(spec)
        known = [trial.drawn for trial in self._records]
        self._listed = [point for point in space.candidates if point not in known]
        """Points of the search file that have not begun."""

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
        is_first = self._next == 0
        return self._next < self.space.budget.trials and (is_first or not self._time_is_up())

    @property
    def _next(self) -> int:
        """Return the number of the next trial; one that was killed before its journal began has
        left a gap."""
        return next(number for number in itertools.count() if number not in self._numbers)

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
            config: Systems = self.space.config(drawn)
        except ConfigError as error:  # knobs that contradict each other
            self.study.drop(trial, refused=str(error))
            return None
        # The search file asks for the very run that it lists, even if it trains as another does
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
        self._numbers.add(number := self._next)
        name = f"t{number:04d}"
        self._tried.add(config, name)
        trial.set_user_attr("trial", name)
        spec = self._spec(name, trial, config, drawn, role)
        if why:
            self._skip(spec, why)
            return None
        return spec

    def _spec(
        self, name: str, trial: Trial, config: Systems, drawn: Values, role: Role
    ) -> TrialSpec:
        self._running[name] = trial
        return TrialSpec.of_space(self.space, self.experiment, name, config, drawn, role)

    def _skip(self, spec: TrialSpec, why: str) -> None:
        """Write the journal of a listed point that is not run; report it to Optuna."""
        spec.begin().end(End(Status.SKIPPED, why))
        trial_record = record.read_trial(spec.folder)
        assert trial_record is not None
        self.study.tell(self._running.pop(spec.name), trial_record, self._records)

    def _time_is_up(self) -> bool:
        """Return whether another trial does not fit into `budget: total` any more."""
        spent_s = self._spent_s + (time.monotonic() - self._started)
        return time_is_up(self.space, self._durations, spent_s)

    # ---- how a trial goes
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
