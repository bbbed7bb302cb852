"""The training objective: timestep sampler and weighting combined, at one scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps.base import TimestepSampler
from tunediff.workloads.diffusion.weighting import StaticWeighting

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
        """Continue from `state_dict`. Raises `ValueError` for another configuration's."""
        self.sampler.load_state_dict(state["sampler"])
        self.weighting.load_state_dict(state["weighting"])
        self.refresh()
