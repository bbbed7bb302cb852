"""Number formats: autocast, loss scaling, and when a loss that is not finite is the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

from tunediff.config.systems import Precision


def set_backends(precision: Precision, device: str) -> None:
    """Set what holds for the whole process: float32 products, and cuDNN where `device` is "cuda"."""
    torch.set_float32_matmul_precision(precision.matmul)
    if device == "cuda":
        torch.backends.cudnn.allow_tf32 = precision.conv_tf32
        torch.backends.cudnn.benchmark = precision.cudnn_benchmark


def fastest_matmul(precision: Precision, device: str) -> str:
    """The `matmul` of the fastest units that float32 arithmetic may be given to: convolutions may have faster ones than
    products have."""
    return "high" if device == "cuda" and precision.conv_tf32 and precision.matmul == "highest" else precision.matmul


@contextlib.contextmanager
def evaluation_precision(device: torch.device, precision: Literal["fp32", "tf32", "bf16"] = "fp32") -> Iterator[None]:
    """Compute in IEEE float32, or in another `precision`, whatever number format a trial has switched on for itself.

    All trials of a search are judged in this one format.
    """
    matmul, convolution = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolution


class Amp:
    """Autocast and gradient scaling of one training."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.device = device
        self.dtype = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision.amp]
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision.amp == "fp16")
        self.patience = 25 if self.scaler.is_enabled() else 1
        """Steps in a row whose loss is not finite that end a training. One bad loss is the end without scaling: the
        weights are NaN by the next step. With scaling, bad losses are how the scale is found; only a long streak of
        them means that no scale helps."""
        self.fastest_matmul = fastest_matmul(precision, device.type)
        set_backends(precision, device.type)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of forward passes."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)
