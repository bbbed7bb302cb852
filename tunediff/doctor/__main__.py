"""What works on this machine and what does not, in about a minute, and what that means for a search.

Each line: ok, weak, missing, wrong or skipped, what was found, and what it means. With --full also, a few minutes
each: A, whether this device computes what a CPU does, in every form that a search draws; B, how fast it is; C, a search
of six trials with faults in it. Exit code 0 where a search can run and be believed, else 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tunediff import cli, environment
from tunediff.config import ConfigError
from tunediff.doctor import finding
from tunediff.doctor.finding import Check, Finding, Site

PARTS = {"A": "right", "B": "fast", "C": "whole"}
"""Of `--full`: name and module."""


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Look; see `--help`."""
    parser = cli.parser("doctor", __doc__ or "")
    parser.epilog = "Exit codes: 0 a search can run here, 1 it cannot, 2 bad input, 130 interrupted."
    add = parser.add_argument
    add("--full", action="store_true", help="the other parts as well: a few minutes each")
    add("--part", action="append", choices=tuple(PARTS), help="with --full: only this part; may be given several times")
    add("--out", type=Path, help="also write the result as one HTML page to this file")
    cli.add_storage(parser)
    cli.add_printing(parser, quiet=False)
    args = parser.parse_args(argv)
    if args.part and not args.full:
        raise ConfigError("--part: goes with --full")
    if args.out is not None:
        cli.allow(
            args.out.suffix == ".html" and not args.out.is_dir(), "--out", args.out, "a file that ends with .html"
        )
        cli.check_writable("--out", args.out)
    # As Ctrl-C: what was started for a look, a search even, ends with it.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _examine(args, cli.typed("doctor", argv))
    finally:
        signal.signal(signal.SIGTERM, before)


def _examine(args: argparse.Namespace, command: str) -> int:
    begin, found, heading, device = time.monotonic(), list[Finding](), "", "cpu"
    for check, site in _checks(args):
        one, device = check(site), site.device
        found.append(one)
        if not args.json:
            if one.part != heading:
                title = f"part {one.part}, {PARTS[one.part]}" if one.part in PARTS else "this machine"
                print(f"{chr(10) if heading else ''}{title}")
                heading = one.part
            print("\n".join(finding.lines(one)), flush=True)
    whole = {
        "can_search": not any(one.stops for one in found), "verdict": finding.verdict(found), "command": command,
        "wall_s": time.monotonic() - begin, "device": device, "environment": environment.describe(),
        "findings": [dataclasses.asdict(one) for one in found],
    }  # fmt: skip
    if args.out is not None:
        from tunediff.doctor import page  # imports the report's pieces

        page.write(args.out, whole, found)
    if args.json:
        cli.print_json(whole)
    else:
        print(f"\n{whole['verdict']}\nwall_s: {cli.number(whole['wall_s'])}")
        if args.out is not None:
            print(f"page: {args.out}")
    return cli.OK if whole["can_search"] else cli.FAILED


def _checks(args: argparse.Namespace) -> Iterator[tuple[Check, Site]]:
    """What is asked for, in order. Torch is imported here, after what is refused."""
    from tunediff.distributed import alone
    from tunediff.doctor import machine, software

    site = Site(args.storage, alone().device.type)
    yield from ((check, site) for check in (*machine.CHECKS, *software.CHECKS))
    for name in (args.part or PARTS) if args.full else ():
        module = importlib.import_module(f"tunediff.doctor.{PARTS[name]}")
        yield from ((check, site) for check in module.CHECKS)


if __name__ == "__main__":
    sys.exit(main())
