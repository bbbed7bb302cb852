"""Check in about a minute whether a search can train on this machine.

Each line: ok, weak, missing, wrong or skipped, what was found, and what it means. Exit code 0: a
search can run.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tunediff import cli
from tunediff.core import environment, remote, text
from tunediff.core.options import JsonOptions
from tunediff.core.signals import command_began, terminable


class DoctorOptions(JsonOptions, remote.StorageOptions):
    """The options of the command."""


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks; see `--help`."""
    exits = "0 a search can run here, 1 it cannot, 2 bad input, 130 interrupted"
    options = cli.parse("doctor", __doc__, DoctorOptions, argv, exits)
    with terminable():  # SIGTERM also ends the processes that a check has started
        from tunediff.distributed import alone  # imports torch, after the arguments are checked
        from tunediff.doctor import checks

        began, findings = command_began(), list[checks.Finding]()
        for check in checks.CHECKS:
            findings.append(finding := checks.examine(check, Path(options.storage)))
            if not options.as_json:
                print(f"{finding.state:<8}{finding.name:<18}{finding.found}", flush=True)
                print(f"{'':<28}{finding.means}\n" if finding.means else "", end="", flush=True)
    can_search, verdict = not any(finding.stops for finding in findings), checks.verdict(findings)
    wall_s = time.monotonic() - began
    if not options.as_json:
        print(f"\n{verdict}\nThe checks took {text.seconds(wall_s)}.")
    else:
        cli.print_json(
            {
                "can_search": can_search,
                "verdict": verdict,
                "wall_s": wall_s,
                "device": alone().device.type,
                "command": text.original_command("doctor", argv),
                "environment": environment.describe(),
                "findings": [dataclasses.asdict(finding) for finding in findings],
            }
        )
    return cli.OK if can_search else cli.FAILED


if __name__ == "__main__":
    sys.exit(main())
