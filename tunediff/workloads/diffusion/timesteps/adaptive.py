"""Samplers that learn p(t) from the errors of the batches that are trained anyway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tunediff.distributed import World
from tunediff.workloads.diffusion import methods
from tunediff.workloads.diffusion.process import Diffusion, equal_bins
from tunediff.workloads.diffusion.timesteps.base import TableSampler, mixed

REFRESH_EVERY = 8
"""Batches between refreshes of p(t), which then cost a fraction of a percent."""


class Adaptive(TableSampler):
    """Collects the arguments of `update` and learns from several batches at once.

    A refresh is some thirty operations on small tensors; starting them costs the most, for any
    number of images. On several ranks all learn from the batches of all, and use the p(t) of rank
    0: other GPUs, or one that sums in another order, round differently.
    """

    BUFFERS: ClassVar[Mapping[str, str]]
    """Tensors of the state by attribute without `_`, with descriptions for messages."""

    def __init__(self, knobs: Any, diffusion: Diffusion, channels: int, world: World) -> None:
        super().__init__(knobs, diffusion, channels, world)
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []

    def _initial(self, diffusion: Diffusion) -> Tensor:
        return self._p  # uniform until something is learned

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def update(self, t: Tensor, errors: Tensor, weights: Tensor) -> None:
        self.defer(self._collect, t, errors.detach(), weights.detach())

    def _collect(self, t: Tensor, errors: Tensor, weights: Tensor) -> None:
        self._pending.append((t, errors, weights))
        if len(self._pending) >= REFRESH_EVERY:
            gathered, self._pending = self._gathered(), []
            t, errors, weights = gathered.permute(2, 1, 0, 3).flatten(1)
            self._learn(t.long(), errors, weights)
            self._set(self.world.first(self._learned_density()))

    def _gathered(self) -> Tensor:
        """Return all ranks' pending (t, errors, weights), float64 [ranks, batches, 3, b]."""
        if not self._pending:
            return torch.empty(self.world.size, 0, 3, 0, dtype=torch.float64, device=self.device)
        batches = [torch.stack([part.double() for part in batch]) for batch in self._pending]
        return self.world.stack(torch.stack(batches))  # float64 represents every t exactly

    def _learn(self, t: Tensor, errors: Tensor, weights: Tensor) -> None:
        """Learn from errors, weights, float64 [n], at t int64 [n], by batch, then rank."""
        raise NotImplementedError

    def _importance(self) -> Tensor:
        """Return what p(t) is proportional to, float64 [T]; uniform if it sums to 0 or inf."""
        raise NotImplementedError

    def _learned_density(self) -> Tensor:
        """Return p(t) from what this rank has learned, float64 [T]."""
        importance = self._importance()
        total = importance.sum()
        ready = total.isfinite() & (total > 0)
        return torch.where(ready, mixed(importance, self.knobs.uniform_share), 1 / self.steps)

    def state_dict(self) -> dict[str, object]:
        learned = {name: getattr(self, f"_{name}").clone() for name in self.BUFFERS}
        return {"pending": self._gathered()} | learned

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, description in self.BUFFERS.items():
            shape, expected = tuple(state[name].shape), tuple(getattr(self, f"_{name}").shape)
            if shape != expected:
                raise ValueError(
                    f"{description} of shape {shape} does not fit; expected {expected}"
                )
            getattr(self, f"_{name}").copy_(state[name])
        # [batches, 3, b of all ranks]: divided among the ranks of now, however many there were.
        pending = state["pending"].permute(1, 2, 0, 3).flatten(2)
        of_this_rank = pending.tensor_split(self.world.size, dim=2)[self.world.rank]
        self._pending = [(t.long(), e, w) for t, e, w in of_this_rank.to(self.device)]
        self._set(self._learned_density())


class LossSecondMomentSampler(Adaptive):
    """p(t) ∝ √E[L_t²] of t's last H losses, mixed with uniform (improved DDPM, eq. 18).

    p = (1−u)·w/Σw + u/T with w_t = √mean(L²), L the weighted loss. UniformSampler until every t
    has H losses, and while a remembered loss is not finite or all are zero.
    """

    BUFFERS: ClassVar = {"history": "loss history (T, history)", "counts": "losses seen (T)"}

    def __init__(
        self, knobs: methods.LossSecondMoment, diffusion: Diffusion, channels: int, world: World
    ) -> None:
        super().__init__(knobs, diffusion, channels, world)
        # Row t is a ring of its last H losses; a spare element takes what is forgotten.
        self._memory = self._zeros(self.steps * knobs.history + 1)
        self._history = self._memory[:-1].view(self.steps, knobs.history)
        self._counts = self._zeros(self.steps).long()  # losses seen so far

    def _learn(self, t: Tensor, errors: Tensor, weights: Tensor) -> None:
        losses, limit = weights * errors, self.knobs.history
        # A t that occurs several times takes consecutive entries, in the order of the batch.
        t, order = t.sort(stable=True)
        first, end = torch.searchsorted(t, t), torch.searchsorted(t, t, right=True)
        index = torch.arange(len(t), device=self.device)
        entry = t * limit + (self._counts[t] + index - first) % limit
        # More than H of one t: only its last H, so that no entry is written twice.
        entry = torch.where(end - index <= limit, entry, self.steps * limit)
        self._memory.scatter_(0, entry, losses[order])
        self._counts.index_add_(0, t, torch.ones_like(t))

    def _importance(self) -> Tensor:
        full = (self._counts >= self.knobs.history).all()
        return torch.where(full, self._history.square().mean(dim=1).sqrt(), 0.0)


class InfoNoiseSampler(Adaptive):
    """p(λ)·w(λ)^κ ∝ |dH/dλ|·g(σ): the conditional-entropy rate of the image, cut at low noise, at
    log-SNR λ = −2·ln σ (InfoNoiseSampler, Raya et al. 2026, arXiv 2602.18647, version 2; formulas
    and values as public code quotes them).

    The paper's: the rate by I–MMSE, dH(x0|x_σ)/dσ = mmse(σ)/σ³, hence |dH/dλ| = ½·mmse·SNR, half
    the ε-error (eq. 10, 59, 61); the mean error of x0, without the loss weight, in place of mmse,
    in bins of log σ (eq. 13); the gate g = σ³/(σ³ + c³), for the estimate is largest and least
    exact at the low-noise end (eq. 14); the division by w, the loss weight on the error of x0, so
    that p·w follows the rate (eq. 15, κ = 1); draws by the inverse distribution function (eq. 16).
    Its c is the largest σ where mmse/σ³ reaches 0.002 of its maximum (appendix B.6), about 0.15 on
    CIFAR-10; the maximum lies at the lowest σ of the chain and moves with it, so here c is a knob.

    Ours, where we found no value or our networks ask for it: running means in place of a warm-up, a
    buffer and refreshes of so many steps, weighted by (i/n)^(ln 2/h) for image i of n: their
    half-life is the share h of all images so far, so they are as fresh early as late; κ < 1, for w
    is SNR with ε and constant weighting, and division by it draws all high noise alike; and an
    error of x0 above 1 counts as 1: no image in [−1, 1] is that uncertain, but a network that
    predicts ε says so of every image at high noise.
    """

    GATE_POWER = 3
    BUFFERS: ClassVar = {"sums": "running means (2, bins)"}

    def __init__(
        self, knobs: methods.InfoNoise, diffusion: Diffusion, channels: int, world: World
    ) -> None:
        super().__init__(knobs, diffusion, channels, world)
        bins, _ = equal_bins(-diffusion.log_snr, knobs.bins)
        # Bins without a timestep are left out: every one that is left can be visited.
        _, bins = torch.unique(bins, return_inverse=True)
        self._bin = bins.to(self.device)
        self._in_bin = F.one_hot(bins).double().to(self.device)  # [T, bins]
        self._sums = self._zeros(2, int(bins.max()) + 1)  # errors, images
        self._seen = 0
        self._snr = diffusion.snr_table.to(self.device)
        self._to_epsilon = diffusion.to_epsilon.to(self.device)
        gate = 1 / (1 + (knobs.gate**2 * self._snr).pow(self.GATE_POWER / 2))
        width = torch.gradient(diffusion.log_snr)[0].abs()  # |dλ/dt|: makes p a density over λ
        self._passed = gate * width.to(self.device)

    def _learn(self, t: Tensor, errors: Tensor, weights: Tensor) -> None:
        to_epsilon, snr = self._to_epsilon[t], self._snr[t]
        epsilon = to_epsilon * errors
        rate = epsilon / (epsilon / snr).clamp(min=1.0)
        rate = rate / (weights * snr / to_epsilon).pow(self.knobs.compensation)
        # Loss scaling skips steps that overflow: their errors are not used.
        finite = rate.isfinite()
        both = torch.stack((torch.where(finite, rate, 0.0), finite.double()))
        added = both @ self._in_bin[t]  # a GPU's index_add_ sums in another order every time
        self._seen += len(t)
        self._sums = 0.5 ** (len(t) / (self.knobs.half_life * self._seen)) * self._sums + added

    def _importance(self) -> Tensor:
        visited, mean = self._sums[1] >= 1, self._sums[0] / self._sums[1]
        # A bin that was not visited yet counts like the mean of the others.
        others = torch.where(visited, mean, 0.0).sum() / visited.sum()
        mean = torch.where(visited, mean, others)[self._bin]
        return mean.clamp(min=1e-24 * mean.max()) * self._passed

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._seen = state["seen"]
