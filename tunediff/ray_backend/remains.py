"""Kill what is left of a Ray cluster once the process that started it has ended, also by `kill -9`.

Ray's agents look for their dead cluster for a minute, and a controller that hangs stays as long.
This file runs by itself, in a small process that the search starts before Ray; it uses Python's
library alone. A process belongs to the cluster if it has inherited the variable `MARK` with its
value, or if it is one of Ray's, which overwrite their environment, and writes below the cluster's
session folder. No other cluster has either. What its workers start has `STARTED` instead and
ends with them: a loader process or a program that is killed first would be a failure of its trial.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK, STARTED = "TUNEDIFF_RAY_SESSION", "TUNEDIFF_RAY_STARTED"
ENDED = "ended"
"""Line that the parent writes once it has ended the cluster in order; else it writes the folder."""
GRACE_S = 2.0
"""Seconds that Ray's processes, and then what they have started, have to end by themselves after a
`kill -9`."""
LIMIT_S = 60.0
"""Seconds after which this process ends whatever is left: new ones may be about to end."""
TITLES = (b"ray::", b"ray-dashboard")
"""Beginnings of the command lines of Ray's processes that write their titles over them."""


def remains(variable: str, session: str) -> Iterator[int]:
    """Yield the pids of processes with a variable, `MARK=…`, and of those of Ray in a cluster's
    session folder; `session`: '' if it has none."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)
                elif session and (entry / "cmdline").read_bytes().startswith(TITLES):
                    files = map(os.readlink, (entry / "fd").iterdir())
                    if any(Path(file).is_relative_to(session) for file in files):
                        yield int(entry.name)


def _wait_for_end(parent: int) -> list[str]:
    """Return the lines that the parent has written once it has ended or closed the pipe."""
    words, alive = b"", True
    while True:
        if select.select([0], [], [], 1.0 if alive else 0.0)[0]:
            if not (chunk := os.read(0, 4096)):
                break
            words += chunk
        elif not alive:  # a process that the parent has forked may hold the pipe open
            break
        alive = os.getppid() == parent
    return words.decode().splitlines()


def main(mark: str, parent: int) -> None:
    """Wait for the parent's end, then kill what is left until there is nothing."""
    words = _wait_for_end(parent)
    session = next((line for line in words if line != ENDED), "")
    for name in (MARK, STARTED):
        until = time.monotonic() + LIMIT_S
        killed_from = time.monotonic() + (0.0 if ENDED in words else GRACE_S)
        while (pids := list(remains(f"{name}={mark}", session))) and time.monotonic() < until:
            for pid in pids if time.monotonic() >= killed_from else ():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
