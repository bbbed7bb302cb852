"""Set up a training: read what is asked for, refuse what would fail later, and make its folder."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.api.options import TRACK_HELP, UNIT_HELP, check_files, trainable
from tunediff.config import ConfigError, Systems
from tunediff.core import listeners, machine, machine_options, text
from tunediff.core import trial_record as record
from tunediff.core.clock import Budget, UnitName, own_s
from tunediff.core.options import REQUIRED, StorageOptions, option, words_option
from tunediff.core.outcomes import Status
from tunediff.core.refusals import allow, check_name, writing
from tunediff.experiment.model import kind_of
from tunediff.integrations.services import SERVICES
from tunediff.search_space import duration_s
from tunediff.training.knobs import Optimized

INITIAL = "weights in a .safetensors file, or a diffusers pipeline"


@dataclasses.dataclass(kw_only=True)
class TrainKeywords(StorageOptions):
    """Options of the command `train` that are keywords of `tunediff.run_training`."""

    budget: str | float | None = option(
        None, "training seconds, e.g. 90s, 10m, 8h", convert=duration_s
    )
    unit: UnitName | None = option(None, UNIT_HELP, choices=("wall", "device"))
    samples: int | None = option(
        None, "training samples, instead of or besides the budget: whichever comes first ends it"
    )
    name: str | None = option(
        None, "name of its folder in the folder of all trainings (default: train-CONFIG)"
    )
    out: str | Path | None = option(None, "folder of the run, anywhere, instead of a name")
    track: str | None = option(None, TRACK_HELP, choices=tuple(SERVICES))
    initial: str | Path | None = option(
        None, "weights to start from: a .safetensors file or a folder of a diffusers pipeline"
    )


@dataclasses.dataclass(kw_only=True)
class TrainOptions(TrainKeywords):
    """What is asked of a training."""

    config: Path = option(
        REQUIRED,
        "configuration file, such as an exported best.yaml; or digits, cifar10 or mine.py for a"
        " workload's baseline",
    )
    words: Sequence[str] = words_option("changes to the configuration", "knob=value")
    every: str | float | None = option(
        None,
        "without a budget: training seconds from one evaluation to the next (default: 10m)",
        convert=duration_s,
    )


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

    def identity(self) -> dict[str, Any]:
        """Return what, besides configuration and seconds, a training that goes on has equal."""
        values = {"samples": self.budget.samples, "initial": _digest(self.initial)}
        return values | ({"open_ended": True} if self.budget.open_ended else {})


def prepare(options: TrainOptions, command: Callable[[int], str] | None = None) -> TrainRequest:
    """Check what is asked for and make the folder of the training. Raises `ConfigError`.

    `command`: how to start it with a number of processes; default: with the options' words.
    """
    listeners.check(options.track)
    config = _captured(trainable(options.config, options.words), options)
    processes = config.parallel.processes
    request = TrainRequest(
        config,
        _budget(options, config),
        _folder(options).absolute(),
        Path(options.initial) if options.initial is not None else None,
        command(processes)
        if command is not None
        else f"torchrun --nproc-per-node {processes} -m tunediff.train",
        options.track,
    )
    check_files(config, evaluates=True)
    machine_options.warn_emulated([config.precision.amp])
    if (initial := request.initial) is not None and not initial.exists():
        raise ConfigError(f"--initial: {initial}: no such file; allowed: {INITIAL}")
    check_folder(request)
    with writing("--out", _folder(options)):
        request.folder.mkdir(parents=True, exist_ok=True)
    return request


def _captured(config: Systems, options: TrainOptions) -> Systems:
    """Return a workload's baseline with its step captured where a GPU trains it, if that learns the
    same; as it is where words name `compile.` knobs, or a file says how it trains."""
    named = options.config.suffix in (".yaml", ".yml")
    if named or not machine.gpus() or any(word.startswith("compile.") for word in options.words):
        return config
    return cfg.override(config, {"compile.capture": "auto"})


def _folder(options: TrainOptions) -> Path:
    """Return the folder of the run. Raises `ConfigError`."""
    if options.name is None:
        config = options.config
        # Each search has a best.yaml
        of_search = config.is_file() and config.absolute().with_name("trials").is_dir()
        name = f"{config.absolute().parent.name}-{config.stem}" if of_search else config.stem
        return Path(options.out or Path(options.storage, f"train-{name}"))
    if options.out is not None:
        raise ConfigError(
            "--name: names a folder in the folder of all trainings; --out names any folder:"
            " give one"
        )
    check_name(options.name)
    return Path(options.storage, options.name)


def _budget(options: TrainOptions, config: Systems) -> Budget:
    """Return the budget that the options give. Raises `ConfigError`."""
    seconds, samples, every = options.budget, options.samples, options.every
    if options.unit is not None and seconds is None:
        raise ConfigError(f"--unit: {options.unit} goes with --budget")
    allow(samples is None or samples >= 1, "--samples", samples, "a whole number of at least 1")
    if seconds is not None or samples is not None:
        if every is not None:
            raise ConfigError(
                f"--every: {every} goes without --budget and --samples; set evaluation.points"
                " instead"
            )
        if seconds is None:
            return Budget(None, samples)
        per_worker_s = own_s(
            duration_s(seconds, "--budget"), options.unit or "wall", config.devices
        )
        return Budget(per_worker_s, samples)
    # A user's own section may have that name as well, and knobs that mean something else
    optimizer = getattr(config.knobs, "optimizer", None)
    if isinstance(optimizer, Optimized) and (decay := optimizer.decay) != "constant":
        raise ConfigError(
            f"optimizer.decay: {decay!r} is not allowed without --budget or --samples: a learning"
            " rate that falls to zero needs an end to fall towards; allowed: constant"
        )
    # Schedules follow fractions of a budget: an open-ended training has that of its first
    # `evaluation.points` rounds.
    first_s = duration_s(every or "10m", "--every") * config.evaluation.points
    return Budget(first_s, open_ended=True)


# ---- a folder with a training
def starts_over(trial: record.TrialRecord, folder: Path) -> bool:
    """Return whether a training was killed or out of memory before anything was kept."""
    empty = not trial.points and not (folder / record.CHECKPOINT).exists()
    return empty and (not trial.finished or trial.status == Status.OOM)


def check_folder(request: TrainRequest) -> None:
    """Refuse a folder that holds another training. Raises `ConfigError`."""
    config, folder = request.config, request.folder
    where, again = text.shown(folder), "repeat it to resume, or choose another --out"
    if (kind := kind_of(folder)) is not None:
        raise ConfigError(f"--out: {where} holds a {kind}; choose another --name or --out")
    trial = record.read_trial(folder)
    if trial is None or starts_over(trial, folder):
        return
    differs = cfg.differences(config, trial.configuration)
    # What is learned does not depend on how workers share it
    is_other = trial.fingerprint != cfg.fingerprint(config) and not (
        differs and all(name.startswith("parallel.") for name in differs)
    )
    if is_other:
        held, asked = cfg.flat(trial.configuration), text.knobs(differs)
        before = text.knobs({name: held[name] for name in differs if name in held})
        changed = f"{before}; asked: {asked}" if differs else f"{cfg.of(config).title} has changed"
        raise ConfigError(
            f"--out: {where} holds a training of another configuration ({changed}); choose"
            " another --name or --out"
        )
    held = {"seconds": trial.budget_s, **trial.drawn}
    if held != (now := {"seconds": request.budget.seconds, **request.identity()}):
        given = "--initial" if held["initial"] != now["initial"] else "--budget"
        before, asked = text.knobs(held), text.knobs(now)
        raise ConfigError(
            f"{given}: {where} holds a training with {before}; asked: {asked}; {again}"
        )


def _digest(initial: Path | None) -> str | None:
    """Return the sha256 of a file of weights, or of all in a folder; None without any."""
    if initial is None:
        return None
    files = [initial]
    if initial.is_dir():
        suffixes = (".safetensors", ".bin", ".pt")
        files = sorted(path for path in initial.rglob("*") if path.suffix in suffixes)
    return " ".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
