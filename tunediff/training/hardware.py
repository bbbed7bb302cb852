"""What the machine could do, what a model asks of it, and who else was using it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn

from tunediff.core.environment import install_command
from tunediff.training.precision import float32_formats

DISTURBED = 0.15
"""Share of the machine's cores that others used, and share of its own time this process then waited
for a core, from which a measurement counts as disturbed."""


# ---- arithmetic
_peaks: dict[tuple[torch.device, torch.dtype | None, str], float] = {}


def peak_flops_per_s(device: torch.device, dtype: torch.dtype | None, matmul: str) -> float:
    """Return FLOP/s of the fastest square matrix product measured here: the most that a training
    can reach.

    `dtype`: that of autocast, None for float32, which `matmul`
    (`torch.set_float32_matmul_precision`) may hand to faster units. Half a second or less; the best
    of this process counts, since others may disturb a single look. A format that the device only
    emulates does not lower its roof: float32 counts as well. What it took stays with the allocator,
    until `memory.reset`.
    """
    best = 0.0
    with float32_formats(matmul, conv_tf32=False):
        for number_format in {None, dtype}:
            key = (device, number_format, matmul)
            _peaks[key] = max(
                _peaks.get(key, 0.0), fastest_product(device, number_format or torch.float32)
            )
            best = max(best, _peaks[key])
    return best


def fastest_product(device: torch.device, dtype: torch.dtype) -> float:
    """Return the highest FLOP/s of a @ b at the present matmul precision over some sizes; constant
    numbers would need less power, and a GPU is faster."""
    generator = torch.Generator(device).manual_seed(
        0
    )  # its own: what a training draws stays as it is
    best, taken = 0.0, [0.0]
    for size in (1024, 2048, 4096, 8192) if device.type == "cuda" else (256, 512, 1024):
        if min(taken) > 0.02:  # a larger one would take long, and tells nothing more
            break
        a, b = torch.randn(2, size, size, device=device, dtype=dtype, generator=generator)
        a @ b  # libraries load, workspaces are allocated
        taken, until = [], time.perf_counter() + 0.06
        while len(taken) < 3 or (time.perf_counter() < until and len(taken) < 50):
            begin = time.perf_counter()
            a @ b
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - begin)
        best = max(best, 2.0 * size**3 / min(taken))
    return best


def faster_in_nhwc(model: nn.Module, setting: bool | str, dtype: torch.dtype | None = None) -> bool:
    """Return whether to train a model in NHWC, by `memory.channels_last`; `auto` is measured here
    and now."""
    if setting != "auto":
        return bool(setting)
    return channels_last_gain(model, next(model.parameters()).device, dtype) > 1


@torch.inference_mode(False)
@torch.enable_grad()
def channels_last_gain(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> float:
    """Return how many times as fast the model's most frequent convolution is in NHWC as in NCHW,
    both passes, on feature maps of 16×16, under autocast to `dtype`; 0 where it has none. The two
    take turns, the best of each counts: tens of milliseconds. A GPU has more maps, and several
    passes between two looks at the clock, since one pass of few takes as long as starting it. The
    caller may have switched gradients off."""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    alike = Counter(
        (convolution.weight.shape, convolution.stride, convolution.groups)
        for convolution in convolutions
    )
    if not alike:
        return 0.0
    (shape, stride, groups), _ = alike.most_common(1)[0]
    maps, passes = (128, 20) if device.type == "cuda" else (8, 1)
    taken: dict[torch.memory_format, list[float]] = {
        torch.contiguous_format: [],
        torch.channels_last: [],
    }
    for _, (order, seconds) in itertools.product(range(8), taken.items()):
        x, weight = (
            torch.ones(maps, shape[1] * groups, 16, 16, device=device),
            torch.ones(shape, device=device),
        )
        x, weight = (tensor.to(memory_format=order).requires_grad_() for tensor in (x, weight))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(passes):
            with torch.autocast(
                device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None
            ):
                y = F.conv2d(x, weight, None, stride, shape[-1] // 2, groups=groups)
            y.float().mean().backward()  # type: ignore[no-untyped-call]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    plain, last = (min(seconds[1:]) for seconds in taken.values())  # the first loads libraries
    return plain / last


# ---- energy
POWERCAP = Path("/sys/class/powercap")
"""Where Linux has the energy counters of CPUs (RAPL); often only root may read them."""
NO_ENERGY = (
    f"a GPU needs NVML ({install_command('energy')}) and its energy counter, a CPU readable"
    f" counters in {POWERCAP}"
)


class EnergyMeter:
    """Joules of the devices that a rank trains on; None where nothing here counts them.

    A GPU: NVML's counter of it, from Volta on; needs the optional dependency `nvidia-ml-py` (the
    extra `energy`). A CPU: the RAPL counters of all its packages, which hold whatever else runs on
    them.
    """

    def __init__(self, device: torch.device, count: int = 1) -> None:
        """`count`: GPUs, of which `device` is the first."""
        self.own = device.type == "cuda"
        """Whether no other rank of this machine reads the same counter."""
        several = (
            [torch.device("cuda", (device.index or 0) + number) for number in range(count)]
            if self.own
            else []
        )
        self._read = _together([_nvml(gpu) for gpu in several]) if self.own else _rapl(POWERCAP)

    def joules(self) -> float | None:
        """Return the counter's value; only differences mean something. Call it every few minutes at
        least."""
        if self._read is None:
            return None
        try:
            return self._read()
        except Exception:
            return None


def _together(counters: list[Callable[[], float] | None]) -> Callable[[], float] | None:
    readable = [counter for counter in counters if counter is not None]
    return (
        (lambda: sum(counter() for counter in readable)) if len(readable) == len(counters) else None
    )


def _nvml(device: torch.device) -> Callable[[], float] | None:
    with contextlib.suppress(
        Exception
    ):  # NVML has many ways to be absent; none of them may cost a training
        import pynvml

        pynvml.nvmlInit()
        # By its UUID: CUDA_VISIBLE_DEVICES renumbers the devices for torch but not for NVML.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # not before Volta
        return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000
    return None


def _rapl(folder: Path) -> Callable[[], float] | None:
    """Return a function of the joules of all CPU packages; their counters (µJ) wrap at
    `max_energy_range_uj`."""
    packages = sorted(
        path.parent
        for path in folder.glob("*-rapl:*/energy_uj")
        if path.parent.name.count(":") == 1
    )

    def counters() -> list[list[int]]:
        names = "energy_uj", "max_energy_range_uj"
        return [[int((package / name).read_text()) for name in names] for package in packages]

    try:
        before = counters()
    except (OSError, ValueError):
        return None
    total = 0.0

    def read() -> float:
        nonlocal before, total
        last, before = before, counters()
        for (old, _), (new, largest) in zip(last, before, strict=True):
            total += (new - old + (largest if new < old else 0)) / 1e6
        return total

    return read if packages else None


# ---- neighbours
@dataclasses.dataclass(frozen=True)
class Usage:
    """CPU seconds since some moment: of all processes on the machine, and of a training's own."""

    wall_s: float
    machine_s: float
    own_s: float
    """This process and its descendants, loader processes among them."""
    waited_s: float
    """How long threads of this process stood ready to run without getting a core; 0 where the
    kernel does not tell."""

    @classmethod
    def now(cls) -> Usage:
        """Return the usage as of now; takes a few milliseconds."""
        times = psutil.cpu_times()
        # What a guest uses is part of user; idle and iowait are the rest.
        machine = (
            times.user
            + times.system
            + sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq"))
        )
        return cls(time.monotonic(), machine, _own_cpu_s(), _waited_s())

    def since(self, before: Usage) -> Usage:
        """Return the usage since an earlier one."""
        return Usage(
            **{
                field.name: max(0.0, getattr(self, field.name) - getattr(before, field.name))
                for field in dataclasses.fields(self)
            }
        )


def _own_cpu_s() -> float:
    process = psutil.Process()
    total = 0.0
    for member in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = member.cpu_times()
            # Processes that have ended, such as the loader's of an earlier pass, count as their
            # parent's children.
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _waited_s() -> float:
    """Run delay of all threads: the second number of Linux's schedstat, in nanoseconds."""
    total = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for path in Path("/proc/self/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                total += int(path.read_text().split()[1])
    return total / 1e9


def disturbance(used: Usage, own_s: float, cores: int) -> dict[str, Any]:
    """Return `other_load_share`: the share of the cores that others used; `core_wait_share`: how
    much of its own time this process waited for a core; `disturbed`: both are large, so the seconds
    measured are not this training's alone.

    `own_s` sums over the ranks on this machine. Others that use cores which a training leaves idle
    do not disturb it; threads of a training that wait for each other's cores are its own affair.
    """
    others = max(0.0, used.machine_s - own_s) / max(1e-9, used.wall_s * cores)
    waited = used.waited_s / max(1e-9, used.own_s + used.waited_s)
    return {
        "other_load_share": min(1.0, others),
        "core_wait_share": waited,
        "disturbed": bool(others > DISTURBED and waited > DISTURBED),
    }
