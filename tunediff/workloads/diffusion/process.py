"""The noising process and its reversal: schedules, targets, sampling by DDPM, DDIM and DPM-Solver++.

Notation: timesteps t = 0 … T−1, ᾱ_t = ∏(1 − β_i) for i ≤ t, x_t = √ᾱ_t·x0 + √(1−ᾱ_t)·ε, images in [−1, 1].
Sources: DDPM (Ho et al. 2020, arXiv 2006.11239), DDIM (Song et al. 2021, arXiv 2010.02502), improved DDPM (Nichol &
Dhariwal 2021, arXiv 2102.09672), v-prediction (Salimans & Ho 2022, arXiv 2202.00512), DPM-Solver++ (Lu et al. 2022,
arXiv 2211.01095).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from tunediff.workloads.diffusion.knobs import Process

Predict = Callable[[Tensor, Tensor], Tensor]
"""(x_t [B, C, H, W], t int64 [B]) → the network's output [B, C, H, W]."""
Progress = Callable[[int, int, Tensor], None]
"""(k, number of steps, x [B, C, H, W]): called after sampling step k = 0, 1, … of a batch."""

MAX_BETA = 0.999
LARGEST_LOG_SNR = 12.0
"""Log-SNRs beyond ±12 count as ±12: cosine's last steps, down to −20 in one leap, would stretch bins over nothing."""


def betas(schedule: Literal["linear", "cosine"], steps: int) -> Tensor:
    """Return β_t, float64 [T], each in (0, 0.999].

    `linear`: DDPM's 1e-4…0.02, times 1000/T so that every length ends with the same noise. `cosine`: β_t =
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


class Diffusion:
    """Forward process, training target and sampling for one `Process`.

    Public tables are float64 [T] on the CPU: `betas`, `alphas_cumprod` (ᾱ_t), `snr_table` (ᾱ/(1−ᾱ)), `log_snr` (within
    ±12), `to_epsilon` (what an error of the prediction is multiplied by to be one of ε), `posterior_variance`,
    `posterior_coef_x0`, `posterior_coef_xt` (DDPM, eq. 7) and `log_variance`, that of an ancestral step. Methods that
    take t ([B] int64 on `device`) work in float32.
    """

    def __init__(self, process: Process, device: torch.device | str = "cpu") -> None:
        self.steps, self.prediction, self.device = process.steps, process.prediction, torch.device(device)
        self.betas = betas(process.schedule, process.steps)
        alphas = 1 - self.betas
        ab = self.alphas_cumprod = alphas.cumprod(0)
        ab_prev = torch.cat((ab.new_ones(1), ab[:-1]))
        self.snr_table = ab / (1 - ab)
        self.log_snr = self.snr_table.log().clamp(-LARGEST_LOG_SNR, LARGEST_LOG_SNR)
        unit = {"epsilon": torch.ones_like(ab), "x0": self.snr_table, "v": ab}
        self.to_epsilon = unit[process.prediction]  # MSE_ε = SNR·MSE_x0 = ᾱ·MSE_v, exactly

        self.posterior_variance = self.betas * (1 - ab_prev) / (1 - ab)
        self.posterior_coef_x0 = self.betas * ab_prev.sqrt() / (1 - ab)
        self.posterior_coef_xt = alphas.sqrt() * (1 - ab_prev) / (1 - ab)
        # The posterior variance is 0 at t = 0; both variances take its value at t = 1 there, to have a logarithm.
        later = self.betas[1:] if process.variance == "fixed_large" else self.posterior_variance[1:]
        self.log_variance = torch.cat((self.posterior_variance[1:2], later)).log()

        self._signal, self._noise = (share.sqrt().to(self.device, torch.float32) for share in (ab, 1 - ab))

    # ------------------------------------------------------------------------------------------------------- training
    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return x_t = √ᾱ·x0 + √(1−ᾱ)·ε (DDPM, eq. 4), [B, C, H, W]."""
        return _gather(self._signal, t) * x0 + _gather(self._noise, t) * noise

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return the training target of the network for x_t: ε, x0, or v = √ᾱ·ε − √(1−ᾱ)·x0, [B, C, H, W]."""
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "x0":
            return x0
        return _gather(self._signal, t) * noise - _gather(self._noise, t) * x0

    def predict_x0(self, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Return the clean image that a network's output implies, not clamped, float32 [B, C, H, W]."""
        output, signal, noise = output.float(), _gather(self._signal, t), _gather(self._noise, t)
        if self.prediction == "epsilon":
            return (x_t - noise * output) / signal
        if self.prediction == "x0":
            return output
        return signal * x_t - noise * output

    def predict_noise(self, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Return the noise ε that a network's output implies, float32 [B, C, H, W]."""
        output, signal, noise = output.float(), _gather(self._signal, t), _gather(self._noise, t)
        if self.prediction == "epsilon":
            return output
        if self.prediction == "x0":
            return (x_t - signal * output) / noise
        return noise * x_t + signal * output

    # ------------------------------------------------------------------------------------------------------- sampling
    def timesteps(self, steps: int, skip: Literal["linear", "quadratic", "log_snr"]) -> list[int]:
        """Return exactly `steps` distinct timesteps, increasing; sampling visits them from the last to the first.

        - `linear`: ⌊i·T/S⌋. Equal to the usual arange(0, T, T//S) where S divides T; elsewhere that one returns more
          than S steps (334 for S = 300, T = 1000).
        - `quadratic`: round((√(0.8·T)·i/(S−1))²), dense at low noise, from 0 to 0.8·T. For larger S its first
          values coincide, which wastes network evaluations: each is raised to at least one above its predecessor, and
          lowered where fewer than the remaining steps would fit below T.
        - `log_snr`: nearest to an even spacing in log-SNR within ±12, from 0 to where the noise ends; made distinct
          likewise.
        - A single step is T−1, where the pure noise it starts from belongs.

        Raises `ValueError` unless 1 ≤ `steps` ≤ T.
        """
        if not 1 <= steps <= self.steps:
            raise ValueError(f"steps: {steps} is not in 1…{self.steps}")
        if steps == 1:
            return [self.steps - 1]
        if skip == "linear":
            return [i * self.steps // steps for i in range(steps)]
        if skip == "quadratic":
            nearest = [round(0.8 * self.steps * (i / (steps - 1)) ** 2) for i in range(steps)]
        else:
            even = torch.linspace(float(self.log_snr[0]), float(self.log_snr[-1]), steps, dtype=torch.float64)
            nearest = (self.log_snr - even[:, None]).abs().argmin(1).tolist()
        visited: list[int] = []
        for i, t in enumerate(nearest):
            lowest = visited[-1] + 1 if visited else 0
            visited.append(min(max(t, lowest), self.steps - steps + i))
        return visited

    def ancestral_step(self, output: Tensor, x_t: Tensor, t: int, noise: Tensor | None) -> Tensor:
        """Return x_{t−1} drawn from the model (DDPM, algorithm 2, with x0 clamped to [−1, 1]), float32 [B, C, H, W].

        `noise` is standard normal; it is not used at t = 0 and may be None there.
        """
        x0 = self._clamped_x0(output, x_t, t)
        mean = float(self.posterior_coef_x0[t]) * x0 + float(self.posterior_coef_xt[t]) * x_t
        if t == 0:
            return mean
        assert noise is not None, "an ancestral step above t = 0 needs noise"
        return mean + math.exp(0.5 * float(self.log_variance[t])) * noise

    def ddim_step(
        self, output: Tensor, x_t: Tensor, t: int, t_next: int, eta: float = 0.0, noise: Tensor | None = None
    ) -> Tensor:
        """Return x at `t_next` < t (−1: the clean image) by DDIM, eq. 12 and 16, float32 [B, C, H, W].

        σ = η·√((1−ᾱ_next)/(1−ᾱ_t))·√(1−ᾱ_t/ᾱ_next). x0 is clamped to [−1, 1] and ε is the one that belongs to the
        clamped x0. `noise` is standard normal; it is used only where σ > 0 and may be None elsewhere.
        """
        ab, ab_next = self._signal_share(t), self._signal_share(t_next)
        sigma = self.ddim_sigma(t, t_next, eta)
        x0 = self._clamped_x0(output, x_t, t)
        epsilon = (x_t - math.sqrt(ab) * x0) / math.sqrt(1 - ab)
        mean = math.sqrt(ab_next) * x0 + math.sqrt(max(1 - ab_next - sigma**2, 0.0)) * epsilon
        if sigma == 0:
            return mean
        assert noise is not None, "a DDIM step with eta > 0 needs noise"
        return mean + sigma * noise

    def ddim_sigma(self, t: int, t_next: int, eta: float) -> float:
        """Return the standard deviation of the noise that a DDIM step from t to `t_next` adds; 0 for the last step."""
        ab, ab_next = self._signal_share(t), self._signal_share(t_next)
        return eta * math.sqrt((1 - ab_next) / (1 - ab) * (1 - ab / ab_next))

    def dpmpp_step(
        self, x0: Tensor, x_t: Tensor, t: int, t_next: int, before: tuple[Tensor, int] | None = None
    ) -> Tensor:
        """Return x at `t_next` < t by DPM-Solver++(2M) (algorithm 2), deterministic, [B, C, H, W] as `x_t`.

        `x0`: the clean image predicted at t; `before`: the one predicted at the timestep visited before, and that
        timestep. x = σ_next/σ_t·x_t + α_next·(1 − e^−h)·D, with h the step in λ = log(α/σ), r = (the step before)/h and
        D = x0 + (x0 − x0_before)/2r: second order. Without `before` D = x0: first order, DDIM with η = 0. A step to
        the clean image (−1) has h = ∞, over which nothing is extrapolated: it ends at `x0`.
        """
        if t_next < 0:
            return x0
        ab, ab_next, h = self._signal_share(t), self._signal_share(t_next), self._step_in_lambda(t, t_next)
        if before is not None:
            x0_before, t_before = before
            x0 = x0 + h / (2 * self._step_in_lambda(t_before, t)) * (x0 - x0_before)
        return math.sqrt((1 - ab_next) / (1 - ab)) * x_t - math.sqrt(ab_next) * math.expm1(-h) * x0

    @torch.no_grad()
    def sample(
        self,
        predict: Predict,
        noise: Tensor,
        *,
        sampler: Literal["ddpm", "ddim", "dpmpp_2m"],
        steps: int,
        skip: Literal["linear", "quadratic"] = "linear",
        eta: float = 0.0,
        step_noise: Callable[[int], Tensor],
        progress: Progress | None = None,
    ) -> Tensor:
        """Return images x0 [B, C, H, W] in [−1, 1], float32, from `noise`, the standard normal x_T.

        `ddpm` takes all T ancestral steps, `dpmpp_2m` so many `steps` evenly spaced in log-SNR; `skip` and `eta` are
        for `ddim`. `step_noise(k)` returns the standard normal noise of step k = 0, 1, … and is called only for steps
        that add noise: never in DPM-Solver++, nor in DDIM with `eta` = 0. Nothing here makes the host wait for the
        device.
        """
        if sampler == "ddpm":
            visited = list(range(self.steps))
        else:
            visited = self.timesteps(steps, "log_snr" if sampler == "dpmpp_2m" else skip)
        visited.reverse()
        x, before = noise.float(), None
        for k, (t, t_next) in enumerate(zip(visited, [*visited[1:], -1], strict=True)):
            output = predict(x, torch.full((len(x),), t, device=x.device))
            if sampler == "ddpm":
                x = self.ancestral_step(output, x, t, step_noise(k) if t > 0 else None)
            elif sampler == "dpmpp_2m":
                x0 = self._clamped_x0(output, x, t)
                x, before = self.dpmpp_step(x0, x, t, t_next, before), (x0, t)
            else:
                noisy = self.ddim_sigma(t, t_next, eta) > 0
                x = self.ddim_step(output, x, t, t_next, eta, step_noise(k) if noisy else None)
            if progress is not None:
                progress(k, len(visited), x)
        return x

    def _signal_share(self, t: int) -> float:
        """Return ᾱ_t; 1 for the clean image, t = −1."""
        return float(self.alphas_cumprod[t]) if t >= 0 else 1.0

    def _step_in_lambda(self, t: int, t_next: int) -> float:
        """Return the step from t to `t_next` ≥ 0 in λ = log(α/σ) = ½ log SNR."""
        return 0.5 * math.log(float(self.snr_table[t_next] / self.snr_table[t]))

    def _clamped_x0(self, output: Tensor, x_t: Tensor, t: int) -> Tensor:
        timestep = torch.full((1,), t, device=x_t.device)
        return self.predict_x0(output, x_t, timestep).clamp(-1, 1)


def equal_bins(values: Tensor, count: int) -> tuple[Tensor, list[float]]:
    """Return (bin of each value, int64 [T]; rising edges), of `count` bins of equal width over the range of values."""
    low, high = float(values.min()), float(values.max())
    bins = ((values - low) / (high - low) * count).long().clamp(max=count - 1)
    return bins, [low + (high - low) * i / count for i in range(count)] + [high]


def _gather(table: Tensor, t: Tensor) -> Tensor:
    """Return values at t, shaped to multiply images: [B, 1, 1, 1]."""
    return table[t][:, None, None, None]
