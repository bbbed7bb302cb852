"""Where the seconds and the memory of a training go, and what to try next: `python -m tunediff.profile --config F`.

F is a configuration file (an exported best.yaml too), or digits or cifar10 for that workload's baseline. Writes tables,
figures and a Chrome trace into a new folder. Runs in one process: of parallel.workers > 1 it measures one worker with
its part of the batch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tunediff import cli, record
from tunediff import config as cfg
from tunediff.config import Config, ConfigError

SECONDS = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Profile; see `--help`."""
    return cli.guarded(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    parser = cli.parser("profile", __doc__ or "")
    parser.add_argument("words", nargs="*", metavar="knob=value", help="changes to the configuration")
    parser.add_argument("--config", type=Path, required=True, help="configuration file, or digits or cifar10")
    parser.add_argument("--out", type=Path, help="new folder for the results (default: ray_results/profile-CONFIG)")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"steps to measure, after a warm-up (default: what {SECONDS:g} seconds take, 3 to 200)",
    )
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction,
        help="measure when torch.compile pays (default: on a GPU; on a CPU it takes minutes)",
    )  # fmt: skip
    parser.add_argument(
        "--sweep", action=argparse.BooleanOptionalAction, default=True, help="measure other batch sizes (default: yes)"
    )
    parser.add_argument("--try", dest="attempt", action="store_true", help="measure each piece of advice as well")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON instead of tables")
    args = parser.parse_args(argv)
    config, workers = _one_worker(cfg.named(args.config, cfg.parse_overrides(args.words)))
    _check(config, args)
    args.out = _folder(args.out, args.config.stem)
    args.command = shlex.join(["python", "-m", "tunediff.profile", *(sys.argv[1:] if argv is None else argv)])
    # Torch's profiler speaks of itself on stderr; read when torch is first imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        return _profile(config, workers, args)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return cli.INTERRUPTED
    finally:
        _tidy(args.out)


# ----------------------------------------------------------------------------------------------------- what is refused
def _one_worker(config: Config) -> tuple[Config, int]:
    """What one of the training workers does, and how many there are."""
    workers = config.parallel.workers
    share = {"parallel.workers": 1, "loader.batch_size": config.loader.batch_size // workers}
    return (cfg.override(config, share), workers) if workers > 1 else (config, 1)


def _check(config: Config, args: argparse.Namespace) -> None:
    """Refuse what would fail later, before torch is imported."""
    from tunediff.data import sources

    if args.steps is not None and args.steps < 3:
        raise ConfigError(f"--steps: {args.steps} is not allowed; allowed: a whole number of at least 3")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("torchrun: profile runs in one process; start it with python -m tunediff.profile")
    sources.check(config.data)


def _folder(out: Path | None, stem: str) -> Path:
    """A folder that holds nothing yet. Without `--out`, `-2`, `-3`, … is added to a name that is taken."""
    folder, number = out or cli.STORAGE / f"profile-{stem}", 1
    while folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if out is not None:
            raise ConfigError(f"--out: {out} exists and is not empty; allowed: a new or an empty folder")
        number += 1
        folder = cli.STORAGE / f"profile-{stem}-{number}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {folder} cannot be written: {error.strerror}") from None
    return folder


def _tidy(folder: Path) -> None:
    """Remove what an interruption left of the trainings, and the folder when there is nothing in it."""
    for left in folder.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


# --------------------------------------------------------------------------------------------------------- measurement
def _profile(config: Config, workers: int, args: argparse.Namespace) -> int:
    from tunediff.reporting import profiles
    from tunediff.training import memory
    from tunediff.training.precision import NotFiniteError

    began = time.monotonic()
    try:
        found = _measure(config, args, lambda text: _say(began, text)) | {"workers": workers}
    except NotFiniteError as error:
        print(f"error: {error}", file=sys.stderr)
        return cli.FAILED
    except Exception as error:
        if not memory.is_oom(error):
            raise
        print(f"error: out of memory with a batch of {config.loader.batch_size}: {error}", file=sys.stderr)
        return cli.FAILED
    found["wall_s"] = time.monotonic() - began
    written = profiles.write_all(found, args.out)
    if args.json:
        print(written["numbers"].read_text(encoding="utf-8"), end="")
        return cli.OK
    for section in profiles.sections(found):
        print(section.text(), end="\n\n")
    for kind, path in written.items():
        print(f"{kind}: {path}")
    print(f"trace: {args.out / found['trace']} (open it at ui.perfetto.dev)")
    if found["snapshot"] is not None:
        print(f"memory_snapshot: {args.out / found['snapshot']} (open it at pytorch.org/memory_viz)")
    return cli.OK


def _measure(config: Config, args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything, in the order of rising disturbance: plain timings first, other batch sizes and compilers last."""
    from tunediff.data import images as data
    from tunediff.distributed import alone
    from tunediff.reporting.advice import advise
    from tunediff.training import profiling

    images, world, folder = data.load(config.data), alone(), args.out
    bench, cuda = profiling.Bench(images, world), world.device.type == "cuda"
    found: dict[str, Any] = {
        "name": args.config.stem, "command": args.command, "time": time.time(), "config": cfg.flat(config),
        "fingerprint": cfg.fingerprint(config), "environment": record.environment(),
        "device": profiling.device(world), "format_gains": profiling.format_gains(world),
        "images": {"name": images.name, "count": len(images), "mib": images.pixels.nbytes / 2**20},
        "loader_alone": None, "model_alone": None, "feed_ratio": None, "sweep": None,
        "trace": "trace.json.gz", "snapshot": None,
    }  # fmt: skip

    say(f"{found['device']['name']}: first steps")
    found["first"] = bench.first(config)
    steps = args.steps or profiling.steps_in(SECONDS, found["first"]["step_s"])
    say(f"{steps} steps")
    found["step"] = bench.speed(config, steps)
    if not config.loader.resident:
        say("the loader alone, the model alone")
        found["loader_alone"] = bench.loader_alone(config)
        if (model := bench.model_alone(config, steps)) is not None:
            found["model_alone"] = model
            found["feed_ratio"] = found["loader_alone"]["images_per_s"] / model["images_per_s"]
    say(f"trace of {profiling.TRACED} steps")
    found |= bench.trace(config, folder / found["trace"], found["step"]["step_s"])
    if bench.snapshot(config, folder / "memory_snapshot.pickle"):
        found["snapshot"] = "memory_snapshot.pickle"
    if args.sweep:
        found["sweep"] = bench.sweep(config, found["step"]["step_s"], lambda batch: say(f"batch {batch}"))
    if cuda if args.compile is None else args.compile:
        say("torch.compile, in a process of its own and with an empty cache")
        found["compile"] = profiling.compile_cost(config, steps, folder)
    else:
        why = "it takes minutes on a CPU; --compile measures it" if args.compile is None else "--no-compile"
        found["compile"] = {"skipped": why}
    found["advice"] = [dataclasses.asdict(advice) for advice in advise(found, config)]
    for advice in found["advice"] if args.attempt else []:
        say(f"trying {cli.knobs(advice['change'])}")
        advice["tried"] = bench.attempt(config, advice["change"], steps)
    return found


def _say(began: float, text: str) -> None:
    print(f"[{cli.seconds(time.monotonic() - began):>6}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
