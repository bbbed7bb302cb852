"""Samplers whose p(t) does not change."""

from __future__ import annotations

import torch
from torch import Tensor

from tunediff.workloads.diffusion import methods
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps.base import (
    TableSampler,
    TimestepSampler,
    mixed,
    stratified,
)


class Uniform(TimestepSampler, of=methods.Uniform):
    """Uniform t, independent for each image (DDPM, algorithm 1)."""

    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        t = torch.randint(self.steps, (batch,), generator=generator, device=self.device)
        return t, torch.ones(batch, device=self.device)


class Stratified(Uniform, of=methods.Stratified):
    """t_i = ⌊T·frac(u + i/B)⌋ with one u for the batch: the same p(t), less variance (VDM, arXiv
    2107.00630)."""

    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        t = (self.steps * stratified(batch, self.device, generator)).long()
        return t.clamp_(max=self.steps - 1), torch.ones(
            batch, device=self.device
        )  # the product may round up to T


class Speed(TableSampler, of=methods.Speed):
    """p = k/(T + τ(k−1)) for t < τ and 1/(T + τ(k−1)) from τ on (SpeeD, arXiv 2405.17403, §3.3; its
    public code).

    With `dual`, the second half of a batch mirrors the first at m, the first timestep (plus one),
    from the steepest on, where √(1−ᾱ) grows by less than 1e-4 per step of a chain of 1,000: t' =
    m−t below m, t−m from m on. The public code does this with every batch, although τ of the paper
    and m differ; p(t) is then the mean of both. It has linear and cosine schedules, which begin
    steeply; the noise of `edm` begins as slowly as it ends.
    """

    def _initial(self, diffusion: Diffusion) -> Tensor:
        steps = self.steps
        p = torch.ones(steps, dtype=torch.float64)
        p[: round(self.member.tau * steps)] = self.member.suppression
        p /= p.sum()
        growth = torch.gradient((1 - diffusion.alphas_cumprod).sqrt())[0]
        steepest = int(growth.argmax())
        slow = (growth[steepest:] < 0.1 / steps).nonzero() + steepest
        self._mirror = min(int(slow[0]) + 1, steps - 1) if len(slow) else steps - 1
        self._drawn_cumulative = p.cumsum(0).to(self.device)
        if not self.member.dual:
            return p
        return (p + torch.zeros_like(p).index_add_(0, self._mirrored(torch.arange(steps)), p)) / 2

    def _mirrored(self, t: Tensor) -> Tensor:
        return torch.where(t < self._mirror, self._mirror - t, t - self._mirror)

    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        if self._over or not self.member.dual:
            return super()._draw(batch, generator)
        u = torch.rand(
            batch - batch // 2, generator=generator, device=self.device, dtype=torch.float64
        )
        last = self._drawn_cumulative[-1]
        t = torch.searchsorted(self._drawn_cumulative, u * last, right=True).clamp_(
            max=self.steps - 1
        )
        t = torch.cat((t, self._mirrored(t)))[:batch]
        return t, self._factor[t]


class LogitNormal(TableSampler, of=methods.LogitNormal):
    """t = ⌊T·σ(m + s·n)⌋ with standard normal n (Stable Diffusion 3, arXiv 2403.03206, §3.1).

    Each t has the exact probability of its cell [t/T, (t+1)/T). m > 0 draws noisier timesteps; code
    that indexes a descending list of timesteps with u has the opposite direction.
    """

    def _initial(self, diffusion: Diffusion) -> Tensor:
        edges = torch.arange(self.steps + 1, dtype=torch.float64) / self.steps
        below = torch.special.ndtr((torch.logit(edges) - self.member.mean) / self.member.std)
        return mixed(below.diff(), self.member.uniform_share)


class _LogSnr(TableSampler):
    """p(t) ∝ density(λ_t)·|λ_{t+1} − λ_{t−1}|/2 with λ = log SNR: a density over noise levels on a
    fixed chain."""

    def _initial(self, diffusion: Diffusion) -> Tensor:
        log_snr = diffusion.snr_table.log()
        log_p = self._log_density(log_snr) + torch.gradient(log_snr)[0].abs().log()
        return mixed(
            log_p.softmax(0), self.member.uniform_share
        )  # in logarithms: nothing underflows

    def _log_density(self, log_snr: Tensor) -> Tensor:
        """Return the log density at λ up to a constant, float64 [T]."""
        raise NotImplementedError


class LogNormal(_LogSnr, of=methods.LogNormal):
    """ln σ ~ N(P_mean, P_std²) with σ² = 1/SNR (EDM, Karras et al. 2022, arXiv 2206.00364, table
    1)."""

    def _log_density(self, log_snr: Tensor) -> Tensor:
        return -0.5 * ((-log_snr / 2 - float(self.member.mean)) / float(self.member.std)).square()


class LogSnrLaplace(_LogSnr, of=methods.LogSnrLaplace):
    """exp(−|λ−μ|/b)/2b, the Laplace noise schedule (Hang et al. 2024, arXiv 2407.03297, table
    1)."""

    def _log_density(self, log_snr: Tensor) -> Tensor:
        return -(log_snr - float(self.member.log_snr)).abs() / float(self.member.scale)


class LogSnrCosine(_LogSnr, of=methods.LogSnrCosine):
    """sech((λ−μ)/2)/2π, how the cosine schedule spreads λ, shifted by μ (simple diffusion, arXiv
    2301.11093, §2.1)."""

    def _log_density(self, log_snr: Tensor) -> Tensor:
        return -torch.cosh((log_snr - float(self.member.log_snr)) / 2).log()
