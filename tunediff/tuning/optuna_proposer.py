"""Propose the trials of a search: points from Optuna, with the journals as the truth.

The study holds nothing that cannot be rebuilt from the journals (`_replay`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import Trial, TrialState

from tunediff import config as cfg
from tunediff.analysis import seconds_of
from tunediff.config import ConfigError, Systems, Values
from tunediff.core import trial_record as record
from tunediff.core.trial_record import End, TrialRecord
from tunediff.search_space import SearchSpace
from tunediff.tuning import knowledge, sampling, sessions, warm_start
from tunediff.tuning.reruns import Reruns, is_rerun
from tunediff.tuning.search_study import SearchStudy
from tunediff.tuning.study_file import FAULTS, open_file
from tunediff.tuning.trial_spec import TrialSpec
from tunediff.tuning.tried import Tried

REDRAWS = 20
"""Draws of TPE in a row that may be impossible or known before random draws replace them: TPE stays
near what is good."""
RANDOM_REDRAWS = 500
"""Random draws in a row that may be impossible or known before the space counts as used up."""
WARM_POINTS = 3
"""Points of an earlier search with another evaluation protocol or budget that are tried first."""
WARM_STARTED = "warm_started"
"""Attribute of a study that has taken in all of the earlier search."""


class OptunaProposer:
    """Proposes points that are new, possible and not ruled out; a `loop.Proposer`.

    A study that is opened again keeps its queue. Trials that were running are proposed first, under
    their old name, so that they continue from their checkpoint.
    """

    FAULTS = FAULTS

    def __init__(
        self, space: SearchSpace, experiment: Path, spent_s: float = 0.0,
        sampler: Callable[[int], optuna.samplers.BaseSampler] | None = None,
        storage: optuna.storages.BaseStorage | None = None, device: str = "cpu",
        here: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`spent_s`: wall-clock of the sessions before this one; `sampler` makes Optuna's sampler
        from a seed; `storage` keeps the study, by default as study.db in the experiment's folder;
        `device`: "cpu" or "cuda", what trials train on; `here`: on what machine, see
        `environment.differences`.
        """
        self.space, self.experiment, self._device, self._here = space, experiment, device, here
        self._started, self._spent_s, self._time_was_up = time.monotonic(), spent_s, False
        self._trials: dict[str, Trial] = {}  # Optuna's, of every trial that has not ended, by name
        self._unfinished: list[TrialSpec] = []
        self._records = record.read_trials(experiment)
        ended = [trial for trial in self._records if trial.finished and trial.status != "skipped"]
        self._durations = [sum(seconds_of(trial).values()) for trial in ended]
        self._reruns = Reruns(space, experiment)
        self._tried = Tried(
            space, device, (trial for trial in self._records if not is_rerun(space, trial.drawn))
        )
        self._next = 1 + max((trial.number for trial in self._records), default=-1)
        storage = storage or open_file(experiment / "study.db")
        # The seed moves on: a resumed search must not draw its first points again.
        self.study = SearchStudy(
            space, storage, sampler or sampling.default_sampler, space.seed + self._next
        )
        self._replay()
        self._enqueue()
        # A kill may end any of these steps: each adds only what the study does not hold yet.
        if space.warm_start is not None and not self.study.optuna.user_attrs.get(WARM_STARTED):
            self._start_warm(Path(space.warm_start))
            self.study.optuna.set_user_attr(WARM_STARTED, True)

    # ---- what is known from the start
    def _replay(self) -> None:
        """Bring the study up to the journals, and find the trials that are to be continued."""
        # ---- add trials that only the journals have: the study file was lost or is of an older
        # run, or they run again
        records = {trial_record.name: trial_record for trial_record in self._records}
        names = {frozen.user_attrs.get("trial") for frozen in self.study.trials()}
        unended = {
            frozen.user_attrs.get("trial") for frozen in self.study.trials(TrialState.RUNNING)
        }
        for trial_record in self._records:
            if trial_record.name not in (names if trial_record.finished else unended):
                self.study.add(trial_record.drawn, TrialState.RUNNING, {"trial": trial_record.name})

        # ---- end or continue what the study takes for running
        for frozen in self.study.trials():
            name, running = frozen.user_attrs.get("trial"), frozen.state == TrialState.RUNNING
            if name is not None:
                if "seed" in frozen.user_attrs:
                    self._reruns.add(self.study.point(frozen))
                # A trial may have been killed before its journal began: its name is in the study
                # only.
                self._next = max(self._next, int(name[1:]) + 1)
                if running:
                    self._take_up(name, self.study.running(frozen), records.get(name))
            elif "from" in frozen.user_attrs and frozen.state.is_finished():
                config = self.space.config(self.study.point(frozen))
                self._tried.add(config, origin := frozen.user_attrs["from"])
                if status := frozen.user_attrs.get(
                    "status"
                ):  # reused: a failure goes on ruling out others
                    self._records.append(
                        TrialRecord(origin, -1, cfg.flat(config), {}, "", end=End(status))
                    )
            elif running:  # killed between ask and naming
                self.study.drop(self.study.running(frozen))

    def _take_up(self, name: str, trial: Trial, trial_record: TrialRecord | None) -> None:
        """Report the end of a trial that Optuna takes for running, or put it among those that are
        to be continued."""
        if trial_record is not None and trial_record.finished:
            self.study.tell(trial, trial_record, self._records)
            return
        point = self.study.point(trial)
        config = self.space.config(point)
        if point not in self._reruns:
            self._tried.add(config, name)
        self._unfinished.append(self._spec(name, trial, config, point))

    def _enqueue(self) -> None:
        """Put the search file's points into the queue, unless they are there already or were run.

        A raised limit brings points that are neither.
        """
        queued = {
            frozen.user_attrs.get("candidate") for frozen in self.study.trials(TrialState.WAITING)
        }
        run = [trial.drawn for trial in self._records] + [spec.drawn for spec in self._unfinished]
        for place, point in enumerate(self.space.candidates):
            # A point keeps its number when a raised limit brings further runs of the baseline:
            # those count down.
            number = -place if place < self.space.noise else place - self.space.noise + 1
            if number not in queued and point not in run:
                self.study.enqueue(point, candidate=number)

    def _start_warm(self, folder: Path) -> None:
        """Add the trials of an earlier search that this space can express to the study.

        Trials with the same evaluation protocol, budget and machine count as results, and none but
        the baseline is run again. The values of other trials mean nothing here: the best of them
        are only tried first.
        """
        best, added = 0, {frozen.user_attrs.get("from") for frozen in self.study.trials()}
        for prior in warm_start.prior_trials(self.space, folder, self._device, self._here):
            if prior.origin in added:
                best += not prior.counts
                continue
            trial, config = prior.trial, self.space.config(prior.point)
            if self._tried.is_baseline(config) or self._tried.alike(config) is not None:
                continue
            if prior.counts:
                values, attributes = (
                    self.study.values(trial),
                    {"from": prior.origin, "status": str(trial.status)},
                )
                attributes |= {"penalty": "yes"} if values is None else {}
                self.study.add(
                    prior.point,
                    TrialState.COMPLETE,
                    attributes,
                    values or self.study.penalty(trial),
                )
                self._tried.add(config, prior.origin)
                self._records.append(trial)
            elif trial.status == "ok" and best < WARM_POINTS:
                best += 1
                self.study.enqueue(prior.point, **{"from": prior.origin})

    # ---- the next trial
    def ask(self) -> TrialSpec | None:
        """Return the next trial; None when a limit is reached or nothing new is left."""
        if self._unfinished:
            return self._unfinished.pop(0)
        spec = self._draw_new() if self._may_draw() else None
        if (spec := spec or self._rerun()) is None and not self._time_was_up and self._time_is_up():
            self._time_was_up = True
            sessions.note_time_is_up(self.experiment)
        return spec

    def _may_draw(self) -> bool:
        """Return whether number and time leave room for a new configuration, beside reruns and
        confirming runs.

        The first trial runs in any case: start-up may take what a short limit leaves over.
        """
        if self._draws_left <= 0:
            return False
        return self._next == 0 or not self._time_is_up(
            reruns_left=max(0, self._reruns.left(self._draws))
        )

    @property
    def _draws(self) -> int:
        """Return how many trials were named that are no reruns."""
        return self._next - len(self._reruns)

    @property
    def _draws_left(self) -> int:
        trials = self.space.budget.trials  # it may have been lowered since
        return min(trials - self.space.reruns - self._draws, trials - self._next)

    def _rerun(self) -> TrialSpec | None:
        """Return another run of a leading configuration; None: there were enough, or none has a
        result yet."""
        if (
            self._reruns.left(self._draws) <= 0
            or self._time_is_up()
            or (point := self._reruns.next_point()) is None
        ):
            return None
        name, self._next = f"t{self._next:04d}", self._next + 1
        self._reruns.add(point)
        self.study.add(point, TrialState.RUNNING, {"trial": name})
        return self._spec(
            name, self.study.running(self.study.trials()[-1]), self.space.config(point), point
        )

    def _draw_new(self) -> TrialSpec | None:
        """Return a new trial; None: the space or the number of trials is used up."""
        sampler = self.study.optuna.sampler
        try:
            return self._draw()
        finally:
            self.study.optuna.sampler = sampler

    def _draw(self) -> TrialSpec | None:
        """Ask Optuna for points until one is to be run; None: the space or the number of trials is
        used up."""
        for attempt in range(REDRAWS + RANDOM_REDRAWS):
            if self._draws_left <= 0 or (attempt == 0 and self._tried.used_up()):
                return None
            if attempt == REDRAWS:
                self.study.optuna.sampler = optuna.samplers.RandomSampler(
                    seed=self.space.seed + self._next
                )
            trial = self.study.optuna.ask()
            point = self.study.point(trial)
            if (config := self._new_config(trial, point)) is None:
                continue
            why = knowledge.ruled_out(cfg.flat(config), self._records)
            # A draw of Optuna, or a repeated baseline that has failed: another point gets its
            # place.
            if why and ("seed" in trial.user_attrs or point not in self.space.candidates):
                self._tried.add(config, "ruled out")
                self.study.rule_out(
                    trial, why, knowledge.smaller_oom_trial(cfg.flat(config), self._records)
                )
                continue
            spec = self._name(trial, config, point)
            if not why:
                return spec
            self._skip(spec, why)
        return None

    def _new_config(self, trial: Trial, point: Values) -> Systems | None:
        """Return the configuration of a point, validated; None, after Optuna knows, if it is
        impossible or known."""
        try:
            config: Systems = self.space.config(point)
        except ConfigError as error:  # knobs that contradict each other
            self.study.drop(trial, refused=str(error))
            return None
        listed = point in self.space.candidates  # the search file asks for this very run
        if twin := self._tried.exact(config) or (None if listed else self._tried.alike(config)):
            self.study.drop(trial, same_as=twin)  # a run would only repeat a known result
            return None
        return config

    def _name(self, trial: Trial, config: Systems, point: Values) -> TrialSpec:
        """Give a trial the next name, and remember its configuration."""
        name = f"t{self._next:04d}"
        self._next += 1
        self._tried.add(config, name)
        trial.set_user_attr("trial", name)
        return self._spec(name, trial, config, point)

    def _spec(self, name: str, trial: Trial, config: Systems, point: Values) -> TrialSpec:
        self._trials[name] = trial
        return TrialSpec.of_space(self.space, self.experiment, name, config, point)

    def _skip(self, spec: TrialSpec, why: str) -> None:
        """Write the journal of a point of the search file that is not run, and report it to
        Optuna."""
        spec.begin().end(End("skipped", why))
        trial_record = record.read_trial(spec.folder)
        assert trial_record is not None
        self.study.tell(self._trials.pop(spec.name), trial_record, self._records)

    def _time_is_up(self, reruns_left: int = 0) -> bool:
        """Return whether another trial does not fit into `budget: total`, less reruns and
        confirming runs."""
        if (total := self.space.budget.total_s) is None:
            return False
        expected = max([*self._durations, self.space.longest_s])
        # Without a second trial there is nothing to confirm; and trials get at least half of the
        # limit.
        runs = reruns_left + (self.space.confirming_reserve if len(self._durations) > 1 else 0)
        spent = self._spent_s + (time.monotonic() - self._started)
        return spent + expected > total - min(runs * expected, total / 2)

    # ---- how a trial goes
    def report(self, spec: TrialSpec, result: Mapping[str, Any]) -> None:
        """Keep a point of a trial's curve in the study."""
        self.study.report(self._trials[spec.name], result)

    def tell(self, spec: TrialSpec, trial_record: TrialRecord | None, wall_s: float) -> None:
        """Report to Optuna how a trial ended; no record: its driver died before it began."""
        trial = self._trials[spec.name]
        if trial_record is None:
            self.study.drop(trial)
        else:
            listed = (
                spec.drawn in self.space.candidates
            )  # these run again on a resume, under their names
            if (end := trial_record.end) is not None and end.external_cause and not listed:
                self._tried.forget(spec.config, spec.name, end.process_died)
            self.study.tell(trial, trial_record, [*self._records, trial_record])
            self._records.append(trial_record)
        del self._trials[spec.name]  # after what a full disk refuses: it can be told again
        self._durations.append(wall_s)
