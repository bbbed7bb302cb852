"""AdamW and its schedule, for workloads that take theirs from the section `optimizer`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tunediff.training import knobs


def build(
    section: knobs.Optimizer, batch_size: int, parameters: Iterable[nn.Parameter], undecayed: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return AdamW as configured (Loshchilov & Hutter 2019), which is Adam without weight decay, for `parameters`."""
    groups: list[dict[str, Any]] = [{"params": list(parameters)}]
    if undecayed:
        groups.append({"params": undecayed, "weight_decay": 0.0})
    return torch.optim.AdamW(
        groups,
        lr=peak_learning_rate(section, batch_size),
        betas=(0.9, section.beta2),
        weight_decay=section.weight_decay,
        foreach=section.implementation == "foreach",
        fused=section.implementation == "fused",
    )


def peak_learning_rate(section: knobs.Optimizer, batch_size: int) -> float:
    """Return the learning rate after warm-up: scaled by batch/128, by its root, or not."""
    ratio = batch_size / 128
    return section.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[section.lr_scaling]


def learning_rate(section: knobs.Optimizer, batch_size: int, progress: float) -> float:
    """Return the learning rate at a fraction of the budget, 0 to 1: linear warm-up, then constant or falling to 0."""
    warmup, peak = section.warmup, peak_learning_rate(section, batch_size)
    if progress < warmup:
        return peak * progress / warmup
    rest = (progress - warmup) / (1 - warmup) if warmup < 1 else 0.0
    falling = {"constant": 1.0, "linear": 1 - rest, "cosine": 0.5 * (1 + math.cos(math.pi * rest))}
    return peak * falling[section.decay]


def set_learning_rate(
    optimizer: torch.optim.Optimizer, section: knobs.Optimizer, batch_size: int, progress: float
) -> None:
    """Set the learning rate of the next step."""
    rate = learning_rate(section, batch_size, progress)
    for group in optimizer.param_groups:
        group["lr"] = rate
