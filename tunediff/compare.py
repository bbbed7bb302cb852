"""Decide whether B is better than A at equal training seconds: `tunediff compare A B`.

A and B: a configuration file such as an exported best.yaml, digits or cifar10, or a workload's file
(mine.py, mine.py:PRESET, mine.py@REVISION of its git repository). knob=value behind one of them
changes it. Without B, B is A with the knobs behind it: `compare mine.py lr=3e-4`. Both run on the
same seeds, one run at a time, until the difference is larger than the noise, or more pairs would
most likely not show one. The test allows for every analysis: B is wrongly called better, or worse,
in at most 2.5 % of comparisons each.

Any command can be compared too:

  tunediff compare --run 'python train.py --lr {lr} --seed {seed}' lr=3e-4 lr=1e-3 \\
    --objective val_loss --outcome final

A and B differ in one thing: two commands (--run twice), two revisions of the repository (--at
twice; . is the working copy), or a parameter given twice. With --outcome final each run goes on to
its own end, without it for --budget 60s. The value is read from what the command prints
(val_loss: 0.31, JSON, METRIC val_loss=0.31).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tunediff import cli
from tunediff.analysis.comparison import Comparison
from tunediff.api import compare_setup, run
from tunediff.api.options import CompareOptions
from tunediff.core.files import write_text
from tunediff.core.options import PrintingOptions, check_writable, option, writing
from tunediff.core.outcomes import Verdict
from tunediff.core.progress import EventLines
from tunediff.core.signals import terminable
from tunediff.report import plan, reading, sentences, text

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


class CompareCommandOptions(PrintingOptions, CompareOptions):
    """The options of the command."""

    comment: Path | None = option(
        None, "also write the result as Markdown, for a pull request", metavar="FILE"
    )
    fail_on: Literal["no-difference", "worse"] = option(
        "no-difference",
        "verdicts with an exit code other than 0: no-difference and worse (default), or only worse",
    )


def arguments(argv: Sequence[str] | None) -> CompareCommandOptions:
    """Parse the command line."""
    exits = (
        f"0 B is better, 10 {sentences.VERDICTS[Verdict.NO_DIFFERENCE]}, 11 B is worse,"
        " 12 a run of one failed; 1 failed, 2 bad input, 130 interrupted"
    )
    return cli.parse("compare", __doc__, CompareCommandOptions, argv, exits)


@cli.guarded
@terminable()
def main(argv: Sequence[str] | None = None) -> int:
    """Compare; see `--help`."""
    options = arguments(argv)
    if options.comment is not None:
        check_writable("--comment", options.comment)
    if options.dry_run and options.resume is None:
        with compare_setup.prepare(options, print) as new:
            planned = compare_setup.planned(new, options, print)
        cli.print_json(planned) if options.as_json else print("\n".join(plan.lines(planned)))
        return cli.OK
    folder = run.compare(options, EventLines.of(options))
    if options.comment is not None:
        with writing("--comment", options.comment):
            write_text(options.comment, text.comment(Comparison.read(folder)))
    with contextlib.suppress(OSError):  # its exit code says it too
        if options.as_json:
            cli.print_json(reading.as_json(reading.of_folder(folder)))
        else:
            print("\n".join(text.lines(reading.of_folder(folder))), flush=True)
    code = EXITS.get(Comparison.read(folder).verdict, cli.FAILED)
    return cli.OK if code == NO_DIFFERENCE and options.fail_on == "worse" else code


if __name__ == "__main__":
    sys.exit(main())
