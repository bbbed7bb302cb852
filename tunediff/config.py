"""Every knob of one training, declared once.

A knob's name is its dotted path in `Config` (`loader.batch_size`): the same string is the YAML key, the command-line
override, the Optuna parameter, the CSV column and the plot axis. This module imports neither torch nor ray, so that a
mistake is refused in milliseconds, before anything starts.

Kinds that have hyperparameters of their own (timestep sampler, weighting) are discriminated unions over `name`: to add
one, write its dataclass here, put it in the union, and give it a class in `tunediff.diffusion`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import platform
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import pydantic
import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, Field, Strict, TypeAdapter
from pydantic.dataclasses import dataclass

# Strict: "128", True and 1.0 are not whole numbers. A typing slip must not become a silent setting.
Int = Annotated[int, Strict()]
Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Bool = Annotated[bool, Strict()]
Str = Annotated[str, Strict()]

_FORBID = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ConfigError(ValueError):
    """Bad input from the user: the message names the place, the key, the value and what is allowed."""


# --------------------------------------------------------------------------------------------------------------- data
@dataclass(frozen=True, config=_FORBID)
class Data:
    """Which real images are learned."""

    name: Literal["digits", "cifar10", "images"] = "cifar10"
    """`digits`: 1,797 images of 8×8 that ship inside scikit-learn. `cifar10`: torchvision's copy, downloaded on first
    use. `images`: any folder or `.zip` of PNG/JPEG files, flat or in class folders, given by `data.path`."""
    path: Str | None = None
    """Folder or `.zip` with the images (`images`), or where a copy of CIFAR-10 lies or shall be put (`cifar10`)."""
    split: Literal["train", "test", "all"] = "train"
    """Which part is learned. A folder without `train/` and `test/` inside has only `all`."""
    image_size: Annotated[Int, Ge(4), Le(1024)] = 32
    """Side of the square images in pixels; larger or smaller files are resized (bicubic, centre crop)."""
    channels: Literal[1, 3] = 3
    """Channels of an image: 1 grey, 3 RGB; files are converted."""
    horizontal_flip: Bool = True
    """Mirror each image left to right with probability ½. Wrong for digits and text."""
    max_images: Annotated[Int, Ge(2)] | None = None
    """Learn only the first so many images of a fixed shuffle; null: all."""


# -------------------------------------------------------------------------------------------------------------- model
@dataclass(frozen=True, config=_FORBID)
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
    channels_last: Bool = False
    """Keep activations in NHWC memory order; faster convolutions on tensor cores."""
    checkpoint_levels: tuple[Annotated[Int, Ge(0), Le(15)], ...] = ()
    """Activation checkpointing: resolution levels (0 is full resolution) whose residual blocks keep no activations but
    compute them again in the backward pass. Less memory, more time, the same result; level 0 holds most of the memory.
    All levels: every block."""


# ------------------------------------------------------------------------------------------------------------ process
@dataclass(frozen=True, config=_FORBID)
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
@dataclass(frozen=True, config=_FORBID)
class Uniform:
    """t uniform over the chain: the DDPM baseline."""

    name: Literal["uniform"] = "uniform"


@dataclass(frozen=True, config=_FORBID)
class Stratified:
    """t = ⌊T·frac(u + i/B)⌋: uniform for each image, evenly spread over the batch (VDM, arXiv 2107.00630)."""

    name: Literal["stratified"] = "stratified"


@dataclass(frozen=True, config=_FORBID)
class LossSecondMoment:
    """Importance sampling by √E[loss²] per timestep (Nichol & Dhariwal 2021, §3.3): adapts during training."""

    name: Literal["loss_second_moment"] = "loss_second_moment"
    history: Annotated[Int, Ge(1), Le(100)] = 10
    """Losses remembered per timestep; sampling stays uniform until every timestep has that many."""
    uniform_share: Annotated[Float, Ge(0.0), Le(1.0)] = 0.001
    """Share of the probability that stays uniform; bounds the importance weight by its inverse."""
    importance_correction: Annotated[Float, Ge(0.0), Le(1.0)] = 1.0
    """α in the loss factor (1/(T·p))^α: 1 keeps the objective of uniform t, 0 makes p(t) itself the weighting."""
    stratified: Bool = False
    """Spread the draws of a batch evenly over p(t): the same probabilities, less variance."""


@dataclass(frozen=True, config=_FORBID)
class Speed:
    """SpeeD (arXiv 2405.17403): the noisiest timesteps, where little is left to learn, are drawn k times less often."""

    name: Literal["speed"] = "speed"
    suppression: Annotated[Float, Ge(1.0), Le(100.0)] = 5.0
    """k: how many times likelier a timestep below τ is than one above."""
    tau: Annotated[Float, Gt(0.0), Lt(1.0)] = 0.7
    """τ, the border, as a fraction of the chain."""
    dual: Bool = False
    """Draw the second half of the batch as mirror images of the first: t' = m−t below m, t−m above, with m the first
    timestep whose noise √(1−ᾱ) grows by less than 1e-4. The public code does so; it favours small t once more."""
    importance_correction: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """α in the loss factor (1/(T·p))^α: 1 keeps the objective of uniform t, 0 makes p(t) itself the weighting."""
    stratified: Bool = False
    """Spread the draws of a batch evenly over p(t): the same probabilities, less variance."""


@dataclass(frozen=True, config=_FORBID)
class LogitNormal:
    """t/T is the logistic function of a normal variable (Stable Diffusion 3, arXiv 2403.03206): mostly mid noise."""

    name: Literal["logit_normal"] = "logit_normal"
    mean: Annotated[Float, Ge(-5.0), Le(5.0)] = 0.0
    """m of the normal variable; above 0 draws noisier timesteps."""
    std: Annotated[Float, Gt(0.0), Le(5.0)] = 1.0
    """s of the normal variable."""
    uniform_share: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """Share of the probability that stays uniform; bounds the importance weight by its inverse."""
    importance_correction: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """α in the loss factor (1/(T·p))^α: 1 keeps the objective of uniform t, 0 makes p(t) itself the weighting."""
    stratified: Bool = False
    """Spread the draws of a batch evenly over p(t): the same probabilities, less variance."""


@dataclass(frozen=True, config=_FORBID)
class LogSnrLaplace:
    """Log signal-to-noise ratio drawn from a Laplace distribution (Hang et al. 2024, arXiv 2407.03297)."""

    name: Literal["log_snr_laplace"] = "log_snr_laplace"
    log_snr: Annotated[Float, Ge(-10.0), Le(10.0)] = 0.0
    """μ, the log-SNR that is drawn most densely; below 0 draws noisier timesteps."""
    scale: Annotated[Float, Gt(0.0), Le(10.0)] = 0.5
    """b, the width of the Laplace distribution in log-SNR."""
    uniform_share: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """Share of the probability that stays uniform; bounds the importance weight by its inverse."""
    importance_correction: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """α in the loss factor (1/(T·p))^α: 1 keeps the objective of uniform t, 0 makes p(t) itself the weighting."""
    stratified: Bool = False
    """Spread the draws of a batch evenly over p(t): the same probabilities, less variance."""


@dataclass(frozen=True, config=_FORBID)
class LogSnrCosine:
    """Log-SNR drawn as the cosine schedule spreads it, sech((λ−μ)/2)/2π, shifted by μ (arXiv 2301.11093)."""

    name: Literal["log_snr_cosine"] = "log_snr_cosine"
    log_snr: Annotated[Float, Ge(-10.0), Le(10.0)] = 0.0
    """μ, the log-SNR that is drawn most densely; below 0 draws noisier timesteps."""
    uniform_share: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """Share of the probability that stays uniform; bounds the importance weight by its inverse."""
    importance_correction: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """α in the loss factor (1/(T·p))^α: 1 keeps the objective of uniform t, 0 makes p(t) itself the weighting."""
    stratified: Bool = False
    """Spread the draws of a batch evenly over p(t): the same probabilities, less variance."""


@dataclass(frozen=True, config=_FORBID)
class BetaPolicy:
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
    uniform_share: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """Share of the probability that stays uniform; bounds the importance weight by its inverse."""
    importance_correction: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """α in the loss factor (1/(T·p))^α: 1 keeps the objective of uniform t, 0 makes p(t) itself the weighting."""


@dataclass(frozen=True, config=_FORBID)
class JointError:
    """Our own: draws the noise levels at which image and noise are both uncertain to the model, as the batches that are
    trained anyway show it; adapts during training at next to no cost."""

    name: Literal["joint_error"] = "joint_error"
    concentration: Annotated[Float, Ge(0.0), Le(32.0)] = 8.0
    """Exponent of the joint error: 0 is uniform in log-SNR, larger is more concentrated."""
    bins: Annotated[Int, Ge(2), Le(1000)] = 40
    """Bins of equal width in log-SNR, each with its own running mean of the error."""
    half_life: Annotated[Float, Gt(0.0), Le(1.0)] = 0.1
    """Half-life of the running means, as a fraction of the images seen so far."""
    uniform_share: Annotated[Float, Ge(0.0), Le(1.0)] = 0.1
    """Share of the probability that stays uniform; bounds the importance weight by its inverse."""
    importance_correction: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """α in the loss factor (1/(T·p))^α: 1 keeps the objective of uniform t, 0 makes p(t) itself the weighting."""
    stratified: Bool = True
    """Spread the draws of a batch evenly over p(t): the same probabilities, less variance."""


@dataclass(frozen=True, config=_FORBID)
class GradientNorm:
    """Our own: importance sampling by the gradient norm at the network's output, w(t)·√error, learned per log-SNR bin
    from the batches that are trained anyway; adapts during training at next to no cost."""

    name: Literal["gradient_norm"] = "gradient_norm"
    temperature: Annotated[Float, Ge(0.0), Le(4.0)] = 1.0
    """Exponent of the gradient norm: 0 is uniform, 1 has the least variance of an unbiased estimate."""
    bins: Annotated[Int, Ge(2), Le(1000)] = 20
    """Bins of equal width in log-SNR, each with its own running mean of the error."""
    half_life: Annotated[Float, Gt(0.0), Le(1.0)] = 0.1
    """Half-life of the running means, as a fraction of the images seen so far."""
    uniform_share: Annotated[Float, Ge(0.0), Le(1.0)] = 0.2
    """Share of the probability that stays uniform; bounds the importance weight by its inverse."""
    importance_correction: Annotated[Float, Ge(0.0), Le(1.0)] = 1.0
    """α in the loss factor (1/(T·p))^α: 1 keeps the objective of uniform t, 0 makes p(t) itself the weighting."""
    stratified: Bool = True
    """Spread the draws of a batch evenly over p(t): the same probabilities, less variance."""


Timesteps = Annotated[
    Uniform
    | Stratified
    | LossSecondMoment
    | Speed
    | LogitNormal
    | LogSnrLaplace
    | LogSnrCosine
    | BetaPolicy
    | GradientNorm
    | JointError,
    Field(discriminator="name"),
]


# --------------------------------------------------------------------------------------------------------- weightings
@dataclass(frozen=True, config=_FORBID)
class Constant:
    """w(t) = 1 on the ε-loss: L_simple of DDPM. For x0 and v the same weight in their own units."""

    name: Literal["constant"] = "constant"


@dataclass(frozen=True, config=_FORBID)
class MinSnr:
    """min(SNR, γ)/SNR on the ε-loss (Hang et al. 2023, arXiv 2303.09556)."""

    name: Literal["min_snr"] = "min_snr"
    gamma: Annotated[Float, Gt(0.0), Le(1000.0)] = 5.0
    """γ, the cap on the signal-to-noise ratio."""


@dataclass(frozen=True, config=_FORBID)
class P2:
    """1/(k + SNR)^γ on the ε-loss (Choi et al. 2022, arXiv 2204.00227): less weight where the noise is low."""

    name: Literal["p2"] = "p2"
    exponent: Annotated[Float, Ge(0.0), Le(5.0)] = 1.0
    """γ: 0 is constant weighting; the paper uses ½ and 1."""
    offset: Annotated[Float, Gt(0.0), Le(100.0)] = 1.0
    """k: bounds the weight of the noisiest timesteps."""


@dataclass(frozen=True, config=_FORBID)
class Debiased:
    """1/√SNR on the ε-loss, capped (Yu et al. 2023, arXiv 2310.08442): more weight where the noise is high."""

    name: Literal["debiased"] = "debiased"
    cap: Annotated[Float, Gt(0.0), Le(1000.0)] = 20.0
    """Largest weight; without it the last timesteps of the cosine schedule would weigh 20,000 times the middle."""


@dataclass(frozen=True, config=_FORBID)
class ChangeAware:
    """SpeeD's weighting on the ε-loss (arXiv 2405.17403): more where the noise level changes fast, 1 beyond τ."""

    name: Literal["change_aware"] = "change_aware"
    contrast: Annotated[Float, Ge(0.5), Le(1.0)] = 0.6
    """λ: weights below τ lie in [1−λ, λ]; 0.5 is flat there."""
    tau: Annotated[Float, Gt(0.0), Le(1.0)] = 0.7
    """τ, the border, as a fraction of the chain."""


@dataclass(frozen=True, config=_FORBID)
class Uncertainty:
    """1/e^u(t) with u learned beside the model (EDM2, arXiv 2312.02696, eq. 21): all noise levels contribute alike."""

    name: Literal["uncertainty"] = "uncertainty"
    channels: Annotated[Int, Ge(2), Le(4096)] = 128
    """Fourier features of the noise level that u is a linear function of."""
    bound: Annotated[Float, Gt(0.0), Le(50.0)] = 10.0
    """|u| is limited to this."""


Weighting = Annotated[
    Constant | MinSnr | P2 | Debiased | ChangeAware | Uncertainty,
    Field(discriminator="name"),
]


# ----------------------------------------------------------------------------------------------------------- training
@dataclass(frozen=True, config=_FORBID)
class Optimizer:
    """AdamW and its schedule. The schedule follows the fraction of the budget that is spent, not a step count."""

    lr: Annotated[Float, Gt(0.0), Le(1.0)] = 2.0e-4
    """Peak learning rate, before `optimizer.lr_scaling`."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by (batch/128) or its square root, so that a search over the batch size is fair."""
    beta2: Annotated[Float, Gt(0.0), Lt(1.0)] = 0.999
    """Second-moment decay of Adam; the first-moment decay is 0.9."""
    weight_decay: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """Decoupled weight decay (AdamW)."""
    warmup: Annotated[Float, Ge(0.0), Le(1.0)] = 0.02
    """Fraction of the budget over which the learning rate rises linearly from zero."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant (DDPM), or falling to zero at the end of the budget."""
    clip_norm: Annotated[Float, Gt(0.0), Le(1000.0)] = 1.0
    """The gradient is scaled down to this global norm."""
    implementation: Literal["foreach", "fused", "for_loop"] = "fused"
    """How AdamW's step runs: `foreach` several tensors per kernel, `fused` the whole update in one kernel, `for_loop`
    one tensor after the other."""


@dataclass(frozen=True, config=_FORBID)
class Ema:
    """The averaged weights that are evaluated, sampled from and exported."""

    half_life: Annotated[Float, Gt(0.0), Le(1.0)] = 0.05
    """Half-life of the average as a fraction of the training seconds spent so far (EDM's ramp-up rule, arXiv
    2206.00364: 5 % of the images seen), so that short budgets do not average in the initial weights."""
    max_decay: Annotated[Float, Ge(0.0), Lt(1.0)] = 0.9999
    """Upper bound of the decay per step (0.9999 in DDPM)."""


@dataclass(frozen=True, config=_FORBID)
class Loader:
    """How images reach the device."""

    batch_size: Annotated[Int, Ge(1), Le(65536)] = 128
    """Images per optimizer step over all workers and accumulation steps."""
    accumulation: Annotated[Int, Ge(1), Le(256)] = 1
    """Forward/backward passes per optimizer step."""
    resident: Bool = False
    """Keep the whole uint8 set on the device and draw batches there; `workers` and what follows have no effect."""
    workers: Annotated[Int, Ge(0), Le(128)] = 2
    """Loader processes per training worker; 0 loads in the training process."""
    prefetch_factor: Annotated[Int, Ge(1), Le(64)] = 2
    """Batches each loader process prepares ahead."""
    persistent_workers: Bool = True
    """Keep the loader processes from one pass over the images to the next; false starts new ones every time."""
    pin_memory: Bool = True
    """Page-locked host memory, from which a GPU can copy by itself; no effect on a CPU."""
    non_blocking: Bool = True
    """Go on while a batch is copied from page-locked memory to the GPU; no effect on a CPU."""
    transfer: Literal["uint8", "float32"] = "uint8"
    """What is copied to the device: bytes that are converted there, or numbers four times as large."""


@dataclass(frozen=True, config=_FORBID)
class Precision:
    """Number formats."""

    amp: Literal["none", "bf16", "fp16"] = "none"
    """Autocast type of forward and backward; fp16 uses loss scaling."""
    matmul: Literal["highest", "high", "medium"] = "highest"
    """float32 matrix products: `highest` IEEE, `high` TF32, `medium` bfloat16 (torch.set_float32_matmul_precision);
    on a GPU `high` and `medium` also allow TF32 convolutions."""
    cudnn_benchmark: Bool = False
    """Let cuDNN time its convolution algorithms in the first step and keep the fastest; no effect on a CPU."""


@dataclass(frozen=True, config=_FORBID)
class Memory:
    """Host memory of the training processes."""

    keep_freed: Bool = True
    """CPU training: memory that a step frees stays with the process for the next one. Otherwise the system takes large
    blocks back at once and hands them out again page by page. Learns the same, faster, with a tenth to a third more
    memory; glibc only, no effect on a GPU, whose allocator always does so."""


@dataclass(frozen=True, config=_FORBID)
class Compile:
    """torch.compile."""

    mode: Literal["none", "default", "reduce-overhead", "max-autotune"] = "none"
    """`none` runs eagerly; the others are torch.compile's modes."""
    dynamic: Bool = False
    """Compile once for every batch size instead of once for each; only with a mode other than `none`."""
    scope: Literal["model", "blocks"] = "model"
    """What is compiled: the whole network, or each residual block for itself, which compiles faster since equal blocks
    share the result; only with a mode other than `none`."""


@dataclass(frozen=True, config=_FORBID)
class Parallel:
    """Data-parallel training (DistributedDataParallel; gloo on CPU, NCCL on GPU)."""

    workers: Annotated[Int, Ge(1), Le(1024)] = 1
    """World size: training processes, one per GPU, or sharing the CPU cores."""
    bucket_mib: Annotated[Float, Gt(0.0), Le(10000.0)] = 25.0
    """Gradients are averaged over workers in buckets of this size (MiB), while the backward pass goes on."""
    static_graph: Bool = False
    """Tell DistributedDataParallel that every step computes the same graph, which spares it the search for unused
    parameters and lets it order the buckets by the first step."""


# --------------------------------------------------------------------------------------------------------- evaluation
@dataclass(frozen=True, config=_FORBID)
class Evaluation:
    """How a model is judged. Never searched: trials of one study must be measured with one ruler."""

    extractor: Literal["inception", "classifier"] = "inception"
    """`inception`: FID's network with its reference weights (downloaded by torch-fidelity, or from
    `evaluation.weights_path`). `classifier`: a small network trained on the labelled data itself, offline; the number
    is then an FD, never an FID."""
    weights_path: Str | None = None
    """File with the Inception weights (weights-inception-2015-12-05-6726825d.pth); null: torch-fidelity's download."""
    images: Annotated[Int, Ge(8), Le(1000000)] = 2048
    """N, images generated per evaluation. A Fréchet distance is biased by about c/N: compare only equal N."""
    points: Annotated[Int, Ge(1), Le(100)] = 4
    """Evaluations per training, at equal fractions of the budget; the last is the result."""
    sampler: Literal["ddim", "ddpm"] = "ddim"
    """`ddim` (arXiv 2010.02502) with `evaluation.steps`; `ddpm`: all `process.steps` ancestral steps."""
    steps: Annotated[Int, Ge(1), Le(10000)] = 50
    """Steps of the DDIM sub-sequence; at most `process.steps`."""
    skip: Literal["linear", "quadratic"] = "linear"
    """Spacing of the DDIM sub-sequence."""
    eta: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """DDIM's noise: 0 deterministic, 1 as much as an ancestral step."""
    batch_size: Annotated[Int, Ge(1), Le(65536)] = 256
    """Images sampled and extracted at once on each worker."""
    seed: Annotated[Int, Ge(0)] = 0
    """Seed of the initial noise, the same for every trial."""
    validation_images: Annotated[Int, Ge(0), Le(100000)] = 256
    """Images, of the split that is not learned where there is one, whose ε-error is measured per log-SNR bin on fixed
    timesteps and noise: what no sampler and no weighting changes. 0: none."""


@dataclass(frozen=True, config=_FORBID)
class Config:
    """One training: everything but the budget, which belongs to the search or the command."""

    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    process: Process = dataclasses.field(default_factory=Process)
    timesteps: Timesteps = dataclasses.field(default_factory=Uniform)
    weighting: Weighting = dataclasses.field(default_factory=Constant)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    ema: Ema = dataclasses.field(default_factory=Ema)
    loader: Loader = dataclasses.field(default_factory=Loader)
    precision: Precision = dataclasses.field(default_factory=Precision)
    memory: Memory = dataclasses.field(default_factory=Memory)
    compile: Compile = dataclasses.field(default_factory=Compile)
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)
    seed: Annotated[Int, Ge(0), Lt(2**31)] = 0
    """Seed of initial weights, data order, timesteps and noise."""


# Workloads: data, model and extractor that belong together, by name. Every field can be overridden.
WORKLOADS: dict[str, dict[str, Any]] = {
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

_ADAPTER: TypeAdapter[Config] = TypeAdapter(Config)


# ------------------------------------------------------------------------------------------------------ knobs by name
@dataclasses.dataclass(frozen=True)
class Knob:
    """One leaf of `Config`, as the search space, the help text and the documentation see it."""

    name: str
    kind: str  # int, float, bool, str, choice, tuple
    default: Any
    description: str
    choices: tuple[Any, ...] | None = None
    low: float | None = None
    high: float | None = None
    low_open: bool = False  # the bound itself is not allowed
    high_open: bool = False
    optional: bool = False
    member: tuple[str, str] | None = None  # ("timesteps.name", "loss_second_moment") when it belongs to a union member

    @property
    def searchable(self) -> bool:
        """Whether a search may vary it: what defines the task or the ruler is the same for every trial."""
        fixed = ("data.name", "data.path", "data.split", "data.image_size", "data.channels", "data.max_images", "seed")
        return not (self.name in fixed or self.name.startswith("evaluation."))

    @property
    def allowed(self) -> str:
        """What values it takes, in words."""
        if self.choices is not None:
            return "one of " + ", ".join(_show(choice) for choice in self.choices)
        words = {
            "int": "a whole number",
            "float": "a number",
            "bool": "true or false",
            "str": "a string",
            "tuple": "a list of whole numbers",
        }[self.kind]
        if self.low is not None:
            words += f" {'above' if self.low_open else 'of at least'} {self.low:.10g}"
        if self.high is not None:
            words += " and" if self.low is not None else ""
            words += f" {'below' if self.high_open else 'at most'} {self.high:.10g}"
        return words + (", or null" if self.optional else "")


def _show(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)


def _unwrap(annotation: Any) -> tuple[Any, list[Any]]:
    """(bare type, metadata) of a possibly nested Annotated."""
    metadata: list[Any] = []
    while typing.get_origin(annotation) is Annotated:
        annotation, *more = typing.get_args(annotation)
        metadata += more
    return annotation, metadata


def _knobs_of(cls: type, prefix: str, member: tuple[str, str] | None) -> typing.Iterator[Knob]:
    hints = typing.get_type_hints(cls, include_extras=True)
    documented = cls.__pydantic_fields__  # type: ignore[attr-defined]
    for field in dataclasses.fields(cls):
        name, (kind, metadata) = prefix + field.name, _unwrap(hints[field.name])
        optional = False
        if typing.get_origin(kind) in (Union, types.UnionType):
            arms = [arm for arm in typing.get_args(kind) if arm is not type(None)]
            if all(dataclasses.is_dataclass(arm) for arm in arms):  # a discriminated union: name, then members
                names = tuple(typing.cast(Any, arm)().name for arm in arms)
                documents = [f"`{n}`: {(arm.__doc__ or '').strip()}" for n, arm in zip(names, arms, strict=True)]
                yield Knob(f"{name}.name", "choice", names[0], " · ".join(documents), choices=names)
                for arm, arm_name in zip(arms, names, strict=True):
                    for knob in _knobs_of(arm, name + ".", (f"{name}.name", arm_name)):
                        if knob.name != f"{name}.name":
                            yield knob
                continue
            optional = True
            kind, more = _unwrap(arms[0])
            metadata += more
        if dataclasses.is_dataclass(kind):
            yield from _knobs_of(typing.cast(type, kind), name + ".", member)
            continue
        default = field.default
        description = " ".join((documented[field.name].description or "").split())
        common: dict[str, Any] = {"optional": optional, "member": member}
        if typing.get_origin(kind) is Literal:
            yield Knob(name, "choice", default, description, choices=typing.get_args(kind), **common)
        elif typing.get_origin(kind) is tuple:
            yield Knob(name, "tuple", default, description, **common)
        else:
            for bound in metadata:
                if isinstance(bound, Ge | Gt):
                    common |= {
                        "low": getattr(bound, "ge", getattr(bound, "gt", None)),
                        "low_open": isinstance(bound, Gt),
                    }
                elif isinstance(bound, Le | Lt):
                    common |= {
                        "high": getattr(bound, "le", getattr(bound, "lt", None)),
                        "high_open": isinstance(bound, Lt),
                    }
            yield Knob(name, kind.__name__, default, description, **common)


@functools.cache
def knobs() -> dict[str, Knob]:
    """Every knob by its dotted name, in declaration order. A name shared by several union members appears once."""
    found: dict[str, Knob] = {}
    for knob in _knobs_of(Config, "", None):
        found.setdefault(knob.name, knob)
    return found


@functools.cache
def members() -> dict[str, dict[str, frozenset[str]]]:
    """For each union (`timesteps.name`): which knobs each of its members has."""
    found: dict[str, dict[str, set[str]]] = {}
    for knob in _knobs_of(Config, "", None):
        if knob.name.endswith(".name") and knob.name != "data.name":
            found[knob.name] = {choice: set() for choice in knob.choices or ()}
        if knob.member is not None:
            found[knob.member[0]][knob.member[1]].add(knob.name)
    return {union: {m: frozenset(names) for m, names in of.items()} for union, of in found.items()}


# ------------------------------------------------------------------------------------------------- build, load, dump
def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain dictionary of a configuration (JSON types only)."""
    return typing.cast(dict[str, Any], _ADAPTER.dump_python(config, mode="json"))


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"loader.workers": 2} → {"loader": {"workers": 2}}."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        section, _, leaf = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[leaf] = value
    return nested


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"loader": {"workers": 2}} → {"loader.workers": 2}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def flat(config: Config) -> dict[str, Any]:
    """Every knob of this configuration by its dotted name."""
    return flatten(to_dict(config))


def fingerprint(config: Config) -> str:
    """12 hex digits that are equal exactly for equal configurations."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:12]


def differences(config: Config, base: Config) -> dict[str, Any]:
    """Knobs of `config` whose value differs from `base`, by dotted name."""
    ours, theirs = flat(config), flat(base)
    return {name: value for name, value in ours.items() if name not in theirs or theirs[name] != value}


def workload(name: str, where: str = "workload") -> Config:
    """The baseline configuration of a named workload (`digits`, `cifar10`, `images`), not yet checked as a whole."""
    if name not in WORKLOADS:
        raise ConfigError(f"{where}: workload: unknown name {name!r}; allowed: {', '.join(WORKLOADS)}")
    # `images` needs a path, which comes on top: rules that join knobs are applied when all of them are there.
    return override(Config(), WORKLOADS[name], where=f"workload {name}", check=False)


def override(config: Config, values: Mapping[str, Any], where: str = "override", check: bool = True) -> Config:
    """A copy with knobs replaced by dotted name.

    Choosing another union member (`timesteps.name`) drops the knobs of the old one. With `check`, rules that join
    several knobs are applied to the result. Raises `ConfigError` naming `where`, the knob, the value and what is
    allowed.
    """
    known, nested = knobs(), to_dict(config)
    for name, value in values.items():
        if name not in known:
            raise ConfigError(unknown_knob(name, where))
        section = name.rpartition(".")[0]
        if name in members() and nested[section]["name"] != value:
            nested[section] = {"name": value}
    for name, value in values.items():
        section, _, leaf = name.rpartition(".")
        (nested[section] if section else nested)[leaf] = value
    return from_dict(nested, where, check)


def with_absolute_paths(config: Config) -> Config:
    """The same files, whatever folder a worker runs in; relative paths are relative to the current one."""
    data, evaluation = config.data, config.evaluation
    if data.path is not None:
        data = dataclasses.replace(data, path=str(Path(data.path).expanduser().absolute()))
    if evaluation.weights_path is not None:
        weights = str(Path(evaluation.weights_path).expanduser().absolute())
        evaluation = dataclasses.replace(evaluation, weights_path=weights)
    return dataclasses.replace(config, data=data, evaluation=evaluation)


def from_dict(nested: Mapping[str, Any], where: str, check: bool = True) -> Config:
    """A configuration from a nested dictionary; what is missing takes its default. Raises `ConfigError`."""
    try:
        config = _ADAPTER.validate_python(dict(nested))
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explain(detail, where) for detail in error.errors())) from None
    if check:
        check_rules(config, where)
    return config


def unknown_knob(name: str, where: str) -> str:
    """The message for a name that is no knob, with the nearest ones."""
    import difflib

    near = difflib.get_close_matches(name, knobs(), n=3, cutoff=0.5) or [n for n in knobs() if n.endswith("." + name)]
    hint = f"; did you mean {' or '.join(near)}?" if near else f"; allowed: {', '.join(knobs())}"
    return f"{where}: {name}: no such knob{hint}"


def yaml_hint(value: Any, knob: Knob) -> str:
    """What YAML 1.1 may have done to this value, or ''."""
    if isinstance(value, str) and knob.kind in ("int", "float"):
        try:
            number = float(value)
        except ValueError:
            return ""
        mantissa, _, exponent = f"{number:.6e}".partition("e")
        return f" (YAML 1.1 reads {value!r} as text; write {float(mantissa)}e{int(exponent):+d})"
    if isinstance(value, bool) and knob.kind in ("choice", "str"):
        return " (YAML 1.1 reads off, no, on and yes as true or false: write none, or quote the word)"
    return ""


def _explain(detail: Any, where: str) -> str:
    """One line for one pydantic error: place, key, value, what is allowed."""
    path = [str(part) for part in detail["loc"]]
    known, unions = knobs(), members()
    # A union adds its tag to the location: timesteps.loss_second_moment.history → timesteps.history.
    if len(path) > 2 and f"{path[0]}.name" in unions and path[1] in unions[f"{path[0]}.name"]:
        path.pop(1)
    name, value = ".".join(path), detail.get("input")
    if detail["type"].startswith("union_tag"):
        name += ".name"
        value = value.get("name") if isinstance(value, Mapping) else value
    while name not in known and "." in name:  # an element of a tuple
        name = name.rpartition(".")[0]
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        key = ".".join(path)
        if key in known and (member := known[key].member):
            return f"{where}: {key}: belongs to {member[0]} = {member[1]}, which is not chosen here"
        return unknown_knob(key, where)
    if name not in known:
        return f"{where}: {name}: {value!r}: {detail['msg']}"
    return f"{where}: {name}: {value!r} is not allowed; allowed: {known[name].allowed}{yaml_hint(value, known[name])}"


def check_rules(config: Config, where: str) -> None:
    """Rules that join several knobs; raises `ConfigError` naming the knobs and their values."""
    c = config

    def refuse(name: str, why: str) -> None:
        raise ConfigError(f"{where}: {name}: {flat(c)[name]!r} is not allowed: {why}")

    if c.data.name == "images" and c.data.path is None:
        refuse("data.path", "data.name = images needs a folder or .zip of images")
    if c.data.name == "digits" and (c.data.channels, c.data.horizontal_flip) != (1, False):
        name = "data.channels" if c.data.channels != 1 else "data.horizontal_flip"
        refuse(name, "digits are grey and a mirrored digit is not a digit (data.channels = 1, horizontal_flip = false)")
    if c.data.name == "digits" and c.data.split != "all":
        refuse("data.split", "the digits have one split, all")
    halvings = len(c.model.multipliers) - 1
    if halvings < 0:
        refuse("model.multipliers", "at least one resolution is needed")
    if c.data.image_size % 2**halvings:
        refuse("data.image_size", f"model.multipliers halves it {halvings} times; use a multiple of {2**halvings}")
    if c.model.channels % c.model.norm_groups:
        refuse("model.channels", f"must be a multiple of model.norm_groups = {c.model.norm_groups}")
    sides = [c.data.image_size >> level for level in range(halvings + 1)]
    if unknown := [side for side in c.model.attention if side not in sides]:
        refuse("model.attention", f"no feature map has side {unknown[0]}; sides here: {', '.join(map(str, sides))}")
    if c.loader.accumulation > 1 and c.compile.mode in ("reduce-overhead", "max-autotune"):
        refuse("loader.accumulation", f"compile.mode = {c.compile.mode} uses CUDA graphs, which cannot accumulate")
    passes = c.parallel.workers * c.loader.accumulation
    if c.loader.batch_size % passes:
        refuse("loader.batch_size", f"must be a multiple of parallel.workers × loader.accumulation = {passes}")
    if c.compile.dynamic and c.compile.mode == "none":
        refuse("compile.dynamic", "it needs a compile.mode other than none")
    if c.compile.scope != "model" and c.compile.mode == "none":
        refuse("compile.scope", "it needs a compile.mode other than none")
    if beyond := [level for level in c.model.checkpoint_levels if level > halvings]:
        refuse("model.checkpoint_levels", f"there is no level {beyond[0]}; levels here: 0 … {halvings}")
    if c.parallel.static_graph and c.loader.accumulation > 1:
        refuse("parallel.static_graph", "passes of an accumulation that average nothing are another graph")
    sampler, weighting = c.timesteps, c.weighting
    bounded = LossSecondMoment | LogitNormal | LogSnrLaplace | LogSnrCosine | BetaPolicy | GradientNorm | JointError
    if isinstance(sampler, bounded) and sampler.importance_correction > 0 and sampler.uniform_share < 0.001:
        refuse(
            "timesteps.importance_correction",
            f"some probabilities of {sampler.name} vanish, and 1/(T·p) with them explodes; "
            "set timesteps.uniform_share to at least 0.001, which bounds it",
        )
    if isinstance(sampler, Speed) and sampler.dual:
        if sampler.stratified:
            refuse("timesteps.dual", "mirrored draws are not stratified; choose one of the two")
        if c.loader.batch_size // c.loader.accumulation % 2:
            refuse("timesteps.dual", "it mirrors half of the images, so loader.batch_size / accumulation must be even")
    if isinstance(sampler, BetaPolicy) and sampler.selected > sampler.scan:
        refuse("timesteps.selected", f"S is chosen among timesteps.scan = {sampler.scan}")
    if isinstance(sampler, BetaPolicy) and sampler.uniform_share == 1.0:
        refuse("timesteps.uniform_share", "the policy would never be asked; use a value below 1")
    if isinstance(sampler, BetaPolicy) and c.compile.mode in ("reduce-overhead", "max-autotune"):
        refuse(
            "compile.mode",
            "timesteps.name = beta_policy looks ahead between backward pass and optimizer step, where CUDA graphs hold "
            "the gradients in memory that a further forward pass overwrites; use default",
        )
    if isinstance(sampler, BetaPolicy) and sampler.scan > c.process.steps:
        refuse("timesteps.scan", f"at most process.steps = {c.process.steps}")
    if isinstance(weighting, Uncertainty) and isinstance(sampler, LossSecondMoment):
        refuse(
            "weighting.name",
            "it makes every timestep's loss alike, so that timesteps.name = loss_second_moment has nothing to go by",
        )
    if c.evaluation.steps > c.process.steps:
        refuse("evaluation.steps", f"at most process.steps = {c.process.steps}")
    if c.evaluation.extractor == "inception" and c.data.image_size < 16:
        refuse("evaluation.extractor", "Inception says nothing about images under 16 pixels; use classifier")


def not_effective(config: Config, device: str) -> dict[str, str]:
    """Knobs that are set to something and change nothing on `device` ("cpu" or "cuda"), with the reason."""
    c, found = config, dict[str, str]()
    if c.loader.resident:
        names = ("workers", "prefetch_factor", "persistent_workers", "pin_memory", "non_blocking", "transfer")
        found |= {f"loader.{name}": "loader.resident keeps all images on the device" for name in names}
    else:
        if c.loader.workers == 0:
            without = "there are no loader processes (loader.workers = 0)"
            found |= {f"loader.{name}": without for name in ("prefetch_factor", "persistent_workers")}
        if c.loader.non_blocking and not c.loader.pin_memory:
            found["loader.non_blocking"] = "only copies from page-locked memory go on by themselves (loader.pin_memory)"
        if device != "cuda":
            copied = {"loader.pin_memory": c.loader.pin_memory, "loader.non_blocking": c.loader.non_blocking}
            found |= {name: "nothing is copied to a GPU" for name, on in copied.items() if on}
    if device != "cuda":
        if c.precision.matmul == "high":
            found["precision.matmul"] = "TF32 is a format of NVIDIA GPUs"
        if c.precision.cudnn_benchmark:
            found["precision.cudnn_benchmark"] = "cuDNN is for NVIDIA GPUs"
        if c.compile.mode == "reduce-overhead":
            found["compile.mode"] = "CUDA graphs need a GPU; it compiles as default does"
    if c.memory.keep_freed:
        if device == "cuda":
            found["memory.keep_freed"] = "a GPU's allocator keeps what is freed anyway"
        elif platform.libc_ver()[0] != "glibc":
            found["memory.keep_freed"] = "only the allocator of glibc takes this order"
    if c.parallel.workers == 1:
        if c.parallel.bucket_mib != Parallel().bucket_mib:
            found["parallel.bucket_mib"] = "one worker has nobody to average with"
        if c.parallel.static_graph:
            found["parallel.static_graph"] = "one worker has nobody to average with"
    return found


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice: YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; `ConfigError` for anything that is not one."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file in UTF-8") from None
    try:
        content = yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines, found {type(content).__name__}")
    return content


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """A configuration file, sections or dotted names; what is missing takes `Config`'s default. `overrides` on top."""
    config = override(Config(), flatten(read_yaml(path)), where=str(path), check=not overrides)
    return with_absolute_paths(override(config, overrides or {}, where="command line"))


def named(path: Path, overrides: Mapping[str, Any]) -> Config:
    """The configuration a user means: a file, such as an exported best.yaml, or a workload's baseline by its name."""
    if str(path) in WORKLOADS and not path.is_file():
        return with_absolute_paths(override(workload(str(path)), overrides, where="command line"))
    return load(path, overrides)


def dump(config: Config, comments: list[str] | None = None) -> str:
    """YAML text of the full configuration, `comments` as `#` lines above it."""
    head = "".join(f"# {line}\n" for line in comments or [])
    return head + yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True, default_flow_style=None)


def parse_overrides(words: list[str]) -> dict[str, Any]:
    """`knob=value` words from a command line; values are YAML, and numbers may be written 1e-3."""
    values: dict[str, Any] = {}
    known = knobs()
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"command line: {word!r} is not understood; write knob=value")
        if name not in known:
            raise ConfigError(unknown_knob(name, "command line"))
        try:
            value = yaml.load(text, _UniqueKeyLoader)
        except yaml.YAMLError:
            raise ConfigError(f"command line: {name}: {text!r} is not YAML; allowed: {known[name].allowed}") from None
        if isinstance(value, str) and known[name].kind == "float":
            with contextlib.suppress(ValueError):  # what is no number is refused with the allowed range
                value = float(value)
        values[name] = value
    return values
