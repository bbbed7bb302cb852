"""How far a long sampling has come, on stderr."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from tunediff import cli

EVERY_S = 30.0


class Progress:
    """A bar with the time left; where stderr is no terminal, a plain line at most every 30 s. A context manager."""

    def __init__(self, total: int, visible: bool = True) -> None:
        """`total` steps; all but one of several processes are not `visible`."""
        self._total, self._done, self._begin = total, 0, time.monotonic()
        self._said = self._begin
        self._plain = visible and not sys.stderr.isatty()
        self._bar = tqdm(total=total, desc="sampling", unit="step", disable=not visible or self._plain)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def step(self, *_: object) -> None:
        """One more step; takes whatever a sampler's callback gets."""
        self._done += 1
        self._bar.update()
        now = time.monotonic()
        if self._plain and now - self._said >= EVERY_S:
            self._said = now
            left = (now - self._begin) / self._done * (self._total - self._done)
            print(f"sampling: {self._done} of {self._total} steps, about {cli.seconds(left)} left", file=sys.stderr)
