"""The loop of searches, confirming runs and comparisons: ask for a trial, run it on a slot, tell
how it ended.

`run` goes through it by itself. In a search Ray Tune does, through its hooks, with a scheduler that
stops trials early; `Searcher` adapts these hooks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ray.tune.search import Searcher as RaySearcher

from tunediff.core import environment
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.core.listeners import Listeners
from tunediff.core.trial_record import End, TrialRecord
from tunediff.tuning import trial
from tunediff.tuning.pool import Pool
from tunediff.tuning.stopping import ended_early
from tunediff.tuning.trial import SPEC, settled
from tunediff.tuning.trial_spec import TrialSpec

if TYPE_CHECKING:
    from tunediff.tuning.optuna_proposer import OptunaProposer


class Proposer(Protocol):
    """Decides what runs next, and learns how it ended."""

    def ask(self) -> TrialSpec | None:
        """Return the next trial; None: there is none, and it is not asked again."""

    def tell(self, spec: TrialSpec, trial_record: TrialRecord | None, wall_s: float) -> None:
        """Take note of how a trial ended, after `wall_s` on its slot; no record: it never began."""


class Dispatcher:
    """Gives slots to the trials of a proposer. A trial that finds no room, or has lost its node,
    goes before others."""

    def __init__(
        self,
        proposer: Proposer,
        pool: Pool,
        may_start: Callable[[], bool] = lambda: True,
        reconsiders: bool = False,
    ) -> None:
        """`may_start`: whether a trial may start now; `reconsiders`: what runs now decides whether
        the proposer has more to propose."""
        self._proposer, self._pool = proposer, pool
        self._may_start, self._reconsiders = may_start, reconsiders
        self._waiting: list[TrialSpec] = []
        self._began: dict[str, float] = {}  # on the monotonic clock, of every trial that runs
        self._exhausted = False

    @property
    def over(self) -> bool:
        """Return whether no further trial will come; one that runs may yet lose its node."""
        return (
            self._exhausted
            and not self._waiting
            and not (self._began and (self._pool.unsteady or self._reconsiders))
        )

    def start(self) -> TrialSpec | None:
        """Return the next trial, with its place; None: there is no room now, or no trial (any
        more)."""
        if not self._pool.room() or not self._may_start():
            return None
        spec = self._waiting.pop(0) if self._waiting else None
        if spec is None and not self._exhausted:
            spec = self._proposer.ask()
        if spec is None:
            self._exhausted = True
            return None
        parallel = spec.config.parallel
        if (allocation := self._pool.take(parallel.workers, together=parallel.together)) is None:
            self._waiting.insert(0, spec)
            return None
        self._began[spec.name] = time.monotonic()
        return spec.on(allocation)

    def finish(
        self, spec: TrialSpec, settle: Callable[[TrialSpec], object] = lambda spec: None
    ) -> bool:
        """Free the devices of a trial and tell its proposer what its journal says; return whether
        the trial is over.

        It is not if it has lost its node: then it starts again. `settle` writes an end that the
        journal may lack.
        """
        self._pool.give(spec.slot)
        wall_s = time.monotonic() - self._began.pop(spec.name)
        settle(spec)
        if record.was_lost(spec.folder):
            self._waiting.insert(0, spec)
            return False
        self._proposer.tell(spec, record.read_trial(spec.folder), wall_s)
        self._exhausted = self._exhausted and not self._reconsiders
        return True


def run(proposer: Proposer, pool: Pool, listeners: Listeners) -> None:
    """Run all trials of a proposer, one after the other. Raises `OSError` when the disk is full."""
    dispatcher, announced = Dispatcher(proposer, pool, listeners.may_start), set[str]()
    while (spec := dispatcher.start()) is not None or not dispatcher.over:
        if spec is None:  # the nodes have no room for it yet
            time.sleep(1.0)
            continue
        if spec.name not in announced:
            announced.add(spec.name)
            listeners.tell("start", spec.name, spec.drawn)
        for point in trial.run_trial_on_slot(spec):
            listeners.tell("point", spec.name, {**point, "slot": spec.slot})
        if dispatcher.finish(spec):
            listeners.tell("end", spec.name, spec.drawn)


class Searcher(RaySearcher):  # type: ignore[misc]
    """The loop as Ray Tune drives it: suggests trials with their slots, and takes note of their
    ends.

    It writes the end of a trial that Tune stopped or whose driver died.
    """

    def __init__(
        self,
        proposer: OptunaProposer,
        pool: Pool,
        may_start: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__("objective", proposer.space.mode)
        self.proposer = proposer
        self._dispatcher = Dispatcher(
            proposer, pool, may_start, reconsiders=proposer.space.reruns > 0
        )
        self.broken: Exception | None = None
        """Why journals or study could not be written: no further trial is suggested."""
        self._running: dict[str, TrialSpec] = {}  # by Tune's trial id

    def __getstate__(self) -> dict[str, object]:
        # Tune keeps a pickled copy of all it was given; nobody reads it, and all that matters is on
        # disk
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: journals and study are on disk."""

    def suggest(self, trial_id: str) -> dict[str, object] | str | None:
        """Return the next trial as Tune's parameters; FINISHED when none will come. None: Tune asks
        again."""
        spec = None
        if self.broken is None:
            try:
                spec = self._dispatcher.start()
            except self.proposer.FAULTS as error:
                self.broken = error
        if spec is None:
            over = self.broken is not None or self._dispatcher.over
            return str(RaySearcher.FINISHED) if over else None
        self._running[trial_id] = spec
        return {**spec.drawn, "trial": spec.name, SPEC: spec}

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Keep the curve in the study."""
        if (spec := self._running.get(trial_id)) is not None:
            self.proposer.report(spec, result)

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Report to Optuna what the journal says; `error`: the driver died."""
        if (
            spec := self._running.pop(trial_id, None)
        ) is None:  # Tune reports an end again when that failed
            return
        try:
            self._dispatcher.finish(spec, lambda spec: self._settle(spec, error))
        except (
            self.proposer.FAULTS
        ) as fault:  # a resumed search brings the study up to the journals
            self.broken = fault

    def _settle(self, spec: TrialSpec, error: bool) -> None:
        """Write the end of a trial where its workers neither did nor will: it was stopped early, or
        lost its driver."""
        trial_record = settled(spec.folder, self.proposer.space.baseline.evaluation.points)
        if record.was_lost(spec.folder) or (
            trial_record is not None and trial_record.status is not None
        ):
            return
        # The probe is small: a disk that is too full for a checkpoint may have room for it.
        experiment = self.proposer.experiment
        if (
            error
            and (why := environment.unwritable(experiment) or record.disk_fault(spec.folder))
            is not None
        ):
            raise OSError(
                why
            )  # no fault of the trial: it stays without an end, and a resumed search takes it up
        died = End("error", "its driver died", process_died=True)
        Journal(spec.folder).end_trial(
            died if error else ended_early(self.proposer.space, trial_record)
        )
