"""A whole profile, in the order of rising disturbance: plain timings first, then traces and
advice."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from tunediff import config as cfg
from tunediff.config import Systems, Workload
from tunediff.core import environment, text
from tunediff.profiling import measure, trace
from tunediff.profiling.advice import advise
from tunediff.profiling.result import Profile

SECONDS = 5.0
"""How long a step is measured where nobody says how many (s)."""


def profile(
    config: Systems, folder: Path, say: Callable[[str], None], *, name: str, command: str, workers: int,
    steps: int | None, attempt: bool,
) -> Profile:  # fmt: skip
    """Measure everything and return the profile; raise what a training raises. The trace goes to
    `folder`.

    `say` is called with what is measured next; `steps` to measure, None: about five seconds of
    them; `attempt`: measure each piece of advice as well.
    """
    bench, workload = measure.Bench.of(config), cfg.of(config)
    device, gains = measure.device(bench.world), measure.format_gains(bench.world)
    say(f"{device['name']}: first steps")
    first = bench.speed(config, 2, segments=1)
    steps = steps or measure.steps_in(SECONDS, first["step_s"])
    say(f"{steps} steps")
    step = bench.speed(config, steps)
    loader, model = None, None
    if not config.loader.resident:
        say("the loader alone, the model alone")
        loader, model = bench.loader_alone(config), bench.model_alone(config, steps)
    say(f"trace of {trace.TRACED} steps")
    traced = trace.trace(bench, config, folder / "trace.json.gz", step["step_s"])
    snapshot = trace.snapshot(bench, config, folder / "memory_snapshot.pickle")
    result: Profile = {
        "name": name, "command": command, "time": time.time(), "wall_s": 0.0, "workers": workers,
        "unit": workload.unit, "names": named(workload),
        "config": cfg.flat(config), "fingerprint": cfg.fingerprint(config), "environment": environment.describe(),
        "device": device, "format_gains": gains, "samples": bench.samples,
        "first": {"first_step_s": first["first_step_s"], "compile_s": first["compile_s"], "step_s": first["step_s"]},
        "step": step, "loader_alone": loader, "model_alone": model,
        "feed_ratio": loader["samples_per_s"] / model["samples_per_s"] if loader and model else None,
        **traced, "trace": "trace.json.gz", "snapshot": "memory_snapshot.pickle" if snapshot else None,
        "advice": [],
    }  # fmt: skip
    result["advice"] = advise(result, config, bench.unread)
    for advice in result["advice"] if attempt else []:
        say(f"trying {text.knobs(advice.change)}")
        advice.tried = bench.attempt(config, advice.change, steps)
    return result


def named(workload: Workload) -> dict[str, str]:
    """Return the workload's labels of the parts of its step."""
    own = (
        (re.fullmatch(r"step_(\w+)_s", name), quantity)
        for name, quantity in workload.quantities.items()
    )
    return {match[1]: quantity.label for match, quantity in own if match is not None}
