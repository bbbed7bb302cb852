"""Part B: how fast is it, and how near to what it could be? `doctor --full --part B`.

On a GPU the full U-Net for CIFAR-10 on made-up images, on a CPU a small one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tunediff import cli
from tunediff import config as cfg
from tunediff.config import ConfigError, Systems
from tunediff.distributed import World, alone
from tunediff.doctor.finding import Answer, Site, check
from tunediff.doctor.trainings import short, small
from tunediff.profiling import measure
from tunediff.training import hardware, judging, memory

STEADY = 0.15
"""Two looks at one peak that are further apart than this share of the larger: others were there, or it got hot."""
GOAL = 0.5
"""Share of the peak that the best way of training the full U-Net should reach on a GPU."""
LONG_S = 60.0
"""An evaluation that takes longer than this is longer than many a training."""
RUNGS: tuple[dict[str, Any], ...] = (
    {}, {"precision.matmul": "high"}, {"precision.amp": "bf16"}, {"memory.channels_last": True},
    {"compile.mode": "default"}, {"compile.mode": "max-autotune"},
)  # fmt: skip
"""Each on top of those before it; the first is IEEE float32, eager."""
CPU_RUNGS = (0, 2, 3)
"""Those that a CPU climbs in a minute."""

part = functools.partial(check, part="B")


@part("matrix peak")
def peak(site: Site) -> Answer:
    """Matrix products in each number format, twice."""
    device, found = alone().device, dict[str, list[float]]()
    formats: dict[str, tuple[torch.dtype | None, str]] = {
        "float32": (None, "highest"),
        "bf16": (torch.bfloat16, "highest"),
    }
    formats |= {"TF32": (None, "high")} if site.device == "cuda" else {}
    before = torch.get_float32_matmul_precision()
    try:
        for name, (dtype, matmul) in formats.items():
            torch.set_float32_matmul_precision(matmul)
            found[name] = [hardware.peak_flops_per_s(device, dtype, matmul) / 1e12 for _ in range(2)]
    finally:
        torch.set_float32_matmul_precision(before)
    said = ", ".join(f"{name} {cli.number(max(two))}" for name, two in found.items()) + " TFLOP/s"
    numbers = {f"{name}_tflops": two for name, two in found.items()}
    if rough := [name for name, two in found.items() if 1 - min(two) / max(two) > STEADY]:
        return Answer("weak", f"{said}; not the same twice: {', '.join(rough)}",
                      "others use this machine, or it gets hot: what is measured varies as much", numbers)  # fmt: skip
    return Answer("ok", said, "what a training's share of the peak is a share of", numbers)


def network(site: Site) -> Systems:
    """What is trained."""
    if site.device != "cuda":
        return small(evaluation__points=4, optimizer__implementation="fused")
    full = {"optimizer.implementation": "fused", "evaluation.points": 4, "loader.resident": True}
    config: Systems = cfg.override(cfg.baseline("cifar10"), full)
    return config


def climb(base: Systems, batch: int, rungs: tuple[int, ...], world: World) -> dict[str, dict[str, float]]:
    """Images/s and share of the peak on each rung, by what it adds; `oom` where memory ran out."""
    config, found = cfg.override(base, {"loader.batch_size": batch}), dict[str, dict[str, float]]()
    for rung in rungs:
        name = cli.knobs(RUNGS[rung]) if RUNGS[rung] else "float32"
        try:
            config = cfg.override(config, RUNGS[rung])
            points, each = short(config, world, 40)[0].points, 30
            speed = measure.summary(points, batch, each)
            found[name] = {"images_per_s": speed["samples_per_s"], "peak_share": speed.get("peak_share") or 0.0}
        except ConfigError:
            continue
        except Exception as error:
            if not memory.is_oom(error):
                raise
            found[name] = {"oom": 1.0}
        finally:
            memory.reset(world.device)
    return found


@part("ladder")
def ladder(site: Site) -> Answer:
    """Number format, memory format and compilation, one on top of the other, at several batch sizes."""
    gpu, world = site.device == "cuda", alone()
    batches, rungs = ((128, 256, 512, 1024), tuple(range(len(RUNGS)))) if gpu else ((32, 128), CPU_RUNGS)
    return climbed({batch: climb(network(site), batch, rungs, world) for batch in batches}, gpu)


def climbed(found: dict[int, dict[str, dict[str, float]]], gpu: bool) -> Answer:
    """Of `climb` at each batch size: the best, and how much faster than float32 that is."""
    said, best, gain = [], 0.0, 0.0
    for batch, rungs in found.items():
        ran = {name: one for name, one in rungs.items() if "oom" not in one}
        if not ran or "float32" not in ran:
            said.append(f"batch {batch}: out of memory")
            continue
        fastest = max(ran, key=lambda name: ran[name]["images_per_s"])
        times = ran[fastest]["images_per_s"] / ran["float32"]["images_per_s"]
        gain, best = max(gain, times), max(best, ran[fastest]["peak_share"])
        rate, share = ran[fastest]["images_per_s"], ran[fastest]["peak_share"]
        said.append(
            f"batch {batch}: {rate:,.0f} images/s up to {fastest}, {times:.2g} × float32, {share:.0%} of the peak"
        )
    numbers = {str(batch): rungs for batch, rungs in found.items()}
    if not gain:
        return Answer("missing", "; ".join(said), "not even the smallest batch fits: a smaller network", numbers)
    if gpu and best < GOAL:
        return Answer(
            "weak", "; ".join(said), f"below {GOAL:.0%} of the peak: python -m tunediff.profile says why", numbers
        )
    if gain < 1.1:
        return Answer(
            "weak", "; ".join(said), "nothing beats plain float32 here: leave these knobs out of a search", numbers
        )
    return Answer("ok", "; ".join(said), "what a search over systems can gain in speed alone", numbers)


@part("evaluation")
def evaluation(site: Site) -> Answer:
    """What judging costs: the sampler's steps, the features, the distance."""
    config = cfg.override(network(site), {"evaluation.extractor": "random"})
    return judged(judging.pass_s(config, alone()) or {}, config)


def judged(each: judging.PassS, config: Systems) -> Answer:
    """Of the seconds that one image takes through each part."""
    images, steps = config.evaluation.images, config.evaluation.steps  # type: ignore[attr-defined]
    parts = {"network": each["network"] * steps * images, "features": each["features"] * images}
    whole = sum(parts.values())
    said = f"{images:,} images, {steps} steps: {cli.seconds(whole)}, of it the network {parts['network'] / whole:.0%}"
    if whole > LONG_S:
        return Answer("weak", said, "longer than short trainings: fewer images, steps or points", parts)
    return Answer("ok", said, "at every point of a training, while its clock stands still", parts)


CHECKS = (peak, ladder, evaluation)
