"""Sections that our own workloads share: optimizer, its schedule, averaged weights. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from tunediff.config.knobs import Float, section


@section
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
    one tensor after the other. With precision.amp = fp16 on a GPU only `fused` goes on without waiting at each step for
    whether the gradients are finite."""


@section
class Ema:
    """The averaged weights that are evaluated, sampled from and exported."""

    half_life: Annotated[Float, Gt(0.0), Le(1.0)] = 0.05
    """Half-life of the average as a fraction of the training seconds spent so far (EDM's ramp-up rule, arXiv
    2206.00364: 5 % of the samples seen), so that short budgets do not average in the initial weights."""
    max_decay: Annotated[Float, Ge(0.0), Lt(1.0)] = 0.9999
    """Upper bound of the decay per step (0.9999 in DDPM)."""
