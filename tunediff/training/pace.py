"""How much of the budget is spent, when to look at the clock, when to stop: alike on all ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from tunediff.core.clock import Budget, Clock
from tunediff.distributed import World

SLOWDOWN = 20.0
"""How much slower several ranks' steps may become without passing a stop by `OVERRUN`."""
OVERRUN = 0.02
"""Share of the budget; one step where that takes longer."""


class Pace:
    """How much of the budget is spent: the same number on every rank at every step.

    Each rank asking its own clock would stop at its own step and leave the others waiting in a
    collective. Rank 0's clock decides for all, at steps all know beforehand; between two of them
    progress is extrapolated. A reading waits for the device, so they are spaced to be rare (1 % of
    the budget or half a second) yet never to overshoot the stop. On a GPU it is half a second
    alone: 1 % of a short budget would be every step, and the host could never run ahead.

    Steps may slow down suddenly, such as after those whose batches were ready. So the steps between
    two readings at most double from one reading to the next, and a process that trains alone also
    looks at its clock after every step, without waiting for the device, and reads it as soon as
    those seconds are over. Several ranks cannot, since each would read at another step: they plan
    each reading so that steps may slow down `SLOWDOWN` times before it.
    """

    def __init__(self, budget: Budget, clock: Clock, world: World) -> None:
        self._budget, self._clock, self._world = budget, clock, world
        self.steps = self.samples = 0
        self.train_s = self._s_per_step = 0.0
        self.progress, self._per_step, self._stop = 0.0, 0.0, 1.0
        self.rates: list[float] = []
        """Samples per second between one reading of the clock and the next."""
        # Progress before the first step: what compilation took of the budget.
        self._start: float | None = None
        self._read_at = self._next_check = self._samples_read = 0
        self._exact = self._exact_s = 0.0  # progress and seconds as of the last reading
        # Training seconds at which the next reading is due, however few steps were trained.
        self._due_s = 0.0
        self.checked = True
        """Whether the clock was read after the last step."""

    def aim(self, stop: float) -> None:
        """Train until this fraction of the budget is spent; reads the clock."""
        self._stop = stop
        self._check()
        if self._start is None:
            self._start = self.progress

    @property
    def schedule(self) -> float:
        """Return the fraction of the possible training; learning rate and EMA follow it.

        It is 0 to 1, and above 1 after the budget of an open-ended training: averages go on,
        learning rates stay. Charged compile seconds must not skip the warm-up.
        """
        start = self._start or 0.0
        return (self.progress - start) / (1.0 - start) if start < 1.0 else 1.0

    @contextlib.contextmanager
    def left_out_of_schedule(self) -> Iterator[None]:
        """Let the schedule stand still inside, whatever of the budget is charged there."""
        self._check()
        schedule = self.schedule
        yield
        self._check()
        if schedule < 1.0 and self._budget.seconds is not None:
            self._start = (self.progress - schedule) / (1.0 - schedule)

    @property
    def reached(self) -> bool:
        """Return whether the stop is reached, by a reading of the clock and not by extrapolation.

        Compilation may take more of the budget than lies before the first stop: a step is made all
        the same, unless nothing is left.
        """
        return self.checked and self.progress >= (self._stop if self.steps else 1.0) - 1e-9

    def step(self, samples: int) -> None:
        """Count an optimizer step over `samples` samples, which was queued."""
        self.steps, self.samples = self.steps + 1, self.samples + samples
        self.checked = False
        # Its seconds may be over before the step of the next reading is reached: the host's clock
        # may be behind the device's work, but never ahead of it
        if self.steps >= self._next_check or (
            self._world.size == 1 and self._clock.read(synchronize=False) >= self._due_s
        ):
            self._check()
        elif self._budget.seconds is None:
            # Samples are counted: nothing to extrapolate.
            self.progress = self._clock.progress(0.0, self.samples, self.steps)
        else:
            self.progress = min(self.progress + self._per_step, self._stop)

    def _check(self) -> None:
        train_s = self._clock.read() if self._world.main else 0.0
        self.train_s = self._world.agree(train_s)
        progress = self._clock.progress(self.train_s, self.samples, self.steps)
        steps = self.steps - self._read_at
        if steps:
            self._per_step = max(0.0, (progress - self._exact)) / steps
            self._s_per_step = max(0.0, (self.train_s - self._exact_s)) / steps
            if (seconds := self.train_s - self._exact_s) > 0.0:
                self.rates.append((self.samples - self._samples_read) / seconds)
        self._samples_read = self.samples
        self.progress = self._exact = progress
        self._exact_s, self._read_at, self.checked = self.train_s, self.steps, True
        # At most twice as many steps as since the last reading: their speed may be about to change.
        self._next_check = self.steps + min(self._steps_until_reading(), max(1, 2 * steps))
        self._due_s = self.train_s + self._seconds_until_reading()

    def _steps_until_reading(self) -> int:
        if self._per_step <= 0.0:
            return 1
        left = self._stop - self.progress
        limits = [left / self._per_step]
        # Ranks cannot look at their clocks in between: steps may slow down before the next reading.
        if self._world.size > 1 and self._budget.seconds is not None:
            limits.append((left + OVERRUN) / SLOWDOWN / self._per_step)
        # A CPU loses nothing by a reading at 1 % of the budget; a GPU would wait for its host.
        if self._world.device.type == "cpu":
            limits.append(0.01 / self._per_step)
        if self._s_per_step > 0.0:
            limits.append(0.5 / self._s_per_step)
        return max(1, math.floor(min(limits)))

    def _seconds_until_reading(self) -> float:
        """Return half a second, what is left until the stop, or on a CPU 1 % of the budget."""
        if (seconds := self._budget.seconds) is None:
            return 0.5
        part = 0.01 * seconds if self._world.device.type == "cpu" else 0.5
        return min(0.5, part, max(0.0, self._stop * seconds - self.train_s))

    def position(self) -> dict[str, float]:
        """Return training seconds, samples and steps as of the last reading."""
        return {"train_s": self.train_s, "samples": self.samples, "steps": self.steps}

    def state_dict(self) -> dict[str, Any]:
        """Return steps and samples so far, and where the schedule began."""
        return {"steps": self.steps, "samples": self.samples, "start": self._start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; the clock, which gives the seconds, has continued."""
        self.steps, self.samples, self._start = state["steps"], state["samples"], state["start"]
        self._read_at = self._next_check = self.steps
        self._samples_read = self.samples
        self.train_s = self._exact_s = self._clock.train_s
        self.progress = self._exact = self._clock.progress(self.train_s, self.samples, self.steps)
