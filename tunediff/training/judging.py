"""Judge a finished model by its workload's own evaluation."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tunediff import config as cfg
from tunediff.config.systems import Systems, eager
from tunediff.core.clock import Budget
from tunediff.distributed import World, alone
from tunediff.training.engine import Engine
from tunediff.training.evaluation import evaluate
from tunediff.training.observer import Observer
from tunediff.training.trial import run
from tunediff.training.weights import put_into

ALONE = {"parallel.workers": 1, "parallel.strategy": "ddp"}
"""Knobs of a process that has all of a model, however it was trained."""


class JudgeWeights(Observer):
    """Give the workload no batch: its model gets the finished one's weights, and is judged."""

    network: nn.Module
    """The model that the workload exports, with the weights."""
    values: Mapping[str, Any]
    """What the evaluation found."""

    def __init__(self, weights: Mapping[str, Tensor], judges: bool = True) -> None:
        super().__init__()
        self._weights, self._judges = weights, judges

    def begin(self, run: Engine) -> bool:
        assert run.result is not None
        self.network = run.result
        put_into(self.network, self._weights)
        if self._judges:
            self.values = self.evaluate(run, functools.partial(evaluate, run))
        return False


def judged(
    config: Systems,
    weights: Mapping[str, Tensor],
    world: World,
    observer: Observer | None = None,
) -> Mapping[str, Any]:
    """Return the evaluation of a model with these weights, as exported; all ranks call it.

    Raises what the workload's evaluation raises.
    """
    program = JudgeWeights(weights)
    run(Engine(eager(config), Budget(samples=1), world, observer or Observer(), program))
    return program.values


def built(config: Systems, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return the model that a workload exports, as its `train` makes it, with these weights."""
    program = JudgeWeights(weights, judges=False)
    config = cfg.override(eager(config), ALONE, check=False)
    with torch.random.fork_rng():
        run(Engine(config, Budget(samples=1), alone(), program))
    return program.network
