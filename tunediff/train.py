"""Train one configuration outside any search: `python -m tunediff.train --config best.yaml --budget
5m`.

Without --budget and --samples it trains until it is stopped. The same command again resumes an
interrupted training, also with other knobs of `parallel`, and does nothing to a finished one. Runs
alone, or as `torchrun --nproc-per-node N -m tunediff.train …` with parallel.workers = N.
TensorBoard curves lie in the folder of the run.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence

from tunediff import cli
from tunediff.api import train_run, train_setup
from tunediff.api.train_setup import TrainOptions
from tunediff.core import text
from tunediff.core.errors import TunediffError
from tunediff.core.options import PrintingOptions
from tunediff.core.progress import EventLines


@dataclasses.dataclass(kw_only=True)
class TrainCommandOptions(PrintingOptions, TrainOptions):
    """The options of the command."""


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Train; see `--help`."""
    options = cli.parse(cli.parser("train", __doc__ or ""), TrainCommandOptions, argv)
    request = train_setup.prepare(
        options, lambda processes: text.original_command("train", argv, processes)
    )
    main_rank = os.environ.get("RANK", "0") == "0"
    try:
        stopped = train_run.run(request, EventLines.of(options))
    except TunediffError:
        if main_rank:
            raise
        return cli.FAILED  # rank 0 says why
    if stopped:
        if main_rank:
            print(f"\n{stopped}", file=sys.stderr)
        return cli.INTERRUPTED
    if main_rank:
        folder = request.folder
        cli.result(train_run.values(folder), options.json, train_run.as_json(folder))
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
