"""Optimizers and their schedule, for workloads that take theirs from the section `optimizer`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tunediff.training import knobs
from tunediff.training.muon import MuonAdamW, groups_of


def build(
    section: knobs.Optimizer,
    batch_size: int,
    network: nn.Module,
    undecayed: list[nn.Parameter] | None = None,
) -> torch.optim.Optimizer:
    """Return a network's optimizer, and of more parameters without decay; after `prepare`."""
    groups: list[dict[str, Any]] = [{"params": list(network.parameters())}]
    if isinstance(section, knobs.Muon):
        groups = groups_of(network)
    if undecayed:
        groups.append({"params": undecayed, "weight_decay": 0.0})
    options: dict[str, Any] = {
        "lr": peak_learning_rate(section, batch_size),
        "weight_decay": section.weight_decay,
        "foreach": section.implementation == "foreach",
        "fused": section.implementation == "fused",
    }
    if isinstance(section, knobs.Sgd):
        return _sgd(section, network, groups, options)
    options["betas"] = (0.9, section.beta2)
    if isinstance(section, knobs.Muon):
        return MuonAdamW(groups, section.momentum, **options)
    return (torch.optim.Adam if isinstance(section, knobs.Adam) else torch.optim.AdamW)(
        groups, **options
    )


def _sgd(
    section: knobs.Sgd, network: nn.Module, groups: list[dict[str, Any]], options: dict[str, Any]
) -> torch.optim.SGD:
    # torch 2.15 has no fused SGD for divided parameters
    if any(hasattr(parameter, "to_local") for parameter in network.parameters()):
        options["fused"] = False
    sgd = torch.optim.SGD(groups, momentum=section.momentum, nesterov=section.nesterov, **options)
    if options["fused"] and section.momentum:
        # which torch 2.15 leaves unfilled where loss scaling skips a step
        for parameter in (one for group in sgd.param_groups for one in group["params"]):
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd


def peak_learning_rate(section: knobs.Optimizer, batch_size: int) -> float:
    """Return the learning rate after warm-up: scaled by batch/128, by its root, or not."""
    ratio = batch_size / 128
    return section.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[section.lr_scaling]


def learning_rate(section: knobs.Optimizer, batch_size: int, progress: float) -> float:
    """Return the learning rate at a budget's fraction, 0 to 1: warm-up, then the schedule."""
    warmup, peak = section.warmup, peak_learning_rate(section, batch_size)
    rising = progress < warmup
    part = (
        progress / warmup if rising else (progress - warmup) / (1 - warmup) if warmup < 1 else 0.0
    )
    if section.decay == "one_cycle":
        low, high = (1 / 25, 1.0) if rising else (1.0, 1 / 250_000)
        return peak * (high + (low - high) * _cosine(part))
    if rising:
        return peak * part
    return peak * {"constant": 1.0, "linear": 1 - part, "cosine": _cosine(part)}[section.decay]


def _cosine(part: float) -> float:
    """Return half a cosine that falls from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * part))


def set_learning_rate(
    optimizer: torch.optim.Optimizer, section: knobs.Optimizer, batch_size: int, progress: float
) -> None:
    """Set the learning rate of the next step."""
    rate = learning_rate(section, batch_size, progress)
    for group in optimizer.param_groups:
        group["lr"] = rate
