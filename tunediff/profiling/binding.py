"""Say in one sentence what binds a step, its share of the measured peak, and a knob to try."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Literal

from tunediff import config as cfg
from tunediff.config import ConfigError, Systems, Values
from tunediff.core.point import Point
from tunediff.core.text import knobs
from tunediff.profiling.result import Profile

WAITING = 0.1
"""Share of the step from which loader waits bind it, on a device that idles no longer."""
BUSY = 0.7
"""Share of the step below which a device that has its data waits for the host."""
ARITHMETIC = 0.35
"""Share of the peak from which arithmetic binds: what good small networks reach."""

Part = Literal["loader", "host", "arithmetic", "memory", "device"]
KNOBS: dict[Part, Sequence[Values]] = {
    "loader": ({"loader.resident": True}, {"loader.workers": 4}, {"loader.pin_memory": True}),
    "host": ({"compile.capture": "step"}, {"compile.mode": "reduce-overhead"}),
    "arithmetic": ({"precision.amp": "bf16"}, {"precision.matmul": "high"},
    {"precision.cudnn_benchmark": True}),
    "memory": ({"memory.channels_last": True}, {"precision.amp": "bf16"},
    {"compile.mode": "default"}),
    "device": (),
}  # fmt: skip
"""What to try first where nothing but the parts of the step is known, the best first."""


@dataclasses.dataclass(frozen=True)
class StepParts:
    """Measured seconds of a mean step, and what its device can do; None: not measured."""

    step_s: float
    loader_s: float = 0.0
    """Waiting for batches, and bringing them to the device."""
    flops: float | None = None
    """Arithmetic of a step."""
    peak_flops_per_s: float | None = None
    """Of the fastest matrix product."""
    busy_s: float | None = None
    """Seconds in which a GPU computes."""

    @property
    def arithmetic(self) -> float | None:
        """Return the share of the peak arithmetic that the step reaches."""
        if self.flops is None or not self.peak_flops_per_s:
            return None
        return self.flops / self.peak_flops_per_s / self.step_s


@dataclasses.dataclass(frozen=True)
class Binding:
    """What binds a step."""

    part: Part
    """`device`: its arithmetic was not measured."""
    share: float
    """Of the step: waiting for the loader, or for the host; else computing."""
    peak_share: float | None
    """Share of the device's measured peak arithmetic."""

    def sentence(self, first: Values | None) -> str:
        """Return it in words, with the knobs to try first."""
        percent = f"{100 * self.share:.0f} % of the time"
        words = {
            "loader": f"the loader: the step waits for it {percent}",
            "host": f"the host: the device waits for it {percent}",
            "arithmetic": "arithmetic",
            "memory": "memory traffic and small operations",
            "device": "the device",
        }
        at = ""
        if self.peak_share is not None:
            at = f", at {100 * self.peak_share:.2g} % of the measured peak"
        return f"the step is bound by {words[self.part]}{at}" + (
            f"; try {knobs(first)}" if first else ""
        )


def binding(parts: StepParts) -> Binding:
    """Return what binds a step of these parts: whatever the device waits for longest; else its
    arithmetic from `ARITHMETIC` on, or memory."""
    waits = parts.loader_s / parts.step_s
    busy = None if parts.busy_s is None else parts.busy_s / parts.step_s
    idle = 0.0 if busy is None else max(0.0, 1.0 - busy - waits)
    arithmetic = parts.arithmetic
    if busy is not None and busy < BUSY and idle >= waits:
        return Binding("host", idle, arithmetic)
    if waits >= WAITING:
        return Binding("loader", waits, arithmetic)
    computing = 1.0 - waits - idle
    if arithmetic is None:
        return Binding("device", computing, None)
    part: Part = "arithmetic" if arithmetic >= ARITHMETIC else "memory"
    return Binding(part, computing, arithmetic)


def of_profile(profile: Profile) -> str:
    """Return the sentence of a profile, whose advice names the knob."""
    step = profile["step"]
    flops = step.get("flops_per_sample")
    parts = StepParts(
        step["step_s"],
        sum(step["parts_s"].get(name, 0.0) for name in ("data_wait", "host_to_device")),
        None if flops is None else flops * step["samples_per_s"] * step["step_s"],
        step.get("peak_flops_per_s"),
        profile.get("device_busy_s"),
    )
    advice = profile["advice"]
    return binding(parts).sentence(advice[0].change if advice else None)


def of_point(
    point: Point,
    config: Systems,
    device: str,
    busy_s: float | None,
    unread: Collection[str] = (),
) -> str:
    """Return the sentence of a training's point; `unread`: knobs without effect."""
    assert point.step_s is not None
    flops = point.flops_per_sample
    parts = StepParts(
        point.step_s,
        sum(point.phases_s.get(name, 0.0) for name in ("data_wait", "host_to_device")),
        None if flops is None else flops * point.samples_per_s * point.step_s,
        point.peak_flops_per_s,
        busy_s,
    )
    bound = binding(parts)
    return bound.sentence(first_possible(KNOBS[bound.part], config, device, unread))


def first_possible(
    changes: Sequence[Values], config: Systems, device: str, unread: Collection[str] = ()
) -> Values | None:
    """Return the first change that the configuration allows and that acts here, or None."""
    return next((change for change in changes if possible(change, config, device, unread)), None)


def possible(change: Values, config: Systems, device: str, unread: Collection[str] = ()) -> bool:
    """Return whether a configuration allows a change, which acts on the device and is none yet.

    `unread`: knobs that the workload does not follow.
    """
    try:
        changed = cfg.override(config, change)
    except ConfigError:  # not allowed, or no knob of this configuration
        return False
    idle = {*unread, *cfg.not_effective(changed, device)}
    return bool(cfg.differences(changed, config)) and not idle & change.keys()
