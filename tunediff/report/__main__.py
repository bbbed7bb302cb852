"""The report of a search, while it runs or after: `python -m tunediff.report NAME`.

Writes report.html, one file that opens in any browser without a network, and beside it the folder report with the same
data as CSV and PNG. NAME may also be the confirming runs of a search: NAME/confirm.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tunediff import cli
from tunediff.config import ConfigError
from tunediff.report import page, subject


def main(argv: Sequence[str] | None = None) -> int:
    """Write a report; see `--help`."""
    return cli.guarded(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    parser = cli.parser("report", __doc__ or "")
    parser.add_argument("name", help="name of the search")
    parser.add_argument(
        "--storage", type=Path, default=cli.STORAGE, help="folder of all searches (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="folder to write into (default: that of the search)")
    args = parser.parse_args(argv)
    folder = (args.storage / args.name).absolute()
    storage = "" if args.storage == cli.STORAGE else str(args.storage)
    about, out = subject.read(folder, args.name, storage), args.out or folder
    try:
        written = page.write_all(about, out)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from None
    for kind, path in written.items():
        print(f"{kind}: {path}")
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
