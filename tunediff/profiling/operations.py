"""What takes longest in a few steps of a configuration: `operations.csv`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.core.clock import Budget
from tunediff.core.files import write_text
from tunediff.distributed import World
from tunediff.profiling import trace
from tunediff.profiling.measure import Watch
from tunediff.training.engine import Engine
from tunediff.training.trial import run

_BEFORE = 3
"""Steps that are not looked at."""


def write(config: Systems, world: World, folder: Path, steps: int) -> None:
    """Train a few further steps under torch's profiler, on all ranks, and write what took longest in the last `steps`.

    Columns: operation, calls, self_s (on the device, over all these steps), total_s, share; the longest first.
    """
    cuda, rows = world.device.type == "cuda", list[Any]()
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU],
        schedule=schedule(wait=_BEFORE - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda profiler: rows.extend(trace.table_rows(profiler.key_averages(), cuda)),
    ) as profiler:
        short = cfg.override(config, {"evaluation.points": 1})
        budget = Budget(steps=_BEFORE + steps)
        run(Engine(short, budget, world, Watch(profiler.step), evaluates=False))
    torch.compiler.reset()
    if not world.main:
        return
    lines = ["operation,calls,self_s,total_s,share"]
    for row in trace.operations(rows, steps, most=len(rows))["longest"]:
        per_step = row["calls_per_step"], row["self_s_per_step"], row["total_s_per_step"]
        calls, own, total = (value * steps for value in per_step)
        name = '"' + row["operation"].replace('"', "'") + '"'
        lines.append(f"{name},{calls:.0f},{own:.6g},{total:.6g},{row['share']:.6g}")
    write_text(folder / "operations.csv", "\n".join([*lines, ""]))
