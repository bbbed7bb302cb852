"""A sampler that is a small network, rewarded by each step's gain (Kim et al. 2024)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunediff.distributed import World
from tunediff.workloads.diffusion import methods
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps.base import ErrorsAt, TimestepSampler, inverse


class BetaPolicySampler(TimestepSampler):
    """t ~ Beta(a(x0), b(x0)) of a network trained by policy gradient (arXiv 2411.09998, alg. 1, 2).

    Every `interval` optimizer steps the reward of an image is by how much the step lowered its KL
    term, in the mean over a few timesteps S: R = mean over τ in S of KL_τ(before) − KL_τ(after),
    with the same x0 and noise on both sides and dropout off. The policy ascends R·log π(t|x0) +
    entropy·H(π). S are the timesteps with the largest squared correlation (which orders as the
    F-test of a univariate regression does) between their change and the sum over the scanned
    timesteps, over the last `queue` scans of one image each.

    The Beta density is taken at the middle of each of the T cells and scaled to sum to 1: log π and
    H are those of what is really drawn, and the first and last timestep are not cut in half as by
    rounding. KL_τ = β²/(2σ²α(1−ᾱ)) times the mean squared ε-error, in nats per dimension (DDPM, eq.
    12), σ² the posterior variance, that of t = 1 also at t = 0. The policy here is a convolution
    network of some 6,000 parameters that starts uniform (a = b = 1).
    """

    def __init__(
        self, knobs: methods.BetaPolicy, diffusion: Diffusion, channels: int, world: World
    ) -> None:
        super().__init__(knobs, diffusion, channels, world)
        self._policy = _PolicyNetwork(channels).to(self.device)
        self._optimizer = torch.optim.Adam(self._policy.parameters(), lr=knobs.policy_lr)
        cells = torch.arange(self.steps, device=self.device, dtype=torch.float32)
        middle = (cells + 0.5) / self.steps
        self._logs = torch.stack((middle.log(), (1 - middle).log()))  # [2, T]

        alphas, ab = 1 - diffusion.betas, diffusion.alphas_cumprod
        variance = torch.cat((diffusion.posterior_variance[1:2], diffusion.posterior_variance[1:]))
        self.kl = (diffusion.betas**2 / (2 * variance * alphas * (1 - ab))).float().to(self.device)
        self.scanned = self._evenly(self.steps, knobs.scan)
        self._selected = self.scanned[self._evenly(knobs.scan, knobs.selected)]
        self._queue = torch.zeros(knobs.queue, knobs.scan, device=self.device)
        self._scans = self._taken = 0
        self._drawn: tuple[Tensor, Tensor, int, int] | None = None
        self._before: tuple[Tensor, ...] | None = None

    def _evenly(self, count: int, chosen: int) -> Tensor:
        return ((torch.arange(chosen, device=self.device) + 0.5) * count / chosen).long()

    @property
    def _due(self) -> bool:
        return self._taken % int(self.knobs.interval) == 0

    # ---- drawing t
    def sample(
        self,
        images: Tensor,
        generator: torch.Generator | None = None,
        batch: int | None = None,
        first: int = 0,
    ) -> tuple[Tensor, Tensor]:
        batch, stop = batch or len(images), first + len(images)
        with torch.no_grad():
            log_p = self._log_p(images)
            u = torch.rand(batch, generator=generator, device=self.device)[first:stop, None]
            t = inverse(log_p.exp().cumsum(1), u)
            log_ratio = math.log(self.steps) + log_p.gather(1, t)
            factor = torch.exp(-self.knobs.importance_correction * log_ratio)
            if self._due:
                self._drawn = (images, t[:, 0], batch, first)
                # What counts as p(t) until the next update is the mean over this batch.
                self._p = self.world.mean(F.softmax(log_p.double(), dim=1).mean(0))
        return t[:, 0], factor[:, 0]

    def _log_p(self, images: Tensor) -> Tensor:
        """Return log π(t|x0), float32 [b, T]."""
        log_p = F.log_softmax((self._policy(images.float()) - 1) @ self._logs, dim=1)
        share = self.knobs.uniform_share
        if share == 0.0:
            return log_p
        floor = torch.full_like(log_p, math.log(share / self.steps))
        return torch.logaddexp(log_p + math.log1p(-share), floor) if share < 1.0 else floor

    def mass(self) -> Tensor:
        return self._p * (self.steps * self._p).pow(-self.knobs.importance_correction)

    # ---- learning
    def before_step(self, errors_at: ErrorsAt, generator: torch.Generator) -> None:
        if not self._due:
            return
        assert self._drawn is not None
        images, _, batch, first = self._drawn
        # All ranks scan one image, and so choose the same S.
        scan_image, shape = self.world.first(images[:1].clone()), images.shape[1:]
        options: dict[str, Any] = {"generator": generator, "device": self.device}
        scan_noise = torch.randn((len(self.scanned), *shape), **options)
        noise = torch.randn((batch, *shape), **options)[first : first + len(images)]
        inputs = (scan_image, scan_noise, noise)
        self._before = (*inputs, *self._terms(errors_at, *inputs))

    def after_step(self, errors_at: ErrorsAt) -> None:
        if self._before is not None:
            scan_image, scan_noise, noise, scan_before, before = self._before
            scan_after, after = self._terms(errors_at, scan_image, scan_noise, noise)
            self._improve(_finite((before - after).mean(1)))
            # Rank 0's change on all ranks: their convolutions may round differently.
            self.remember(self.world.first(_finite(scan_before - scan_after)))
            self._before = self._drawn = None
        self._taken += 1

    def _terms(
        self, errors_at: ErrorsAt, scan_image: Tensor, scan_noise: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return an image's KL at scanned timesteps [scan], all images' at S [b, |S|]."""
        assert self._drawn is not None
        images, scanned = self._drawn[0], self.scanned
        scan = self.kl[scanned] * errors_at(scan_image.expand_as(scan_noise), scan_noise, scanned)
        selected = self._selected[:, None].expand(-1, len(images))
        terms = [self.kl[t] * errors_at(images, noise, t) for t in selected]
        return scan, torch.stack(terms, dim=1)

    def _improve(self, reward: Tensor) -> None:
        """Train the policy one step towards timesteps with a larger reward [b]."""
        assert self._drawn is not None
        images, t, _, _ = self._drawn
        # Policy gradient: the density is computed again, with gradients, for the t that was drawn.
        with torch.enable_grad():
            log_p = self._log_p(images)
            entropy = -(log_p.exp() * log_p).sum(1)
            gain = reward * log_p.gather(1, t[:, None])[:, 0] + self.knobs.entropy * entropy
            self._optimizer.zero_grad(set_to_none=True)
            (-gain.mean()).backward()
        for parameter in self._policy.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(self.world.mean(parameter.grad.clone()))
        nn.utils.clip_grad_norm_(self._policy.parameters(), 1.0)
        self._optimizer.step()

    def remember(self, change: Tensor) -> None:
        """Add a scan [scan] to the queue, and choose S again once there are three to compare."""
        self._queue[self._scans % len(self._queue)] = change
        self._scans += 1
        rows = self._queue[: min(self._scans, len(self._queue))]
        if len(rows) < 3:
            return
        centred = rows - rows.mean(0)
        total = centred.sum(1, keepdim=True)
        covariance, variance = (centred * total).sum(0), centred.square().sum(0)
        correlation = covariance.square() / (variance * total.square().sum())
        best = torch.nan_to_num(correlation, nan=-1.0).topk(self.knobs.selected).indices
        self._selected = self.scanned[best]

    # ---- state
    def state_dict(self) -> dict[str, object]:
        state = {
            "policy": self._policy.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "queue": self._queue,
            "selected": self._selected,
            "p": self._p,
            "scans": self._scans,
            "taken": self._taken,
        }
        return copy.deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._policy.load_state_dict(state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._queue.copy_(state["queue"])
        self._selected, self._p = state["selected"].to(self.device), state["p"].to(self.device)
        self._scans, self._taken = state["scans"], state["taken"]
        self._before = self._drawn = None


class _PolicyNetwork(nn.Module):
    """Images [b, C, H, W] → (a, b) > 0 of a Beta distribution [b, 2]; at first (1, 1)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 16, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.SiLU(),
        )
        self.head = nn.Linear(32, 2)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, math.log(math.e - 1))  # softplus of it is 1

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.body(images).mean((2, 3))
        return F.softplus(self.head(pooled)) + 1e-5


def _finite(change: Tensor) -> Tensor:
    """Replace non-finite changes by 0: they come from a step that overflowed and was skipped."""
    return torch.nan_to_num(change, nan=0.0, posinf=0.0, neginf=0.0)
