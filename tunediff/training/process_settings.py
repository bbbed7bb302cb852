"""What a training can set for its whole process beside what tunediff itself sets for each trial:
read and put back."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.backends import cuda, cudnn

_PRODUCTS = (
    "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation",
)  # fmt: skip
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_SET_BY_LIBRARIES = {
    "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "CRC32C_SW_MODE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
}  # fmt: skip
"""Variables of the environment that scikit-learn, joblib, tensorboardX and torch set when a first
trial needs them. Those of torch are for compilation, and what compiles has processes of its own."""


def _set_device(device: torch.device) -> None:
    # None, unlike "cpu", also takes away the hook that torch calls in every function that makes a
    # tensor.
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_cudnn(values: tuple[bool, bool]) -> None:
    cudnn.enabled, cudnn.deterministic = values


def _set_products(values: tuple[Any, ...]) -> None:
    for name, value in zip(_PRODUCTS, values, strict=True):
        setattr(cuda.matmul, name, value)


def _set_attention(values: tuple[bool, ...]) -> None:
    for name, value in zip(_ATTENTION, values, strict=True):
        getattr(cuda, f"enable_{name}_sdp")(value)


def _set_collector(values: tuple[bool, tuple[int, int, int]]) -> None:
    enabled, thresholds = values
    (gc.enable if enabled else gc.disable)()
    gc.set_threshold(*thresholds)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _SET_BY_LIBRARIES}


def _set_environment(values: Mapping[str, str]) -> None:
    for name in _environment().keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, _set_device),
    "deterministic algorithms": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "anomaly mode": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda values: torch.autograd.set_detect_anomaly(*values),
    ),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "cuDNN": (lambda: (cudnn.enabled, cudnn.deterministic), _set_cudnn),
    "attention kernels": (
        lambda: tuple(getattr(cuda, f"{name}_sdp_enabled")() for name in _ATTENTION),
        _set_attention,
    ),
    "reduced precision of products": (
        lambda: tuple(getattr(cuda.matmul, name) for name in _PRODUCTS),
        _set_products,
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "garbage collector": (lambda: (gc.isenabled(), gc.get_threshold()), _set_collector),
    "working directory": (os.getcwd, os.chdir),
    "environment": (_environment, _set_environment),
}
"""Name, and the functions that read and set it."""


def read() -> dict[str, Any]:
    """Return every setting as it is now, by name; None where it cannot be read: the working
    directory may be gone."""
    values: dict[str, Any] = {}
    for name, (get, _) in _SETTINGS.items():
        values[name] = None
        with contextlib.suppress(OSError):
            values[name] = get()
    return values


def restore(before: Mapping[str, Any]) -> list[str]:
    """Put back what `read` has returned; returns the names of settings that had changed meanwhile,
    in words."""
    now = read()
    changed = [name for name, value in before.items() if value != now[name]]
    for name in changed:
        with contextlib.suppress(OSError):
            _SETTINGS[name][1](before[name])
    if "environment" in changed:
        variables = sorted(
            {name for name, _ in before["environment"].items() ^ now["environment"].items()}
        )
        changed[changed.index("environment")] = f"environment ({', '.join(variables)})"
    return changed
