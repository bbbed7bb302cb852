"""Write the report of a search or a comparison, during or after it: `tunediff report NAME`.

Writes report.html, one file that opens in any browser without a network, and result.json. NAME may
also be the confirming runs of a search: NAME/confirm.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from tunediff import cli, search_space
from tunediff.analysis.comparison import Comparison
from tunediff.core import remote
from tunediff.core.options import REQUIRED, JsonOptions, option, writing
from tunediff.experiment.model import is_comparison
from tunediff.report import context, page


class ReportOptions(JsonOptions, remote.StorageOptions):
    """The options of the command."""

    name: str = option(REQUIRED, "name of the search or comparison", flag="name")
    out: Path | None = option(None, "folder to write into (default: its own)")
    open: bool = option(False, "open it in a browser")


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Write a report; see `--help`."""
    options = cli.parse("report", __doc__, ReportOptions, argv)
    name, storage = options.name, Path(options.storage)
    folder = search_space.folder_of(name, storage)
    if is_comparison(folder):
        write = functools.partial(page.write_sides, Comparison.read(folder))
    else:
        write = functools.partial(page.write_search, context.read(folder, name, storage))
    with writing("--out", out := options.out or folder):
        written = write(out)
    remote.push_or_warn(out)
    cli.result({"report": written}, options.as_json)
    if options.open:
        cli.open_in_browser(written)
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
