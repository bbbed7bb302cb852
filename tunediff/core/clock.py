"""Measure what a training costs in seconds; `training.pace` decides by it when the budget is spent.

The clock runs in the worker process and is monotonic. It waits for the device at both ends of every
part. Seconds of evaluations and of writing checkpoints do not count towards the budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

PARTS = ("setup", "compile", "data_wait", "train", "evaluation", "checkpoint")
"""Parts of a worker's time; every second belongs to exactly one. `compile` is compilation and the
warm-up step. `data_wait` is the time for which the loop waits for its next batch, which is not part
of `train`; on a GPU it is the time for which the device waits, not the host."""


class Unit(NamedTuple):
    """The unit in which the budget of a trial is counted."""

    along: str
    """Name of the `Point` quantity that the budget limits; curves are compared along it."""
    seconds: str
    """Label of an axis."""
    what: str
    """Noun that completes «ten minutes of …»."""
    short: str
    """Abbreviation that follows a number."""


UnitName = Literal["wall", "device"]
UNITS: dict[UnitName, Unit] = {
    "wall": Unit("train_s", "training seconds", "training", "s"),
    "device": Unit("device_s", "device-seconds", "device time", "device-s"),
}
"""`wall`: trials train equally long. `device`: N devices share the budget, at equal cost."""

PROCESS, LINE, TRAINING = "process", "from a line", "training"
"""What a clock counts: all of a process, what follows a line that it prints, or training alone.
Commands have any of them, workloads always the last, and only clocks of one kind are compared."""
OUTCOME_FINAL = (
    "--outcome final (outcome: final in a search file) judges a command by the value at its end,"
    " and needs no budget"
)
_OF_COMMANDS = {
    PROCESS: Unit("train_s", "seconds of the process", "the process's wall-clock", "s"),
    LINE: Unit("train_s", "seconds since the clock's line", "wall-clock since its line", "s"),
}


class ClockSummary(NamedTuple):
    """Which seconds counted in some runs."""

    kind: str
    """`process`, `from a line` or `training`; several where runs differ."""
    start_up_share: float | None = None
    """Share of the processes' seconds before the clock, or before the first value; or None."""

    @classmethod
    def of(cls, clocks: Iterable[Mapping[str, Any]], expected: str) -> ClockSummary:
        """Return the summary of what journals say of the clock; empty mappings do not count.

        expected: the kind of the clock where no run has said it.
        """
        said = [clock for clock in clocks if clock]
        if not said:
            return cls(expected)
        process_s = sum(clock["process_s"] for clock in said)
        share = sum(clock["start_up_s"] for clock in said) / process_s if process_s > 0 else None
        kinds = sorted({clock["kind"] for clock in said})
        return cls(", ".join(kinds), share)

    def unit(self, name: UnitName) -> Unit:
        """Return the unit of budgets and curves under its own name."""
        return _OF_COMMANDS.get(self.kind, UNITS[name])


def seconds_per_device(seconds: float, unit: UnitName, devices: int) -> float:
    """Return the training seconds of each of `devices` devices, of a budget in `unit`."""
    return seconds / devices if unit == "device" else seconds


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much a trial may train: seconds, samples or steps, whichever is reached first."""

    seconds: float | None = None
    """Training seconds (s) of the trial itself, above 0."""
    samples: int | None = None
    """Training samples, above 0. Exactly repeatable: the machine's speed has no effect."""
    steps: int | None = None
    """Optimizer steps, above 0."""
    compile_charged: bool = True
    """Whether compilation and warm-up count as training seconds. Both are recorded either way."""
    setup_charged: bool = False
    """Whether seconds before the first batch count as training. They are always recorded."""
    price_per_device_hour: float | None = None
    """Price of one hour of one device, in any currency; None: not known."""
    open_ended: bool = False
    """Continue to train after the budget is spent, until a stop is requested. Schedules and
    evaluations follow fractions of the budget as usual: warm-up ends at the same point, and
    evaluations continue at the same distance."""

    def __post_init__(self) -> None:
        limits = [limit for limit in (self.seconds, self.samples, self.steps) if limit is not None]
        if not limits:
            raise ValueError("a budget needs seconds, samples or steps")
        if any(not limit > 0 for limit in limits):
            raise ValueError(
                f"a budget must be above 0, not {self.seconds} s, {self.samples} samples,"
                f" {self.steps} steps"
            )


class Clock:
    """Count the seconds that are spent on each part.

    `synchronize` waits for the device; `now` is a monotonic clock in seconds; `on_part` is called
    with the name of a part whenever that part begins.
    """

    def __init__(
        self,
        budget: Budget,
        synchronize: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
        on_part: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.budget, self._synchronize, self.now, self._on_part = budget, synchronize, now, on_part
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.before_first_batch_s = 0.0
        """Setup seconds of the workload itself, until it asks for its first batch."""
        self._running: list[tuple[str, float]] = []  # parts nest: the innermost one counts

    @contextlib.contextmanager
    def part(self, name: str, synchronize: bool = True) -> Iterator[None]:
        """Count the time inside as `name`; without `synchronize` queued work may count later."""
        if name not in self.seconds:
            raise ValueError(f"{name!r} is not a part of the clock; parts: {', '.join(PARTS)}")
        self._switch(synchronize)
        self._on_part(name)
        self._running.append((name, self.now()))
        try:
            yield
        finally:
            self._switch(synchronize)
            self._running.pop()
            if self._running:
                self._on_part(self._running[-1][0])
                self._running[-1] = (self._running[-1][0], self.now())

    def _switch(self, synchronize: bool) -> None:
        """Add the time until now to the running part."""
        if synchronize:
            self._synchronize()
        if self._running:
            name, since = self._running[-1]
            self.seconds[name] += self.now() - since
            self._running[-1] = (name, self.now())

    def move(self, seconds: float, of: str, to: str) -> None:
        """Move seconds to the part `to`, for work that is attributed only later."""
        self.seconds[of] -= seconds
        self.seconds[to] += seconds

    def add(self, part: str, seconds: float) -> None:
        """Attribute extra seconds to a part."""
        self.seconds[part] += seconds

    def read(self, synchronize: bool = True) -> float:
        """Return `train_s` until now; without `synchronize` the device may lag behind."""
        self._switch(synchronize)
        return self.train_s

    @property
    def train_s(self) -> float:
        """Return the training seconds so far: train, data wait, and other charged parts."""
        charged = self.seconds["compile"] if self.budget.compile_charged else 0.0
        charged += self.before_first_batch_s if self.budget.setup_charged else 0.0
        return self.seconds["train"] + self.seconds["data_wait"] + charged

    def progress(self, train_s: float, samples: int, steps: int = 0) -> float:
        """Return the spent fraction of the budget, 0 to 1; above 1 in an open-ended training."""
        spent = [0.0]
        if self.budget.seconds is not None:
            spent.append(train_s / self.budget.seconds)
        if self.budget.samples is not None:
            spent.append(samples / self.budget.samples)
        if self.budget.steps is not None:
            spent.append(steps / self.budget.steps)
        return max(spent) if self.budget.open_ended else min(1.0, max(spent))

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the seconds per part, for the checkpoint."""
        return {"seconds": dict(self.seconds)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continue from a checkpoint: add its seconds to those that this process has spent.

        The compile seconds of this process become setup seconds: the configuration is not charged
        for compiling again after an interruption.
        """
        self.seconds["setup"] += self.seconds["compile"]
        self.seconds["compile"] = 0.0
        for name, seconds in state["seconds"].items():
            self.seconds[name] += seconds
