"""Timestep samplers and loss weightings: the knobs of each, and its formula where that is a fixed
table over t. Formulas are float64 [T] on the CPU; torch is imported only when one is computed.

Weights multiply the mean squared error of what the network predicts. The same objective has another
weight in each unit, since MSE_x0 = MSE_ε/SNR and MSE_v = MSE_ε/ᾱ. All weightings but `constant` are
defined on the ε-error and converted by `Diffusion.to_epsilon`: one means the same for every
prediction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field

from tunediff.config.knobs import Bool, Float, Int, Refusal, section
from tunediff.config.systems import CUDA_GRAPHS

if TYPE_CHECKING:
    from torch import Tensor

Share = Annotated[Float, Ge(0.0), Le(1.0)]


class NoiseLevels(Protocol):
    """What a formula needs of a `process.Diffusion`; see there."""

    steps: int
    snr_table: Tensor
    alphas_cumprod: Tensor
    to_epsilon: Tensor


# ---- timestep samplers
@section
class Corrected:
    """What samplers share whose p(t) is not uniform."""

    importance_correction: Share = 0.0
    """α in the loss factor (1/(T·p))^α: 1 keeps the objective of uniform t, 0 makes p(t) itself the
    weighting."""


@section
class Mixed(Corrected):
    """What samplers share that are mixed with a uniform one."""

    uniform_share: Share = 0.0
    """Share of the probability that stays uniform; bounds the importance weight by its inverse."""

    def check(self, config: Any) -> None:
        if self.importance_correction > 0 and self.uniform_share < 0.001:
            raise Refusal(
                "timesteps.importance_correction",
                f"some probabilities of {config.timesteps.name} vanish, and 1/(T·p) with them"
                " explodes; set timesteps.uniform_share to at least 0.001, which bounds it",
            )


@section
class Spread:
    """What samplers share that draw from a table."""

    stratified: Bool = False
    """Spread the draws of a batch evenly over p(t): the same probabilities, less variance."""
    until: Share = 1.0
    """Fraction of the training from which on t is uniform: concentrated draws learn faster early
    and may end worse."""


@section
class Uniform:
    """t uniform over the chain: the DDPM baseline."""

    name: Literal["uniform"] = "uniform"


@section
class Stratified:
    """t = ⌊T·frac(u + i/B)⌋: uniform for each image, evenly spread over the batch (VDM, arXiv
    2107.00630)."""

    name: Literal["stratified"] = "stratified"


@section
class LossSecondMoment(Mixed, Spread):
    """Importance sampling by √E[loss²] per timestep (Nichol & Dhariwal 2021, §3.3): adapts during
    training."""

    name: Literal["loss_second_moment"] = "loss_second_moment"
    history: Annotated[Int, Ge(1), Le(100)] = 10
    """Losses remembered per timestep; sampling stays uniform until every timestep has that many."""
    uniform_share: Share = 0.001
    importance_correction: Share = 1.0


@section
class Speed(Corrected, Spread):
    """SpeeD (arXiv 2405.17403): the noisiest timesteps, where little is left to learn, are drawn k
    times less often."""

    name: Literal["speed"] = "speed"
    suppression: Annotated[Float, Ge(1.0), Le(100.0)] = 5.0
    """k: how many times likelier a timestep below τ is than one above."""
    tau: Annotated[Float, Gt(0.0), Lt(1.0)] = 0.7
    """τ, the border, as a fraction of the chain."""
    dual: Bool = False
    """Draw the second half of the batch as mirror images of the first: t' = m−t below m, t−m above,
    with m where the growth of the noise √(1−ᾱ) falls below 1e-4. The public code does so. It
    favours small t once more on the linear schedule; on the others and along a flow, where m is
    near the end, less than without."""

    def density(self, diffusion: NoiseLevels) -> Tensor:
        """Return k below τ·T and 1 from there on (§3.3; the public code): not scaled to sum to
        1."""
        p = diffusion.snr_table.new_ones(diffusion.steps)
        p[: round(self.tau * diffusion.steps)] = self.suppression
        return p

    def check(self, config: Any) -> None:
        if self.dual and self.stratified:
            why = "mirrored draws are not stratified; choose one of the two"
            raise Refusal("timesteps.dual", why)
        why = "timesteps.dual draws in another way from timesteps.until on"
        config.compile.refuse_capture(self.dual and self.until < 1, why)
        if self.dual and config.loader.batch_size // config.loader.accumulation % 2:
            why = "it mirrors half of the images, so loader.batch_size / accumulation must be even"
            raise Refusal("timesteps.dual", why)


@section
class LogitNormal(Mixed, Spread):
    """t/T is the logistic function of a normal variable (Stable Diffusion 3, arXiv 2403.03206):
    mostly mid noise."""

    name: Literal["logit_normal"] = "logit_normal"
    mean: Annotated[Float, Ge(-5.0), Le(5.0)] = 0.0
    """m of the normal variable; above 0 draws noisier timesteps."""
    std: Annotated[Float, Gt(0.0), Le(5.0)] = 1.0
    """s of the normal variable."""

    def density(self, diffusion: NoiseLevels) -> Tensor:
        """Return the exact probability of each cell [t/T, (t+1)/T) (§3.1).

        m > 0 draws noisier timesteps; code that indexes a descending list of timesteps with u has
        the opposite direction.
        """
        import torch

        edges = torch.arange(diffusion.steps + 1, dtype=torch.float64) / diffusion.steps
        below: Tensor = torch.special.ndtr((torch.logit(edges) - self.mean) / self.std)
        return below.diff()


def _per_timestep(log_density: Tensor, log_snr: Tensor) -> Tensor:
    """Return p(t) ∝ density(λ_t)·|λ_{t+1} − λ_{t−1}|/2, λ = log SNR: a density over noise levels on
    a fixed chain. In logarithms, where nothing underflows."""
    import torch

    return (log_density + torch.gradient(log_snr)[0].abs().log()).softmax(0)


@section
class LogNormal(Mixed, Spread):
    """ln σ, σ² = 1/SNR, from a normal distribution: how EDM is trained (Karras et al. 2022, arXiv
    2206.00364)."""

    name: Literal["log_normal"] = "log_normal"
    mean: Annotated[Float, Ge(-5.0), Le(5.0)] = -1.2
    """P_mean of ln σ; higher draws noisier timesteps. EDM2: −0.4."""
    std: Annotated[Float, Gt(0.0), Le(5.0)] = 1.2
    """P_std of ln σ. EDM2: 1."""

    def density(self, diffusion: NoiseLevels) -> Tensor:
        """Return the density of ln σ = −λ/2 (table 1)."""
        log_snr = diffusion.snr_table.log()
        return _per_timestep(-0.5 * ((-log_snr / 2 - self.mean) / self.std).square(), log_snr)


@section
class Centred(Mixed, Spread):
    """What samplers share that are given by a density over the log-SNR."""

    log_snr: Annotated[Float, Ge(-10.0), Le(10.0)] = 0.0
    """μ, the log-SNR that is drawn most densely; below 0 draws noisier timesteps."""


@section
class LogSnrLaplace(Centred):
    """Log signal-to-noise ratio drawn from a Laplace distribution (Hang et al. 2024, arXiv
    2407.03297)."""

    name: Literal["log_snr_laplace"] = "log_snr_laplace"
    scale: Annotated[Float, Gt(0.0), Le(10.0)] = 0.5
    """b, the width of the Laplace distribution in log-SNR."""

    def density(self, diffusion: NoiseLevels) -> Tensor:
        """Return exp(−|λ−μ|/b)/2b (table 1)."""
        log_snr = diffusion.snr_table.log()
        return _per_timestep(-(log_snr - self.log_snr).abs() / self.scale, log_snr)


@section
class LogSnrCosine(Centred):
    """Log-SNR drawn as the cosine schedule spreads it, sech((λ−μ)/2)/2π, shifted by μ (arXiv
    2301.11093)."""

    name: Literal["log_snr_cosine"] = "log_snr_cosine"

    def density(self, diffusion: NoiseLevels) -> Tensor:
        """Return sech((λ−μ)/2)/2π (§2.1)."""
        log_snr = diffusion.snr_table.log()
        return _per_timestep(-((log_snr - self.log_snr) / 2).cosh().log(), log_snr)


@section
class BetaPolicy(Mixed):
    """A small network draws t for each image from a Beta distribution and is rewarded by how much
    the training step lowers the loss (Kim et al. 2024, arXiv 2411.09998): adapts during training,
    at a cost."""

    name: Literal["beta_policy"] = "beta_policy"
    interval: Annotated[Int, Ge(1), Le(10000)] = 40
    """f_S: optimizer steps from one update of the policy to the next."""
    selected: Annotated[Int, Ge(1), Le(100)] = 3
    """|S|: timesteps at which the reward is measured, chosen for how well they represent the whole
    chain."""
    scan: Annotated[Int, Ge(2), Le(10000)] = 100
    """Timesteps, evenly spaced, among which S is chosen: each costs two forward passes of one image
    per update. The paper scans the whole chain."""
    queue: Annotated[Int, Ge(3), Le(1000)] = 20
    """|Q|: scans remembered for that choice."""
    entropy: Annotated[Float, Ge(0.0), Le(10.0)] = 0.01
    """Weight of the policy's entropy: more keeps it closer to uniform."""
    policy_lr: Annotated[Float, Gt(0.0), Le(1.0)] = 0.01
    """Learning rate of the policy (Adam, gradient clipped to norm 1)."""

    def check(self, config: Any) -> None:
        super().check(config)
        if self.selected > self.scan:
            raise Refusal("timesteps.selected", f"S is chosen among timesteps.scan = {self.scan}")
        ahead = "timesteps.name = beta_policy looks ahead"
        if config.compile.mode in CUDA_GRAPHS:
            why = (
                f"{ahead} between backward pass and optimizer step, where CUDA graphs hold the"
                " gradients in memory that a further forward pass overwrites; use default"
            )
            raise Refusal("compile.mode", why)
        config.compile.refuse_capture(True, f"{ahead} and learns on the host in its steps")
        if config.parallel.strategy == "pipeline" and config.parallel.workers > 1:
            why = f"{ahead}, for which no rank has the whole network; use ddp or fsdp"
            raise Refusal("parallel.strategy", why)
        if self.scan > config.process.steps:
            raise Refusal("timesteps.scan", f"at most process.steps = {config.process.steps}")


@section
class Wiener(Mixed, Spread):
    """Our own: draws around the noise level at which noise and image are least certain together, by
    the best linear denoiser. As the network gets ahead of that denoiser, more draws follow the
    images' spectrum and the distribution widens: adapts during training at next to no cost."""

    name: Literal["wiener"] = "wiener"
    width: Annotated[Float, Gt(0.0), Le(10.0)] = 0.85
    """Initial standard deviation of the drawn log-SNR; it grows up to three times."""
    stratified: Bool = True


@section
class InfoNoise(Mixed, Spread):
    """InfoNoise (arXiv 2602.18647): noise levels are drawn by how much an image's conditional
    entropy changes there, estimated from the errors of the trained batches; adapts during training
    at next to no cost.
    """

    name: Literal["info_noise"] = "info_noise"
    gate: Annotated[Float, Ge(0.0), Le(10.0)] = 0.15
    """c: noise levels σ = SNR^−½ below it are drawn less, by σ³/(σ³ + c³); 0: no gate."""
    compensation: Share = 0.0
    """κ in the division by w^κ, w being the loss weight on the error of the image: 0 lets p itself
    follow the entropy rate; 1, the paper's, lets p·w follow it, which with ε and constant weighting
    dwells on pure noise."""
    bins: Annotated[Int, Ge(2), Le(1000)] = 40
    """Bins of equal width in log-SNR, each with its own running mean of the error."""
    half_life: Annotated[Float, Gt(0.0), Le(1.0)] = 0.1
    """Half-life of the running means, as a fraction of the images seen so far."""


_First = Uniform | Stratified | LossSecondMoment | Speed | LogitNormal | LogNormal
_Second = LogSnrLaplace | LogSnrCosine | BetaPolicy | InfoNoise | Wiener
Timesteps = Annotated[_First | _Second, Field(discriminator="name")]


# ---- weightings
@section
class Constant:
    """w(t) = 1 on the ε-loss: L_simple of DDPM. For x0 and v the same weight in their own units."""

    name: Literal["constant"] = "constant"

    def weights(self, diffusion: NoiseLevels) -> Tensor:
        return diffusion.snr_table.new_ones(diffusion.steps)


@section
class MinSnr:
    """min(SNR, γ)/SNR on the ε-loss (Hang et al. 2023, arXiv 2303.09556)."""

    name: Literal["min_snr"] = "min_snr"
    gamma: Annotated[Float, Gt(0.0), Le(1000.0)] = 5.0
    """γ, the cap on the signal-to-noise ratio."""

    def weights(self, diffusion: NoiseLevels) -> Tensor:
        snr = diffusion.snr_table
        return snr.clamp(max=self.gamma) / snr * diffusion.to_epsilon


@section
class P2:
    """1/(k + SNR)^γ on the ε-loss (Choi et al. 2022, arXiv 2204.00227): less weight where the noise
    is low."""

    name: Literal["p2"] = "p2"
    exponent: Annotated[Float, Ge(0.0), Le(5.0)] = 1.0
    """γ: 0 is constant weighting; the paper uses ½ and 1."""
    offset: Annotated[Float, Gt(0.0), Le(100.0)] = 1.0
    """k: bounds the weight of the noisiest timesteps."""

    def weights(self, diffusion: NoiseLevels) -> Tensor:
        return (self.offset + diffusion.snr_table) ** -self.exponent * diffusion.to_epsilon


@section
class Debiased:
    """1/√SNR on the ε-loss, capped (Yu et al. 2023, arXiv 2310.08442): more weight where the noise
    is high."""

    name: Literal["debiased"] = "debiased"
    cap: Annotated[Float, Gt(0.0), Le(1000.0)] = 20.0
    """Largest weight; without it the last timesteps of the cosine schedule would weigh 20,000 times
    the middle."""

    def weights(self, diffusion: NoiseLevels) -> Tensor:
        # For v this is √SNR/(SNR+1) where the cap does not bind. Widespread code (kohya's
        # sd-scripts) uses 1/(SNR+1) for v, which on the ε-error is 1/SNR: another objective.
        return diffusion.snr_table.rsqrt().clamp(max=self.cap) * diffusion.to_epsilon


@section
class ChangeAware:
    """SpeeD's weighting on the ε-loss (arXiv 2405.17403): more where the noise level changes fast,
    1 beyond τ."""

    name: Literal["change_aware"] = "change_aware"
    contrast: Annotated[Float, Ge(0.5), Le(1.0)] = 0.6
    """λ: weights below τ lie in [1−λ, λ]; 0.5 is flat there."""
    tau: Annotated[Float, Gt(0.0), Le(1.0)] = 0.7
    """τ, the border, as a fraction of the chain."""

    def weights(self, diffusion: NoiseLevels) -> Tensor:
        """Return (1−λ) + (2λ−1)·g for t < τ·T, with g the slope of 1−ᾱ over t, scaled to [0, 1]
        over the chain, and 1 from there on, as the authors' code has it."""
        import torch

        (slope,) = torch.gradient(1 - diffusion.alphas_cumprod)
        low, high = slope.min(), slope.max()
        # A chain of two steps has a single slope, which counts as the lowest.
        change = (slope - low) / (high - low).clamp(min=torch.finfo(torch.float64).tiny)
        weight = (1 - self.contrast) + (2 * self.contrast - 1) * change
        weight[round(self.tau * diffusion.steps) :] = 1
        return weight * diffusion.to_epsilon


@section
class Uncertainty:
    """1/e^u(t) with u learned beside the model (EDM2, arXiv 2312.02696, eq. 21): all noise levels
    contribute alike."""

    name: Literal["uncertainty"] = "uncertainty"
    channels: Annotated[Int, Ge(2), Le(4096)] = 128
    """Fourier features of the noise level that u is a linear function of."""
    bound: Annotated[Float, Gt(0.0), Le(50.0)] = 10.0
    """|u| is limited to this."""

    def check(self, config: Any) -> None:
        if isinstance(config.timesteps, LossSecondMoment):
            why = (
                "it makes the losses of all timesteps alike: timesteps.name = loss_second_moment"
                " has nothing to go by"
            )
            raise Refusal("weighting.name", why)
        fsdp = config.parallel.strategy == "fsdp" and config.parallel.workers > 1
        if config.precision.amp == "fp16" and fsdp:
            why = (
                "parallel.strategy = fsdp divides the network and not what weighting.name ="
                " uncertainty learns, and loss scaling takes no such mixture; use bf16"
            )
            raise Refusal("precision.amp", why)


_Static = Constant | MinSnr | P2 | Debiased | ChangeAware
Weighting = Annotated[_Static | Uncertainty, Field(discriminator="name")]
