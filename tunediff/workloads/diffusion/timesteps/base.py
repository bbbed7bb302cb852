"""The interface of timestep samplers to the training loop, and those that do not learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tunediff.distributed import World
from tunediff.workloads.diffusion.process import Diffusion

ErrorsAt = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x0 [n, C, H, W], noise [n, C, H, W], t int64 [n]) → mean squared ε-error of the network as it is
now, float32 [n], without dropout and without gradients."""


class TimestepSampler:
    """`sample`, then train, then `update` with the errors. `state_dict` belongs in the checkpoint.

    A sampler draws t with probability p(t) and returns a factor for each image's loss: (1/(T·p))^α,
    where α = 1 keeps the objective that of uniform t and α = 0 makes p(t) itself the weighting. All
    ranks call every method equally often and hold the same state.
    """

    def __init__(self, knobs: Any, diffusion: Diffusion, channels: int, world: World) -> None:
        """`knobs`: the section `timesteps`; `channels`: those of an image."""
        self.knobs, self.steps, self.world = knobs, diffusion.steps, world
        self.device = diffusion.device
        self._p = torch.full((self.steps,), 1 / self.steps, dtype=torch.float64, device=self.device)
        self.defer: Callable[..., object] = lambda call, *tensors: call(*tensors)
        """Calls what learns with its tensors: at once, or after the step where that is captured."""

    def advance(self, progress: float) -> None:
        """Called before each draw with the fraction of training done, equal on all ranks."""

    def sample(
        self,
        images: Tensor,
        generator: torch.Generator | None = None,
        batch: int | None = None,
        first: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Return t int64 [b] in [0, T), factors of the losses float32 [b]; `images` [b, C, H, W].

        They are images first … first+b−1 of a batch of `batch` (null: b) that ranks share: each
        rank draws for the whole batch from a `generator` (on the sampler's device) of equal state
        and keeps its part.
        """
        t, factor = self._draw(batch or len(images), generator)
        of_this_rank = slice(first, first + len(images))
        return t[of_this_rank], factor[of_this_rank]

    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return t and factor for all images of all ranks."""
        raise NotImplementedError

    def probabilities(self) -> Tensor:
        """Return p(t), float64 [T], sum 1: what `sample` draws from, averaged over images."""
        return self._p.clone()

    def mass(self) -> Tensor:
        """Return p(t) times the factor, float64 [T] on the device: how much an error at t counts,
        before the weighting. A new tensor object once it has changed."""
        return self._p

    def update(self, t: Tensor, errors: Tensor, weights: Tensor) -> None:
        """Learn from mean squared errors [b] at t [b], weights w(t) [b]; without the factor."""

    def before_step(self, errors_at: ErrorsAt, generator: torch.Generator) -> None:
        """Called after the backward pass and before the weights change."""

    def after_step(self, errors_at: ErrorsAt) -> None:
        """Called after the weights have changed."""

    def state_dict(self) -> dict[str, object]:
        """Return a copy of what was learned, in plain containers. All ranks call it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from `state_dict`. Raises `ValueError` for another configuration."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state; found {', '.join(state)}")


class UniformSampler(TimestepSampler):
    """UniformSampler t, independent for each image (DDPM, algorithm 1)."""

    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        t = torch.randint(self.steps, (batch,), generator=generator, device=self.device)
        return t, torch.ones(batch, device=self.device)


class StratifiedSampler(TimestepSampler):
    """t_i = ⌊T·frac(u + i/B)⌋ with one u per batch: uniform, less variance (arXiv 2107.00630)."""

    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        t = (self.steps * stratified(batch, self.device, generator)).long()
        t = t.clamp_(max=self.steps - 1)  # the product may round up to T
        return t, torch.ones(batch, device=self.device)


class TableSampler(TimestepSampler):
    """Draws from a table of p(t) by its inverse distribution; the host does not wait."""

    def __init__(self, knobs: Any, diffusion: Diffusion, channels: int, world: World) -> None:
        super().__init__(knobs, diffusion, channels, world)
        self._until_over = False
        self.cumulative, self._factor = (
            torch.empty_like(self._p),
            torch.empty_like(self._p).float(),
        )
        self._set(self._initial(diffusion).to(self.device))

    def _initial(self, diffusion: Diffusion) -> Tensor:
        """Return p(t) at the start, float64 [T] on any device."""
        return mixed(self.knobs.density(diffusion), getattr(self.knobs, "uniform_share", 0.0))

    def advance(self, progress: float) -> None:
        if not self._until_over and progress >= self.knobs.until < 1:
            self._until_over = True
            self._set(self._p)

    def _set(self, p: Tensor) -> None:
        """Draw from p float64 [T], of sum 1, from now on; uniformly once `until` is over."""
        if self._until_over:
            p = torch.full_like(p, 1 / self.steps)
        # The distribution function is counted in units of 2⁻⁵², which float64 holds exactly: a GPU
        # sums floating-point numbers in any order, and ranks would draw different timesteps.
        self._p, cumulative = p, (p * 2.0**52).round().long().cumsum(0).double()
        factor = (self.steps * p).pow(-self.knobs.importance_correction)
        self._mass = torch.where(p > 0, p * factor, 0.0)
        # In place: a captured step reads these two where they lay when it was captured.
        self.cumulative.copy_(cumulative)
        self._factor.copy_(factor)

    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        if self.knobs.stratified:
            u = stratified(batch, self.device, generator)
        else:
            u = torch.rand(batch, generator=generator, device=self.device, dtype=torch.float64)
        t = inverse(self.cumulative, u)
        return t, self._factor[t]

    def mass(self) -> Tensor:
        return self._mass


class SpeedSampler(TableSampler):
    """SpeeD (arXiv 2405.17403) with the mirrored draws of its public code, if `dual`.

    The second half of a batch then mirrors the first at m, the first timestep (plus one), from the
    steepest on, where √(1−ᾱ) grows by less than 1e-4 per step of a chain of 1,000: t' = m−t below
    m, t−m from m on. The public code does this with every batch, although τ of the paper and m
    differ; p(t) is then the mean of both. It has linear and cosine schedules, which begin steeply;
    the noise of `edm` begins as slowly as it ends.
    """

    def _initial(self, diffusion: Diffusion) -> Tensor:
        p, steps = super()._initial(diffusion), self.steps
        growth = torch.gradient((1 - diffusion.alphas_cumprod).sqrt())[0]
        steepest = int(growth.argmax())
        slow = (growth[steepest:] < 0.1 / steps).nonzero() + steepest
        self._mirror = min(int(slow[0]) + 1, steps - 1) if len(slow) else steps - 1
        self._first_half = p.cumsum(0).to(self.device)
        if not self.knobs.dual:
            return p
        return (p + torch.zeros_like(p).index_add_(0, self._mirrored(torch.arange(steps)), p)) / 2

    def _mirrored(self, t: Tensor) -> Tensor:
        return torch.where(t < self._mirror, self._mirror - t, t - self._mirror)

    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        if self._until_over or not self.knobs.dual:
            return super()._draw(batch, generator)
        half = batch - batch // 2
        u = torch.rand(half, generator=generator, device=self.device, dtype=torch.float64)
        t = inverse(self._first_half, u)
        t = torch.cat((t, self._mirrored(t)))[:batch]
        return t, self._factor[t]


def stratified(batch: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Return frac(u + i/B), i = 0 … B−1, one u, float64 [B] (arXiv 2107.00630, app. I)."""
    u = torch.rand(1, generator=generator, device=device, dtype=torch.float64)
    return (u + torch.arange(batch, device=device, dtype=torch.float64) / batch).frac()


def inverse(cumulative: Tensor, u: Tensor) -> Tensor:
    """Return t int64 where a distribution [(B,) T] of any sum passes u [B(, 1)] in [0, 1)."""
    t = torch.searchsorted(cumulative, u * cumulative[..., -1:], right=True)
    return t.clamp_(max=cumulative.shape[-1] - 1)


def mixed(p: Tensor, uniform_share: float) -> Tensor:
    """Return (1 − u)·p + u/T, after scaling p to sum to 1."""
    return (1 - uniform_share) * p / p.sum() + uniform_share / len(p)
