"""Where the seconds of a training step go."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch

PHASES = ("data_wait", "host_to_device", "sampler", "forward", "backward", "optimizer", "ema")
"""The parts of a step. `sampler`: timesteps, noise, noisy images and what the timestep sampler learns; `backward`
includes averaging gradients over workers; `optimizer`: unscaling, clipping and the update."""


class Phases:
    """Adds up the time of each phase: `with phases("forward"): …`.

    On a GPU it is the device's own time, from events that are read later, when the device has been waited for anyway:
    nothing here makes the host wait. Each phase is an NVTX range there, and a range of torch's profiler while one runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._open: list[tuple[str, Any, Any]] = []  # events that were not read yet
        self._spare: list[Any] = []
        self._ranges = {name: _Phase(self, name) for name in PHASES}

    def __call__(self, name: str) -> _Phase:
        """The context of a phase; phases do not nest."""
        return self._ranges[name]

    def read(self) -> dict[str, float]:
        """Seconds per phase so far. Only to be called when the device has finished what was queued."""
        for name, begin, end in self._open:
            self._seconds[name] += begin.elapsed_time(end) / 1000
            self._spare += [begin, end]
        self._open.clear()
        return dict(self._seconds)

    def _mark(self) -> Any:
        """This moment: on the device's clock or the host's."""
        if not self._cuda:
            return time.perf_counter()
        event: Any = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _add(self, name: str, begin: Any, end: Any) -> None:
        if self._cuda:
            self._open.append((name, begin, end))
        else:
            self._seconds[name] += end - begin


class _Phase:
    """One phase, entered again and again."""

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases, self._name = phases, name
        self._begin: Any = None
        self._range: Any = None

    def __enter__(self) -> None:
        if self._phases._cuda:
            torch.cuda.nvtx.range_push(self._name)  # type: ignore[no-untyped-call]
        if torch.autograd.profiler._is_profiler_enabled:
            self._range = torch.profiler.record_function(self._name)
            self._range.__enter__()
        self._begin = self._phases._mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phases._add(self._name, self._begin, self._phases._mark())
        if self._range is not None:
            self._range.__exit__(kind, error, trace)
            self._range = None
        if self._phases._cuda:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
