"""Part B: how fast is it, and how near to what it could be? `doctor --full --part B`.

On a GPU the full U-Net for CIFAR-10 on made-up images, on a CPU a small one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from tunediff import cli
from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.config.code import described
from tunediff.config.systems import Precision
from tunediff.distributed import World, alone
from tunediff.doctor import software
from tunediff.doctor.finding import Answer, Site, check
from tunediff.doctor.trainings import EnoughError, short, small
from tunediff.profiling import measure, trace
from tunediff.profiling.result import Speed
from tunediff.training import hardware, judging, memory
from tunediff.training.precision import Amp, set_backends
from tunediff.workloads.diffusion import unet

STEADY = 0.15
"""Two looks at one peak that are further apart than this share of the larger: others were there, or it got hot."""
GOAL = 0.5
"""Share of the peak that the best way of training the full U-Net should reach on a GPU."""
LADDER_S = {"cuda": 360.0, "cpu": 60.0}
"""After so long no other rung is begun: torch.compile's last mode takes minutes for each batch size."""
IMAGES = {"cuda": 1280, "cpu": 128}
"""That a quarter of a measurement trains on, in 3 to 10 steps."""
LONG_S = 60.0
"""An evaluation that takes longer than this is longer than many a training."""
IDLE = 0.05
"""A GPU that is idle for more of a step than this could be faster by other means than its units."""
RUNGS: dict[str, dict[str, Any]] = {
    "float32": {"precision.conv_tf32": False}, "TF32": {"precision.matmul": "high", "precision.conv_tf32": True},
    "bf16": {"precision.amp": "bf16"}, "channels_last": {"memory.channels_last": True},
    "triton": {"model.norm": "triton"}, "compiled": {"compile.mode": "default"},
    "max-autotune": {"compile.mode": "max-autotune"},
}  # fmt: skip
"""Each on top of those before it; the first is IEEE float32, eager."""
COMPILED = ("compiled", "max-autotune")
"""Take minutes for each batch size: both are measured at one before either is at another."""
CPU_RUNGS = ("float32", "bf16", "channels_last")
"""Those that a CPU climbs in a minute, bf16 only where it has units for that."""
FORMATS = {"float32": Precision(conv_tf32=False), "TF32": Precision(matmul="high"), "bf16": Precision(amp="bf16")}
Rungs = dict[str, dict[str, float]]

WITHOUT = {"oom": "out of memory", "failed": "failed", "": "not measured, for want of time"}
"""Why a rung has no number."""

part = functools.partial(check, part="B")


@part("matrix peak")
def peak(site: Site) -> Answer:
    """Matrix products of random numbers in each number format, all of them twice."""
    device, found = alone().device, dict[str, list[float]]()
    before = torch.get_float32_matmul_precision()
    try:
        for _, (name, one) in ((turn, each) for turn in range(2) for each in formats(site)):
            torch.set_float32_matmul_precision(one.matmul)
            dtype = torch.bfloat16 if one.amp == "bf16" else torch.float32
            found.setdefault(name, []).append(hardware.fastest_product(device, dtype) / 1e12)
    finally:
        torch.set_float32_matmul_precision(before)
        memory.reset(device)
    said = ", ".join(f"{name} {cli.number(max(two))}" for name, two in found.items()) + " TFLOP/s"
    numbers = {f"{name}_tflops": two for name, two in found.items()}
    if rough := [name for name, two in found.items() if 1 - min(two) / max(two) > STEADY]:
        return Answer("weak", f"{said}; not the same twice: {', '.join(rough)}",
                      "others use this machine, or it gets hot: what is measured varies as much", numbers)  # fmt: skip
    return Answer("ok", said, "what a training's share of the peak is a share of", numbers)


def formats(site: Site) -> list[tuple[str, Precision]]:
    """That are computed in there."""
    return [(name, one) for name, one in FORMATS.items() if name != "TF32" or site.device == "cuda"]


def network(device: str) -> Systems:
    """What is trained."""
    if device != "cuda":
        return small(optimizer__implementation="fused")
    config: Systems = cfg.override(cfg.baseline("cifar10"), {"loader.resident": True})
    return config


def speed(config: Systems, world: World) -> Speed:
    """Of 30 steps, fewer where batches are large, after a third as many to warm up. Raises what a training does."""
    each = min(10, max(3, IMAGES[world.device.type] // config.loader.batch_size))
    points = short(cfg.override(config, {"evaluation.points": 4}), world, 4 * each)[0].points
    return measure.summary(points, config.loader.batch_size, 3 * each)


def climb(base: Systems, batches: tuple[int, ...], rungs: tuple[str, ...], world: World) -> dict[int, Rungs]:
    """Images/s and share of the peak of its number format by batch size and rung; `oom` where memory ran out, `failed`
    where something else broke, and nothing where time ran out."""
    found, until = {batch: Rungs() for batch in batches}, time.monotonic() + LADDER_S[world.device.type]
    ways: dict[str, Systems] = {}
    for rung in rungs:
        base = ways[rung] = cfg.override(base, RUNGS[rung])
    for rung, batch in in_turn(rungs, batches):
        if time.monotonic() > until:
            break
        try:
            one = speed(cfg.override(ways[rung], {"loader.batch_size": batch}), world)
            found[batch][rung] = {"images_per_s": one["samples_per_s"], "peak_share": one.get("peak_share") or 0.0}
        except Exception as error:
            found[batch][rung] = {"oom" if memory.is_oom(error) else "failed": 1.0}
            if not memory.is_oom(error):
                print(f"ladder: {rung}, batch {batch}: {described(error)}", file=sys.stderr, flush=True)
        finally:
            memory.reset(world.device)
    return found


def in_turn(rungs: Sequence[str], batches: Sequence[int]) -> list[tuple[str, int]]:
    """Every rung with every batch size, in the order in which they are worth their time."""
    eager, late = ([rung for rung in rungs if (rung in COMPILED) is kind] for kind in (False, True))
    first = batches[1:2] or batches
    others = [batch for batch in batches if batch not in first]
    parts = ((eager, batches), (late, first), (late, others))
    return [pair for some, sizes in parts for pair in itertools.product(some, sizes)]


@part("ladder")
def ladder(site: Site) -> Answer:
    """Number format, memory format and compilation, one on top of the other, at several batch sizes."""
    gpu = site.device == "cuda"
    batches, all_rungs = ((128, 256, 512, 1024), tuple(RUNGS)) if gpu else ((8, 32), CPU_RUNGS)
    rungs = tuple(one for one in all_rungs if one not in ("TF32", "bf16") or one.lower() in software.gains())
    return climbed(climb(network(site.device), batches, rungs, alone()), rungs, gpu)


def climbed(found: dict[int, Rungs], rungs: tuple[str, ...], gpu: bool) -> Answer:
    """Of `climb`: every rung, and how much faster than float32 the best is."""
    said, best, gains = ["images/s, with the share of the number format's peak"], 0.0, list[float]()
    for batch, each in found.items():
        ran = {rung: one for rung, one in each.items() if "images_per_s" in one}
        words = [
            f"{rung} {ran[rung]['images_per_s']:,.0f} ({ran[rung]['peak_share']:.0%})" if rung in ran
            else f"{rung} {WITHOUT[next(iter(each.get(rung, [''])))]}"
            for rung in rungs
        ]  # fmt: skip
        said.append(f"batch {batch}: {', '.join(words)}")
        best = max([best, *(one["peak_share"] for one in ran.values())])
        if "float32" in ran:
            gains += [one["images_per_s"] / ran["float32"]["images_per_s"] for one in ran.values()]
    text, numbers = "; ".join(said), {str(batch): each for batch, each in found.items()}
    if any("failed" in one for each in found.values() for one in each.values()):
        return Answer("wrong", text, "what failed here fails in a search too: leave it out", numbers)
    if not gains:
        return Answer("missing", text, "not even the smallest batch fits in float32: a smaller network", numbers)
    means = f"up to {max(gains):.2g} times as fast as float32: what a search over systems can gain in speed alone"
    if gpu and best < GOAL:
        return Answer("weak", text, f"below {GOAL:.0%} of the peak: python -m tunediff.profile says why", numbers)
    if max(gains) < 1.1:
        return Answer("weak", text, "nothing beats plain float32 here: leave these knobs out of a search", numbers)
    return Answer("ok", text, means, numbers)


# ---------------------------------------------------------------------------------------------------------- idle time
@part("idle time")
def idling(site: Site) -> Answer:
    """Of a few eager steps in bf16: what the GPU waits for between two kernels."""
    if site.device != "cuda":
        return Answer("skipped", "not measured: no GPU", "a CPU is its own host: python -m tunediff.profile says more")
    config = cfg.override(network(site.device), RUNGS["bf16"] | RUNGS["channels_last"])
    return waited(traced(config, alone()))


def traced(config: Systems, world: World, steps: int = 6) -> trace.Idle | None:
    """Of steps that follow each other without the clock being read, which waits for the device."""
    left = steps + 2

    def after_step() -> None:
        nonlocal left
        left -= 1
        profiler.step()
        if not left:
            raise EnoughError

    with tempfile.TemporaryDirectory(prefix="tunediff-doctor-") as folder:
        path = Path(folder) / "trace.json"
        with profile(
            # Launches and kernels alone: to note every operation too would slow down the host, which is asked about.
            activities=[ProfilerActivity.CUDA if world.device.type == "cuda" else ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda ready: ready.export_chrome_trace(str(path)),
        ) as profiler, contextlib.suppress(EnoughError):  # fmt: skip
            short(config, world, 100_000, after_step=after_step)
        memory.reset(world.device)
        return trace.idle(json.loads(path.read_text())["traceEvents"])


def waited(found: trace.Idle | None) -> Answer:
    """In words."""
    if found is None:
        return Answer("missing", "torch's profiler has seen no kernel", "python -m tunediff.profile says less here")
    shares = {name: seconds / sum(found) for name, seconds in found._asdict().items()}
    idle = 1 - shares["busy_s"]
    said = (
        f"idle for {idle:.1%} of an eager step in bf16: {shares['host_s']:.1%} waiting for the host, "
        f"{shares['kernel_s']:.1%} for another kernel, {shares['other_s']:.1%} other"
    )
    numbers = found._asdict()
    if idle <= IDLE:
        return Answer("ok", said, "its units are what a training waits for", numbers)
    if shares["host_s"] > idle / 2:
        return Answer("weak", said, "larger batches, compile.mode or fused kernels keep it busy: search them", numbers)
    return Answer("weak", said, "python -m tunediff.profile has the trace", numbers)


# --------------------------------------------------------------------------------------------------------- evaluation
@part("evaluation")
def evaluation(site: Site) -> Answer:
    """What judging costs: the sampler's steps, the features, the distance; and the images in other number formats."""
    config, world = cfg.override(network(site.device), {"evaluation.extractor": "random"}), alone()
    try:
        return judged(judging.pass_s(config, world) or {}, drawn_s(config, world, formats(site)), config)
    finally:
        memory.reset(world.device)


def drawn_s(config: Systems, world: World, each: list[tuple[str, Precision]]) -> dict[str, float]:
    """Seconds that the network takes for 1,000 images in each number format."""
    device, of, found = world.device, config.knobs, dict[str, float]()
    net = unet.network(of).to(device).eval()
    try:
        for name, one in each:
            amp = Amp(one, device)

            def run(count: int, amp: Amp = amp) -> object:
                x = torch.zeros(count, of.data.channels, of.data.image_size, of.data.image_size, device=device)
                with torch.no_grad(), amp.autocast():
                    return net(x, torch.zeros(count, dtype=torch.int64, device=device))

            found[name] = 1000 * of.evaluation.steps * judging.rate_s(run, of.evaluation.batch_size, world)
    finally:
        set_backends(Precision(), device.type)
    return found


def judged(each: judging.PassS, drawn: dict[str, float], config: Systems) -> Answer:
    """Of the seconds that one image takes through each part."""
    work = cfg.of(config).offers("evaluation_work")(config.knobs)
    parts = {name: each[name] * count for name, count in work.items()}
    whole, protocol = sum(parts.values()), config.knobs.evaluation
    said = f"{protocol.images:,} images, {protocol.steps} steps: {cli.number(whole)} s, of it the network " \
           f"{parts['network'] / whole:.0%}; 1,000 images drawn in " \
           + ", ".join(f"{name} {cli.number(seconds)} s" for name, seconds in drawn.items())  # fmt: skip
    numbers = {f"{name}_s": seconds for name, seconds in parts.items()}
    numbers |= {f"drawn_1000_{name}_s": seconds for name, seconds in drawn.items()}
    if whole > LONG_S:
        return Answer("weak", said, "longer than short trainings: fewer images, steps or points", numbers)
    return Answer("ok", said, "at every point of a training, while its clock stands still", numbers)


@part("peers")
def peers(site: Site) -> Answer:
    """Other programs are no part of this one's package."""
    return Answer("skipped", "in a checkout: python -m benchmarks.peers --config cifar10",
                  "diffusers and denoising-diffusion-pytorch take turns with this one there")  # fmt: skip


CHECKS = (peak, ladder, idling, evaluation, peers)
