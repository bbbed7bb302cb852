"""Train one configuration outside any search: `python -m tunediff.train --config best.yaml --budget
5m`.

Without --budget and --samples it trains until it is stopped. The same command again resumes an
interrupted training, also with other knobs of `parallel`, and does nothing to a finished one. Runs
alone, or as `torchrun --nproc-per-node N -m tunediff.train …` with parallel.workers = N.
TensorBoard curves lie in the folder of the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tunediff import cli
from tunediff.api import train_run
from tunediff.api.train_run import TrainOptions
from tunediff.core import text
from tunediff.core.errors import TunediffError
from tunediff.core.progress import EventLines
from tunediff.integrations.services import SERVICES


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Train; see `--help`."""
    parser = cli.parser("train", __doc__ or "")
    add = parser.add_argument
    cli.completes(
        add("words", nargs="*", metavar="knob=value", help="changes to the configuration")
    )
    file = (
        "configuration file, such as an exported best.yaml; or digits, cifar10 or mine.py for a"
        " workload's baseline"
    )
    add("--config", type=Path, required=True, help=file)
    add("--budget", help="training seconds, e.g. 90s, 10m, 8h")
    cli.add_unit(parser)
    add(
        "--samples",
        type=int,
        help="training samples, instead of or besides --budget: whichever comes first ends it",
    )
    add(
        "--every",
        help="without a budget: training seconds from one evaluation to the next (default: 10m)",
    )
    add(
        "--name",
        help=(
            "name of the run and its folder in the folder of all trainings (default: train-CONFIG)"
        ),
    )
    add(
        "--out",
        type=Path,
        help=(
            "folder of the run, instead of --name (default: train-CONFIG in the folder of all"
            " trainings)"
        ),
    )
    cli.add_storage(parser, "all searches and trainings")
    add(
        "--track",
        choices=SERVICES,
        help="the service that shows it as a run (docs/how-to/trackers.md)",
    )
    add(
        "--initial",
        type=Path,
        help="weights to start from: a .safetensors file or a folder of a diffusers pipeline",
    )
    cli.add_printing(parser)
    args = parser.parse_intermixed_args(argv)
    names = {field.name for field in dataclasses.fields(TrainOptions)}
    options = TrainOptions(**{name: value for name, value in vars(args).items() if name in names})
    from tunediff.distributed import share_of_cores

    with (
        share_of_cores()
    ):  # before the user's file is imported, which may set another number of threads
        return _train(
            options, lambda processes: text.original_command("train", argv, processes), args
        )


def _train(options: TrainOptions, command: Callable[[int], str], args: argparse.Namespace) -> int:
    """Train and print the result; return the exit code."""
    request = train_run.prepare(options, command)
    try:
        stopped = train_run.run(request, EventLines.of(args))
    except TunediffError:
        if _rank() > 0:  # rank 0 says it
            return cli.FAILED
        raise
    if _rank() > 0:
        return cli.INTERRUPTED if stopped else cli.OK
    if stopped:
        print(f"\n{stopped}", file=sys.stderr)
        return cli.INTERRUPTED
    cli.result(train_run.values(request.folder), args.json, train_run.as_json(request.folder))
    return cli.OK


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


if __name__ == "__main__":
    sys.exit(main())
