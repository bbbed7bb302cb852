"""The sampler that takes its noise levels from the images' spectrum, widening over time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tunediff.distributed import World
from tunediff.workloads.diffusion import methods
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps.base import Adaptive

LEARNED_FROM = 2048
"""Images from which the spectrum is learned, the first of the training."""
COARSEST = 20
"""Lowest cosine components per side that count: all of a digit, 0.4 of CIFAR-10's."""
LEVELS = 512
"""Of variance, in its logarithm, at which components are counted."""
HALF_LIVES = (0.1, 0.3)
"""Two running means of the error, as shares of the images: their gap is its slope."""
LEARNED = 1 / 3
"""Lead over the filter from which coarse structure is trained too: few draws are worse."""
SPECTRAL = 0.75
"""Share of the draws that then follow the spectrum, in parts of the lead."""
GROWTH = 0.08
"""Of the network's lead over the filter, per doubling of the images: below, the width grows."""
WIDEST = 3.0
"""Times `width`."""
ENDING, WIDE = 0.75, 1.5
"""From this fraction on t is uniform, where the width has grown at least so much."""
SETTLED = 16384
"""Images before the lead's growth is judged."""
LEAD = 0.05
"""Over the filter, from which on it is judged: below, its growth is lost in the noise."""


class WienerSampler(Adaptive):
    """λ = log SNR from a normal distribution around the level λ* where noise and image are least
    certain together; the more the network has learned there, the more draws follow the spectrum of
    the images instead; our own.

    ℓ is the mean squared error of the image that the best *linear* denoiser of these images leaves,
    the Wiener filter: in an orthonormal basis that makes the components uncorrelated,
    component k of variance s_k is left with s_k/(1 + s_k·SNR). The same denoiser's error of the
    noise is SNR·ℓ. The one is all but settled at low noise, the other at high noise, and λ* is
    where their product is largest,

        λ* = argmax √(SNR·ℓ · ℓ), where −d log ℓ/dλ = ½:

    a hundredth more signal-to-noise takes half a hundredth of the error away. For one variance s it
    is −log s. The basis is the cosine transform (DCT-II) of channels, rows and columns, whose
    components are all but uncorrelated in natural images (Ahmed, Natarajan & Rao 1974, IEEE Trans.
    Computers C-23). For the place nothing is asked of the network: neither its prediction nor the
    schedule change what is found, and its early errors do not mislead.

    Of larger images only the 20 × 20 coarsest components count: the finer ones are many, and would
    draw λ* up to where texture is decided. The same picture on twice the side has four times the
    variance in each, so λ* lies log 4 lower: as far as simple diffusion shifts a schedule
    (Hoogeboom et al. 2023, arXiv 2301.11093).

    Around λ* the network's task is to be better than the linear filter; its lead is 1 −
    E[error/error of the filter] under the narrow density, on the batches that are trained anyway.
    From a lead of ⅓ on, ¾ of it is the share of draws that follow the spectrum, the components
    weighted by their variance: λ from N(−log s_k, width²), k with probability s_k/Σs, for at −log
    s_k component k is decided. (By the spectrum alone: arXiv 2603.19222, in our reading.) Where the
    power lies around λ*, as that of small digits does, this changes little. Coarse components of
    large variance are decided at much more noise. A little training there is worse than none
    (docs/results/2026-11-methods.md), so it waits until the network has learned much of the rest.

    The width follows the training, too. Two running means of that ratio, weighted by (i/n)^γ for
    image i of n, γ = ln 2/half-life, differ by slope·(1/(γ₂+1) − 1/(γ₁+1)) where the error falls
    with ln n, which tells by what part the lead grows per doubling of n. While that is above 8 %
    the deviation is `width`; below, it grows in inverse proportion, up to three times, and never
    shrinks again: a falling learning rate makes the lead grow once more. A density of k times the
    width is the narrow one to the power 1/k², as a tempered distribution is: the normal
    distribution of λ widens and its base becomes uniform t. Where the width has grown by a half,
    the last quarter of the training, when the learning rate is low, is all uniform t.
    """

    BUFFERS = ("means", "times")

    def __init__(
        self, knobs: methods.Wiener, diffusion: Diffusion, channels: int, world: World
    ) -> None:
        super().__init__(knobs, diffusion, channels, world)
        device = self.device
        self._snr = diffusion.snr_table.to(device)
        self._log_snr = diffusion.snr_table.log().to(device)
        self.to_epsilon = diffusion.to_epsilon.to(device)
        # |dλ/dt|: makes p a density over λ
        self._cell = torch.gradient(diffusion.log_snr)[0].abs().to(device)
        self._sums = self._zeros(2, 0)  # of the components and their squares
        self._images = 0
        self._powers = math.log(2) / torch.tensor(HALF_LIVES, dtype=torch.float64, device=device)
        self._means = self._zeros(2, 2)  # by both half-lives: errors, images
        self._times = torch.ones_like(self._zeros())  # the width, in those of the start
        self._seen, self._ending = 0, False

    # ---- from the images
    def sample(
        self,
        images: Tensor,
        generator: torch.Generator | None = None,
        batch: int | None = None,
        first: int = 0,
    ) -> tuple[Tensor, Tensor]:
        drawn = super().sample(images, generator, batch, first)
        # For the next batch: the losses of this one are scaled by what was drawn from.
        self.defer(self._learn_spectrum, images)
        return drawn

    def _learn_spectrum(self, images: Tensor) -> None:
        """Learn from the first images, this rank's [b, C, H, W] and those of all other ranks."""
        if self._images >= LEARNED_FROM:
            return
        components = cosine_transform(images).double()
        of_this_rank = torch.stack((components.sum(0), components.square().sum(0)))
        both = self.world.sum(of_this_rank)
        self._sums = self._sums + both if self._images else both
        self._images += len(components) * self.world.size
        self._find_centre()
        self._set(self.world.first(self._learned_density()))  # other GPUs round differently

    def _find_centre(self) -> None:
        """Set λ*, the filter's ε-error, the narrow density and the spectrum's, by the images."""
        mean, square = self._sums / self._images
        variances = (square - mean.square()).clamp(min=1e-6)  # (an eighth of a grey level)²
        left = self._left(*_by_level(variances[:, :COARSEST, :COARSEST]))
        # `take`, for an index would make the host wait for the device.
        self._centre = self._log_snr.take((left.log() + self._log_snr / 2).argmax())
        # The filter's error counts all components, also those that do not move λ*.
        count, variance = _by_level(variances)
        self.filter_error = self._snr * self._left(count, variance) / variances.numel()
        self._narrow = self._around(self._centre[None]).sum(1)
        power = count * variance
        self._spectrum = (power * self._around(-variance.log())).sum(1) / power.sum()

    def _left(self, count: Tensor, variance: Tensor) -> Tensor:
        """Return what the filter leaves, summed over `count` components of each variance."""
        return (count * variance / (1 + variance * self._snr[:, None])).sum(1)

    def _around(self, centres: Tensor) -> Tensor:
        """Return p(t) with λ normal around each centre, of `width`, float64 [T, centres]."""
        distance = (self._log_snr[:, None] - centres) / self.knobs.width
        return torch.softmax(self._cell.log()[:, None] - 0.5 * distance.square(), 0)

    def _density(self, lead: Tensor, times: Tensor) -> Tensor:
        """Return p(t) of a lead to the power 1/times²: that much wider, at last uniform."""
        share = torch.where(lead >= LEARNED, SPECTRAL * lead, 0.0)
        mixture = (1 - share) * self._narrow + share * self._spectrum
        return torch.softmax(mixture.clamp(min=1e-300).log() / times.square(), 0)

    # ---- from the training
    def advance(self, progress: float) -> None:
        super().advance(progress)
        if not self._ending and progress >= ENDING:
            self._ending = True
            self._set(self.world.first(self._learned_density()))

    def _collect(self, t: Tensor, errors: Tensor, weights: Tensor) -> None:
        if self._images >= LEARNED_FROM:
            super()._collect(t, errors, weights)

    def _learn(self, t: Tensor, errors: Tensor, weights: Tensor) -> None:
        ratio = errors * self.to_epsilon[t] / self.filter_error[t]
        share = self._narrow[t] / self._p[t]
        finite = ratio.isfinite()  # loss scaling skips steps that overflow
        weighted = (torch.where(finite, share * ratio, 0.0), torch.where(finite, share, 0.0))
        added = torch.stack(weighted).sum(1)
        # Drawn from another density than the narrow one: `share` weights for that.
        self._seen += len(t)
        kept = (1 - len(t) / self._seen) ** self._powers[:, None]
        self._means = kept * self._means + added
        if self._seen >= SETTLED:
            self._times = torch.maximum(self._times, self._width_factor())

    def _width_factor(self) -> Tensor:
        """Return the width that the lead's growth asks for, in those of the start, a scalar."""
        # Two means of different age see the lead at different times: their difference is its slope.
        late, early = self._leads()
        age_late, age_early = 1 / (self._powers + 1)
        growth = math.log(2) * (late - early) / (age_early - age_late) / late
        times = (GROWTH / growth.clamp(min=1e-6)).clamp(1.0, WIDEST)
        return torch.where(late > LEAD, times, 1.0)

    def _leads(self) -> Tensor:
        """Return the lead over the filter by each mean, float64 [2]; 0 before a batch."""
        errors, images = self._means.T
        return torch.where(images > 0, 1 - errors / images, 0.0)

    def _importance(self) -> Tensor:
        if not self._images:
            return torch.ones_like(self._p)
        learned = self._density(self._leads()[0], self._times)
        if not self._ending:
            return learned
        return torch.where(self._times >= WIDE, 1 / self.steps, learned)

    def state_dict(self) -> dict[str, object]:
        learned = {"images": self._images, "sums": self._sums.clone(), "seen": self._seen}
        return super().state_dict() | learned

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._images, self._seen = state["images"], state["seen"]
        self._sums = state["sums"].to(self.device)
        if self._images:
            self._find_centre()
        super().load_state_dict(state)


def _by_level(variances: Tensor) -> tuple[Tensor, Tensor]:
    """Return the components at each of `LEVELS` variances, and these, float64 [levels]."""
    logs = variances.flatten().log()
    low, high = logs.min(), logs.max()
    level = ((logs - low) / (high - low).clamp(min=1e-9) * (LEVELS - 1)).round().long()
    count = logs.new_zeros(LEVELS).index_add_(0, level, torch.ones_like(logs))
    even = torch.linspace(0, 1, LEVELS, dtype=torch.float64, device=logs.device)
    return count, (low + (high - low) * even).exp()


def cosine_transform(images: Tensor) -> Tensor:
    """Return the orthonormal DCT-II of [b, C, H, W] along channels, rows, columns."""
    for axis in (1, 2, 3):
        n = torch.arange(size := images.shape[axis], dtype=images.dtype, device=images.device)
        basis = torch.cos(math.pi / size * (n + 0.5) * n[:, None]) * math.sqrt(2 / size)
        basis[0] /= math.sqrt(2)
        images = (images.movedim(axis, -1) @ basis.T).movedim(-1, axis)
    return images
