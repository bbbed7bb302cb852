"""Find the CPU cores and GPUs that this process may use, for Ray, threads and records."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
from pathlib import Path

from tunediff.core.refusals import allow

PART = "TUNEDIFF_CPUS"
"""Environment variable of `--cpus`: the most cores to use, in every process started from here."""
OMP = "OMP_NUM_THREADS"
VISIBLE = "CUDA_VISIBLE_DEVICES"
SPINS = "GOMP_SPINCOUNT"
"""Environment variable that torch's threads read when torch is first imported."""

DEVICES = Path("/dev")


def limit_spinning() -> None:
    """Bound how long OpenMP threads wait busily for each other, unless the user has set that.

    By default it is billions of rounds. Alone that costs nothing; beside any other load on the same
    cores it stops training almost completely (measured with 2 threads on 2 cores, images/s, alone
    and beside a second training: default 4,190 and 0; 3,000 rounds 4,050 and 490).
    """
    os.environ.setdefault(SPINS, "3000")


def cores() -> int:
    """Return the cores this process may use: by affinity, quota of cgroups, and `--cpus`."""
    from joblib import cpu_count  # takes a tenth of a second to import

    part, present = os.environ.get(PART, ""), int(cpu_count())
    return min(present, int(part)) if part.isdigit() else present


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
    chosen, number = os.environ.get(VISIBLE), cards()
    if chosen is None or not number:
        return [str(index) for index in range(number)]
    words = [word.strip() for word in chosen.split(",")]
    return [word for word in words if word and word != "-1"]


@functools.lru_cache(maxsize=1)
def cards() -> int:
    """Return the number of GPUs by nvidia-smi, which omits those that a container or a batch
    system hides. Where it is missing or fails, each device file is one."""
    # Without a driver it fails, and with a broken one it may hang.
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--list-gpus"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return len(re.findall(r"UUID: GPU-", done.stdout))
    return len(list(DEVICES.glob("nvidia[0-9]*")))


def take(cpus: int | None, count: int | None) -> None:
    """Limit this process and all that it starts to a part of the machine; None: no limit.

    Raises `ConfigError` for more than is present.
    """
    have, devices = cores(), gpus()
    if cpus is not None:
        allow(1 <= cpus <= have, "--cpus", cpus, f"1 to {have}, the CPU cores that are there")
        os.environ[PART] = str(cpus)
        os.environ.setdefault(OMP, str(cpus))  # read when torch is first imported
    if count is not None:
        allowed = f"0 to {len(devices)}, the GPUs that are there"
        allow(0 <= count <= len(devices), "--gpus", count, allowed)
        os.environ[VISIBLE] = ",".join(devices[:count])
