"""The parts of DDPM's U-Net: time embedding, residual blocks, attention, changes of the side."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunediff.workloads.diffusion.knobs import Model

_EPS = 1e-6  # of every GroupNorm


class TimeEmbedding(nn.Module):
    """Sinusoids of t' = a·t + b, then two layers. [B] → [B, `width`].

    sin(t'·f_i) for all i, then cos(t'·f_i), with f_i = 10000^(−i/(half−1)), half = channels // 2
    (DDPM's code; the Transformer divides by half). Ends with the SiLU that every residual block
    begins its projection with.
    """

    frequencies: Tensor

    def __init__(self, channels: int, width: int, a: float = 1.0, b: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = a, b
        half = channels // 2
        exponents = torch.arange(half, dtype=torch.float64) * (-math.log(10000) / (half - 1))
        self.register_buffer("frequencies", exponents.exp().float(), persistent=False)
        self.pad = channels % 2
        self.linear1 = nn.Linear(channels, width)
        self.linear2 = nn.Linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        told = t.float() if (self.a, self.b) == (1.0, 0.0) else self.a * t.float() + self.b
        angles = told[:, None] * self.frequencies
        sinusoids = F.pad(torch.cat((angles.sin(), angles.cos()), dim=1), (0, self.pad))
        embedding: Tensor = F.silu(self.linear2(F.silu(self.linear1(sinusoids))))
        return embedding


class NormSiLU(nn.GroupNorm):
    """GroupNorm, then SiLU: [B, C, H, W] → the same."""

    def __init__(self, groups: int, width: int) -> None:
        super().__init__(groups, width, _EPS)

    def forward(self, x: Tensor, added: Tensor | None = None, dropout: float = 0.0) -> Tensor:
        """`added` [B, C]: to every pixel, before; `dropout`: after. Where `fused_norm` computes."""
        if (fused := fused_norm(x)) is None:
            return F.silu(super().forward(x))
        y: Tensor = fused.norm_silu(
            x, added, self.weight, self.bias, self.num_groups, self.eps, dropout
        )
        return y


def fused_norm(x: Tensor) -> Any:
    """Return the module that computes GroupNorm and SiLU of this feature map in one operation.

    None: operations of torch compute it. On a GPU, in NHWC, with Triton, where it agrees with torch.
    """
    if not x.is_cuda or x.numel() >= 2**31 or x.is_contiguous():
        return None
    if not x.is_contiguous(memory_format=torch.channels_last):
        return None
    try:
        from tunediff.workloads.diffusion import fused_norm
    except ImportError:
        return None
    return fused_norm if fused_norm.works(x.device, x.dtype) else None


class ResidualBlock(nn.Module):
    """Residual block: time embedding between two convolutions, then optional attention."""

    def __init__(
        self,
        width_in: int,
        width_out: int,
        embedding_width: int,
        model: Model,
        attention: bool,
        recomputed: bool = False,
    ) -> None:
        """`recomputed`: the backward pass computes activations again instead of keeping them."""
        super().__init__()
        self.recomputed = recomputed
        self.norm1 = NormSiLU(model.norm_groups, width_in)
        self.conv1 = nn.Conv2d(width_in, width_out, 3, padding=1)
        self.time = nn.Linear(embedding_width, width_out)
        self.norm2 = NormSiLU(model.norm_groups, width_out)
        self.dropout = nn.Dropout(model.dropout)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1)
        changes = width_in != width_out
        self.shortcut = nn.Conv2d(width_in, width_out, 1) if changes else nn.Identity()
        self.attention = Attention(width_out, model.norm_groups) if attention else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h, time = self.norm1(x), self.time(embedding)
        # In place: nothing else, and no backward pass, needs the output of a convolution.
        if fused_norm(h) is None:
            h = self.dropout(self.norm2(self.conv1(h).add_(time[:, :, None, None])))
        else:  # adds the bias as well, whose gradient is then no pass over memory
            dropout = self.dropout.p if self.training else 0.0
            h = F.conv2d(h, self.conv1.weight, padding=1)
            h = self.norm2(h, time + self.conv1.bias, dropout)
        h = self.conv2(h).add_(self.shortcut(x))
        attended: Tensor = self.attention(h)
        return attended


class Attention(nn.Module):
    """Single-head attention over pixels with a residual; `qkv`: queries, keys, values."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, width, _EPS)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(x).flatten(2).transpose(1, 2)  # [B, H·W, C]
        q, k, v = self.qkv(pixels).unsqueeze(1).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v).squeeze(1)
        if x.device.type == "cpu":
            # The same product as a 1×1 convolution. Compiled in bfloat16 for a CPU, a GroupNorm
            # that reads the linear layer's transposed output gets gradients of NaN (torch 2.15, its
            # vector code; scalar code is right).
            weight = self.out.weight[:, :, None, None]
            return x + F.conv2d(mixed.transpose(1, 2).reshape(x.shape), weight, self.out.bias)
        projected: Tensor = self.out(mixed)
        return x + projected.transpose(1, 2).reshape(x.shape)


class Downsample(nn.Module):
    """Halve the side. Pad right and below only, as TensorFlow's SAME and so DDPM."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        halved: Tensor = self.conv(F.pad(x, (0, 1, 0, 1)))
        return halved


class Upsample(nn.Module):
    """Double the side: nearest neighbour, then a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        doubled: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return doubled
