"""GroupNorm, SiLU and dropout of NHWC feature maps in one operation, in Triton.

y = dropout(SiLU(GroupNorm(x + a))), with `a` [N, C] added to every pixel: a convolution's bias and
the time embedding. Statistics are float32, x and y stay in their format. Forward: sums per channel,
statistics per group, and one pass that writes y. The backward pass sums dz and dz·x per channel;
gradients of weight, bias and `a` follow from these sums, so that no other kernel reads dx for them:

    u = scale·x + shift,  z = dL/du,  dx = scale·z + c2·x + c3,  Σ dx = scale·Σz + c2·Σx + HW·c3

On a CPU the same formulas run as plain operations of torch, which is how they are tested.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from torch.library import triton_op, wrap_triton

from tunediff.workloads.diffusion import fused_norm_kernels as kernels

TILE = 4096
"""Elements of a program's tile: pixels × channels."""
CHANNELS = 128
"""Channels of a tile, at most: rows of 256 bytes in bf16."""
PROGRAMS = 1024
"""Programs that sum, at least where there are as many pixels."""


# ---- on a GPU
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


def _triton_forward(
    x: Tensor, a: Tensor | None, weight: Tensor, bias: Tensor, seed: Tensor, groups: int,
    eps: float, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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


def _triton_backward(
    dy: Tensor, x: Tensor, a: Tensor | None, weight: Tensor, seed: Tensor, saved: Tensor,
    groups: int, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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


# ---- on a CPU, without dropout
def _by_group(values: Tensor, groups: int) -> Tensor:
    """Return the sum over the channels of its group, for each channel: [N, C] → [N, C]."""
    n, c = values.shape
    summed = values.view(n, groups, -1).sum(2, keepdim=True)
    return summed.expand(n, groups, c // groups).reshape(n, c)


def _wide(values: Tensor) -> Tensor:
    return values[:, :, None, None]


def _plain_dz(x: Tensor, dy: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    u = x * _wide(scale) + _wide(shift)
    sigmoid = u.sigmoid()
    return dy * sigmoid * (1 + u * (1 - sigmoid))


def _plain_forward(
    x: Tensor, a: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    total, pixels = x.sum((2, 3)), x.shape[2] * x.shape[3]
    count = pixels * (x.shape[1] // groups)
    added = torch.zeros_like(total) if a is None else a
    mean = _by_group(total + pixels * added, groups) / count
    centre = mean - added
    squares = x.square().sum((2, 3)) - centre * (2 * total - pixels * centre)
    rstd = (_by_group(squares, groups).clamp(min=0) / count + eps).rsqrt()
    scale = weight * rstd
    shift = bias - centre * scale
    u = x * _wide(scale) + _wide(shift)
    return u * u.sigmoid(), torch.stack((scale, shift, mean, rstd, total))


def _plain_backward(
    dy: Tensor, x: Tensor, a: Tensor | None, weight: Tensor, saved: Tensor, groups: int
) -> tuple[Tensor, Tensor]:
    scale, shift, mean, rstd, total = saved
    pixels = x.shape[2] * x.shape[3]
    added, count = torch.zeros_like(total) if a is None else a, pixels * (x.shape[1] // groups)
    dz = _plain_dz(x, dy, scale, shift)
    z, zv = dz.sum((2, 3)), (dz * x).sum((2, 3)) + added * dz.sum((2, 3))
    inner, outer = _by_group(weight * zv, groups), _by_group(weight * z, groups)
    c2 = (outer * mean - inner) * rstd**3 / count
    c3 = c2 * (added - mean) - outer * rstd / count
    da = scale * z + c2 * total + pixels * c3
    found = torch.stack((c2, c3, da, (zv - mean * z) * rstd, z))
    return _wide(scale) * dz + _wide(c2) * x + _wide(c3), found


# ---- the operation
def _on_triton(x: Tensor) -> bool:
    """Return whether Triton computes: on a GPU, or interpreted."""
    return x.device.type != "cpu" or not isinstance(kernels.sums, triton.runtime.JITFunction)


@triton_op("tunediff::norm_silu", mutates_args={})
def _norm_silu(
    x: Tensor, a: Tensor | None, weight: Tensor, bias: Tensor, seed: Tensor, groups: int,
    eps: float, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y, and [5, N, C] for backward: scale, shift, mean, 1/deviation, Σx."""
    if _on_triton(x):
        return _triton_forward(x, a, weight, bias, seed, groups, eps, p)
    return _plain_forward(x, a, weight, bias, groups, eps)


@triton_op("tunediff::norm_silu_backward", mutates_args={})
def _norm_silu_backward(
    dy: Tensor, x: Tensor, a: Tensor | None, weight: Tensor, seed: Tensor, saved: Tensor,
    groups: int, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dx, and [5, N, C]: c2, c3 and the gradients of a, weight and bias of each image."""
    if _on_triton(x):
        return _triton_backward(dy, x, a, weight, seed, saved, groups, p)
    return _plain_backward(dy, x, a, weight, saved, groups)


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

    `added` [N, C]: for all pixels; weight and bias [C]: GroupNorm's. On a CPU without dropout.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    added = None if added is None else added.to(wide).contiguous()
    seed = bias  # is not read
    if dropout:
        seed = torch.randint(2**31 - 1, (1,), device=x.device, dtype=torch.int32)
    x = x.contiguous(memory_format=torch.channels_last)
    y: Tensor = _norm_silu(x, added, weight.to(wide), bias.to(wide), seed, groups, eps, dropout)[0]
    return y
