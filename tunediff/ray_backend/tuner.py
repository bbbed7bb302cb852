"""Run a search through Ray Tune."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from tunediff.core.disk import unwritable
from tunediff.core.listeners import Listeners
from tunediff.core.logs import errors_only
from tunediff.core.progress import log_exceptions
from tunediff.core.trial_record import read_begun, read_trials
from tunediff.ray_backend.cluster import beside
from tunediff.ray_backend.searcher import Driver, Searcher
from tunediff.search_space import SearchSpace
from tunediff.tuning import sessions
from tunediff.tuning.backend import Backend
from tunediff.tuning.optuna_proposer import OptunaProposer
from tunediff.tuning.stopping import EarlyStopping, early_stopping
from tunediff.tuning.trial import SPEC


def search(
    folder: Path, space: SearchSpace, backend: Backend, before_s: float, listeners: Listeners
) -> None:
    """Run trials until a limit is reached; `before_s`: wall-clock of the sessions before this one.

    Raises `OSError` where the folder cannot be written any more.
    """
    with errors_only("optuna", "ray.tune"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="optuna|ray")
        proposer = OptunaProposer(space, folder, before_s, device=backend.device)
        searcher = Searcher(proposer, backend)
        try:
            shown = backend.listeners(folder, space)
            with listeners.with_listeners(*shown, sessions.SessionNotes(folder)):
                _tuner(folder, space, searcher, listeners).fit()
        except Exception as error:  # Tune's own, which need not name its cause
            if (fault := unwritable(folder)) is None:
                raise
            raise fault from error
        finally:
            log_exceptions("the study", proposer.study.write, folder / "study.db")
    if searcher.broken is not None:
        raise searcher.broken


def _tuner(
    folder: Path, space: SearchSpace, searcher: Searcher, listeners: Listeners
) -> tune.Tuner:
    session = len(list((folder / "tune").glob("*")))
    rule = early_stopping(space, read_trials(folder))
    return tune.Tuner(
        tune.with_resources(Driver, driver_resources()),
        tune_config=tune.TuneConfig(
            num_samples=-1,  # the searcher knows the limits, and how many run at once
            search_alg=searcher,
            scheduler=EarlyStoppingScheduler(rule) if rule is not None else None,
            metric="objective",
            mode=space.mode,
            trial_name_creator=trial_name,
            trial_dirname_creator=trial_name,
            reuse_actors=True,  # a new driver process per trial costs seconds
        ),
        run_config=tune.RunConfig(
            name=f"session-{session}",
            storage_path=str(folder / "tune"),
            verbose=0,
            callbacks=[_Events(listeners)],
            # the workers keep their own
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            # a killed driver comes back and finds its workers busy
            # One death; between two trials Tune counts it twice, of the reset and of the step
            failure_config=tune.FailureConfig(max_failures=2),
        ),
    )


def driver_resources() -> tune.PlacementGroupFactory:
    """Return a trial's driver's resources, on the search's node: lost nodes have none."""
    node_id = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    # A head may have no CPUs; every node has one unit of a resource named after its address.
    resources = (
        {"CPU": 0.01}
        if node["Resources"].get("CPU")
        else {f"node:{node['NodeManagerAddress']}": 0.001}
    )
    return tune.PlacementGroupFactory([resources], bundle_label_selector=[beside()])


class EarlyStoppingScheduler(FIFOScheduler):  # type: ignore[misc]
    """Early stopping as Tune asks for it."""

    def __init__(self, rule: EarlyStopping) -> None:
        super().__init__()
        self._rule = rule

    def __getstate__(self) -> dict[str, object]:
        return {}  # Tune keeps a pickled copy of all it was given; nobody reads it

    def on_trial_result(self, tune_controller: Any, trial: Any, result: Mapping[str, Any]) -> str:
        stops = self._rule.stops(trial.config[SPEC], result)
        return str(TrialScheduler.STOP if stops else TrialScheduler.CONTINUE)


class _Events(TrialProgressCallback):  # type: ignore[misc]
    """Pass Tune's events to the listeners; Tune calls the hooks by keyword."""

    def __init__(self, listeners: Listeners) -> None:
        super().__init__()
        self._listeners = listeners

    def __getstate__(self) -> dict[str, object]:
        # Tune keeps a pickled copy of all it was given; threads cannot be pickled
        return {"_listeners": None}

    def _tell(self, event: str, trial: Any, point: Mapping[str, Any] | None = None) -> None:
        spec = trial.config[SPEC]
        self._listeners.tell(
            event, spec.name, {**(point or read_begun(spec.folder).drawn), "slot": spec.slot}
        )

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self._tell("start", trial)

    def on_trial_result(
        self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any
    ) -> None:
        self._tell("point", trial, result)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self._tell("end", trial)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self._tell("end", trial)


def trial_name(trial: Any) -> str:
    """Return a trial's name for Ray's folders."""
    return str(trial.config[SPEC].name)
