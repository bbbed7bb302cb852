"""What can be set of a DDPM training, besides what every training has. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from tunediff.config.knobs import (
    ConfigError,
    EvaluationProtocol,
    Fixed,
    Float,
    Int,
    Refusal,
    Values,
    section,
)
from tunediff.config.workload import Metric
from tunediff.core.point import Quantity
from tunediff.data.knobs import DIGITS, Data
from tunediff.evaluation import knobs as images
from tunediff.training.knobs import MEMORY_FREE_OPTIMIZER, AdamW, Ema, Optimizer
from tunediff.workloads.diffusion.methods import Constant, Timesteps, Uniform, Weighting


@section
class Model:
    """The DDPM U-Net (Ho et al. 2020, arXiv 2006.11239, appendix B); the defaults have 35,746,307
    parameters."""

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
    checkpoint_levels: tuple[Annotated[Int, Ge(0), Le(15)], ...] = ()
    """Activation checkpointing: resolution levels (0 is full resolution) whose residual blocks keep
    no activations but compute them again in the backward pass. Less memory, more time, the same
    result; level 0 holds most of the memory. All levels: every block."""

    def check(self, config: Any) -> None:
        halvings, side = len(self.multipliers) - 1, config.data.image_size
        sides = [side >> level for level in range(halvings + 1)]
        if halvings < 0:
            raise Refusal("model.multipliers", "at least one resolution is needed")
        if side % 2**halvings:
            why = f"model.multipliers halves it {halvings} times; use a multiple of {2**halvings}"
            raise Refusal("data.image_size", why)
        if self.channels % self.norm_groups:
            why = f"must be a multiple of model.norm_groups = {self.norm_groups}"
            raise Refusal("model.channels", why)
        if unknown := [side for side in self.attention if side not in sides]:
            why = f"no feature map has side {unknown[0]}; sides here: {', '.join(map(str, sides))}"
            raise Refusal("model.attention", why)
        if beyond := [level for level in self.checkpoint_levels if level > halvings]:
            why = f"there is no level {beyond[0]}; levels here: 0 … {halvings}"
            raise Refusal("model.checkpoint_levels", why)
        config.compile.refuse_capture(self.checkpoint_levels, "model.checkpoint_levels is set")


EDM_SIGMAS = (0.002, 80.0)
"""σ of the least and the most noise in EDM's grid (arXiv 2206.00364, table 1), and of
`process.schedule = edm`."""


@section
class Process:
    """The forward (noising) process and what the model predicts."""

    schedule: Literal["linear", "cosine", "edm"] = "linear"
    """Noise levels of the chain: `linear` β 1e-4…0.02 (Ho et al. 2020), `cosine` ᾱ (Nichol &
    Dhariwal 2021, arXiv 2102.09672), `edm`: ln σ evenly spaced from 0.002 to 80, σ² = 1/SNR (Karras
    et al. 2022, arXiv 2206.00364); the time input is ¼·ln σ instead of t."""
    steps: Annotated[Int, Ge(2), Le(10000)] = 1000
    """T, the length of the chain. `linear` is scaled by 1000/T, so that ᾱ ends near zero for every
    T ≥ 25 or so."""
    prediction: Literal["epsilon", "x0", "v"] = "epsilon"
    """What the network predicts: the noise, the clean image, or the velocity along `process.path`:
    √ᾱ·ε − √(1−ᾱ)·x0 for `vp` (arXiv 2202.00512), ε − x0 for `flow`."""
    variance: Literal["fixed_large", "fixed_small"] = "fixed_large"
    """Variance of an ancestral sampling step, for `evaluation.sampler = ddpm`: β (large) or the
    posterior variance (small)."""
    path: Literal["vp", "flow"] = "vp"
    """The network's input. `vp`: √ᾱ·x0 + √(1−ᾱ)·ε, variance preserving. `flow`: s·x0 + (1−s)·ε at T
    levels of uniform s, 1−s = (t+1)/T (flow matching, arXiv 2210.02747); with `prediction = v` the
    flow of that paper."""
    sigma_data: Annotated[Float, Gt(0.0), Le(10.0)] = 1.0
    """σ_d of EDM's preconditioning (arXiv 2206.00364, table 1; 0.5 there): the network sees (x0 +
    σ·ε)/√(σ²+σ_d²) and predicts v = (σ_d·ε − σ·x0/σ_d)/√(σ²+σ_d²). 1: v as it is. For `vp` with
    `prediction = v`."""

    def check(self, config: Any) -> None:
        if self.path == "flow" and self.schedule != "linear":
            why = (
                "process.path = flow has levels of its own, s uniform; others are drawn by"
                " timesteps.name: leave it at linear"
            )
            raise Refusal("process.schedule", why)
        if self.sigma_data != 1.0 and (self.path == "flow" or self.prediction != "v"):
            why = (
                "it belongs to process.prediction = v along process.path = vp; here nothing is"
                " scaled by it: leave it at 1"
            )
            raise Refusal("process.sigma_data", why)

    def not_effective(self, config: Any, device: str) -> Iterator[tuple[str, str]]:
        sampler = config.evaluation.sampler
        if sampler != "ddpm" and self.variance != Process().variance:
            why = f"evaluation.sampler = {sampler} adds no noise of that variance"
            yield "process.variance", why

    def told_time(self) -> tuple[float, float]:
        """Return (a, b) of a·t + b, which the network is told for timestep t: what diffusers'
        schedulers tell theirs.

        `edm`: ¼·ln σ, as EDM's networks. `flow`: T·(1−s). Else t.
        """
        if self.path == "flow":
            return 1.0, 1.0
        if self.schedule == "edm":
            low, high = (math.log(sigma) / 4 for sigma in EDM_SIGMAS)
            return (high - low) / (self.steps - 1), low
        return 1.0, 0.0


VALIDATION_BINS = 10
"""Bins of log-SNR; every validation image is seen once in each."""


SAMPLERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ddim": ("DDIM", ("steps", "skip", "eta")),
    "ddpm": ("DDPM", ()),
    "dpmpp_2m": ("DPM-Solver++(2M)", ("steps",)),
    "euler": ("Euler", ("steps",)),
    "heun": ("Heun", ("steps",)),
}
"""What a sampler is called, and the knobs of `evaluation` that it follows."""


@section
class DiffusionEvaluation(images.Evaluation):
    """How the averaged weights are judged."""

    sampler: Literal["ddim", "ddpm", "dpmpp_2m", "euler", "heun"] = "ddim"
    """`ddim` (arXiv 2010.02502) and `dpmpp_2m` (DPM-Solver++(2M), arXiv 2211.01095, deterministic,
    its timesteps evenly spaced in log-SNR) with `evaluation.steps`; `ddpm`: all `process.steps`
    ancestral steps; `euler` and `heun`: deterministic, on EDM's grid of σ (ρ = 7, arXiv 2206.00364,
    eq. 5); along `process.path = flow` Euler steps are even in s. These two do not clamp images
    before the end."""
    steps: Annotated[Int, Ge(1), Le(10000)] = 50
    """Steps of all but `ddpm`, each a pass through the network, two in `heun` but for the last; at
    most `process.steps`."""
    skip: Literal["linear", "quadratic"] = "linear"
    """Spacing of the DDIM sub-sequence."""
    eta: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """DDIM's noise: 0 deterministic, 1 as much as an ancestral step."""
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """Number format in which the network draws images and computes the validation loss; features
    and distances are float32. `auto`: on an NVIDIA GPU the fastest of bf16, TF32 and float32 whose
    scores differ from float32's by less than a tenth of their noise, decided once, for a search
    before its first trial; on a CPU float32. `tf32` (NVIDIA GPUs) and `bf16` are not compared."""
    validation_images: Annotated[Int, Ge(0), Le(100000), EvaluationProtocol()] = 256
    """Images whose ε-error is measured per log-SNR bin, on fixed timesteps and noise, so that no
    sampler or weighting changes the measure. They are of the other split, if there is one. 0:
    none."""

    def check(self, config: Any) -> None:
        super().check(config)
        if "steps" in SAMPLERS[self.sampler][1] and self.steps > config.process.steps:
            raise Refusal("evaluation.steps", f"at most process.steps = {config.process.steps}")
        process = config.process
        if self.sampler == "euler" and process.path == "flow" and process.prediction == "epsilon":
            why = (
                "it begins at pure noise, where process.prediction = epsilon says nothing about the"
                " image; use heun, or ddim, which clamps"
            )
            raise Refusal("evaluation.sampler", why)

    def not_effective(self, config: Any, device: str) -> Iterator[tuple[str, str]]:
        default, followed = DiffusionEvaluation(), SAMPLERS[self.sampler][1]
        for name in ("steps", "skip", "eta"):
            if name not in followed and getattr(self, name) != getattr(default, name):
                why = f"evaluation.sampler = {self.sampler} does not follow it"
                yield f"evaluation.{name}", why

    def sampling_steps(self, chain: int) -> int:
        """Return the steps of the sampler; `chain`: `process.steps`."""
        return self.steps if "steps" in SAMPLERS[self.sampler][1] else chain

    def passes(self, chain: int) -> int:
        """Return the passes of an image through the network; `chain`: `process.steps`."""
        return 2 * self.steps - 1 if self.sampler == "heun" else self.sampling_steps(chain)


@section
class Knobs:
    """A DDPM training."""

    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    process: Process = dataclasses.field(default_factory=Process)
    timesteps: Timesteps = dataclasses.field(default_factory=Uniform)
    weighting: Weighting = dataclasses.field(default_factory=Constant)
    optimizer: Optimizer = dataclasses.field(default_factory=AdamW)
    ema: Ema = dataclasses.field(default_factory=Ema)
    evaluation: Annotated[DiffusionEvaluation, Fixed()] = dataclasses.field(
        default_factory=DiffusionEvaluation
    )


OBJECTIVE = Metric("frechet", "min", "FD")
UNIT = "images"
QUANTITIES = {
    "frechet": Quantity(
        "Fréchet distance", "", "depends on the number of images: compare within a search only"
    ),
    "kid": Quantity("KID", "", "kernel distance between up to 2,000 images of each side"),
    "validation_loss": Quantity(
        "validation loss", "", "ε-error on fixed images, timesteps and noise"
    ),
    "step_sampler_s": Quantity(
        "noise and sampler",
        "ms",
        "of a step: timesteps, noise, noisy images, the sampler's own work",
        1000.0,
    ),
    "step_ema_s": Quantity("EMA", "ms", "of a step: the averaged weights", 1000.0),
}

MEMORY_FREE = (
    *("model.dropout", *MEMORY_FREE_OPTIMIZER, "ema.half_life", "ema.max_decay"),
    *("timesteps.", "weighting.", "process."),  # tables of T numbers
)
"""Knobs that change no more than a few MiB of device memory; a dot at the end: a whole section."""
MEMORY_SAVING = ("model.checkpoint_levels",)
"""Lists that save memory with everything more that is in them."""

# Data, model and extractor that belong together, by name. Every knob can be overridden.
PRESETS: dict[str, Values] = {
    "cifar10": {},
    "images": {"data.name": "images", "evaluation.extractor": "random"},
    "digits": {
        **DIGITS,
        "model.channels": 16,
        "model.multipliers": [1, 2],
        "model.blocks": 1,
        "model.attention": [4],
        "model.dropout": 0.0,
        "model.norm_groups": 8,
        "optimizer.lr": 1.0e-3,
        "loader.workers": 0,
        "evaluation.extractor": "classifier",
        "evaluation.images": 1000,
        "evaluation.steps": 20,
    },
}


def evaluation_protocol(config: Any) -> str:
    """Return how the Fréchet distance is measured, in words."""
    from tunediff.evaluation import weights

    protocol, data, dim, network = config.evaluation, config.data, 0, ""
    with contextlib.suppress(ConfigError):  # the file may lie on another machine
        dim = weights.length(protocol, data.image_size)
        network = weights.describe(protocol)
    called, follows = SAMPLERS[protocol.sampler]
    noisy = f" with η = {protocol.eta:g}" if protocol.eta and "eta" in follows else ""
    steps = f", {protocol.steps} steps" if "steps" in follows else ""
    few = f" (few for {dim:,} features: biased high)" * (protocol.images <= dim)
    drawn = f"{protocol.images:,} generated images{few}, {called}{noisy}{steps}, averaged weights"
    against = f"against {data.name} at {data.image_size}×{data.image_size}{network}"
    in_format = {"tf32": " in TF32", "bf16": " in bfloat16"}.get(protocol.precision, "")
    return f"{drawn}{in_format}, the same noise in all trials, {against}"


def check_files(knobs: Knobs, evaluates: bool) -> None:
    """Refuse missing data and weights; fetches Inception's. Raises `ConfigError`."""
    from tunediff.data import sources
    from tunediff.evaluation import weights

    sources.check(knobs.data)
    if evaluates:
        weights.check(knobs.data, knobs.evaluation)
