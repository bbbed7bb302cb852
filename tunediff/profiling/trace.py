"""A few steps under torch's profiler: the longest operations, and who holds memory when. Nothing is
timed by it."""

from __future__ import annotations

import bisect
import gzip
import json
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.core.clock import Budget
from tunediff.core.files import write_csv
from tunediff.distributed import World
from tunediff.profiling.measure import Bench, Watch
from tunediff.profiling.result import Memory, Operation, Operations, Owner, Peak, Traced
from tunediff.training.engine import Engine
from tunediff.training.trial import run

BEFORE = 3
"""Steps that are not looked at."""
TRACED = 4
"""Steps in the trace."""
MIB = 2**20
OWNERS: dict[str, Owner] = {
    "data_wait": "batch_mib", "host_to_device": "batch_mib", "sampler": "batch_mib",
    "forward": "forward_mib", "backward": "backward_mib",
}  # fmt: skip
"""Who a block of memory belongs to, by the phase that allocated it; `rest_mib`: all others."""


def trace(bench: Bench, config: Systems, path: Path, step_s: float) -> Traced:
    """Write a Chrome trace of a few steps; returns the longest operations, the device's share and
    the memory.

    `step_s`: seconds of a step without profiler, which the device's own seconds are compared with.
    """
    rows: list[Row] = []

    def ready(profiler: profile) -> None:
        profiler.export_chrome_trace(str(path))
        rows.extend(table_rows(profiler.key_averages(), bench.cuda))

    with _profiler(bench.cuda, TRACED, ready, record_shapes=True, profile_memory=True) as profiler:
        points = bench.train(config, BEFORE + TRACED + 1, after_step=profiler.step)
    with gzip.open(path) as file:
        events: list[Mapping[str, Any]] = json.load(file)["traceEvents"]
    static = static_mib(config, bench)
    result: Traced = {
        "operations": operations(rows, TRACED),
        "memory": {
            "static": static,
            **timeline(events, points[-1].phases_s, sum(static.values()), bench.cuda),
        },
        "traced_steps": TRACED,
    }
    if bench.cuda:
        busy = sum(
            event["dur"]
            for event in events
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        )
        result["device_busy_s"] = busy / 1e6 / TRACED
        result["device_busy_share"] = min(1.0, result["device_busy_s"] / step_s)
    return result


def _profiler(cuda: bool, steps: int, ready: Callable[[profile], None], **options: Any) -> profile:
    """Return torch's profiler of `steps` steps after the first ones, in which the optimizer's state
    is made."""
    return profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
        schedule=schedule(wait=BEFORE - 1, warmup=1, active=steps, repeat=1), on_trace_ready=ready, **options,
    )  # fmt: skip


def write_operations(config: Systems, world: World, folder: Path, steps: int) -> None:
    """Train a few further steps, on all ranks, and write what took longest in the last `steps`:
    `operations.csv`.

    Columns: operation, calls, self_s (on the device, over all these steps), total_s, share; the
    longest first.
    """
    cuda, rows = world.device.type == "cuda", list[Row]()
    with _profiler(
        cuda, steps, lambda profiler: rows.extend(table_rows(profiler.key_averages(), cuda))
    ) as profiler:
        short = cfg.override(config, {"evaluation.points": 1})
        run(
            Engine(
                short, Budget(steps=BEFORE + steps), world, Watch(profiler.step), evaluates=False
            )
        )
    torch.compiler.reset()
    if not world.main:
        return
    columns = ("operation", "calls", "self_s", "total_s", "share")
    table = [
        (
            row["operation"],
            int(row["calls_per_step"]),
            row["self_s_per_step"],
            row["total_s_per_step"],
            row["share"],
        )
        for row in operations(rows, steps=1, most=len(rows))["longest"]
    ]
    write_csv(folder / "operations.csv", columns, table, digits=6)


def snapshot(bench: Bench, config: Systems, path: Path) -> bool:
    """Write what PyTorch's memory viewer shows (pytorch.org/memory_viz); False where there is no
    CUDA allocator."""
    if not bench.cuda:
        return False
    torch.cuda.memory._record_memory_history(max_entries=200_000)
    try:
        bench.train(config, 3)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return True


# ---- operations
class Row(NamedTuple):
    """A line of the profiler's table. `self_s`: without the operations that it calls; on a GPU the
    device's."""

    name: str
    calls: int
    self_s: float
    total_s: float
    kernel: bool


def table_rows(averages: Iterable[Any], cuda: bool) -> list[Row]:
    """Return the profiler's table without the ranges, which are no operations."""
    return [
        Row(
            event.key, event.count, (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6,
            (event.device_time_total if cuda else event.cpu_time_total) / 1e6, str(event.device_type).endswith("CUDA"),
        )
        for event in averages
        if not event.is_user_annotation
    ]  # fmt: skip


def operations(rows: Sequence[Row], steps: int, most: int = 10) -> Operations:
    """Return the longest operations with their own seconds per step and their share of all.

    A GPU's seconds appear twice, as operations and as the kernels these have launched. Operations
    are what one can read; where they do not account for the kernels (CUDA graphs launch many at
    once), kernels are listed.
    """
    plain, kernels = ([row for row in rows if row.kernel is kind] for kind in (False, True))
    total, in_kernels = (sum(row.self_s for row in some) for some in (plain, kernels))
    kind = "operations"
    if total < 0.5 * in_kernels:
        plain, total, kind = kernels, in_kernels, "kernels"
    longest: list[Operation] = [
        {
            "operation": row.name, "calls_per_step": row.calls / steps, "self_s_per_step": row.self_s / steps,
            "total_s_per_step": row.total_s / steps, "share": row.self_s / total,
        }
        for row in sorted(plain, key=lambda row: -row.self_s)
        if row.self_s > 0
    ]  # fmt: skip
    convolutions = sum(row["share"] for row in longest if "conv" in row["operation"].lower())
    return {
        "kind": kind, "longest": longest[:most], "convolution_share": convolutions, "self_s_per_step": total / steps,
    }  # fmt: skip


# ---- memory
def static_mib(config: Systems, bench: Bench) -> dict[str, float]:
    """Return the MiB that stay from step to step, by what they are, as the last training of the
    bench had them."""
    return {
        **bench.state_mib,
        "samples": bench.samples["mib"] if config.loader.resident or not bench.cuda else 0.0,
    }


def timeline(
    events: Sequence[Mapping[str, Any]],
    names: Container[str],
    static: float,
    cuda: bool,
    most: int = 600,
) -> Memory:
    """Return the memory of tensors over the traced steps, by the phase that allocated it, and the
    peak's parts (MiB).

    `names` of the phases. What was allocated before the trace began counts as `static`; it is
    measured on a GPU, where the allocator knows, and taken from the argument (MiB) on a CPU.
    Seconds count from the first traced allocation. Of each of `most` equal spans of time, the
    moment with the most memory is kept.
    """
    phases = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] in names
    )
    moves = [
        event
        for event in events
        if event["name"] == "[memory]" and event["args"]["Device Type"] == int(cuda)
    ]
    if not (phases and moves):
        return {"peak": None, "timeline": None, "phases": []}
    moves.sort(key=lambda event: float(event["ts"]))
    begin, first = moves[0]["ts"], moves[0]["args"]
    moments = pd.DataFrame({"second": [(event["ts"] - begin) / 1e6 for event in moves]})
    moments["phase"] = [_phase_at(event["ts"], phases) for event in moves]
    size = pd.Series([event["args"]["Bytes"] / MIB for event in moves])  # below 0: released
    owner = moments["phase"].map(OWNERS).fillna("rest_mib").where(size > 0)
    owner = owner.groupby(
        [event["args"]["Addr"] for event in moves]
    ).ffill()  # none: it is older than the trace
    held = {name: size.where(owner == name, 0.0).cumsum() for name in get_args(Owner)}
    held["static_mib"] += (first["Total Allocated"] - first["Bytes"]) / MIB if cuda else static
    if (
        cuda
    ):  # gradients of the step before, say: they are among what was allocated when the trace began
        held["static_mib"] += size.where(owner.isna() & (size < 0), 0.0).cumsum()
    total = pd.DataFrame(held).sum(axis=1)
    top = int(total.argmax())
    peak = {
        "phase": moments["phase"][top],
        "total_mib": total[top],
        **{name: held[name][top] for name in held},
    }
    span = max(moments["second"].iloc[-1], 1e-9) / most
    rows = total.groupby((moments["second"] / span).astype(int)).idxmax()
    return {
        "peak": cast("Peak", peak),
        "timeline": {
            "seconds": moments["second"][rows].tolist(),
            **{name: held[name][rows].tolist() for name in held},
        },
        "phases": [
            ((start - begin) / 1e6, (end - begin) / 1e6, name) for start, end, name in phases
        ],
    }


def _phase_at(moment: float, phases: Sequence[tuple[float, float, str]]) -> str:
    index = bisect.bisect_right(phases, moment, key=operator.itemgetter(0)) - 1
    return phases[index][2] if index >= 0 and moment <= phases[index][1] else "other"
