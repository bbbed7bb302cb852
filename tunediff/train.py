"""Train one configuration outside any search: `python -m tunediff.train --config best.yaml --budget 5m`.

Without --budget and --samples it trains until it is stopped. The same command again resumes an interrupted training,
also with other knobs of `parallel`, and does nothing to a finished one. Runs alone, or as
`torchrun --nproc-per-node N -m tunediff.train …` with parallel.workers = N. TensorBoard curves lie in the folder of the
run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import cli
from tunediff import config as cfg
from tunediff.config import ConfigError, Systems, code
from tunediff.config.code import WorkloadError
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.clock import Budget, own_s
from tunediff.core.files import write_text
from tunediff.core.journal import Journal
from tunediff.core.progress import shown
from tunediff.event_lines import EventLines
from tunediff.search_space import duration_s

if TYPE_CHECKING:
    from tunediff.distributed import World
    from tunediff.training.run_trial import TrialResult

CHECKPOINT_EVERY_S = 60.0


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Train; see `--help`."""
    parser = cli.parser("train", __doc__ or "")
    add = parser.add_argument
    add("words", nargs="*", metavar="knob=value", help="changes to the configuration")
    file = "configuration file, such as an exported best.yaml; or digits, cifar10 or mine.py for a workload's baseline"
    add("--config", type=Path, required=True, help=file)
    add("--budget", help="training seconds, e.g. 90s, 10m, 8h")
    cli.add_unit(parser)
    add("--samples", type=int, help="training samples, instead of or besides --budget: whichever comes first ends it")
    add("--every", help="without a budget: training seconds from one evaluation to the next (default: 10m)")
    add("--name", help="name of the run and its folder in the folder of all trainings (default: train-CONFIG)")
    add(
        "--out",
        type=Path,
        help="folder of the run, instead of --name (default: train-CONFIG in the folder of all trainings)",
    )
    cli.add_storage(parser, "all searches and trainings")
    add("--initial", type=Path, help="weights to start from: a .safetensors file or a folder of a diffusers pipeline")
    cli.add_printing(parser)
    args = parser.parse_args(argv)
    config = cfg.named(args.config, args.words)
    args.command = text.original_command("train", argv, config.parallel.processes)
    budget = _budget(args, config)
    folder = _folder(args)
    _check(config, budget, folder, args.initial)
    try:
        return _train(config, budget, folder.absolute(), args)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command again resumes from the last checkpoint", file=sys.stderr)
        return cli.INTERRUPTED


def _folder(args: argparse.Namespace) -> Path:
    """Return the folder of the run. Raises `ConfigError`."""
    if args.name is None:
        return Path(args.out or Path(args.storage, f"train-{args.config.stem}"))
    if args.out is not None:
        raise ConfigError("--name: names a folder in the folder of all trainings; --out names any folder: give one")
    cli.check_plain(args.name)
    return Path(args.storage, args.name)


def _budget(args: argparse.Namespace, config: Systems) -> Budget:
    """Return the budget that the options give. Raises `ConfigError`."""
    seconds, samples, every = args.budget, args.samples, args.every
    if args.unit is not None and seconds is None:
        raise ConfigError(f"--unit: {args.unit} goes with --budget")
    cli.allow(samples is None or samples >= 1, "--samples", samples, "a whole number of at least 1")
    if seconds is not None or samples is not None:
        if every is not None:
            raise ConfigError(f"--every: {every} goes without --budget and --samples; set evaluation.points instead")
        own = own_s(duration_s(seconds, "--budget"), args.unit or "wall", config.devices) if seconds else None
        return Budget(own, samples)
    if (decay := cfg.flat(config).get("optimizer.decay", "constant")) != "constant":
        raise ConfigError(
            f"optimizer.decay: {decay!r} is not allowed without --budget or --samples: a learning rate that falls to "
            "zero needs an end to fall towards; allowed: constant"
        )
    # Schedules follow fractions of a budget: an open-ended training has that of its first `evaluation.points` rounds.
    return Budget(duration_s(every or "10m", "--every") * config.evaluation.points, open_ended=True)


def _check(config: Systems, budget: Budget, folder: Path, initial: Path | None) -> None:
    """Refuse what would fail later, and a folder that holds another training. Raises `ConfigError`."""
    # ---- files
    cli.check_here(config, evaluates=True)
    cli.warn_emulated([config.precision.amp])
    if initial is not None and not initial.exists():
        raise ConfigError(
            f"--initial: {initial}: no such file; allowed: weights in a .safetensors file, or a diffusers pipeline"
        )

    # ---- a folder that is there: without a point or a checkpoint it starts over, else it must be of this training
    trial = record.read_trial(folder)
    empty = trial is not None and not trial.points and not (folder / "checkpoint.pt").exists()
    if empty and trial is not None and (not trial.finished or trial.status == "oom"):
        (folder / record.JOURNAL).unlink()  # killed or out of memory, as with a larger batch, before anything was kept
    elif trial is not None:
        if trial.fingerprint != cfg.fingerprint(config):
            differs = cfg.differences(config, trial.configuration)
            changed = text.knobs(differs) if differs else f"{cfg.of(config).title} has changed"
            if not differs or any(not name.startswith("parallel.") for name in differs):  # what is learned is the same
                raise ConfigError(
                    f"--out: {folder} holds a training of another configuration ({changed}); choose another"
                )
        if (trial.budget_s, trial.drawn) != (budget.seconds, _identity(budget)):
            theirs = f"with {_options(trial.budget_s, trial.drawn.get('samples'))}"
            if trial.drawn.get("open_ended"):
                every = trial.budget_s / config.evaluation.points if trial.budget_s else 0.0
                theirs = f"without --budget and with --every {text.format_exact(every)}"
            raise ConfigError(
                f"--budget: {folder} holds a training {theirs}; repeat it to resume, or choose another --out"
            )
    with cli.writing("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)


def _options(budget_s: float | None, samples: int | None) -> str:
    """Return the options that give this budget: `--budget 6s and --samples 100`."""
    options = {"--budget": text.format_exact(budget_s) if budget_s else None, "--samples": samples}
    return " and ".join(f"{option} {value}" for option, value in options.items() if value) or "another budget"


def _identity(budget: Budget) -> dict[str, Any]:
    """Return what of a budget, besides its seconds, must be the same for a training to go on."""
    return {"samples": budget.samples} | ({"open_ended": True} if budget.open_ended else {})


def _train(config: Systems, budget: Budget, folder: Path, args: argparse.Namespace) -> int:
    """Train in this process, one rank of the training, and print the result; return the exit code."""
    from tunediff.distributed import from_environment
    from tunediff.training import weights
    from tunediff.training.console import Console
    from tunediff.training.engine import Engine
    from tunediff.training.observer import Observer
    from tunediff.training.run_trial import run_trial
    from tunediff.training.trial import run

    with from_environment() as world, _stop_signals() as signals, shown() if world.main else contextlib.nullcontext():
        if world.size != config.parallel.processes:
            needed, started = config.parallel.workers, text.pluralize(world.size, "process", "processes")
            other = "parallel.strategy=ddp" if config.parallel.together else f"parallel.workers={world.size}"
            hint = f"start it as {args.command}, or set {other}"
            raise ConfigError(f"parallel.workers: {needed} is not allowed with {started}; {hint}")
        trial = record.read_trial(folder)
        if trial is not None and trial.status == "ok":
            if world.main:
                _conclude(folder, args.json)
            return cli.OK

        # ---- journal and curves, on rank 0
        initial = _weights(args.initial, config) if args.initial is not None else None
        observer, journal = Observer(signals), Journal(folder)
        if world.main:
            done = trial.points[-1].samples if trial is not None and trial.points else None
            observer = Console(folder, cfg.of(config), done, signals, lines=EventLines.of(args))
            config = cfg.take_along(config, folder)
            journal.start(config, _identity(budget), budget.seconds)
            write_text(folder / "config.yaml", cfg.dump(config, folder=folder))
            (folder / weights.NAME).unlink(missing_ok=True)  # of an earlier stop: the checkpoint knows more
            if budget.open_ended:
                print("open-ended: Ctrl-C stops it, the same command goes on", file=sys.stderr)

        # ---- train
        engine = Engine(config, budget, world, observer, folder=folder, checkpoint_every_s=CHECKPOINT_EVERY_S,
                        initial=initial)  # fmt: skip
        try:
            result = run_trial(lambda: run(engine), world)
        finally:
            if isinstance(observer, Console):
                observer.close()
        if (outcome := result.outcome) is None:
            return _fail(result, config, journal, world)

        # ---- conclude, on rank 0
        if world.main:
            metadata = weights.about(config, folder, outcome.steps)
            weights.save(outcome.model.state_dict(), folder / weights.NAME, metadata)
            for knob in outcome.unread:
                print(f"WARNING: train(trial) never reads the knob {knob}: not effective", file=sys.stderr)
            if outcome.finished:
                assert result.end is not None
                journal.end(result.end)
                _conclude(folder, args.json)
            else:
                again = f"stopped after {text.pluralize(outcome.steps, 'step')}; the same command again goes on"
                print(f"\n{again}\nweights: {folder / weights.NAME}", file=sys.stderr)
        return cli.OK if outcome.finished else cli.INTERRUPTED


def _fail(result: TrialResult, config: Systems, journal: Journal, world: World) -> int:
    """Print why a training failed and return the exit code; write an `end` for status `nan` and `oom`.

    Raises `ConfigError` and `WorkloadError`, which the command prints, and any other error of a shipped workload.
    """
    end, error = result.end, result.error
    if end is not None and end.status == "nan":  # on all ranks alike
        if world.main:
            journal.end(end)
            print(f"error: {end.reason}", file=sys.stderr)
        return cli.FAILED
    assert error is not None
    if isinstance(error, ConfigError | WorkloadError):
        raise error
    if end is not None and end.status == "oom":
        journal.end(end)
        print(f"error: out of memory: {' '.join(end.reason.split())}", file=sys.stderr)
    elif cfg.of(config).file is None:
        raise error
    else:
        print(code.trace(error), end="", file=sys.stderr)  # the user's own lines
    if world.size > 1:
        os._exit(cli.FAILED)  # the others may wait for this rank in a collective
    return cli.FAILED


def _weights(path: Path, config: Systems) -> Any:
    """Return the weights to start from. Raises `ConfigError`."""
    from tunediff.training import weights

    workload = cfg.of(config)
    if (read := workload.get_hook("initial_weights")) is not None:
        return read(path, config.knobs)
    tensors = weights.read(path)
    if (network := workload.get_hook("network")) is not None:
        weights.check_fit(tensors, network(config.knobs), str(path))
    return tensors


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Yield the list of received signals: the first SIGINT or SIGTERM lets the loop write a checkpoint and stop.

    A second SIGINT ends the process at once.
    """
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which alone may handle signals
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _conclude(folder: Path, as_json: bool) -> None:
    """Print the result of a finished training."""
    trial = record.read_trial(folder)
    assert trial is not None
    assert trial.end is not None
    last = trial.points[-1]
    workload = cfg.of(trial.configuration)
    metric = workload.objective
    lines = {
        str(last.get("label", metric.label)): last[metric.name],
        "train_s": last.train_s,
        workload.unit: last.samples,
        "steps": last.steps,
        **{f"{part}_s": spent for part, spent in trial.end.seconds.items() if part != "train"},
        "weights": folder / "weights.safetensors",
        **{path.name: path for path in sorted(folder.glob("*.png"))},
        "journal": folder / record.JOURNAL,
    }
    parts = ("data_wait", "compile", "evaluation", "checkpoint", "setup")
    typed = {
        "metric": str(last.get("label", metric.label)), "objective": metric.name, "value": last[metric.name],
        "train_s": last.train_s, "samples": last.samples, "unit": workload.unit, "steps": last.steps,
        **{f"{part}_s": trial.end.seconds.get(part) for part in parts},
        "weights": lines["weights"], "pictures": sorted(map(str, folder.glob("*.png"))), "journal": lines["journal"],
    }  # fmt: skip
    cli.result(lines, as_json, typed)


if __name__ == "__main__":
    sys.exit(main())
