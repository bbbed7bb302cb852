"""Judging a finished model by its workload's own evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from tunediff.clock import Budget
from tunediff.config.systems import Compile, Systems
from tunediff.distributed import World
from tunediff.training.feed import Feed
from tunediff.training.observer import Observer
from tunediff.training.trial import Trial, run


class _Judge(Trial):
    """A training that asks for its first batch gets none: its model becomes the finished one, and is judged."""

    weights: Mapping[str, Tensor]
    found: Mapping[str, Any]

    def _loop(self, build: Callable[[int], Feed]) -> Iterator[Any]:
        self._check_begun()
        self._setup.close()
        assert self._result is not None
        self._result.load_state_dict(self.weights)
        self.found, self._done = self._judged(), True
        yield from ()


def judged(
    config: Systems, weights: Mapping[str, Tensor], world: World, observer: Observer | None = None
) -> Mapping[str, Any]:
    """What the workload finds of a model with these weights, as its training exports it; all ranks call it.

    Raises what the workload's evaluation raises.
    """
    eager = dataclasses.replace(config, compile=Compile())
    judge = _Judge(eager, Budget(samples=1), world, observer or Observer())
    judge.weights = weights
    run(judge)
    return judge.found
