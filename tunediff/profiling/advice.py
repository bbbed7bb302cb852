"""What to try next, from what a profile has measured: each rule gives knobs, a reason with its
number, and a bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Systems, Values
from tunediff.core.text import number
from tunediff.profiling.result import Advice, Profile, held_mib
from tunediff.profiling.tables import milliseconds, percent

WAIT, RESERVE, OPTIMIZER, SAMPLER = 0.05, 1.5, 0.10, 0.10
"""From which share of the step (or below which ratio of loader to model) a rule speaks."""
BUSY, CONVOLUTIONS, USEFUL = 0.7, 0.3, 1.2


def amdahl(share: float, factor: float = math.inf) -> float:
    """Return the speed-up of a step when a share of it becomes so many times as fast, or takes no
    time at all."""
    share = min(share, 0.999)
    return 1 / (1 - share + share / factor)


def advise(profile: Profile, config: Systems, unread: Collection[str] = ()) -> list[Advice]:
    """Return what to try next, by the bound; empty when nothing stands out.

    `profile`: a profile of `config`; `unread`: knobs that the workload does not follow. Nothing is
    advised that is on already, that the configuration does not allow, or that changes nothing on
    the device.
    """
    all_advice = (advice for rule in RULES for advice in rule(profile, config))
    possible = [
        advice for advice in all_advice if _possible(advice.change, profile, config, unread)
    ]
    return sorted(possible, key=lambda advice: -(advice.bound or 0.0))


def _possible(change: Values, profile: Profile, config: Systems, unread: Collection[str]) -> bool:
    try:
        changed = cfg.override(config, change)
    except ConfigError:  # not allowed, or no knob of this configuration
        return False
    without_effect = {*unread, *cfg.not_effective(changed, profile["device"]["type"])}
    return bool(cfg.differences(changed, config)) and not any(
        name in without_effect for name in change
    )


# ---- shares
def share(profile: Profile, *parts: str) -> float:
    """Return the share of the step that these parts take."""
    return (
        sum(profile["step"]["parts_s"].get(part, 0.0) for part in parts) / profile["step"]["step_s"]
    )


def _share_in_words(profile: Profile, *parts: str) -> str:
    """Return the share of these parts in words: `22 % of the step (7.1 ms)`."""
    taken = share(profile, *parts)
    return f"{percent(taken)} of the step ({milliseconds(taken * profile['step']['step_s'])})"


def _set(config: Systems, knob: str) -> Any:
    """Return the value of a knob that not every workload has; None without it."""
    return cfg.flat(config).get(knob)


def _cuda(profile: Profile) -> bool:
    return profile["device"]["type"] == "cuda"


# ---- rules
def waiting_for_data(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on batches that come too late."""
    if config.loader.resident or (waited := share(profile, "data_wait")) <= WAIT:
        return
    reason, device = (
        f"waiting for {profile['unit']} is {_share_in_words(profile, 'data_wait')}",
        profile["device"],
    )
    size = profile["samples"]["mib"]  # 0 where they are no tensors
    if size and (not _cuda(profile) or size < 0.1 * device["memory_mib"]):
        resident = f"{reason}; all {profile['unit']} take {number(size)} MiB"
        yield Advice({"loader.resident": True}, resident, amdahl(waited))
    more = min(max(2, 2 * config.loader.workers), device["cores"])
    if more > config.loader.workers and (_cuda(profile) or config.loader.workers):
        yield Advice(
            {"loader.workers": more}, f"{reason}; {device['cores']} cores can load", amdahl(waited)
        )


def little_reserve(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on a loader that is only just fast enough."""
    ratio, workers = profile["feed_ratio"], config.loader.workers
    if ratio is None or ratio >= RESERVE or share(profile, "data_wait") > WAIT:
        return
    if workers < (more := min(2 * workers, profile["device"]["cores"])):
        reason = f"the loader feeds only {ratio:.1f}× what the model takes"
        yield Advice(
            {"loader.workers": more}, f"{reason}: anything that makes the model faster waits for it"
        )


def copying(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on batches that reach the GPU slowly."""
    if (
        config.loader.resident
        or not _cuda(profile)
        or (copied := share(profile, "host_to_device")) <= WAIT
    ):
        return
    reason = (
        f"bringing {profile['unit']} to the GPU is {_share_in_words(profile, 'host_to_device')}"
    )
    if config.loader.transfer == "float32":
        yield Advice(
            {"loader.transfer": "uint8"}, f"{reason}; bytes are a quarter of it", amdahl(copied)
        )
    yield Advice({"loader.pin_memory": True, "loader.non_blocking": True}, reason, amdahl(copied))


def fused_optimizer(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on an update that is a large part of the step, or makes the host wait for the
    device."""
    if _set(config, "optimizer.implementation") == "fused":
        return
    change, taken = {"optimizer.implementation": "fused"}, share(profile, "optimizer")
    # Muon's own step always waits.
    if (
        _cuda(profile)
        and config.precision.amp == "fp16"
        and _set(config, "optimizer.name") != "muon"
    ):
        yield Advice(
            change,
            "loss scaling waits at each step for whether the gradients are finite; fused does not",
        )
    elif taken > OPTIMIZER:
        yield Advice(
            change, f"the update is {_share_in_words(profile, 'optimizer')}", amdahl(taken)
        )


def adaptive_sampler(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on a timestep sampler that needs passes of its own."""
    interval = _set(config, "timesteps.interval")
    if interval is not None and (taken := share(profile, "sampler")) > SAMPLER:
        reason = (
            f"the timestep sampler is {_share_in_words(profile, 'sampler')}; half as many updates"
            " of its policy"
        )
        yield Advice({"timesteps.interval": 2 * interval}, reason, amdahl(taken / 2))


def number_formats(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on arithmetic in float32 on hardware that has faster units."""
    computing, gains = share(profile, "forward", "backward"), profile["format_gains"]
    if config.precision.amp != "none" or computing < 0.5:
        return
    reason = (
        f"forward and backward are {_share_in_words(profile, 'forward', 'backward')}, in float32"
    )
    products = {"precision.matmul": "high"} | (
        {} if config.precision.conv_tf32 else {"precision.conv_tf32": True}
    )
    in_tf32 = profile["operations"]["convolution_share"] if config.precision.conv_tf32 else 0.0
    had = 1 + in_tf32 * (gains.get("tf32", 1.0) - 1)  # convolutions are as fast as that already
    if "peak_share" in profile["step"]:
        reason += f" at {percent(profile['step']['peak_share'])} of the fastest product"
    amp = next((name for name in ("bf16", "fp16") if gains.get(name, 0.0) > USEFUL), None)
    layout = {"memory.channels_last": True} if _cuda(profile) else {}
    # What waits for memory instead of arithmetic gains by autocast as well: half the bytes, so up
    # to a factor of 2.
    for name, least, change in (
        (amp, 2.0, {"precision.amp": amp, **layout}),
        ("tf32" if config.precision.matmul == "highest" else None, 1.0, products),
    ):
        if name is not None and (gain := gains.get(name, 0.0) / had) > USEFUL:
            faster = f"{reason}; a product in {name} is {gains[name]:.1f}× as fast here"
            yield Advice(change, faster, amdahl(computing, max(least, gain)))


def convolutions(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on a step of mostly convolutions: memory format and choice of algorithm decide."""
    taken = profile["operations"]["convolution_share"] * share(profile, "forward", "backward")
    if taken < CONVOLUTIONS:
        return
    reason = f"convolutions are about {percent(taken)} of the step"
    # On a GPU in float32 the rule on number formats has it already, together with AMP.
    if _set(config, "memory.channels_last") is False and not (
        _cuda(profile) and config.precision.amp == "none"
    ):
        yield Advice(
            {"memory.channels_last": True},
            f"{reason}; NHWC is another order for them",
            amdahl(taken),
        )
    if not config.precision.cudnn_benchmark:
        yield Advice(
            {"precision.cudnn_benchmark": True}, f"{reason}; shapes never change", amdahl(taken)
        )


def launch_bound(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on a GPU that waits for the host to launch its kernels."""
    busy = profile.get("device_busy_share", 1.0)
    if busy < BUSY and config.compile.mode not in ("reduce-overhead", "max-autotune"):
        reason = f"the GPU computes {percent(busy)} of the time; the rest it waits to be told"
        graphs = f"{reason}; CUDA graphs launch all at once"
        yield Advice({"compile.mode": "reduce-overhead"}, graphs, 1 / max(busy, 0.01))


def memory(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on too little memory, or on memory that is saved without need."""
    used = held_mib(profile["step"]) / profile["device"]["memory_limit_mib"]
    levels = _set(config, "model.checkpoint_levels") or []
    sentence, passes = (
        f"training takes {percent(used)} of the memory it may have",
        config.loader.accumulation,
    )
    if used > 0.85 and 0 not in levels:
        yield Advice(
            {"model.checkpoint_levels": [0, *levels]},
            f"{sentence}; slower, but room for a larger batch",
        )
    if used < 0.5 and levels:
        yield Advice(
            {"model.checkpoint_levels": []},
            f"{sentence}: nothing needs to be computed twice",
            4 / 3,
        )
    if passes > 1 and used * passes < 0.8:
        yield Advice({"loader.accumulation": 1}, f"{sentence}: the batch needs no {passes} passes")


def more_gpus(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on GPUs that do nothing."""
    gpus = profile["device"]["gpus"]
    if gpus > 1 and profile["workers"] == 1 and config.loader.batch_size % gpus == 0:
        yield Advice({"parallel.workers": gpus}, f"one of {gpus} GPUs is used", float(gpus))


RULES: tuple[Callable[[Profile, Systems], Iterator[Advice]], ...] = (
    waiting_for_data, little_reserve, copying, fused_optimizer, adaptive_sampler, number_formats,
    convolutions, launch_bound, memory, more_gpus,
)  # fmt: skip
