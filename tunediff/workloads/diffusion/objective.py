"""The training objective: how much the loss of each timestep counts.

The formulas of static weightings are in `methods`; a learned one is a class here, named in
`build_weighting`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tunediff.workloads.diffusion import methods
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps.base import TimestepSampler


class StaticWeighting:
    """w(t) from the table of a configuration, and the interface of all weightings."""

    learned = False
    """Whether w(t) changes during training."""

    def __init__(self, table: Tensor, device: torch.device) -> None:
        """`table`: w(t) in the units of the prediction, float64 [T]."""
        self._table, self._weights = table, table.to(device, torch.float32)

    def weights(self, t: Tensor) -> Tensor:
        """Return w at t [B] in the prediction's units: float32 [B], detached, on the device."""
        return self._weights[t]

    def table(self) -> Tensor:
        """Return the present w(t), float64 [T] on the CPU; a copy."""
        return self._table.clone()

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer trains beside the network."""
        return []

    def learning_loss(self, t: Tensor, errors: Tensor) -> Tensor | None:
        """Return the loss of a learned weighting at the prediction's mean squared errors [B] at
        t [B], a scalar whose gradient reaches `parameters()` only; else None."""
        return None

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of what has been learned."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`, of a weighting with the same knobs."""


class UncertaintyWeighting(StaticWeighting):
    """w = e^−u(t), u learned as the log of the mean error (EDM2, arXiv 2312.02696, eq. 21).

    u is a linear map of random Fourier features of the noise level: √2·cos(2π·(f·c + φ)), f normal,
    φ uniform, c = ¼·ln σ, σ = √((1−ᾱ)/ᾱ), divided by √channels so that u does not grow with their
    number. The features are the same in every training; the map starts at zero, hence w = 1.
    """

    learned = True
    SEED = 0

    def __init__(self, knobs: methods.Uncertainty, diffusion: Diffusion) -> None:
        self._bound, device, count = knobs.bound, diffusion.device, knobs.channels
        generator = torch.Generator().manual_seed(self.SEED)
        frequencies = 2 * math.pi * torch.randn(count, generator=generator, dtype=torch.float64)
        phases = 2 * math.pi * torch.rand(count, generator=generator, dtype=torch.float64)
        noise_level = -diffusion.snr_table.log() / 8  # ¼·ln σ, for SNR = 1/σ²
        features = (noise_level[:, None] * frequencies + phases).cos() * math.sqrt(2 / count)
        self._features = features.to(device, torch.float32)  # [T, channels]
        self._map = nn.Parameter(torch.zeros(count, device=device))

    def _u(self, t: Tensor) -> Tensor:
        # Not a matrix product: that would run in bfloat16 under autocast. Within ±bound by tanh,
        # which unlike a plain cut leaves a gradient that leads back.
        u = (self._features[t] * self._map).sum(1)
        return self._bound * (u / self._bound).tanh()

    def weights(self, t: Tensor) -> Tensor:
        return (-self._u(t)).exp().detach()

    def table(self) -> Tensor:
        every_t = torch.arange(len(self._features), device=self._features.device)
        return self.weights(every_t).cpu().double()

    def parameters(self) -> list[nn.Parameter]:
        return [self._map]

    def learning_loss(self, t: Tensor, errors: Tensor) -> Tensor:
        """Return the mean over the batch of error/e^u + u: minimal where u(t) = ln E[error]."""
        u = self._u(t)
        return ((-u).exp() * errors.detach().float() + u).mean()

    def state_dict(self) -> dict[str, Tensor]:
        return {"map": self._map.detach().clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self._map.copy_(state["map"])


def build_weighting(knobs: methods.Weighting, diffusion: Diffusion) -> StaticWeighting:
    """Return the weighting of a configuration, for this process and prediction."""
    if isinstance(knobs, methods.Uncertainty):
        return UncertaintyWeighting(knobs, diffusion)
    return StaticWeighting(knobs.weights(diffusion), diffusion.device)


WEIGHT_BINS = 20


class DiffusionLoss:
    """Loss = factor·w(t)·scale·error with scale = 1/E[factor·w] over t ~ p.

    Without the scale a weighting would also change the learning rate and the gradient clipping, and
    a search could not separate the two: with it the mean factor of an error is 1 whatever the
    method, and stays so while p(t) or w(t) adapt.
    """

    def __init__(
        self, sampler: TimestepSampler, weighting: StaticWeighting, diffusion: Diffusion
    ) -> None:
        self.sampler, self.weighting, self._diffusion = sampler, weighting, diffusion
        self._every_t = torch.arange(diffusion.steps, device=diffusion.device)
        self._weights = torch.empty(diffusion.steps, device=diffusion.device)
        self._scale = torch.empty((), device=diffusion.device)
        self._compute_scale()

    def _compute_scale(self) -> None:
        self._mass, weights = self.sampler.mass(), self.weighting.weights(self._every_t)
        # In place: a captured step reads these two where they lay when it was captured.
        self._weights.copy_(weights)
        self._scale.copy_(1 / (self._mass * self._weights).sum())

    def refresh(self) -> None:
        """Update weights and scale, once a step, if sampler or weighting has changed."""
        if self.weighting.learned or self.sampler.mass() is not self._mass:
            self._compute_scale()

    def factors(self, t: Tensor, factor: Tensor) -> Tensor:
        """Return the factors of the errors at t [b], float32 [b]; `factor`: the sampler's."""
        return factor * self._weights[t] * self._scale

    def learn(self, t: Tensor, errors: Tensor) -> Tensor | None:
        """Let sampler and weighting learn from the mean squared errors [b] at t [b].

        Returns the loss of a learned weighting, else None.
        """
        self.sampler.update(t, errors, self._weights[t])
        return self.weighting.learning_loss(t, errors)

    def effective_weight(self) -> Tensor:
        """Return W(t) ∝ p(t)·factor(t)·w(t) on the ε-error, mean 1, float64 [T] on the CPU.

        This is the weight that is really minimised, whether it comes from p or from w; a loss on x0
        or v is converted by MSE_x0 = MSE_ε/SNR and MSE_v = MSE_ε/ᾱ.
        """
        weight = self.sampler.mass().cpu() * self.weighting.table() / self._diffusion.to_epsilon
        return weight / weight.mean()

    def facts(self) -> dict[str, list[float]]:
        """Return `effective_weight`: W(t)'s mean over 20 equal parts, low to high noise."""
        parts = self.effective_weight().tensor_split(min(WEIGHT_BINS, self._diffusion.steps))
        return {"effective_weight": [round(float(part.mean()), 6) for part in parts]}

    def table(self) -> dict[str, list[float]]:
        """Return columns over t: log_snr, probability p(t), weight w(t), effective_weight W(t)."""
        columns = {
            "t": self._every_t.cpu(),
            "log_snr": self._diffusion.snr_table.log(),
            "probability": self.sampler.probabilities().cpu(),
            "weight": self.weighting.table(),
            "effective_weight": self.effective_weight(),
        }
        return {name: column.tolist() for name, column in columns.items()}

    def state_dict(self) -> dict[str, object]:
        """Return what sampler and weighting have learned. All ranks call it together."""
        return {"sampler": self.sampler.state_dict(), "weighting": self.weighting.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, of the same configuration."""
        self.sampler.load_state_dict(state["sampler"])
        self.weighting.load_state_dict(state["weighting"])
        self.refresh()
