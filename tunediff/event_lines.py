"""Lines that tell how far a command is: text for people, or JSON objects with `--progress jsonl`."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from typing import Any, Protocol

from tunediff.cli import finite
from tunediff.core import text

log = logging.getLogger("tunediff.api")


class PrintingOptions(Protocol):
    """The options of `cli.add_printing`."""

    quiet: bool
    json: bool
    progress: str


@dataclasses.dataclass(frozen=True)
class EventLines:
    """Where event lines go and how they look.

    On stdout, beside the result; on stderr with `--json`, whose result is alone on stdout, and as JSON lines; `logged`
    by calls from Python, which print nothing.
    """

    quiet: bool = False
    on_stderr: bool = False
    as_json: bool = False
    logged: bool = False

    @classmethod
    def of(cls, args: PrintingOptions) -> EventLines:
        """Return what the options of `cli.add_printing` ask for."""
        as_json = args.progress == "jsonl"
        return cls(args.quiet, args.json or as_json, as_json)

    def line(self, message: str, elapsed_s: float, phase: str = "", event: str = "message", **fields: Any) -> str:
        """Return one line: `[ 1m17s] message`, or an object with `event`, `elapsed_s`, `phase`, `text` and `fields`.

        `phase`: what the command does, such as `confirm`; '' for its main work.
        """
        if self.as_json:
            content = {"event": event, "elapsed_s": round(elapsed_s, 3), "phase": phase, **fields, "text": message}
            return json.dumps(finite(content), allow_nan=False, default=str)
        return f"[{phase}{' ' * bool(phase)}{text.seconds(elapsed_s):>6}] {message}"

    def print(self, line: str) -> None:
        """Print a line that `line` has made. Raises `OSError` where nobody reads."""
        if self.logged and not self.quiet:
            log.info(line)
        elif not self.quiet:
            print(line, file=sys.stderr if self.on_stderr else sys.stdout, flush=True)
