"""Choose the next trial of a search: an adapter of Optuna to Ray Tune's searcher, with our journals as the truth.

Optuna asks (`_draw`) and is told (`_tell`); Tune calls `suggest` and `on_trial_…`. The study holds nothing that
cannot be rebuilt from the journals (`_replay`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.trial import FixedTrial, Trial, TrialState
from ray.tune.search import Searcher as RaySearcher

from tunediff import config as cfg
from tunediff import search_space as spaces
from tunediff.config import ConfigError, Systems, Values
from tunediff.core import environment
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.core.trial_record import End, TrialRecord
from tunediff.search_space import Draw, SearchSpace, to_params
from tunediff.search_space.model import combinations
from tunediff.tuning import knowledge, messages, warm_start
from tunediff.tuning.pool import Pool
from tunediff.tuning.sampling import default_sampler
from tunediff.tuning.study_file import FAULTS, STUDY, open_file
from tunediff.tuning.trial import settled

REDRAWS = 20
"""Draws of TPE in a row that may be impossible or known before random draws replace them: TPE stays near what is
good."""
GRACE = 0.5
"""Share of its budget that every trial gets before it may be stopped early."""
WARM_POINTS = 3
"""Points of an earlier search with another evaluation protocol or budget that are tried first."""
WARM_STARTED = "warm_started"
"""Attribute of a study that has taken in all of the earlier search."""
RANDOM_REDRAWS = 500
"""Random draws in a row that may be impossible or known before the space counts as used up."""
LISTED = 500
"""Points of a space that are looked at one by one to know when it is used up: a second."""


class Drawn(NamedTuple):
    """A trial that is to run."""

    name: str
    trial: Trial
    values: Values


class Live(NamedTuple):
    """A trial that runs."""

    name: str
    trial: Trial
    slot: int
    began: float
    """On the monotonic clock."""


class Searcher(RaySearcher):  # type: ignore[misc]
    """Suggest names, slots and knobs of trials; report to Optuna how each trial ended, from its journal.

    A study that is opened again keeps its queue. Trials that were running are suggested first, under their old name,
    so that they continue from their checkpoint. `sampler` makes Optuna's sampler from a seed; `storage` keeps the
    study, by default as study.db in the experiment's folder; `device`: "cpu" or "cuda", what trials train on.
    """

    def __init__(
        self, space: SearchSpace, experiment: Path, pool: Pool, spent_s: float = 0.0,
        sampler: Callable[[int], optuna.samplers.BaseSampler] | None = None,
        storage: optuna.storages.BaseStorage | None = None, device: str = "cpu",
    ) -> None:  # fmt: skip
        super().__init__("objective", space.mode)
        self.space, self.experiment, self._device, self._pool = space, experiment, device, pool
        self.broken: Exception | None = None
        """Why journals or study could not be written: no further trial is suggested."""
        self._live: dict[str, Live] = {}  # by Tune's trial id
        self._started, self._spent_s, self._over = time.monotonic(), spent_s, False
        self._durations: list[float] = []
        self._unfinished: list[Drawn] = []
        self._records = record.read_trials(experiment)
        self._known = {trial.fingerprint: trial.name for trial in self._records}
        self._alike: dict[str, str] = {}  # by `_identity`: on this machine some knobs may change nothing
        for trial in self._records:
            with contextlib.suppress(ConfigError):  # of a workload that has changed since
                self._alike.setdefault(self._identity(trial.configuration), trial.name)
        self._next = 1 + max((trial.number for trial in self._records), default=-1)

        self._modes = [space.mode] if space.cost is None else [space.mode, "min"]
        self._draws, self._storage = Draw(space.dimensions), storage or open_file(experiment / "study.db")
        self.study = optuna.create_study(
            storage=self._storage, study_name=STUDY, load_if_exists=True, pruner=optuna.pruners.NopPruner(),
            directions=["minimize" if mode == "min" else "maximize" for mode in self._modes],
            # The seed moves on: a resumed search must not draw its first points again.
            sampler=(sampler or default_sampler)(space.seed + self._next),
        )  # fmt: skip
        self._replay()
        self._enqueue()
        # A kill may end any of these steps: each adds only what the study does not hold yet.
        if space.warm_start is not None and not self.study.user_attrs.get(WARM_STARTED):
            self._start_warm(Path(space.warm_start))
            self.study.set_user_attr(WARM_STARTED, True)

    def __getstate__(self) -> dict[str, object]:
        return {}  # Tune keeps a pickled copy of all it was given; nobody reads it, and all that matters is on disk

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: journals and study are on disk."""

    def _identity(self, config: Systems) -> str:
        """Return a fingerprint that is equal for configurations that train alike on this machine."""
        return cfg.fingerprint(cfg.effective(config, self._device))

    def _remember(self, config: Systems, name: str) -> None:
        """Remember that a configuration was tried, and by which trial, so that it is not suggested again."""
        self._known.setdefault(cfg.fingerprint(config), name)
        self._alike.setdefault(self._identity(config), name)

    # ---- what is known from the start
    def _enqueue(self) -> None:
        """Put the search file's points into the queue, unless they are there already or were run.

        A raised limit brings points that are neither.
        """
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        queued = {frozen.user_attrs.get("candidate") for frozen in waiting}
        run = [trial.drawn for trial in self._records] + [drawn.values for drawn in self._unfinished]
        for place, point in enumerate(self.space.candidates):
            # A point keeps its number when a raised limit brings further runs of the baseline: those count down.
            number = -place if place < self.space.noise else place - self.space.noise + 1
            if number not in queued and point not in run:
                params, beside = self._split(point)
                self.study.enqueue_trial(params, user_attrs={"candidate": number} | beside)

    def _start_warm(self, folder: Path) -> None:
        """Add the trials of an earlier search that this space can express to the study.

        Trials with the same evaluation protocol, budget and machine count as results, and none but the baseline is run
        again. The values of other trials mean nothing here: the best of them are only tried first.
        """
        first, best = self._identity(self.space.baseline), 0
        learned = {frozen.user_attrs.get("from") for frozen in self.study.get_trials(deepcopy=False)}
        for prior in warm_start.prior_trials(self.space, folder, self._device):
            if prior.origin in learned:
                best += not prior.counts
                continue
            trial = prior.trial
            config = self.space.config(prior.point)
            if self._identity(config) in (first, *self._alike):
                continue
            if prior.counts:
                values, attrs = self._values(trial), {"from": prior.origin, "status": str(trial.status)}
                attrs |= {"penalty": "yes"} if values is None else {}
                self._add(prior.point, TrialState.COMPLETE, attrs, values or self._penalty(trial))
                self._remember(config, prior.origin)
                self._records.append(trial)
            elif trial.status == "ok" and best < WARM_POINTS:
                best += 1
                self.study.enqueue_trial(to_params(prior.point), user_attrs={"from": prior.origin})

    def _add(
        self, point: Values, state: TrialState, attrs: Mapping[str, object], values: list[float] | None = None
    ) -> None:
        """Add a trial to the study that Optuna did not suggest; its queue stays as it is."""
        params, beside = self._split(point)
        self._draws(drawn := FixedTrial(params))
        trial = optuna.trial.create_trial(
            state=state, params=drawn.params, distributions=drawn.distributions, user_attrs={**attrs, **beside},
            values=values,
        )  # fmt: skip
        self.study.add_trial(trial)

    def _split(self, point: Values) -> tuple[Values, Values]:
        """Return the parameters that Optuna stores of a point, and apart from them the seed of a repeated baseline.

        Optuna does not search that seed, so that it is an attribute of the trial.
        """
        beside = {"seed": point["seed"]} if "seed" in point and self.space.seeds == 1 else {}
        return to_params({name: value for name, value in point.items() if name not in beside}), beside

    def _drawn(self, trial: Trial) -> Values:
        """Return the point of a trial: what its parameters and its seed say."""
        seed = trial.user_attrs.get("seed")
        return self._draws(trial) | ({"seed": seed} if seed is not None else {})

    def _replay(self) -> None:
        """Bring the study up to the journals, and find the trials that are to be continued."""
        # ---- add trials that only the journals have: the study file was lost, or is of an older run
        records = {trial_record.name: trial_record for trial_record in self._records}
        study = self._storage.get_study_id_from_name(STUDY)
        names = {frozen.user_attrs.get("trial") for frozen in self.study.get_trials(deepcopy=False)}
        for trial_record in self._records:
            if trial_record.name not in names:
                self._add(trial_record.drawn, TrialState.RUNNING, {"trial": trial_record.name})

        # ---- end or continue what the study takes for running
        for frozen in self.study.get_trials(deepcopy=False):
            name = frozen.user_attrs.get("trial")
            if name is None:
                if "from" in frozen.user_attrs and frozen.state.is_finished():
                    config = self.space.config(self._draws(FixedTrial(frozen.params)))
                    self._remember(config, origin := frozen.user_attrs["from"])
                    if status := frozen.user_attrs.get("status"):  # reused: a failure goes on ruling out others
                        self._records.append(TrialRecord(origin, -1, cfg.flat(config), {}, "", end=End(status)))
                elif frozen.state == TrialState.RUNNING:  # killed between ask and naming
                    self.study.tell(frozen.number, state=TrialState.FAIL)
                continue
            # A trial may have been killed before its journal began: its name is in the study only.
            self._next = max(self._next, int(name[1:]) + 1)
            if frozen.state == TrialState.RUNNING:
                trial = Trial(self.study, self._storage.get_trial_id_from_study_id_trial_number(study, frozen.number))
                self._take_up(name, trial, records.get(name))

    def _take_up(self, name: str, trial: Trial, trial_record: TrialRecord | None) -> None:
        """Report the end of a trial that Optuna takes for running, or put it among those that are to be continued."""
        values = self._drawn(trial)
        self._remember(self.space.config(values), name)
        if trial_record is not None and trial_record.finished:
            self._tell(trial, trial_record)
        else:
            self._unfinished.append(Drawn(name, trial, values))

    # ---- the next trial
    def suggest(self, trial_id: str) -> dict[str, object] | str | None:
        """Return the next trial's knobs, name and slot; FINISHED when a limit is reached or nothing new is left.

        None: no trial can start now; Tune asks again.
        """
        if self.broken is not None:
            return str(RaySearcher.FINISHED)
        if not self._pool.room():
            return None
        try:
            drawn = self._draw()
        except FAULTS as error:
            self.broken, drawn = error, None
        if drawn is None:  # Tune would not ask again for a trial whose node was lost
            self._over = True
            return None if self._live and self._pool.unsteady else str(RaySearcher.FINISHED)
        parallel = self.space.config(drawn.values).parallel
        if (allocation := self._pool.take(parallel.workers, together=parallel.together)) is None:
            self._unfinished.insert(0, drawn)
            return None
        live = self._live[trial_id] = Live(drawn.name, drawn.trial, allocation.slot, time.monotonic())
        return {**drawn.values, "trial": live.name, "slot": live.slot, "place": dataclasses.asdict(allocation.place)}

    def _draw(self) -> Drawn | None:
        """Return the next trial to run; None when there is none."""
        if self._unfinished:
            return self._unfinished.pop(0)
        if self._over or self._next >= self.space.budget.trials or self._time_is_up():
            return None
        sampler = self.study.sampler
        try:
            return self._draw_new()
        finally:
            self.study.sampler = sampler

    def _draw_new(self) -> Drawn | None:
        """Ask Optuna for points until one is possible, new and not ruled out; None: the space is used up."""
        if self._used_up():
            return None
        for attempt in range(REDRAWS + RANDOM_REDRAWS):
            # ---- ask; after too many draws in vain, at random
            if attempt == REDRAWS:
                self.study.sampler = optuna.samplers.RandomSampler(seed=self.space.seed + self._next)
            trial = self.study.ask()
            values = self._drawn(trial)

            # ---- pass over points that are impossible, known, or certain to run out of memory
            try:
                config = self.space.config(values)
            except ConfigError as error:  # knobs that contradict each other
                trial.set_user_attr("refused", str(error))
                self.study.tell(trial, state=TrialState.FAIL)
                continue
            listed = values in self.space.candidates  # the search file asks for this very run
            twin = self._known.get(cfg.fingerprint(config)) or (
                None if listed else self._alike.get(self._identity(config))
            )
            if twin is not None:  # a run would only repeat a known result
                trial.set_user_attr("same_as", twin)
                self.study.tell(trial, state=TrialState.FAIL)
                continue
            why = knowledge.ruled_out(cfg.flat(config), self._records)
            # A draw of Optuna, or a repeated baseline that has failed: another point gets its place.
            if why and ("seed" in trial.user_attrs or not listed):
                self._remember(config, "ruled out")
                trial.set_user_attr("ruled_out", why)
                self.study.tell(trial, self._penalty(knowledge.smaller_oom_trial(cfg.flat(config), self._records)))
                continue

            # ---- name it
            drawn = Drawn(f"t{self._next:04d}", trial, values)
            self._next += 1
            self._remember(config, drawn.name)
            trial.set_user_attr("trial", drawn.name)
            if not why:
                return drawn
            self._record_skipped(drawn, config, why)
            if self._next >= self.space.budget.trials:
                return None
        return None

    def _used_up(self) -> bool:
        """Return whether no draw can be new: all points were run, or equivalent ones. False for a large space."""
        if len(self._known) - self.space.noise + 1 >= spaces.size(self.space):
            return True
        if self._identities is None or not self._identities <= self._alike.keys():
            return False
        return all(cfg.fingerprint(self.space.config(point)) in self._known for point in self.space.candidates)

    @functools.cached_property
    def _identities(self) -> set[str] | None:
        """Return the `_identity` of all points of a small space of choices; None for any other space."""
        dimensions, identities = self.space.dimensions, set()
        if spaces.size(self.space) > LISTED or any(dimension.choices is None for dimension in dimensions):
            return None
        for point in combinations(dimensions):
            with contextlib.suppress(ConfigError):  # knobs that contradict each other
                identities.add(self._identity(self.space.config(point)))
        return identities

    def _record_skipped(self, drawn: Drawn, config: Systems, why: str) -> None:
        """Write the journal of a point of the search file that is not run, and report it to Optuna."""
        journal = Journal(self.experiment / "trials" / drawn.name)
        budget = self.space.budget
        journal.start(config, drawn.values, budget.of(config.devices).seconds, int(drawn.name[1:]), budget.unit)
        journal.end(End("skipped", why))
        trial_record = record.read_trial(journal.folder)
        assert trial_record is not None
        self._tell(drawn.trial, trial_record)

    def _time_is_up(self) -> bool:
        """Return whether another trial would not end within `budget: total`, less what is kept for confirming runs."""
        if (total := self.space.budget.total_s) is None:
            return False
        expected = max([*self._durations, self.space.longest_s])
        # Without a second trial there is nothing to confirm; and trials get at least half of the limit.
        runs = self.space.confirming_reserve if len(self._durations) > 1 else 0
        spent = self._spent_s + (time.monotonic() - self._started)
        return spent + expected > total - min(runs * expected, total / 2)

    # ---- the end of a trial
    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Keep the curve in the study, by evaluation point; Optuna keeps none where there are two objectives."""
        if self.space.cost is None and (live := self._live.get(trial_id)) is not None:
            # After a restart a point is reported again, which Optuna refuses.
            with contextlib.suppress(optuna.exceptions.OptunaError, ValueError):
                live.trial.report(result["objective"], step=int(result["index"]))

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        """Report to Optuna what the journal says; a trial without an end was stopped early, or lost its driver."""
        if (live := self._live.pop(trial_id, None)) is None:  # Tune reports an end again when that failed
            return
        self._pool.give(live.slot)
        self._durations.append(time.monotonic() - live.began)
        try:
            self._settle(live, error)
        except FAULTS as fault:  # a resumed search brings the study up to the journals
            self.broken = fault

    def _settled(self, folder: Path) -> TrialRecord | None:
        """Return the record of a trial that Tune has ended; wait for the end that its workers may still write."""
        return settled(folder, self.space.baseline.evaluation.points)

    def _settle(self, live: Live, error: bool) -> None:
        """Write the end of a trial where its workers did not, and report it to Optuna; `error`: its driver died."""
        folder = self.experiment / "trials" / live.name
        trial_record = self._settled(folder)
        if record.was_lost(folder):
            self._unfinished.insert(0, Drawn(live.name, live.trial, self._drawn(live.trial)))
            return
        if trial_record is None or not trial_record.finished:
            # The probe is small: a disk that is too full for a checkpoint may have room for it.
            if error and (why := environment.unwritable(self.experiment) or record.disk_fault(folder)) is not None:
                raise OSError(why)  # no fault of the trial: it stays without an end, and a resumed search takes it up
            messages.end(folder, End("error", "its driver died") if error else self._pruned(trial_record))
            trial_record = record.read_trial(folder)
        if trial_record is None:  # no start line: the driver died before it began
            self.study.tell(live.trial, state=TrialState.FAIL)
            return
        self._records.append(trial_record)
        self._tell(live.trial, trial_record)

    def _pruned(self, trial_record: TrialRecord | None) -> End:
        """Return the end of a trial that the scheduler stopped; its reason says how long no trial is stopped."""
        grace_s = GRACE * (
            trial_record.budget_s if trial_record is not None and trial_record.budget_s else self.space.longest_s
        )
        after = (
            f" after {trial_record.points[-1].train_s:.1f} s"
            if trial_record is not None and trial_record.points
            else ""
        )
        why = f"stopped by {self.space.early_stopping}{after}; no trial is stopped before {grace_s:.1f} s, while "
        why += "compilation, warm-up and EMA still make curves cross, nor within the noise of the best"
        return End("pruned", why)

    def _tell(self, trial: Trial, trial_record: TrialRecord) -> None:
        """Report the end of a trial to Optuna: its result, or for a failure a penalty.

        A failure without a value would be unknown to Optuna, which would draw its point again.
        """
        trial.set_user_attr("status", trial_record.status)
        if trial_record.reason:
            trial.set_user_attr("reason", trial_record.reason)
        if (values := self._values(trial_record)) is not None:
            trial.set_user_attr("train_s", trial_record.points[-1].train_s)
            self.study.tell(trial, values)
        elif trial_record.status == "pruned":
            self.study.tell(trial, state=TrialState.PRUNED)
        elif _no_fault(trial_record):  # nothing was learned
            self.study.tell(trial, state=TrialState.FAIL)
        else:
            trial.set_user_attr("penalty", True)
            failed: TrialRecord | None = trial_record
            if trial_record.status == "skipped":
                failed = knowledge.smaller_oom_trial(trial_record.config, self._records)
            self.study.tell(trial, self._penalty(failed))

    def _values(self, trial_record: TrialRecord) -> list[float] | None:
        """Return the objectives of a trial that ended ok; None for any other end."""
        values = [trial_record.value(metric) for metric in (self.space.metric, self.space.cost) if metric is not None]
        return [value for value in values if value is not None] if None not in values else None

    def _penalty(self, failed: TrialRecord | None) -> list[float]:
        """Return values that are worse than every result so far in every objective, and than the cost of `failed`.

        Earlier penalties are no results: else each one would double the next.
        """
        done = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        done = [trial for trial in done if trial.user_attrs.get("status") == "ok" and "penalty" not in trial.user_attrs]
        results = [[trial.values[i] for trial in done] for i in range(len(self._modes))]
        if self.space.cost is not None and failed is not None:
            results[1] += knowledge.used(failed, self.space.cost)
        return [knowledge.penalty(values, mode) for values, mode in zip(results, self._modes, strict=True)]


def _no_fault(trial_record: TrialRecord) -> bool:
    """Return whether a failure may be the machine's fault: the workers died, or other processes held the memory."""
    died = trial_record.status == "error" and "died" in trial_record.reason
    return died or (trial_record.end is not None and trial_record.end.crowded_out)
