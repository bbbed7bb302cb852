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
from tunediff.core.refusals import writing
from tunediff.report import context, page


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Write a report; see `--help`."""
    parser = cli.parser("report", __doc__ or "")
    parser.add_argument("name", help="name of the search")
    cli.add_storage(parser)
    parser.add_argument(
        "--out", type=Path, help="folder to write into (default: that of the search)"
    )
    parser.add_argument("--open", action="store_true", help="open it in a browser")
    cli.add_json(parser)
    args = parser.parse_args(argv)
    folder = search_space.folder_of(args.name, args.storage)
    about, out = context.read(folder, args.name, args.storage), args.out or folder
    with writing("--out", out):
        written = page.write_search(about, out)
    remote.push_or_warn(out)
    cli.result({"report": written}, args.json)
    if args.open:
        cli.open_in_browser(written)
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
