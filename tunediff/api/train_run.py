"""Train one configuration outside any search, in this process, and read the result."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tunediff import config as cfg
from tunediff.api.stop_signals import stop_signals
from tunediff.api.train_setup import INITIAL, TrainRequest, check_folder, starts_over
from tunediff.config import ConfigError, Metric, Systems, Workload, code, copies
from tunediff.config.code import WorkloadError
from tunediff.core import lock, remote, remote_lock, text
from tunediff.core import trial_record as record
from tunediff.core.errors import FAILED, TunediffError, UserCodeError, message_of
from tunediff.core.files import write_text
from tunediff.core.journal import Journal
from tunediff.core.listeners import Activity, Listeners
from tunediff.core.point import Point
from tunediff.core.progress import EventLines

if TYPE_CHECKING:
    from tunediff.distributed import World
    from tunediff.training.run_trial import TrialResult
    from tunediff.training.trial import TrainingOutcome

log = logging.getLogger(__name__)

CHECKPOINT_EVERY_S = 60.0


def run(request: TrainRequest, lines: EventLines) -> str:
    """Train, or go on with a training, as one rank of it; return why it stopped before its end, ''
    if it did not.

    Raises `ConfigError`, `WorkloadError`, `TunediffError` for a training that failed, and
    `KeyboardInterrupt`.
    """
    folder, again = request.folder, "the same command again"
    try:
        if os.environ.get("RANK", "0") != "0":  # waits for rank 0 before it reads anything
            return _train(request, lines)
        remote.check(folder.parent)
        with _alone(folder):
            _recheck_folder(request)
            objective = cfg.of(request.config).objective.name
            activity = Activity("train", folder, again, objective, {}, request.track)
            with (
                remote_lock.held(folder, fetch=lambda: _fetch(request)) as held,
                Listeners(held).opened(activity, lines.aside.say),
            ):
                return _train(request, lines)
    except KeyboardInterrupt:
        message = f"interrupted; {again} resumes from the last checkpoint"
        raise KeyboardInterrupt(message) from None


def _alone(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Return the lock of a training's folder, and nothing for one that has ended, whose folder may
    be read-only."""
    trial = record.read_trial(folder)
    if trial is not None and trial.status == "ok":
        return contextlib.nullcontext()
    return lock.alone(folder, "--out", f"--out: {folder} is trained by another process")


def _fetch(request: TrainRequest) -> None:
    """Fetch what is at the address of the training. Raises `ConfigError` if that is another one."""
    remote.pull(request.folder, heavy=True)
    _recheck_folder(request)


def _recheck_folder(request: TrainRequest) -> None:
    """Check the folder again under its lock, since another process may have trained in it, and
    remove a journal without a point, and the copy of the workload beside it.

    Raises `ConfigError` if the folder holds another training.
    """
    folder = request.folder
    check_folder(request)
    trial = record.read_trial(folder)
    if trial is not None and starts_over(trial, folder):
        # The user's file may be mended now, or after this attempt.
        cfg.remove_copy(request.config, folder)
        (folder / record.JOURNAL).unlink()


def _train(request: TrainRequest, lines: EventLines) -> str:
    from tunediff.distributed import from_environment
    from tunediff.training import weights
    from tunediff.training.console import ConsoleRecorder
    from tunediff.training.engine import Engine
    from tunediff.training.observer import Observer
    from tunediff.training.run_trial import run_trial
    from tunediff.training.trial import run as run_engine

    config, folder, budget = request.config, request.folder, request.budget
    with from_environment() as world, stop_signals() as signals, lines.work(world.main):
        _check_processes(request, world)
        trial = record.read_trial(folder)
        if trial is not None and trial.status == "ok":
            return ""

        # ---- journal and curves, on rank 0
        initial = _weights(request.initial, config) if request.initial is not None else None
        observer, journal = Observer(signals), Journal(folder)
        if world.main:
            done = trial.points[-1].samples if trial is not None and trial.points else None
            observer = ConsoleRecorder(folder, cfg.of(config), done, signals, lines=lines)
            config = cfg.take_along(config, folder)
            journal.start(config, request.identity(), budget.seconds)
            write_text(folder / "config.yaml", cfg.dump(config, folder=folder))
            # Weights of an earlier stop: the checkpoint knows more.
            (folder / weights.NAME).unlink(missing_ok=True)
            if budget.open_ended:
                log.info("open-ended: Ctrl-C stops it, the same command goes on")

        # ---- train
        engine = Engine(
            config,
            budget,
            world,
            observer,
            folder=folder,
            checkpoint_every_s=CHECKPOINT_EVERY_S,
            initial=initial,
        )
        file = cfg.of(config).file if world.main else None
        copied = (
            copies.adding(folder / code.FOLDER, file.entry) if file else contextlib.nullcontext()
        )
        try:
            with copied:
                result = run_trial(lambda: run_engine(engine), world)
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


def _check_processes(request: TrainRequest, world: World) -> None:
    """Refuse another number of processes than the configuration needs. Raises `ConfigError`."""
    parallel = request.config.parallel
    if world.size != parallel.processes:
        started = text.pluralize(world.size, "process", "processes")
        other = "strategy=ddp" if parallel.together else f"workers={world.size}"
        raise ConfigError(
            f"parallel.workers: {parallel.workers} is not allowed with {started}; start it as"
            f" {request.command}, or set parallel.{other}"
        )


def _conclude(
    result: TrialResult, outcome: TrainingOutcome, config: Systems, journal: Journal
) -> None:
    """Write the weights of a training that has ended or was stopped, and the `end` of one that has
    ended."""
    from tunediff.training import weights

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

    Raises `TunediffError`, and any error of a shipped workload as it is. Ends the process of one
    rank among several.
    """
    end, error = result.end, result.error
    if end is not None and end.status == "nan":  # on all ranks alike
        if world.main:
            journal.end(end)
        raise record.NotFiniteError(end.reason)
    assert error is not None
    if isinstance(error, ConfigError | WorkloadError):
        raise error
    failure: TunediffError
    if end is not None and end.status == "oom":
        journal.end(end)
        failure = TunediffError(f"out of memory: {' '.join(end.reason.split())}")
    elif cfg.of(config).file is not None:
        failure = UserCodeError(code.trace(error).rstrip("\n"))  # the lines of the user
    else:
        raise error
    if world.size > 1:
        print(message_of(failure), file=sys.stderr, flush=True)
        os._exit(FAILED)  # the others may wait for this rank in a collective
    raise failure from error


def _weights(path: Path, config: Systems) -> Any:
    """Return the weights to start from. Raises `ConfigError`."""
    from tunediff.training import weights

    workload = cfg.of(config)
    try:
        if (read := workload.get_hook("initial_weights")) is not None:
            return read(path, config.knobs)
        tensors = weights.read(path)
        if (network := workload.get_hook("network")) is not None:
            weights.check_fit(tensors, network(config.knobs), str(path))
    except ConfigError as error:
        raise ConfigError(f"--initial: {error}; allowed: {INITIAL}") from None
    return tensors


# ---- result
def values(folder: Path) -> dict[str, Any]:
    """Return the result of a finished training, as it is printed."""
    trial, workload, metric, last = _finished(folder)
    return {
        str(last.get("label", metric.label)): last[metric.name],
        "train_s": last.train_s,
        workload.unit: last.samples,
        "steps": last.steps,
        **{f"{part}_s": spent for part, spent in trial.end.seconds.items() if part != "train"},
        "weights": folder / "weights.safetensors",
        **{path.name: path for path in sorted(folder.glob("*.png"))},
        "journal": folder / record.JOURNAL,
    }


def as_json(folder: Path) -> dict[str, Any]:
    """Return the result of a finished training as `--json` prints it."""
    trial, workload, metric, last = _finished(folder)
    parts = ("data_wait", "compile", "evaluation", "checkpoint", "setup")
    return {
        "metric": str(last.get("label", metric.label)),
        "objective": metric.name,
        "value": last[metric.name],
        "train_s": last.train_s,
        "samples": last.samples,
        "unit": workload.unit,
        "steps": last.steps,
        **{f"{part}_s": trial.end.seconds.get(part) for part in parts},
        "weights": folder / "weights.safetensors",
        "pictures": sorted(map(str, folder.glob("*.png"))),
        "journal": folder / record.JOURNAL,
    }


def _finished(folder: Path) -> tuple[Any, Workload, Metric, Point]:
    """Return record, workload, metric and last point of a training. Raises `ConfigError` where it
    is not finished."""
    trial = record.read_trial(folder)
    if trial is None or trial.end is None or not trial.points:
        raise ConfigError(f"{folder}: the training has not ended")
    workload = cfg.of(trial.configuration)
    return trial, workload, workload.objective, trial.points[-1]
