"""Short trainings, timed, and what this machine can do.

All numbers are of one process on one device, and none is taken under a profiler. What a profile
needs of the training and of the workload is asked for in one place: `Bench`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from torch import Tensor, nn

from tunediff import config as cfg
from tunediff.config import Systems, Values
from tunediff.core import environment, machine
from tunediff.core.clock import Budget
from tunediff.core.point import Point
from tunediff.data import items, loader
from tunediff.distributed import World, alone
from tunediff.profiling.result import Device, Failed, Samples, Speed, Tried
from tunediff.training import hardware, memory
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.training_run import Program, TrainingRun
from tunediff.training.trial import run

SEGMENTS = 3
"""Parts a timed training is cut into after its warm-up: their spread says how steady the machine
was."""
HOST_SHARE = 0.7
"""Share of the host memory that is available now which a training may take: the rest is others'."""
ALSO = (
    "peak_memory_mib", "peak_host_memory_mib", "peak_reserved_mib", "flops_per_sample", "peak_flops_per_s",
    "load_average", "compiled_graphs", "expected_graphs",
)  # fmt: skip
"""What a summary takes over from points that have it: the largest."""


class _Seen(Exception):  # noqa: N818 – no error
    """A training has asked for its first batch."""


class Watch(Observer):
    """Keeps what a workload says of its data, and calls torch's profiler."""

    def __init__(self, after_step: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.facts, self._after_step = dict[str, object](), after_step

    def about(self, facts: Mapping[str, object]) -> None:
        self.facts |= facts

    def after_step(self) -> None:
        if self._after_step is not None:
            self._after_step()


class Measure(Program):
    """Train, and remember the plain model."""

    model: nn.Module

    def before_prepare(self, run: TrainingRun, model: nn.Module) -> None:
        self.model = model

    def state_mib(self, run: TrainingRun) -> dict[str, float]:
        """Return the sizes of the model (`parameters`) and, by the workload's names, of whatever
        else is kept."""
        others = {
            name: stateful
            for name, stateful in run.state.stateful.items()
            if stateful is not self.model
        }
        sizes = {
            name: _bytes(stateful.state_dict())
            for name, stateful in {"parameters": self.model, **others}.items()
        }
        return {name: size / 2**20 for name, size in sizes.items()}


def _bytes(content: Any) -> int:
    if isinstance(content, Tensor):
        return content.nbytes
    inside = (
        content.values()
        if isinstance(content, Mapping)
        else content
        if isinstance(content, list | tuple)
        else ()
    )
    return sum(map(_bytes, inside))


class Look(Program):
    """Stop a training where it asks for its first batch: by then it has said from what it
    learns."""

    source: loader.Source | None = None  # a loader of the workload's own
    made: loader.Prepare | None = None
    collate: items.Collate | None = None
    samples_each = 1

    def on_source(
        self, run: TrainingRun, source: loader.Source | None, options: Mapping[str, Any]
    ) -> None:
        self.source, self.made, self.collate = (
            source,
            options.get("prepare"),
            options.get("collate"),
        )
        self.samples_each = options.get("samples_each", 1)
        raise _Seen


class Bench:
    """Short trainings on one set of data, which leave nothing behind."""

    def __init__(self, config: Systems, world: World) -> None:
        """What the workload of `config` learns from. Raises what its training raises by then."""
        self.world, self.cuda = world, world.device.type == "cuda"
        observer = Watch()
        look = Look()
        with contextlib.suppress(_Seen):
            run(Engine(config, Budget(samples=1), world, observer, look, evaluates=False))
        self._source, self._prepare, self._collate = look.source, look.made, look.collate
        self._samples_each = look.samples_each
        count = 0 if look.source is None else loader.length(look.source) or 0
        size = sum(column.nbytes for column in items.columns(look.source))
        self.samples: Samples = {
            "name": str(observer.facts.get("data", "")),
            "count": count,
            "mib": size / 2**20,
        }
        self.state_mib: dict[str, float] = {}
        """What the last training kept at its end, by name: it stays from one step to the next."""
        self.unread: tuple[str, ...] = ()
        """Knobs that the last training did not follow."""

    @classmethod
    def of(cls, config: Systems) -> Bench:
        """Return a bench on the data of a configuration, in this process alone."""
        return cls(config, alone())

    def train(
        self,
        config: Systems,
        steps: int,
        points: int = 1,
        after_step: Callable[[], None] | None = None,
    ) -> Sequence[Point]:
        """Train for so many steps; returns so many points, equally far apart. Raises what the
        training raises."""
        short = cfg.override(config, {"evaluation.points": points})
        try:
            budget = Budget(steps=steps)
            program = Measure()
            engine = Engine(short, budget, self.world, Watch(after_step), program, evaluates=False)
            outcome = run(engine)
            self.state_mib, self.unread = program.state_mib(engine), outcome.unread
            return outcome.points
        finally:
            if config.compile.active:
                # or the next trainings would reach the limit of recompilations
                torch.compiler.reset()

    @contextlib.contextmanager
    def batches(self, config: Systems) -> Iterator[Iterator[Any]]:
        """Yield the batches that a training would get, on the device."""
        section = config.loader
        order = loader.Order(
            self.samples["count"] or 1, section.batch_size, section.accumulation, 0, 1, config.seed
        )
        made, source = self._prepare, cast(loader.Source, self._source)
        with loader.build(
            source, section, order, self.world.device, 0, made, self._collate
        ) as feed:
            yield (feed.move(feed.fetch()) for _ in itertools.count())

    def speed(self, config: Systems, steps: int, segments: int = SEGMENTS) -> Speed:
        """Measure rates, the mean step's seconds by part, and peak memory, over about `steps` steps
        after a warm-up.

        The warm-up is as long as each of the `segments`. Raises what the training raises.
        """
        segment_steps, parts = max(1, math.ceil(steps / segments)), segments + 1
        points = self.train(config, segment_steps * parts, parts)
        return summary(points, config.loader.batch_size, segment_steps * segments)

    def loader_alone(self, config: Systems, seconds: float = 3.0) -> dict[str, float] | None:
        """Measure samples per second of the loader, with its batches brought to the device and no
        model beside it.

        Batches that loader processes have prepared ahead are consumed before the clock starts.
        None: the workload has a loader of its own.
        """
        if self._source is None:
            return None
        count = 0
        with self.batches(config) as batches:
            for _ in range(1 + config.loader.workers * config.loader.prefetch_factor):
                next(batches)
            self.world.synchronize()
            begin = time.monotonic()
            while count < 3 or time.monotonic() - begin < seconds:
                next(batches)
                count += 1
            self.world.synchronize()
            spent = time.monotonic() - begin
        samples = (
            count * config.loader.batch_size // config.loader.accumulation * self._samples_each
        )
        return {"samples_per_s": samples / spent, "samples": samples, "seconds": spent}

    def model_alone(self, config: Systems, steps: int) -> Speed | None:
        """Return what `speed` measures with all samples on the device; None where they do not fit
        or are no tensors."""
        if not items.columns(self._source):
            return None
        try:
            return self.speed(cfg.override(config, {"loader.resident": True}), steps)
        except Exception as error:
            if not memory.is_oom(error):
                raise
        memory.reset(self.world.device)
        return None

    def attempt(self, config: Systems, change: Values, steps: int) -> Tried | Failed:
        """Return what a change of the configuration gains, measured without and with it; or why
        that is unknown."""
        if "parallel.workers" in change:
            return {"failed": "it needs several processes"}
        try:
            before, after = (
                self.speed(config, steps),
                self.speed(cfg.override(config, change), steps),
            )
        except Exception as error:  # a change that fails is a result
            return {"failed": in_a_line(error)}
        finally:
            memory.reset(self.world.device)
        was, now = before["samples_per_s"], after["samples_per_s"]
        noise, peak = abs(now - was) <= 2 * spread(before, after), after["peak_memory_mib"]
        return {
            "samples_per_s": now,
            "gain": now / was,
            "within_noise": noise,
            "peak_memory_mib": peak,
        }


def summary(points: Sequence[Point], batch_size: int, steps: int) -> Speed:
    """Return the means over the points after the first, the warm-up; each point has the same number
    of steps."""
    points, last = points[1:], points[-1]
    counted = last.samples / last.steps  # an own loader may not look at the batch size
    step_s = statistics.fmean(point["step_s"] for point in points)
    rates = [counted / point["step_s"] for point in points]
    speed = {
        "batch_size": batch_size, "steps": steps, "samples_per_s": counted / step_s,
        "samples_per_s_sd": statistics.stdev(rates) if len(rates) > 1 else None, "step_s": step_s,
        "parts_s": {name: statistics.fmean(one.phases_s.get(name, 0.0) for one in points) for name in last.phases_s},
        "first_step_s": last["first_step_s"], "compile_s": last.seconds["compile"],
        **{name: max(point[name] for point in points) for name in ALSO if name in last},
        "disturbed": any(point["disturbed"] for point in points),
    }  # fmt: skip
    if last.flops_per_sample is not None:
        speed["peak_share"] = counted / step_s * last["flops_per_sample"] / last["peak_flops_per_s"]
    return cast("Speed", speed)


def spread(*speeds: Speed) -> float:
    """Return the standard deviation of a difference between rates, in samples per second."""
    return math.hypot(*(speed["samples_per_s_sd"] or 0.0 for speed in speeds))


def steps_in(seconds: float, step_s: float) -> int:
    """Return how many steps to measure: about as many as take so many seconds, 3 to 200."""
    return max(3, min(200, math.ceil(seconds / step_s)))


def in_a_line(error: Exception) -> str:
    """Return a short message of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


# ---- the machine
def device(world: World) -> Device:
    """Return the device, what it can do, and how much memory a training may take."""
    cuda = world.device.type == "cuda"
    of = torch.cuda.get_device_properties(world.device) if cuda else None
    return {
        "type": world.device.type,
        "name": of.name if of else environment.describe()["cpu"],
        "threads": torch.get_num_threads(),
        "cores": machine.cores(),
        "gpus": torch.cuda.device_count(),
        "memory_mib": (of.total_memory if of else psutil.virtual_memory().total) / 2**20,
        "memory_limit_mib": memory_limit_mib(world.device),
    }


def memory_limit_mib(device: torch.device) -> float:
    """Return the MiB that a training may take.

    On a GPU what others leave; on a CPU what this process has and a share of what is available, to
    the machine and to the container.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return (free + torch.cuda.memory_reserved(device)) / 2**20
    available = min(
        float(psutil.virtual_memory().available), cgroup_available(Path("/sys/fs/cgroup"))
    )
    return (psutil.Process().memory_info().rss + HOST_SHARE * max(0.0, available)) / 2**20


def cgroup_available(group: Path) -> float:
    """Return the bytes that the limit of a cgroup (v1 or v2) leaves; inf: no limit.

    Its usage counts the pages of files that were read or written, which the kernel gives back when
    they are needed.
    """
    available = math.inf
    v1 = (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_",
    )
    for limit, used, statistics_of, prefix in (
        ("memory.max", "memory.current", "memory.stat", ""),
        v1,
    ):
        with contextlib.suppress(OSError, ValueError, KeyError):  # `max` is no number: no limit
            left = int((group / limit).read_text()) - int((group / used).read_text())
            sizes = dict(line.split() for line in (group / statistics_of).read_text().splitlines())
            cached = sum(int(sizes[f"{prefix}{name}"]) for name in ("inactive_file", "active_file"))
            available = min(available, left + cached)
    return available


def format_gains(world: World) -> dict[str, float]:
    """Measure how many times as fast a matrix product is in other number formats than in IEEE
    float32.

    `bf16`, `fp16` for autocast, `tf32` for `precision.matmul = high`; only what the device has
    units for.
    """
    formats: dict[str, tuple[torch.dtype | None, str]] = {"float32": (None, "highest")}
    if world.device.type == "cuda":
        formats["fp16"] = (torch.float16, "highest")
        if torch.cuda.get_device_properties(world.device).major >= 8:
            formats |= {"bf16": (torch.bfloat16, "highest"), "tf32": (None, "high")}
    elif "bf16" not in machine.emulated():
        formats["bf16"] = (torch.bfloat16, "highest")
    rates = {
        name: hardware.peak_flops_per_s(world.device, *arguments)
        for name, arguments in formats.items()
    }
    plain = rates.pop("float32")
    return {name: rate / plain for name, rate in rates.items()}
