"""Handle Ctrl-C while the modules of a command are imported: print a line and exit with code 130.

Imported before the package's other modules; `cli.guarded` replaces it. `terminable`: for SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

_BEGAN = time.monotonic()


def end(*_: Any) -> None:
    """Exit at once: an exception would pass through half-imported modules."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM, which batch schedulers send, raise `KeyboardInterrupt` inside, as Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():  # it alone may handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command_began() -> float:
    """Return the monotonic time at which this command began, by this import; for a call, now."""
    return _BEGAN if started else time.monotonic()


# With `python -m tunediff.search`, argv begins with -m only while its packages are imported;
# `tunediff` is a script.
started = sys.argv[:1] == ["-m"] and any("tunediff" in word for word in sys.orig_argv)
started = started or os.path.basename(sys.argv[0]) == "tunediff"
# A shell may have set Ctrl-C to be ignored; that setting stays.
if started and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end)
