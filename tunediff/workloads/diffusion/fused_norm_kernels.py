# mypy: ignore-errors
"""The Triton kernels of `fused_norm`: a program has an image, and a run of pixels and a block of
channels of it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sums(
    x, dy, scale, shift, seed, first, second, HW, C, rows, p,
    BR: tl.constexpr, BC: tl.constexpr, BACKWARD: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Forward: Σx and Σx². Backward: Σz and Σz·x."""
    n, s = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    a = tl.zeros((BC,), tl.float32)
    b = tl.zeros((BC,), tl.float32)
    for start in range(0, rows, BR):
        inner = start + tl.arange(0, BR)
        row = s * rows + inner
        mask = ((row < HW) & (inner < rows))[:, None] & (c < C)[None, :]
        at = n * HW * C + row[:, None] * C + c[None, :]
        v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        if BACKWARD:
            z = _dz(dy, v, scale, shift, seed, at, mask, n, c, C, p, BC, DROPOUT)
            a += tl.sum(z, 0)
            b += tl.sum(z * v, 0)
        else:
            a += tl.sum(v, 0)
            b += tl.sum(v * v, 0)
    to = (n * tl.num_programs(1) + s) * C + c
    tl.store(first + to, a, mask=c < C)
    tl.store(second + to, b, mask=c < C)


@triton.jit
def _dz(dy, v, scale, shift, seed, at, mask, n, c, C, p, BC: tl.constexpr, DROPOUT: tl.constexpr):
    """Return the gradient of what SiLU gets."""
    inside = c < C
    u = v * tl.load(scale + n * C + c, mask=inside, other=0.0)[None, :]
    u += tl.load(shift + n * C + c, mask=inside, other=0.0)[None, :]
    g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    if DROPOUT:
        g = tl.where(tl.rand(tl.load(seed), at) >= p, g / (1.0 - p), 0.0)
    sigmoid = 1.0 / (1.0 + tl.exp(-u))
    return tl.where(mask, g * sigmoid * (1.0 + u * (1.0 - sigmoid)), 0.0)


@triton.jit
def forward(
    x, scale, shift, seed, y, HW, C, p, BR: tl.constexpr, BC: tl.constexpr, DROPOUT: tl.constexpr
):
    n = tl.program_id(0)
    row = tl.program_id(1) * BR + tl.arange(0, BR)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < C
    mask = (row < HW)[:, None] & inside[None, :]
    at = n * HW * C + row[:, None] * C + c[None, :]
    u = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    u = u * tl.load(scale + n * C + c, mask=inside, other=0.0)[None, :]
    u += tl.load(shift + n * C + c, mask=inside, other=0.0)[None, :]
    u = u / (1.0 + tl.exp(-u))
    if DROPOUT:
        u = tl.where(tl.rand(tl.load(seed), at) >= p, u / (1.0 - p), 0.0)
    tl.store(y + at, u.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward(
    x, dy, scale, shift, seed, c2, c3, dx, HW, C, p,
    BR: tl.constexpr, BC: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    row = tl.program_id(1) * BR + tl.arange(0, BR)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < C
    mask = (row < HW)[:, None] & inside[None, :]
    at = n * HW * C + row[:, None] * C + c[None, :]
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    z = _dz(dy, v, scale, shift, seed, at, mask, n, c, C, p, BC, DROPOUT)
    d = tl.load(scale + n * C + c, mask=inside, other=0.0)[None, :] * z
    d += tl.load(c2 + n * C + c, mask=inside, other=0.0)[None, :] * v
    d += tl.load(c3 + n * C + c, mask=inside, other=0.0)[None, :]
    tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _summed(
    first, second, a, n, c, mask, C, runs,
    GP: tl.constexpr, CGP: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Return both sums over the runs of an image, and what is added to its channels."""
    x, y = tl.zeros((GP, CGP), tl.float32), tl.zeros((GP, CGP), tl.float32)
    for s in range(0, runs):
        x += tl.load(first + (n * runs + s) * C + c, mask=mask, other=0.0)
        y += tl.load(second + (n * runs + s) * C + c, mask=mask, other=0.0)
    added = tl.zeros((GP, CGP), tl.float32)
    if ADDED:
        added = tl.load(a + n * C + c, mask=mask, other=0.0)
    return x, y, added


@triton.jit
def stats(
    first, second, a, weight, bias, of_forward, HW, C, G, CG, runs, eps,
    GP: tl.constexpr, CGP: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Statistics of one image, in the order of `_norm_silu`'s outputs."""
    n, N = tl.program_id(0), tl.num_programs(0)
    g, k = tl.arange(0, GP)[:, None], tl.arange(0, CGP)[None, :]
    c, mask = g * CG + k, (g < G) & (k < CG)
    total, squares, added = _summed(first, second, a, n, c, mask, C, runs, GP, CGP, ADDED)
    count = HW * CG
    mean = tl.sum(total + HW * added, 1)[:, None] / count
    # of x - (mean - a), whose square is not much smaller than what is subtracted from it
    centre = mean - added
    square = tl.where(mask, squares - centre * (2 * total - HW * centre), 0.0)
    variance = tl.maximum(tl.sum(square, 1)[:, None] / count, 0.0)
    rstd = 1.0 / tl.sqrt(variance + eps)
    scale = tl.load(weight + c, mask=mask, other=0.0) * rstd
    shift = tl.load(bias + c, mask=mask, other=0.0) - centre * scale
    to = of_forward + n * C + c
    tl.store(to, scale, mask=mask)
    tl.store(to + N * C, shift, mask=mask)
    tl.store(to + 2 * N * C, mean + added * 0.0, mask=mask)
    tl.store(to + 3 * N * C, rstd + added * 0.0, mask=mask)
    tl.store(to + 4 * N * C, total, mask=mask)


@triton.jit
def backward_stats(
    first, second, a, weight, of_forward, of_backward, HW, C, G, CG, runs,
    GP: tl.constexpr, CGP: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """c2, c3 and the gradients of a, weight and bias, of one image."""
    n, N = tl.program_id(0), tl.num_programs(0)
    g, k = tl.arange(0, GP)[:, None], tl.arange(0, CGP)[None, :]
    c, mask = g * CG + k, (g < G) & (k < CG)
    z, zx, added = _summed(first, second, a, n, c, mask, C, runs, GP, CGP, ADDED)
    saved = of_forward + n * C + c
    scale = tl.load(saved, mask=mask, other=0.0)
    mean = tl.load(saved + 2 * N * C, mask=mask, other=0.0)
    rstd = tl.load(saved + 3 * N * C, mask=mask, other=0.0)
    total = tl.load(saved + 4 * N * C, mask=mask, other=0.0)
    w = tl.load(weight + c, mask=mask, other=0.0)
    zv, count = zx + added * z, HW * CG
    inner, outer = tl.sum(w * zv, 1)[:, None], tl.sum(w * z, 1)[:, None]
    c2 = (outer * mean - inner) * rstd * rstd * rstd / count
    c3 = c2 * (added - mean) - outer * rstd / count
    to = of_backward + n * C + c
    tl.store(to, c2, mask=mask)
    tl.store(to + N * C, c3, mask=mask)
    tl.store(to + 2 * N * C, scale * z + c2 * total + HW * c3, mask=mask)
    tl.store(to + 3 * N * C, (zv - mean * z) * rstd, mask=mask)
    tl.store(to + 4 * N * C, z, mask=mask)
