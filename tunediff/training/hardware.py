"""What the machine could do, what a model asks of it, and who else was using it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import psutil
import torch

from tunediff.distributed import alone
from tunediff.training.precision import float32_formats

DISTURBED = 0.15
"""Share of the machine's cores that others used, from which a measurement counts as disturbed where
less than that was left idle."""


# ---- arithmetic
def peak_flops_per_s(device: torch.device, dtype: torch.dtype | None, matmul: str) -> float:
    """Return FLOP/s of the fastest square matrix product: the most a training can reach.

    `dtype`: that of autocast, None for float32, which `matmul`
    (`torch.set_float32_matmul_precision`) may hand to faster units. Takes half a second or less;
    its memory stays with the allocator until `memory.reset`.
    """
    with float32_formats(matmul, conv_tf32=False):
        # Float32 counts as well: the device may only emulate another format.
        formats = {torch.float32, dtype or torch.float32}
        return max(fastest_product(device, number_format) for number_format in formats)


def fastest_product(device: torch.device, dtype: torch.dtype) -> float:
    """Return the highest FLOP/s of a @ b at the present matmul precision over some sizes."""
    # Random numbers: constant ones need less power, and a GPU is faster with them. From a generator
    # of their own, so that what the training draws stays as it is.
    generator = torch.Generator(device).manual_seed(0)
    best, seconds = 0.0, [0.0]
    for size in (1024, 2048, 4096, 8192) if device.type == "cuda" else (256, 512, 1024):
        if min(seconds) > 0.02:  # a larger one takes long and is not faster
            break
        a, b = torch.randn(2, size, size, device=device, dtype=dtype, generator=generator)
        a @ b  # libraries load, workspaces are allocated
        seconds, until = [], time.perf_counter() + 0.06
        while len(seconds) < 3 or (time.perf_counter() < until and len(seconds) < 50):
            began = time.perf_counter()
            a @ b
            alone(device).synchronize()
            seconds.append(time.perf_counter() - began)
        best = max(best, 2.0 * size**3 / min(seconds))
    return best


# ---- other processes
@dataclasses.dataclass(frozen=True)
class Usage:
    """CPU seconds since some moment: of all processes on the machine, and of a training's own."""

    wall_s: float
    machine_s: float
    own_s: float
    """This process and its descendants, loader processes among them."""

    @classmethod
    def now(cls) -> Usage:
        """Return the usage as of now; takes a few milliseconds."""
        times = psutil.cpu_times()
        # What a guest uses is part of user; idle and iowait are the rest.
        names = ("user", "system", "nice", "irq", "softirq")
        machine_s = sum(getattr(times, name, 0.0) for name in names)
        return cls(time.monotonic(), machine_s, _own_cpu_s())

    def since(self, before: Usage) -> Usage:
        """Return the usage since an earlier one."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(before), strict=True)
        return Usage(*(max(0.0, now - then) for now, then in pairs))


def _own_cpu_s() -> float:
    process, total = psutil.Process(), 0.0
    for member in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = member.cpu_times()
            # Processes that have ended, such as loaders of an earlier pass, count as children.
            total += times.user + times.system + times.children_user + times.children_system
    return total


def disturbance(used: Usage, own_s: float, cores: int) -> dict[str, Any]:
    """Return `other_load_share`: the share of the cores that others used; `disturbed`: it is large
    and left next to no core idle, so the seconds measured are not this training's alone.

    `own_s` sums over the ranks on this machine. Others that use cores which a training leaves idle
    do not disturb it.
    """
    available_s = max(1e-9, used.wall_s * cores)
    others = min(1.0, max(0.0, used.machine_s - own_s) / available_s)
    idle = 1.0 - used.machine_s / available_s
    return {"other_load_share": others, "disturbed": others > DISTURBED > idle}
