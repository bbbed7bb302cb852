"""Show where the time and memory of a training go: `tunediff profile --config F`.

F is a configuration file (an exported best.yaml too), or digits or cifar10 for that workload's
baseline. Writes a report, its numbers and a Chrome trace into a new folder. Runs in one process: of
parallel.workers > 1 it measures one worker with its part of the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tunediff import cli
from tunediff.api import profile_run
from tunediff.api.profile_run import ProfileOptions
from tunediff.core import text
from tunediff.core.options import PrintingOptions
from tunediff.core.progress import EventLines


class ProfileCommandOptions(PrintingOptions, ProfileOptions):
    """The options of the command."""


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Profile; see `--help`."""
    options = cli.parse("profile", __doc__, ProfileCommandOptions, argv)
    command = text.original_command("profile", argv)
    result = profile_run.run(options, command, EventLines.of(options))
    if options.as_json:
        cli.print_json(result.json())
        return cli.OK
    print(result.text(), end="\n\n")
    print(text.block(result.files))
    print(f"trace: {result.folder / result.profile['trace']} (open it at ui.perfetto.dev)")
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
