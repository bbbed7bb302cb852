"""Report how far work is. Imports no torch.

Work of many equal parts is a `Progress`, which notifies its subscribers: `EventLines.work` shows it
to the user, `ProgressFile` writes it to a file that other processes read. Everything else that a
command reports is a line of `EventLines`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tunediff.core import text
from tunediff.core.files import write_text
from tunediff.core.options import PrintingOptions
from tunediff.core.signals import command_began

log = logging.getLogger(__name__)

FIRST_S, EVERY_S = 5.0, 30.0
"""Seconds until the first plain line about a piece of work, and between two lines."""


def log_exceptions(task: str, show: Callable[..., object], *arguments: object) -> bool:
    """Call `show`; return whether it succeeded. Errors are logged: displays end no work."""
    try:
        show(*arguments)
    except Exception:
        log.exception("could not show %s", task)
        return False
    return True


class Progress:
    """A piece of work of `total` equal parts; a context manager. Cheap without subscribers."""

    def __init__(self, what: str, total: int, unit: str = "images", visible: bool = True) -> None:
        """`what`: the work, such as `reading files`; of several processes only one is `visible`."""
        self.what, self.total, self.unit, self._visible = what, total, unit, visible
        self.done, self.begin = 0, time.monotonic()

    def __enter__(self) -> Progress:
        return self._notify()

    def __exit__(self, *_: object) -> None:
        self.total = self.done  # subscribers hear that it is over, also after an error
        self._notify()

    def step(self, *_: object) -> None:
        """Count one more part; accepts any arguments, so that it can be a callback."""
        self.more(1)

    def more(self, count: int) -> None:
        """Count `count` more parts."""
        self.done = min(self.done + count, self.total)
        self._notify()

    @property
    def over(self) -> bool:
        """Return whether all parts are done."""
        return self.done >= self.total

    @property
    def left_s(self) -> float:
        """Return the remaining seconds at the speed so far; infinite before the first part."""
        spent = time.monotonic() - self.begin
        return spent / self.done * (self.total - self.done) if self.done else math.inf

    @property
    def message(self) -> str:
        """Return the state as text: `sampling: 512 of 2,048 images, about 40s left`."""
        left = f", about {text.seconds(self.left_s)} left" if self.done else ""
        return f"{self.what}: {self.done:,} of {self.total:,} {self.unit}{left}"

    def _notify(self) -> Progress:
        for subscriber in tuple(_subscribers) if self._visible else ():
            # A subscriber that failed is removed: its error would be logged again for every part.
            if not log_exceptions("progress", subscriber, self) and subscriber in _subscribers:
                _subscribers.remove(subscriber)
        return self


Subscriber = Callable[[Progress], None]
_subscribers: list[Subscriber] = []


@contextlib.contextmanager
def subscribe(subscriber: Subscriber) -> Iterator[None]:
    """Call `subscriber` for every part that is done inside, in any thread of this process."""
    _subscribers.append(subscriber)
    try:
        yield
    finally:
        if subscriber in _subscribers:
            _subscribers.remove(subscriber)


class _Lines:
    """Print a line after 5 s of work, then one every 30 s; nothing for short work."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write, self._due = write, 0.0
        self._work: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress is not self._work:
            self._work, self._due = progress, progress.begin + FIRST_S
        if now >= self._due and not progress.over:
            self._due = now + EVERY_S
            self._write(progress.message)


@dataclasses.dataclass(frozen=True)
class EventLines:
    """Where and how a command's lines go.

    On stdout, beside the result; on stderr with `--json`, whose result is alone on stdout, and by
    calls from Python; `logged` by these in a program that shows its log.
    """

    quiet: bool = False
    on_stderr: bool = False
    logged: bool = False
    begun: float = dataclasses.field(default_factory=time.monotonic)
    """Monotonic time from which lines count: that at which the command or the call began."""

    @classmethod
    def of(cls, options: PrintingOptions) -> EventLines:
        """Return what the options of a command ask for."""
        return cls(options.quiet, options.as_json, begun=command_began())

    @property
    def aside(self) -> EventLines:
        """Return the same lines on stderr."""
        return dataclasses.replace(self, on_stderr=True)

    def say(self, message: str, timed: bool = True) -> None:
        """Print one line, without its time if not `timed`."""
        with contextlib.suppress(OSError):  # the terminal was closed; the work goes on
            self.print(self.line(message) if timed else message)

    def line(self, message: str, phase: str = "") -> str:
        """Return a line: `[ 1m17s] message`.

        `phase`: what the command does, such as `confirm`; '' for its main work.
        """
        elapsed = text.seconds(time.monotonic() - self.begun)
        return f"[{phase}{' ' * bool(phase)}{elapsed:>6}] {message}"

    def print(self, line: str) -> None:
        """Print a line that `line` has made. Raises `OSError` where nobody reads."""
        if self.logged and not self.quiet:
            logging.getLogger("tunediff.api").info(line)
        elif not self.quiet:
            print(line, file=sys.stderr if self.on_stderr else sys.stdout, flush=True)

    @contextlib.contextmanager
    def work(self, visible: bool = True) -> Iterator[None]:
        """Show `Progress` inside as lines on stderr."""
        if self.quiet or not visible:
            yield
            return
        with subscribe(_Lines(lambda line: self.aside.say(line, timed=False))):
            yield


DOING = "doing.json"
"""File in a running trial's folder: the current part of its time, since when, and progress."""


class ProgressFile:
    """Keep the file `DOING` of a trial up to date; subscribed to its clock and to all progress."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: None on all ranks but one; these write nothing."""
        self._folder, self._part, self._since, self._due = folder, "setup", time.time(), 0.0
        self._write("")

    def part(self, name: str) -> None:
        """Record that another part of the clock begins."""
        # it begins with every batch, which is too often to write
        if name not in ("data_wait", self._part):
            self._part, self._since = name, time.time()
            self._write("")

    def __call__(self, progress: Progress) -> None:
        if (now := time.monotonic()) >= self._due or progress.over:
            self._due = now + FIRST_S
            self._write("" if progress.over else progress.message)

    def _write(self, work: str) -> None:
        with contextlib.suppress(OSError):  # a full disk is reported elsewhere
            if self._folder is not None:
                content = {"part": self._part, "since": self._since, "work": work}
                write_text(self._folder / DOING, json.dumps(content))
