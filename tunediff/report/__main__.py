"""Write the report of a search, during or after it: `python -m tunediff.report NAME`.

Writes report.html, one file that opens in any browser without a network. NAME may also be the
confirming runs of a search: NAME/confirm.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tunediff import cli, search_space
from tunediff.core import remote
from tunediff.core.options import REQUIRED, JsonOptions, option
from tunediff.core.refusals import writing
from tunediff.report import context, page


class ReportOptions(JsonOptions, remote.StorageOptions):
    """The options of the command."""

    name: str = option(REQUIRED, "name of the search", flag="name")
    out: Path | None = option(None, "folder to write into (default: that of the search)")
    open: bool = option(False, "open it in a browser")


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Write a report; see `--help`."""
    options = cli.parse("report", __doc__, ReportOptions, argv)
    name, storage = options.name, Path(options.storage)
    folder = search_space.folder_of(name, storage)
    about, out = context.read(folder, name, storage), options.out or folder
    with writing("--out", out):
        written = page.write_search(about, out)
    remote.push_or_warn(out)
    cli.result({"report": written}, options.as_json)
    if options.open:
        cli.open_in_browser(written)
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
