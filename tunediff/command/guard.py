"""End the programs of a process that was killed: a second process that notices, and kills them.

A program that is started in a session of its own outlives a killed parent, and what it starts in
further sessions outlives it. The guard reads a pipe whose other end only the parent has; at its end
the guard kills what carries the mark of a run that was not reported as finished. The mark is told
before the program starts, so that no moment is left in which a killed parent has a program that
nobody knows.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path

MARK = "TUNEDIFF_RUN"
"""Environment variable that all processes of a run inherit, and by which those are found that have
left its process group."""
STARTING_S = 2.0
"""Seconds for which a program may still be about to start, without its mark, when its parent was
killed."""
_lock = threading.Lock()


def tell(sign: str, mark: str) -> None:
    """Tell the guard of this process that what carries a mark begins (`+`) or has ended (`-`)."""
    with _lock, contextlib.suppress(OSError):
        stdin = _guard_of(os.getpid()).stdin
        assert stdin is not None
        os.write(stdin.fileno(), f"{sign}{mark}\n".encode())


@functools.cache
def _guard_of(_owner: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-I", "-S", str(Path(__file__).absolute())]
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )


def main() -> None:
    """Watch until the parent has gone, then kill what it has left; runs without tunediff."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    marks: set[str] = set()
    for line in sys.stdin:
        (marks.add if line[0] == "+" else marks.discard)(line[1:].strip())
    end = time.monotonic() + STARTING_S
    while marks and time.monotonic() < end:
        kill_marked(marks)
        time.sleep(0.1)


def kill_marked(marks: Collection[str]) -> None:
    """Kill the processes of runs, which are found by their marks in their environment."""
    wanted = {f"{MARK}={mark}".encode() for mark in marks}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted & set((process / "environ").read_bytes().split(b"\0")):
                os.kill(int(process.name), signal.SIGKILL)


if __name__ == "__main__":
    main()
