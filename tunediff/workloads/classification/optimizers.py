"""Build SGD or AdamW from the section `optimizer`, and follow its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tunediff.workloads.classification.knobs import AdamW, Sgd


def build(section: Sgd | AdamW, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of these parameters."""
    options: dict[str, Any] = {
        "lr": section.lr, "weight_decay": section.weight_decay,
        "foreach": section.implementation == "foreach", "fused": section.implementation == "fused",
    }  # fmt: skip
    if isinstance(section, Sgd):
        return torch.optim.SGD(parameters, momentum=section.momentum, nesterov=section.nesterov, **options)
    return torch.optim.AdamW(parameters, betas=(0.9, section.beta2), **options)


def learning_rate(section: Sgd | AdamW, progress: float) -> float:
    """Return the learning rate at a fraction of the budget, 0 to 1."""
    rising = progress < section.warmup
    part = progress / section.warmup if rising else (progress - section.warmup) / (1 - section.warmup)
    if section.decay == "one_cycle":
        low, high = (1 / 25, 1.0) if rising else (1.0, 1 / 250_000)
        return section.lr * (high + (low - high) * _cosine(part))
    return section.lr * (part if rising else 1.0 if section.decay == "constant" else _cosine(part))


def set_learning_rate(optimizer: torch.optim.Optimizer, section: Sgd | AdamW, progress: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(section, progress)


def _cosine(part: float) -> float:
    """Return half a cosine that falls from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * part))
