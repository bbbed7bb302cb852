"""Averages of any half-life after a training (EDM2, arXiv 2312.02696, section 3).

Two averages with the power-function profiles p(τ) ∝ τ^γ are kept beside a training and written at
its points, with γ = ln 2/h − 1 for the half-life h as `ema.half_life` counts it. Any other profile
is nearly a linear combination of those written, and so are the averaged weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from tunediff.config import ConfigError
from tunediff.training import knobs
from tunediff.training.ema import ExponentialAverage

FOLDER = "averages"
"""Beside a training's weights; holds INDEX.safetensors of its points."""
HALF_LIVES = (0.0386, 0.0873)
"""Of the averages that are kept: σ_rel 0.05 and 0.10, EDM2's."""
WORST_PROFILE = 0.1
"""Profiles that a combination misses by more than this share of their norm are refused."""


class PowerAverages:
    """Two averages of a network's parameters with power-function profiles, in float32."""

    def __init__(self, model: nn.Module) -> None:
        self.averages = [
            ExponentialAverage(knobs.Ema(half_life=half_life), model) for half_life in HALF_LIVES
        ]

    def update(self, model: nn.Module, progress: float, delta: float) -> None:
        """Take in the weights after a step; `progress`, `delta` as in `ExponentialAverage`."""
        for average in self.averages:
            left = max(0.0, 1 - delta / progress) if progress > 0 else 0.0
            average.blend(model, 1 - left ** (math.log(2) / average.half_life))

    def parameters_by_name(self) -> dict[str, Tensor]:
        """Return the averages as they are written: HALF_LIFE/NAME. All ranks call it."""
        names = {name for name, _ in self.averages[0].model.named_parameters()}
        states = {average.half_life: average.model.state_dict() for average in self.averages}
        return {f"{h}/{name}": state[name] for h, state in states.items() for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both; its tensors are not copied."""
        return {str(average.half_life): average.state_dict() for average in self.averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        for average in self.averages:
            average.load_state_dict(state[str(average.half_life)])


# ---- after the fact
def gamma(half_life: float) -> float:
    """Return the exponent of the profile with this half-life."""
    return math.log(2) / half_life - 1


def _products(t_a: Any, gamma_a: Any, t_b: Any, gamma_b: Any) -> Any:
    """Return ⟨p_a, p_b⟩ of profiles ending at t_a, t_b; arrays broadcast (algorithm 2)."""
    ratio, exponent = np.minimum(t_a / t_b, t_b / t_a), np.where(t_a < t_b, gamma_b, gamma_a)
    return (
        (gamma_a + 1)
        * (gamma_b + 1)
        * ratio**exponent
        / ((gamma_a + gamma_b + 1) * np.maximum(t_a, t_b))
    )


def combination(ends: Any, gammas: Any, end: float, wanted: float) -> tuple[Any, float]:
    """Return factors of sum 1 whose profile is nearest to the wanted one, and the error.

    `ends`, `gammas`: of the profiles, [n]. The distance is a share of the wanted norm.
    """
    of_all = _products(ends[:, None], gammas[:, None], ends[None], gammas[None])
    with_wanted = _products(ends, gammas, end, wanted)
    factors = np.linalg.lstsq(of_all, with_wanted, rcond=None)[0]
    factors = factors / factors.sum()
    norm = _products(end, wanted, end, wanted)
    left = factors @ of_all @ factors - 2 * factors @ with_wanted + norm
    return factors, math.sqrt(max(0.0, float(left / norm)))


def reconstruct(folder: Path, half_life: float) -> dict[str, Tensor]:
    """Return the parameters averaged with this half-life at `folder`'s last point.

    Raises `ConfigError` where nothing was written, or too few points for this half-life.
    """
    if not (files := sorted(folder.glob("*.safetensors"))):
        raise ConfigError(
            f"{folder}: holds no averages; they are kept where the training has ema.snapshots=true"
        )
    progress = []
    for path in files:
        with safe_open(path, framework="pt") as file:
            progress.append(float(file.metadata()["progress"]))
    ends = np.repeat(progress, len(HALF_LIVES))
    gammas = np.tile([gamma(h) for h in HALF_LIVES], len(files))
    factors, missed = combination(ends, gammas, max(progress), gamma(half_life))
    if missed > WORST_PROFILE:
        short = (
            f"{len(files)} points are too few for it: the profile is missed by {100 * missed:.0f} %"
        )
        raise ConfigError(
            f"--ema: {half_life:g} is not allowed: {short}; train with more evaluation.points"
        )
    found: dict[str, Tensor] = {}
    for index, path in enumerate(files):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 – no mapping
                number, _, name = key.partition("/")
                factor = float(factors[index * len(HALF_LIVES) + HALF_LIVES.index(float(number))])
                part = factor * file.get_tensor(key).double()
                found[name] = found[name].add_(part) if name in found else part
    return {name: tensor.to(torch.float32) for name, tensor in found.items()}
