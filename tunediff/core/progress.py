"""Report how far a long piece of work is: workers call `Progress`, subscribers show it. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from tunediff.core import text
from tunediff.core.files import write_text

log = logging.getLogger(__name__)

FIRST_S, EVERY_S = 5.0, 30.0
"""Seconds until the first plain line about a piece of work, and between two lines."""


def log_exceptions(task: str, show: Callable[..., object], *arguments: object) -> bool:
    """Call `show` and return whether it succeeded. Errors are logged: a display must not end hours of work."""
    try:
        show(*arguments)
    except Exception:
        log.exception("could not show %s", task)
        return False
    return True


class Progress:
    """A piece of work of `total` equal parts; a context manager. Costs next to nothing without subscribers."""

    def __init__(self, what: str, total: int, unit: str = "images", visible: bool = True) -> None:
        """`what`: the work, such as `reading files`; of several processes only one is `visible`."""
        self.what, self.total, self.unit, self._visible = what, total, unit, visible
        self.done, self.begin = 0, time.monotonic()

    def __enter__(self) -> Progress:
        return self._notify()

    def __exit__(self, *_: object) -> None:
        self.total = self.done  # subscribers close their bar, also after an error
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
        """Return the seconds that the rest takes at the speed so far; infinite before the first part."""
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


@contextlib.contextmanager
def shown(visible: bool = True) -> Iterator[None]:
    """Show progress on stderr if `visible`: a bar in a terminal, otherwise a line from time to time."""
    if not visible:
        yield
        return
    with subscribe(Bar() if sys.stderr.isatty() else Lines(lambda line: print(line, file=sys.stderr, flush=True))):
        yield


class Lines:
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


class Bar:
    """Show one progress bar per piece of work, with the time left."""

    def __init__(self) -> None:
        self._work: Progress | None = None
        self._bar = tqdm(disable=True)

    def __call__(self, progress: Progress) -> None:
        if progress is not self._work:
            self._bar.close()
            self._work = progress
            self._bar = tqdm(total=progress.total, desc=progress.what, unit=f" {progress.unit}", file=sys.stderr)
        self._bar.update(progress.done - self._bar.n)
        if progress.over:
            self._bar.close()


DOING = "doing.json"
"""File in the folder of a running trial: the current part of its time, its beginning, and the state of the work."""


class ProgressFile:
    """Keep the file `DOING` of a trial up to date; subscribed to its clock and to all progress."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: None on all ranks but one; these write nothing."""
        self._folder, self._part, self._since, self._due = folder, "setup", time.time(), 0.0

    def part(self, name: str) -> None:
        """Record that another part of the clock begins."""
        if name not in ("data_wait", self._part):  # it begins with every batch, which is too often to write
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
