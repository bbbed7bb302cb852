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
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tunediff import cli
from tunediff import config as cfg
from tunediff.config import ConfigError, Systems
from tunediff.core import text
from tunediff.core.files import numbered
from tunediff.event_lines import EventLines


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Profile; see `--help`."""
    parser = cli.parser("profile", __doc__ or "")
    add, either = parser.add_argument, argparse.BooleanOptionalAction
    add("words", nargs="*", metavar="knob=value", help="changes to the configuration")
    add("--config", type=Path, required=True, help="configuration file, or digits, cifar10, mine.py")
    add("--out", type=Path, help="new folder for the results (default: profile-CONFIG in the folder of all searches)")
    cli.add_storage(parser)
    add("--steps", type=int, help="steps to measure, after a warm-up (default: what 5 seconds take, 3 to 200)")
    pays = "measure when torch.compile pays (default: on a GPU; on a CPU it takes minutes)"
    add("--compile", action=either, help=pays)
    add("--sweep", action=either, default=True, help="measure other batch sizes (default: yes)")
    add("--try", dest="attempt", action="store_true", help="measure each piece of advice as well")
    cli.add_printing(parser)
    args = parser.parse_args(argv)
    args.command = text.original_command("profile", argv)
    config, workers = _one_worker(cfg.named(args.config, args.words))
    _check(config, args)
    args.out = _folder(args.out, args.storage, args.config.stem)
    # Torch's profiler speaks of itself on stderr; read when torch is first imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        return _profile(config, workers, args)
    finally:
        _tidy(args.out)


# ----------------------------------------------------------------------------------------------------- what is refused
def _one_worker(config: Systems) -> tuple[Systems, int]:
    """Return the configuration of one of the training workers, and how many there are."""
    workers = config.parallel.workers
    sharers = 1 if config.parallel.strategy == "pipeline" else workers  # its stages see the whole batch
    share = {"parallel.workers": 1, "loader.batch_size": config.loader.batch_size // sharers}
    return (cfg.override(config, share), workers) if workers > 1 else (config, 1)


def _check(config: Systems, args: argparse.Namespace) -> None:
    """Refuse what would fail later, before torch is imported."""
    cli.allow(args.steps is None or args.steps >= 3, "--steps", args.steps, "a whole number of at least 3")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(f"torchrun: profile runs in one process; start it as {args.command}")
    cli.check_here(config, evaluates=False)


def _folder(out: Path | None, storage: Path, stem: str) -> Path:
    """Return a new or empty folder. Without `--out`, `-2`, `-3`, … is added to a name that is taken."""
    names = [out] if out is not None else numbered(storage, f"profile-{stem}")
    for folder in names:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            with cli.writing("--out", folder):
                folder.mkdir(parents=True, exist_ok=True)
            return folder
    raise ConfigError(f"--out: {out} exists and is not empty; allowed: a new or an empty folder")


def _tidy(folder: Path) -> None:
    """Remove what an interruption left of the trainings, and the folder when there is nothing in it."""
    for left in folder.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


# --------------------------------------------------------------------------------------------------------- measurement
def _profile(config: Systems, workers: int, args: argparse.Namespace) -> int:
    from tunediff.profiling import files, run, tables
    from tunediff.training.run_trial import end_of

    began, events = time.monotonic(), dataclasses.replace(EventLines.of(args), on_stderr=True)

    def say(line: str) -> None:
        events.print(events.line(line, time.monotonic() - began))

    try:
        profile = run.profile(
            config, args.out, say, name=args.config.stem, command=args.command, workers=workers, steps=args.steps,
            sweep_batches=args.sweep, compile_too=args.compile, attempt=args.attempt,
        )  # fmt: skip
    except Exception as error:
        if end_of(error).status == "oom":
            print(f"error: out of memory with a batch of {config.loader.batch_size}: {error}", file=sys.stderr)
            return cli.FAILED
        raise
    written = files.write_all(profile, args.out)
    if args.json:
        print(written["numbers"].read_text(encoding="utf-8"), end="")
        return cli.OK
    for section in tables.sections(profile):
        print(section.text(), end="\n\n")
    print(text.block(written))
    print(f"trace: {args.out / profile['trace']} (open it at ui.perfetto.dev)")
    if profile["snapshot"] is not None:
        print(f"memory_snapshot: {args.out / profile['snapshot']} (open it at pytorch.org/memory_viz)")
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
