"""Short trainings, timed, and what this machine can do.

All numbers are of one process on one device, and none is taken under a profiler.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.core import environment, machine
from tunediff.core.clock import Budget
from tunediff.core.point import Point
from tunediff.data import items, loader
from tunediff.distributed import World
from tunediff.training import hardware, state
from tunediff.training.engine import DataRequest, Engine
from tunediff.training.observer import Observer
from tunediff.training.trial import run

SEGMENTS = 3
"""Parts of a timed training after its warm-up; their spread says how steady the machine was."""
HOST_SHARE = 0.7
"""Share of the available host memory that a training may take."""
MAXIMA = (
    "peak_memory_mib",
    "peak_host_memory_mib",
    "peak_reserved_mib",
    "flops_per_sample",
    "peak_flops_per_s",
    "compiled_graphs",
    "graph_breaks",
)
"""Quantities of points whose largest value a summary holds, where points have them."""


class FindData(Observer):
    """Train nothing, and remember what the training would learn from."""

    data: DataRequest | None = None  # None: the workload has its own loader

    def __init__(self) -> None:
        super().__init__()
        self.facts = dict[str, object]()

    def about(self, facts: Mapping[str, object]) -> None:
        self.facts |= facts

    def begin(self, engine: Engine) -> bool:
        self.data = engine.data
        return False


def _state_mib(engine: Engine) -> dict[str, float]:
    """Return the sizes of what a training keeps from step to step: of the model (`parameters`) and
    of the rest, by the workload's names."""
    model = state.plain(engine.model) if engine.model is not None else None
    kept = {
        "parameters" if stateful is model else name: _bytes(stateful.state_dict())
        for name, stateful in engine.state.stateful.items()
    }
    return {name: size / 2**20 for name, size in kept.items()}


def _bytes(content: Any) -> int:
    if isinstance(content, Tensor):
        return content.nbytes
    if isinstance(content, Mapping):
        return sum(map(_bytes, content.values()))
    return sum(map(_bytes, content)) if isinstance(content, list | tuple) else 0


class StepObserver(Observer):
    """Call a function after every step."""

    def __init__(self, after_step: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._after_step = after_step

    def after_step(self) -> None:
        if self._after_step is not None:
            self._after_step()


class Bench:
    """Short trainings on one set of data, which leave nothing behind."""

    def __init__(self, config: Systems, world: World) -> None:
        """Find what a workload learns from. Raises what it raises until the first batch."""
        self.world, self.cuda = world, world.device.type == "cuda"
        found = FindData()
        run(Engine(config, Budget(samples=1), world, found, evaluates=False))
        self._data = found.data
        source = found.data.source if found.data is not None else None
        self.samples: dict[str, Any] = {
            "name": str(found.facts.get("data", "")),
            "count": 0 if source is None else loader.length(source) or 0,
            "mib": sum(column.nbytes for column in items.columns(source)) / 2**20,
        }
        """Name, number and MiB of the data set; 0 where the workload has its own loader."""
        self.state_mib: dict[str, float] = {}
        """What the last training kept at its end, by name: it stays from one step to the next."""
        self.unread: tuple[str, ...] = ()
        """Knobs that the last training did not follow."""

    def train(
        self,
        config: Systems,
        steps: int,
        points: int = 1,
        after_step: Callable[[], None] | None = None,
    ) -> Sequence[Point]:
        """Train for `steps` and return `points` evenly spaced points; errors pass."""
        short = cfg.override(config, {"evaluation.points": points})
        observer = StepObserver(after_step)
        try:
            engine = Engine(short, Budget(steps=steps), self.world, observer, evaluates=False)
            outcome = run(engine)
            self.state_mib, self.unread = _state_mib(engine), outcome.unread
            return outcome.points
        finally:
            if config.compile.active:  # else the next ones reach the limit of recompilations
                torch.compiler.reset()

    def speed(self, config: Systems, steps: int, segments: int = SEGMENTS) -> dict[str, Any]:
        """Measure rates, step seconds by part, and peak memory over `steps` steps after a warm-up.

        The warm-up is as long as each of the `segments`. Raises what the training raises.
        """
        segment_steps, parts = max(1, math.ceil(steps / segments)), segments + 1
        points = self.train(config, segment_steps * parts, parts)
        return summary(points, config.loader.batch_size, segment_steps * segments)

    def loader_rate(self, config: Systems, seconds: float = 3.0) -> float | None:
        """Measure samples per second of the loader, with its batches brought to the device and no
        model beside it; None if they lie there already, or the workload has its own loader."""
        found, section, device = self._data, config.loader, self.world.device
        if found is None or section.resident:
            return None
        order = loader.Order(
            self.samples["count"] or 1,
            section.batch_size,
            section.accumulation,
            0,
            1,
            config.seed,
        )
        batches = loader.build(
            found.source, section, order, device, 0, found.prepare, found.collate
        )
        count = 0
        with batches as feed:
            # Batches that loader processes have prepared are consumed before the clock starts.
            for _ in range(1 + section.workers * section.prefetch_factor):
                feed.move(feed.fetch())
            self.world.synchronize()
            begin = time.monotonic()
            while count < 3 or time.monotonic() - begin < seconds:
                feed.move(feed.fetch())
                count += 1
            self.world.synchronize()
            spent_s = time.monotonic() - begin
        samples = count * section.batch_size // section.accumulation * found.samples_each
        return samples / spent_s


def summary(points: Sequence[Point], batch_size: int, steps: int) -> dict[str, Any]:
    """Return the means over the points after the warm-up, the first; all have equal steps.

    The keys are those of `Speed` in `schemas/profile-output.json`.
    """
    points, last = points[1:], points[-1]
    samples_per_step = last.samples / last.steps  # the workload's own loader may ignore batch_size
    step_s = statistics.fmean(point["step_s"] for point in points)
    rates = [samples_per_step / point["step_s"] for point in points]
    times = {
        "batch_size": batch_size,
        "steps": steps,
        "samples_per_s": samples_per_step / step_s,
        "samples_per_s_sd": statistics.stdev(rates) if len(rates) > 1 else None,
        "step_s": step_s,
        "parts_s": {
            name: statistics.fmean(point.phases_s.get(name, 0.0) for point in points)
            for name in last.phases_s
        },
        "first_step_s": last["first_step_s"],
        "compile_s": last.seconds["compile"],
        **{name: max(point[name] for point in points) for name in MAXIMA if name in last},
        "disturbed": any(point["disturbed"] for point in points),
    }
    if last.flops_per_sample is not None:
        flops_per_s = samples_per_step / step_s * last["flops_per_sample"]
        times["peak_share"] = flops_per_s / last["peak_flops_per_s"]
    return times


# ---- the machine
def device(world: World) -> dict[str, Any]:
    """Return the device, what it can do, and how much memory a training may take."""
    host, limit = psutil.virtual_memory(), 0.0
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        name, memory_bytes = properties.name, properties.total_memory
        limit = torch.cuda.mem_get_info(world.device)[0] + torch.cuda.memory_reserved(world.device)
    else:
        name, memory_bytes = environment.describe()["cpu"], host.total
        limit = psutil.Process().memory_info().rss + HOST_SHARE * host.available
    return {
        "type": world.device.type,
        "name": name,
        "threads": torch.get_num_threads(),
        "cores": machine.cores(),
        "gpus": torch.cuda.device_count(),
        "memory_mib": memory_bytes / 2**20,
        "memory_limit_mib": limit / 2**20,
    }


def format_gains(world: World) -> dict[str, float]:
    """Measure how many times as fast as in float32 a matrix product is in other formats.

    `bf16`, `fp16` for autocast, `tf32` for `precision.matmul = high`; if the device has units.
    """
    formats: dict[str, tuple[torch.dtype | None, str]] = {}
    if world.device.type == "cuda":
        formats["fp16"] = (torch.float16, "highest")
        if torch.cuda.get_device_properties(world.device).major >= 8:
            formats |= {"bf16": (torch.bfloat16, "highest"), "tf32": (None, "high")}
    elif "bf16" not in machine.emulated():
        formats["bf16"] = (torch.bfloat16, "highest")
    plain = hardware.peak_flops_per_s(world.device, None, "highest")
    return {
        name: hardware.peak_flops_per_s(world.device, dtype, matmul) / plain
        for name, (dtype, matmul) in formats.items()
    }
