"""Train one configuration outside any search, in this process, and read the result."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tunediff import cli
from tunediff import config as cfg
from tunediff.api.stop_signals import stop_signals
from tunediff.config import ConfigError, Metric, Systems, Workload, code
from tunediff.config.code import WorkloadError
from tunediff.core import listeners, lock, remote, remote_lock, text
from tunediff.core import trial_record as record
from tunediff.core.clock import Budget, UnitName, own_s
from tunediff.core.errors import TunediffError, UserCodeError
from tunediff.core.files import write_text
from tunediff.core.journal import Journal
from tunediff.core.listeners import Activity, Listeners
from tunediff.core.point import Point
from tunediff.core.progress import EventLines
from tunediff.search_space import duration_s
from tunediff.training.knobs import Optimized

if TYPE_CHECKING:
    from tunediff.distributed import World
    from tunediff.training.run_trial import TrialResult
    from tunediff.training.trial import TrainingOutcome

log = logging.getLogger(__name__)

CHECKPOINT_EVERY_S = 60.0
INITIAL = "weights in a .safetensors file, or a diffusers pipeline"


@dataclasses.dataclass
class TrainOptions:
    """What is asked of a training: the arguments of the command and of `tunediff.run_training`."""

    config: Path
    """A configuration file, or a baseline or a workload."""
    words: Sequence[str] = ()
    """`knob=value`."""
    budget: str | None = None
    unit: UnitName | None = None
    samples: int | None = None
    every: str | None = None
    name: str | None = None
    out: Path | None = None
    storage: Path = text.STORAGE
    initial: Path | None = None
    track: str | None = None


@dataclasses.dataclass(frozen=True)
class TrainRequest:
    """A training that has been checked and may start or go on."""

    config: Systems
    budget: Budget
    folder: Path
    initial: Path | None
    command: str
    """How it is started with several processes."""
    track: str | None = None
    """The service that shows it as a run."""


def prepare(options: TrainOptions, command: Callable[[int], str] | None = None) -> TrainRequest:
    """Check what is asked for and make the folder of the training. Raises `ConfigError`.

    `command`: how to start it with a number of processes; default: with the options' words.
    """
    listeners.check(options.track)
    config = cfg.named(options.config, options.words)
    budget, folder = _budget(options, config), _folder(options)
    _check(config, budget, folder, options.initial)
    processes = config.parallel.processes
    start = (
        command(processes)
        if command is not None
        else f"torchrun --nproc-per-node {processes} -m tunediff.train"
    )
    return TrainRequest(config, budget, folder.absolute(), options.initial, start, options.track)


def run(request: TrainRequest, lines: EventLines) -> str:
    """Train, or go on with a training, as one rank of it; return why it stopped before its end, ''
    if it did not.

    Raises `ConfigError`, `WorkloadError`, `TunediffError` for a training that failed, and
    `KeyboardInterrupt`.
    """
    main = (
        int(os.environ.get("RANK", "0")) == 0
    )  # the other ranks wait for it before they read anything
    try:
        if main:
            remote.check(request.folder.parent)
        with contextlib.ExitStack() as beside:
            if main:
                beside.enter_context(_alone(request.folder))
                _recheck_folder(request)
                held = remote_lock.held(request.folder, fetch=lambda: _fetch(request))
                heard = Listeners(beside.enter_context(held))
                objective, again = cfg.of(request.config).objective.name, "the same command again"
                activity = Activity("train", request.folder, again, objective, {}, request.track)
                beside.enter_context(heard.opened(activity, lines.aside.say))
            return _train(request, lines)
    except KeyboardInterrupt:
        again = "interrupted; the same command again resumes from the last checkpoint"
        raise KeyboardInterrupt(again) from None


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
    """Check the folder once more, since another process may have trained there, and remove a
    journal without a point.

    The copy of the workload beside such a journal is removed with it.

    Call it under the lock. Raises `ConfigError` if the folder holds another training.
    """
    folder = request.folder
    _check_folder(request.config, request.budget, folder, request.initial)
    trial = record.read_trial(folder)
    if trial is not None and _starts_over(trial, folder):
        cfg.remove_copy(
            request.config, folder
        )  # the user's file may be mended now, or after this attempt
        (folder / record.JOURNAL).unlink()


def _folder(options: TrainOptions) -> Path:
    """Return the folder of the run. Raises `ConfigError`."""
    if options.name is None:
        return Path(options.out or Path(options.storage, f"train-{options.config.stem}"))
    if options.out is not None:
        raise ConfigError(
            "--name: names a folder in the folder of all trainings; --out names any folder:"
            " give one"
        )
    cli.check_plain(options.name)
    return Path(options.storage, options.name)


def _budget(options: TrainOptions, config: Systems) -> Budget:
    """Return the budget that the options give. Raises `ConfigError`."""
    seconds, samples, every = options.budget, options.samples, options.every
    if options.unit is not None and seconds is None:
        raise ConfigError(f"--unit: {options.unit} goes with --budget")
    cli.allow(samples is None or samples >= 1, "--samples", samples, "a whole number of at least 1")
    if seconds is not None or samples is not None:
        if every is not None:
            raise ConfigError(
                f"--every: {every} goes without --budget and --samples; set evaluation.points"
                " instead"
            )
        own = (
            own_s(duration_s(seconds, "--budget"), options.unit or "wall", config.devices)
            if seconds
            else None
        )
        return Budget(own, samples)
    # A user's own section may have that name as well, and knobs that mean something else
    optimizer = getattr(config.knobs, "optimizer", None)
    if isinstance(optimizer, Optimized) and (decay := optimizer.decay) != "constant":
        raise ConfigError(
            f"optimizer.decay: {decay!r} is not allowed without --budget or --samples: a learning"
            " rate that falls to zero needs an end to fall towards; allowed: constant"
        )
    # Schedules follow fractions of a budget: an open-ended training has that of its first
    # `evaluation.points` rounds.
    return Budget(duration_s(every or "10m", "--every") * config.evaluation.points, open_ended=True)


def _check(config: Systems, budget: Budget, folder: Path, initial: Path | None) -> None:
    """Refuse what would fail later, and a folder that holds another training. Raises
    `ConfigError`."""
    cli.check_here(config, evaluates=True)
    cli.warn_emulated([config.precision.amp])
    if initial is not None and not initial.exists():
        raise ConfigError(f"--initial: {initial}: no such file; allowed: {INITIAL}")
    _check_folder(config, budget, folder, initial)
    with cli.writing("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)


def _starts_over(trial: record.TrialRecord, folder: Path) -> bool:
    """Return whether a training was killed or out of memory, as with a larger batch, before
    anything was kept."""
    empty = not trial.points and not (folder / record.CHECKPOINT).exists()
    return empty and (not trial.finished or trial.status == "oom")


def _check_folder(config: Systems, budget: Budget, folder: Path, initial: Path | None) -> None:
    """Refuse a folder that holds another training. Raises `ConfigError`."""
    trial = record.read_trial(folder)
    if trial is not None and not _starts_over(trial, folder):
        if trial.fingerprint != cfg.fingerprint(config):
            differs = cfg.differences(config, trial.configuration)
            changed = text.knobs(differs) if differs else f"{cfg.of(config).title} has changed"
            if not differs or any(
                not name.startswith("parallel.") for name in differs
            ):  # what is learned is the same
                raise ConfigError(
                    f"--out: {folder} holds a training of another configuration ({changed}); choose"
                    " another"
                )
        ours = _identity(budget, initial)
        drawn = {
            "initial": ours["initial"]
        } | trial.drawn  # journals of earlier versions do not have it
        if drawn["initial"] != ours["initial"]:
            began = (
                f"from weights of sha256 {drawn['initial']}"
                if drawn["initial"]
                else "without --initial"
            )
            given = "not given" if initial is None else f"{initial} is not allowed"
            holds = f"{folder} holds a training that started {began}"
            raise ConfigError(
                f"--initial: {given}: {holds}; repeat it to resume, or choose another --out"
            )
        if (trial.budget_s, drawn) != (budget.seconds, ours):
            theirs = f"with {_options(trial.budget_s, trial.drawn.get('samples'))}"
            if trial.drawn.get("open_ended"):
                every = trial.budget_s / config.evaluation.points if trial.budget_s else 0.0
                theirs = f"without --budget and with --every {text.format_exact(every)}"
            raise ConfigError(
                f"--budget: {folder} holds a training {theirs}; repeat it to resume, or choose"
                " another --out"
            )


def _options(budget_s: float | None, samples: int | None) -> str:
    """Return the options that give this budget: `--budget 6s and --samples 100`."""
    options = {"--budget": text.format_exact(budget_s) if budget_s else None, "--samples": samples}
    return (
        " and ".join(f"{option} {value}" for option, value in options.items() if value)
        or "another budget"
    )


def _identity(budget: Budget, initial: Path | None) -> dict[str, Any]:
    """Return what, besides configuration and seconds, must be the same for a training to go on."""
    open_ended = {"open_ended": True} if budget.open_ended else {}
    return {"samples": budget.samples, "initial": _digest(initial)} | open_ended


def _digest(initial: Path | None) -> str | None:
    """Return the sha256 of a file of weights, or of all in a folder; None without initial
    weights."""
    if initial is None:
        return None
    inside = sorted(
        path for path in initial.rglob("*") if path.suffix in (".safetensors", ".bin", ".pt")
    )
    files = inside if initial.is_dir() else [initial]
    return " ".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)


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
        if world.size != config.parallel.processes:
            needed, started = (
                config.parallel.workers,
                text.pluralize(world.size, "process", "processes"),
            )
            other = (
                "parallel.strategy=ddp"
                if config.parallel.together
                else f"parallel.workers={world.size}"
            )
            hint = f"start it as {request.command}, or set {other}"
            raise ConfigError(f"parallel.workers: {needed} is not allowed with {started}; {hint}")
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
            journal.start(config, _identity(budget, request.initial), budget.seconds)
            write_text(folder / "config.yaml", cfg.dump(config, folder=folder))
            (folder / weights.NAME).unlink(
                missing_ok=True
            )  # of an earlier stop: the checkpoint knows more
            if budget.open_ended:
                log.info("open-ended: Ctrl-C stops it, the same command goes on")

        # ---- train
        engine = Engine(config, budget, world, observer, folder=folder, checkpoint_every_s=CHECKPOINT_EVERY_S,
                        initial=initial)  # fmt: skip
        try:
            result = run_trial(lambda: run_engine(engine), world)
        finally:
            if isinstance(observer, ConsoleRecorder):
                observer.close()
        if (outcome := result.outcome) is None:
            _fail(result, config, journal, world)

        if world.main:
            _conclude(result, outcome, config, journal)
        stopped = (
            f"stopped after {text.pluralize(outcome.steps, 'step')}; the same command again goes on"
        )
        return "" if outcome.finished else f"{stopped}\nweights: {folder / weights.NAME}"


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
    failure: BaseException = error
    if (
        end is not None
        and end.status == "oom"
        and not isinstance(error, ConfigError | WorkloadError)
    ):
        journal.end(end)
        failure = TunediffError(f"out of memory: {' '.join(end.reason.split())}")
    elif cfg.of(config).file is not None and not isinstance(error, ConfigError | WorkloadError):
        failure = UserCodeError(code.trace(error).rstrip("\n"))  # the user's own lines
    if world.size > 1 and isinstance(failure, TunediffError) and failure is not error:
        print(cli.message_of(failure), file=sys.stderr, flush=True)
        os._exit(cli.FAILED)  # the others may wait for this rank in a collective
    raise failure from (error if failure is not error else None)


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
        "metric": str(last.get("label", metric.label)), "objective": metric.name, "value": last[metric.name],
        "train_s": last.train_s, "samples": last.samples, "unit": workload.unit, "steps": last.steps,
        **{f"{part}_s": trial.end.seconds.get(part) for part in parts},
        "weights": folder / "weights.safetensors", "pictures": sorted(map(str, folder.glob("*.png"))),
        "journal": folder / record.JOURNAL,
    }  # fmt: skip


def _finished(folder: Path) -> tuple[Any, Workload, Metric, Point]:
    """Return record, workload, metric and last point of a training. Raises `ConfigError` where it
    is not finished."""
    trial = record.read_trial(folder)
    if trial is None or trial.end is None or not trial.points:
        raise ConfigError(f"{folder}: the training has not ended")
    workload = cfg.of(trial.configuration)
    return trial, workload, workload.objective, trial.points[-1]
