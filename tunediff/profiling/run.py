"""A whole profile, in the order of rising disturbance: plain timings first, other batch sizes and compilers last."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tunediff import config as cfg
from tunediff.config import Systems, Values, Workload
from tunediff.core import environment, text
from tunediff.profiling import compiling, measure, trace
from tunediff.profiling.advice import advise
from tunediff.profiling.result import CompileCost, Failed, Profile, Skipped
from tunediff.profiling.sweep import sweep
from tunediff.training import memory

SECONDS = 5.0
"""How long a step is measured where nobody says how many (s)."""


def profile(
    config: Systems, folder: Path, say: Callable[[str], None], *, name: str, command: str, workers: int,
    steps: int | None, sweep_batches: bool, compile_too: bool | None, attempt: bool,
) -> Profile:  # fmt: skip
    """Measure everything and return the profile; raise what a training raises. The trace goes to `folder`.

    `say` is called with what is measured next; `steps` to measure, None: about five seconds of them; `compile_too`: the
    break-even of torch.compile, None: on a GPU; `attempt`: measure each piece of advice as well.
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
    swept = sweep(bench, config, step["step_s"], lambda batch: say(f"batch {batch}")) if sweep_batches else None
    cost = _compile_cost(config, steps, folder, say, bench.world.device, compile_too)
    result: Profile = {
        "name": name, "command": command, "time": time.time(), "wall_s": 0.0, "workers": workers,
        "unit": workload.unit, "names": named(workload),
        "config": cfg.flat(config), "fingerprint": cfg.fingerprint(config), "environment": environment.describe(),
        "device": device, "format_gains": gains, "samples": bench.samples,
        "first": {"first_step_s": first["first_step_s"], "compile_s": first["compile_s"], "step_s": first["step_s"]},
        "step": step, "loader_alone": loader, "model_alone": model,
        "feed_ratio": loader["samples_per_s"] / model["samples_per_s"] if loader and model else None,
        **traced, "trace": "trace.json.gz", "snapshot": "memory_snapshot.pickle" if snapshot else None,
        "sweep": swept, "compile": cost, "advice": [],
    }  # fmt: skip
    result["advice"] = advise(result, config, bench.unread)
    for advice in result["advice"] if attempt else []:
        say(f"trying {text.knobs(advice.change)}")
        advice.tried = bench.attempt(config, advice.change, steps)
    for advice in result["advice"]:
        advice.change = of_all_workers(advice.change, workers, config.parallel.strategy)
    return result


def of_all_workers(change: Values, workers: int, strategy: str) -> Values:
    """Return a change that was measured on one of the training workers as their configuration has it.

    They divide the batch, but for the stages of a pipeline.
    """
    if "loader.batch_size" not in change or strategy == "pipeline":
        return change
    return {**change, "loader.batch_size": change["loader.batch_size"] * workers}


def _compile_cost(
    config: Systems, steps: int, folder: Path, say: Callable[[str], None], device: torch.device,
    compile_too: bool | None,
) -> CompileCost | Failed | Skipped:  # fmt: skip
    """Measure what torch.compile costs and gains, if that is wanted; `compile_too`: as in `profile`."""
    if compile_too is None and device.type != "cuda":
        return {"skipped": "it takes minutes on a CPU; --compile measures it"}
    if compile_too is False:
        return {"skipped": "--no-compile"}
    say("torch.compile, in a process of its own and with an empty cache")
    memory.reset(device)  # that process needs what the trainings here have left
    return compiling.compile_cost(config, steps, folder)


def named(workload: Workload) -> dict[str, str]:
    """Return the workload's labels of the parts of its step."""
    own = ((re.fullmatch(r"step_(\w+)_s", name), quantity) for name, quantity in workload.quantities.items())
    return {match[1]: quantity.label for match, quantity in own if match is not None}
