"""A training's memory: its peak, in any process, and how running out of it looks."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tunediff.config.knobs import refuse

# ---- freed memory of the CPU
# Options of mallopt, by their numbers in glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8
_KEEP = {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: 2**26}
_GIVE_BACK = {_MMAP_MAX: 2**16, _MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**26, _TOP_PAD: 2**17}
_keeps = False


def keep_freed(keep: bool, device: torch.device) -> None:
    """Let this process keep the CPU memory that it frees, or not, which is glibc's default.

    By itself glibc takes blocks of over 32 MiB from the system and gives them back when they are
    freed, so that every step waits for pages that the kernel fills with zeros: 310,000 of them at
    batch 128 of a small network for CIFAR-10, a sixth of its time on 2 cores. Once kept, a process
    cannot return to glibc's start, only to its largest thresholds.
    """
    global _keeps
    if device.type == "cuda" or keep == _keeps:
        return
    with contextlib.suppress(OSError, AttributeError):  # no glibc: `config.not_effective` says so
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in (_KEEP if keep else _GIVE_BACK).items():
            mallopt(option, value)
        if not keep:
            trim()
        _keeps = keep


def trim() -> None:
    """Give memory that is free back to the system, also where the process keeps it."""
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


# ---- activations
def checkpoint(model: nn.Module, blocks: type[nn.Module] | None, share: float) -> None:
    """Let this share of the blocks in a model, from the first on, keep no activations, in place.

    They run again in the backward pass (`torch.utils.checkpoint`), batch statistics not being
    updated a second time. Raises `ConfigError` where the model has no such blocks.
    """
    modules = [one for one in model.modules() if blocks is not None and isinstance(one, blocks)]
    why = "the model has no blocks that trial.prepare(model, blocks=…) names; allowed: 0"
    refuse(not modules, f"memory.checkpoint: {share} is not allowed: {why}")
    for block in modules[: round(share * len(modules))]:
        block.forward = functools.partial(_recomputed, block, block.forward)


def _recomputed(block: nn.Module, forward: Any, *inputs: Any, **named: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*inputs, **named)
    run = functools.partial(_run, block, forward)
    return torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=False, **named)


def _run(block: nn.Module, forward: Any, *inputs: Any, **named: Any) -> Any:
    """Run a block; within a backward pass it is the repetition."""
    # A compiled graph updates statistics once; torch.compile takes no `context_fn` for it.
    again = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
    with _frozen_statistics(block) if again else contextlib.nullcontext():
        return forward(*inputs, **named)


@contextlib.contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    """Leave running statistics unchanged inside; passes still use them, as in training."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, tracked


# ---- the peak
def reset(device: torch.device) -> None:
    """Free what the last training left and start the peak counters from here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # pages that the loader pinned: they count as resident
    restart_peak(device)


def restart_peak(device: torch.device, host_peak_mib: float = 0.0) -> None:
    """Restart the peak counters. `host_peak_mib`: the resident set's last reported peak.

    The new peak begins at all that is resident, used or not. If that is over a hundredth more than
    `host_peak_mib`, what is free is given back first; otherwise it is kept, because the next step
    would wait for its pages. (Writing a checkpoint takes a little, too.)
    """
    if psutil.Process().memory_info().rss / 2**20 > 1.01 * host_peak_mib:
        trim()
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # the counters exist from then on
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        # Linux: 5 resets the peak of the resident set; elsewhere the peak is the process's
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib(device: torch.device) -> dict[str, float]:
    """Return peak MiB since `reset`: `peak_memory_mib` of the device, and the host's."""
    host = _host_peak_mib()
    if device.type != "cuda":
        return {"peak_memory_mib": host, "peak_host_memory_mib": host}
    return {
        "peak_memory_mib": torch.cuda.max_memory_allocated(device) / 2**20,
        "peak_reserved_mib": torch.cuda.max_memory_reserved(device) / 2**20,
        "peak_host_memory_mib": host,
    }


def _host_peak_mib() -> float:
    with contextlib.suppress(OSError):
        if match := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return int(match.group(1)) / 1024
    return float(psutil.Process().memory_info().rss) / 2**20


# ---- too little of it
_OUT_OF_MEMORY = (
    # torch, CUDA's runtime and driver, Ray
    "out of memory",
    "out_of_memory",
    "outofmemory",
    "memoryallocation",
    # cuBLAS, cuSOLVER, cuFFT; cuDNN, of the device and the host
    "alloc_failed",
    "allocation_failed",
    # what cublasCreate says when there is no room for its workspace
    "cublas_status_not_initialized",
    "failed to cuda",
    "failed to malloc",  # NCCL: calloc, host alloc; its own words hide CUDA's
    # the host's
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
)


def is_oom(error: BaseException) -> bool:
    """Return whether an exception means that device or host memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    words = str(error).lower()
    return any(sign in words for sign in _OUT_OF_MEMORY)
