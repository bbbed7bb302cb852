"""What to try next, by what a profile measured: knobs, and a reason with its number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Systems, Values
from tunediff.config.systems import CUDA_GRAPHS
from tunediff.core.text import number
from tunediff.profiling.tables import milliseconds, percent

Profile = Mapping[str, Any]
LARGE = 0.1
"""Share of the step from which a rule speaks; for waiting and copying half of it."""


@dataclasses.dataclass
class Advice:
    """Knobs to be set together, and why."""

    change: Values
    reason: str


def advise(profile: Profile, config: Systems, unread: Collection[str] = ()) -> list[Values]:
    """Return what to try next, `change` and `reason`; empty when nothing stands out.

    `profile`: a profile of `config`; `unread`: knobs that the workload does not follow. Nothing is
    advised that is on, is not allowed, or changes nothing on the device.
    """
    found = [advice for rule in RULES for advice in rule(profile, config)]
    device = profile["device"]["type"]
    return [
        dataclasses.asdict(advice)
        for advice in found
        if _possible(advice.change, config, device, unread)
    ]


def _possible(change: Values, config: Systems, device: str, unread: Collection[str]) -> bool:
    """Return whether a configuration allows a change, which acts on the device and is none yet."""
    try:
        changed = cfg.override(config, change)
    except ConfigError:  # not allowed, or no knob of this configuration
        return False
    idle = {*unread, *cfg.not_effective(changed, device)}
    return bool(cfg.differences(changed, config)) and not idle & change.keys()


def share(profile: Profile, *parts: str) -> float:
    """Return the share of the step that these parts take."""
    times: Mapping[str, float] = profile["step"]["parts_s"]
    return sum(times.get(part, 0.0) for part in parts) / float(profile["step"]["step_s"])


def _in_words(profile: Profile, *parts: str) -> str:
    """Return the share of these parts in words: `22 % of the step (7.1 ms)`."""
    taken = share(profile, *parts)
    return f"{percent(taken)} of the step ({milliseconds(taken * profile['step']['step_s'])})"


def _get(config: Systems, knob: str) -> Any:
    """Return the value of a knob; None if the workload does not have it."""
    return cfg.flat(config).get(knob)


def _cuda(profile: Profile) -> bool:
    return bool(profile["device"]["type"] == "cuda")


# ---- rules
def waiting_for_data(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on batches that come too late."""
    waited, device, loader = share(profile, "data_wait"), profile["device"], config.loader
    if loader.resident or waited <= LARGE / 2:
        return
    reason = f"waiting for {profile['unit']} is {_in_words(profile, 'data_wait')}"
    size_mib = profile["samples"]["mib"]  # 0 where they are no tensors
    if size_mib and (not _cuda(profile) or size_mib < 0.1 * device["memory_mib"]):
        all_samples = f"all {profile['unit']} take {number(size_mib)} MiB"
        yield Advice({"loader.resident": True}, f"{reason}; {all_samples}")
    workers = min(max(2, 2 * loader.workers), device["cores"])
    if workers > loader.workers and (_cuda(profile) or loader.workers):
        cores = f"{device['cores']} cores can load"
        yield Advice({"loader.workers": workers}, f"{reason}; {cores}")


def copying(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on batches that reach the GPU slowly."""
    copied = share(profile, "host_to_device")
    if config.loader.resident or not _cuda(profile) or copied <= LARGE / 2:
        return
    reason = f"bringing {profile['unit']} to the GPU is {_in_words(profile, 'host_to_device')}"
    if config.loader.transfer == "float32":
        quarter = f"{reason}; bytes are a quarter of it"
        yield Advice({"loader.transfer": "uint8"}, quarter)
    yield Advice({"loader.pin_memory": True, "loader.non_blocking": True}, reason)


def fused_optimizer(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on an update that is a large part of the step, or makes the host wait."""
    change, taken = {"optimizer.implementation": "fused"}, share(profile, "optimizer")
    scaled = _cuda(profile) and config.precision.amp == "fp16"
    if scaled and _get(config, "optimizer.name") != "muon":  # whose own step always waits
        waits = "loss scaling waits at each step for whether the gradients are finite"
        yield Advice(change, f"{waits}; fused does not")
    elif taken > LARGE:
        reason = f"the update is {_in_words(profile, 'optimizer')}"
        yield Advice(change, reason)


def number_formats(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on arithmetic in float32 on hardware that has faster units."""
    computing, gains = share(profile, "forward", "backward"), profile["format_gains"]
    precision = config.precision
    if precision.amp != "none" or computing < 0.5:
        return
    reason = f"forward and backward are {_in_words(profile, 'forward', 'backward')}, in float32"
    if "peak_share" in profile["step"]:
        reason += f" at {percent(profile['step']['peak_share'])} of the fastest product"
    # Convolutions in TF32 are as fast as that already.
    in_tf32 = profile["convolution_share"] if precision.conv_tf32 else 0.0
    now = 1 + in_tf32 * (gains.get("tf32", 1.0) - 1)

    def faster(name: str, change: Values) -> Iterator[Advice]:
        if gains.get(name, 0.0) / now > 1.2:
            product = f"a product in {name} is {gains[name]:.1f}× as fast here"
            yield Advice(change, f"{reason}; {product}")

    amp = "bf16" if gains.get("bf16", 0.0) > 1.2 else "fp16"
    layout = {"memory.channels_last": True} if _cuda(profile) else {}
    yield from faster(amp, {"precision.amp": amp, **layout})
    if precision.matmul == "highest":
        convolutions = {} if precision.conv_tf32 else {"precision.conv_tf32": True}
        yield from faster("tf32", {"precision.matmul": "high", **convolutions})


def convolutions(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on a step of mostly convolutions: memory format and choice of algorithm decide."""
    taken = profile["convolution_share"] * share(profile, "forward", "backward")
    if taken < 0.3:
        return
    reason = f"convolutions are about {percent(taken)} of the step"
    with_amp = _cuda(profile) and config.precision.amp == "none"  # then `number_formats` has it
    if not config.memory.channels_last and not with_amp:
        order = f"{reason}; NHWC is another order for them"
        yield Advice({"memory.channels_last": True}, order)
    fixed = f"{reason}; shapes never change"
    if not config.precision.cudnn_benchmark:
        yield Advice({"precision.cudnn_benchmark": True}, fixed)


def launch_bound(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on a GPU that waits for the host to launch its kernels."""
    busy = profile.get("device_busy_share", 1.0)
    captured = config.compile.capture != "none" or config.compile.mode in CUDA_GRAPHS
    if busy < 0.7 and not captured:
        reason = f"the GPU computes {percent(busy)} of the time; the rest it waits to be told"
        graphs = f"{reason}; a CUDA graph launches all at once"
        alone = config.parallel.workers == 1
        change = {"compile.capture": "step"} if alone else {"compile.mode": "reduce-overhead"}
        yield Advice({**change}, graphs)


def memory(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on too little memory, or on memory that is saved without need."""
    step = profile["step"]
    held_mib = step.get("peak_reserved_mib", step["peak_memory_mib"])
    used = held_mib / profile["device"]["memory_limit_mib"]
    levels, passes = _get(config, "model.checkpoint_levels") or [], config.loader.accumulation
    reason = f"training takes {percent(used)} of the memory it may have"
    if used > 0.85 and 0 not in levels:
        room = f"{reason}; slower, but room for a larger batch"
        yield Advice({"model.checkpoint_levels": [0, *levels]}, room)
    if used < 0.5 and levels:
        once = f"{reason}: nothing needs to be computed twice"
        yield Advice({"model.checkpoint_levels": []}, once)
    if passes > 1 and used * passes < 0.8:
        yield Advice({"loader.accumulation": 1}, f"{reason}: the batch needs no {passes} passes")


def more_gpus(profile: Profile, config: Systems) -> Iterator[Advice]:
    """Advise on GPUs that do nothing."""
    gpus = profile["device"]["gpus"]
    if gpus > 1 and profile["workers"] == 1 and config.loader.batch_size % gpus == 0:
        yield Advice({"parallel.workers": gpus}, f"one of {gpus} GPUs is used")


RULES: tuple[Callable[[Profile, Systems], Iterator[Advice]], ...] = (
    more_gpus,
    launch_bound,
    waiting_for_data,
    copying,
    number_formats,
    convolutions,
    fused_optimizer,
    memory,
)
