"""GroupNorm, SiLU and dropout of NHWC feature maps in one operation, in Triton.

y = dropout(SiLU(GroupNorm(x + a))), with `a` [N, C] added to every pixel: a convolution's bias and
the time embedding. Statistics are float32, x and y stay in their format. Forward: sums per channel,
statistics per group, and one pass that writes y. The backward pass sums dz and dz·x per channel;
gradients of weight, bias and `a` follow from these sums, so that no other kernel reads dx for them:

    u = scale·x + shift,  z = dL/du,  dx = scale·z + c2·x + c3,  Σ dx = scale·Σz + c2·Σx + HW·c3

Its speed is not measured where it is used: which of two is faster by a little would differ from
run to run. On a CPU it runs in Triton's interpreter alone, which is how it is tested.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-untyped]
from torch import Tensor
from torch.library import triton_op, wrap_triton

from tunediff.workloads.diffusion import fused_norm_kernels as kernels

log = logging.getLogger(__name__)

TILE = 4096
"""Elements of a program's tile: pixels × channels."""
CHANNELS = 128
"""Channels of a tile, at most: rows of 256 bytes in bf16."""
PROGRAMS = 1024
"""Programs that sum, at least where there are as many pixels."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Largest difference from operations of torch, as a share of their largest value; the kernels sum
in float32, so that torch computes float64."""


# ---- kernels
def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    """Start a kernel, visible to torch.compile; the interpreter's kernels are not."""
    compiled = isinstance(kernel, triton.runtime.JITFunction)
    (wrap_triton(kernel) if compiled else kernel)[grid](*arguments)


def _blocks(x: Tensor) -> tuple[int, int, int, int, int, int]:
    """Return N, HW, C, and pixels and channels of a tile, and runs of pixels to sum."""
    n, c, h, w = x.shape
    channels = min(CHANNELS, triton.next_power_of_2(c))
    pixels = max(1, min(triton.next_power_of_2(h * w), TILE // channels))
    runs = max(1, min(triton.cdiv(h * w, pixels), triton.cdiv(PROGRAMS, n)))
    return n, h * w, c, pixels, channels, runs


def _sum_parts(
    x: Tensor, dy: Tensor | None, saved: Tensor, seed: Tensor, p: float
) -> tuple[Tensor, int]:
    """Return Σx and Σx², or with `dy` Σz and Σz·x, of runs of pixels: [2, N, runs, C]."""
    n, hw, c, br, bc, runs = _blocks(x)
    parts = torch.empty(2, n, runs, c, device=x.device, dtype=torch.float32)
    grid, rows = (n, runs, triton.cdiv(c, bc)), triton.cdiv(hw, runs)
    _launch(
        kernels.sums, grid, x, x if dy is None else dy, saved[0], saved[1], seed, *parts.unbind(),
        hw, c, rows, p, br, bc, dy is not None, p > 0,
    )  # fmt: skip
    return parts, runs


# ---- the operation
@triton_op("tunediff::norm_silu", mutates_args={})
def _norm_silu(
    x: Tensor, a: Tensor | None, weight: Tensor, bias: Tensor, seed: Tensor, groups: int,
    eps: float, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y, and [5, N, C] for backward: scale, shift, mean, 1/deviation, Σx."""
    n, hw, c, br, bc, _ = _blocks(x)
    saved = torch.empty(5, n, c, device=x.device, dtype=torch.float32)
    parts, runs = _sum_parts(x, None, saved, seed, p)
    gp, cgp = triton.next_power_of_2(groups), triton.next_power_of_2(c // groups)
    added = weight if a is None else a
    _launch(
        kernels.stats, (n,), *parts.unbind(), added, weight, bias, saved, hw, c, groups,
        c // groups, runs, eps, gp, cgp, a is not None,
    )  # fmt: skip
    y, grid = torch.empty_like(x), (n, triton.cdiv(hw, br), triton.cdiv(c, bc))
    _launch(kernels.forward, grid, x, saved[0], saved[1], seed, y, hw, c, p, br, bc, p > 0)
    return y, saved


@triton_op("tunediff::norm_silu_backward", mutates_args={})
def _norm_silu_backward(
    dy: Tensor, x: Tensor, a: Tensor | None, weight: Tensor, seed: Tensor, saved: Tensor,
    groups: int, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dx, and [5, N, C]: c2, c3 and the gradients of a, weight and bias of each image."""
    n, hw, c, br, bc, _ = _blocks(x)
    parts, runs = _sum_parts(x, dy, saved, seed, p)
    found = torch.empty(5, n, c, device=x.device, dtype=torch.float32)
    gp, cgp = triton.next_power_of_2(groups), triton.next_power_of_2(c // groups)
    added = weight if a is None else a
    _launch(
        kernels.backward_stats, (n,), *parts.unbind(), added, weight, saved, found, hw, c, groups,
        c // groups, runs, gp, cgp, a is not None,
    )  # fmt: skip
    dx, grid = torch.empty_like(x), (n, triton.cdiv(hw, br), triton.cdiv(c, bc))
    _launch(
        kernels.backward, grid, x, dy, saved[0], saved[1], seed, found[0], found[1], dx, hw, c, p,
        br, bc, p > 0,
    )  # fmt: skip
    return dx, found


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, a, weight, _, seed, groups, _, p = inputs
    ctx.save_for_backward(x, a, weight, seed, output[1])
    ctx.groups, ctx.p = groups, p
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 8
    x, a, weight, seed, saved = ctx.saved_tensors
    dy = dy.contiguous(memory_format=torch.channels_last)
    dx, found = _norm_silu_backward(dy, x, a, weight, seed, saved, ctx.groups, ctx.p)
    of_weight, of_bias = found[3:].sum(1)
    return dx, None if a is None else found[2], of_weight, of_bias, None, None, None, None


_norm_silu.register_autograd(_gradients, setup_context=_save)


def norm_silu(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return dropout(SiLU(GroupNorm(x + added))) of x [N, C, H, W] in NHWC order, in its format.

    `added` [N, C]: for all pixels; weight and bias [C]: GroupNorm's.
    """
    added = None if added is None else added.float().contiguous()
    seed = bias  # is not read
    if dropout:
        seed = torch.randint(2**31 - 1, (1,), device=x.device, dtype=torch.int32)
    x = x.contiguous(memory_format=torch.channels_last)
    y: Tensor = _norm_silu(x, added, weight.float(), bias.float(), seed, groups, eps, dropout)[0]
    return y


# ---- whether it computes here
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
