"""Search for the configuration with the best result for its training seconds: `python -m
tunediff.search`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from tunediff import analysis, cli
from tunediff.analysis import evidence
from tunediff.api import run, search_setup
from tunediff.api.options import SearchOptions
from tunediff.config import ConfigError
from tunediff.core.options import PrintingOptions, allow, option
from tunediff.core.progress import EventLines
from tunediff.core.signals import terminable
from tunediff.report import plan, reading, text
from tunediff.report.result import PAGE


class SearchCommandOptions(PrintingOptions, SearchOptions):
    """The options of the command."""

    only_check: bool = option(False, "only check your workload, and print the plan", flag="--check")
    open: bool = option(False, "open the report in a browser when the search has ended")


def arguments(argv: Sequence[str] | None) -> SearchCommandOptions:
    """Parse the command line."""
    return cli.parse("search", __doc__, SearchCommandOptions, argv)


@cli.guarded
@terminable()
def main(argv: Sequence[str] | None = None) -> int:
    """Run a search; see `--help`."""
    options = arguments(argv)
    options.dry_run |= options.only_check
    lines = EventLines.of(options)
    if options.only_check and (options.resume is not None or not options.check):
        other = "--no-check" if options.resume is None else "--resume"
        raise ConfigError(f"command line: {other} is not allowed with --check")
    request = search_setup.prepare(options)
    if options.dry_run:
        source, file = str(request.space.source), request.space.workload.file
        fits = not options.only_check or file is not None
        allow(fits, "--check", source, "a workload of your own: others need no check")
        say = functools.partial(lines.aside.say, timed=False)
        planned = search_setup.measured_plan(request, options, say)
        cli.print_json(planned) if options.as_json else print("\n".join(plan.lines(planned)))
        plan.check(planned, options.force)
        return cli.OK
    command_time = run.search(request, options, lines)
    known = evidence.read(analysis.read(request.folder))
    command_time.charge()
    found = reading.of_search(known)
    if options.as_json:
        cli.print_json(reading.as_json(found))
    else:
        print("\n".join(text.lines(found)))
    if options.open:
        cli.open_in_browser(request.folder / PAGE)
    return cli.OK if known.results.leader is not None else cli.NO_SUCCESS


if __name__ == "__main__":
    sys.exit(main())
