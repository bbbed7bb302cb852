"""The interface of the networks whose features are compared."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Extractor(Protocol):
    """The interface of a feature network."""

    name: str
    """Short name for files: "inception-v3-compat", "cifar10-resnet", "random"."""
    label: str
    """Name of these features' Fréchet distance; "FID" only with FID's network and weights."""
    digest: str
    """Hex digest of the weights: features with different digests are not comparable."""
    dim: int
    """d, length of a feature vector."""
    classes: int
    """K, number of classes of the network; 0 without classes."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return features float32 [B, d] of images uint8 [B, C, H, W], on one device."""
        return self.with_logits(images)[0]

    def with_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [B, d] and logits of the classes [B, K], both float32, in one pass."""
        ...


def resized(images: Tensor, side: int, device: torch.device) -> Tensor:
    """Return images uint8 [B, C, H, W] as RGB of this side on the device, float32 0…255."""
    values = images.to(device).float().expand(-1, 3, -1, -1)
    if images.shape[-2:] == (side, side):
        return values
    return F.interpolate(values, (side, side), mode="bicubic", antialias=True).clamp(0, 255)
