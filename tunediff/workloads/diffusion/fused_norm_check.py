"""Whether the fused norm computes here: where it agrees with torch.

Its speed is not measured: which of two is faster by a little would differ from run to run.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F

from tunediff.workloads.diffusion.fused_norm import norm_silu

log = logging.getLogger(__name__)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Largest difference from operations of torch, as a share of their largest value."""


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
