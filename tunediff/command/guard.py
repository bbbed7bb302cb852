"""End the programs of a process that was killed: a second process that notices, and kills them.

A program that is started in a session of its own outlives a killed parent. The guard reads a pipe
whose other end only the parent has; at its end the guard kills every group that was not reported
as finished, and what carries its mark. The mark is told before the program starts, so that no
moment is left in which a killed parent has a program that nobody knows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

STARTING_S = 2.0
"""Seconds for which a program may still be about to start, without its mark, when its parent was
killed."""


class Guard:
    """The guard of this process; started with the first program."""

    _shared: ClassVar[Guard | None] = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._owner = os.getpid()
        words = [sys.executable, "-I", "-S", str(Path(__file__).absolute())]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    @classmethod
    def shared(cls) -> Guard:
        """Return the guard of this process, a new one if the last has died."""
        with cls._lock:
            guard = cls._shared
            if guard is None or guard._owner != os.getpid() or guard._process.poll() is not None:
                guard = cls._shared = cls()
            return guard

    def watch(self, mark: str, group: int = 0) -> None:
        """Take over what carries a mark in case that this process is killed, and its process group
        as soon as there is one."""
        self._tell(f"+ {mark} {group}\n")

    def forget(self, mark: str) -> None:
        """Give up a program that has ended."""
        self._tell(f"- {mark}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def main() -> None:
    """Watch until the parent has gone, then kill what it has left; runs without tunediff."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[str, int] = {}
    for line in sys.stdin:
        sign, mark, *group = line.split()
        if sign == "+":
            groups[mark] = int(group[0])
        else:
            groups.pop(mark, None)
    for started in filter(None, groups.values()):
        with contextlib.suppress(OSError):
            os.killpg(started, signal.SIGKILL)
    marks = {f"TUNEDIFF_RUN={mark}".encode() for mark in groups}
    end = time.monotonic() + STARTING_S
    while marks and time.monotonic() < end:
        _kill_marked(marks)
        time.sleep(0.1)


def _kill_marked(marks: set[bytes]) -> None:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marks & set((process / "environ").read_bytes().split(b"\0")):
                os.kill(int(process.name), signal.SIGKILL)


if __name__ == "__main__":
    main()
