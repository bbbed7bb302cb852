"""Can a search train on this machine, how fast, and what is broken? In about a minute.

Each line: ok, weak, missing, wrong or skipped, what was found, and what it means. Exit code 0: a
search can run.
"""

from __future__ import annotations

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
    parser.epilog = (
        "Exit codes: 0 a search can run here, 1 it cannot, 2 bad input, 130 interrupted."
    )
    cli.add_storage(parser)
    cli.add_printing(parser, quiet=False)
    args = parser.parse_args(argv)
    with terminable():  # what was started for a look, a search even, ends with it
        from tunediff.distributed import alone  # imports torch, after what is refused
        from tunediff.doctor import checks

        began, findings = command_began(), list[Finding]()
        site = Site(args.storage, alone().device.type)
        for check in checks.CHECKS:
            findings.append(check(site))
            if not args.json:
                print("\n".join(finding.lines(findings[-1])), flush=True)
    can_search, verdict = not any(one.stops for one in findings), finding.verdict(findings)
    wall_s = time.monotonic() - began
    if args.json:
        cli.print_json({
            "can_search": can_search, "verdict": verdict, "wall_s": wall_s, "device": site.device,
            "command": text.original_command("doctor", argv), "environment": environment.describe(),
            "findings": [dataclasses.asdict(one) for one in findings],
        })  # fmt: skip
    else:
        print(f"\n{verdict}\nwall_s: {text.number(wall_s)}")
    return cli.OK if can_search else cli.FAILED


if __name__ == "__main__":
    sys.exit(main())
