"""What works on this machine and what does not, in about a minute, and what that means for a search.

Each line: ok, weak, missing, wrong or skipped, what was found, and what it means. Exit code 0 if a search can run, else
1.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence

from tunediff import cli
from tunediff.core import environment, text
from tunediff.core.signals import command_began, terminable
from tunediff.doctor import finding
from tunediff.doctor.finding import Finding, Site


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Look; see `--help`."""
    parser = cli.parser("doctor", __doc__ or "")
    parser.epilog = "Exit codes: 0 a search can run here, 1 it cannot, 2 bad input, 130 interrupted."
    cli.add_storage(parser)
    cli.add_printing(parser, quiet=False)
    args = parser.parse_args(argv)
    with terminable():  # what was started for a look, a search even, ends with it
        return _examine(args, text.original_command("doctor", argv))


def _examine(args: argparse.Namespace, command: str) -> int:
    from tunediff.distributed import alone  # imports torch, after what is refused
    from tunediff.doctor import machine, software

    begun, site, findings = command_began(), Site(args.storage, alone().device.type), list[Finding]()
    for check in (*machine.CHECKS, *software.CHECKS):
        findings.append(check(site))
        if not args.json:
            print("\n".join(finding.lines(findings[-1])), flush=True)
    whole = {
        "can_search": not any(result.stops for result in findings), "verdict": finding.verdict(findings),
        "command": command,
        "wall_s": time.monotonic() - begun, "device": site.device, "environment": environment.describe(),
        "findings": [dataclasses.asdict(result) for result in findings],
    }  # fmt: skip
    if args.json:
        cli.print_json(whole)
    else:
        print(f"\n{whole['verdict']}\nwall_s: {text.number(whole['wall_s'])}")
    return cli.OK if whole["can_search"] else cli.FAILED


if __name__ == "__main__":
    sys.exit(main())
