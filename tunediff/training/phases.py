"""Where the seconds of a training step go."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

COMMON = ("data_wait", "host_to_device", "forward", "backward", "optimizer")
"""The parts that every step has; a workload adds its own. `forward` is what it does between getting
a batch and calling `backward`; `backward` includes averaging gradients over workers; `optimizer`:
unscaling, clipping and the update. In a loop that makes its own steps, `forward` is all that it does
with a batch outside phases of its own."""


class Phases:
    """Adds up each phase's time; one runs at a time: `with phases("forward"):` interrupts.

    On a GPU it is the device's own time, from events that are read later, when the device has been
    waited for anyway: nothing before makes the host wait. Each stretch of a phase is an NVTX range
    there, and a range of torch's profiler while one runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = self.of_device = device.type == "cuda"
        """Whether the seconds are the device's own, which works on while the host waits."""
        self._seconds: dict[str, float] = {}  # in the order in which they first end
        self._open: list[tuple[str, Any, Any]] = []  # events that were not read yet
        self._spare: list[Any] = []
        self.now: str | None = None
        """The phase that is on."""
        self._begin: Any = None
        self._range: Any = None
        self._of_capture: list[tuple[str, Any, Any]] = []  # of a captured step, and its replays
        self._capturing, self._replays = False, 0

    def switch(self, name: str | None) -> str | None:
        """Begin this phase, or none; return the one that ends."""
        before = self.now
        if name == before:
            return before
        mark = self._mark()
        if before is not None:
            self._add(before, self._begin, mark)
            if self._range is not None:
                self._range.__exit__(None, None, None)
                self._range = None
            if self._cuda:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        if name is not None:
            if self._cuda:
                torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
            if torch.autograd.profiler._is_profiler_enabled:
                self._range = torch.profiler.record_function(name)
                self._range.__enter__()
        self.now, self._begin = name, mark
        return before

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time inside as a phase."""
        before = self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Make the phases inside part of a captured step: each replay records their events anew."""
        self.switch(None)
        self._of_capture, self._replays, self._capturing = [], 0, True
        try:
            yield
        finally:
            self._capturing = False

    def replayed(self) -> None:
        """Count one replay of the captured step."""
        self._replays += 1

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a phase that were not spent in it."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """Return the seconds per phase. The device must have finished all but a step's end."""
        if self._open:  # averaging the weights was queued after the clock was read
            last_end = self._open[-1][2]
            last_end.synchronize()
        if self._replays:  # all took as long as the last one
            with contextlib.suppress(RuntimeError):  # not every driver times events of a graph
                for name, begin, end in self._of_capture:
                    seconds = begin.elapsed_time(end) / 1000 if self._cuda else end - begin
                    self.add(name, self._replays * seconds)
            self._replays = 0
        used = set()
        for name, begin, end in self._open:
            self.add(name, begin.elapsed_time(end) / 1000)
            used |= {begin, end}  # an end may be the next one's begin
        self._spare += [event for event in used if event is not self._begin]
        self._open.clear()
        return self._seconds | {name: 0.0 for name in COMMON if name not in self._seconds}

    def _mark(self) -> Any:
        """Return this moment: on the device's clock or the host's."""
        if not self._cuda:
            return time.perf_counter()
        if self._capturing:
            event: Any = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
        elif self._spare:
            event = self._spare.pop()
        else:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _add(self, name: str, begin: Any, end: Any) -> None:
        if self._capturing:
            self._of_capture.append((name, begin, end))
        elif self._cuda:
            self._open.append((name, begin, end))
        else:
            self.add(name, end - begin)
