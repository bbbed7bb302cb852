"""How much each timestep's loss counts. To add one: a dataclass in `methods`, in its union, and a
class here.

Weights multiply the mean squared error of what the network predicts. The same objective has another
weight in each unit, since MSE_x0 = MSE_ε/SNR and MSE_v = MSE_ε/ᾱ. Each static weighting is defined
on the ε-error and converted by these exact relations, so that it means the same for every
prediction.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tunediff.workloads.diffusion import methods
from tunediff.workloads.diffusion.process import Diffusion

KINDS: dict[type, type[Weighting]] = {}
"""The weighting of each member of `methods.Weighting`."""


class Weighting(ABC):
    """Interface: a weight for each timestep; a learned weighting also has parameters and a loss of
    its own."""

    learned: ClassVar[bool] = False
    """Whether w(t) changes during training."""

    def __init_subclass__(cls, of: type | None = None) -> None:
        if of is not None:
            KINDS[of] = cls

    @abstractmethod
    def __init__(self, member: Any, diffusion: Diffusion) -> None:
        """`member`: the weighting's part of the configuration."""

    @abstractmethod
    def weights(self, t: Tensor) -> Tensor:
        """Return w at t [B] int64, in the units of the prediction: float32 [B], detached, on the
        process's device."""

    @abstractmethod
    def table(self) -> Tensor:
        """Return the present w(t), float64 [T] on the CPU; a copy."""

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer trains beside the network."""
        return []

    def own_loss(self, t: Tensor, errors: Tensor) -> Tensor | None:
        """Return the loss of a learned weighting, given the prediction's mean squared errors [B] at
        t [B]; else None.

        A scalar; its gradient reaches `parameters()` only.
        """
        return None

    def state_dict(self) -> dict[str, Tensor]:
        """Return what has been learned, a copy."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state_dict` was taken. Raises `ValueError` if it is of another
        configuration."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state; found {', '.join(state)}")


# ---- static
class _Table(Weighting):
    """w(t) computed once."""

    def __init__(self, member: Any, diffusion: Diffusion) -> None:
        self._table = self._compute(member, diffusion)
        self._weights = self._table.to(diffusion.device, torch.float32)

    @abstractmethod
    def _compute(self, member: Any, diffusion: Diffusion) -> Tensor:
        """Return w(t) in the units of the prediction, float64 [T]."""

    def weights(self, t: Tensor) -> Tensor:
        return self._weights[t]

    def table(self) -> Tensor:
        return self._table.clone()


class Constant(_Table, of=methods.Constant):
    """w = 1 in the units of the prediction: DDPM's L_simple (eq. 14) for ε."""

    def _compute(self, member: methods.Constant, diffusion: Diffusion) -> Tensor:
        return torch.ones(diffusion.steps, dtype=torch.float64)


class MinSnr(_Table, of=methods.MinSnr):
    """min(SNR, γ)/SNR on the ε-error (Hang et al. 2023, arXiv 2303.09556); min(SNR, γ)/(SNR+1) for
    v."""

    def _compute(self, member: methods.MinSnr, diffusion: Diffusion) -> Tensor:
        return (
            diffusion.snr_table.clamp(max=member.gamma) / diffusion.snr_table
        ) * diffusion.to_epsilon


class P2(_Table, of=methods.P2):
    """1/(k + SNR)^γ on the ε-error (Choi et al. 2022, arXiv 2204.00227)."""

    def _compute(self, member: methods.P2, diffusion: Diffusion) -> Tensor:
        return ((member.offset + diffusion.snr_table) ** -member.exponent) * diffusion.to_epsilon


class Debiased(_Table, of=methods.Debiased):
    """min(1/√SNR, cap) on the ε-error (Yu et al. 2023, arXiv 2310.08442).

    For v this is √SNR/(SNR+1) where the cap does not bind. Widespread code (kohya's sd-scripts)
    uses 1/(SNR+1) for v instead: on the ε-error that is 1/SNR, another objective. Here a weighting
    does not change with the prediction.
    """

    def _compute(self, member: methods.Debiased, diffusion: Diffusion) -> Tensor:
        return (diffusion.snr_table.rsqrt().clamp(max=member.cap)) * diffusion.to_epsilon


class ChangeAware(_Table, of=methods.ChangeAware):
    """SpeeD's weighting on the ε-error (Wang et al. 2024, arXiv 2405.17403).

    With g the slope of 1−ᾱ over t, scaled to [0, 1] over the whole chain: (1−λ) + (2λ−1)·g for t <
    τ·T, and 1 from there on, as the authors' code has it.
    """

    def _compute(self, member: methods.ChangeAware, diffusion: Diffusion) -> Tensor:
        (slope,) = torch.gradient(1 - diffusion.alphas_cumprod)
        low, high = slope.min(), slope.max()
        # A chain of two steps has a single slope; it counts as the lowest.
        change = (slope - low) / (high - low).clamp(min=torch.finfo(torch.float64).tiny)
        weight = (1 - member.contrast) + (2 * member.contrast - 1) * change
        weight[round(member.tau * diffusion.steps) :] = 1
        return weight * diffusion.to_epsilon


# ---- learned
class Uncertainty(Weighting, of=methods.Uncertainty):
    """w = e^−u(t), with u learned as the logarithm of the mean error (Karras et al. 2023, EDM2,
    arXiv 2312.02696, eq. 21).

    u is a linear map of random Fourier features of the noise level: √2·cos(2π·(f·c + φ)), f normal,
    φ uniform, c = ¼·ln σ, σ = √((1−ᾱ)/ᾱ), divided by √channels so that u does not grow with their
    number. The features are the same in every training; the map starts at zero, hence w = 1. u is
    kept within ±bound by bound·tanh(·/bound), which unlike a plain cut leaves a gradient that leads
    back.
    """

    learned = True
    SEED = 0

    def __init__(self, member: methods.Uncertainty, diffusion: Diffusion) -> None:
        self._bound = member.bound
        generator = torch.Generator().manual_seed(self.SEED)
        frequencies = (
            2 * math.pi * torch.randn(member.channels, generator=generator, dtype=torch.float64)
        )
        phases = 2 * math.pi * torch.rand(member.channels, generator=generator, dtype=torch.float64)
        noise_level = -diffusion.snr_table.log() / 8  # ¼·ln σ, for SNR = 1/σ²
        features = (noise_level[:, None] * frequencies + phases).cos() * math.sqrt(
            2 / member.channels
        )
        self._features = features.to(diffusion.device, torch.float32)  # [T, channels]
        self._map = nn.Parameter(torch.zeros(member.channels, device=diffusion.device))

    def weights(self, t: Tensor) -> Tensor:
        return (-self._u(t)).exp().detach()

    def table(self) -> Tensor:
        return (
            self.weights(torch.arange(len(self._features), device=self._features.device))
            .cpu()
            .double()
        )

    def parameters(self) -> list[nn.Parameter]:
        return [self._map]

    def own_loss(self, t: Tensor, errors: Tensor) -> Tensor:
        """Return the mean over the batch of error/e^u + u: minimal where u(t) = ln E[error at
        t]."""
        u = self._u(t)
        return ((-u).exp() * errors.detach().float() + u).mean()

    def state_dict(self) -> dict[str, Tensor]:
        return {"map": self._map.detach().clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        weights = state.get("map", torch.empty(0))
        if weights.shape != self._map.shape:
            raise ValueError(
                f"uncertainty weighting: {len(weights)} channels in the checkpoint,"
                f" {len(self._map)} here"
            )
        with torch.no_grad():
            self._map.copy_(weights)

    def _u(self, t: Tensor) -> Tensor:
        # Not a matrix product: that would run in bfloat16 under autocast.
        u = (self._features[t] * self._map).sum(1)
        return self._bound * (u / self._bound).tanh()


def build(member: methods.Weighting, diffusion: Diffusion) -> Weighting:
    """Return the weighting of the configuration, for this process and prediction."""
    return KINDS[type(member)](member, diffusion)
