"""Ray Tune's searcher: an adapter of Tune's hooks to a dispatcher of Optuna's proposals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.tune.search import Searcher as RaySearcher

from tunediff.core import environment
from tunediff.core import trial_record as record
from tunediff.core.trial_record import End, TrialRecord
from tunediff.tuning import messages
from tunediff.tuning.loop import Dispatcher
from tunediff.tuning.optuna_proposer import OptunaProposer
from tunediff.tuning.pool import Pool
from tunediff.tuning.study_file import FAULTS
from tunediff.tuning.trial import SPEC, settled
from tunediff.tuning.trial_spec import TrialSpec

GRACE = 0.5
"""Share of its budget that every trial gets before it may be stopped early."""


class Searcher(RaySearcher):  # type: ignore[misc]
    """Suggest trials with their slots, and write the end of a trial that Tune stopped or whose driver died."""

    def __init__(self, proposer: OptunaProposer, pool: Pool) -> None:
        super().__init__("objective", proposer.space.mode)
        self.proposer, self._dispatcher = proposer, Dispatcher(proposer, pool)
        self.broken: Exception | None = None
        """Why journals or study could not be written: no further trial is suggested."""
        self._running: dict[str, TrialSpec] = {}  # by Tune's trial id

    def __getstate__(self) -> dict[str, object]:
        return {}  # Tune keeps a pickled copy of all it was given; nobody reads it, and all that matters is on disk

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: journals and study are on disk."""

    def suggest(self, trial_id: str) -> dict[str, object] | str | None:
        """Return the next trial as Tune's parameters; FINISHED when none will come. None: Tune asks again."""
        spec = None
        if self.broken is None:
            try:
                spec = self._dispatcher.start()
            except FAULTS as error:
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

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        """Report to Optuna what the journal says; `error`: the driver died."""
        if (spec := self._running.pop(trial_id, None)) is None:  # Tune reports an end again when that failed
            return
        try:
            self._dispatcher.finish(spec, lambda spec: self._settle(spec, error))
        except FAULTS as fault:  # a resumed search brings the study up to the journals
            self.broken = fault

    def _settle(self, spec: TrialSpec, error: bool) -> None:
        """Write the end of a trial where its workers neither did nor will: it was stopped early, or lost its driver."""
        trial_record = settled(spec.folder, self.proposer.space.baseline.evaluation.points)
        if record.was_lost(spec.folder) or (trial_record is not None and trial_record.finished):
            return
        # The probe is small: a disk that is too full for a checkpoint may have room for it.
        experiment = self.proposer.experiment
        if error and (why := environment.unwritable(experiment) or record.disk_fault(spec.folder)) is not None:
            raise OSError(why)  # no fault of the trial: it stays without an end, and a resumed search takes it up
        messages.end(spec.folder, End("error", "its driver died") if error else self._pruned(trial_record))

    def _pruned(self, trial_record: TrialRecord | None) -> End:
        """Return the end of a trial that the scheduler stopped; its reason says how long no trial is stopped."""
        space = self.proposer.space
        budget_s = trial_record.budget_s if trial_record is not None else None
        points = trial_record.points if trial_record is not None else []
        after = f" after {points[-1].train_s:.1f} s" if points else ""
        grace_s = GRACE * (budget_s or space.longest_s)
        why = f"stopped by {space.early_stopping}{after}; no trial is stopped before {grace_s:.1f} s, while "
        why += "compilation, warm-up and EMA still make curves cross, nor within the noise of the best"
        return End("pruned", why)
