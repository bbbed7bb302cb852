"""Networks of our own for classification."""

from __future__ import annotations

import itertools

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
