"""Which timesteps are trained on, as the training draws them: the interface of samplers to the
training loop, those that do not learn, and those that learn p(t) from the errors of the batches
that are trained anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tunediff.distributed import World
from tunediff.workloads.diffusion import methods
from tunediff.workloads.diffusion.process import Diffusion, equal_bins

REFRESH_EVERY = 8
"""Batches between refreshes of p(t), which then cost a fraction of a percent."""
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
        """Continue exactly from `state_dict`, of a sampler with the same knobs."""


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


# ---- samplers that learn
class Adaptive(TableSampler):
    """Collects the arguments of `update` and learns from several batches at once.

    A refresh is some thirty operations on small tensors; starting them costs the most, for any
    number of images. On several ranks all learn from the batches of all, and use the p(t) of rank
    0: other GPUs, or one that sums in another order, round differently.
    """

    BUFFERS: ClassVar[Sequence[str]]
    """Tensors of the state: attributes without `_`."""

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
        for name in self.BUFFERS:
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

    BUFFERS = ("history", "counts")

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
    BUFFERS = ("sums",)

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
