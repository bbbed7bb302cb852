"""Noise levels: a chain's T, the network's input and target, and ODE solvers' levels.

Every process here is x0 + σ·ε, scaled: SNR = 1/σ², ᾱ = 1/(1+σ²). A chain is T levels;
`process.path` and `process.sigma_data` are a scale of the network's input and what v means.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tunediff.workloads.diffusion.knobs import EDM_SIGMAS, Process

MAX_BETA = 0.999
MOST_NOISE = 1 - 1e-4
"""1−s at the last timestep of the flow: at s = 0 the log-SNR is −∞."""
RHO = 7.0
"""ρ of EDM's grid."""


def betas(schedule: Literal["linear", "cosine"], steps: int) -> Tensor:
    """Return β_t, float64 [T], each in (0, 0.999].

    `linear`: DDPM's 1e-4…0.02, times 1000/T: every length ends with the same noise. `cosine`: β_t =
    1 − f(t+1)/f(t) with f(t) = cos²((t/T + 0.008)/1.008·π/2) (improved DDPM, eq. 17).
    """
    if schedule == "linear":
        scale = 1000 / steps
        table = torch.linspace(scale * 1e-4, scale * 0.02, steps, dtype=torch.float64)
    else:
        grid = torch.arange(steps + 1, dtype=torch.float64) / steps
        signal_share = torch.cos((grid + 0.008) / 1.008 * math.pi / 2) ** 2
        table = 1 - signal_share[1:] / signal_share[:-1]
    return table.clamp(max=MAX_BETA)


def chain(process: Process) -> tuple[Tensor, Tensor]:
    """Return (β_t, ᾱ_t), float64 [T] each."""
    if process.path == "vp" and process.schedule != "edm":
        table = betas(process.schedule, process.steps)
        return table, (1 - table).cumprod(0)
    if process.path == "flow":
        noise = (torch.arange(process.steps, dtype=torch.float64) + 1) / process.steps
        noise[-1] = MOST_NOISE
        sigma = noise / (1 - noise)
    else:
        low, high = map(math.log, EDM_SIGMAS)
        sigma = torch.linspace(low, high, process.steps, dtype=torch.float64).exp()
    ab = 1 / (1 + sigma.square())
    return 1 - ab / torch.cat((ab.new_ones(1), ab[:-1])), ab


class Mix(NamedTuple):
    """x = image·x0 + noise·ε, which the network sees, and v = v_noise·ε − v_image·x0, of one shape.

    x0 = (v_noise·x − noise·v)·σ_d and ε = (v_image·x + image·v)·σ_d.
    """

    image: Tensor
    noise: Tensor
    v_image: Tensor
    v_noise: Tensor


def mix(process: Process, signal: Tensor, noise: Tensor) -> Mix:
    """Return the mix at levels of √ᾱ = `signal` and √(1−ᾱ) = `noise`, of any shape.

    `vp` with σ_d = 1: v_image, v_noise are noise and image share (arXiv 2202.00512). Otherwise,
    with σ = noise/signal, EDM's c_in = 1/√(σ²+σ_d²) times (1, σ), and v = c_in·(σ_d·ε − σ/σ_d·x0),
    the negative of its network's target (arXiv 2206.00364, table 1). `flow`: s and 1−s, v = ε − x0.
    """
    if process.path == "flow":
        total, one = signal + noise, torch.ones_like(signal)
        return Mix(signal / total, noise / total, one, one)
    if (deviation := float(process.sigma_data)) == 1.0:
        return Mix(signal, noise, noise, signal)
    scale = (noise.square() + (deviation * signal).square()).rsqrt()
    return Mix(signal * scale, noise * scale, noise * scale / deviation, signal * scale * deviation)


def solver_levels(
    process: Process, ab: Tensor, steps: int, sampler: Literal["euler", "heun"]
) -> list[tuple[float, float]]:
    """Return `steps` levels (t, σ) for an ODE solver, most noise first; t is continuous.

    EDM's grid, σ_i = (σ_max^(1/ρ) + i/(S−1)·(σ_min^(1/ρ) − σ_max^(1/ρ)))^ρ, as far as the chain
    goes; Euler steps along `path = flow` are even in s. Between two levels of the chain t runs
    evenly with ln σ, or with s.
    """
    flow, t = process.path == "flow", np.arange(len(ab))
    sigmas = ((1 - ab) / ab).sqrt().numpy()
    if flow and sampler == "euler":
        at = np.linspace(len(ab) - 1, 0, steps)
        share = np.interp(at, t, sigmas / (1 + sigmas))
        return list(zip(at.tolist(), (share / (1 - share)).tolist(), strict=True))
    low, high = max(EDM_SIGMAS[0], sigmas[0]), min(EDM_SIGMAS[1], sigmas[-1])
    grid = np.linspace(high ** (1 / RHO), low ** (1 / RHO), steps) ** RHO
    if flow:
        at = np.interp(grid / (1 + grid), sigmas / (1 + sigmas), t)
    else:
        at = np.interp(np.log(grid), np.log(sigmas), t)
    return list(zip(at.tolist(), grid.tolist(), strict=True))


def equal_bins(values: Tensor, count: int) -> tuple[Tensor, list[float]]:
    """Return (bin of each value, int64 [T]; rising edges) of `count` equally wide bins."""
    low, high = float(values.min()), float(values.max())
    bins = ((values - low) / (high - low) * count).long().clamp(max=count - 1)
    return bins, [low + (high - low) * i / count for i in range(count)] + [high]
