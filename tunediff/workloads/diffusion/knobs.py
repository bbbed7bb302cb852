"""What can be set of a DDPM training, besides what every training has. Imports no torch."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field

from tunediff.config.knobs import Bool, ConfigError, Fixed, Float, Int, Refusal, Ruler, Values, section
from tunediff.config.systems import CUDA_GRAPHS
from tunediff.config.workload import Metric, Quantity
from tunediff.data.knobs import Data
from tunediff.evaluation import knobs as images
from tunediff.training.knobs import Ema, Optimizer

Share = Annotated[Float, Ge(0.0), Le(1.0)]


@section
class Model:
    """The DDPM U-Net (Ho et al. 2020, arXiv 2006.11239, appendix B); the defaults have 35,746,307 parameters."""

    channels: Annotated[Int, Ge(8), Le(1024)] = 128
    """Channels at full resolution; a multiple of `model.norm_groups`."""
    multipliers: tuple[Annotated[Int, Ge(1), Le(16)], ...] = (1, 2, 2, 2)
    """Channel factor at each resolution, each half the one before."""
    blocks: Annotated[Int, Ge(1), Le(8)] = 2
    """Residual blocks per resolution."""
    attention: tuple[Annotated[Int, Ge(1), Le(256)], ...] = (16,)
    """Feature-map sides in pixels at which self-attention is applied."""
    dropout: Annotated[Float, Ge(0.0), Lt(1.0)] = 0.1
    """Dropout probability inside the residual blocks."""
    norm_groups: Annotated[Int, Ge(1), Le(64)] = 32
    """Groups of every GroupNorm."""
    norm: Literal["torch", "triton"] = "torch"
    """GroupNorm and the SiLU behind it: `torch` runs them one after the other, under autocast in float32; `triton` in
    one kernel of ours, for NVIDIA GPUs, in the activations' own format with float32 arithmetic. Needs
    `memory.channels_last`; learns the same but for rounding. torch.compile joins the two by itself."""
    checkpoint_levels: tuple[Annotated[Int, Ge(0), Le(15)], ...] = ()
    """Activation checkpointing: resolution levels (0 is full resolution) whose residual blocks keep no activations but
    compute them again in the backward pass. Less memory, more time, the same result; level 0 holds most of the memory.
    All levels: every block."""

    def check(self, config: Any) -> None:
        halvings, side = len(self.multipliers) - 1, config.data.image_size
        sides = [side >> level for level in range(halvings + 1)]
        if halvings < 0:
            raise Refusal("model.multipliers", "at least one resolution is needed")
        if side % 2**halvings:
            why = f"model.multipliers halves it {halvings} times; use a multiple of {2**halvings}"
            raise Refusal("data.image_size", why)
        if self.channels % self.norm_groups:
            raise Refusal("model.channels", f"must be a multiple of model.norm_groups = {self.norm_groups}")
        if unknown := [side for side in self.attention if side not in sides]:
            why = f"no feature map has side {unknown[0]}; sides here: {', '.join(map(str, sides))}"
            raise Refusal("model.attention", why)
        if beyond := [level for level in self.checkpoint_levels if level > halvings]:
            raise Refusal("model.checkpoint_levels", f"there is no level {beyond[0]}; levels here: 0 … {halvings}")
        if self.norm == "triton" and not config.memory.channels_last:
            raise Refusal("model.norm", "its kernel reads NHWC; set memory.channels_last: true")

    def not_effective(self, config: Any, device: str) -> Iterator[tuple[str, str]]:
        if self.norm == "triton" and device != "cuda":
            yield "model.norm", "its kernel is for NVIDIA GPUs; here torch computes the same"


@section
class Process:
    """The forward (noising) process and what the model predicts."""

    schedule: Literal["linear", "cosine"] = "linear"
    """β schedule: `linear` 1e-4…0.02 (Ho et al. 2020), `cosine` ᾱ (Nichol & Dhariwal 2021, arXiv 2102.09672)."""
    steps: Annotated[Int, Ge(2), Le(10000)] = 1000
    """T, the length of the chain. `linear` is scaled by 1000/T, so that ᾱ ends near zero for every T ≥ 25 or so."""
    prediction: Literal["epsilon", "x0", "v"] = "epsilon"
    """What the network predicts: the noise, the clean image, or v = √ᾱ·ε − √(1−ᾱ)·x0 (arXiv 2202.00512)."""
    variance: Literal["fixed_large", "fixed_small"] = "fixed_large"
    """Variance of an ancestral sampling step: β (large) or the posterior variance (small)."""


# -------------------------------------------------------------------------------------------------- timestep samplers
@section
class Corrected:
    """What samplers share whose p(t) is not uniform."""

    importance_correction: Share = 0.0
    """α in the loss factor (1/(T·p))^α: 1 keeps the objective of uniform t, 0 makes p(t) itself the weighting."""


@section
class Mixed(Corrected):
    """What samplers share that are mixed with a uniform one."""

    uniform_share: Share = 0.0
    """Share of the probability that stays uniform; bounds the importance weight by its inverse."""

    def check(self, config: Any) -> None:
        if self.importance_correction > 0 and self.uniform_share < 0.001:
            why = f"some probabilities of {config.timesteps.name} vanish, and 1/(T·p) with them explodes"
            bound = "set timesteps.uniform_share to at least 0.001, which bounds it"
            raise Refusal("timesteps.importance_correction", f"{why}; {bound}")


@section
class Spread:
    """What samplers share that draw from a table."""

    stratified: Bool = False
    """Spread the draws of a batch evenly over p(t): the same probabilities, less variance."""


@section
class Uniform:
    """t uniform over the chain: the DDPM baseline."""

    name: Literal["uniform"] = "uniform"


@section
class Stratified:
    """t = ⌊T·frac(u + i/B)⌋: uniform for each image, evenly spread over the batch (VDM, arXiv 2107.00630)."""

    name: Literal["stratified"] = "stratified"


@section
class LossSecondMoment(Mixed, Spread):
    """Importance sampling by √E[loss²] per timestep (Nichol & Dhariwal 2021, §3.3): adapts during training."""

    name: Literal["loss_second_moment"] = "loss_second_moment"
    history: Annotated[Int, Ge(1), Le(100)] = 10
    """Losses remembered per timestep; sampling stays uniform until every timestep has that many."""
    uniform_share: Share = 0.001
    importance_correction: Share = 1.0


@section
class Speed(Corrected, Spread):
    """SpeeD (arXiv 2405.17403): the noisiest timesteps, where little is left to learn, are drawn k times less often."""

    name: Literal["speed"] = "speed"
    suppression: Annotated[Float, Ge(1.0), Le(100.0)] = 5.0
    """k: how many times likelier a timestep below τ is than one above."""
    tau: Annotated[Float, Gt(0.0), Lt(1.0)] = 0.7
    """τ, the border, as a fraction of the chain."""
    dual: Bool = False
    """Draw the second half of the batch as mirror images of the first: t' = m−t below m, t−m above, with m the first
    timestep whose noise √(1−ᾱ) grows by less than 1e-4. The public code does so; it favours small t once more."""

    def check(self, config: Any) -> None:
        if self.dual and self.stratified:
            raise Refusal("timesteps.dual", "mirrored draws are not stratified; choose one of the two")
        if self.dual and config.loader.batch_size // config.loader.accumulation % 2:
            why = "it mirrors half of the images, so loader.batch_size / accumulation must be even"
            raise Refusal("timesteps.dual", why)


@section
class LogitNormal(Mixed, Spread):
    """t/T is the logistic function of a normal variable (Stable Diffusion 3, arXiv 2403.03206): mostly mid noise."""

    name: Literal["logit_normal"] = "logit_normal"
    mean: Annotated[Float, Ge(-5.0), Le(5.0)] = 0.0
    """m of the normal variable; above 0 draws noisier timesteps."""
    std: Annotated[Float, Gt(0.0), Le(5.0)] = 1.0
    """s of the normal variable."""


@section
class Centred(Mixed, Spread):
    """What samplers share that are given by a density over the log-SNR."""

    log_snr: Annotated[Float, Ge(-10.0), Le(10.0)] = 0.0
    """μ, the log-SNR that is drawn most densely; below 0 draws noisier timesteps."""


@section
class LogSnrLaplace(Centred):
    """Log signal-to-noise ratio drawn from a Laplace distribution (Hang et al. 2024, arXiv 2407.03297)."""

    name: Literal["log_snr_laplace"] = "log_snr_laplace"
    scale: Annotated[Float, Gt(0.0), Le(10.0)] = 0.5
    """b, the width of the Laplace distribution in log-SNR."""


@section
class LogSnrCosine(Centred):
    """Log-SNR drawn as the cosine schedule spreads it, sech((λ−μ)/2)/2π, shifted by μ (arXiv 2301.11093)."""

    name: Literal["log_snr_cosine"] = "log_snr_cosine"


@section
class BetaPolicy(Mixed):
    """A small network draws t for each image from a Beta distribution and is rewarded by how much the training step
    lowers the loss (Kim et al. 2024, arXiv 2411.09998): adapts during training, at a cost."""

    name: Literal["beta_policy"] = "beta_policy"
    interval: Annotated[Int, Ge(1), Le(10000)] = 40
    """f_S: optimizer steps from one update of the policy to the next."""
    selected: Annotated[Int, Ge(1), Le(100)] = 3
    """|S|: timesteps at which the reward is measured, chosen for how well they tell the whole chain's progress."""
    scan: Annotated[Int, Ge(2), Le(10000)] = 100
    """Timesteps, evenly spaced, among which S is chosen: each costs two forward passes of one image per update. The
    paper scans the whole chain."""
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
        if self.uniform_share == 1.0:
            raise Refusal("timesteps.uniform_share", "the policy would never be asked; use a value below 1")
        if config.compile.mode in CUDA_GRAPHS:
            why = "timesteps.name = beta_policy looks ahead between backward pass and optimizer step"
            graphs = "CUDA graphs hold the gradients in memory that a further forward pass overwrites"
            raise Refusal("compile.mode", f"{why}, where {graphs}; use default")
        if config.parallel.strategy == "pipeline" and config.parallel.workers > 1:
            why = "timesteps.name = beta_policy looks ahead, for which no rank has the whole network"
            raise Refusal("parallel.strategy", f"{why}; use ddp or fsdp")
        if self.scan > config.process.steps:
            raise Refusal("timesteps.scan", f"at most process.steps = {config.process.steps}")


@section
class Wiener(Mixed, Spread):
    """Our own: draws around the noise level at which the images' spectrum leaves noise and image least certain, as the
    best linear denoiser shows it, learned from the first batches; costs nothing afterwards."""

    name: Literal["wiener"] = "wiener"
    width: Annotated[Float, Gt(0.0), Le(10.0)] = 0.85
    """Standard deviation of the log-SNR that is drawn."""
    stratified: Bool = True


@section
class InfoNoise(Mixed, Spread):
    """InfoNoise (arXiv 2602.18647): noise levels are drawn by how much an image's conditional entropy changes there, as
    the errors of the batches that are trained anyway show it; adapts during training at next to no cost."""

    name: Literal["info_noise"] = "info_noise"
    gate: Annotated[Float, Ge(0.0), Le(10.0)] = 0.15
    """c: noise levels σ = SNR^−½ below it are passed over, by the factor σ³/(σ³ + c³). 0: none are."""
    compensation: Share = 0.0
    """κ in the division by w^κ, w being the loss weight on the error of the image: 0 lets p itself follow the entropy
    rate; 1, the paper's, lets p·w follow it, which with ε and constant weighting dwells on pure noise."""
    bins: Annotated[Int, Ge(2), Le(1000)] = 40
    """Bins of equal width in log-SNR, each with its own running mean of the error."""
    half_life: Annotated[Float, Gt(0.0), Le(1.0)] = 0.1
    """Half-life of the running means, as a fraction of the images seen so far."""


_Drawn = Uniform | Stratified | LossSecondMoment | Speed | LogitNormal | LogSnrLaplace | LogSnrCosine
Timesteps = Annotated[_Drawn | BetaPolicy | InfoNoise | Wiener, Field(discriminator="name")]


# --------------------------------------------------------------------------------------------------------- weightings
@section
class Constant:
    """w(t) = 1 on the ε-loss: L_simple of DDPM. For x0 and v the same weight in their own units."""

    name: Literal["constant"] = "constant"


@section
class MinSnr:
    """min(SNR, γ)/SNR on the ε-loss (Hang et al. 2023, arXiv 2303.09556)."""

    name: Literal["min_snr"] = "min_snr"
    gamma: Annotated[Float, Gt(0.0), Le(1000.0)] = 5.0
    """γ, the cap on the signal-to-noise ratio."""


@section
class P2:
    """1/(k + SNR)^γ on the ε-loss (Choi et al. 2022, arXiv 2204.00227): less weight where the noise is low."""

    name: Literal["p2"] = "p2"
    exponent: Annotated[Float, Ge(0.0), Le(5.0)] = 1.0
    """γ: 0 is constant weighting; the paper uses ½ and 1."""
    offset: Annotated[Float, Gt(0.0), Le(100.0)] = 1.0
    """k: bounds the weight of the noisiest timesteps."""


@section
class Debiased:
    """1/√SNR on the ε-loss, capped (Yu et al. 2023, arXiv 2310.08442): more weight where the noise is high."""

    name: Literal["debiased"] = "debiased"
    cap: Annotated[Float, Gt(0.0), Le(1000.0)] = 20.0
    """Largest weight; without it the last timesteps of the cosine schedule would weigh 20,000 times the middle."""


@section
class ChangeAware:
    """SpeeD's weighting on the ε-loss (arXiv 2405.17403): more where the noise level changes fast, 1 beyond τ."""

    name: Literal["change_aware"] = "change_aware"
    contrast: Annotated[Float, Ge(0.5), Le(1.0)] = 0.6
    """λ: weights below τ lie in [1−λ, λ]; 0.5 is flat there."""
    tau: Annotated[Float, Gt(0.0), Le(1.0)] = 0.7
    """τ, the border, as a fraction of the chain."""


@section
class Uncertainty:
    """1/e^u(t) with u learned beside the model (EDM2, arXiv 2312.02696, eq. 21): all noise levels contribute alike."""

    name: Literal["uncertainty"] = "uncertainty"
    channels: Annotated[Int, Ge(2), Le(4096)] = 128
    """Fourier features of the noise level that u is a linear function of."""
    bound: Annotated[Float, Gt(0.0), Le(50.0)] = 10.0
    """|u| is limited to this."""

    def check(self, config: Any) -> None:
        if isinstance(config.timesteps, LossSecondMoment):
            why = "it makes the losses of all timesteps alike"
            raise Refusal("weighting.name", f"{why}: timesteps.name = loss_second_moment has nothing to go by")
        if config.precision.amp == "fp16" and config.parallel.strategy == "fsdp" and config.parallel.workers > 1:
            why = "parallel.strategy = fsdp divides the network and not what weighting.name = uncertainty learns"
            raise Refusal("precision.amp", f"{why}, and loss scaling takes no such mixture; use bf16")


_Weighted = Constant | MinSnr | P2 | Debiased | ChangeAware | Uncertainty
Weighting = Annotated[_Weighted, Field(discriminator="name")]


# ---------------------------------------------------------------------------------------------------------- all of it
VALIDATION_BINS = 10
"""Of log-SNR, in each of which every validation image is seen once."""


SAMPLERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ddim": ("DDIM", ("steps", "skip", "eta")), "ddpm": ("DDPM", ()), "dpmpp_2m": ("DPM-Solver++(2M)", ("steps",)),
}  # fmt: skip
"""What a sampler is called, and the knobs of `evaluation` that it follows."""


@section
class Evaluation(images.Evaluation):
    """How the averaged weights are judged."""

    sampler: Literal["ddim", "ddpm", "dpmpp_2m"] = "ddim"
    """`ddim` (arXiv 2010.02502) and `dpmpp_2m` (DPM-Solver++(2M), arXiv 2211.01095, deterministic, its timesteps evenly
    spaced in log-SNR) with `evaluation.steps`; `ddpm`: all `process.steps` ancestral steps."""
    steps: Annotated[Int, Ge(1), Le(10000)] = 50
    """Steps of `ddim` and `dpmpp_2m`, each a pass through the network; at most `process.steps`."""
    skip: Literal["linear", "quadratic"] = "linear"
    """Spacing of the DDIM sub-sequence."""
    eta: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """DDIM's noise: 0 deterministic, 1 as much as an ancestral step."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Number format in which the network draws images: `tf32` for NVIDIA GPUs, `bf16` autocast. Features, distances and
    the validation loss stay float32. Every evaluation also draws its first 128 images in float32, and records as
    `precision_shift` by what share the distance would be another if all were; beyond 2 % they all are."""
    validation_images: Annotated[Int, Ge(0), Le(100000), Ruler()] = 256
    """Images, of the split that is not learned where there is one, whose ε-error is measured per log-SNR bin on fixed
    timesteps and noise: what no sampler and no weighting changes. 0: none."""

    def check(self, config: Any) -> None:
        super().check(config)
        if self.steps > config.process.steps:
            raise Refusal("evaluation.steps", f"at most process.steps = {config.process.steps}")

    def passes(self, chain: int) -> int:
        """Of each image through the network; `chain`: `process.steps`."""
        return self.steps if "steps" in SAMPLERS[self.sampler][1] else chain


@section
class Knobs:
    """A DDPM training."""

    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    process: Process = dataclasses.field(default_factory=Process)
    timesteps: Timesteps = dataclasses.field(default_factory=Uniform)
    weighting: Weighting = dataclasses.field(default_factory=Constant)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    ema: Ema = dataclasses.field(default_factory=Ema)
    evaluation: Annotated[Evaluation, Fixed()] = dataclasses.field(default_factory=Evaluation)


OBJECTIVE = Metric("frechet", "min", "FD")
UNIT = "images"
QUANTITIES = {
    "frechet": Quantity("Fréchet distance", "", "depends on the number of images: compare within a search only"),
    "kid": Quantity("KID", "", "kernel distance between up to 2,000 images of each side"),
    "validation_loss": Quantity("validation loss", "", "ε-error on fixed images, timesteps and noise"),
    "precision_shift": Quantity(
        "shift by precision", "%", "of the distance, by evaluation.precision; above 2 %: drawn again in float32", 100.0
    ),
    "step_sampler_s": Quantity(
        "noise and sampler", "ms", "of a step: timesteps, noise, noisy images, the sampler's own work", 1000.0
    ),
    "step_ema_s": Quantity("EMA", "ms", "of a step: the averaged weights", 1000.0),
}

MEMORY_FREE = (
    *("model.dropout", "optimizer.lr", "optimizer.lr_scaling", "optimizer.beta2", "optimizer.weight_decay"),
    *("optimizer.warmup", "optimizer.decay", "optimizer.clip_norm", "ema.half_life", "ema.max_decay"),
    *("timesteps.", "weighting.", "process."),  # tables of T numbers
)
"""Knobs that change no more than a few MiB of device memory; a dot at the end: a whole section."""
GPU_ONLY = {"model.norm": "triton"}
MEMORY_SAVING = ("model.checkpoint_levels",)
"""Lists that save memory with everything more that is in them."""

# Data, model and extractor that belong together, by name. Every knob can be overridden.
PRESETS: dict[str, Values] = {
    "cifar10": {},
    "images": {"data.name": "images"},
    "digits": {
        "data.name": "digits", "data.image_size": 8, "data.channels": 1, "data.horizontal_flip": False,
        "data.split": "all",
        "model.channels": 16, "model.multipliers": [1, 2], "model.blocks": 1, "model.attention": [4],
        "model.dropout": 0.0, "model.norm_groups": 8,
        "optimizer.lr": 1.0e-3, "loader.workers": 0,
        "evaluation.extractor": "classifier", "evaluation.images": 1000, "evaluation.steps": 20,
    },
}  # fmt: skip


def ruler(config: Any) -> str:
    """How the Fréchet distance is measured."""
    from tunediff.evaluation import weights

    protocol, data, network = config.evaluation, config.data, ""
    try:
        dim = weights.length(protocol, data.image_size)
        if protocol.extractor == "cifar10-resnet":
            network = f", in the features of {weights.trained(protocol).said}"
    except ConfigError:  # the file lies on another machine
        dim = 0
    called, follows = SAMPLERS[protocol.sampler]
    noisy = f" with η = {protocol.eta:g}" if protocol.eta and "eta" in follows else ""
    steps = f", {protocol.steps} steps" if "steps" in follows else ""
    few = f" (few for {dim:,} features: biased high)" * (protocol.images <= dim)
    drawn = f"{protocol.images:,} generated images{few}, {called}{noisy}{steps}, averaged weights"
    against = f"against {data.name} at {data.image_size}×{data.image_size}{network}"
    return f"{drawn}, the same noise in all trials, {against}"


def evaluation_work(knobs: Knobs) -> dict[str, float]:
    """Images times steps of the sampler and the validation images in each of their bins go through the network."""
    protocol = knobs.evaluation
    passes = protocol.images * protocol.passes(knobs.process.steps) + protocol.validation_images * VALIDATION_BINS
    return {"network": float(passes), "features": float(protocol.images), "distance": 1.0}


def evaluation_once(knobs: Knobs) -> dict[str, float]:
    """The features of the real images, and what it takes to train the classifier for them."""
    from tunediff.data import sources

    trained = 400 * 64 * 3 if knobs.evaluation.extractor == "classifier" else 0  # steps, images, with backward
    return {"features": float(sources.count(knobs.data) + trained)}


def check_files(knobs: Knobs, evaluates: bool) -> None:
    """Refuse missing data, weights and Triton before anything starts; fetches Inception's. Raises `ConfigError`."""
    from tunediff.data import sources
    from tunediff.evaluation import weights

    sources.check(knobs.data)
    if knobs.model.norm == "triton" and importlib.util.find_spec("triton") is None:
        raise ConfigError("model.norm: 'triton' is not allowed here: triton is not installed; run: pip install triton")
    if evaluates:
        weights.check(knobs.data, knobs.evaluation)
