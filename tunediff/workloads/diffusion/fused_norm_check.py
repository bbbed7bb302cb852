"""Whether the fused norm computes here: it agrees with torch, and is faster."""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F

from tunediff.training.hardware import call_seconds
from tunediff.workloads.diffusion.fused_norm import norm_silu

log = logging.getLogger(__name__)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Largest difference from operations of torch, as a share of their largest value."""
NHWC_KERNELS = "2.14"
"""Version of torch from which its GroupNorm has kernels for NHWC."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@functools.cache
def is_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the operation works here, faster than torch's NHWC kernels."""
    has_kernels = torch.torch_version.TorchVersion(torch.__version__) >= NHWC_KERNELS
    return works(device, dtype) and (not has_kernels or gain(device, dtype) > 1)


@torch.inference_mode(False)
@torch.enable_grad()
def gain(device: torch.device, dtype: torch.dtype) -> float:
    """Return how many times as fast the operation is as torch, forwards and backwards.

    On a GPU on 128 feature maps of 256 channels and 32×32 pixels, which take longer than starting
    the kernels. Torch computes under autocast, as in a network.
    """
    cuda = device.type == "cuda"
    n, c, side, groups = (128, 256, 32, 32) if cuda else (2, 64, 8, 32)
    x = torch.ones(n, c, side, side, device=device, dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    added, weight = torch.ones(n, c, device=device), torch.ones(c, device=device)

    def fused() -> None:
        y = norm_silu(x, added, weight, weight, groups, 1e-5)
        torch.autograd.grad(y, x, x.detach())

    def plain() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
            y = F.silu(F.group_norm(x + added[:, :, None, None].to(dtype), groups, weight, weight))
        torch.autograd.grad(y.to(dtype), x, x.detach())

    seconds = [[call_seconds(call, device) for call in (fused, plain)] for _ in range(8)]
    ours, theirs = (min(times[1:]) for times in zip(*seconds, strict=True))  # the first compiles
    return float(theirs / ours)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@functools.cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the operation runs here and agrees with operations of torch; else warn once.

    A GPU or a Triton that nobody has tried must not change a training without a word.
    """
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            worst = _disagreement(device, dtype)
    except Exception as error:
        log.warning("the fused GroupNorm does not run here: %s; torch computes it", error)
        return False
    if worst > TOLERANCE[dtype]:
        log.warning("the fused GroupNorm differs here by %.1e; torch computes it", worst)
    return worst <= TOLERANCE[dtype]


def _disagreement(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest error relative to torch, of results and gradients; no random draws."""
    n, c, side, groups = 2, 64, 8, 32
    flat = torch.arange(n * c * side * side, device=device, dtype=torch.float64)
    x = (flat * 0.7).sin().view(n, c, side, side).contiguous(memory_format=torch.channels_last)
    dy, added = (1.3 * x).cos(), (flat[: n * c] * 0.3).cos().view(n, c)
    weight, bias = 1 + 0.5 * flat[:c].sin(), 0.1 * flat[:c].cos()
    inputs = [x.to(dtype), *(one.float() for one in (added, weight, bias))]
    a, b = ([one.detach().requires_grad_() for one in inputs] for _ in range(2))
    fused = norm_silu(a[0], a[1], a[2], a[3], groups, 1e-5)
    wide = F.group_norm(
        b[0].double() + b[1].double()[:, :, None, None], groups, b[2].double(), b[3].double(), 1e-5
    )
    plain = F.silu(wide)
    torch.autograd.backward(fused, dy.to(dtype))
    torch.autograd.backward(plain, dy.to(dtype).double())
    found = [
        (fused.detach(), plain.detach()),
        *((one.grad, other.grad) for one, other in zip(a, b, strict=True)),
    ]
    # a value that is not finite compares as false, and so does not agree
    return max(
        float((one.double() - other.double()).abs().max() / other.double().abs().max())
        if one is not None and other is not None and bool(one.isfinite().all())
        else float("inf")
        for one, other in found
    )
