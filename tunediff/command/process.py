"""Run one program in a process group of its own, read what it prints, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tunediff.command import guard
from tunediff.command.guard import MARK

LOG = "output.log"
LONGEST_LINE = 1 << 16
"""Bytes after which a line ends by itself: output without a newline must not fill the memory."""
LOG_LIMIT = 64 << 20
"""Bytes of a log; what a program prints beyond is read, but not kept."""
DRAIN_S = 2.0
"""Seconds for which output is still read after the program has ended: a process that it left behind
may hold the pipe open for ever."""
TAIL, LATEST = 20, 8
"""Lines of its standard error, and of all its output, that a failure shows."""
LONGEST_SHOWN = 200
CAUSE = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception): ")
"""Begins the last line of a traceback of Python, of one rank of torchrun too."""
COLOUR = re.compile(r"\x1b\[[0-9;]*[mK]")
"""Sequences of a terminal for colours and bold, which may stand inside names and numbers."""
POLL_S = 0.2


class CommandProcess:
    """One program that runs: its lines, its end, and how to end it."""

    def __init__(
        self, argv: Sequence[str], folder: Path, cwd: Path, environment: Mapping[str, str]
    ) -> None:
        """Start it; what it prints goes to `output.log` in `folder` too. Raises `OSError`."""
        self.mark = uuid.uuid4().hex
        self.errors: deque[str] = deque(maxlen=TAIL)
        """The last lines of its standard error."""
        self.causes: deque[str] = deque(maxlen=2)
        """The last lines of it that name an error, which a launcher's words may follow."""
        self.latest: deque[str] = deque(maxlen=LATEST)
        """The last lines of all that it printed."""
        self.wait_s = POLL_S
        """Idle timeout after which `lines` yields None."""
        self.begun = time.monotonic()
        self._log = open(folder / LOG, "ab")  # noqa: SIM115 – closed by `finish`
        self._logged = self._log.tell()
        self._log_fault: OSError | None = None
        self._guard = guard.watch(self.mark)
        try:
            self.process = subprocess.Popen(
                list(argv), cwd=cwd, env={**environment, MARK: self.mark}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError:
            self._guard.communicate(b"-")
            self._log.close()
            raise

    def lines(self) -> Iterator[tuple[float, str | None]]:
        """Yield (monotonic seconds, line) until the program and its output have ended.

        At least every `wait_s` it yields None in place of a line, for whoever watches the time.
        """
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        error_number = self.process.stderr.fileno()
        parts = {self.process.stdout.fileno(): b"", error_number: b""}
        ended_at: float | None = None
        with selectors.DefaultSelector() as selector:
            for number in parts:
                os.set_blocking(number, False)
                selector.register(number, selectors.EVENT_READ)
            # Both may be closed while it runs, where its output goes to a file
            while selector.get_map() or self.process.poll() is None:
                for key, _ in selector.select(min(POLL_S, max(0.0, self.wait_s))):
                    chunk = self._chunk(key.fd)
                    if chunk is None:
                        selector.unregister(key.fd)
                    now = time.monotonic()
                    texts, parts[key.fd] = split(parts[key.fd] + (chunk or b""), chunk is None)
                    for text in texts:
                        if key.fd == error_number and text.strip():
                            self.errors.append(text.rstrip())
                            if CAUSE.match(text):
                                self.causes.append(text.rstrip())
                        if text.strip():
                            self.latest.append(text.strip()[:LONGEST_SHOWN])
                        yield now, text
                yield time.monotonic(), None
                if self.process.poll() is not None:
                    ended_at = ended_at or time.monotonic()
                    if time.monotonic() - ended_at > DRAIN_S:
                        return

    def _chunk(self, number: int) -> bytes | None:
        """Return what a pipe has, and write it to the log; None at its end."""
        try:
            chunk = os.read(number, 1 << 16)
        except BlockingIOError:
            return b""
        if not chunk:
            return None
        if self._logged < LOG_LIMIT and self._log_fault is None:
            try:
                self._log.write(chunk)
                self._log.flush()
            except OSError as error:  # a full disk; the run goes on, since its metrics are read
                self._log_fault = error
            self._logged += len(chunk)
            if self._logged >= LOG_LIMIT and self._log_fault is None:
                self._log.write(b"\n(the log ends here; what follows was read, but not kept)\n")
        return chunk

    @property
    def failure(self) -> str:
        """Return the last lines of its standard error, with those that name an error first."""
        return "\n".join([line for line in self.causes if line not in self.errors] + [*self.errors])

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def finish(self, grace_s: float = 0.0, read: Callable[[str, float], None] | None = None) -> int:
        """End whatever is left of the run, also what has left its process group.

        A program that still runs gets SIGTERM and `grace_s` to save its work; `read` gets what it
        prints then, with the seconds. Returns its exit code.
        """
        try:
            if grace_s and self.process.poll() is None:
                self.signal(signal.SIGTERM)
                end, self.wait_s = time.monotonic() + grace_s, POLL_S
                for now, line in self.lines():
                    if line is not None and read is not None:
                        read(line, now)
                    if now >= end:
                        break
        finally:
            self.signal(signal.SIGKILL)
        guard.kill_marked(self.mark)
        code = self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr, self._log):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._guard.communicate(b"-")
        return code


def split(content: bytes, complete: bool) -> tuple[list[str], bytes]:
    r"""Return the lines of output without colours, which `\n` or `\r` ends, and what follows.

    `complete`: nothing will follow.
    """
    pieces = content.replace(b"\r", b"\n").split(b"\n")
    rest = pieces.pop()
    if complete or len(rest) > LONGEST_LINE:
        pieces.append(rest)
        rest = b""
    return [COLOUR.sub("", piece.decode(errors="replace")) for piece in pieces if piece], rest
