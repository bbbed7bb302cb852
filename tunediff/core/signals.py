"""Ctrl-C while a command's modules are imported, which takes seconds: a line and exit code 130, as later.

Comes before all other imports of the package. `cli.guarded` takes over from it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def end(*_: Any) -> None:
    """End now: an exception would pass through whatever is half imported."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130)


# Of `python -m tunediff.search`; while its packages are imported, and only then, argv begins with -m.
started = sys.argv[:1] == ["-m"] and any("tunediff." in word for word in sys.orig_argv)
if started and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
    signal.signal(signal.SIGINT, end)
