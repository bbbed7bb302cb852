"""How much each timestep's loss counts. To add one: a dataclass in `tunediff.config`, a class here, a line in `KINDS`.

Weights multiply the mean squared error of what the network predicts. The same objective has another weight in each
unit, since MSE_x0 = MSE_ε/SNR and MSE_v = MSE_ε·(SNR+1)/SNR.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from tunediff import config
from tunediff.diffusion.process import Diffusion


class Weighting(ABC):
    """The seam: a table of w(t), computed once."""

    def __init__(self, member: Any, diffusion: Diffusion) -> None:
        self._table = self._compute(member, diffusion)
        self._weights = self._table.to(diffusion.device, torch.float32)

    @abstractmethod
    def _compute(self, member: Any, diffusion: Diffusion) -> Tensor:
        """w(t) in the units of `diffusion.prediction`, float64 [T]."""

    def weights(self, t: Tensor) -> Tensor:
        """w at t [B] int64, float32 [B]."""
        return self._weights[t]

    def table(self) -> Tensor:
        """w(t), float64 [T] on the CPU; a copy."""
        return self._table.clone()


class Constant(Weighting):
    """w = 1 in the units of the prediction: DDPM's L_simple (eq. 14) for ε."""

    def _compute(self, member: config.Constant, diffusion: Diffusion) -> Tensor:
        return torch.ones(diffusion.steps, dtype=torch.float64)


class MinSnr(Weighting):
    """min(SNR, γ)/SNR for ε, min(SNR, γ) for x0, min(SNR, γ)/(SNR+1) for v (Hang et al. 2023, arXiv 2303.09556)."""

    def _compute(self, member: config.MinSnr, diffusion: Diffusion) -> Tensor:
        snr = diffusion.snr_table
        capped = snr.clamp(max=member.gamma)
        return {"epsilon": capped / snr, "x0": capped, "v": capped / (snr + 1)}[diffusion.prediction]


KINDS: dict[type, type[Weighting]] = {
    config.Constant: Constant,
    config.MinSnr: MinSnr,
}


def build(member: config.Weighting, diffusion: Diffusion) -> Weighting:
    """The weighting that the configuration asks for, for this process and prediction."""
    return KINDS[type(member)](member, diffusion)
