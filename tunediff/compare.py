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

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunediff import cli
from tunediff.analysis import sides as side_files
from tunediff.analysis.comparison import Comparison
from tunediff.api import command_setup, compare_run, compare_setup
from tunediff.api.command_options import CommandCompareOptions
from tunediff.api.compare_setup import CompareOptions
from tunediff.core.files import write_text
from tunediff.core.options import PrintingOptions, option
from tunediff.core.outcomes import Verdict
from tunediff.core.progress import EventLines
from tunediff.core.refusals import check_writable, writing
from tunediff.core.signals import terminable
from tunediff.report import pair_summary, plan

OF_COMMANDS = """\
Is one command, value or revision better than another at equal seconds, here?

  tunediff compare --run 'python train.py --lr {lr} --seed {seed}' lr=3e-4 lr=1e-3 \\
    --objective val_loss --outcome final

A and B differ in one thing: two commands (--run twice), two revisions of the repository (--at
twice; . is the working copy), or name=value of a parameter given twice. Both run on each of several
seeds, one run at a time, until the difference is larger than the noise, or no number of pairs that
is allowed would tell it: B is wrongly called better, or worse, in at most 2.5 % of comparisons
each. Each run goes on to its own end; without --outcome final, for --budget 60s. The value is read
from what the command prints (val_loss: 0.31, JSON, METRIC val_loss=0.31)."""
NO_DIFFERENCE, WORSE, FAILED_RUN = 10, 11, 12
EXITS = {
    Verdict.BETTER: cli.OK,
    Verdict.NO_DIFFERENCE: NO_DIFFERENCE,
    Verdict.EQUIVALENT: NO_DIFFERENCE,
    Verdict.NOT_SHOWN: NO_DIFFERENCE,
    Verdict.ONE_RUN: NO_DIFFERENCE,
    Verdict.WORSE: WORSE,
    Verdict.FAILED: FAILED_RUN,
}


@dataclasses.dataclass(kw_only=True)
class Printing(PrintingOptions):
    """How the command prints its result."""

    comment: Path | None = option(
        None, "also write the result as Markdown, for a pull request", metavar="FILE"
    )
    fail_on: str = option(
        "no-difference",
        "which verdicts are exit codes other than 0: no-difference and worse (default), or worse"
        " alone",
        choices=("no-difference", "worse"),
    )


@dataclasses.dataclass(kw_only=True)
class WorkloadsOptions(Printing, CompareOptions):
    """The options of the command for workloads."""


@dataclasses.dataclass(kw_only=True)
class CommandsOptions(Printing, CommandCompareOptions):
    """The options of the command with --run."""


def arguments(argv: Sequence[str]) -> WorkloadsOptions | CommandsOptions:
    """Parse the command line."""
    commands = concerns_commands(argv)
    parser = cli.parser("compare", OF_COMMANDS if commands else __doc__ or "")
    parser.epilog = (
        "Exit codes: 0 B is better, 10 no significant difference, 11 B is worse, 12 a run of one"
        " failed; 1 failed, 2 bad input, 130 interrupted."
    )
    if commands:
        return cli.parse(parser, CommandsOptions, argv)
    return cli.parse(parser, WorkloadsOptions, argv)


def concerns_commands(words: Sequence[str]) -> bool:
    """Return whether the words of a command line ask for a comparison of commands."""
    if any(word == "--run" or word.startswith("--run=") for word in words):
        return True
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--resume")
    parser.add_argument("--reproduce", type=Path)
    cli.add_storage(parser)
    with contextlib.suppress(argparse.ArgumentError):
        found, _ = parser.parse_known_args(words)
        if found.reproduce is not None:
            return side_files.of_commands(found.reproduce)
        if found.resume is not None:
            return side_files.of_commands(Path(found.storage) / found.resume)
    return False


@cli.guarded
@terminable()
def main(argv: Sequence[str] | None = None) -> int:
    """Compare; see `--help`."""
    options = arguments(sys.argv[1:] if argv is None else argv)
    if options.comment is not None:
        check_writable("--comment", options.comment)
    if options.dry_run and options.resume is None:
        planned = _planned(options)
        cli.print_json(planned) if options.json else print("\n".join(plan.lines(planned)))
        return cli.OK
    folder = compare_run.run(options, EventLines.of(options))
    if options.comment is not None:
        from tunediff.report import pairs as report  # imports matplotlib

        with writing("--comment", options.comment):
            write_text(options.comment, report.comment(Comparison.read(folder)))
    with contextlib.suppress(OSError):  # its exit code says it too
        if options.json:
            cli.print_json(pair_summary.as_json(folder))
        else:
            print("\n".join(pair_summary.lines(folder)), flush=True)
    code = EXITS.get(Comparison.read(folder).verdict, cli.FAILED)
    return cli.OK if code == NO_DIFFERENCE and options.fail_on == "worse" else code


def _planned(options: WorkloadsOptions | CommandsOptions) -> dict[str, Any]:
    """Return what would run, as JSON."""
    if isinstance(options, CommandsOptions):
        return command_setup.planned(command_setup.prepare(options))
    with compare_setup.prepare(options, print) as request:
        return compare_setup.planned(request, options, print)


if __name__ == "__main__":
    sys.exit(main())
