"""Peak memory of one training, also in a process that has trained others before."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from pathlib import Path

import psutil
import torch


def reset(device: torch.device) -> None:
    """Free what the last training left and start the peak counters from here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # glibc: give freed memory back, or it counts for the next one
        ctypes.CDLL(None).malloc_trim(0)
    restart_peak(device)


def restart_peak(device: torch.device) -> None:
    """Start the peak counters from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(
        OSError
    ):  # Linux: 5 resets the peak of the resident set; elsewhere the peak is the process's
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib(device: torch.device) -> dict[str, float]:
    """Peak MiB since `reset`: `peak_memory_mib` on the device (on a CPU the process's resident set), and the host's."""
    host = _host_peak_mib()
    if device.type == "cuda":
        return {
            "peak_memory_mib": torch.cuda.max_memory_allocated(device) / 2**20,
            "peak_reserved_mib": torch.cuda.max_memory_reserved(device) / 2**20,
            "peak_host_memory_mib": host,
        }
    return {"peak_memory_mib": host, "peak_host_memory_mib": host}


def _host_peak_mib() -> float:
    with contextlib.suppress(OSError):
        if match := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return int(match.group(1)) / 1024
    return float(psutil.Process().memory_info().rss) / 2**20


def is_oom(error: BaseException) -> bool:
    """Whether an exception means that device or host memory ran out."""
    words = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        sign in words
        for sign in ("out of memory", "can't allocate memory", "cannot allocate memory", "outofmemory", "alloc_failed")
    )
