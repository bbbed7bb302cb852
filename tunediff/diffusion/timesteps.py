"""Which timesteps are trained on. To add a sampler: a dataclass in `tunediff.config`, a class here, a line in `KINDS`.

A sampler draws t with probability p(t) and returns a factor for each image's loss: 1 where p itself is meant to weight
the loss, 1/(T·p) where the objective is to stay that of uniform t.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tunediff import config


class TimestepSampler(ABC):
    """The seam: `sample`, then train, then `update` with the losses. `state_dict` belongs in the checkpoint."""

    adaptive: ClassVar[bool] = False
    """Whether p(t) depends on the losses, that is whether `update` does anything."""

    def __init__(self, member: Any, steps: int, device: torch.device | str) -> None:
        """`member`: this sampler's part of the configuration; `steps`: T; tensors are returned on `device`."""
        self.steps, self.device = steps, torch.device(device)

    @abstractmethod
    def sample(
        self, batch: int, generator: torch.Generator | None = None, part: tuple[int, int] = (0, 1)
    ) -> tuple[Tensor, Tensor]:
        """t int64 [batch] in [0, T) and the factor of each image's loss, float32 [batch].

        `generator` lives on the sampler's device. `part` = (index, count): this call draws one of `count` equal pieces
        of the global batch (ranks, accumulation steps); samplers that spread t over the batch use it.
        """

    @abstractmethod
    def probabilities(self) -> Tensor:
        """p(t), float64 [T], sums to 1: what `sample` draws from now."""

    def update(self, t: Tensor, losses: Tensor) -> None:  # noqa: B027 (most samplers learn nothing)
        """Learn from losses [B] at t [B]: with the weighting w(t), without the factor of `sample`.

        In a distributed run every rank must call this with equally many losses; all ranks then hold the same state.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """What has been learned; a copy."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly where `state_dict` was taken. Raises `ValueError` if it is of another configuration."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state; found {', '.join(state)}")


class Uniform(TimestepSampler):
    """Every t alike, each image for itself (DDPM, algorithm 1)."""

    def sample(
        self, batch: int, generator: torch.Generator | None = None, part: tuple[int, int] = (0, 1)
    ) -> tuple[Tensor, Tensor]:
        t = torch.randint(self.steps, (batch,), generator=generator, device=self.device)
        return t, torch.ones(batch, device=self.device)

    def probabilities(self) -> Tensor:
        return torch.full((self.steps,), 1 / self.steps, dtype=torch.float64, device=self.device)


class Stratified(Uniform):
    """t_i = ⌊T·frac(u + i/B)⌋ with one u for the batch: the same p(t), less variance (VDM, arXiv 2107.00630).

    Each piece of a global batch is spread over the whole chain. Where the pieces draw the same u (ranks whose
    generators have the same state), piece j of n is shifted by j/(B·n), so that together they are one stratified batch.
    """

    def sample(
        self, batch: int, generator: torch.Generator | None = None, part: tuple[int, int] = (0, 1)
    ) -> tuple[Tensor, Tensor]:
        index, count = part
        u = torch.rand(1, generator=generator, device=self.device, dtype=torch.float64)
        grid = torch.arange(batch, device=self.device, dtype=torch.float64)
        points = (u + (grid + index / count) / batch).frac()
        t = (self.steps * points).long().clamp_(max=self.steps - 1)  # the product may round up to T
        return t, torch.ones(batch, device=self.device)


class LossSecondMoment(TimestepSampler):
    """p(t) ∝ √E[L_t²] over the last H losses of each t, mixed with a uniform share (improved DDPM, §3.3, eq. 18).

    p = (1−u)·w/Σw + u/T with w_t = √mean(L²); factor (1/(T·p))^α. Uniform until every t has H losses, and while a
    remembered loss is not finite or all are zero. Nothing here makes the host wait for the device.
    """

    adaptive = True

    def __init__(self, member: config.LossSecondMoment, steps: int, device: torch.device | str) -> None:
        super().__init__(member, steps, device)
        self.member = member
        # Row t holds its last H losses, as a ring; one spare element takes what is not to be remembered.
        self._memory = torch.zeros(steps * member.history + 1, dtype=torch.float64, device=self.device)
        self._history = self._memory[:-1].view(steps, member.history)
        self._counts = torch.zeros(steps, dtype=torch.int64, device=self.device)  # losses seen so far
        self._refresh()

    def sample(
        self, batch: int, generator: torch.Generator | None = None, part: tuple[int, int] = (0, 1)
    ) -> tuple[Tensor, Tensor]:
        u = torch.rand(batch, generator=generator, device=self.device, dtype=torch.float64)
        t = torch.searchsorted(self._cumulative, u * self._cumulative[-1], right=True).clamp_(max=self.steps - 1)
        return t, self._factor[t]

    def probabilities(self) -> Tensor:
        return self._p.clone()

    def update(self, t: Tensor, losses: Tensor) -> None:
        t, losses = _gather_ranks(t, losses.detach())
        limit = self.member.history
        # A t that occurs several times takes consecutive places of its ring, in the order of the batch.
        t, order = t.sort(stable=True)
        first, end = torch.searchsorted(t, t), torch.searchsorted(t, t, right=True)
        here = torch.arange(len(t), device=self.device)
        place = t * limit + (self._counts[t] + here - first) % limit
        # More than H of one t: only its last H, so that no place is written twice.
        place = torch.where(end - here <= limit, place, self.steps * limit)
        self._memory.scatter_(0, place, losses[order].double())
        self._counts.index_add_(0, t, torch.ones_like(t))
        self._refresh()

    def state_dict(self) -> dict[str, Tensor]:
        return {"history": self._history.clone(), "counts": self._counts.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state["history"].shape != self._history.shape:
            found, expected = tuple(state["history"].shape), tuple(self._history.shape)
            raise ValueError(f"loss history of shape {found} (T, history) does not fit; expected {expected}")
        self._history.copy_(state["history"])
        self._counts.copy_(state["counts"])
        self._refresh()

    def _refresh(self) -> None:
        steps, share = self.steps, self.member.uniform_share
        w = self._history.square().mean(dim=1).sqrt()
        total = w.sum()
        ready = (self._counts >= self.member.history).all() & total.isfinite() & (total > 0)
        self._p = torch.where(ready, (1 - share) * w / total + share / steps, 1 / steps)
        self._cumulative = self._p.cumsum(0)
        self._factor = (steps * self._p).pow(-self.member.importance_correction).float()


KINDS: dict[type, type[TimestepSampler]] = {
    config.Uniform: Uniform,
    config.Stratified: Stratified,
    config.LossSecondMoment: LossSecondMoment,
}


def build(member: config.Timesteps, steps: int, device: torch.device | str) -> TimestepSampler:
    """The sampler that the configuration asks for, over T = `steps` timesteps."""
    return KINDS[type(member)](member, steps, device)


def _gather_ranks(t: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """(t, losses) of all ranks, rank after rank; as they are in a run of one process."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return t, losses
    mine = torch.stack((t.double(), losses.double()))  # one collective; float64 holds t exactly
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    both = torch.cat(every, dim=1)
    return both[0].long(), both[1]
