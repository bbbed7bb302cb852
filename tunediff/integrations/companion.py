"""A low-priority process that speaks to a service for a search; no trial waits for it.

The files in the folder of the search are its queue: what the service did not take is sent later.
Both ends are here: a `Companion` in the search starts the module of the other end, talks to it and
starts it again if it dies; `follow` is that other end.
"""

from __future__ import annotations

import atexit
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tunediff.core.listeners import Listener, Say

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Seconds between two looks at the files; more where a look takes long."""
MAX_SHARE = 0.05
"""Share of the time that looks may take."""
SILENT_S = 5.0
"""Seconds at the end of the search after which the user is told what it waits for."""
RETRY_S = 15.0
"""Seconds until a failed service is tried, and a dead process started, again."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the process is told of the search."""

    folder: Path
    option: str
    """What the user gave, such as `--track wandb`: it begins every message."""
    late_s: float = 30.0
    """Seconds without an answer after which the user is told."""
    patience_s: float = 60.0
    """Seconds that the service has at the end of the search."""
    token: str = ""
    """Of the lock at the address."""
    service: str = ""
    objective: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What a tracker shows as the configuration of the search as a whole."""


# ---- in the search
class Companion(Listener):
    """The process, as the search sees it: it begins and ends with the search."""

    def __init__(
        self,
        module: str,
        facts: Facts,
        output: Path,
        unfinished: str,
        last_words: Callable[[Mapping[str, Any]], str] = lambda result: "",
    ) -> None:
        """`output`: file for what packages print; `unfinished`: message where the service lacks
        something at the end; `last_words`: what the process is told of the result."""
        self._module, self._facts, self._output = module, facts, output
        self._unfinished, self._last_words = unfinished, last_words
        self._say: Say = log.warning
        self._owner, self._ends = os.getpid(), threading.Event()
        self._guard = threading.Lock()
        """Held while the process is started and while its end begins."""

    def search_begin(self, say: Say) -> None:
        self._say = say
        self._start()
        atexit.register(self._kill)  # after Ctrl-C nothing waits for `search_end`
        threading.Thread(target=self._watch, daemon=True).start()

    def search_end(self, result: Callable[[], Mapping[str, Any]] | None) -> None:
        """Let the process send the rest, for a while; warn where something is left."""
        waits = f"{self._facts.option}: sending the rest; Ctrl-C leaves it for later"
        patience = threading.Timer(SILENT_S, self._say, [waits])
        patience.daemon = True
        patience.start()
        words = "" if result is None else self._last_words(result())
        with self._guard:
            self._ends.set()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):
                assert self._process.stdin is not None
                # A line: forked loader processes may hold the pipe open.
                self._process.stdin.write(f"{words}\n")
                self._process.stdin.close()
                self._process.wait(self._facts.patience_s + 10)
        finally:
            patience.cancel()
            self._kill()
            atexit.unregister(self._kill)
        if self._process.wait() != 0:
            log.warning("%s: %s", self._facts.option, self._unfinished)

    def _start(self) -> None:
        facts = json.dumps(dataclasses.asdict(self._facts), default=str)
        command, pipe = [sys.executable, "-m", self._module, facts], subprocess.PIPE
        with open(self._output, "ab") as output:  # a session of its own: Ctrl-C is for the search
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=output, text=True, start_new_session=True
            )

    def _watch(self) -> None:
        """Show what the process says, and start it again where it has died."""
        died = False
        while True:
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    self._say(line.rstrip())
            code = process.wait()
            if not died and not self._ends.is_set():
                died = True
                again = f"its process has ended ({code}) and is started again"
                self._say(f"{self._facts.option}: {again}")
            self._ends.wait(RETRY_S)
            with self._guard:
                if self._ends.is_set():
                    return
                process.stdin.close()
                self._start()

    def _kill(self) -> None:
        if os.getpid() == self._owner:  # a forked process of the user may end before
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


# ---- in the process
class Attempts:
    """Calls a service and says once that it failed; then leaves it alone for a while."""

    def __init__(self, facts: Facts, consequence: str, say: Say) -> None:
        """`consequence`: how the search goes on without the service."""
        self._option, self._late_s = facts.option, facts.late_s
        self._consequence, self._say = consequence, say
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
            # An address may hold a password.
            message = re.sub(r"://[^/@\s]+@", "://", " ".join(str(error).split()))
            self._speak(f"{type(error).__name__}: {message[:200]}")
            return False
        finally:
            late.cancel()
        return True

    def _speak(self, reason: str) -> None:
        if not self._spoken:
            self._spoken = True
            self._say(f"{self._option}: {reason}; {self._consequence}")


Sync = Callable[[str, bool], bool]
"""Sends what is new; returns whether the service has everything of the search."""


def follow(prepare: Callable[[Facts, Say], Sync]) -> NoReturn:
    """Be the process: sync about every second until the search ends, once more then, and exit.

    `prepare` returns what sends, for the facts in the first argument of the command. The exit code
    is 0 if the service has everything.
    """
    with contextlib.suppress(OSError):
        os.nice(10)  # trials come first
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print goes to the log

    def say(line: str) -> None:
        with contextlib.suppress(OSError):  # the search is gone
            print(line, file=out, flush=True)

    values = json.loads(sys.argv[1])
    facts = Facts(**{**values, "folder": Path(values["folder"])})
    sync, words, pause_s = prepare(facts, say), b"", EVERY_S
    while True:
        if select.select([0], [], [], pause_s)[0]:
            words += (chunk := os.read(0, 1 << 16))
            if not chunk or chunk.endswith(b"\n"):
                break
            continue
        begun = time.monotonic()
        sync("", False)
        pause_s = max(EVERY_S, min((time.monotonic() - begun) / MAX_SHARE, RETRY_S))
    # A service that hangs does not keep this process.
    limit = threading.Timer(facts.patience_s, os._exit, [1])
    limit.daemon = True
    limit.start()
    complete = sync(words.decode().strip(), True)
    sys.stderr.flush()
    os._exit(0 if complete else 1)  # packages wait for their servers when Python ends
