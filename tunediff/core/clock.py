"""What training costs in seconds, and when it is over.

The clock lives in the worker, is monotonic, waits for the device at the edges of every part, and stands still for the
budget while a model is evaluated or written to disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

PARTS = ("setup", "compile", "data_wait", "train", "evaluation", "checkpoint")
"""Every second of a worker falls into one of these. `compile` is compilation and the warm-up step; `data_wait` is the
time the loop waits for its next batch, apart from `train`; on a GPU the time that the device waits, not its host."""


class Unit(NamedTuple):
    """What the budget of a trial is counted in."""

    along: str
    """The quantity of a `Point` that is spent, and along which curves are compared."""
    seconds: str
    """What it is called along an axis."""
    what: str
    """What it is: ten minutes of …"""
    short: str
    """Behind a number."""


UnitName = Literal["wall", "device"]
UNITS: dict[UnitName, Unit] = {
    "wall": Unit("train_s", "training seconds", "training", "s"),
    "device": Unit("device_s", "device-seconds", "device time", "device-s"),
}
"""`wall`: every trial trains for as long; `device`: N devices share it, so that each trial costs as much."""


def own_s(seconds: float, unit: UnitName, devices: int) -> float:
    """Training seconds of a trial on so many devices, of a budget in a unit."""
    return seconds / devices if unit == "device" else seconds


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much training a trial may spend: seconds, samples, steps, or whichever is reached first."""

    seconds: float | None = None
    """Training seconds (s) of the trial itself, above 0."""
    samples: int | None = None
    """Training samples, above 0; makes a run exactly repeatable, whatever the speed of the machine."""
    steps: int | None = None
    """Optimizer steps, above 0."""
    compile_charged: bool = True
    """Whether compilation and warm-up count as training seconds. Both are recorded either way."""
    price_per_device_hour: float | None = None
    """What an hour of one device costs, in whatever currency; None: not known."""
    open_ended: bool = False
    """Train on when the budget is spent, until asked to stop. Schedules and evaluations follow fractions of the budget
    as ever: warm-up ends where it would, evaluations go on at the same distance."""

    def __post_init__(self) -> None:
        limits = [limit for limit in (self.seconds, self.samples, self.steps) if limit is not None]
        if not limits:
            raise ValueError("a budget needs seconds, samples or steps")
        if any(not limit > 0 for limit in limits):
            raise ValueError(
                f"a budget must be above 0, not {self.seconds} s, {self.samples} samples, {self.steps} steps"
            )


class Clock:
    """Seconds spent per part. `synchronize` waits for the device; `now` is a monotonic clock in seconds; `told` hears
    which part begins."""

    def __init__(
        self,
        budget: Budget,
        synchronize: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
        told: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.budget, self._synchronize, self._now, self._told = budget, synchronize, now, told
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._running: list[tuple[str, float]] = []  # parts nest: the innermost one is paid

    @contextlib.contextmanager
    def part(self, name: str, synchronize: bool = True) -> Iterator[None]:
        """Pay the time inside to `name`. Without `synchronize` queued device work may spill into the next part."""
        if name not in self.seconds:
            raise ValueError(f"{name!r} is not a part of the clock; parts: {', '.join(PARTS)}")
        self._switch(synchronize)
        self._told(name)
        self._running.append((name, self._now()))
        try:
            yield
        finally:
            self._switch(synchronize)
            self._running.pop()
            if self._running:
                self._told(self._running[-1][0])
                self._running[-1] = (self._running[-1][0], self._now())

    def _switch(self, synchronize: bool) -> None:
        """Pay the running part up to now."""
        if synchronize:
            self._synchronize()
        if self._running:
            name, since = self._running[-1]
            self.seconds[name] += self._now() - since
            self._running[-1] = (name, self._now())

    def move(self, seconds: float, of: str, to: str) -> None:
        """Book seconds of one part as another's, where what they were becomes known afterwards."""
        self.seconds[of] -= seconds
        self.seconds[to] += seconds

    def read(self, synchronize: bool = True) -> float:
        """Return `train_s` as of now; without `synchronize` the device may still have work of these seconds to do."""
        self._switch(synchronize)
        return self.train_s

    @property
    def train_s(self) -> float:
        """Training seconds charged so far: train, data wait, and compile if the budget says so."""
        charged = self.seconds["compile"] if self.budget.compile_charged else 0.0
        return self.seconds["train"] + self.seconds["data_wait"] + charged

    def progress(self, train_s: float, samples: int, steps: int = 0) -> float:
        """Fraction of the budget that is spent, 0 to 1; above 1 in an open-ended training."""
        spent = [0.0]
        if self.budget.seconds is not None:
            spent.append(train_s / self.budget.seconds)
        if self.budget.samples is not None:
            spent.append(samples / self.budget.samples)
        if self.budget.steps is not None:
            spent.append(steps / self.budget.steps)
        return max(spent) if self.budget.open_ended else min(1.0, max(spent))

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Seconds per part, for the checkpoint."""
        return {"seconds": dict(self.seconds)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on from a checkpoint: what was spent stays spent, and this process's own seconds come on top.

        Compiling once more after an interruption is no fault of the configuration: it is booked as setup.
        """
        self.seconds["setup"] += self.seconds["compile"]
        self.seconds["compile"] = 0.0
        for name, seconds in state["seconds"].items():
            self.seconds[name] += seconds
