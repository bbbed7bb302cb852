"""Train one configuration outside any search, and read the result. Imports no torch.

`prepare` refuses what would fail later and makes the folder; `run` trains in a process of its own,
`train_process`; torchrun starts this for each rank.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.api.options import TRACK_HELP, UNIT_HELP, check_files, trainable
from tunediff.config import ConfigError, Systems
from tunediff.core import lock, machine, remote, text
from tunediff.core import trial_record as record
from tunediff.core.clock import Budget, UnitName, seconds_per_device
from tunediff.core.files import write_text
from tunediff.core.journal import Journal
from tunediff.core.listeners import Activity, Listeners
from tunediff.core.options import REQUIRED, allow, check_name, option, words_option, writing
from tunediff.core.outcomes import Status
from tunediff.core.progress import EventLines
from tunediff.experiment.model import Seconds, kind_of
from tunediff.integrations import tracking
from tunediff.models import WEIGHTS
from tunediff.report.listener import LISTENERS
from tunediff.search_space.sections import Service
from tunediff.training.knobs import Optimized
from tunediff.tuning import foreground

log = logging.getLogger(__name__)

INITIAL = "weights in a .safetensors file"


class TrainOptions(remote.StorageOptions):
    """What is asked of a training."""

    config: Path = option(
        REQUIRED,
        "configuration file, such as an exported best.yaml; or digits, cifar10 or mine.py for a"
        " workload's baseline",
    )
    words: tuple[str, ...] = words_option("changes to the configuration", "knob=value")
    budget: Seconds | None = option(None, "training seconds, e.g. 90s, 10m, 8h", metavar="SECONDS")
    unit: UnitName | None = option(None, UNIT_HELP)
    samples: int | None = option(
        None,
        "training samples, instead of or besides the budget: whichever comes first ends it",
        ge=1,
    )
    name: str | None = option(
        None, "name of its folder in the folder of all trainings (default: train-CONFIG)"
    )
    out: str | Path | None = option(None, "folder of the run, anywhere, instead of a name")
    track: Service | None = option(None, TRACK_HELP)
    initial: str | Path | None = option(None, "weights to start from: a .safetensors file")
    every: Seconds | None = option(
        None,
        "without a budget: training seconds from one evaluation to the next (default: 10m)",
        metavar="SECONDS",
    )


@dataclasses.dataclass(frozen=True)
class TrainRequest:
    """A training that has been checked and may start or go on."""

    config: Systems
    budget: Budget
    folder: Path
    initial: Path | None
    track: str | None = None
    """The service that shows it as a run."""

    def identity(self) -> dict[str, Any]:
        """Return what, besides configuration and seconds, a training that goes on has equal."""
        initial = str(self.initial) if self.initial is not None else None
        values = {"samples": self.budget.samples, "initial": initial}
        return values | ({"open_ended": True} if self.budget.open_ended else {})


# ---- set-up
def prepare(options: TrainOptions, words: Sequence[str] = ()) -> TrainRequest:
    """Check what is asked for and make the folder of the training. Raises `ConfigError`.

    `words`: of the command line, with which torchrun should start it.
    """
    tracking.check(options.track)
    config = _captured(trainable(options.config, options.words), options)
    _check_processes(config, words)
    initial = Path(options.initial).absolute() if options.initial is not None else None
    allow(initial is None or initial.exists(), "--initial", options.initial, INITIAL)
    folder = _folder(options).absolute()
    request = TrainRequest(config, _budget(options, config), folder, initial, options.track)
    check_files(config, evaluates=True)
    machine.warn_emulated([config.precision.amp])
    allowed = "a folder without a search or comparison"
    allow(kind_of(folder) is None, "--out", text.shown(folder), allowed)
    with writing("--out", _folder(options)):
        folder.mkdir(parents=True, exist_ok=True)
    return request


def _captured(config: Systems, options: TrainOptions) -> Systems:
    """Return a workload's baseline with its step captured where a GPU trains it, if that learns the
    same; as it is where words name `compile.` knobs, or a file says how it trains."""
    named = options.config.suffix in (".yaml", ".yml")
    if named or not machine.gpus() or any(word.startswith("compile.") for word in options.words):
        return config
    return cfg.override(config, {"compile.capture": "auto"})


def _check_processes(config: Systems, words: Sequence[str]) -> None:
    """Refuse another number of processes than the configuration needs. Raises `ConfigError`."""
    parallel, ranks = config.parallel, _ranks()
    if ranks != parallel.processes:
        started = text.pluralize(ranks, "process", "processes")
        other = "strategy=ddp" if parallel.together else f"workers={ranks}"
        raise ConfigError(
            f"parallel.workers: {parallel.workers} is not allowed with {started}; start it as"
            f" {text.original_command('train', words, parallel.processes)}, or set parallel.{other}"
        )


def _folder(options: TrainOptions) -> Path:
    """Return the folder of the run. Raises `ConfigError`."""
    if options.name is None:
        config = options.config
        # Each search has a best.yaml
        of_search = config.is_file() and config.absolute().with_name("trials").is_dir()
        name = f"{config.absolute().parent.name}-{config.stem}" if of_search else config.stem
        return Path(options.out or Path(options.storage, f"train-{name}"))
    allow(options.out is None, "--name", options.name, "without --out, which names any folder")
    check_name(options.name)
    return Path(options.storage, options.name)


def _budget(options: TrainOptions, config: Systems) -> Budget:
    """Return the budget that the options give. Raises `ConfigError`."""
    seconds, samples, every = options.budget, options.samples, options.every
    allow(options.unit is None or seconds is not None, "--unit", options.unit, "with --budget")
    if seconds is not None or samples is not None:
        allowed = "without --budget and --samples; with them, set evaluation.points"
        allow(every is None, "--every", every and text.format_exact(every), allowed)
        if seconds is None:
            return Budget(None, samples)
        return Budget(seconds_per_device(seconds, options.unit or "wall", config.devices), samples)
    # A user's own section may have that name as well, and knobs that mean something else
    optimizer = getattr(config.knobs, "optimizer", None)
    if isinstance(optimizer, Optimized):
        allowed = "constant without --budget or --samples: others need an end to fall towards"
        allow(optimizer.decay == "constant", "optimizer.decay", optimizer.decay, allowed)
    # Schedules follow fractions of a budget: an open-ended training has that of its first
    # `evaluation.points` rounds.
    first_s = (every or 600.0) * config.evaluation.points
    return Budget(first_s, open_ended=True)


# ---- run
def run(request: TrainRequest, lines: EventLines) -> str:
    """Train as one rank, from a checkpoint if there is one; return why it stopped, or ''.

    Raises `ConfigError` also for a folder that holds another training, `WorkloadError`,
    `TunediffError` for a training that failed, and `KeyboardInterrupt`.
    """
    folder, again = request.folder, "the same command again"
    workload, objective = request.config.schema.workload, cfg.of(request.config).objective.name
    try:
        if int(os.environ.get("RANK", "0")) != 0:  # its process waits for rank 0
            return foreground.call(_process, request, workload, lines)
        remote.check(folder.parent)
        with lock.exclusive_lock(folder, "--out", f"--out: {folder} is trained by another process"):
            remote.pull(folder, heavy=True)
            activity = Activity("train", folder, again, objective, {}, request.track)
            trial = _held(request)
            with Listeners(*LISTENERS).opened(activity, lines.aside.say):
                if trial is None or trial.status != Status.OK:
                    request = _begun(request)
                elif _ranks() == 1:
                    log.info("%s has ended: nothing is trained", folder.name)
                    return ""
                return foreground.call(_process, request, workload, lines)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {again} resumes from the last checkpoint") from None


def _held(request: TrainRequest) -> record.TrialRecord | None:
    """Return the training that the folder holds; one that has kept nothing goes, with its copy of
    the workload, which may have been mended. Raises `ConfigError` for another training."""
    config, folder = request.config, request.folder
    trial = record.read_trial(folder)
    if trial is None:
        return None
    if not trial.points and not (folder / record.CHECKPOINT).exists():
        cfg.remove_copy(config, folder)
        (folder / record.JOURNAL).unlink()
        return None
    differs = cfg.differences(config, cfg.configuration_of(trial))
    edited = not differs and trial.fingerprint != cfg.fingerprint(config)
    # What is learned does not depend on how workers share it
    asked = {name: value for name, value in differs.items() if not name.startswith("parallel.")}
    held = {"seconds": trial.budget_s, **trial.drawn}
    now = {"seconds": request.budget.seconds, **request.identity()}
    asked |= {name: value for name, value in now.items() if held.get(name) != value}
    if asked or edited:
        changed = text.knobs(asked) if asked else f"{cfg.of(config).title} has changed"
        raise ConfigError(
            f"--out: {text.shown(folder)} holds another training (asked: {changed}); repeat it to"
            " resume, or choose another --name or --out"
        )
    return trial


def _begun(request: TrainRequest) -> TrainRequest:
    """Write that an attempt begins, and return the request with the copy of the user's file."""
    folder, budget = request.folder, request.budget
    config = cfg.take_along(request.config, folder)
    Journal(folder).start(*cfg.identity(config), request.identity(), budget.seconds)
    write_text(folder / "config.yaml", cfg.dump(config, folder=folder))
    # Weights of an earlier stop: the checkpoint knows more.
    (folder / WEIGHTS).unlink(missing_ok=True)
    if budget.open_ended:
        log.info("open-ended: Ctrl-C stops it, the same command goes on")
    return dataclasses.replace(request, config=config)


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


# ---- result
def result(folder: Path) -> dict[str, Any]:
    """Return the result of a finished training. Raises `ConfigError` where it has not ended."""
    trial = record.read_trial(folder)
    if trial is None or trial.end is None or not trial.points:
        raise ConfigError(f"{folder}: the training has not ended")
    workload, last = cfg.of(cfg.configuration_of(trial)), trial.points[-1]
    metric = workload.objective
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


def _process(request: TrainRequest, lines: EventLines) -> str:
    """See `train_process.train`, which imports torch; for a process of its own."""
    from tunediff.api import train_process

    asked = request.config, request.folder, request.budget, request.initial
    return train_process.train(*asked, lines)
