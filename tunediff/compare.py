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
from tunediff.core.progress import EventLines
from tunediff.core.signals import terminable
from tunediff.integrations.services import SERVICES
from tunediff.report import pair_plan

NO_DIFFERENCE, WORSE, FAILED_RUN = 10, 11, 12
EXITS = {
    "better": cli.OK,
    "no significant difference": NO_DIFFERENCE,
    "worse": WORSE,
    "failed": FAILED_RUN,
}


@dataclasses.dataclass
class CommandOptions(CompareOptions):
    """The options of the command: those of a comparison, and how it prints."""

    comment: Path | None = None
    json: bool = False
    quiet: bool = False
    progress: str = "text"


def arguments(argv: Sequence[str] | None) -> CommandOptions:
    """Parse the command line."""
    parser = cli.parser("compare", __doc__ or "")
    parser.epilog = (
        "Exit codes: 0 B is better, 10 no significant difference, 11 B is worse, 12 a run of one"
        " failed; 1 failed, 2 bad input, 130 interrupted."
    )
    add = parser.add_argument
    cli.completes(
        add(
            "words",
            nargs="*",
            metavar="A [knob=value …] [B [knob=value …]]",
            help="what is compared",
        )
    )
    add("--budget", help="training seconds of a run, e.g. 90s, 10m (default: 60s)")
    cli.add_unit(parser)
    add("--pairs", type=int, help=f"pairs of runs at most (default: {compare_setup.MOST})")
    add(
        "--resolution",
        help="a difference that does not matter, e.g. 2%% of A's value, or 0.01 of an accuracy",
    )
    add(
        "--compile",
        choices=("charged", "free"),
        help="whether compiling counts as training (default: charged)",
    )
    add(
        "--setup",
        choices=("charged", "free"),
        help="whether what comes before the first batch does (default: free)",
    )
    add("--name", help="name of the comparison and its folder (default: compare and the time)")
    cli.add_storage(parser, "all searches and comparisons")
    add("--resume", metavar="NAME", help="go on with a comparison that was interrupted")
    add(
        "--track",
        choices=SERVICES,
        help="the service that shows every run (docs/how-to/trackers.md)",
    )
    cli.add_machine(parser, "comparison")
    add(
        "--force",
        action="store_true",
        help="start what would take over 30 days, or what another machine began to run",
    )
    add(
        "--no-check",
        action="store_true",
        help="do not try workloads of your own with two steps and two evaluations",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print what would run and what it costs at most, and start nothing",
    )
    add(
        "--comment",
        type=Path,
        metavar="FILE",
        help="also write the result as Markdown, for a pull request",
    )
    cli.add_printing(parser)
    return CommandOptions(**vars(parser.parse_intermixed_args(argv)))


@cli.guarded
@terminable()
def main(argv: Sequence[str] | None = None) -> int:
    """Compare; see `--help`."""
    words = sys.argv[1:] if argv is None else argv
    if command_compare.concerns(words):
        return command_compare.main(words)
    options = arguments(argv)
    if options.comment is not None:
        cli.check_writable("--comment", options.comment)
    if options.dry_run and options.resume is None:
        with compare_setup.prepare(options, print) as request:
            planned = compare_setup.planned(request, options, print)
        cli.print_json(planned) if options.json else print("\n".join(pair_plan.lines(planned)))
        return cli.OK
    from tunediff.api import compare_run  # imports matplotlib
    from tunediff.report import pairs as report

    folder = compare_run.run(options, EventLines.of(options))
    if options.comment is not None:
        with cli.writing("--comment", options.comment):
            write_text(options.comment, report.comment(pairs.read(folder)))
    with contextlib.suppress(OSError):  # its exit code says it too
        if options.json:
            cli.print_json(compare_run.as_json(folder))
        else:
            print("\n".join(compare_run.lines(folder)), flush=True)
    return EXITS.get(pairs.read(folder).verdict or "", cli.FAILED)


if __name__ == "__main__":
    sys.exit(main())
