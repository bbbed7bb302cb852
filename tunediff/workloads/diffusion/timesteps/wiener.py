"""The sampler that learns p(t) from the images alone: around the noise level where their spectrum is least certain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tunediff.distributed import World
from tunediff.workloads.diffusion import methods
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps.base import TableSampler, mixed

LEARNED_FROM = 2048
"""Images from which the spectrum is learned, the first of the training; afterwards drawing costs a table lookup."""
COARSEST = 20
"""Cosine components along each side that count, the lowest frequencies: all of a digit, four tenths of CIFAR-10's."""
LEVELS = 512
"""Of variance, in its logarithm, at which components are counted."""


class Wiener(TableSampler, of=methods.Wiener):
    """λ = log SNR from a normal distribution of deviation `width` around the level λ* where noise and image are least
    certain together; our own.

    ℓ is the mean squared error of the image that the best *linear* denoiser of these images leaves, the Wiener filter:
    in an orthonormal basis that makes the components uncorrelated, component k of variance s_k is left with
    s_k/(1 + s_k·SNR). The same denoiser's error of the noise is SNR·ℓ. The one is all but settled at low noise, the
    other at high noise, and λ* is where their product is largest,

        λ* = argmax √(SNR·ℓ · ℓ), where −d log ℓ/dλ = ½:

    a hundredth more signal-to-noise takes half a hundredth of the error away. For one variance s it is −log s. The
    basis is the cosine transform (DCT-II) of channels, rows and columns, whose components are all but uncorrelated in
    natural images (Ahmed, Natarajan & Rao 1974, IEEE Trans. Computers C-23). Nothing is asked of the network: neither
    its prediction nor the schedule change what is found, and its early errors do not mislead.

    Of larger images only the 20 × 20 coarsest components count: the finer ones are many, and would draw λ* up to where
    texture is decided. The same picture on twice the side has four times the variance in each, so λ* lies log 4 lower:
    as far as simple diffusion shifts a schedule (Hoogeboom et al. 2023, arXiv 2301.11093).
    """

    adaptive = True

    def __init__(self, member: methods.Wiener, diffusion: Diffusion, channels: int, world: World) -> None:
        super().__init__(member, diffusion, channels, world)
        self._snr = diffusion.snr_table.to(self.device)
        self._width = torch.gradient(diffusion.log_snr)[0].abs().to(self.device)  # |dλ/dt|: makes p a density over λ
        self._sums = torch.zeros(2, 0, dtype=torch.float64, device=self.device)  # of the components and their squares
        self._images = 0

    def sample(
        self, images: Tensor, generator: torch.Generator | None = None, batch: int | None = None, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        drawn = super().sample(images, generator, batch, first)
        if self._images < LEARNED_FROM:  # for the next batch: this one's losses are scaled by what was drawn from
            self._learn(cosine_transform(images).flatten(1).double())
        return drawn

    def _learn(self, components: Tensor) -> None:
        """Learn from this rank's images, as components float64 [b, k], and from those of all other ranks."""
        of_this_rank = torch.stack((components.sum(0), components.square().sum(0)))
        both = self.world.stack(of_this_rank).sum(0)
        self._sums = self._sums + both if self._images else both
        self._images += len(components) * self.world.size
        self._set(self.world.first(self._wanted()))  # other GPUs round differently

    def _wanted(self) -> Tensor:
        """Return p(t) from the images so far, float64 [T]."""
        mean, square = self._sums / self._images
        levels = (square - mean.square()).clamp(min=1e-6).log()  # (an eighth of a grey level)²
        low, high = levels.min(), levels.max()
        level = ((levels - low) / (high - low).clamp(min=1e-9) * (LEVELS - 1)).round().long()
        count = torch.zeros(LEVELS, dtype=torch.float64, device=self.device).index_add_(
            0, level, torch.ones_like(levels)
        )
        variance = (low + (high - low) * torch.linspace(0, 1, LEVELS, dtype=torch.float64, device=self.device)).exp()
        left = (count * variance / (1 + variance * self._snr[:, None])).sum(1)
        log_snr = self._snr.log()
        place = log_snr.take((left.log() + log_snr / 2).argmax())  # an index would make the host wait
        density = torch.exp(-0.5 * ((log_snr - place) / self.member.width).square()) * self._width
        return mixed(density, self.member.uniform_share)

    def state_dict(self) -> dict[str, object]:
        return {"images": self._images, "sums": self._sums.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._images, self._sums = state["images"], state["sums"].to(self.device)
        self._set(self._wanted() if self._images else torch.full_like(self._p, 1 / self.steps))


def cosine_transform(images: Tensor) -> Tensor:
    """Return the orthonormal DCT-II of [b, C, H, W], `COARSEST` components along each of channels, rows, columns."""
    for axis in (1, 2, 3):
        n = torch.arange(size := images.shape[axis], dtype=images.dtype, device=images.device)
        basis = torch.cos(math.pi / size * (n + 0.5) * n[:COARSEST, None]) * math.sqrt(2 / size)
        basis[0] /= math.sqrt(2)
        images = (images.movedim(axis, -1) @ basis.T).movedim(-1, axis)
    return images
