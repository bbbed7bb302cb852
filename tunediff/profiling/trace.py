"""Profile a few steps with torch's profiler: longest operations, and memory over time."""

from __future__ import annotations

import bisect
import gzip
import json
import math
import operator
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.core.clock import Budget
from tunediff.core.files import write_csv
from tunediff.distributed import World
from tunediff.profiling.measure import Bench, StepObserver
from tunediff.profiling.result import Operation, Operations, Owner, Peak, Traced
from tunediff.training.engine import Engine
from tunediff.training.trial import run

WARMUP = 3
"""Steps before the traced ones, in which the optimizer's state is made."""
TRACED = 4
"""Steps in the trace."""
MIB = 2**20
OWNERS: dict[str, Owner] = {
    "data_wait": "batch_mib",
    "host_to_device": "batch_mib",
    "sampler": "batch_mib",
    "forward": "forward_mib",
    "backward": "backward_mib",
}
"""Owner of a block of memory by the phase that allocated it; `rest_mib`: all other phases."""


class ProfilerRow(NamedTuple):
    """A line of the profiler's table."""

    name: str
    calls: int
    self_s: float
    """Without the operations that it calls; on a GPU the device's."""
    total_s: float
    kernel: bool


def trace(bench: Bench, config: Systems, path: Path, step_s: float) -> Traced:
    """Write a Chrome trace of a few steps; return longest operations, memory, device share.

    `step_s`: seconds of a step without profiler, which the device's own seconds are compared with.
    """
    rows: list[ProfilerRow] = []
    with _profiler(bench.cuda, TRACED, rows, path) as profiler:
        points = bench.train(config, WARMUP + TRACED + 1, after_step=profiler.step)
    with gzip.open(path) as file:
        events: list[Mapping[str, Any]] = json.load(file)["traceEvents"]
    static, phases = static_mib(config, bench), points[-1].phases_s
    peak = memory_peak(events, phases, sum(static.values()), bench.cuda)
    result: Traced = {
        "operations": operations(rows, TRACED),
        "memory": {"static": static, "peak": peak},
        "traced_steps": TRACED,
    }
    if bench.cuda:
        on_device = ("kernel", "gpu_memcpy", "gpu_memset")
        busy_us = sum(event["dur"] for event in events if event.get("cat") in on_device)
        result["device_busy_s"] = busy_us / 1e6 / TRACED
        result["device_busy_share"] = min(1.0, result["device_busy_s"] / step_s)
    return result


def write_operations(config: Systems, world: World, folder: Path, steps: int) -> None:
    """Train a few steps on all ranks; write the longest of the last `steps`: `operations.csv`.

    Columns: operation, calls, self_s (on the device, all steps), total_s, share; the longest first.
    """
    rows: list[ProfilerRow] = []
    short = cfg.override(config, {"evaluation.points": 1})
    with _profiler(world.device.type == "cuda", steps, rows) as profiler:
        observer = StepObserver(profiler.step)
        run(Engine(short, Budget(steps=WARMUP + steps), world, observer, evaluates=False))
    torch.compiler.reset()
    if world.main:
        longest = operations(rows, steps=1, most=len(rows))["longest"]
        table = [list(row.values()) for row in longest]
        columns = ("operation", "calls", "self_s", "total_s", "share")
        write_csv(folder / "operations.csv", columns, table, digits=6)


def busy_s(config: Systems, world: World) -> float | None:
    """Train a few further steps, and return for how long one keeps a GPU busy; None: a CPU."""
    rows: list[ProfilerRow] = []
    short, cuda = cfg.override(config, {"evaluation.points": 1}), world.device.type == "cuda"
    with _profiler(cuda, TRACED, rows) as profiler:
        observer, budget = StepObserver(profiler.step), Budget(steps=WARMUP + TRACED)
        run(Engine(short, budget, world, observer, evaluates=False))
    return sum(row.self_s for row in rows if row.kernel) / TRACED if cuda else None


# ---- operations
def _profiler(cuda: bool, steps: int, rows: list[ProfilerRow], path: Path | None = None) -> profile:
    """Return torch's profiler of `steps` steps; it fills `rows` and writes a trace to `path`."""

    def ready(profiler: profile) -> None:
        if path is not None:
            profiler.export_chrome_trace(str(path))
        rows.extend(table_rows(profiler, cuda))

    return profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
        schedule=schedule(wait=WARMUP - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=ready,
        record_shapes=path is not None,
        profile_memory=path is not None,
    )


def table_rows(profiler: profile, cuda: bool) -> list[ProfilerRow]:
    """Return the profiler's table without ranges, which are not operations."""
    return [
        ProfilerRow(
            name=event.key,
            calls=event.count,
            self_s=(event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6,
            total_s=(event.device_time_total if cuda else event.cpu_time_total) / 1e6,
            kernel=str(event.device_type).endswith("CUDA"),
        )
        for event in cast(Any, profiler.key_averages())
        if not event.is_user_annotation
    ]


def operations(rows: Sequence[ProfilerRow], steps: int, most: int = 10) -> Operations:
    """Return the longest operations with their self time per step and their share of all.

    A GPU's seconds appear twice, as operations and as the kernels that these have launched.
    Operations are readable; where they miss kernels (of CUDA graphs), kernels are listed.
    """
    kind, counted = "operations", [row for row in rows if not row.kernel]
    kernels = [row for row in rows if row.kernel]
    if sum(row.self_s for row in counted) < 0.5 * sum(row.self_s for row in kernels):
        kind, counted = "kernels", kernels
    total = sum(row.self_s for row in counted)
    longest: list[Operation] = [
        {
            "operation": row.name,
            "calls_per_step": row.calls / steps,
            "self_s_per_step": row.self_s / steps,
            "total_s_per_step": row.total_s / steps,
            "share": row.self_s / total,
        }
        for row in sorted(counted, key=lambda row: -row.self_s)
        if row.self_s > 0
    ]
    convolutions = sum(row["share"] for row in longest if "conv" in row["operation"].lower())
    return {
        "kind": kind,
        "longest": longest[:most],
        "convolution_share": convolutions,
        "self_s_per_step": total / steps,
    }


# ---- memory
def static_mib(config: Systems, bench: Bench) -> dict[str, float]:
    """Return the MiB that stay between steps, by kind, of the bench's last training."""
    on_device = config.loader.resident or not bench.cuda
    return {**bench.state_mib, "samples": bench.samples["mib"] if on_device else 0.0}


def memory_peak(
    events: Sequence[Mapping[str, Any]], names: Container[str], static: float, cuda: bool
) -> Peak | None:
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
    held = dict.fromkeys(get_args(Owner), 0.0) | {"static_mib": before}
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
    return cast("Peak", peak)


def _phase_at(moment: float, phases: Sequence[tuple[float, float, str]]) -> str:
    index = bisect.bisect_right(phases, moment, key=operator.itemgetter(0)) - 1
    return phases[index][2] if index >= 0 and moment <= phases[index][1] else "other"
