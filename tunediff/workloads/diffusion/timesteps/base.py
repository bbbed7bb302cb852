"""The interface between the training loop and the timestep samplers."""

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


KINDS: dict[type, type[TimestepSampler]] = {}
"""The sampler of each member of `methods.Timesteps`: `class Speed(TableSampler,
of=methods.Speed)`."""


class TimestepSampler:
    """`sample`, then train, then `update` with the errors. `state_dict` belongs in the checkpoint.

    A sampler draws t with probability p(t) and returns a factor for each image's loss: (1/(T·p))^α,
    where α = 1 keeps the objective that of uniform t and α = 0 makes p(t) itself the weighting. In
    a distributed run every rank calls every method equally often, and all ranks hold the same
    state.
    """

    def __init_subclass__(cls, of: type | None = None) -> None:
        if of is not None:
            KINDS[of] = cls

    def __init__(self, member: Any, diffusion: Diffusion, channels: int, world: World) -> None:
        """`member`: this sampler's part of the configuration; `channels`: those of an image."""
        self.member, self.steps, self.device, self.world = (
            member,
            diffusion.steps,
            diffusion.device,
            world,
        )
        self._p = self._initial(diffusion).to(self.device)

    def _initial(self, diffusion: Diffusion) -> Tensor:
        """Return p(t) at the start, float64 [T] on any device."""
        return torch.full((self.steps,), 1 / self.steps, dtype=torch.float64)

    def advance(self, progress: float) -> None:
        """Called before each draw with the fraction of the training that is over, equal on all
        ranks."""

    def sample(
        self,
        images: Tensor,
        generator: torch.Generator | None = None,
        batch: int | None = None,
        first: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Return t int64 [b] in [0, T) and the factor of each image's loss, float32 [b], for
        `images` [b, C, H, W].

        They are images first … first+b−1 of a batch of `batch` (null: b) that ranks share: each
        rank draws for the whole batch from a `generator` (on the sampler's device) of equal state
        and keeps its part.
        """
        t, factor = self._draw(batch or len(images), generator)
        of_this_rank = slice(first, first + len(images))
        return t[of_this_rank], factor[of_this_rank]

    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return t and factor for a whole batch."""
        raise NotImplementedError

    def probabilities(self) -> Tensor:
        """Return p(t), float64 [T] on the device, sums to 1: what `sample` draws from now, averaged
        over images."""
        return self._p.clone()

    def mass(self) -> Tensor:
        """Return p(t) times the factor, float64 [T] on the device: how much an error at t counts,
        before the weighting.

        A new tensor object once it has changed.
        """
        return self._p

    def update(self, t: Tensor, errors: Tensor, weights: Tensor) -> None:
        """Learn from the mean squared errors [b] at t [b] and their weights w(t) [b], without the
        factor."""

    def before_step(self, errors_at: ErrorsAt, generator: torch.Generator) -> None:
        """Called after the backward pass and before the weights change."""

    def after_step(self, errors_at: ErrorsAt) -> None:
        """Called after the weights have changed."""

    def state_dict(self) -> dict[str, object]:
        """Return a copy of what was learned: tensors, numbers, lists, dictionaries. All ranks call
        it together."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken. Raises `ValueError` if it is of another
        configuration."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state; found {', '.join(state)}")


class TableSampler(TimestepSampler):
    """Draws from a table of p(t) by its inverse distribution function; the host never waits for the
    device."""

    def __init__(self, member: Any, diffusion: Diffusion, channels: int, world: World) -> None:
        super().__init__(member, diffusion, channels, world)
        self._over = False
        self._set(self._p)

    def advance(self, progress: float) -> None:
        if not self._over and progress >= self.member.until < 1:
            self._over = True
            self._set(self._p)

    def _set(self, p: Tensor) -> None:
        """Draw from p float64 [T], of sum 1, from now on; uniformly once `until` is over.

        Its distribution function is counted in units of 2⁻⁵², which float64 holds exactly: a GPU
        sums floating-point numbers in whatever order, and ranks would draw different timesteps.
        """
        if self._over:
            p = torch.full_like(p, 1 / self.steps)
        self._p, self._cumulative = p, (p * 2.0**52).round().long().cumsum(0).double()
        table = (self.steps * p).pow(-self.member.importance_correction)
        self._mass = torch.where(p > 0, p * table, 0.0)
        self._factor = table.float()

    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        if self.member.stratified:
            u = stratified(batch, self.device, generator)
        else:
            u = torch.rand(batch, generator=generator, device=self.device, dtype=torch.float64)
        t = torch.searchsorted(self._cumulative, u * self._cumulative[-1], right=True).clamp_(
            max=self.steps - 1
        )
        return t, self._factor[t]

    def mass(self) -> Tensor:
        return self._mass


def stratified(batch: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Return frac(u + i/B) for i = 0 … B−1 and one uniform u, float64 [B] (VDM, arXiv 2107.00630,
    appendix I)."""
    u = torch.rand(1, generator=generator, device=device, dtype=torch.float64)
    return (u + torch.arange(batch, device=device, dtype=torch.float64) / batch).frac()


def mixed(p: Tensor, uniform_share: float) -> Tensor:
    """Return (1 − u)·p + u/T, after scaling p to sum to 1."""
    return (1 - uniform_share) * p / p.sum() + uniform_share / len(p)
