"""The noising process and its reversal: targets, DDPM, DDIM, DPM-Solver++, Euler, Heun.

Notation: timesteps t = 0 … T−1, ᾱ_t = ∏(1 − β_i) for i ≤ t, x_t = √ᾱ_t·x0 + √(1−ᾱ_t)·ε, images in
[−1, 1]. Every process here is x0 + σ·ε, scaled: SNR = 1/σ², ᾱ = 1/(1+σ²). A chain is T levels;
`process.path` and `process.sigma_data` are a scale of the network's input and what v means: the
network sees x, which is x_t times a number, see `mix`. Sources: DDPM (Ho et al. 2020, arXiv
2006.11239), DDIM (Song et al. 2021, arXiv 2010.02502), improved DDPM (Nichol & Dhariwal 2021, arXiv
2102.09672), v-prediction (Salimans & Ho 2022, arXiv 2202.00512), DPM-Solver++ (Lu et al. 2022,
arXiv 2211.01095), EDM (Karras et al. 2022, arXiv 2206.00364), flow matching (Lipman et al. 2022,
arXiv 2210.02747).
"""

from __future__ import annotations

import math
from collections.abc import Callable
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


Predict = Callable[[Tensor, Tensor], Tensor]
"""(x [B, C, H, W], t [B] int64, or float32 between) → the network's output [B, C, H, W]."""
Spacing = Literal["linear", "quadratic", "log_snr"]
OnStep = Callable[[int, int, Tensor], None]
"""(k, number of steps, x [B, C, H, W]): called after sampling step k = 0, 1, … of a batch."""

LARGEST_LOG_SNR = 12.0
"""Log-SNRs are cut at ±12: cosine's last steps leap to −20 and would leave bins empty."""


class Diffusion:
    """Forward process, training target and sampling for one `Process`.

    Public tables are float64 [T] on the CPU: `betas`, `alphas_cumprod` (ᾱ_t), `snr_table`
    (ᾱ/(1−ᾱ)), `log_snr` (within ±12), `to_epsilon` (a squared error of the prediction to one of ε),
    `posterior_variance`, `posterior_coef_x0`, `posterior_coef_xt` (DDPM, eq. 7) and `log_variance`,
    that of an ancestral step. Methods that take t ([B] int64 on `device`) work in float32.
    """

    def __init__(self, process: Process, device: torch.device | str = "cpu") -> None:
        self.process, self.steps, self.device = process, process.steps, torch.device(device)
        self.betas, ab = chain(process)
        self.alphas_cumprod = ab
        alphas, ab_prev = 1 - self.betas, torch.cat((ab.new_ones(1), ab[:-1]))
        self.snr_table = ab / (1 - ab)
        self.log_snr = self.snr_table.log().clamp(-LARGEST_LOG_SNR, LARGEST_LOG_SNR)
        at = mix(process, ab.sqrt(), (1 - ab).sqrt())
        # MSE_ε = SNR·MSE_x0 = (σ_d·image)²·MSE_v, exactly
        self.to_epsilon = {
            "epsilon": torch.ones_like(ab),
            "x0": self.snr_table,
            "v": (process.sigma_data * at.image).square(),
        }[process.prediction]

        self.posterior_variance = self.betas * (1 - ab_prev) / (1 - ab)
        self.posterior_coef_x0 = self.betas * ab_prev.sqrt() / (1 - ab)
        self.posterior_coef_xt = alphas.sqrt() * (1 - ab_prev) / (1 - ab)
        # The posterior variance is 0 at t = 0; for a logarithm both take their value at t = 1.
        later = self.betas[1:] if process.variance == "fixed_large" else self.posterior_variance[1:]
        self.log_variance = torch.cat((self.posterior_variance[1:2], later)).log()

        self._mix = Mix(*(table.to(self.device, torch.float32) for table in at))
        self._scales = (at.image / ab.sqrt()).tolist()  # of x_t, for the network

    # ---- training
    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return the network's x [B, C, H, W]: for `vp` √ᾱ·x0 + √(1−ᾱ)·ε (DDPM, eq. 4)."""
        return _gather(self._mix.image, t) * x0 + _gather(self._mix.noise, t) * noise

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return the network's target [B, C, H, W]: ε, x0, or v = √ᾱ·ε − √(1−ᾱ)·x0 (`vp`)."""
        if self.process.prediction == "epsilon":
            return noise
        if self.process.prediction == "x0":
            return x0
        return _gather(self._mix.v_noise, t) * noise - _gather(self._mix.v_image, t) * x0

    def predict_x0(self, output: Tensor, x: Tensor, t: Tensor | Mix) -> Tensor:
        """Return the clean image [B, C, H, W] that the output at t implies, not clamped."""
        output, at = output.float(), self._at(t)
        if self.process.prediction == "epsilon":
            return (x - at.noise * output) / at.image
        if self.process.prediction == "x0":
            return output
        return (at.v_noise * x - at.noise * output) * self.process.sigma_data

    def predict_noise(self, output: Tensor, x: Tensor, t: Tensor | Mix) -> Tensor:
        """Return the noise ε that a network's output for x at t implies, float32 [B, C, H, W]."""
        output, at = output.float(), self._at(t)
        if self.process.prediction == "epsilon":
            return output
        if self.process.prediction == "x0":
            return (x - at.image * output) / at.noise
        return (at.v_image * x + at.image * output) * self.process.sigma_data

    def _at(self, t: Tensor | Mix) -> Mix:
        """Return the mix at timesteps, shaped [B, 1, 1, 1]; a mix between them as it is."""
        return t if isinstance(t, Mix) else Mix(*(_gather(table, t) for table in self._mix))

    # ---- sampling
    def timesteps(self, steps: int, skip: Spacing) -> list[int]:
        """Return exactly `steps` distinct timesteps, increasing; sampling goes backwards.

        - `linear`: ⌊i·T/S⌋. Equal to the usual arange(0, T, T//S) where S divides T; elsewhere that
          one returns more than S steps (334 for S = 300, T = 1000).
        - `quadratic`: round((√(0.8·T)·i/(S−1))²), dense at low noise, from 0 to 0.8·T. For larger S
          its first values coincide, which wastes network evaluations: each is raised to at least
          one above its predecessor, and lowered where fewer than the remaining steps would fit
          below T.
        - `log_snr`: nearest to an even spacing in log-SNR within ±12, from 0 to where the noise
          ends; made distinct likewise.
        - A single step is T−1, where the pure noise it starts from belongs.

        1 ≤ `steps` ≤ T.
        """
        if steps == 1:
            return [self.steps - 1]
        if skip == "linear":
            return [i * self.steps // steps for i in range(steps)]
        if skip == "quadratic":
            nearest = [round(0.8 * self.steps * (i / (steps - 1)) ** 2) for i in range(steps)]
        else:
            first, last = float(self.log_snr[0]), float(self.log_snr[-1])
            even = torch.linspace(first, last, steps, dtype=torch.float64)
            nearest = (self.log_snr - even[:, None]).abs().argmin(1).tolist()
        # Distinct, and with room below T for those that are still to come.
        visited: list[int] = []
        for i, t in enumerate(nearest):
            lowest = visited[-1] + 1 if visited else 0
            visited.append(min(max(t, lowest), self.steps - steps + i))
        return visited

    def ancestral_step(self, output: Tensor, x_t: Tensor, t: int, noise: Tensor | None) -> Tensor:
        """Return x_{t−1} [B, C, H, W] drawn by DDPM's algorithm 2, x0 clamped to [−1, 1].

        `noise` is standard normal; it is not used at t = 0 and may be None there.
        """
        x0 = self._clamped_x0(output, x_t, t)
        mean = float(self.posterior_coef_x0[t]) * x0 + float(self.posterior_coef_xt[t]) * x_t
        if t == 0:
            return mean
        assert noise is not None, "an ancestral step above t = 0 needs noise"
        return mean + math.exp(0.5 * float(self.log_variance[t])) * noise

    def ddim_step(
        self,
        output: Tensor,
        x_t: Tensor,
        t: int,
        t_next: int,
        eta: float = 0.0,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Return x at `t_next` < t (−1: clean) by DDIM, eq. 12 and 16, float32 [B, C, H, W].

        σ = η·√((1−ᾱ_next)/(1−ᾱ_t))·√(1−ᾱ_t/ᾱ_next). x0 is clamped to [−1, 1] and ε is the one that
        belongs to the clamped x0. `noise` is standard normal; used only where σ > 0; else None.
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
        """Return the standard deviation of a DDIM step's noise from t to `t_next`; last: 0."""
        ab, ab_next = self._signal_share(t), self._signal_share(t_next)
        return eta * math.sqrt((1 - ab_next) / (1 - ab) * (1 - ab / ab_next))

    def dpmpp_step(
        self, x0: Tensor, x_t: Tensor, t: int, t_next: int, before: tuple[Tensor, int] | None = None
    ) -> Tensor:
        """Return x at `t_next` < t by DPM-Solver++(2M), algorithm 2, [B, C, H, W].

        `x0`: the clean image predicted at t; `before`: the one predicted at the timestep visited
        before, and that timestep. x = σ_next/σ_t·x_t + α_next·(1 − e^−h)·D, with h the step in λ =
        log(α/σ), r = (the step before)/h and D = x0 + (x0 − x0_before)/2r: second order. Without
        `before` D = x0: first order, DDIM with η = 0. A step to the clean image (−1) has h = ∞,
        over which nothing is extrapolated: it ends at `x0`.
        """
        if t_next < 0:
            return x0
        ab, ab_next = self._signal_share(t), self._signal_share(t_next)
        h = self._step_in_lambda(t, t_next)
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
        sampler: Literal["ddpm", "ddim", "dpmpp_2m", "euler", "heun"],
        steps: int,
        skip: Literal["linear", "quadratic"] = "linear",
        eta: float = 0.0,
        step_noise: Callable[[int], Tensor],
        progress: OnStep | None = None,
    ) -> Tensor:
        """Return images x0 [B, C, H, W] in [−1, 1], float32, from `noise`, the standard normal x_T.

        `ddpm` takes all T ancestral steps, `dpmpp_2m` so many `steps` evenly spaced in log-SNR;
        `skip` and `eta` are for `ddim`; `euler` and `heun` take `levels.solver_levels`, and only
        they may leave [−1, 1]. `step_noise(k)` returns the normal noise of step k = 0, 1, … and is
        called only for steps that add it. Nothing here makes the host wait for the device.
        """
        if sampler in ("euler", "heun"):
            return self._solve(predict, noise, sampler, steps, progress)

        # From most noise to least; `before` is what DPM-Solver++ extrapolates from
        spacing: Spacing = "log_snr" if sampler == "dpmpp_2m" else skip
        visited = [*range(self.steps)] if sampler == "ddpm" else self.timesteps(steps, spacing)
        visited.reverse()
        x, before = noise.float(), None
        for k, (t, t_next) in enumerate(zip(visited, [*visited[1:], -1], strict=True)):
            output = predict(self._seen(x, t), torch.full((len(x),), t, device=x.device))
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

    def _solve(
        self,
        predict: Predict,
        noise: Tensor,
        sampler: Literal["euler", "heun"],
        steps: int,
        progress: OnStep | None,
    ) -> Tensor:
        """Return images by Euler or Heun on dy/dσ = ε̂(y, σ) (EDM, algorithm 1 without churn).

        ε̂ is the noise that the network's output implies. Euler's method is DDIM with η = 0,
        without clamping. The last step, to σ = 0, is Euler's.
        """
        levels = solver_levels(self.process, self.alphas_cumprod, steps, sampler)

        # Between levels of the chain there are no tables: the mix is computed for this σ.
        def implied(y: Tensor, t: float, sigma: float) -> tuple[Tensor, Tensor]:
            signal = torch.tensor(1 / math.hypot(1, sigma), dtype=torch.float64)
            at = mix(self.process, signal, sigma * signal)
            x = float(at.image) * y
            output = predict(x, torch.full((len(x),), t, device=x.device)).float()
            return self.predict_x0(output, x, at), self.predict_noise(output, x, at)

        y = math.hypot(1, levels[0][1]) * noise.float()  # as elsewhere, x_t is normal `noise`
        later = [*levels[1:], (0.0, 0.0)]
        for k, ((t, sigma), (t_next, sigma_next)) in enumerate(zip(levels, later, strict=True)):
            x0, epsilon = implied(y, t, sigma)
            y = x0 + sigma_next * epsilon  # y + (σ_next − σ)·ε̂, without cancellation
            if sampler == "heun" and sigma_next > 0:
                y = y + (sigma_next - sigma) / 2 * (implied(y, t_next, sigma_next)[1] - epsilon)
            if progress is not None:
                progress(k, len(levels), y / math.hypot(1, sigma_next))
        return y

    def _signal_share(self, t: int) -> float:
        """Return ᾱ_t; 1 for the clean image, t = −1."""
        return float(self.alphas_cumprod[t]) if t >= 0 else 1.0

    def _step_in_lambda(self, t: int, t_next: int) -> float:
        """Return the step from t to `t_next` ≥ 0 in λ = log(α/σ) = ½ log SNR."""
        return 0.5 * math.log(float(self.snr_table[t_next] / self.snr_table[t]))

    def _seen(self, x_t: Tensor, t: int) -> Tensor:
        return x_t if self._scales[t] == 1.0 else self._scales[t] * x_t

    def _clamped_x0(self, output: Tensor, x_t: Tensor, t: int) -> Tensor:
        timestep = torch.full((1,), t, device=x_t.device)
        return self.predict_x0(output, self._seen(x_t, t), timestep).clamp(-1, 1)


def _gather(table: Tensor, t: Tensor) -> Tensor:
    """Return values at t, shaped to multiply images: [B, 1, 1, 1]."""
    return table[t][:, None, None, None]
