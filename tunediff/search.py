"""Search for the configuration with the best result for its training seconds: `python -m
tunediff.search`."""

from __future__ import annotations

import dataclasses
import functools
import sys
import webbrowser
from collections.abc import Sequence

from tunediff import cli, search_space
from tunediff.api import search_run, search_setup
from tunediff.api.search_setup import SearchOptions, SearchRequest
from tunediff.core.progress import EventLines
from tunediff.core.signals import terminable
from tunediff.integrations.services import SERVICES
from tunediff.report import plan


@dataclasses.dataclass
class CommandOptions(SearchOptions):
    """The options of the command: those of a search, and how it prints."""

    json: bool = False
    quiet: bool = False
    progress: str = "text"
    open: bool = False
    check: bool = False


def arguments(argv: Sequence[str] | None) -> CommandOptions:
    """Parse the command line."""
    parser = cli.parser("search", __doc__ or "")
    add = parser.add_argument
    files = (
        "search file (default: digits), or a workload's file, which is searched around its baseline"
    )
    cli.completes(
        add("words", nargs="*", metavar="SPACE.yaml | mine.py | knob=value", help=files),
        search_space.shipped,
    )
    add("--name", help="name of the search and its folder (default: search file and time)")
    cli.add_storage(parser)
    add("--trials", type=int, help="trials in all, the baseline included")
    add("--budget", help="training seconds per trial, e.g. 90s, 10m")
    cli.add_unit(parser)
    add("--total", help="wall-clock of the whole search, confirming runs included, e.g. 8h")
    add(
        "--confirm",
        type=int,
        metavar="N",
        help="how many of the best to run again on new seeds; 0: none",
    )
    add("--seed", type=int, help="seed of the search")
    cli.add_machine(parser, "search")
    add("--resume", metavar="NAME", help="go on with a search that was interrupted")
    add(
        "--warm-start", metavar="NAME", help="an earlier search whose trials this one knows already"
    )
    add(
        "--early-stopping",
        choices=search_space.EARLY_STOPPING,
        help="the rule that stops trials early",
    )
    add(
        "--track",
        choices=SERVICES,
        help="the service that shows every trial as a run (docs/how-to/trackers.md)",
    )
    tried = "a workload of your own with two steps and two evaluations"
    add("--check", action="store_true", help=f"only try {tried}, then print what --dry-run does")
    add("--no-check", action="store_true", help=f"do not try {tried}")
    force = (
        "start what would take over 30 days, 100,000 trials or the whole disk, or what another"
        " machine began to run"
    )
    add("--force", action="store_true", help=force)
    plan_help = f"print what would run, what it costs and if it fits; tries {tried} first"
    add("--dry-run", action="store_true", help=plan_help)
    add(
        "--open", action="store_true", help="open the report in a browser when the search has ended"
    )
    cli.add_printing(parser)
    # knob=value may stand before and after options
    options = CommandOptions(**vars(parser.parse_intermixed_args(argv)))
    options.dry_run |= options.check
    return options


@cli.guarded
@terminable()
def main(argv: Sequence[str] | None = None) -> int:
    """Run a search; see `--help`."""
    options = arguments(argv)
    lines = EventLines.of(options)
    request = search_setup.prepare(options)
    if options.check:
        own = request.space.workload.file is not None
        cli.allow(
            own,
            "--check",
            str(request.space.source),
            "a workload of your own: others need no check",
        )
        for name in ("resume", "no_check"):
            cli.allow(
                not getattr(options, name), f"--{name.replace('_', '-')}", True, "not with --check"
            )
    if options.dry_run:
        _print_plan(request, options, lines)
        return cli.OK
    command_time = search_run.run(request, options, lines)
    from tunediff.report import (
        page,
        summary,
    )  # imports matplotlib, which no search waits for before its first trial

    evidence = search_run.read(request.folder)
    command_time.charge()
    (
        cli.print_json(summary.as_json(evidence))
        if options.json
        else print("\n".join(summary.lines(evidence)))
    )
    if options.open and not webbrowser.open((request.folder / page.PAGE).as_uri()):
        print(
            f"--open: there is no browser; the report is {request.folder / page.PAGE}",
            file=sys.stderr,
        )
    return cli.OK if evidence.results.leader is not None else cli.NO_SUCCESS


def _print_plan(request: SearchRequest, options: CommandOptions, lines: EventLines) -> None:
    """Print what would run and what it costs, as measured. Raises `ConfigError` for what would take
    too long."""
    say = functools.partial(lines.aside.say, timed=False)
    if not options.check:  # which is of the file alone
        cli.check_creatable("--storage", request.folder)
    planned = search_setup.measured_plan(request, options, say)
    cli.print_json(planned) if options.json else print("\n".join(plan.lines(planned)))
    plan.check(planned, options.force)


if __name__ == "__main__":
    sys.exit(main())
