"""The U-Net of DDPM (Ho et al. 2020, arXiv 2006.11239, appendix B), and its parts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tunediff.data.knobs import Data
from tunediff.workloads.diffusion.knobs import Knobs, Model

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

    None: operations of torch compute it. On a GPU, in NHWC, with Triton, where it agrees with them.
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


def network(knobs: Knobs) -> UNet:
    """Return the network that these knobs describe."""
    return UNet(knobs.model, knobs.data.channels, knobs.data.image_size, knobs.process.told_time())


class UNet(nn.Module):
    """Predict noise, image or v from a noisy image and its timestep.

    `down` and `up` are flat lists in order of execution, so that weights of other implementations
    of this network map one to one: each output of `input` and `down` is a skip connection, and each
    `ResidualBlock` of `up` takes the latest one. Every residual branch and the output start at
    zero, as in DDPM: a new network is near the identity inside and returns zero.
    """

    def __init__(
        self,
        model: Model,
        image_channels: int,
        image_size: int,
        told_time: tuple[float, float] = (1.0, 0.0),
    ) -> None:
        """`image_size`: a multiple of 2^(multipliers − 1); `told_time`: as `Process` has it."""
        super().__init__()
        halvings = len(model.multipliers) - 1
        widths = [model.channels * multiplier for multiplier in model.multipliers]
        sides = [image_size // 2**level for level in range(len(widths))]
        embedding_width = 4 * model.channels

        def block(width_in: int, width_out: int, attention: bool, level: int) -> ResidualBlock:
            recomputed = level in model.checkpoint_levels
            return ResidualBlock(width_in, width_out, embedding_width, model, attention, recomputed)

        # ---- from the image down to the smallest feature map
        self.time = TimeEmbedding(model.channels, embedding_width, *told_time)
        self.input = nn.Conv2d(image_channels, model.channels, 3, padding=1)
        width, skips = model.channels, [model.channels]
        levels = list(enumerate(zip(widths, sides, strict=True)))

        self.down = nn.ModuleList()
        for level, (level_width, side) in levels:
            for _ in range(model.blocks):
                self.down.append(block(width, level_width, side in model.attention, level))
                width = level_width
                skips.append(width)
            if level < halvings:
                self.down.append(Downsample(width))
                skips.append(width)

        self.middle = nn.ModuleList(
            [block(width, width, attention, halvings) for attention in (True, False)]
        )

        # ---- and up again; every block takes one skip connection, the latest first
        self.up = nn.ModuleList()
        for level, (level_width, side) in reversed(levels):
            for _ in range(model.blocks + 1):
                width_in = width + skips.pop()
                self.up.append(block(width_in, level_width, side in model.attention, level))
                width = level_width
            if level > 0:
                self.up.append(Upsample(width))

        self.norm = NormSiLU(model.norm_groups, width)
        self.output = nn.Conv2d(width, image_channels, 3, padding=1)
        self._initialise()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Map x [B, C, H, W], t [B] in [0, T) (int64 or float32) to [B, C, H, W] of x's type.

        In that type also under autocast.
        """
        embedding = self.time(t)
        h = self.input(x)
        skips = [h]
        for layer in self.down:
            h = self._run(layer, h, embedding)
            skips.append(h)
        for layer in self.middle:
            h = self._run(layer, h, embedding)
        for layer in self.up:
            if isinstance(layer, ResidualBlock):
                h = torch.cat((h, skips.pop()), dim=1)
            h = self._run(layer, h, embedding)
        output: Tensor = self.output(self.norm(h))
        return output.to(x.dtype)

    def chain(self) -> list[nn.Module]:
        """Return the network as links, each of the last one's output, for a pipeline's cuts.

        The state between links is (embedding, *skips) on the way down, where the last skip is also
        the current feature map, and (h, embedding, *remaining skips) on the way up.
        """

        def begin(x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
            return self.time(t), self.input(x)

        def down(layer: nn.Module, embedding: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
            return embedding, *skips, self._run(layer, skips[-1], embedding)

        def turn(embedding: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
            return middle(self.middle[0], skips[-1], embedding, *skips)

        def middle(
            layer: nn.Module, h: Tensor, embedding: Tensor, *skips: Tensor
        ) -> tuple[Tensor, ...]:
            return self._run(layer, h, embedding), embedding, *skips

        def up(
            layer: nn.Module, h: Tensor, embedding: Tensor, *skips: Tensor
        ) -> tuple[Tensor, ...]:
            if isinstance(layer, ResidualBlock):
                h, skips = torch.cat((h, skips[-1]), dim=1), skips[:-1]
            return self._run(layer, h, embedding), embedding, *skips

        def end(h: Tensor, embedding: Tensor) -> Tensor:
            output: Tensor = self.output(self.norm(h))
            return output.to(self.output.weight.dtype)

        links = [Link(begin, self.time, self.input)]
        links += [Link(functools.partial(down, layer), layer) for layer in self.down]
        links += [Link(turn, self.middle[0])]
        links += [Link(functools.partial(middle, layer), layer) for layer in list(self.middle)[1:]]
        links += [Link(functools.partial(up, layer), layer) for layer in self.up]
        return [*links, Link(end, self.norm, self.output)]

    def _run(self, layer: nn.Module, h: Tensor, embedding: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and getattr(layer, "recomputed", False):
            h = checkpoint(layer, h, embedding, use_reentrant=False)
        else:
            h = layer(h, embedding)
        return h

    @torch.no_grad()
    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)  # DDPM: variance scaling, average of fans
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, ResidualBlock):
                nn.init.zeros_(module.conv2.weight)
            elif isinstance(module, Attention):
                for part in module.qkv.weight.chunk(3):  # three maps C → C, not one C → 3C
                    nn.init.xavier_uniform_(part)
                nn.init.zeros_(module.out.weight)
        nn.init.zeros_(self.output.weight)


class Link(nn.Module):
    """A part of the network: a function, with the layers that it uses."""

    def __init__(
        self, function: Callable[..., Tensor | tuple[Tensor, ...]], *layers: nn.Module
    ) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *carried: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(*carried)


@functools.lru_cache(maxsize=16)
def flops_per_sample(model: Model, data: Data) -> float:
    """Return an image's operations in a training step: three forward passes'.

    The backward pass takes two products for each one of the forward pass. What activation
    checkpointing computes again is not counted: it is no progress (PaLM's model FLOPs, arXiv
    2204.02311, appendix B). Products and convolutions only, as torch's own counter has them.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counted = dataclasses.replace(model, checkpoint_levels=(), dropout=0.0)
    side = data.image_size
    with torch.device("meta"):  # nothing is computed: shapes suffice
        network = UNet(counted, data.channels, side)
        x, t = torch.empty(1, data.channels, side, side), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(x, t)
    return 3.0 * float(counter.get_total_flops())
