"""Profile a few steps with torch's profiler: longest operations, and memory over time."""

from __future__ import annotations

import bisect
import gzip
import json
import math
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.core.clock import Budget
from tunediff.distributed import World
from tunediff.profiling import tables
from tunediff.profiling.measure import Bench, StepObserver
from tunediff.training.engine import Engine
from tunediff.training.trial import run

WARMUP = 3
"""Steps before the traced ones, in which the optimizer's state is made."""
TRACED = 4
"""Steps in the trace."""
MIB = 2**20
OWNERS = {
    "data_wait": "batch_mib",
    "host_to_device": "batch_mib",
    "sampler": "batch_mib",
    "forward": "forward_mib",
    "backward": "backward_mib",
}
"""Owner of a block of memory by the phase that allocated it; `rest_mib`: all other phases."""


def trace(bench: Bench, config: Systems, path: Path, step_s: float) -> dict[str, Any]:
    """Write a Chrome trace of a few steps; return longest operations, memory, device share.

    `step_s`: seconds of a step without profiler, which the device's own seconds are compared with.
    """
    rows: list[dict[str, Any]] = []

    def ready(profiler: profile) -> None:
        profiler.export_chrome_trace(str(path))
        rows.extend(operations(profiler.key_averages(), bench.cuda))

    with _profiler(bench.cuda, TRACED, ready, detailed=True) as profiler:
        points = bench.train(config, WARMUP + TRACED + 1, after_step=profiler.step)
    with gzip.open(path) as file:
        events: list[Mapping[str, Any]] = json.load(file)["traceEvents"]
    on_device = config.loader.resident or not bench.cuda
    static = {**bench.state_mib, "samples": bench.samples["mib"] if on_device else 0.0}
    peak = memory_peak(events, points[-1].phases_s, sum(static.values()), bench.cuda)
    result = {
        "operations": rows[:10],
        "convolution_share": sum(row["share"] for row in rows if "conv" in row["operation"]),
        "memory": {"static": static, "peak": peak},
        "traced_steps": TRACED,
    }
    if bench.cuda:
        busy_us = sum(
            event["dur"]
            for event in events
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        )
        result["device_busy_share"] = min(1.0, busy_us / 1e6 / TRACED / step_s)
    return result


def write_operations(config: Systems, world: World, folder: Path, steps: int) -> None:
    """Train a few steps on all ranks; write the operations of the last `steps`: `operations.csv`,
    the longest first."""
    rows: list[dict[str, Any]] = []
    short, cuda = cfg.override(config, {"evaluation.points": 1}), world.device.type == "cuda"

    def ready(profiler: profile) -> None:
        rows.extend(operations(profiler.key_averages(), cuda))

    with _profiler(cuda, steps, ready) as profiler:
        observer = StepObserver(profiler.step)
        run(Engine(short, Budget(steps=WARMUP + steps), world, observer, evaluates=False))
    torch.compiler.reset()
    if world.main:
        tables.write_operations(rows, folder)


def _profiler(
    cuda: bool, steps: int, ready: Callable[[profile], None], detailed: bool = False
) -> profile:
    """Return torch's profiler of `steps` steps; `detailed`: with shapes and memory."""
    return profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
        schedule=schedule(wait=WARMUP - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=ready,
        record_shapes=detailed,
        profile_memory=detailed,
    )


def operations(averages: Iterable[Any], cuda: bool) -> list[dict[str, Any]]:
    """Return the rows of the profiler's `key_averages()` as `tables.COLUMNS`, the longest first.

    A GPU's seconds appear twice, as operations and as the kernels that these have launched.
    Operations are readable; where they miss kernels (of CUDA graphs), kernels are listed.
    """
    self_time, total_time = (
        ("self_device_time_total", "device_time_total")
        if cuda
        else ("self_cpu_time_total", "cpu_time_total")
    )
    counted, kernels = list[Any](), list[Any]()
    for row in averages:
        if not row.is_user_annotation:  # ranges are no operations
            (kernels if str(row.device_type).endswith("CUDA") else counted).append(row)
    self_us = operator.attrgetter(self_time)
    if sum(map(self_us, counted)) < 0.5 * sum(map(self_us, kernels)):
        counted = kernels
    total_us = sum(map(self_us, counted))
    return [
        {
            "operation": row.key,
            "calls": row.count,
            "self_s": self_us(row) / 1e6,
            "total_s": getattr(row, total_time) / 1e6,
            "share": self_us(row) / total_us,
        }
        for row in sorted(counted, key=self_us, reverse=True)
        if self_us(row) > 0
    ]


def memory_peak(
    events: Sequence[Mapping[str, Any]], names: Container[str], static: float, cuda: bool
) -> dict[str, Any] | None:
    """Return what tensors hold when they take the most memory in the traced steps (MiB), by the
    phase that allocated it; None for a trace without allocations.

    `names` of the phases. What was allocated before the trace began counts as `static`; it is
    measured on a GPU, where the allocator knows it, and taken from the argument on a CPU.
    """
    phases = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] in names
    )
    device = int(cuda)
    moves = [
        event
        for event in events
        if event["name"] == "[memory]" and event["args"]["Device Type"] == device
    ]
    if not (phases and moves):
        return None
    moves.sort(key=operator.itemgetter("ts"))
    first = moves[0]["args"]
    before = (first["Total Allocated"] - first["Bytes"]) / MIB if cuda else static
    held = {"static_mib": before} | dict.fromkeys((*OWNERS.values(), "rest_mib"), 0.0)
    owners: dict[int, str] = {}  # of blocks, by their address
    peak: dict[str, Any] = {"total_mib": -math.inf}
    for event in moves:
        phase, address = _phase_at(event["ts"], phases), event["args"]["Addr"]
        size = event["args"]["Bytes"] / MIB  # below 0: released
        if size > 0:
            owners[address] = OWNERS.get(phase, "rest_mib")
        if address in owners:
            held[owners[address]] += size
        elif cuda:  # a block from before the trace, such as gradients of the step before
            held["static_mib"] += size
        if (total := sum(held.values())) > peak["total_mib"]:
            peak = {"phase": phase, "total_mib": total, **held}
    return peak


def _phase_at(moment: float, phases: Sequence[tuple[float, float, str]]) -> str:
    index = bisect.bisect_right(phases, moment, key=operator.itemgetter(0)) - 1
    return phases[index][2] if index >= 0 and moment <= phases[index][1] else "other"
