"""End the program of a process that was killed: a second process that notices, and kills it.

A program that is started in a session of its own outlives a killed parent, and what it starts in
further sessions outlives it. The guard reads a pipe whose other end only the parent has; at its end
the guard kills what carries the mark of its run, unless a byte has said that it is finished. It
starts before the program, so that no moment is left in which a killed parent has a program that
nobody knows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "TUNEDIFF_RUN"
"""Environment variable that all processes of a run inherit, and by which those are found that have
left its process group."""
STARTING_S = 2.0
"""Seconds for which a program may still be about to start, without its mark, when its parent was
killed."""


def watch(mark: str) -> subprocess.Popen[bytes]:
    """Start the guard of a run, which what carries the mark belongs to; a byte ends it."""
    words = [sys.executable, "-I", "-S", str(Path(__file__).absolute()), mark]
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )


def main(mark: str) -> None:
    """Watch until the parent has gone, then kill what it has left; runs without tunediff."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end = 0.0 if sys.stdin.read(1) else time.monotonic() + STARTING_S
    while time.monotonic() < end:
        kill_marked(mark)
        time.sleep(0.1)


def kill_marked(mark: str) -> None:
    """Kill the processes of a run, which are found by its mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
