"""How much the loss of each timestep counts: weightings as the training uses them.

The formulas of static weightings are in `methods`; a learned one is a class here, named in `build`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tunediff.workloads.diffusion import methods
from tunediff.workloads.diffusion.process import Diffusion


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
        """Continue from `state_dict`. Raises `ValueError` for another configuration's."""
        if state:
            raise ValueError(f"a static weighting has no state; found {', '.join(state)}")


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
        weights = state.get("map", torch.empty(0))
        if weights.shape != self._map.shape:
            counts = f"{len(weights)} channels in the checkpoint, {len(self._map)} here"
            raise ValueError(f"uncertainty weighting: {counts}")
        with torch.no_grad():
            self._map.copy_(weights)


def build(knobs: methods.Weighting, diffusion: Diffusion) -> StaticWeighting:
    """Return the weighting of a configuration, for this process and prediction."""
    if isinstance(knobs, methods.Uncertainty):
        return UncertaintyWeighting(knobs, diffusion)
    return StaticWeighting(knobs.weights(diffusion), diffusion.device)
