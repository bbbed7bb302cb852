"""Find the CPU cores and GPUs that this process may use: the one source for Ray, threads and
records."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tunediff.core.errors import ConfigError

log = logging.getLogger(__name__)

PART = "TUNEDIFF_CPUS"
"""Environment variable of `--cpus`: the most cores to use, in every process started from here."""
OMP = "OMP_NUM_THREADS"
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Set in every process that torchrun starts."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
TORCH_DEFAULT_THREADS: int | None = (
    sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
)
"""Threads of torch when tunediff was imported, as torch counts them by itself; None: torch was not
imported yet."""

WSL = Path("/usr/lib/wsl/lib")
"""Folder of the driver's files in Linux under Windows."""


def cores() -> int:
    """Return how many CPU cores this process may use, by its affinity, the quota of its cgroups and
    `--cpus`."""
    return cores_of(_affinity(), quota(), os.environ)


def cores_of(affinity: int, allowed: float, environ: Mapping[str, str]) -> int:
    """Return the usable cores, at least 1. `affinity`: cores; `allowed`: quota in cores (2.5 gives
    2)."""
    part = environ.get(PART, "")
    return max(1, math.floor(min(affinity, allowed, int(part) if part.isdigit() else math.inf)))


def threads() -> int | None:
    """Return the torch threads of this process: its share of `cores`, as workers of a search have
    it.

    The processes that torchrun has started on this machine share them. None: the user has chosen,
    by OMP_NUM_THREADS or MKL_NUM_THREADS.
    """
    chosen = os.environ.get(OMP)
    by_us = chosen in (None, os.environ.get(PART)) or (chosen == "1" and _torchrun_has_chosen())
    if not by_us or "MKL_NUM_THREADS" in os.environ:
        return None
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _torchrun_has_chosen() -> bool:
    """Return whether OMP_NUM_THREADS is torchrun's: it gives 1 to several processes if its own
    environment has none.

    False where that environment cannot be read.
    """
    if _OF_TORCHRUN not in os.environ:
        return False
    with contextlib.suppress(psutil.Error, OSError):
        for process in psutil.Process().parents():
            began_with = process.environ()  # what a process has set later is not in it
            if _OF_TORCHRUN not in began_with:
                return OMP not in began_with
    return False


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(mounted: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Return the CPU seconds per second that the cgroups (v1 or v2) of this process allow; inf: no
    limit.

    Inside a container the path in `own` may be that of the host, which does not exist there; then
    the root is the container's own group.
    """
    allowed = math.inf
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return allowed
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mounted / "cpu" if controllers else mounted
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                allowed = min(allowed, _limit(folder))
    return allowed


def _limit(group: Path) -> float:
    """Read a group's limit. v2: `cpu.max` is `200000 100000` or `max 100000`; v1: two files, -1 is
    no limit."""
    try:
        if (both := group / "cpu.max").exists():
            limit, period = both.read_text().split()
        else:
            limit, period = (
                (group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        share = int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
    return share if share > 0 else math.inf


HALVES = {
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}
"""Values of `precision.amp`, and the CPU features (x86, ARM) that compute in that format, as Linux
names them."""


def emulated(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return the values of `precision.amp` that this CPU only emulates; empty if that is not known.

    With AVX-512 the emulation reaches nine tenths of the speed of float32; with AVX2 alone
    convolutions reach a tenth to a sixtieth.
    """
    with contextlib.suppress(OSError):
        words = set(cpuinfo.read_text().split())
        if words & {"avx2", "sse2", "fp"}:
            return {name for name, units in HALVES.items() if not words.intersection(units)}
    return set()


# ---- GPUs
def gpus() -> list[str]:
    """Return the CUDA devices that this process may use, as `CUDA_VISIBLE_DEVICES` names them.

    A part of a GPU that MIG has split is one where `CUDA_VISIBLE_DEVICES` names it.
    """
    return visible(_cards(), os.environ.get(VISIBLE))


def visible(cards: Sequence[str], chosen: str | None) -> list[str]:
    """Return which GPUs remain visible by `chosen`, the value of `CUDA_VISIBLE_DEVICES`; `cards`:
    UUIDs, '' if unknown.

    As the CUDA driver reads it (CUDA C++ Programming Guide, environment variables): the list ends
    at the first entry that names no device or that names it in another way than the first entry
    does. If a device is named twice, none is visible.
    """
    if chosen is None:
        return [str(index) for index in range(len(cards))]
    devices: list[str] = []
    for word in map(str.strip, chosen.split(",") if cards else ()):
        alike = word.isdigit() == (devices or [word])[0].isdigit()
        if not alike or not any(_names(word, index, card) for index, card in enumerate(cards)):
            break
        if word in devices:
            return []
        devices.append(word)
    return devices


def _names(word: str, index: int, uuid: str) -> bool:
    """Return whether `word` names this GPU, by index or (shortened) UUID, or a part of some GPU."""
    if word.isdigit():
        return int(word) == index
    return word.startswith("MIG-") or (
        word.startswith("GPU-") and (not uuid or uuid.startswith(word))
    )


def nvidia_smi() -> str | None:
    """Return the path of the nvidia-smi command; Windows installs it where its Linux does not
    always look."""
    return shutil.which(
        "nvidia-smi", path=os.pathsep.join((os.environ.get("PATH", os.defpath), str(WSL)))
    )


@functools.lru_cache(maxsize=1)
def _cards() -> tuple[str, ...]:
    """List the UUIDs of the GPUs by nvidia-smi, which omits those that a container or a batch
    system hides.

    If nvidia-smi is missing or fails, return as many GPUs as CUDA's driver counts: WSL and some
    containers have GPUs without device files.
    """
    if (command := nvidia_smi()) is not None:
        with contextlib.suppress(
            OSError, subprocess.SubprocessError
        ):  # no driver, or one that hangs
            done = subprocess.run(
                [command, "--list-gpus"], capture_output=True, text=True, timeout=60, check=True
            )
            return tuple(re.findall(r"UUID: (GPU-[^)\s]+)", done.stdout))
    return ("",) * _counted()


def _counted() -> int:
    """Count the GPUs with CUDA's driver in another process: one that has called it cannot fork any
    more."""
    environ = {name: value for name, value in os.environ.items() if name != VISIBLE}
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        ask = [sys.executable, "-S", "-E", "-c", _COUNT, str(WSL)]
        done = subprocess.run(
            ask, capture_output=True, text=True, timeout=60, check=True, env=environ
        )
        return int(done.stdout)
    return 0


_COUNT = """
import ctypes, sys
for path in ("libcuda.so.1", sys.argv[1] + "/libcuda.so.1"):
    try:
        cuda, count = ctypes.CDLL(path), ctypes.c_int()
    except OSError:
        continue
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
        break
else:
    sys.exit(1)
print(count.value)
"""


def unused() -> str:
    """Return why an NVIDIA GPU that seems to be present goes unused, unless that was requested; ''
    otherwise."""
    if _cards() or os.environ.get(VISIBLE) is not None or not (traces := signs()):
        return ""
    smi = "nvidia-smi lists none" if nvidia_smi() is not None else "there is no nvidia-smi"
    return (
        f"there seems to be an NVIDIA GPU ({', '.join(traces)}), but {smi} and CUDA's driver counts"
        " none: all runs on the CPU. Start the container with its GPUs, or install the driver;"
        " --gpus 0 says that it shall be so"
    )


def signs(root: Path = Path("/")) -> list[str]:
    """Return the traces of an NVIDIA GPU: devices, a driver, or a request in the environment."""
    places = (
        "dev/nvidia[0-9]*",
        "dev/nvidiactl",
        "proc/driver/nvidia/version",
        "usr/lib/wsl/lib/libcuda.so*",
    )
    traces = [
        f"/{path.relative_to(root)}" for place in places for path in sorted(root.glob(place))[:1]
    ]
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        with contextlib.suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == "0x10de" and kind.startswith("0x03"):  # NVIDIA, a display controller
                traces.append(f"PCI {device.name}")
    wish = os.environ.get("NVIDIA_VISIBLE_DEVICES", "")
    return [
        *traces,
        *([f"NVIDIA_VISIBLE_DEVICES={wish}"] if wish not in ("", "void", "none") else []),
    ]


def take(cpus: int | None, count: int | None) -> None:
    """Use only a part of this machine, in this process and every process that it starts; None: use
    everything.

    Raises `ConfigError` for more than is present.
    """
    have, devices = cores(), gpus()
    if cpus is not None:
        _allow("--cpus", cpus, 1, have, "CPU cores")
        os.environ[PART] = str(cpus)
        os.environ.setdefault(OMP, str(cpus))  # read when torch is first imported
    if count is not None:
        _allow("--gpus", count, 0, len(devices), "GPUs")
        os.environ[VISIBLE] = ",".join(devices[:count])


def _allow(option: str, value: int, least: int, most: int, unit: str) -> None:
    if not least <= value <= most:
        raise ConfigError(
            f"{option}: {value} is not allowed; allowed: {least} to {most}, the {unit} that are"
            " there"
        )
