"""What a configuration spends its seconds and its memory on: short trainings, timed, traced and grown.

Seconds come from trainings without a profiler; the profiler's own run is a few steps that nothing is timed by. All
numbers are of one process on one device.
"""

from __future__ import annotations

import bisect
import concurrent.futures.process
import contextlib
import gzip
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from tunediff import config as cfg
from tunediff import record
from tunediff.clock import Budget
from tunediff.config import Config, ConfigError
from tunediff.data import images as data
from tunediff.data.images import Images
from tunediff.data.loader import build as build_batches
from tunediff.distributed import World, alone
from tunediff.training import hardware, memory
from tunediff.training.loop import train
from tunediff.training.phases import PHASES
from tunediff.workloads.diffusion.unet import UNet

SEGMENTS = 3
"""Parts a timed training is cut into after its warm-up: their spread says how steady the machine was."""
TRACED = 4
"""Steps in the trace."""
HOST_SHARE = 0.7
"""Share of the host memory that is available now which a batch-size sweep may take: the rest is others'."""
MOST_STEP_S = 30.0
"""A sweep ends before a step would take longer than this (s)."""
GROWTH = 1.03
"""images/s have stopped growing when two doublings of the batch have not brought this factor."""

OWNERS = {
    "data_wait": "batch", "host_to_device": "batch", "sampler": "batch",
    "forward": "forward", "backward": "backward",
}  # fmt: skip
"""Who a block of memory belongs to, by the phase that allocated it; `rest`: all others."""


class Bench:
    """Short trainings on one set of images, which leave nothing behind."""

    def __init__(self, images: Images, world: World) -> None:
        self.images, self.world = images, world

    def speed(self, config: Config, steps: int, segments: int = SEGMENTS) -> dict[str, Any]:
        """Rates, seconds of the mean step and its parts, and peak memory, over about `steps` steps after a warm-up.

        The warm-up is as long as each of the `segments`. Raises what the training raises.
        """
        each, parts = max(1, math.ceil(steps / segments)), segments + 1
        points = self._train(config, each * parts, parts)
        return summary(points, config.loader.batch_size) | {
            "steps": each * segments,
            "batch_size": config.loader.batch_size,
        }

    def first(self, config: Config) -> dict[str, float]:
        """Seconds of the first step and of compiling in a process that has trained nothing yet, and of a step then."""
        found = self.speed(config, 2, segments=1)
        return {name: found[name] for name in ("first_step_s", "compile_s", "step_s")}

    def loader_alone(self, config: Config, seconds: float = 3.0) -> dict[str, float]:
        """images/s of the loader, its batches brought to the device and no model beside it.

        Batches that loader processes have prepared ahead are consumed before the clock starts.
        """
        ahead = config.loader.workers * config.loader.prefetch_factor
        count = 0
        with build_batches(self.images, config, device=self.world.device) as batches:
            for _ in range(1 + ahead):
                batch = next(batches)
            self.world.synchronize()
            begin = time.monotonic()
            while count < 3 or time.monotonic() - begin < seconds:
                batch = next(batches)
                count += 1
            self.world.synchronize()
            spent = time.monotonic() - begin
        return {"images_per_s": count * len(batch) / spent, "images": count * len(batch), "seconds": spent}

    def model_alone(self, config: Config, steps: int) -> dict[str, Any] | None:
        """What `speed` measures with all images on the device; None where they do not fit."""
        try:
            return self.speed(cfg.override(config, {"loader.resident": True}), steps)
        except Exception as error:
            if not memory.is_oom(error):
                raise
        memory.reset(self.world.device)
        return None

    def attempt(self, config: Config, change: dict[str, Any], steps: int) -> dict[str, Any]:
        """What a change to the configuration gains over the same measured just before; or why that is unknown."""
        if "parallel.workers" in change:
            return {"failed": "it needs several processes"}
        try:
            before, after = self.speed(config, steps), self.speed(cfg.override(config, change), steps)
        except Exception as error:  # a change that fails is a result
            return {"failed": f"{type(error).__name__}: {_first_line(error)}"}
        finally:
            memory.reset(self.world.device)
        spread = math.hypot(*(one["images_per_s_sd"] or 0.0 for one in (before, after)))
        return {
            "images_per_s": after["images_per_s"],
            "gain": after["images_per_s"] / before["images_per_s"],
            "within_noise": abs(after["images_per_s"] - before["images_per_s"]) <= 2 * spread,
            "peak_memory_mib": after["peak_memory_mib"],
        }

    def trace(self, config: Config, path: Path, step_s: float) -> dict[str, Any]:
        """Write a Chrome trace of a few steps; returns the longest operations, the device's share and the memory.

        `step_s`: seconds of a step without profiler, which the device's own seconds are compared with.
        """
        from torch.profiler import ProfilerActivity, profile, schedule

        cuda = self.world.device.type == "cuda"
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
        rows: list[dict[str, Any]] = []

        def ready(profiler: Any) -> None:
            profiler.export_chrome_trace(str(path))
            rows.extend(table_rows(profiler.key_averages(), cuda))

        # The first two steps, and all that comes before them, are not recorded: the optimizer's state is made there.
        plan = schedule(wait=2, warmup=1, active=TRACED, repeat=1)
        with profile(
            activities=activities, schedule=plan, on_trace_ready=ready, record_shapes=True, profile_memory=True
        ) as profiler:
            self._train(config, 3 + TRACED + 1, 1, after_step=profiler.step)
        events = read_trace(path)
        static = static_mib(config, self.images, cuda)
        found: dict[str, Any] = {
            "operations": operations(rows, TRACED),
            "memory": {"static": static, **timeline(events, sum(static.values()), cuda)},
            "traced_steps": TRACED,
        }
        if cuda:
            busy = sum(event["dur"] for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
            found["device_busy_s"] = busy / 1e6 / TRACED
            found["device_busy_share"] = min(1.0, found["device_busy_s"] / step_s)
        return found

    def snapshot(self, config: Config, path: Path) -> bool:
        """Write what PyTorch's memory viewer shows (pytorch.org/memory_viz); False where there is no CUDA allocator."""
        if self.world.device.type != "cuda":
            return False
        torch.cuda.memory._record_memory_history(max_entries=200_000)
        try:
            self._train(config, 3, 1)
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        return True

    def sweep(
        self, config: Config, step_s: float, progress: Callable[[int], None], seconds: float = 2.0
    ) -> dict[str, Any]:
        """Rates and peak memory over the batch size, each over about `seconds`: doubled until memory or growth ends.

        On a CPU memory never runs out: a batch whose memory, extrapolated, would exceed a share of what is available is
        not tried. `progress` hears of every batch size before it is measured.
        """
        cuda = self.world.device.type == "cuda"
        rows: list[dict[str, Any]] = []
        limit, stopped, per_image_s = memory_limit_mib(self.world.device), "", step_s / config.loader.batch_size
        for batch in batch_sizes(config, len(self.images)):
            if stopped := end_of_sweep(rows, batch, None if cuda else limit):
                break
            progress(batch)
            try:
                steps = steps_in(seconds, per_image_s * batch)
                found = self.speed(cfg.override(config, {"loader.batch_size": batch}), steps, segments=1)
            except Exception as error:
                if not memory.is_oom(error):
                    raise
                stopped = f"out of memory at {batch}"
                break
            finally:
                memory.reset(self.world.device)
            keys = ("images_per_s", "step_s", "peak_memory_mib", "peak_reserved_mib", "disturbed")
            rows.append({"batch_size": batch, **{key: found[key] for key in keys if key in found}})
            per_image_s = found["step_s"] / batch
        return {
            "rows": rows,
            "stopped": stopped or "a larger batch would be larger than the set of images",
            "memory_limit_mib": limit,
            "limit_batch": largest_batch(rows, limit),
        }

    def _train(
        self, config: Config, steps: int, points: int, after_step: Callable[[], None] | None = None
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []

        def report(point: dict[str, Any]) -> bool:
            found.append(point)
            return True

        short = cfg.override(config, {"evaluation.points": points})
        budget = Budget(images=steps * config.loader.batch_size)
        try:
            train(short, budget, self.images, None, self.world, None, report, after_step=after_step)
        finally:
            if config.compile.mode != "none":
                torch.compiler.reset()  # or the next trainings would reach the limit of recompilations
        return found


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def device(world: World) -> dict[str, Any]:
    """The device, what it can do, and how much memory a training may take (MiB)."""
    cuda = world.device.type == "cuda"
    found = {
        "type": world.device.type,
        "name": torch.cuda.get_device_name(world.device) if cuda else record.environment()["cpu"],
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "gpus": torch.cuda.device_count(),
        "memory_limit_mib": memory_limit_mib(world.device),
    }
    if cuda:
        of = torch.cuda.get_device_properties(world.device)
        return found | {"memory_mib": of.total_memory / 2**20}
    return found | {"memory_mib": psutil.virtual_memory().total / 2**20}


def format_gains(world: World) -> dict[str, float]:
    """How many times as fast a matrix product is in other number formats than in IEEE float32, as measured here.

    `bf16`, `fp16` for autocast, `tf32` for `precision.matmul = high`; only what the device has units for.
    """
    formats: dict[str, tuple[torch.dtype | None, str]] = {}
    if world.device.type == "cuda":
        recent = torch.cuda.get_device_properties(world.device).major >= 8
        formats["fp16"] = (torch.float16, "highest")
        formats |= {"bf16": (torch.bfloat16, "highest"), "tf32": (None, "high")} if recent else {}
    else:
        flags = ""
        with contextlib.suppress(OSError):
            flags = Path("/proc/cpuinfo").read_text()
        if "avx512_bf16" in flags or "amx_bf16" in flags:
            formats["bf16"] = (torch.bfloat16, "highest")
    before, rates = torch.get_float32_matmul_precision(), dict[str, float]()
    try:
        for name, (dtype, matmul) in ({"float32": (None, "highest")} | formats).items():
            torch.set_float32_matmul_precision(matmul)
            rates[name] = hardware.peak_flops_per_s(world.device, dtype, matmul)
    finally:
        torch.set_float32_matmul_precision(before)
    return {name: rates[name] / rates["float32"] for name in formats}


def steps_in(seconds: float, step_s: float, least: int = 3, most: int = 200) -> int:
    """How many steps to measure: about as many as take so long."""
    return max(least, min(most, math.ceil(seconds / step_s)))


def summary(points: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    """One record of the points after the first, which is warm-up: equal numbers of steps, so means are plain."""
    points = points[1:]
    last = points[-1]
    step_s = statistics.fmean(point["step_s"] for point in points)
    rates = [batch / point["step_s"] for point in points]
    parts = (*PHASES, "other")
    found: dict[str, Any] = {
        "images_per_s": batch / step_s,
        "images_per_s_sd": statistics.stdev(rates) if len(rates) > 1 else None,
        "step_s": step_s,
        "parts_s": {name: statistics.fmean(point[f"step_{name}_s"] for point in points) for name in parts},
        "compile_s": last["seconds"]["compile"],
        "disturbed": any(point["disturbed"] for point in points),
        **{key: max(point[key] for point in points) for key in last if key.startswith("peak_") and key.endswith("mib")},
        **{key: last[key] for key in ("first_step_s", "flops_per_image", "peak_flops_per_s") if key in last},
        **{key: last[key] for key in ("load_average", "compiled_graphs") if key in last},
    }
    if "peak_flops_per_s" in found:
        found["peak_share"] = found["images_per_s"] * found["flops_per_image"] / found["peak_flops_per_s"]
    return found


# --------------------------------------------------------------------------------------------------------- operations
def table_rows(averages: Any, cuda: bool) -> list[dict[str, Any]]:
    """Plain rows of the profiler's table: name, calls, seconds of the operation itself, and whether it is a kernel."""
    rows = []
    for event in averages:
        if event.is_user_annotation or event.key in PHASES or event.key.startswith(("ProfilerStep", "Optimizer.")):
            continue  # ranges, not operations
        kernel = str(event.device_type).endswith("CUDA")
        seconds = (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6
        total = (event.device_time_total if cuda else event.cpu_time_total) / 1e6
        rows.append({"name": event.key, "calls": event.count, "self_s": seconds, "total_s": total, "kernel": kernel})
    return rows


def operations(rows: list[dict[str, Any]], steps: int, most: int = 10) -> dict[str, Any]:
    """The longest operations by their own seconds per step and their share of all.

    A GPU's seconds appear twice, as operations and as the kernels these have launched. Operations are what one can
    read; where they do not account for the kernels (CUDA graphs launch many at once), kernels are listed.
    """
    plain, kernels = ([row for row in rows if row["kernel"] is kind] for kind in (False, True))
    total = sum(row["self_s"] for row in plain)
    in_kernels = sum(row["self_s"] for row in kernels)
    kind = "operations"
    if total < 0.5 * in_kernels:
        plain, total, kind = kernels, in_kernels, "kernels"
    longest = sorted(plain, key=lambda row: -row["self_s"])
    shown = [
        {
            "operation": row["name"],
            "calls_per_step": row["calls"] / steps,
            "self_s_per_step": row["self_s"] / steps,
            "total_s_per_step": row["total_s"] / steps,
            "share": row["self_s"] / total if total else 0.0,
        }
        for row in longest
        if row["self_s"] > 0
    ]
    convolutions = sum(row["share"] for row in shown if "conv" in row["operation"].lower())
    return {
        "kind": kind, "longest": shown[:most], "convolution_share": convolutions, "self_s_per_step": total / steps,
    }  # fmt: skip


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace, gzipped or not."""
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


# ------------------------------------------------------------------------------------------------------------- memory
def static_mib(config: Config, images: Images, cuda: bool) -> dict[str, float]:
    """MiB that are there from one step to the next, by what they are; images where they lie on the device."""
    with torch.device("meta"):
        network = UNet(config.model, config.data.channels, config.data.image_size)
    weights = sum(p.numel() * p.element_size() for p in network.parameters()) / 2**20
    buffers = sum(b.numel() * b.element_size() for b in network.buffers()) / 2**20
    return {
        "parameters": weights + buffers,
        "optimizer": 2 * weights,  # AdamW's two moments
        "ema": weights + buffers,
        "images": images.pixels.nbytes / 2**20 if config.loader.resident or not cuda else 0.0,
    }


def timeline(events: list[dict[str, Any]], static: float, cuda: bool, most: int = 600) -> dict[str, Any]:
    """Memory of tensors over the traced steps, by the phase that allocated it, and what the peak consists of (MiB).

    What was allocated before the trace began counts as `static`; it is measured on a GPU, where the allocator knows,
    and taken from the argument (MiB) on a CPU. Seconds count from the first traced allocation. Of more than `most`
    moments, those with the most memory are kept.
    """
    phases = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] in PHASES
    )
    begins = [begin for begin, _, _ in phases]

    def phase_at(moment: float) -> str:
        index = bisect.bisect_right(begins, moment) - 1
        return phases[index][2] if index >= 0 and moment <= phases[index][1] else "other"

    moves = [
        (event["ts"], event["args"])
        for event in events
        if phases and event["name"] == "[memory]" and event["args"]["Device Type"] == int(cuda)
    ]
    moves.sort(key=lambda move: move[0])
    if not moves:
        return {"peak": None, "timeline": None, "phases": []}
    if cuda:
        static = (moves[0][1]["Total Allocated"] - moves[0][1]["Bytes"]) / 2**20
    zero, live = moves[0][0], dict[int, tuple[str, int]]()
    held = dict.fromkeys(("batch", "forward", "backward", "rest"), 0)
    moments: list[tuple[float, str, dict[str, int]]] = []
    for moment, args in moves:
        size, address = args["Bytes"], args["Addr"]
        if size > 0:
            owner = OWNERS.get(phase_at(moment), "rest")
            live[address] = (owner, size)
            held[owner] += size
        elif address in live:  # else it is older than the trace
            owner, size = live.pop(address)
            held[owner] -= size
        moments.append(((moment - zero) / 1e6, phase_at(moment), dict(held)))
    _, phase, parts = max(moments, key=lambda one: sum(one[2].values()))
    kept = _highest(moments, most)
    return {
        "peak": {
            "phase": phase,
            "total_mib": static + sum(parts.values()) / 2**20,
            "static_mib": static,
            **{f"{owner}_mib": size / 2**20 for owner, size in parts.items()},
        },
        "timeline": {
            "seconds": [seconds for seconds, _, _ in kept],
            "static_mib": [static] * len(kept),
            **{f"{owner}_mib": [parts[owner] / 2**20 for _, _, parts in kept] for owner in held},
        },
        "phases": [[(b - zero) / 1e6, (e - zero) / 1e6, name] for b, e, name in phases],
    }


def _highest(moments: list[tuple[float, str, dict[str, int]]], most: int) -> list[tuple[float, str, dict[str, int]]]:
    """Of each of `most` equal spans of time, the moment with the most memory."""
    span = max(moments[-1][0], 1e-9) / most
    found: dict[int, tuple[float, str, dict[str, int]]] = {}
    for one in moments:
        place = int(one[0] / span)
        if place not in found or sum(one[2].values()) > sum(found[place][2].values()):
            found[place] = one
    return [found[place] for place in sorted(found)]


def memory_limit_mib(device: torch.device) -> float:
    """What a training may take: all of the GPU that others leave; on a CPU what this process has and a share of what
    is available, to the machine and to the container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return (free + torch.cuda.memory_reserved(device)) / 2**20
    available = float(psutil.virtual_memory().available)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # `max` is no number: no limit
            group = Path("/sys/fs/cgroup")
            available = min(available, int((group / limit).read_text()) - int((group / used).read_text()))
    return (psutil.Process().memory_info().rss + HOST_SHARE * max(0.0, available)) / 2**20


# -------------------------------------------------------------------------------------------------------- batch sizes
def batch_sizes(config: Config, images: int) -> Iterator[int]:
    """A quarter of the configured batch, then doubling, up to the size of the set; those the configuration allows."""
    batch = config.loader.batch_size
    first = batch // 4 if batch % 4 == 0 else batch // 2 if batch % 2 == 0 else batch
    size = first
    while size <= max(images, batch):
        try:
            cfg.override(config, {"loader.batch_size": size})
        except ConfigError:
            if size >= batch:
                return
        else:
            yield size
        size *= 2


def end_of_sweep(rows: list[dict[str, Any]], batch: int, limit_mib: float | None) -> str:
    """Why the sweep should not go on to this batch size; '' when it should. Without a limit only memory ends it."""
    if not rows:
        return ""
    if rows[-1]["step_s"] / rows[-1]["batch_size"] * batch > MOST_STEP_S:
        return f"a step of {batch} images would take over {MOST_STEP_S:.0f} s"
    if limit_mib is None:
        return ""
    if (needed := predicted_mib(rows, batch)) > limit_mib:
        return f"{batch} images would need about {needed:,.0f} MiB of the {limit_mib:,.0f} MiB that may be taken"
    rates = [row["images_per_s"] for row in rows]
    if len(rates) > 2 and max(rates[-2:]) < GROWTH * max(rates[:-2]):
        return "images/s have stopped growing"
    return ""


def predicted_mib(rows: list[dict[str, Any]], batch: int) -> float:
    """Peak memory at another batch size: the straight line through the two largest, or in proportion to the only one.

    Process and weights do not grow with the batch, so a proportion is too much rather than too little.
    """
    known = [(int(row["batch_size"]), _peak(row)) for row in rows]
    if len(known) == 1:
        return known[0][1] * batch / known[0][0]
    (b0, m0), (b1, m1) = known[-2:]
    return m1 + max(0.0, (m1 - m0) / (b1 - b0)) * (batch - b1)


def largest_batch(rows: list[dict[str, Any]], limit_mib: float) -> int | None:
    """The batch at which memory ends, on the same straight line; None where it cannot be told."""
    if len(rows) < 2:
        return None
    before, last = (int(row["batch_size"]) for row in rows[-2:])
    per_image = (_peak(rows[-1]) - _peak(rows[-2])) / (last - before)
    return max(0, math.floor(last + (limit_mib - _peak(rows[-1])) / per_image)) if per_image > 0 else None


def _peak(row: Mapping[str, Any]) -> float:
    """What the allocator holds counts against a GPU's memory, used or not."""
    return float(row.get("peak_reserved_mib", row["peak_memory_mib"]))


# ------------------------------------------------------------------------------------------------------------ compile
def break_even(eager: float, compiled: float, compile_s: float) -> dict[str, float] | None:
    """Images and training seconds after which compiling has paid; None when it never does.

    `eager`, `compiled`: images/s; n images take n/eager, or compile_s + n/compiled. The seconds include compiling.
    """
    if compiled <= eager:
        return None
    images = compile_s / (1 / eager - 1 / compiled)
    return {"images": images, "seconds": images / eager}


def compile_cost(config: Config, steps: int, scratch: Path) -> dict[str, Any]:
    """Eager against compiled, one after the other in a process of its own with an empty cache of compiled code.

    `mode` is the configuration's, or `default` where it compiles nothing. `failed` holds the reason when there is no
    result.
    """
    mode = config.compile.mode if config.compile.mode != "none" else "default"
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".compiled-", ignore_cleanup_errors=True) as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        try:
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
                how = (cfg.to_dict(config), mode, steps, torch.get_num_threads())
                eager, compiled = pool.submit(_eager_and_compiled, *how).result()
        except concurrent.futures.process.BrokenProcessPool:
            return {"mode": mode, "failed": "the process that compiled was killed"}
        except Exception as error:  # no C++ compiler, an operation that cannot be compiled, …
            return {"mode": mode, "failed": f"{type(error).__name__}: {_first_line(error)}"}
        finally:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
            if before is not None:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
    return compared(mode, eager, compiled)


def compared(mode: str, eager: list[dict[str, Any]], compiled: dict[str, Any]) -> dict[str, Any]:
    """Measurements and what follows: the speed-up, whether it is larger than their spread, the break-even.

    `eager` was measured before and after: how far the two are apart is part of the spread.
    """
    rates = [one["images_per_s"] for one in eager]
    rate, faster = statistics.fmean(rates), compiled["images_per_s"]
    spread = math.hypot(max(rates) - min(rates), *(one["images_per_s_sd"] or 0.0 for one in (*eager, compiled)))
    # compile_s is compilation and the first step, which an eager training has as well.
    seconds = max(0.0, compiled["compile_s"] - eager[-1]["first_step_s"])
    return {
        "mode": mode,
        "eager_images_per_s": rate,
        "compiled_images_per_s": faster,
        "compile_s": seconds,
        "speedup": faster / rate,
        "within_noise": abs(faster - rate) <= 2 * spread,
        "break_even": break_even(rate, faster, seconds),
        "graphs": compiled.get("compiled_graphs"),
        "peak_memory_mib": [eager[-1]["peak_memory_mib"], compiled["peak_memory_mib"]],
        "disturbed": any(one["disturbed"] for one in (*eager, compiled)),
    }


def _eager_and_compiled(
    nested: dict[str, Any], mode: str, steps: int, threads: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """In the process of `compile_cost`: what `speed` measures without, with and once more without torch.compile."""
    torch.set_num_threads(threads)
    config = cfg.from_dict(nested, where="profile")
    bench = Bench(data.load(config.data), alone())
    eager = cfg.override(config, {"compile.mode": "none", "compile.scope": "model", "compile.dynamic": False})
    bench.first(eager)  # libraries load once per process, whatever the mode
    before = bench.speed(eager, steps)
    compiled = bench.speed(cfg.override(config, {"compile.mode": mode}), steps)
    return [before, bench.speed(eager, steps)], compiled
