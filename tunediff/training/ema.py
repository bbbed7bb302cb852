"""The averaged weights that are evaluated, sampled from and exported."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tunediff.training import knobs


class ExponentialAverage:
    """Exponential moving average of a network's float32 parameters, as `model`.

    `model` is a copy in eval mode that needs no gradients, shared out over ranks as the network is.
    Construct it after `trial.prepare`, from the network that went in; `update` takes either.
    """

    def __init__(self, ema: knobs.Ema, model: nn.Module) -> None:
        self.half_life, self.max_decay = ema.half_life, ema.max_decay
        self.model = copy.deepcopy(model).float().eval().requires_grad_(False)
        self._mine, self._theirs = list(self.model.parameters()), list(model.parameters())
        self._model = model

    def decay(self, progress: float, delta: float) -> float:
        """Return the old average's share in a step: min(max_decay, ½^(delta/(half_life·progress))).

        The half-life is a fraction of what has been trained so far (EDM's ramp-up rule, arXiv
        2206.00364, with the budget in place of samples), so it grows; 0 while `progress` is 0.
        """
        span = self.half_life * progress
        return min(self.max_decay, 0.5 ** (delta / span)) if span > 0 else 0.0

    @torch.no_grad()
    def update(self, model: nn.Module, progress: float, delta: float) -> None:
        """Take in the weights after one optimizer step; buffers are copied.

        `progress`: fraction of the budget spent after this step; `delta`: this step's part.
        """
        # Listed once: walking over the modules takes the host as long as the average.
        if model is not self._model:
            self._theirs, self._model = list(model.parameters()), model
        # A network may make new buffers. One operation for those of a type, two of a batch norm
        buffers = list(zip(self.model.buffers(), model.buffers(), strict=True))
        for dtype in dict.fromkeys(mine.dtype for mine, _ in buffers):
            alike = [pair for pair in buffers if pair[0].dtype == dtype]
            torch._foreach_copy_([mine for mine, _ in alike], [buffer for _, buffer in alike])
        theirs = [_local(parameter).float() for parameter in self._theirs]
        share = 1 - self.decay(progress, delta)
        torch._foreach_lerp_([_local(parameter) for parameter in self._mine], theirs, share)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averaged network's state; its tensors are not copied."""
        return self.model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Raises `RuntimeError` if it is of another network."""
        self.model.load_state_dict(state)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
