"""Find the CPU cores and GPUs that this process may use, for Ray, threads and records."""

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

from tunediff.core.errors import ConfigError

log = logging.getLogger(__name__)

PART = "TUNEDIFF_CPUS"
"""Environment variable of `--cpus`: the most cores to use, in every process started from here."""
OMP = "OMP_NUM_THREADS"
VISIBLE = "CUDA_VISIBLE_DEVICES"
TORCH_DEFAULT_THREADS: int | None = (
    sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
)
"""torch's number of threads when tunediff was imported; None: torch was not imported."""

SPINS = "GOMP_SPINCOUNT"
"""Environment variable that torch's threads read when torch is first imported."""

WSL, DEVICES = Path("/usr/lib/wsl/lib"), Path("/dev")
"""Folder of the driver's files in Linux under Windows, and of devices."""


def limit_spinning() -> None:
    """Bound how long OpenMP threads wait busily for each other, unless the user has set that.

    By default it is billions of rounds. Alone that costs nothing; beside any other load on the same
    cores it stops training almost completely (measured with 2 threads on 2 cores, images/s, alone
    and beside a second training: default 4,190 and 0; 3,000 rounds 4,050 and 490).
    """
    os.environ.setdefault(SPINS, "3000")


def cores() -> int:
    """Return the cores this process may use: by affinity, quota of cgroups, and `--cpus`."""
    return cores_of(_affinity(), quota(), os.environ)


def cores_of(affinity: int, allowed: float, environ: Mapping[str, str]) -> int:
    """Return the usable cores, at least 1, of `affinity` cores and a quota (2.5 gives 2)."""
    part = environ.get(PART, "")
    return max(1, math.floor(min(affinity, allowed, int(part) if part.isdigit() else math.inf)))


def threads() -> int | None:
    """Return torch's threads here: this process's share of `cores`, as for a trial's worker.

    The processes that torchrun has started on this machine share them. None: the user has chosen,
    by OMP_NUM_THREADS or MKL_NUM_THREADS; torchrun itself sets the former to 1.
    """
    chosen = os.environ.get(OMP)
    by_torchrun = chosen == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    by_us = by_torchrun or chosen in (None, os.environ.get(PART))
    if not by_us or "MKL_NUM_THREADS" in os.environ:
        return None
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(
    mounted: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> float:
    """Return the CPU seconds per second that this process's cgroups allow; inf: no limit.

    Inside a container the path in `groups` may be that of the host, which does not exist there;
    then the root is the container's own group.
    """
    allowed = math.inf
    with contextlib.suppress(OSError):  # not Linux
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = mounted / "cpu" if controllers else mounted
            group = root / path.strip("/")
            above = [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
            allowed = min([allowed, *map(_limit, above)])
    return allowed


def _limit(group: Path) -> float:
    """Read a group's limit. v2: `cpu.max`, `200000 100000` or `max 100000`; v1: two files."""
    try:
        if (both := group / "cpu.max").exists():
            limit, period = both.read_text().split()
        else:
            limit = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        share = int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
    return share if share > 0 else math.inf


HALVES = {
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}
"""Values of `precision.amp`, and the CPU features that compute in that format."""


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
    return visible(cards(), os.environ.get(VISIBLE))


def visible(cards: Sequence[str], chosen: str | None) -> list[str]:
    """Return which GPUs `CUDA_VISIBLE_DEVICES=chosen` leaves; `cards`: UUIDs, '' if unknown.

    As the CUDA driver reads it (CUDA C++ Programming Guide, environment variables): the list ends
    at the first entry that names no device or that names it in another way than the first entry
    does. If a device is named twice, none is visible.
    """
    if chosen is None:
        return [str(index) for index in range(len(cards))]
    devices: list[str] = []
    for word in map(str.strip, chosen.split(",") if cards else ()):
        same_form = word.isdigit() == (devices or [word])[0].isdigit()
        if not same_form or not any(_names(word, index, card) for index, card in enumerate(cards)):
            break
        if word in devices:
            return []
        devices.append(word)
    return devices


def _names(word: str, index: int, uuid: str) -> bool:
    """Return whether `word` names this GPU, by index or (shortened) UUID, or a part of some GPU."""
    if word.isdigit():
        return int(word) == index
    is_uuid = word.startswith("GPU-") and (not uuid or uuid.startswith(word))
    return is_uuid or word.startswith("MIG-")


def nvidia_smi() -> str | None:
    """Return the path of nvidia-smi; Windows installs it where its Linux may not look."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), str(WSL)))
    return shutil.which("nvidia-smi", path=path)


@functools.lru_cache(maxsize=1)
def cards() -> tuple[str, ...]:
    """List the UUIDs of the GPUs by nvidia-smi, which omits those that a container or a batch
    system hides. Where it is missing or fails, each device file is one, of unknown UUID."""
    if (command := nvidia_smi()) is not None:
        # Without a driver it fails, and with a broken one it may hang.
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [command, "--list-gpus"], capture_output=True, text=True, timeout=60, check=True
            )
            return tuple(re.findall(r"UUID: (GPU-[^)\s]+)", done.stdout))
    return ("",) * len(list(DEVICES.glob("nvidia[0-9]*")))


def unused() -> str:
    """Return why an NVIDIA GPU that seems present is not used, unless that was asked; or ''."""
    if cards() or os.environ.get(VISIBLE) is not None or not (traces := signs()):
        return ""
    smi = "nvidia-smi lists none" if nvidia_smi() is not None else "there is no nvidia-smi"
    return (
        f"there seems to be an NVIDIA GPU ({', '.join(traces)}), but {smi}:"
        " all runs on the CPU. Start the container with its GPUs, or install the driver;"
        " --gpus 0 says that it shall be so"
    )


def signs(root: Path = Path("/")) -> list[str]:
    """Return the traces of an NVIDIA GPU: devices, a driver, or a request in the environment."""
    patterns = (
        "dev/nvidia[0-9]*",
        "dev/nvidiactl",
        "proc/driver/nvidia/version",
        "usr/lib/wsl/lib/libcuda.so*",
    )
    traces = [path for pattern in patterns for path in sorted(root.glob(pattern))[:1]]
    request = os.environ.get("NVIDIA_VISIBLE_DEVICES", "")
    requested = [] if request in ("", "void", "none") else [f"NVIDIA_VISIBLE_DEVICES={request}"]
    return [*(f"/{path.relative_to(root)}" for path in traces), *requested]


def take(cpus: int | None, count: int | None) -> None:
    """Limit this process and all that it starts to a part of the machine; None: no limit.

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


def _allow(option: str, value: int, low: int, high: int, unit: str) -> None:
    allowed = f"{low} to {high}, the {unit} that are there"
    if not low <= value <= high:
        raise ConfigError(f"{option}: {value} is not allowed; allowed: {allowed}")
