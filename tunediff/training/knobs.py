"""Sections that our own workloads share: optimizers, schedule, averages. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field

from tunediff.config.knobs import Bool, Float, Refusal, section


# ---- optimizers
@section
class Optimized:
    """What all optimizers share. The schedule follows the fraction of the budget that is spent, not
    a step count."""

    lr: Annotated[Float, Gt(0.0), Le(10.0)] = 2.0e-4
    """Peak learning rate, before `optimizer.lr_scaling`."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by (batch/128) or its square root, so that a search over the batch
    size is fair."""
    weight_decay: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """Weight decay: added to the gradient in `sgd` and `adam`, decoupled from it in the others."""
    warmup: Annotated[Float, Ge(0.0), Le(1.0)] = 0.02
    """Fraction of the budget over which the learning rate rises; the usual one of `one_cycle` is
    0.3."""
    clip_norm: Annotated[Float, Gt(0.0), Le(1000.0)] | None = 1.0
    """The gradient is scaled down to this global norm; null: never."""

    decay: Literal["constant", "linear", "cosine", "one_cycle"] = "constant"
    """Learning rate after the warm-up, which rises in a line from zero: constant (DDPM), or falling
    to zero at the end of the budget in a line or along a cosine (arXiv 1608.03983). `one_cycle`
    rises from 1/25 of the peak and falls to 1/250,000 of it, along cosines, as in torch (arXiv
    1708.07120)."""
    implementation: Literal["foreach", "fused", "for_loop"] = "fused"
    """How the step runs: `foreach` several tensors per kernel, `fused` the whole update in one
    kernel, `for_loop` one tensor after the other; in `muon` what AdamW updates. With precision.amp
    = fp16 on a GPU only `fused` does not wait at each step for the check of the gradients; `muon`
    always does."""


@section
class _SecondMoment:
    beta2: Annotated[Float, Gt(0.0), Lt(1.0)] = 0.999
    """Decay of the mean of squared gradients. That of the mean of gradients is 0.9 if it is no
    knob."""


@section
class AdamW(_SecondMoment, Optimized):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101)."""

    name: Literal["adamw"] = "adamw"


@section
class Adam(_SecondMoment, Optimized):
    """Adam whose weight decay is part of the gradient (Kingma & Ba 2015, arXiv 1412.6980)."""

    name: Literal["adam"] = "adam"


@section
class Sgd(Optimized):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"] = "sgd"
    lr: Annotated[Float, Gt(0.0), Le(10.0)] = 0.1
    momentum: Annotated[Float, Ge(0.0), Lt(1.0)] = 0.9
    """Share of the running mean of gradients that a step keeps."""
    nesterov: Bool = True
    """Nesterov's momentum: the gradient counts once more after the momentum."""

    def check(self, config: Any) -> None:
        if self.nesterov and not self.momentum:
            raise Refusal(
                "optimizer.nesterov", "it is a kind of momentum, and optimizer.momentum = 0"
            )

    def not_effective(self, config: Any, device: str) -> Iterator[tuple[str, str]]:
        if self.implementation == "fused" and _divides_weights(config):
            yield (
                "optimizer.implementation",
                "torch's fused sgd takes no weights that parallel.strategy = fsdp divides",
            )


@section
class Muon(_SecondMoment, Optimized):
    """Steps of weight matrices and of convolutions, taken as matrices, are made orthogonal (Jordan
    et al. 2024), and as long as AdamW's (arXiv 2502.16982), so that its learning rate carries over.
    Norms, biases, embeddings, the first convolution and the last layer are left to AdamW."""

    name: Literal["muon"] = "muon"
    momentum: Annotated[Float, Ge(0.0), Lt(1.0)] = 0.95
    """Share of the running mean of gradients that a step keeps; the gradient counts once more after
    it (Nesterov)."""

    def check(self, config: Any) -> None:
        if _divides_weights(config):
            why = (
                "parallel.strategy = fsdp leaves each process a part of a matrix, and muon needs"
                " the whole"
            )
            raise Refusal("optimizer.name", f"{why}; use ddp or pipeline")


MEMORY_FREE_OPTIMIZER = tuple(
    f"optimizer.{name}"
    for name in (
        "lr",
        "lr_scaling",
        "weight_decay",
        "warmup",
        "decay",
        "clip_norm",
        "nesterov",
        "beta2",
    )
)
"""Knobs of optimizers that change no device memory; not momentum: SGD without it has no state."""
Optimizer = Annotated[AdamW | Muon | Adam | Sgd, Field(discriminator="name")]


def _divides_weights(config: Any) -> bool:
    return bool(config.parallel.strategy == "fsdp" and config.parallel.workers > 1)


# ---- average
@section
class Ema:
    """The averaged weights that are evaluated, sampled from and exported."""

    half_life: Annotated[Float, Gt(0.0), Le(1.0)] = 0.05
    """Half-life of the average as a fraction of the training seconds spent so far (EDM's ramp-up
    rule, arXiv 2206.00364: 5 % of the samples seen), so that short budgets do not average in the
    initial weights."""
    max_decay: Annotated[Float, Ge(0.0), Lt(1.0)] = 0.9999
    """Upper bound of the decay per step (0.9999 in DDPM)."""
