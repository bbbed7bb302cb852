"""Judging a finished model by its workload's own evaluation, and how long that takes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from tunediff import config as cfg
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


LONG_ENOUGH_S = 0.25
"""Seconds of passes after which a rate is known."""


def pass_s(config: Systems, world: World) -> float | None:
    """Seconds that one sample takes through the network of an evaluation, here and now, in batches as there.

    Batches grow to `evaluation.batch_size` or until one takes a quarter of a second: a second or two in all. None where
    the workload has no `evaluation_pass`.
    """
    if (offered := cfg.of(config).offers("evaluation_pass")) is None:
        return None
    return rate_s(offered(config.knobs, world.device), getattr(config.evaluation, "batch_size", 64), world)


def rate_s(run: Callable[[int], object], most: int, world: World, enough_s: float = LONG_ENOUGH_S) -> float:
    """Seconds of a sample in `run(count)`, in batches of up to `most` or until one takes `enough_s`."""
    count = 1
    while True:
        taken: list[float] = []
        while len(taken) < 3 or sum(taken) < enough_s:  # the first loads kernels, others may be disturbed
            world.synchronize()
            begin = time.perf_counter()
            run(count)
            world.synchronize()
            taken.append(time.perf_counter() - begin)
        if min(taken) >= enough_s or count >= most:
            return min(taken) / count
        count = min(4 * count, most)
