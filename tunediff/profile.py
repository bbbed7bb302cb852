"""Where the seconds and the memory of a training go, and what to try next: `python -m
tunediff.profile --config F`.

F is a configuration file (an exported best.yaml too), or digits or cifar10 for that workload's
baseline. Writes a report, its numbers and a Chrome trace into a new folder. Runs in one process: of
parallel.workers > 1 it measures one worker with its part of the batch.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from tunediff import cli
from tunediff.api import profile_run
from tunediff.api.profile_run import ProfileOptions
from tunediff.core import text
from tunediff.core.progress import EventLines


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Profile; see `--help`."""
    parser = cli.parser("profile", __doc__ or "")
    add = parser.add_argument
    cli.completes(
        add("words", nargs="*", metavar="knob=value", help="changes to the configuration")
    )
    add(
        "--config", type=Path, required=True, help="configuration file, or digits, cifar10, mine.py"
    )
    add(
        "--out",
        type=Path,
        help="new folder for the results (default: profile-CONFIG in the folder of all searches)",
    )
    cli.add_storage(parser)
    add(
        "--steps",
        type=int,
        help="steps to measure, after a warm-up (default: what 5 seconds take, 3 to 200)",
    )
    add("--try", dest="attempt", action="store_true", help="measure each piece of advice as well")
    cli.add_printing(parser)
    args = parser.parse_intermixed_args(argv)
    names = {field.name for field in dataclasses.fields(ProfileOptions)}
    options = ProfileOptions(**{name: value for name, value in vars(args).items() if name in names})
    result = profile_run.run(
        dataclasses.replace(options, command=text.original_command("profile", argv)),
        EventLines.of(args),
    )
    if args.json:
        cli.print_json(result.json())
        return cli.OK
    print(result.text(), end="\n\n")
    print(text.block(result.files))
    print(f"trace: {result.folder / result.profile['trace']} (open it at ui.perfetto.dev)")
    if result.profile["snapshot"] is not None:
        print(
            f"memory_snapshot: {result.folder / result.profile['snapshot']} (open it at"
            " pytorch.org/memory_viz)"
        )
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
