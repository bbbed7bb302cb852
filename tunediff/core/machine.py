"""Find the CPU cores and GPUs that this process may use, for Ray, threads and records.

The options --address, --cpus and --gpus choose a part of them, or a cluster.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tunediff.core.errors import ConfigError
from tunediff.core.options import Options, allow, option

log = logging.getLogger(__name__)

PART = "TUNEDIFF_CPUS"
"""Environment variable of `--cpus`: the most cores to use, in every process started from here."""
OMP = "OMP_NUM_THREADS"
VISIBLE = "CUDA_VISIBLE_DEVICES"
SPINS = "GOMP_SPINCOUNT"
"""Environment variable that torch's threads read when torch is first imported."""

DEVICES, CPUINFO = Path("/dev"), Path("/proc/cpuinfo")


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


def emulated(cpuinfo: Path = CPUINFO) -> set[str]:
    """Return the values of `precision.amp` that this CPU only emulates; empty if that is not known.

    With AVX-512 the emulation reaches nine tenths of the speed of float32; with AVX2 alone
    convolutions reach a tenth to a sixtieth.
    """
    words = set(cpuinfo.read_text().split())
    is_known = words & {"avx2", "sse2", "fp"}
    return {name for name, units in HALVES.items() if is_known and not words.intersection(units)}


# ---- GPUs
def gpus() -> list[str]:
    """Return the CUDA devices that this process may use, as `CUDA_VISIBLE_DEVICES` names them.

    A part of a GPU that MIG has split is one where `CUDA_VISIBLE_DEVICES` names it.
    """
    chosen = os.environ.get(VISIBLE)
    number = len(cards()) or len(list(DEVICES.glob("nvidia[0-9]*")))
    if chosen is None or not number:
        return [str(index) for index in range(number)]
    words = [word.strip() for word in chosen.split(",")]
    return [word for word in words if word and word != "-1"]


@functools.lru_cache(maxsize=1)
def cards() -> list[str]:
    """Return `NVIDIA H200, 700.00 W, 143771 MiB`, name, power limit and memory, of each GPU.

    nvidia-smi omits those that a container or a batch system hides. [] where it is missing or
    fails.
    """
    query = ["--query-gpu=name,power.limit,memory.total", "--format=csv,noheader"]
    # Without a driver it fails, and with a broken one it may hang.
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, timeout=60, check=True
        )
        return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return []


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


# ---- options
class MachineOptions(Options):
    """What a search or comparison may use."""

    address: str | None = option(
        None, "a running Ray cluster, auto or HOST:PORT (default: one on this machine)"
    )
    cpus: int | None = option(None, "CPU cores of this machine to use (default: all)")
    gpus: int | None = option(None, "GPUs of this machine to use (default: all)")


def check(args: MachineOptions) -> None:
    """Apply the options. Raises `ConfigError` for more than there is."""
    args.address = args.address or os.environ.get("RAY_ADDRESS")
    if args.address is None:
        take(args.cpus, args.gpus)
        return
    if not re.fullmatch(r"auto|[^\s/]+:\d+", args.address):
        raise ConfigError(
            f"--address: {args.address!r} is not allowed; allowed: auto or HOST:PORT of a cluster,"
            " on one of its nodes"
        )
    if args.address != "auto":  # Ray would look for it for minutes
        host, _, port = args.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--address: no cluster answers at {args.address}: {error}") from None
    for flag, value in (("--cpus", args.cpus), ("--gpus", args.gpus)):
        if value is not None:
            theirs = f"of the cluster at {args.address} Ray gives out what is free"
            raise ConfigError(f"{flag}: takes a part of this machine; {theirs}")


def warn_emulated(formats: Iterable[str], address: str | None = None) -> None:
    """Warn of those values of `precision.amp` that the CPU of this machine only emulates."""
    if address is None and not gpus():
        for name in sorted(emulated().intersection(formats)):
            log.warning("precision.amp=%s: this CPU has no units for it and emulates it", name)
