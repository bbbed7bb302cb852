"""EfficientNet-Lite0 up to one of its stages, with the ImageNet weights that the extra `imagenet`
installs."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunediff.evaluation import weights
from tunediff.evaluation.extractor import Extractor
from tunediff.training.precision import evaluation_precision

STAGES = (
    (1, 16, 3, 1, 1), (2, 24, 3, 2, 6), (2, 40, 5, 2, 6), (3, 80, 3, 2, 6), (3, 112, 5, 1, 6), (4, 192, 5, 2, 6),
    (1, 320, 3, 1, 6),
)  # fmt: skip
"""Blocks, channels, kernel size, stride of the first block, expansion (Tan & Le 2019, arXiv
1905.11946, table 1); Lite0 has neither squeeze-and-excitation nor Swish."""


class Convolution(nn.Conv2d):
    """A convolution without bias, padded as TensorFlow's `SAME`: more below and at the right where
    it is uneven."""

    def __init__(
        self, channels: int, out: int, side: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(channels, out, side, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        side, stride = self.kernel_size[0], self.stride[0]
        height, width = (max(0, (-(-n // stride) - 1) * stride + side - n) for n in x.shape[-2:])
        return super().forward(
            F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
        )


class Block(nn.Module):
    """Expand by 1×1, convolve each channel, project by 1×1; the input is added where the shape
    stays."""

    def __init__(self, channels: int, out: int, side: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = channels * expansion
        expand = (
            [Convolution(channels, inner, 1), _normalized(inner), nn.ReLU6()]
            if expansion > 1
            else []
        )
        self.body = nn.Sequential(
            *expand, Convolution(inner, inner, side, stride, inner), _normalized(inner), nn.ReLU6(),
            Convolution(inner, out, 1), _normalized(out),
        )  # fmt: skip
        self.adds_input = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.adds_input else y


def _normalized(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


def network(stages: int) -> nn.Sequential:
    """Return stem and first `stages` stages: images float [B, 3, H, W], as (x − 127)/128, to
    feature maps.

    Its parameters are in the order of the weights' file.
    """
    parts: list[nn.Module] = [Convolution(3, 32, 3, 2), _normalized(32), nn.ReLU6()]
    channels = 32
    for blocks, out, side, stride, expansion in STAGES[:stages]:
        for number in range(blocks):
            parts.append(Block(channels, out, side, 1 if number else stride, expansion))
            channels = out
    return nn.Sequential(*parts)


class EfficientNetLite0(Extractor):
    """Mean activations of an EfficientNet-Lite0 after one of its stages, trained on ImageNet.

    It needs no labels. Grey becomes RGB; images of other sides are resized, bicubic and antialiased
    as the files of a set are.
    """

    name = "efficientnet-lite0"
    label = f"FD (efficientnet-lite0, stage {weights.IMAGENET_STAGE})"
    dim = weights.IMAGENET_FEATURES
    classes = 0
    _SIDE = 96

    def __init__(self, file: Path, device: torch.device | str) -> None:
        """`file`: as `weights.imagenet` returns it."""
        self.digest, self._device = weights.IMAGENET_SHA256, torch.device(device)
        self._most = (
            32 if self._device.type == "cpu" else 1024
        )  # at once; a CPU's cache: 1.8 times as fast as 256
        with torch.device("meta"):
            stages = network(weights.IMAGENET_STAGE)
        stored = torch.load(file, map_location="cpu", weights_only=True)
        stages.load_state_dict(
            dict(zip(stages.state_dict(), stored.values(), strict=False)), assign=True
        )
        stages.to(memory_format=torch.channels_last)  # faster on a CPU
        self._stages = stages.requires_grad_(False).eval().to(self._device)

    def with_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), evaluation_precision(self._device):
            parts = [
                self._stages(self._fit(part)).mean((2, 3))
                for part in torch.split(images, self._most)
            ]
        features = torch.cat(parts)
        return features, features[:, :0]

    def _fit(self, images: Tensor) -> Tensor:
        values, sides = (
            images.to(self._device).float().expand(-1, 3, -1, -1),
            (self._SIDE, self._SIDE),
        )
        if images.shape[-2:] != sides:
            values = F.interpolate(values, sides, mode="bicubic", antialias=True).clamp(0, 255)
        return ((values - 127) / 128).contiguous(memory_format=torch.channels_last)
