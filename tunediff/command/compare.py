"""Is one command, value or revision better than another at equal seconds, here?

`tunediff compare --run 'python train.py --lr {lr} --seed {seed}' lr=3e-4 lr=1e-3 --objective val_loss`

A and B differ in one thing: two commands (--run twice), two revisions of the repository (--at
twice; `.` is the working copy), or name=value of a parameter given twice. Both run on each of
several seeds, one run at a time, until the difference is larger than the noise, or no number of
pairs that is allowed would tell it: B is wrongly called better, or worse, in at most 2.5 % of
comparisons each. The value is read from what the command prints (`val_loss: 0.31`, JSON,
`METRIC val_loss=0.31`), and nothing in the command has to change.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from tunediff import cli
from tunediff.analysis import pairs
from tunediff.command import comparison
from tunediff.command.definition import FILE, CommandDefinition, OutcomeName
from tunediff.config import ConfigError
from tunediff.config.code import FOLDER
from tunediff.core import text
from tunediff.core.files import write_text
from tunediff.core.options import PrintingOptions
from tunediff.core.progress import EventLines
from tunediff.core.refusals import allow, check_name, check_new, writing
from tunediff.core.signals import terminable
from tunediff.search_space import duration_s

MOST = 12
EXITS = {"better": 0, "no significant difference": 10, "worse": 11, "failed": 12}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = cli.parser("compare", __doc__ or "")
    parser.epilog = (
        "Exit codes: 0 B is better, 10 no significant difference, 11 B is worse, 12 a run of one"
        " failed; 1 failed, 2 bad input, 130 interrupted."
    )
    add = parser.add_argument
    add(
        "words",
        nargs="*",
        metavar="name=value",
        help="values of parameters; one given twice is A's and B's",
    )
    add("--run", action="append", default=[], metavar="COMMAND",
        help="a command with {name} for its parameters, {seed}, {folder}, {steps}, {port}, {gpus},"
             " {overrides} or {flags} for all other parameters")  # fmt: skip
    add(
        "--at",
        action="append",
        default=[],
        metavar="REVISION",
        help="a git revision; . is the working copy",
    )
    add("--objective", metavar="NAME", help="the metric that decides, as the command prints it")
    add(
        "--mode",
        choices=("min", "max"),
        default="min",
        help="which direction is better (default: min)",
    )
    add("--pattern", help="a regular expression for it, with one group around the number")
    add(
        "--metrics",
        metavar="FILE",
        help="a file with it that the command writes, e.g. {folder}/results.json",
    )
    add("--reduce", default="last", help="last (default), mean:K, min or max of its values")
    add("--outcome", choices=get_args(OutcomeName), default="budget",
        help="the value at the budget (default), the final one, or the time until --target")  # fmt: skip
    add("--target", metavar="CONDITION", help="for --outcome time: e.g. val_loss<=3.28")
    add("--clock-from", metavar="PATTERN", help="the clock begins at a line that matches")
    add("--time", metavar="PATTERN", help="the command's own seconds, e.g. train_time:(\\d+)ms")
    add(
        "--budget", help="seconds of a run, e.g. 90s, 10m (default: 60s; none with --outcome final)"
    )
    add("--grace", default="10s", help="from SIGTERM to SIGKILL (default: 10s)")
    add("--gpus", type=int, default=0, help="what {gpus} stands for")
    add("--shell", action="store_true", help="run it by a shell")
    add("--same-seed", action="store_true", help="the command takes no seed, and that is meant")
    add("--pairs", type=int, default=MOST, help=f"pairs of runs at most (default: {MOST})")
    add("--resolution", help="a difference that does not matter: 2%% of A's value, or 0.01 for max")
    add("--name", help="name of the comparison and its folder (default: compare and the time)")
    cli.add_storage(parser)
    add("--resume", metavar="NAME", help="go on with a comparison that was interrupted")
    add("--no-check", action="store_true", help="do not try the commands first")
    add("--dry-run", action="store_true", help="print what would run, and start nothing")
    add("--comment", type=Path, metavar="FILE", help="also write the result as Markdown")
    cli.add_options(parser, PrintingOptions)
    return parser.parse_intermixed_args(argv)


def concerns(words: Sequence[str], storage: Path = text.STORAGE) -> bool:
    """Return whether the words of a command line ask for a comparison of commands."""
    if any(word == "--run" or word.startswith("--run=") for word in words):
        return True
    options = [word.partition("=") for word in words]
    following = [*words, ""][1:]

    def value(name: str) -> str | None:
        given = zip(options, following, strict=True)
        return next(
            (text if equals else after for (word, equals, text), after in given if word == name),
            None,
        )

    resumed = value("--resume")
    folder = Path(value("--storage") or storage) / str(resumed)
    return resumed is not None and (folder / pairs.SIDES[0] / FOLDER / FILE).is_file()


def main(argv: Sequence[str] | None = None) -> int:
    """Compare commands; see `--help`. Called by `tunediff.compare` for `--run`."""
    with terminable():
        options = arguments(argv)
        lines = EventLines.of(options)
        folder = _resumed(options) if options.resume is not None else _new(options, lines)
        if folder is None:
            return 0
        again = text.command("compare", "--resume", folder.name, storage=folder.parent)
        try:
            now = comparison.run_pairs(folder, again, lines.say)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted; what was measured stays. To go on: {again}"
            ) from None
        comparison.remove_worktrees(folder)
        _show(now, options)
        return EXITS.get(now.verdict or "", 1)


def _resumed(options: argparse.Namespace) -> Path:
    if options.words or options.run or options.at or options.objective:
        raise ConfigError("--resume: takes both sides and what is measured from the folder")
    folder: Path = options.storage.resolve() / options.resume
    pairs.read(folder)
    return folder


def _new(options: argparse.Namespace, lines: EventLines) -> Path | None:
    """Check what is asked for, print the plan, and make the folder; None for a dry run."""
    if options.objective is None:
        raise ConfigError(
            "--objective: is missing; allowed: the name of the metric as the command prints it"
        )
    allow(3 <= options.pairs <= 100, "--pairs", options.pairs, "a whole number from 3 to 100")
    budget_s: float | None = None
    if options.outcome != "final" or options.budget is not None:
        budget_s = duration_s(options.budget or "60s", "--budget")
    settings: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("objective", "mode", "pattern", "metrics", "reduce", "outcome", "target", "clock_from",
                     "time", "gpus", "shell", "same_seed")
    } | {"grace_s": duration_s(options.grace, "--grace")}  # fmt: skip
    both = comparison.sides(options.run, options.at, options.words, settings)
    for side in both:
        side.definition.template.check(
            list(side.parameters), "command line", same_seed=options.same_seed
        )
        if side.definition.takes_steps and budget_s is None:
            raise ConfigError("--run: {steps}: needs a --budget, in which so many steps are to end")
    within = comparison.least_within(options.resolution, options.mode)
    name = options.name or f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
    folder: Path = options.storage.resolve() / name
    check_name(name)
    check_new(folder)
    for line in plan(both, budget_s, options.pairs):
        lines.say(line)
    if options.dry_run:
        return None
    if not options.no_check:
        comparison.checked(both, budget_s, lines.say)
    with writing("--storage", folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        comparison.create(folder, both, budget_s, options.pairs, within)
    return folder


def plan(both: Sequence[comparison.Side], budget_s: float | None, most: int) -> list[str]:
    """Return what would run, and what differs from a comparison of workloads."""
    lines = [f"{name}: {side.name}" for name, side in zip(pairs.SIDES, both, strict=True)]
    definition: CommandDefinition = both[0].definition
    each = "its own end" if budget_s is None else text.seconds(budget_s)
    total = "" if budget_s is None else f": at most {text.seconds(2 * most * budget_s)}"
    lines.append(f"at most {most} pairs × 2 runs × {each}{total}")
    if definition.outcome == "budget":
        lines.append(
            "The value at the budget counts. Evaluations and start-up are inside it, unless the"
            " command prints TUNEDIFF start, pause and go"
        )
        if not any(side.definition.takes_steps for side in both):
            lines.append(
                "A schedule by a number of steps would be cut where it is still high: give the"
                " command {steps}, which are measured so that it ends at the budget"
            )
    return lines


def _show(now: pairs.Pairs, options: argparse.Namespace) -> None:
    """Print the result, and write the report where what draws it is installed."""
    try:
        from tunediff.api import compare_run
        from tunediff.report import pairs as report
    except ImportError as error:  # the verdict needs neither pandas nor matplotlib
        difference = now.look.differences[0]
        print(f"verdict: {now.verdict} ({difference}); no report: {error}")
        return
    report.write_all(now)
    if options.comment is not None:
        with writing("--comment", options.comment):
            write_text(options.comment, report.comment(now))
    if options.json:
        cli.print_json(compare_run.as_json(now.folder))
    else:
        print("\n".join([*compare_run.lines(now.folder), *comparison.clocks(now)]), flush=True)


if __name__ == "__main__":
    sys.exit(cli.guarded(main)())
