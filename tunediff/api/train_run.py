"""Train one configuration outside any search, and read the result. Imports no torch.

The training runs in a process of its own, `train_process`; torchrun starts this for each rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.api.train_setup import TrainRequest, check_folder, starts_over
from tunediff.config import ConfigError, Metric, Workload
from tunediff.core import lock, remote, text
from tunediff.core import trial_record as record
from tunediff.core.files import write_text
from tunediff.core.journal import Journal
from tunediff.core.listeners import Activity, Listeners
from tunediff.core.outcomes import Status
from tunediff.core.point import Point
from tunediff.core.progress import EventLines
from tunediff.models import WEIGHTS
from tunediff.tuning import foreground

log = logging.getLogger(__name__)

PROCESS = "tunediff.api.train_process"


def run(request: TrainRequest, lines: EventLines) -> str:
    """Train as one rank, from a checkpoint if there is one; return why it stopped, or ''.

    Raises `ConfigError`, `WorkloadError`, `TunediffError` for a training that failed, and
    `KeyboardInterrupt`.
    """
    folder, again = request.folder, "the same command again"
    try:
        _check_processes(request)
        if _rank() != 0:  # its process waits for rank 0
            return _train(request, lines)
        remote.check(folder.parent)
        with _alone(folder):
            remote.pull(folder, heavy=True)
            _recheck_folder(request)
            objective = cfg.of(request.config).objective.name
            activity = Activity("train", folder, again, objective, {}, request.track)
            with Listeners().opened(activity, lines.aside.say):
                return _train(request, lines)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {again} resumes from the last checkpoint") from None


def _alone(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Return the lock of a training's folder; none for an ended one, perhaps read-only."""
    trial = record.read_trial(folder)
    if trial is not None and trial.status == Status.OK:
        return contextlib.nullcontext()
    return lock.alone(folder, "--out", f"--out: {folder} is trained by another process")


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
    """Train in a process of its own, one for each rank. `request`: of rank 0, under its lock."""
    folder, is_main = request.folder, _rank() == 0
    trial = record.read_trial(folder)
    finished = trial is not None and trial.status == Status.OK
    if finished and _ranks() == 1:
        log.info("%s has ended: nothing is trained", folder.name)
        return ""
    if is_main and not finished:
        request = _begun(request)
    workload = request.config.schema.workload
    stopped: str = foreground.call(f"{PROCESS}:train", request, workload, lines)
    return stopped


def _begun(request: TrainRequest) -> TrainRequest:
    """Write that an attempt begins, and return the request with the copy of the user's file."""
    folder, budget = request.folder, request.budget
    config = cfg.take_along(request.config, folder)
    Journal(folder).start(config, request.identity(), budget.seconds)
    write_text(folder / "config.yaml", cfg.dump(config, folder=folder))
    # Weights of an earlier stop: the checkpoint knows more.
    (folder / WEIGHTS).unlink(missing_ok=True)
    if budget.open_ended:
        log.info("open-ended: Ctrl-C stops it, the same command goes on")
    return dataclasses.replace(request, config=config)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _check_processes(request: TrainRequest) -> None:
    """Refuse another number of processes than the configuration needs. Raises `ConfigError`."""
    parallel, ranks = request.config.parallel, _ranks()
    if ranks != parallel.processes:
        started = text.pluralize(ranks, "process", "processes")
        other = "strategy=ddp" if parallel.together else f"workers={ranks}"
        raise ConfigError(
            f"parallel.workers: {parallel.workers} is not allowed with {started}; start it as"
            f" {request.command}, or set parallel.{other}"
        )


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
        "weights": folder / WEIGHTS,
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
        "weights": folder / WEIGHTS,
        "pictures": sorted(map(str, folder.glob("*.png"))),
        "journal": folder / record.JOURNAL,
    }


def _finished(folder: Path) -> tuple[Any, Workload, Metric, Point]:
    """Return record, workload, metric, last point. Raises `ConfigError` if unfinished."""
    trial = record.read_trial(folder)
    if trial is None or trial.end is None or not trial.points:
        raise ConfigError(f"{folder}: the training has not ended")
    workload = cfg.of(trial.configuration)
    return trial, workload, workload.objective, trial.points[-1]
