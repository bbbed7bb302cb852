"""What is minimised: timestep sampler and weighting joined, at a scale that is the same for all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from tunediff.diffusion.process import Diffusion
from tunediff.diffusion.timesteps import TimestepSampler
from tunediff.diffusion.weighting import Weighting


class Objective:
    """Loss = factor·w(t)·scale·error with scale = 1/E[factor·w] over t ~ p.

    Without the scale a weighting would also be a learning rate and a strength of gradient clipping, and a search could
    not tell them apart: with it the mean factor of an error is 1 whatever the method, and stays so while p(t) or w(t)
    adapt.
    """

    def __init__(self, sampler: TimestepSampler, weighting: Weighting, diffusion: Diffusion) -> None:
        self._sampler, self._weighting, self._diffusion = sampler, weighting, diffusion
        self._all = torch.arange(diffusion.steps, device=diffusion.device)
        self._changes = sampler.adaptive or weighting.learned
        self._mass = sampler.mass()
        self._scale = self._current_scale()

    def factors(self, t: Tensor, factor: Tensor) -> Tensor:
        """What the mean squared errors at t [b] are multiplied by, float32 [b]; `factor` comes from the sampler."""
        return factor * self._weighting.weights(t) * self._scale

    def refresh(self) -> None:
        """Follow sampler and weighting, once a step; does nothing where neither has changed."""
        if not self._changes:
            return
        if self._weighting.learned or self._sampler.mass() is not self._mass:
            self._mass = self._sampler.mass()
            self._scale = self._current_scale()

    def _current_scale(self) -> Tensor:
        return (1 / (self._mass * self._weighting.weights(self._all)).sum()).float()

    def effective_weight(self) -> Tensor:
        """W(t) ∝ p(t)·factor(t)·w(t) on the ε-error, mean 1 over the chain, float64 [T] on the CPU.

        This is what is really minimised, whether p or w brings it about; a loss on x0 or v is converted by
        MSE_x0 = MSE_ε/SNR and MSE_v = MSE_ε/ᾱ.
        """
        diffusion = self._diffusion
        ones = torch.ones_like(diffusion.snr_table)
        unit = {"epsilon": ones, "x0": diffusion.snr_table, "v": diffusion.alphas_cumprod}[diffusion.prediction]
        weight = self._sampler.mass().cpu() * self._weighting.table() / unit
        return weight / weight.mean()

    def table(self) -> dict[str, list[float]]:
        """Columns over t: log_snr, probability p(t), weight w(t), effective_weight W(t)."""
        columns = {
            "log_snr": self._diffusion.snr_table.log(),
            "probability": self._sampler.probabilities().cpu(),
            "weight": self._weighting.table(),
            "effective_weight": self.effective_weight(),
        }
        return {name: column.tolist() for name, column in columns.items()}
