"""The interface of the networks whose features are compared."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Extractor(Protocol):
    """The interface of a feature network."""

    name: str
    """Short name for files: "inception-v3-compat", "efficientnet-lite0", "random"."""
    label: str
    """Name of the Fréchet distance of these features; "FID" only with FID's own network and
    weights."""
    digest: str
    """Hex digest of the weights: features with different digests are not comparable."""
    dim: int
    """d, length of a feature vector."""
    classes: int
    """K, number of classes of the network; 0 without classes."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return features float32 [B, d] of images uint8 [B, C, H, W], both on the extractor's
        device."""
        return self.with_logits(images)[0]

    def with_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [B, d] and logits of the classes [B, K], both float32, in one pass."""
        ...
