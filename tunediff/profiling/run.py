"""A whole profile, least disturbance first: plain timings, then the trace and advice."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.core import environment
from tunediff.distributed import alone
from tunediff.profiling import measure, trace
from tunediff.profiling.advice import advise

SECONDS = 5.0
"""Seconds of steps that are measured by default."""


def profile(
    config: Systems,
    folder: Path,
    say: Callable[[str], None],
    *,
    name: str,
    command: str,
    workers: int,
    steps: int | None,
) -> dict[str, Any]:
    """Measure everything and return the profile; `folder` gets the trace. Training errors pass.

    `say` is called with what is measured next; `steps` to measure, None: about five seconds of
    them. The keys are those of `schemas/profile-output.json`.
    """
    world, workload = alone(), cfg.of(config)
    bench, device = measure.Bench(config, world), measure.device(world)
    say(f"{device['name']}: first steps")
    first = bench.speed(config, 2, segments=1)
    steps = steps or steps_in(SECONDS, first["step_s"])
    say(f"{steps} steps")
    step = bench.speed(config, steps)
    say(f"the loader alone, and a trace of {trace.TRACED} steps")
    result = {
        "name": name,
        "command": command,
        "time": time.time(),
        "workers": workers,
        "unit": workload.unit,
        "names": {
            name.removeprefix("step_").removesuffix("_s"): quantity.label
            for name, quantity in workload.quantities.items()
            if re.fullmatch(r"step_\w+_s", name)
        },
        "config": cfg.flat(config),
        "fingerprint": cfg.fingerprint(config),
        "environment": environment.describe(),
        "device": device,
        "format_gains": measure.format_gains(world),
        "samples": bench.samples,
        "first": {key: first[key] for key in ("first_step_s", "compile_s", "step_s")},
        "step": step,
        "loader_samples_per_s": bench.loader_rate(config),
        **trace.trace(bench, config, folder / "trace.json.gz", step["step_s"]),
        "trace": "trace.json.gz",
    }
    return result | {"advice": advise(result, config, bench.unread)}


def steps_in(seconds: float, step_s: float) -> int:
    """Return how many steps to measure: about as many as take so many seconds, 3 to 200."""
    return max(3, min(200, math.ceil(seconds / step_s)))
