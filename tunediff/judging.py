"""Judge runs that have already finished: `tunediff judge A B --objective val_loss`.

Each of A, B, … is a set of runs: a folder or a pattern of file names with one log for each run, or
a CSV or JSON-lines file with one row for each run (a chart of Weights & Biases: one column). Each
set is compared with the first one by Welch's test, or with --paired-by by a test of pairs; a single
set is compared with a --target.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tunediff import cli
from tunediff.api import finished
from tunediff.api.finished import JudgeOptions
from tunediff.compare import EXITS
from tunediff.core.options import PrintingOptions
from tunediff.report import reading, text


class JudgeCommandOptions(PrintingOptions, JudgeOptions):
    """The options of the command."""


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Judge; see `--help`."""
    exits = "0 better, 10 no difference or not shown, 11 worse, 2 bad input"
    options = cli.parse("judge", __doc__, JudgeCommandOptions, argv, exits)
    found = finished.judged(options)
    if options.as_json:
        cli.print_json(reading.as_json(found))
    else:
        print("\n".join(text.lines(found)))
    return EXITS[found.verdict] if found.verdict is not None else cli.OK


if __name__ == "__main__":
    sys.exit(main())
