"""What a point says of speed: samples/s, waiting for data, memory, and the parts of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import platform
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from tunediff.core.clock import Clock
from tunediff.core.point import Point
from tunediff.distributed import World
from tunediff.training import hardware, memory
from tunediff.training.pace import Pace

PER_STEP = (
    "loss",
    "samples_per_s",
    "samples_per_s_sd",
    "step_s",
    "phases_s",
    "data_wait_share",
    "peak_share",
)
"""Fields of a point that are not known without a step."""


class Meter:
    """Throughput, step and loss since the last evaluation; memory from the start. All ranks."""

    def __init__(
        self,
        clock: Clock,
        pace: Pace,
        phases: Phases,
        world: World,
        devices: int,
        constant: dict[str, Any],
    ) -> None:
        """`devices`: that all ranks keep busy together. `constant`: fields of `Point` that do not
        change, `first_step_s` and `peak_flops_per_s` among them."""
        self._clock, self._pace, self._phases, self._world = clock, pace, phases, world
        self._constant, self._devices = constant, devices
        self._peak_mib = dict[str, float]()
        self._unread = list[Tensor]()  # losses: reading one in every step would wait for the device
        self.streak = 0
        """Steps in a row, up to the last, whose loss is not finite; as of the last `read`."""
        self._waited_s = phases.read()["data_wait"]  # the device, as far as the clock knows it
        # ---- used up to the last evaluation, and before the last restart of the process
        self._before = {"device_s": 0.0, "train_s": 0.0}
        self.restart()

    def restart(self) -> None:
        """Measure from here."""
        self._seconds, self._phase_s = dict(self._clock.seconds), self._phases.read()
        self._samples, self._steps = self._pace.samples, self._pace.steps
        self._sum, self._finite = np.float32(0.0), 0
        self._pace.rates.clear()
        self._usage = hardware.Usage.now()

    @property
    def device_s(self) -> float:
        """Return training seconds times devices, also of those before a restart."""
        seconds = self._pace.train_s - self._before["train_s"]
        return self._before["device_s"] + seconds * self._devices

    def state_dict(self) -> dict[str, Any]:
        """Return for the checkpoint what the training has used so far, and measured since the last
        evaluation."""
        self.read()
        return {
            "device_s": self.device_s,
            "train_s": self._pace.train_s,
            "since": {
                "seconds": _difference(self._clock.seconds, self._seconds),
                "phases": _difference(self._phases.read(), self._phase_s),
                "counts": [self._pace.samples - self._samples, self._pace.steps - self._steps],
                "losses": self._world.gather([float(self._sum), self._finite]),
                "rates": list(self._pace.rates),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        since = state["since"]
        self._before = {name: state[name] for name in self._before}
        self._seconds = _difference(self._clock.seconds, since["seconds"])
        self._phase_s = _difference(self._phases.read(), since["phases"])
        samples, steps = since["counts"]
        self._samples, self._steps = self._pace.samples - samples, self._pace.steps - steps
        total, self._finite = since["losses"][self._world.rank % len(since["losses"])]
        self._sum = np.float32(total)
        self._pace.rates[:] = since["rates"]

    def add(self, loss: Tensor) -> None:
        """Add one step's loss, a scalar on the device."""
        self._unread.append(loss)

    def read(self) -> None:
        """Take in what was added; call it once the device has finished what was queued."""
        waited_s = self._phases.read()["data_wait"]
        if self._phases.of_device:  # the clock sees the host only, which runs ahead of its device
            self._clock.move(waited_s - self._waited_s, "train", "data_wait")
            self._waited_s = waited_s
        for loss in torch.stack(self._unread).float().tolist() if self._unread else ():
            if math.isfinite(loss):  # those that loss scaling passes over do not count
                self._sum = np.float32(self._sum + np.float32(loss))
                self._finite, self.streak = self._finite + 1, 0
            else:
                self.streak += 1
        self._unread.clear()

    def measure(self, index: int, fraction: float, before: Point | None = None) -> Point:
        """Return the point of now, without an evaluation.

        Where no step was made since the point `before`, as a long one ends several segments at
        once, its loss and its speed are repeated.
        """
        clock, pace = self._clock, self._pace
        seconds = _difference(clock.seconds, self._seconds)
        trained_s = seconds["train"] + seconds["data_wait"]
        samples, steps = pace.samples - self._samples, pace.steps - self._steps
        self.read()
        loss = float(self._sum) / self._finite if self._finite else math.nan if steps else 0.0
        parts = self._parts(trained_s, steps)
        rate = samples / trained_s if trained_s > 0 else 0.0
        flops, peak = self._constant.get("flops_per_sample"), self._constant["peak_flops_per_s"]
        price = clock.budget.price_per_device_hour
        point = Point(
            index=index,
            fraction=fraction,
            train_s=pace.train_s,
            device_s=self.device_s,
            price=self.device_s / 3600 * price if price is not None else None,
            samples=pace.samples,
            steps=pace.steps,
            loss=self._world.total(loss) / self._world.size,
            samples_per_s=rate,
            samples_per_s_sd=statistics.stdev(pace.rates) if len(pace.rates) > 1 else 0.0,
            step_s=trained_s / steps if steps else None,
            phases_s=parts,
            data_wait_share=parts.get("data_wait", 0.0) * steps / trained_s
            if trained_s > 0
            else 0.0,
            peak_share=rate * flops / peak if flops is not None else None,
            **self._constant,
            **self._machine(),
            **self._memory(),
        )
        if steps or before is None:
            return point
        return dataclasses.replace(point, **{name: getattr(before, name) for name in PER_STEP})

    def _parts(self, trained_s: float, steps: int) -> dict[str, float]:
        """Return the seconds of the mean step's parts on this rank; `other`: all the rest."""
        if not steps:
            return {}
        spent = _difference(self._phases.read(), self._phase_s)
        parts = {name: seconds / steps for name, seconds in spent.items()}
        return {**parts, "other": max(0.0, trained_s - sum(spent.values())) / steps}

    def _machine(self) -> dict[str, Any]:
        """Return CPU load and what other processes took, over all ranks of this machine."""
        used = hardware.Usage.now().since(self._usage)
        ranks = self._world.gather((platform.node(), used.own_s))
        own_s = sum(seconds for node, seconds in ranks if node == platform.node())
        facts = hardware.disturbance(used, own_s, psutil.cpu_count() or 1)
        facts["cpu_share"] = used.own_s / max(1e-9, used.wall_s)
        return facts

    def _memory(self) -> dict[str, Any]:
        """Return the peak MiB of the rank that needs most."""
        used = memory.peak_mib(self._world.device)
        if self._peak_mib:  # what judging reserved stays reserved: the first point has training's
            used.pop("peak_reserved_mib", None)
        for name, value in used.items():
            self._peak_mib[name] = max(value, self._peak_mib.get(name, 0.0))
        return {name: self._world.largest(value) for name, value in self._peak_mib.items()}


def _difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    names = dict.fromkeys((*now, *before))
    return {name: now.get(name, 0.0) - before.get(name, 0.0) for name in names}


# ---- the parts of a step
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
