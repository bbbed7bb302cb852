"""Is B better than A at equal training seconds, or device-seconds, here? `python -m
tunediff.compare A B`.

A and B: a configuration file such as an exported best.yaml, digits or cifar10, or a workload's file
(mine.py, mine.py:PRESET, mine.py@REVISION of its git repository); knob=value behind one of them
goes on top of it. Without B it is A with what stands behind it: `compare mine.py lr=3e-4`. Both run
once on each of several seeds, which decide initial weights, order of the data and everything drawn,
one run at a time, until the difference is larger than the noise, or no number of pairs that is
allowed would tell it. The test allows for every look: B is wrongly called better, or worse, in at
most 2.5 % of comparisons each. Any command can be compared too: `compare --run 'python train.py
--lr {lr} --seed {seed}' lr=3e-4 lr=1e-3 --objective val_loss`; see `compare --run= --help`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from tunediff import cli
from tunediff.analysis import pairs
from tunediff.api import compare_setup
from tunediff.api.compare_setup import CompareOptions
from tunediff.command import compare as command_compare
from tunediff.core.files import write_text
from tunediff.core.options import PrintingOptions, option
from tunediff.core.progress import EventLines
from tunediff.core.refusals import check_writable, writing
from tunediff.core.signals import terminable
from tunediff.report import pair_plan

NO_DIFFERENCE, WORSE, FAILED_RUN = 10, 11, 12
EXITS = {
    "better": cli.OK,
    "no significant difference": NO_DIFFERENCE,
    "worse": WORSE,
    "failed": FAILED_RUN,
}


@dataclasses.dataclass(kw_only=True)
class CommandOptions(PrintingOptions, CompareOptions):
    """The options of the command."""

    comment: Path | None = option(
        None, "also write the result as Markdown, for a pull request", metavar="FILE"
    )


def arguments(argv: Sequence[str] | None) -> CommandOptions:
    """Parse the command line."""
    parser = cli.parser("compare", __doc__ or "")
    parser.epilog = (
        "Exit codes: 0 B is better, 10 no significant difference, 11 B is worse, 12 a run of one"
        " failed; 1 failed, 2 bad input, 130 interrupted."
    )
    return cli.parse(parser, CommandOptions, argv)


@cli.guarded
@terminable()
def main(argv: Sequence[str] | None = None) -> int:
    """Compare; see `--help`."""
    words = sys.argv[1:] if argv is None else argv
    if command_compare.concerns(words):
        return command_compare.main(words)
    options = arguments(argv)
    if options.comment is not None:
        check_writable("--comment", options.comment)
    if options.dry_run and options.resume is None:
        with compare_setup.prepare(options, print) as request:
            planned = compare_setup.planned(request, options, print)
        cli.print_json(planned) if options.json else print("\n".join(pair_plan.lines(planned)))
        return cli.OK
    from tunediff.api import compare_run  # imports matplotlib
    from tunediff.report import pairs as report

    folder = compare_run.run(options, EventLines.of(options))
    if options.comment is not None:
        with writing("--comment", options.comment):
            write_text(options.comment, report.comment(pairs.read(folder)))
    with contextlib.suppress(OSError):  # its exit code says it too
        if options.json:
            cli.print_json(compare_run.as_json(folder))
        else:
            print("\n".join(compare_run.lines(folder)), flush=True)
    return EXITS.get(pairs.read(folder).verdict or "", cli.FAILED)


if __name__ == "__main__":
    sys.exit(main())
