"""What to try next, from what a profile has measured: each rule gives knobs, a reason with its number, and a bound."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from tunediff import config as cfg
from tunediff.cli import number, seconds
from tunediff.config import Config, ConfigError
from tunediff.reporting.profiles import milliseconds, percent

WAIT, RESERVE, OPTIMIZER, SAMPLER = 0.05, 1.5, 0.10, 0.10
"""From which share of the step (or below which ratio of loader to model) a rule speaks."""
BUSY, CONVOLUTIONS, GAIN, EQUAL, USEFUL = 0.7, 0.3, 1.05, 0.97, 1.2


@dataclasses.dataclass(frozen=True)
class Advice:
    """One thing to try."""

    change: dict[str, Any]
    """Knobs and values, to be set together."""
    reason: str
    bound: float | None = None
    """images/s grow by at most this factor; None where that cannot be told."""
    measured: bool = False
    """Whether `bound` is what was measured here, not what would be left if the cause vanished."""


def amdahl(share: float, factor: float = math.inf) -> float:
    """The speed-up of the whole when a share of the step becomes so many times as fast, or takes no time at all."""
    share = min(share, 0.999)
    return 1 / (1 - share + share / factor)


def advise(found: dict[str, Any], config: Config) -> list[Advice]:
    """What to try next: first what was measured, then by the bound; empty when nothing stands out.

    `found`: a profile of `config`. Nothing is advised that is on already, that the configuration does not allow, or
    that changes nothing on the device.
    """
    given = [advice for rule in RULES for advice in rule(found, config) if _possible(advice.change, found, config)]
    return sorted(given, key=lambda advice: (not advice.measured, -(advice.bound or 0.0)))


def _possible(change: dict[str, Any], found: dict[str, Any], config: Config) -> bool:
    known = cfg.knobs()
    if any(name not in known for name in change):
        return False
    try:
        changed = cfg.override(config, change)
    except ConfigError:
        return False
    without_effect = cfg.not_effective(changed, found["device"]["type"])
    return bool(cfg.differences(changed, config)) and not any(name in without_effect for name in change)


# -------------------------------------------------------------------------------------------------------------- shares
def share(found: dict[str, Any], *parts: str) -> float:
    """The share of the step that these parts take."""
    return sum(float(found["step"]["parts_s"][part]) for part in parts) / float(found["step"]["step_s"])


def _said(found: dict[str, Any], *parts: str) -> str:
    """`22 % of the step (7.1 ms)`."""
    taken = sum(found["step"]["parts_s"][part] for part in parts)
    return f"{percent(share(found, *parts))} of the step ({milliseconds(taken)})"


def _cuda(found: dict[str, Any]) -> bool:
    return bool(found["device"]["type"] == "cuda")


# --------------------------------------------------------------------------------------------------------------- rules
def waiting_for_images(found: dict[str, Any], config: Config) -> Iterator[Advice]:
    """Images come too late."""
    if config.loader.resident or (waited := share(found, "data_wait")) <= WAIT:
        return
    reason = f"waiting for images is {_said(found, 'data_wait')}"
    images, device = found["images"]["mib"], found["device"]
    if not _cuda(found) or images < 0.1 * device["memory_mib"]:
        yield Advice({"loader.resident": True}, f"{reason}; all images take {number(images)} MiB", amdahl(waited))
    more = min(max(2, 2 * config.loader.workers), device["cores"])
    if more > config.loader.workers and (_cuda(found) or config.loader.workers):
        yield Advice({"loader.workers": more}, f"{reason}; {device['cores']} cores can load", amdahl(waited))


def little_reserve(found: dict[str, Any], config: Config) -> Iterator[Advice]:
    """The loader keeps up, just."""
    ratio, workers = found.get("feed_ratio"), config.loader.workers
    if ratio is None or ratio >= RESERVE or not workers or share(found, "data_wait") > WAIT:
        return
    reason = (
        f"the loader feeds only {ratio:.1f}× what the model eats: anything that makes the model faster waits for it"
    )
    more = min(2 * workers, found["device"]["cores"])
    if more > workers:
        yield Advice({"loader.workers": more}, reason)


def copying(found: dict[str, Any], config: Config) -> Iterator[Advice]:
    """Batches reach the GPU slowly."""
    if config.loader.resident or not _cuda(found) or (copied := share(found, "host_to_device")) <= WAIT:
        return
    reason = f"bringing images to the GPU is {_said(found, 'host_to_device')}"
    if config.loader.transfer == "float32":
        yield Advice({"loader.transfer": "uint8"}, f"{reason}; bytes are a quarter of it", amdahl(copied))
    yield Advice({"loader.pin_memory": True, "loader.non_blocking": True}, reason, amdahl(copied))


def batch_size(found: dict[str, Any], config: Config) -> Iterator[Advice]:
    """The batch-size sweep: a larger batch is faster, or a smaller one no slower."""
    rows = {row["batch_size"]: row["images_per_s"] for row in (found.get("sweep") or {}).get("rows", [])}
    own = config.loader.batch_size
    if own not in rows or len(rows) < 2:
        return
    best = max(rows.values())
    enough = next(size for size, rate in rows.items() if rate >= 0.95 * best)
    if enough > own and (gain := rows[enough] / rows[own]) > GAIN:
        scaling = {"optimizer.lr_scaling": "sqrt"} if config.optimizer.lr_scaling == "none" else {}
        yield Advice(
            {"loader.batch_size": enough, **scaling},
            f"{number(rows[enough])} images/s instead of {number(rows[own])}; but {enough / own:g}× fewer updates per "
            "image: judge it by FID per second",
            gain,
            measured=True,
        )
    elif smaller := [size for size, rate in rows.items() if size < own and rate >= EQUAL * rows[own]]:
        size = min(smaller)
        yield Advice(
            {"loader.batch_size": size},
            f"{number(rows[size])} images/s instead of {number(rows[own])}, with {own / size:g}× the updates per image",
            rows[size] / rows[own],
            measured=True,
        )


def fused_optimizer(found: dict[str, Any], config: Config) -> Iterator[Advice]:
    """The update is a large part of the step."""
    if config.optimizer.implementation != "fused" and (taken := share(found, "optimizer")) > OPTIMIZER:
        yield Advice({"optimizer.implementation": "fused"}, f"the update is {_said(found, 'optimizer')}", amdahl(taken))


def adaptive_sampler(found: dict[str, Any], config: Config) -> Iterator[Advice]:
    """A sampler that looks ahead costs passes of its own."""
    sampler = config.timesteps
    if isinstance(sampler, cfg.BetaPolicy) and (taken := share(found, "sampler")) > SAMPLER:
        yield Advice(
            {"timesteps.interval": 2 * sampler.interval},
            f"the timestep sampler is {_said(found, 'sampler')}; half as many updates of its policy",
            amdahl(taken / 2),
        )


def number_formats(found: dict[str, Any], config: Config) -> Iterator[Advice]:
    """Arithmetic in float32 on hardware that has faster units."""
    computing, gains = share(found, "forward", "backward"), found["format_gains"]
    if config.precision.amp != "none" or computing < 0.5:
        return
    reached = found["step"].get("peak_share")
    reason = f"forward and backward are {_said(found, 'forward', 'backward')}, in float32"
    if reached is not None:
        reason += f" at {percent(reached)} of the fastest product"

    def gained(name: str) -> tuple[str, float]:
        # What waits for memory instead of arithmetic gains as well: half the bytes, so up to a factor of 2.
        factor = max(2.0, gains[name]) if name != "tf32" else gains[name]
        return f"{reason}; a product in {name} is {gains[name]:.1f}× as fast here", amdahl(computing, factor)

    amp = next((name for name in ("bf16", "fp16") if gains.get(name, 0.0) > USEFUL), None)
    if amp is not None:
        layout = {"model.channels_last": True} if _cuda(found) else {}
        yield Advice({"precision.amp": amp, **layout}, *gained(amp))
    if config.precision.matmul == "highest" and gains.get("tf32", 0.0) > USEFUL:
        yield Advice({"precision.matmul": "high"}, *gained("tf32"))


def convolutions(found: dict[str, Any], config: Config) -> Iterator[Advice]:
    """Most of the time is convolutions: memory format and choice of algorithm decide."""
    taken = found["operations"]["convolution_share"] * share(found, "forward", "backward")
    if taken < CONVOLUTIONS:
        return
    reason = f"convolutions are about {percent(taken)} of the step"
    # On a GPU in float32 the rule on number formats has it already, together with AMP.
    if not config.model.channels_last and not (_cuda(found) and config.precision.amp == "none"):
        yield Advice({"model.channels_last": True}, f"{reason}; NHWC is often their faster order", amdahl(taken))
    if not config.precision.cudnn_benchmark:
        yield Advice({"precision.cudnn_benchmark": True}, f"{reason}; shapes never change", amdahl(taken))


def launch_bound(found: dict[str, Any], config: Config) -> Iterator[Advice]:
    """The GPU waits for the host to launch its kernels."""
    busy = found.get("device_busy_share")
    if busy is None or busy >= BUSY or config.compile.mode in ("reduce-overhead", "max-autotune"):
        return
    reason = f"the GPU computes {percent(busy)} of the time; the rest it waits to be told"
    yield Advice({"compile.mode": "reduce-overhead"}, f"{reason}; CUDA graphs launch all at once", 1 / max(busy, 0.01))


def compiling(found: dict[str, Any], config: Config) -> Iterator[Advice]:
    """What the break-even of torch.compile says."""
    cost = found.get("compile") or {}
    if "speedup" not in cost:
        return
    paid, speedup = cost["break_even"], cost["speedup"]
    if config.compile.mode == "none" and paid is not None and not cost["within_noise"]:
        yield Advice(
            {"compile.mode": cost["mode"]},
            f"it pays after {seconds(paid['seconds'])} or {paid['images']:,.0f} images: for budgets well above that",
            speedup,
            measured=True,
        )
    if config.compile.mode != "none" and paid is None:
        yield Advice(
            {"compile.mode": "none", "compile.dynamic": False, "compile.scope": "model"},
            f"compiled it is no faster ({speedup:.2f}×) and costs {seconds(cost['compile_s'])} at the start",
            1 / speedup,
            measured=True,
        )


def memory(found: dict[str, Any], config: Config) -> Iterator[Advice]:
    """Too little memory, or memory saved that is not needed."""
    step, limit = found["step"], found["device"]["memory_limit_mib"]
    used = step.get("peak_reserved_mib", step["peak_memory_mib"]) / limit
    said = f"training takes {percent(used)} of the memory it may have"
    if used > 0.85 and 0 not in config.model.checkpoint_levels:
        levels = [0, *config.model.checkpoint_levels]
        yield Advice({"model.checkpoint_levels": levels}, f"{said}; slower, but room for a larger batch")
    if used < 0.5 and config.model.checkpoint_levels:
        yield Advice({"model.checkpoint_levels": []}, f"{said}: nothing needs to be computed twice", 4 / 3)
    if config.loader.accumulation > 1 and used * config.loader.accumulation < 0.8:
        passes = config.loader.accumulation
        yield Advice({"loader.accumulation": 1}, f"{said}: the batch needs no {passes} passes")


def more_gpus(found: dict[str, Any], config: Config) -> Iterator[Advice]:
    """There are GPUs that do nothing."""
    gpus = found["device"]["gpus"]
    if gpus > 1 and config.parallel.workers == 1 and config.loader.batch_size % gpus == 0:
        yield Advice({"parallel.workers": gpus}, f"one of {gpus} GPUs is used", float(gpus))


RULES: tuple[Callable[[dict[str, Any], Config], Iterator[Advice]], ...] = (
    waiting_for_images, little_reserve, copying, batch_size, fused_optimizer, adaptive_sampler, number_formats,
    convolutions, launch_bound, compiling, memory, more_gpus,
)  # fmt: skip
