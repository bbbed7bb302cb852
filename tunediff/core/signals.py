"""Handle Ctrl-C while the modules of a command are imported: print a line and exit with code 130.

Imported before all other modules of the package. Later `cli.guarded` replaces this handler.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def end(*_: Any) -> None:
    """Exit at once: an exception would pass through half-imported modules."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130)


# With `python -m tunediff.search`, argv begins with -m only while its packages are imported; `tunediff` is a script.
started = sys.argv[:1] == ["-m"] and any("tunediff" in word for word in sys.orig_argv)
started = started or os.path.basename(sys.argv[0]) == "tunediff"
# A shell may have set Ctrl-C to be ignored; that setting stays.
if started and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end)
