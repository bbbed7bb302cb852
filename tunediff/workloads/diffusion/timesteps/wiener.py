"""The sampler that finds its noise level in the images' spectrum, and nears uniform t as it stops gaining there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from tunediff.distributed import World
from tunediff.workloads.diffusion import methods
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps.adaptive import Adaptive

LEARNED_FROM = 2048
"""Images from which the spectrum is learned, the first of the training."""
COARSEST = 20
"""Cosine components along each side that say where to draw, the lowest frequencies: all of a digit, four tenths of
CIFAR-10's."""
LEVELS = 512
"""Of variance, in its logarithm, at which components are counted."""
HALF_LIVES = (0.1, 0.3)
"""Of two running means of the error, as shares of the images so far: their difference is its slope."""
GROWTH = 0.08
"""Of the network's lead over the filter, per doubling of the images: below, the width grows."""
WIDEST = 3.0
"""Times `width`."""
ENDING, WIDE = 0.75, 1.5
"""From this fraction of the training on t is uniform, where the width has grown at least so many times."""
SETTLED = 16384
"""Images before the lead's growth is judged."""
LEAD = 0.05
"""Over the filter, from which on it is judged: below, its growth is lost in the noise."""


class Wiener(Adaptive, of=methods.Wiener):
    """λ = log SNR from a normal distribution around the level λ* where noise and image are least certain together, as
    wide as the training asks for; our own.

    ℓ is the mean squared error of the image that the best *linear* denoiser of these images leaves, the Wiener filter:
    in an orthonormal basis that makes the components uncorrelated, component k of variance s_k is left with
    s_k/(1 + s_k·SNR). The same denoiser's error of the noise is SNR·ℓ. The one is all but settled at low noise, the
    other at high noise, and λ* is where their product is largest,

        λ* = argmax √(SNR·ℓ · ℓ), where −d log ℓ/dλ = ½:

    a hundredth more signal-to-noise takes half a hundredth of the error away. For one variance s it is −log s. The
    basis is the cosine transform (DCT-II) of channels, rows and columns, whose components are all but uncorrelated in
    natural images (Ahmed, Natarajan & Rao 1974, IEEE Trans. Computers C-23). For the place nothing is asked of the
    network: neither its prediction nor the schedule change what is found, and its early errors do not mislead.

    Of larger images only the 20 × 20 coarsest components count: the finer ones are many, and would draw λ* up to where
    texture is decided. The same picture on twice the side has four times the variance in each, so λ* lies log 4 lower:
    as far as simple diffusion shifts a schedule (Hoogeboom et al. 2023, arXiv 2301.11093).

    The width follows the training. Around λ* the network's task is to be better than the linear filter; its lead is
    1 − E[error/error of the filter] under the narrow density, on the batches that are trained anyway. Two running means
    weighted by (i/n)^γ for image i of n, γ = ln 2/half-life, differ by slope·(1/(γ₂+1) − 1/(γ₁+1)) where the error
    falls with ln n, which tells by what part the lead grows per doubling of n. While that is above 8 % the deviation is
    `width`; below, it grows in inverse proportion, up to three times, and never shrinks again: a falling learning rate
    makes the lead grow once more. A density of k times the width is the narrow one to the power 1/k², as a tempered
    distribution is: the normal distribution of λ widens and its base becomes uniform t. Where the width has grown by a
    half, the last quarter of the training, when the learning rate is low, is all uniform t.
    """

    BUFFERS: ClassVar = {"means": "running means (half-lives, 2)", "times": "growth of the width ()"}

    def __init__(self, member: methods.Wiener, diffusion: Diffusion, channels: int, world: World) -> None:
        super().__init__(member, diffusion, channels, world)
        self._log_snr, self._snr = diffusion.snr_table.log().to(self.device), diffusion.snr_table.to(self.device)
        self._to_epsilon = diffusion.to_epsilon.to(self.device)
        self._cell = torch.gradient(diffusion.log_snr)[0].abs().to(self.device)  # |dλ/dt|: makes p a density over λ
        self._sums = torch.zeros(2, 0, dtype=torch.float64, device=self.device)  # of the components and their squares
        self._images = 0
        self._powers = math.log(2) / torch.tensor(HALF_LIVES, dtype=torch.float64, device=self.device)
        self._means = torch.zeros(2, 2, dtype=torch.float64, device=self.device)  # of both: errors, images
        self._times = torch.ones((), dtype=torch.float64, device=self.device)  # the width, in those of the start
        self._seen, self._ends = 0, False

    # ------------------------------------------------------------------------------------------------- from the images
    def sample(
        self, images: Tensor, generator: torch.Generator | None = None, batch: int | None = None, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        drawn = super().sample(images, generator, batch, first)
        if self._images < LEARNED_FROM:  # for the next batch: this one's losses are scaled by what was drawn from
            self._learn_spectrum(cosine_transform(images).double())
        return drawn

    def _learn_spectrum(self, components: Tensor) -> None:
        """Learn from this rank's images, as components float64 [b, C, H, W], and from those of all other ranks."""
        of_this_rank = torch.stack((components.sum(0), components.square().sum(0)))
        both = self.world.stack(of_this_rank).sum(0)
        self._sums = self._sums + both if self._images else both
        self._images += len(components) * self.world.size
        self._find_place()
        self._set(self.world.first(self._learned_density()))  # other GPUs round differently

    def _find_place(self) -> None:
        """Set λ*, the filter's ε-error float64 [T] and the narrow density from the images so far."""
        mean, square = self._sums / self._images
        variances = (square - mean.square()).clamp(min=1e-6)  # (an eighth of a grey level)²
        left = self._left(variances[:, :COARSEST, :COARSEST])
        self._place = self._log_snr.take((left.log() + self._log_snr / 2).argmax())  # an index would make the host wait
        self._filter = self._snr * self._left(variances) / variances.numel()
        self._narrow = self._density(torch.ones_like(self._place))

    def _left(self, variances: Tensor) -> Tensor:
        """Return the sum over components of what the filter leaves of the image, float64 [T]."""
        levels = variances.flatten().log()
        low, high = levels.min(), levels.max()
        level = ((levels - low) / (high - low).clamp(min=1e-9) * (LEVELS - 1)).round().long()
        count = torch.zeros(LEVELS, dtype=torch.float64, device=self.device).index_add_(
            0, level, torch.ones_like(levels)
        )
        variance = (low + (high - low) * torch.linspace(0, 1, LEVELS, dtype=torch.float64, device=self.device)).exp()
        return (count * variance / (1 + variance * self._snr[:, None])).sum(1)

    def _density(self, times: Tensor) -> Tensor:
        """Return p(t) ∝ (narrow density)^(1/times²), float64 [T]: so many times as wide, and in the end uniform t."""
        distance = (self._log_snr - self._place) / self.member.width
        log_narrow = self._cell.log() - 0.5 * distance.square()
        return torch.softmax(log_narrow / times.square(), 0)

    # ----------------------------------------------------------------------------------------------- from the training
    def advance(self, progress: float) -> None:
        super().advance(progress)
        if self._ends or progress < ENDING:
            return
        self._ends = True
        self._set(self.world.first(self._learned_density()))

    def update(self, t: Tensor, errors: Tensor, weights: Tensor) -> None:
        if self._images >= LEARNED_FROM:
            super().update(t, errors, weights)

    def _learn(self, t: Tensor, errors: Tensor, weights: Tensor) -> None:
        ratio, share = errors * self._to_epsilon[t] / self._filter[t], self._narrow[t] / self._p[t]
        finite = ratio.isfinite()  # loss scaling skips steps that overflow
        both = torch.stack((torch.where(finite, share * ratio, 0.0), torch.where(finite, share, 0.0))).sum(1)
        self._seen += len(t)
        self._means = (1 - len(t) / self._seen) ** self._powers[:, None] * self._means + both
        if self._seen >= SETTLED:
            self._times = torch.maximum(self._times, self._width_factor())

    def _width_factor(self) -> Tensor:
        """Return the width that the lead's growth asks for, in those of the start, a scalar."""
        late, early = self._means[:, 0] / self._means[:, 1]
        age_late, age_early = 1 / (self._powers + 1)
        lead = 1 - late
        growth = math.log(2) * (early - late) / (age_early - age_late) / lead
        times = (GROWTH / growth.clamp(min=1e-6)).clamp(1.0, WIDEST)
        return torch.where(lead > LEAD, times, 1.0)

    def _importance(self) -> Tensor:
        if not self._images:
            return torch.ones_like(self._p)
        learned = self._density(self._times)
        return torch.where(self._times >= WIDE, 1 / self.steps, learned) if self._ends else learned

    def state_dict(self) -> dict[str, object]:
        own = {"images": self._images, "sums": self._sums.clone(), "seen": self._seen}
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._images, self._sums, self._seen = state["images"], state["sums"].to(self.device), state["seen"]
        if self._images:
            self._find_place()
        super().load_state_dict(state)


def cosine_transform(images: Tensor) -> Tensor:
    """Return the orthonormal DCT-II of [b, C, H, W] along channels, rows, columns."""
    for axis in (1, 2, 3):
        n = torch.arange(size := images.shape[axis], dtype=images.dtype, device=images.device)
        basis = torch.cos(math.pi / size * (n + 0.5) * n[:, None]) * math.sqrt(2 / size)
        basis[0] /= math.sqrt(2)
        images = (images.movedim(axis, -1) @ basis.T).movedim(-1, axis)
    return images
