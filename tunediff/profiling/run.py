"""A whole profile, least disturbance first: plain timings, then traces and advice."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from pathlib import Path

from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.core import environment
from tunediff.distributed import alone
from tunediff.profiling import measure, trace
from tunediff.profiling.advice import advise
from tunediff.profiling.result import Profile

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
) -> Profile:
    """Measure everything and return the profile; `folder` gets the trace. Training errors pass.

    `say` is called with what is measured next; `steps` to measure, None: about five seconds of
    them.
    """
    world, workload = alone(), cfg.of(config)
    bench = measure.Bench(config, world)
    device, gains = measure.device(world), measure.format_gains(world)
    say(f"{device['name']}: first steps")
    first = bench.speed(config, 2, segments=1)
    steps = steps or steps_in(SECONDS, first["step_s"])
    say(f"{steps} steps")
    step = bench.speed(config, steps)
    loader = None
    if not config.loader.resident:
        say("the loader alone")
        loader = bench.loader_alone(config)
    say(f"trace of {trace.TRACED} steps")
    traced = trace.trace(bench, config, folder / "trace.json.gz", step["step_s"])
    labels = {
        name.removeprefix("step_").removesuffix("_s"): quantity.label
        for name, quantity in workload.quantities.items()
        if re.fullmatch(r"step_\w+_s", name)
    }
    result: Profile = {
        "name": name,
        "command": command,
        "time": time.time(),
        "wall_s": 0.0,
        "workers": workers,
        "unit": workload.unit,
        "names": labels,
        "config": cfg.flat(config),
        "fingerprint": cfg.fingerprint(config),
        "environment": environment.describe(),
        "device": device,
        "format_gains": gains,
        "samples": bench.samples,
        "first": {
            "first_step_s": first["first_step_s"],
            "compile_s": first["compile_s"],
            "step_s": first["step_s"],
        },
        "step": step,
        "loader_alone": loader,
        **traced,
        "trace": "trace.json.gz",
        "advice": [],
    }
    result["advice"] = advise(result, config, bench.unread)
    return result


def steps_in(seconds: float, step_s: float) -> int:
    """Return how many steps to measure: about as many as take so many seconds, 3 to 200."""
    return max(3, min(200, math.ceil(seconds / step_s)))
