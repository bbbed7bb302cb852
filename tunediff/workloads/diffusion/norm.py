"""GroupNorm and SiLU of channels_last images as one Triton kernel, forward and backward; imports triton.

torch computes the two apart, under autocast in float32: cast, statistics, norm, SiLU and cast move some 30 bytes for
each number of 2, and keep what the backward pass needs of it. Here each number is read (a second time from cache) and
written in its own format, and the backward pass needs the input alone. All arithmetic is float32.

A program has one image's channels of one or several groups, `LANES` of them side by side, and goes through the pixels
`ROWS` at a time. Where there are more than `PIXELS`, programs share an image: a kernel before has summed each part up.
Nothing is added atomically: the same numbers give the same bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# The types of a kernel are Triton's.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

DEVICES = ("cuda", "cpu") if knobs.runtime.interpret else ("cuda",)
"""Types of device that run it; a CPU only through Triton's interpreter (TRITON_INTERPRET=1), for tests."""

LANES = 32
"""Channels side by side in a program, where a group has fewer: a read of bf16 then covers whole sectors of 32 bytes."""
PIXELS = 1024
"""Of one image, that a program goes through; others have the rest."""
VALUES, WARPS = 4096, 8
"""Numbers that a program has in registers at a time, and the warps that share them."""


# ------------------------------------------------------------------------------------------------- parts of the kernels
@triton.jit
def _place(pixels, channels, WIDTH: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """Of this program: its image, where that begins, its lanes, their channels, and which of them there are."""
    blocks = tl.cdiv(channels, GROUPS * WIDTH)
    image = tl.program_id(0) // blocks
    lane = tl.arange(0, LANES)
    channel = tl.program_id(0) % blocks * (GROUPS * WIDTH) + lane
    return image, image.to(tl.int64) * pixels * channels, lane, channel, (lane < GROUPS * WIDTH) & (channel < channels)


@triton.jit
def _rows(start, end, channel, there, channels, ROWS: tl.constexpr):
    """Offsets [ROWS, LANES] within the image of the pixels from `start` on, and which of them lie before `end`."""
    pixel = start + tl.arange(0, ROWS)
    return pixel[:, None] * channels + channel[None, :], (pixel < end)[:, None] & there[None, :]


@triton.jit
def _of_group(each, lane, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """The sum over its group, for each lane; `each` [LANES] is 0 where there is no channel."""
    if GROUPS == 1:
        return tl.zeros_like(each) + tl.sum(each, 0)
    same = lane[:, None] // WIDTH == lane[None, :] // WIDTH
    return tl.sum(tl.where(same, each[None, :], 0.0), 1)


@triton.jit
def _merged(mean, squares, count, mean_too, squares_too, count_too):
    """Mean and sum of squared deviations of two sets (Chan, Golub & LeVeque 1979): no difference of large sums."""
    share = count_too / (count + count_too)
    apart = mean_too - mean
    return mean + apart * share, squares + squares_too + apart * apart * count * share, count + count_too


@triton.jit
def _moments_of(x, begin, end, channel, there, channels, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Mean and sum of squared deviations of each channel over these pixels."""
    mean, squares, count = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32), 0.0
    for start in range(begin, end, ROWS):
        offset, inside = _rows(start, end, channel, there, channels, ROWS)
        values = tl.load(x + offset, inside, 0.0).to(tl.float32)
        here = tl.minimum(end - start, ROWS).to(tl.float32)
        average = tl.sum(values, 0) / here
        apart = tl.where(inside, values - average[None, :], 0.0)
        mean, squares, count = _merged(mean, squares, count, average, tl.sum(apart * apart, 0), here)
    return mean, squares


@triton.jit
def _slope(x, dy, offset, inside, mean, rstd, weight, bias):
    """Gradient before SiLU, and the normalised input. d silu(z)/dz = σ(z)·(1 + z·(1 − σ(z)))."""
    normal = (tl.load(x + offset, inside, 0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
    z = normal * weight[None, :] + bias[None, :]
    gate = tl.sigmoid(z)
    return tl.load(dy + offset, inside, 0.0).to(tl.float32) * gate * (1.0 + z * (1.0 - gate)), normal


@triton.jit
def _sums_of(
    x, dy, begin, end, channel, there, channels, mean, rstd, weight, bias, ROWS: tl.constexpr, LANES: tl.constexpr
):
    """Gradients of each channel's weight and bias by these pixels."""
    by_weight, by_bias = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    for start in range(begin, end, ROWS):
        offset, inside = _rows(start, end, channel, there, channels, ROWS)
        dz, normal = _slope(x, dy, offset, inside, mean, rstd, weight, bias)
        by_weight += tl.sum(dz * normal, 0)
        by_bias += tl.sum(dz, 0)
    return by_weight, by_bias


@triton.jit
def _affine(weight, bias, moments, image, channel, there, groups, images, WIDTH: tl.constexpr):
    """Of each lane: weight, bias, and mean and 1/σ of its group, which are `moments` [2, images, groups]."""
    group = moments + image * groups + channel // WIDTH
    return (
        tl.load(weight + channel, there, 0.0).to(tl.float32), tl.load(bias + channel, there, 0.0).to(tl.float32),
        tl.load(group, there, 0.0), tl.load(group + images * groups, there, 0.0),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- the kernels
@triton.jit
def _moments(
    x, parts, images, pixels, channels, share, WIDTH: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of this program's pixels into `parts` [2, images, programs, channels]."""
    image, base, _, channel, there = _place(pixels, channels, WIDTH, GROUPS, LANES)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, pixels)
    mean, squares = _moments_of(x + base, begin, end, channel, there, channels, ROWS, LANES)
    part = parts + (image * tl.num_programs(1) + tl.program_id(1)) * channels + channel
    tl.store(part, mean, there)
    tl.store(part + images * tl.num_programs(1) * channels, squares, there)


@triton.jit
def _forward(
    x, y, weight, bias, moments, parts, images, pixels, channels, groups, share, eps, SPLIT: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """y = SiLU(norm(x)) of this program's pixels, and `moments` [2, images, groups]: mean and 1/σ of the image's."""
    image, base, lane, channel, there = _place(pixels, channels, WIDTH, GROUPS, LANES)
    programs = tl.num_programs(1)
    if SPLIT:
        mean, squares, count = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32), 0.0
        for number in range(programs):
            part = parts + (image * programs + number) * channels + channel
            here = tl.minimum(pixels - number * share, share).to(tl.float32)
            squares_too = tl.load(part + images * programs * channels, there, 0.0)
            mean, squares, count = _merged(mean, squares, count, tl.load(part, there, 0.0), squares_too, here)
    else:
        mean, squares = _moments_of(x + base, 0, pixels, channel, there, channels, ROWS, LANES)
    middle = _of_group(mean, lane, WIDTH, GROUPS) / WIDTH
    apart = tl.where(there, mean - middle, 0.0)
    variance = _of_group(squares + apart * apart * pixels, lane, WIDTH, GROUPS) / (WIDTH * pixels)
    rstd = tl.rsqrt(variance + eps)
    if tl.program_id(1) == 0:
        group = moments + image * groups + channel // WIDTH
        tl.store(group, middle, there & (lane % WIDTH == 0))
        tl.store(group + images * groups, rstd, there & (lane % WIDTH == 0))
    scale = rstd * tl.load(weight + channel, there, 0.0).to(tl.float32)
    level = tl.load(bias + channel, there, 0.0).to(tl.float32)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, pixels)
    for start in range(begin, end, ROWS):
        offset, inside = _rows(start, end, channel, there, channels, ROWS)
        z = (tl.load(x + base + offset, inside, 0.0).to(tl.float32) - middle[None, :]) * scale[None, :] + level[None, :]
        tl.store(y + base + offset, (z * tl.sigmoid(z)).to(y.dtype.element_ty), inside)


@triton.jit
def _sums(
    x, dy, weight, bias, moments, parts, images, pixels, channels, groups, share, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Gradients of weight and bias by this program's pixels into `parts` [2, images, programs, channels]."""
    image, base, _, channel, there = _place(pixels, channels, WIDTH, GROUPS, LANES)
    w, b, mean, rstd = _affine(weight, bias, moments, image, channel, there, groups, images, WIDTH)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, pixels)
    by_weight, by_bias = _sums_of(
        x + base, dy + base, begin, end, channel, there, channels, mean, rstd, w, b, ROWS, LANES
    )
    part = parts + (image * tl.num_programs(1) + tl.program_id(1)) * channels + channel
    tl.store(part, by_weight, there)
    tl.store(part + images * tl.num_programs(1) * channels, by_bias, there)


@triton.jit
def _backward(
    x, dy, dx, weight, bias, moments, parts, images, pixels, channels, groups, share, SPLIT: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """dx of this program's pixels; without `SPLIT` also `parts` [2, images, 1, channels] as `_sums` has them."""
    image, base, lane, channel, there = _place(pixels, channels, WIDTH, GROUPS, LANES)
    w, b, mean, rstd = _affine(weight, bias, moments, image, channel, there, groups, images, WIDTH)
    programs = tl.num_programs(1)
    part = parts + image * programs * channels + channel
    if SPLIT:
        by_weight, by_bias = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
        for number in range(programs):
            by_weight += tl.load(part + number * channels, there, 0.0)
            by_bias += tl.load(part + (images * programs + number) * channels, there, 0.0)
    else:
        by_weight, by_bias = _sums_of(
            x + base, dy + base, 0, pixels, channel, there, channels, mean, rstd, w, b, ROWS, LANES
        )
        tl.store(part, by_weight, there)
        tl.store(part + images * channels, by_bias, there)
    # With n = norm(x) without weight and bias: dx = (w·dz − mean(w·dz) − n·mean(w·dz·n)) / σ, means over the group.
    size = WIDTH * pixels
    along = _of_group(w * by_weight, lane, WIDTH, GROUPS) / size
    level = _of_group(w * by_bias, lane, WIDTH, GROUPS) / size
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, pixels)
    for start in range(begin, end, ROWS):
        offset, inside = _rows(start, end, channel, there, channels, ROWS)
        dz, normal = _slope(x + base, dy + base, offset, inside, mean, rstd, w, b)
        slope = (dz * w[None, :] - level[None, :] - normal * along[None, :]) * rstd[None, :]
        tl.store(dx + base + offset, slope.to(dx.dtype.element_ty), inside)


# ----------------------------------------------------------------------------------------------------- as torch has it
class _Launch:
    """How an input [B, C, H, W] is divided among programs."""

    def __init__(self, x: Tensor, groups: int) -> None:
        images, channels, height, width = x.shape
        own = channels // groups
        together = max(1, LANES // own)
        lanes = triton.next_power_of_2(together * own)
        rows = min(triton.next_power_of_2(height * width), max(1, VALUES // lanes))
        self.programs = triton.cdiv(height * width, PIXELS)
        self.grid = images * triton.cdiv(groups, together), self.programs
        self.sizes = {"images": images, "pixels": height * width, "channels": channels, "share": PIXELS}
        self.options = {"WIDTH": own, "GROUPS": together, "ROWS": rows, "LANES": lanes, "num_warps": WARPS}
        self.parts = x.new_empty(2, images, self.programs, channels, dtype=torch.float32)


@torch.library.custom_op("tunediff::group_norm_silu", mutates_args=())
def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """SiLU(GroupNorm(x)) of x [B, C, H, W] in channels_last and its own format, and float32 [2, B, groups]: mean and
    1/σ of every group. `weight`, `bias` [C]; C is a multiple of `groups`."""
    x = x.contiguous(memory_format=torch.channels_last)
    y, moments, to = torch.empty_like(x), x.new_empty(2, len(x), groups, dtype=torch.float32), _Launch(x, groups)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call] # Triton starts on the current one
        if to.programs > 1:
            _moments[to.grid](x, to.parts, **to.sizes, **to.options)
        _forward[to.grid](
            x, y, weight, bias, moments, to.parts, groups=groups, eps=eps, SPLIT=to.programs > 1, **to.sizes,
            **to.options,
        )  # fmt: skip
    return y, moments


@torch.library.custom_op("tunediff::group_norm_silu_backward", mutates_args=())
def group_norm_silu_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, moments: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x, and float32 [2, C] of weight and bias; the arguments are what `group_norm_silu` took and gave."""
    x, dy = (one.contiguous(memory_format=torch.channels_last) for one in (x, dy))
    dx, groups = torch.empty_like(x), moments.shape[2]
    to = _Launch(x, groups)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        if to.programs > 1:
            _sums[to.grid](x, dy, weight, bias, moments, to.parts, groups=groups, **to.sizes, **to.options)
        _backward[to.grid](
            x, dy, dx, weight, bias, moments, to.parts, groups=groups, SPLIT=to.programs > 1, **to.sizes, **to.options
        )
    return dx, to.parts.sum((1, 2))


@group_norm_silu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    moments = x.new_empty(2, x.shape[0], groups, dtype=torch.float32)  # len(x) would fix the batch size
    return torch.empty_like(x, memory_format=torch.channels_last), moments


@group_norm_silu_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    return dx, x.new_empty(2, x.shape[1], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    dx, (by_weight, by_bias) = group_norm_silu_backward(dy, *ctx.saved_tensors)
    return dx, by_weight, by_bias, None, None  # autograd gives them the parameters' format


group_norm_silu.register_autograd(_gradients, setup_context=_keep)
