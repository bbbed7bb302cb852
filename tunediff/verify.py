"""Check somebody's result: compute its verdict again from its journals: `tunediff verify FOLDER`.

FOLDER is what `tunediff compare … --out FOLDER` has written. No code in it runs: the numbers of its
result, the digest of each file and the seeds are computed again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunediff import cli
from tunediff.core import text
from tunediff.core.errors import ConfigError
from tunediff.core.options import JsonOptions, words_option
from tunediff.experiment.model import kind_of
from tunediff.finished import comparison as finished
from tunediff.proof import proof


class VerifyOptions(JsonOptions):
    """What is checked."""

    words: tuple[str, ...] = words_option("folders that compare --out has written", "FOLDER")


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Verify; see `--help`."""
    exits = "0 verified, 1 something is not as the folder says, 2 bad input"
    options = cli.parse("verify", __doc__, VerifyOptions, argv, exits)
    if not options.words:
        raise ConfigError("command line: nothing is not allowed; allowed: one or more folders")
    paths = [Path(word) for word in options.words]
    ended = [finished.verify(path) for path in paths if kind_of(path) == "finished"]
    folders = [proof.verify(path) for path in paths if kind_of(path) != "finished"]
    verified = not any(checked.faults for checked in folders)
    verified = verified and all(checked["verified"] for checked in ended)
    seen = dict[tuple[float, ...], Path]()
    for checked in folders:
        started = tuple(run.started for run in checked.comparison.runs)
        if (first := seen.setdefault(started, checked.folder)) is not checked.folder:
            checked.notes.append(f"has the runs of {first}: both are one result")
    if options.as_json:
        cli.print_json({"folders": [*ended, *(checked.values for checked in folders)]})
    else:
        for values in ended:
            print(text.block(values))
        for checked in folders:
            print("\n".join(_lines(checked)))
    return cli.OK if verified else cli.FAILED


def _lines(checked: proof.CheckedFolder) -> list[str]:
    values: dict[str, Any] = checked.values
    effect, rule = values["candidates"][-1]["effect"] or {}, values["rule"]
    rules = {key: rule[key] for key in ("rounds", "level", "one_sided", "fixed")}
    shown = {key: values[key] for key in ("a", "b", "verdict")} | effect | rules
    state = "verified: the journals give this result"
    if checked.faults:
        state = "NOT verified"
    return [
        f"{checked.folder}: {state}",
        text.block({key: value for key, value in shown.items() if value is not None}),
        *(f"  {fault}" for fault in checked.faults),
        *(f"  note: {note}" for note in checked.notes),
    ]


if __name__ == "__main__":
    sys.exit(main())
