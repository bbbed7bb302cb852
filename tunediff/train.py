"""Train one configuration outside any search: `tunediff train --config best.yaml --budget 5m`.

Without --budget and --samples it trains until it is stopped. The same command again resumes an
interrupted training, also with other knobs of `parallel`, and does nothing to a finished one. Runs
alone, or as `torchrun --nproc-per-node N -m tunediff.train …` with parallel.workers = N.
TensorBoard curves lie in the folder of the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tunediff import cli
from tunediff.api import train_run
from tunediff.api.train_run import TrainOptions
from tunediff.core.options import PrintingOptions
from tunediff.core.progress import EventLines


class TrainCommandOptions(PrintingOptions, TrainOptions):
    """The options of the command."""


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Train; see `--help`."""
    options = cli.parse("train", __doc__, TrainCommandOptions, argv)
    request = train_run.prepare(options, sys.argv[1:] if argv is None else argv)
    stopped = train_run.run(request, EventLines.of(options))
    if os.environ.get("RANK", "0") != "0":  # rank 0 speaks
        return cli.INTERRUPTED if stopped else cli.OK
    if stopped:
        print(f"\n{stopped}", file=sys.stderr)
        return cli.INTERRUPTED
    result = train_run.result(request.folder)
    facts = {key: result[key] for key in result if key not in ("metric", "objective", "value")}
    cli.result({result["metric"]: result["value"], **facts}, options.as_json, result)
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
