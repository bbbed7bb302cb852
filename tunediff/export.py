"""Take the best configuration out of a search, with its weights: `python -m tunediff.export NAME`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tunediff import cli
from tunediff.config import ConfigError
from tunediff.reporting import results
from tunediff.reporting.export import choose, export


def main(argv: Sequence[str] | None = None) -> int:
    """Export a trial; see `--help`."""
    return cli.guarded(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    parser = cli.parser("export", __doc__ or "")
    parser.add_argument("name", help="name of the search")
    parser.add_argument(
        "--storage", type=Path, default=cli.STORAGE, help="folder of all searches (default: %(default)s)"
    )
    parser.add_argument("--trial", help="export this trial (default: the best)")
    parser.add_argument("--to", type=Path, help="YAML file to write (default: best.yaml in the folder of the search)")
    args = parser.parse_args(argv)
    found = results.read((args.storage / args.name).absolute())
    trial = choose(found, args.trial)
    to = args.to or args.storage / args.name / (f"{args.trial}.yaml" if args.trial else "best.yaml")
    if to.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--to: {str(to)!r} is not allowed; allowed: a file name that ends in .yaml")
    try:
        written = export(found, trial, to)
    except OSError as error:
        raise ConfigError(f"--to: {to} cannot be written: {error.strerror}") from None
    print(f"trial: {trial.name}")
    for kind, path in written.items():
        print(f"{kind}: {path}")
    print(f"train: python -m tunediff.train --config {to} --budget {trial.budget_s or 60:.10g}s")
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
