"""Networks of our own for classification."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Classifiers take images float32 [B, C, H, W] in [−1, 1] and return logits [B, classes].


class Block(nn.Module):
    """A part that repeats in a network: it can be compiled, or computed again, by itself."""


# ---- residual networks for 32×32
def convolution(channels: int, out: int, side: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Without bias, since a normalisation follows; keeps the size at stride 1."""
    return nn.Conv2d(channels, out, side, stride, padding=side // 2, groups=groups, bias=False)


class Residual(Block):
    """ReLU(shortcut(x) + body(x)); 1×1 shortcut if shapes change (arXiv 1512.03385, option B)."""

    def __init__(self, body: nn.Sequential, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body, self.shortcut = body, nn.Sequential()
        if stride != 1 or channels != out:
            shortcut = convolution(channels, out, 1, stride)
            self.shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def basic(channels: int, out: int, stride: int) -> Residual:
    """Return two 3×3 convolutions."""
    first, second = convolution(channels, out, 3, stride), convolution(out, out, 3)
    body = nn.Sequential(first, nn.BatchNorm2d(out), nn.ReLU(), second, nn.BatchNorm2d(out))
    return Residual(body, channels, out, stride)


def bottleneck(channels: int, out: int, stride: int, inner: int, groups: int) -> Residual:
    """Return 1×1, grouped 3×3, 1×1: ResNeXt's block (arXiv 1611.05431, fig. 3c)."""
    reduce = convolution(channels, inner, 1)
    grouped = convolution(inner, inner, 3, stride, groups)
    expand = convolution(inner, out, 1)
    norm1, norm2, norm3 = nn.BatchNorm2d(inner), nn.BatchNorm2d(inner), nn.BatchNorm2d(out)
    body = nn.Sequential(reduce, norm1, nn.ReLU(), grouped, norm2, nn.ReLU(), expand, norm3)
    return Residual(body, channels, out, stride)


def residual(
    stem: int, blocks: list[Residual], out: int, channels: int, classes: int
) -> nn.Sequential:
    """Return 3×3 stem, blocks, mean over pixels, linear; initialised as in arXiv 1502.01852."""
    first = (convolution(channels, stem, 3), nn.BatchNorm2d(stem), nn.ReLU())
    last = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(out, classes))
    network = nn.Sequential(*first, *blocks, *last)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


def resnet18(width: int, channels: int, classes: int) -> nn.Sequential:
    """Return ResNet-18 for 32×32: `width` to 8 × `width` channels; 11.2 million parameters."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    blocks = []
    for before, out in itertools.pairwise(widths):
        blocks += [basic(before, out, 1 if out == width else 2), basic(out, out, 1)]
    return residual(width, blocks, widths[-1], channels, classes)


def resnext29(cardinality: int, width: int, channels: int, classes: int) -> nn.Sequential:
    """Return ResNeXt-29, cardinality × width d, for 32×32; 8×64d: 34.4 million parameters."""
    blocks, before = [], 64
    for stage in range(3):
        out, inner = 256 * 2**stage, cardinality * width * 2**stage
        for stride in (1 if stage == 0 else 2, 1, 1):
            blocks.append(bottleneck(before, out, stride, inner, cardinality))
            before = out
    return residual(64, blocks, before, channels, classes)


# ---- 8×8 digits
class ConvNormReLU(Block):
    """A 3×3 convolution, normalised."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.convolution, self.norm = convolution(channels, out, 3, stride), nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolution(x)))


def convnet(width: int, channels: int, classes: int) -> nn.Sequential:
    """Return three convolutions, `width` to 4 × `width` channels, at side 1, ½ and ¼."""
    return nn.Sequential(
        ConvNormReLU(channels, width, 1),
        ConvNormReLU(width, 2 * width, 2),
        ConvNormReLU(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


# ---- transformer, 128×128
class InceptionMixer(nn.Module):
    """Mixes tokens by three paths over channels (Si et al. 2022, arXiv 2205.12956, 3.1).

    High frequencies take max-pooling, then a linear layer, and a linear layer, then a depthwise
    convolution, each for half of `width − low` channels. Low frequencies take self-attention at
    1/`reduction` of the resolution. A depthwise convolution with a shortcut and a linear layer fuse
    them. Feature maps [B, width, H, W] of any size.
    """

    def __init__(self, width: int, low: int, head: int, reduction: int) -> None:
        super().__init__()
        high = (width - low) // 2
        self.parts, self.head, self.reduction = (high, high, low), head, reduction
        self.pooled, self.linear = nn.Conv2d(high, high, 1), nn.Conv2d(high, high, 1)
        self.depthwise = nn.Conv2d(high, high, 3, padding=1, groups=high)
        self.qkv = nn.Conv2d(low, 3 * low, 1)
        self.fuse = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        edges, textures, low = torch.split(x, list(self.parts), 1)
        edges = self.pooled(F.max_pool2d(edges, 3, stride=1, padding=1))
        textures = self.depthwise(self.linear(textures))
        mixed = torch.cat([edges, textures, self.attention(low)], 1)
        fused: Tensor = self.out(mixed + self.fuse(mixed))
        return fused

    def attention(self, x: Tensor) -> Tensor:
        small = F.avg_pool2d(x, self.reduction, ceil_mode=True) if self.reduction > 1 else x
        heads: Tensor = self.qkv(small).flatten(2).unflatten(1, (3, -1, self.head))
        q, k, v = heads.transpose(-1, -2).unbind(1)  # [B, heads, tokens, head]
        attended = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(small.shape)
        return F.interpolate(attended, x.shape[-2:]) if self.reduction > 1 else attended


class InceptionBlock(Block):
    """The mixer, then an MLP of four times the width, both with shortcut and norm."""

    def __init__(self, width: int, low: int, head: int, reduction: int) -> None:
        super().__init__()
        self.norm1, self.mixer = nn.GroupNorm(1, width), InceptionMixer(width, low, head, reduction)
        self.norm2 = nn.GroupNorm(1, width)
        widen, narrow = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.mlp = nn.Sequential(widen, nn.GELU(), narrow)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        mixed: Tensor = x + self.mlp(self.norm2(x))
        return mixed


def inception_transformer(width: int, channels: int, classes: int) -> nn.Sequential:
    """Return iFormer's four stages, at 1/4 to 1/32 of the side, `width` to 8 × `width`.

    The ramp: attention has 1/4, 1/2, 3/4 and 7/8 of the channels, as low frequencies matter more in
    later layers; in the first two stages it sees half of the resolution. There are no batch
    statistics, so that any number of workers learns the same.
    """
    stem, head = width // 2, width // 4
    parts: list[nn.Module] = [nn.Conv2d(channels, stem, 3, 2, 1), nn.GroupNorm(1, stem), nn.GELU()]
    before = stem
    stages = ((1, width // 4, 2, 2), (2, width, 2, 2), (4, 3 * width, 1, 4), (8, 7 * width, 1, 2))
    for multiple, low, reduction, depth in stages:
        out = multiple * width
        parts += [nn.Conv2d(before, out, 3, 2, 1), nn.GroupNorm(1, out)]
        parts += [InceptionBlock(out, low, head, reduction) for _ in range(depth)]
        before = out
    last = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
    return nn.Sequential(*parts, nn.GroupNorm(1, before), *last)
