"""The process of a training outside any search, which `train_run` starts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NoReturn

from tunediff import config as cfg
from tunediff.config import ConfigError, Systems, code
from tunediff.config.code import WorkloadError
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.clock import Budget
from tunediff.core.errors import TunediffError, UserCodeError
from tunediff.core.journal import Journal
from tunediff.core.outcomes import Status
from tunediff.core.progress import EventLines
from tunediff.distributed import World, world_of_environment
from tunediff.training import weights
from tunediff.training.console import ConsoleRecorder
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.outcome import TrialResult, run_trial
from tunediff.training.stop_signals import stop_signals
from tunediff.training.trial import TrainingOutcome
from tunediff.training.trial import run as run_engine

log = logging.getLogger(__name__)

CHECKPOINT_EVERY_S = 60.0


def train(
    config: Systems, folder: Path, budget: Budget, initial: Path | None, lines: EventLines
) -> str:
    """Train as one rank, from a checkpoint if there is one; return why it stopped, or ''.

    Raises `ConfigError`, `WorkloadError`, and `TunediffError` for a training that failed.
    """
    # Other ranks wait here for rank 0, whose parent has written what they read
    with world_of_environment() as world, stop_signals() as signals, lines.work(world.main):
        trial = record.read_trial(folder)
        if trial is not None and trial.status == Status.OK:
            return ""

        # ---- journal and curves, on rank 0
        weights_of = _weights(initial, config) if initial is not None else None
        observer: Observer = Observer(signals)
        if world.main:
            done = trial.points[-1].samples if trial is not None and trial.points else None
            observer = ConsoleRecorder(folder, cfg.of(config), done, signals, lines=lines)

        # ---- train
        engine = Engine(
            config, budget, world, observer, folder=folder,
            checkpoint_every_s=CHECKPOINT_EVERY_S, initial=weights_of,
            not_captured=trial.not_captured if trial is not None else "",
        )  # fmt: skip
        journal = Journal(folder)
        try:
            result = run_trial(lambda: run_engine(engine), world, folder)
        finally:
            if isinstance(observer, ConsoleRecorder):
                observer.close()
        if (outcome := result.outcome) is None:
            _fail(result, config, journal, world)

        if world.main:
            _conclude(result, outcome, config, journal)
        if outcome.finished:
            return ""
        steps, path = text.pluralize(outcome.steps, "step"), folder / weights.NAME
        return f"stopped after {steps}; the same command again goes on\nweights: {path}"


def _conclude(
    result: TrialResult, outcome: TrainingOutcome, config: Systems, journal: Journal
) -> None:
    """Write the weights of an ended or stopped training, and the `end` of an ended one."""
    metadata = weights.about(config, journal.folder, outcome.steps)
    weights.save(outcome.weights, journal.folder / weights.NAME, metadata)
    if outcome.reason:
        log.warning("%s", outcome.reason)
    if outcome.unread:
        log.warning("train(trial) never reads %s: not effective", ", ".join(outcome.unread))
    if outcome.finished:
        assert result.end is not None
        journal.end(result.end)


def _fail(result: TrialResult, config: Systems, journal: Journal, world: World) -> NoReturn:
    """Raise why a training failed; write an `end` for status `nan` and `oom`.

    Raises `TunediffError`, `OSError` of the disk, and any error of a shipped workload as it is.
    """
    end, error = result.end, result.error
    if end is not None and end.status == Status.NAN:  # on all ranks alike
        if world.main:
            journal.end(end)
        raise record.NotFiniteError(end.reason)
    assert error is not None
    of_disk = end is None and isinstance(error, OSError)  # whatever wrote to it
    if of_disk or isinstance(error, ConfigError | WorkloadError):
        raise error
    if end is not None and end.status == Status.OOM:
        journal.end(end)
        raise TunediffError(f"out of memory: {' '.join(end.reason.split())}") from error
    if cfg.of(config).file is None:
        raise error
    raise UserCodeError(code.trace(error).rstrip("\n")) from error  # the lines of the user


def _weights(path: Path, config: Systems) -> Any:
    """Return the weights to start from. Raises `ConfigError`."""
    tensors = weights.read(path)
    make = cfg.of(config).get_hook("network")
    if make is not None and weights.FROZEN_BASE not in tensors:
        with weights.refused(str(path)):
            make(config.knobs).load_state_dict(tensors)
    return tensors
