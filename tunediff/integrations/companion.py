"""A process beside a search that speaks to a service: at low priority, and whatever the service
does, no trial waits.

The files in the folder of the search are its queue: what the service did not take is sent later.
Both ends are here: a `Companion` in the search starts the module of the other end and talks to it,
which runs `follow`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Seconds between two looks at the files; more where a look takes long."""
SHARE = 0.05
"""Share of the time, at most, that looks take."""
SILENT_S = 5.0
"""Seconds at the end of the search after which the user is told what it waits for."""
RETRY_S = 15.0
"""Seconds after a failure until the service is tried again."""
Say = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the process is told of the search; a base class."""

    folder: Path
    late_s: float = dataclasses.field(default=30.0, kw_only=True)
    """Seconds without an answer after which the user is told."""
    patience_s: float = dataclasses.field(default=60.0, kw_only=True)
    """Seconds that the service has at the end of the search."""

    @classmethod
    def of(cls, line: str) -> Any:
        """Return the facts of a JSON text."""
        values = json.loads(line)
        return cls(**{**values, "folder": Path(values["folder"])})


# ---- in the search
class Companion:
    """The process, as the search sees it."""

    def __init__(
        self, module: str, facts: Facts, output: Path, say: Say, option: str, unfinished: str
    ) -> None:
        """Start it.

        `output`: file for what packages print; `option`: what the user gave; `unfinished`: what to
        say behind it where the service lacks something at the end.
        """
        self._patience_s, self._say, self._option, self._unfinished = (
            facts.patience_s,
            say,
            option,
            unfinished,
        )
        self._last_words = ""
        command = [sys.executable, "-m", module, json.dumps(dataclasses.asdict(facts), default=str)]
        pipe = subprocess.PIPE
        with open(output, "ab") as log_file:  # a session of its own: Ctrl-C is for the search alone
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log_file, text=True, start_new_session=True
            )
        threading.Thread(target=self._listen, args=[self._process.stdout], daemon=True).start()

    def tell(self, say: Say) -> None:
        """Call `say` with what the process says."""
        self._say = say

    def finish(self, words: str) -> None:
        """Take what the process gets to know at the end of the search."""
        self._last_words = words

    def close(self) -> None:
        """Let the process send the rest, for a while, which Ctrl-C ends; warn where something is
        left."""
        patience = threading.Timer(
            SILENT_S, self._say, [f"{self._option}: sending the rest; Ctrl-C leaves it for later"]
        )
        patience.daemon = True
        patience.start()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):
                assert self._process.stdin is not None
                self._process.stdin.write(
                    f"{self._last_words}\n"
                )  # forked loader processes may hold the pipe open
                self._process.stdin.close()
                self._process.wait(self._patience_s + 10)
        finally:  # also after a second Ctrl-C
            patience.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.wait() != 0:
            log.warning("%s: %s", self._option, self._unfinished)

    def _listen(self, lines: Iterable[str]) -> None:
        with contextlib.suppress(ValueError):  # closed
            for line in lines:
                self._say(line.rstrip())


# ---- in the process
class Attempts:
    """Calls what a service may fail, and says so once; after a failure the service is left alone
    for a while."""

    def __init__(self, option: str, consequence: str, say: Say, late_s: float) -> None:
        """`option`: what the user gave, which begins the message; `consequence`: how the search
        goes on."""
        self._option, self._consequence, self._say, self._late_s = option, consequence, say, late_s
        self._retry_at, self._spoken = 0.0, False

    def attempt(self, work: Callable[[], object], last: bool = False) -> bool:
        """Return whether `work` was done; `last`: also directly after a failure."""
        if time.monotonic() < self._retry_at and not last:
            return False
        late = threading.Timer(self._late_s, self._speak, [f"no answer for {self._late_s:.0f} s"])
        late.daemon = True
        late.start()
        try:
            work()
        except Exception as error:
            self._retry_at = time.monotonic() + RETRY_S
            words = re.sub(
                r"://[^/@\s]+@", "://", " ".join(str(error).split())
            )  # an address may hold a password
            self._speak(f"{type(error).__name__}: {words[:200]}")
            return False
        finally:
            late.cancel()
        return True

    def _speak(self, reason: str) -> None:
        if not self._spoken:
            self._spoken = True
            self._say(f"{self._option}: {reason}; {self._consequence}")


def begin() -> Say:
    """Set this process up, and return what prints a line for the search."""
    with contextlib.suppress(OSError):
        os.nice(10)  # trials come first
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print goes to the log

    def say(line: str) -> None:
        with contextlib.suppress(OSError):  # the search is gone
            print(line, file=out, flush=True)

    return say


def follow(sync: Callable[[str, bool], bool], patience_s: float) -> None:
    """Call `sync` about every second until stdin ends or brings a line, once more with what came
    there, and exit.

    It gets these words ("" before) and whether it is the last call, and returns whether the service
    has everything: the exit code.
    """
    words, pause_s = b"", EVERY_S
    while True:
        if select.select([0], [], [], pause_s)[0]:
            words += (chunk := os.read(0, 1 << 16))
            if not chunk or chunk.endswith(b"\n"):
                break
            continue
        begun = time.monotonic()
        sync("", False)
        pause_s = max(EVERY_S, min((time.monotonic() - begun) / SHARE, RETRY_S))
    limit = threading.Timer(
        patience_s, os._exit, [1]
    )  # a service that hangs does not keep this process
    limit.daemon = True
    limit.start()
    complete = sync(words.decode().strip(), True)
    sys.stderr.flush()
    os._exit(0 if complete else 1)  # packages wait for their servers when Python ends
