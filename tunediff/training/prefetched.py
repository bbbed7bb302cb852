"""Charge a training for batches that its loader made while the clock stood still."""

from __future__ import annotations

import bisect
import collections
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from tunediff.core.clock import Clock
from tunediff.data.gate import Gate
from tunediff.training.feed import Feed
from tunediff.training.phases import Phases

WINDOW = 256
"""Batches up to the last one by which a loader's speed is known."""
SURE = 3
"""Waits, and batches of each process, after which processes no longer run in step."""
STALL = 0.3
"""Share of a usual wait from which on a batch was waited for, not just handed over."""


class Take(NamedTuple):
    """A batch that the loop got."""

    at_s: float
    """Seconds that the loader worked, by the clock or by its processes' notes."""
    waited_s: float
    noted_s: float
    """Those of them that its processes have noted, while the clock stood still."""


class LoaderSpeed(NamedTuple):
    """How a loader works while the clock runs and the loop waits for it."""

    interval_s: float
    """Mean time between two batches."""
    wait_s: float
    """Part of it for which the loop waits."""
    stall_s: float
    """How long it waits where no batch is ready: several intervals, if several come at once."""
    stalls: int
    """How often the loop waited so, as far as it was measured."""
    batches: int
    """How many batches it got from the first such wait to the last one."""

    @property
    def burst(self) -> float:
        """Return how many batches come at once: about the number of processes in step."""
        return self.batches / self.stalls


class Prefetched:
    """Fetches batches; charges those made while the clock stood still when used.

    A loader's lead is the time for which it may have worked while the clock stood still: what its
    processes note at the gate, or else all of it. A training that takes batches faster than the
    loader makes them would have waited for it. So it is charged for what it has waited less than
    before, and not more than the lead. A training that never waits for its loader is not charged:
    nothing is gained by a batch that would have been ready anyway.

    Measured by the host's waiting at `fetch` and, if known, the device's time in steps.
    """

    def __init__(self, clock: Clock, phases: Phases, gate: Gate) -> None:
        self._clock, self._phases, self.gate = clock, phases, gate
        clock.on_read = self.charge
        self._takes = collections.deque[Take | None](maxlen=WINDOW)  # None: the clock stood still
        self._speed: LoaderSpeed | None = None
        self._runs, self._changed_s, self._ran_s = False, clock.now(), 0.0
        self._lead_s = self._noted_s = 0.0
        # batches that came with the last one that was waited for, less those that were taken
        self._ready = 0.0
        # since the clock ran again, or since the beginning while the loader's speed is not known
        self._taken, self._waited_s, self._began_s, self._charged_s = 0.0, 0.0, 0.0, 0.0
        # since the last point
        self._point_s = self._point_batches = 0.0

    def fetch(self, feed: Feed) -> Any:
        """Return the feed's next batch."""
        began_s = self._clock.now()
        with self.gate.over_loaders():
            fetched = feed.fetch()
        if self._runs:
            now_s = self._clock.now()
            waited_s, noted_s = now_s - began_s, self.gate.worked_s or 0.0
            self._taken, self._waited_s = self._taken + 1, self._waited_s + waited_s
            at_s = self._ran_s + now_s - self._changed_s + noted_s
            self._takes.append(Take(at_s, waited_s, noted_s))
            self._ready = max(0.0, self._ready - 1)
            if self._speed is not None and waited_s >= STALL * self._speed.stall_s:
                self._ready = self._speed.burst - 1
        return fetched

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Let loader processes load inside, while the clock runs."""
        self.release()
        try:
            yield
        finally:
            self.hold()

    def hold(self) -> None:
        """Let loader processes begin nothing: the clock stands still."""
        self.gate.close()
        now_s = self._clock.now()
        self._measure()
        if self._runs and (speed := self._sure) is not None:
            # The lead is lost where the loop was slower than the loader
            spent_s = self._clock.train_s - self._began_s
            slower_s = spent_s - (self._taken + self._ready) * speed.interval_s
            self._lead_s = max(0.0, self._lead_s - max(0.0, slower_s))
        if self._runs:
            self._ran_s += now_s - self._changed_s
            self._takes.append(None)
        self._runs, self._changed_s = False, now_s

    def release(self) -> None:
        """Let loader processes go on: the clock runs."""
        now_s = self._clock.now()
        if self.gate.worked_s is None and not self.gate.only_in_process:
            self._lead_s += now_s - self._changed_s
        if self._sure is not None or not self._taken:
            self._taken, self._waited_s, self._charged_s = -self._ready, 0.0, 0.0
            self._began_s = self._clock.train_s
        self._runs, self._changed_s = True, now_s
        self.gate.open()

    def charge(self) -> None:
        """Charge what is due for the batches so far. The device has finished their steps."""
        if not self._runs:
            return
        noted_s = self.gate.worked_s
        if noted_s is not None:
            self._lead_s, self._noted_s = self._lead_s + noted_s - self._noted_s, noted_s
        if self._lead_s <= 0.0:
            return
        if self._sure is None:
            self._measure()
        if (speed := self._speed) is None:
            return
        received = self._taken + self._ready
        faster_s = received * speed.interval_s - (self._clock.train_s - self._began_s)
        waited_less_s = received * speed.wait_s - self._waited_s - self._charged_s
        seconds = min(faster_s, waited_less_s, self._lead_s)
        if seconds > 0.0:
            self._phases.add("data_wait", seconds)
            # `Meter.read` moves there what the device waits
            self._clock.add("train" if self._phases.of_device else "data_wait", seconds)
            self._lead_s -= seconds
            self._charged_s += seconds
            self._point_s += seconds
            self._point_batches += seconds / speed.wait_s
        if self._sure is not None and self._waited_s >= 0.9 * speed.stall_s:
            self._lead_s = 0.0  # no batch was ready: none is left that was made meanwhile

    @property
    def _sure(self) -> LoaderSpeed | None:
        """Return the speed if it is known well enough to forget what was before."""
        return self._speed if self._speed is not None and self._enough(self._speed) else None

    def _enough(self, speed: LoaderSpeed) -> bool:
        return speed.stalls >= SURE and speed.batches >= SURE * self.gate.processes

    def _measure(self) -> None:
        """Measure the loader's speed over recent batches; keep it if too few were waited for."""
        speed = _speed(self._takes, across=False)
        if speed is None and self.gate.worked_s is not None:
            speed = _speed(self._takes, across=True)
        if speed is not None and (self._sure is None or self._enough(speed[0])):
            self._speed, self._ready = speed

    def facts(self) -> dict[str, Any]:
        """Return fields of the next `Point`, and count from here."""
        seconds, batches = self._point_s, round(self._point_batches)
        self._point_s = self._point_batches = 0.0
        return {"batches_ahead": batches, "batches_ahead_s": seconds}


def _speed(takes: collections.deque[Take | None], across: bool) -> tuple[LoaderSpeed, float] | None:
    """Return a loader's speed by the batches between those that the loop waited for, and how many
    are ready that came with the last one; None: there were too few.

    `across`: count those between which the clock stood still.
    """
    waits = sorted(take.waited_s for take in takes if take is not None)
    totals = list(itertools.accumulate(waits))
    if not waits or not totals[-1]:
        return None
    # The wait of the middle: neither many short ones nor a single long one changes it
    stall_s = waits[bisect.bisect_left(totals, 0.5 * totals[-1])]
    batches, stalls, interval_s, wait_s = 0, 0, 0.0, 0.0
    last, count, waited_s = None, 0, 0.0
    for take in takes:
        if take is None:
            last = last if across else None
            continue
        count, waited_s = count + 1, waited_s + take.waited_s
        if take.waited_s < STALL * stall_s:
            continue
        if last is not None:
            batches, stalls = batches + count, stalls + 1
            interval_s += take.at_s - last.at_s
            wait_s += waited_s + take.noted_s - last.noted_s
        last, count, waited_s = take, 0, 0.0
    if not stalls:
        return None
    speed = LoaderSpeed(interval_s / batches, wait_s / batches, stall_s, stalls, batches)
    return speed, max(0.0, speed.burst - 1 - count)
