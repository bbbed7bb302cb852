"""How far long work has come: told by whoever does it, heard by whoever shows it. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from tunediff.core import text
from tunediff.core.files import write_text

log = logging.getLogger(__name__)

FIRST_S, EVERY_S = 5.0, 30.0
"""Seconds until a plain line tells of work for the first time, and from one to the next."""


def log_exceptions(what: str, show: Callable[..., object], *about: object) -> bool:
    """Whether `show(*about)` went well: what is only shown must not end hours of work. An error is logged."""
    try:
        show(*about)
    except Exception:
        log.exception("could not show %s", what)
        return False
    return True


class Progress:
    """Work of so many parts, done one after the other; a context manager. Free of cost where nobody hears it."""

    def __init__(self, what: str, total: int, unit: str = "images", visible: bool = True) -> None:
        """`what`: such as `reading files`; all but one of several processes are not `visible`."""
        self.what, self.total, self.unit, self._visible = what, total, unit, visible
        self.done, self.begin = 0, time.monotonic()

    def __enter__(self) -> Progress:
        return self._tell()

    def __exit__(self, *_: object) -> None:
        self.total = self.done  # told to whoever has a bar to close
        self._tell()

    def step(self, *_: object) -> None:
        """One more part; takes whatever a callback gets."""
        self.more(1)

    def more(self, count: int) -> None:
        """So many more parts."""
        self.done = min(self.done + count, self.total)
        self._tell()

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        return self.done >= self.total

    @property
    def said(self) -> str:
        """`sampling: 512 of 2,048 images, about 40s left`."""
        spent = time.monotonic() - self.begin
        left = f", about {text.seconds(spent / self.done * (self.total - self.done))} left" if self.done else ""
        return f"{self.what}: {self.done:,} of {self.total:,} {self.unit}{left}"

    def _tell(self) -> Progress:
        for hear in tuple(_hearers) if self._visible else ():
            if not log_exceptions("progress", hear, self) and hear in _hearers:  # not once more for every part
                _hearers.remove(hear)
        return self


Hearer = Callable[[Progress], None]
_hearers: list[Hearer] = []


@contextlib.contextmanager
def subscribe(by: Hearer) -> Iterator[None]:
    """Tell `by` of all work done inside, by whatever thread of this process."""
    _hearers.append(by)
    try:
        yield
    finally:
        if by in _hearers:
            _hearers.remove(by)


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Show it on stderr: a bar in a terminal, elsewhere a line now and then."""
    with subscribe(Bar() if sys.stderr.isatty() else Lines(lambda line: print(line, file=sys.stderr, flush=True))):
        yield


class Lines:
    """A line after 5 s of work, then one every 30 s; none for what is quick."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say, self._due = say, 0.0
        self._work: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress is not self._work:
            self._work, self._due = progress, progress.begin + FIRST_S
        if now >= self._due and not progress.over:
            self._due = now + EVERY_S
            self._say(progress.said)


class Bar:
    """A bar for each piece of work, with the time left."""

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
"""In the folder of a trial, while it runs: the part of its time, since when, and how far its work is."""


class ProgressFile:
    """Keeps `DOING` of a trial up to date: what a clock and all progress tell of."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: None on all but one of several ranks, which write nothing."""
        self._folder, self._part, self._since, self._due = folder, "setup", time.time(), 0.0

    def part(self, name: str) -> None:
        """The clock pays another part."""
        if name not in ("data_wait", self._part):  # batches are fetched too often
            self._part, self._since = name, time.time()
            self._write("")

    def __call__(self, progress: Progress) -> None:
        if (now := time.monotonic()) >= self._due or progress.over:
            self._due = now + FIRST_S
            self._write("" if progress.over else progress.said)

    def _write(self, work: str) -> None:
        with contextlib.suppress(OSError):  # a full disk is told otherwise
            if self._folder is not None:
                told = {"part": self._part, "since": self._since, "work": work}
                write_text(self._folder / DOING, json.dumps(told))
