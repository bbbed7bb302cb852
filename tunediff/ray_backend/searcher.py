"""`loop.Dispatcher` as Ray Tune drives it, and a trial's driver. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.result import RESULT_DUPLICATE
from ray.tune.search import Searcher as RaySearcher

from tunediff.core import disk
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.core.outcomes import Status
from tunediff.core.trial_record import End
from tunediff.ray_backend.slot import RaySlot
from tunediff.tuning.backend import Backend, Reported
from tunediff.tuning.loop import Dispatcher
from tunediff.tuning.trial import SPEC, run_trial_on_slot
from tunediff.tuning.trial_spec import TrialSpec

if TYPE_CHECKING:
    from tunediff.tuning.optuna_proposer import OptunaProposer


class Searcher(RaySearcher):  # type: ignore[misc]
    """The loop as Ray Tune drives it: suggests trials with slots, and notes their ends.

    It writes the end of a trial that Tune stopped or whose driver died.
    """

    def __init__(
        self,
        proposer: OptunaProposer,
        backend: Backend,
    ) -> None:
        super().__init__("objective", proposer.space.mode)
        self.proposer = proposer
        self._dispatcher = Dispatcher(proposer, backend)
        self.broken: OSError | None = None
        """Why journals or study could not be written: no further trial is suggested."""
        self._running: dict[str, TrialSpec] = {}  # by Tune's trial id

    def __getstate__(self) -> dict[str, object]:
        # Tune keeps a pickled copy of all it was given, which nobody reads: all is on disk
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: journals and study are on disk."""

    def suggest(self, trial_id: str) -> dict[str, object] | str | None:
        """Return the next trial as Tune's parameters; FINISHED: none comes; None: ask again."""
        spec = None
        if self.broken is None:
            try:
                spec = self._dispatcher.start()
            except OSError as error:
                self.broken = error
        if spec is None:
            over = self.broken is not None or self._dispatcher.is_over
            return str(RaySearcher.FINISHED) if over else None
        self._running[trial_id] = spec
        return {SPEC: spec}

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
        except OSError as fault:  # a resumed search knows what the journals say
            self.broken = fault

    def _settle(self, spec: TrialSpec, error: bool) -> None:
        """Write a trial's end where its workers will not: stopped early, or driver lost."""
        trial_record = record.read_trial(spec.folder)
        if record.was_lost(spec.folder) or (
            trial_record is not None and trial_record.status is not None
        ):
            return
        # Not even the line of a fault may have found room
        experiment = self.proposer.experiment
        if error and (fault := disk.recorded_fault(spec.folder) or disk.unwritable(experiment)):
            raise fault  # not the trial's: it has no end, and a resumed search takes it up
        died = End(Status.ERROR, "its driver died", process_died=True)
        end = died if error else End(Status.PRUNED)
        Journal(spec.folder).end_trial(end)


class Driver(tune.Trainable):  # type: ignore[misc]
    """Run trials one by one in a process, which takes seconds to start; a `step` is one point.

    A scheduler that stops a trial calls no further `step`; `Dispatcher.finish` ends its
    processes. A driver that is started again after a kill attaches to the running job, or finds in
    the journal that all is done.
    """

    def reset_config(self, new_config: Mapping[str, Any]) -> bool:
        spec = new_config[SPEC]
        self._points = run_trial_on_slot(spec, RaySlot(spec.actor))
        return True

    setup = reset_config

    def step(self) -> Reported:
        # the end brings no numbers of its own
        return next(self._points, {"done": True, RESULT_DUPLICATE: True})
