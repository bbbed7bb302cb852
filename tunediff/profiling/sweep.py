"""The batch size against throughput and memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from tunediff import config as cfg
from tunediff.config import ConfigError, Systems
from tunediff.profiling import measure
from tunediff.profiling.result import Rates, Sweep, held_mib
from tunediff.training import memory

SECONDS = 2.0
"""How long each batch size is measured (s)."""
MOST_STEP_S = 30.0
"""A sweep ends before a step would take longer than this (s)."""
GROWTH = 1.03
"""Throughput has stopped growing when two doublings of the batch have not brought this factor."""
NOT_ALLOWED = "the configuration allows no larger batch"


def sweep(bench: measure.Bench, config: Systems, step_s: float, progress: Callable[[int], None]) -> Sweep:
    """Measure rates and peak memory by batch size, about two seconds each: doubled until memory or growth ends.

    On a CPU memory never runs out: a batch whose memory, extrapolated, would exceed a share of what is available is
    not tried. `progress` hears of every batch size before it is measured. What a larger batch fails with ends it.
    """
    rows: list[Rates] = []
    device, per_sample_s = bench.world.device, step_s / config.loader.batch_size
    limit, stopped, unit = measure.memory_limit_mib(device), "", cfg.of(config).unit
    most = bench.samples["count"] or math.inf  # the length of a stream is not known
    if "loader.batch_size" in bench.unread:
        why = "the workload's own loader does not follow loader.batch_size"
        return {"rows": [], "stopped": why, "memory_limit_mib": limit, "limit_batch": None}
    for batch in batch_sizes(config, most):
        unlimited = bench.cuda or batch <= config.loader.batch_size  # the configured batch was measured before
        if stopped := end_of_sweep(rows, batch, None if unlimited else limit, unit):
            break
        progress(batch)
        try:
            steps = measure.steps_in(SECONDS, per_sample_s * batch)
            speed = bench.speed(cfg.override(config, {"loader.batch_size": batch}), steps, segments=1)
        except Exception as error:
            if memory.is_oom(error):
                stopped = f"out of memory at {batch}"
            elif rows and isinstance(error, RuntimeError):  # as torch says all that a device cannot do
                stopped = f"{batch} failed: {measure.in_a_line(error)}"
            elif batch > config.loader.batch_size and isinstance(error, ConfigError):  # such as too short a stream
                stopped = f"{batch} failed: {error}"
            else:
                raise
            break
        finally:
            with contextlib.suppress(RuntimeError):  # a device that failed does nothing more for this process
                memory.reset(device)
        rows.append(cast("Rates", {name: value for name, value in speed.items() if name in Rates.__annotations__}))
        per_sample_s = speed["step_s"] / batch
    if not stopped:
        larger = 2 * rows[-1]["batch_size"] > most
        stopped = f"a larger batch would be larger than the set of {unit}" if larger else NOT_ALLOWED
    return {"rows": rows, "stopped": stopped, "memory_limit_mib": limit, "limit_batch": largest_batch(rows, limit)}


def batch_sizes(config: Systems, samples: float) -> Iterator[int]:
    """Yield a quarter of the configured batch, then doubles up to the size of the set, if the configuration allows."""
    batch = config.loader.batch_size
    size = batch // 4 if batch % 4 == 0 else batch // 2 if batch % 2 == 0 else batch
    while size <= max(samples, batch):
        try:
            cfg.override(config, {"loader.batch_size": size})
        except ConfigError:
            if size >= batch:
                return
        else:
            yield size
        size *= 2


def end_of_sweep(rows: Sequence[Rates], batch: int, limit_mib: float | None, unit: str) -> str:
    """Return why the sweep ends before this batch size; '' if it goes on. Without a limit only memory ends it."""
    if not rows:
        return ""
    if rows[-1]["step_s"] / rows[-1]["batch_size"] * batch > MOST_STEP_S:
        return f"a step of {batch} {unit} would take over {MOST_STEP_S:.0f} s"
    if limit_mib is None:
        return ""
    if (needed := predicted_mib(rows, batch)) > limit_mib:
        return f"{batch} {unit} would need about {needed:,.0f} MiB of the {limit_mib:,.0f} MiB that may be taken"
    rates = [row["samples_per_s"] for row in rows]
    if len(rates) > 2 and max(rates[-2:]) < GROWTH * max(rates[:-2]):
        return f"{unit}/s have stopped growing"
    return ""


def predicted_mib(rows: Sequence[Rates], batch: int) -> float:
    """Estimate peak memory at another batch size: a line through the two largest, or in proportion to the only one.

    Process and weights do not grow with the batch, so a proportion is too much rather than too little.
    """
    last = rows[-1]
    if len(rows) == 1:
        return held_mib(last) * batch / last["batch_size"]
    return held_mib(last) + max(0.0, _per_sample_mib(rows)) * (batch - last["batch_size"])


def largest_batch(rows: Sequence[Rates], limit_mib: float) -> int | None:
    """Estimate the batch at which memory ends, on the same straight line; None where that is unknown."""
    if len(rows) < 2 or (per_sample := _per_sample_mib(rows)) <= 0:
        return None
    return max(0, math.floor(rows[-1]["batch_size"] + (limit_mib - held_mib(rows[-1])) / per_sample))


def _per_sample_mib(rows: Sequence[Rates]) -> float:
    before, last = rows[-2:]
    return (held_mib(last) - held_mib(before)) / (last["batch_size"] - before["batch_size"])
