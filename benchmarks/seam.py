"""What the seam itself costs: seconds of `trial.batches` and `trial.step` around a model that does next to nothing.

`python benchmarks/seam.py`: microseconds per step of the loop with `Trial`, of the same loop in plain PyTorch, and
their difference, taking turns; load average beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
import types
from typing import Any

import torch
from torch import nn

from tunediff import config as cfg
from tunediff.config import workload
from tunediff.core.clock import Budget
from tunediff.distributed import alone
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.trial import Trial, run

STEPS, ROUNDS, BATCH = 2000, 9, 32


@dataclasses.dataclass(frozen=True)
class Knobs:
    """Of nothing."""


class Empty(nn.Module):
    """One number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() * self.weight


def train(trial: Trial) -> None:
    """Through the seam."""
    net = trial.prepare(Empty())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    trial.keep(net=net, optimizer=optimizer)
    for x in trial.batches(DATA):
        with trial.autocast():
            loss = net(x)
        trial.step(loss, optimizer)


def plain() -> float:
    """The same in plain PyTorch, batches drawn likewise; seconds of a step."""
    net = Empty()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    order = torch.randperm(len(DATA))
    began = time.perf_counter()
    for step in range(STEPS):
        first = step * BATCH % (len(DATA) - BATCH)
        loss = net(DATA.index_select(0, order[first : first + BATCH]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return (time.perf_counter() - began) / STEPS


def seam() -> float:
    """Seconds of a step through the seam, its data wait included."""
    values = {
        "loader.resident": True,
        "loader.batch_size": BATCH,
        "evaluation.points": 1,
        "memory.keep_freed": False,
    }
    config = cfg.override(workload.find("empty").schema.default(), values)
    outcome = run(
        Engine(config, Budget(samples=STEPS * BATCH), alone("cpu"), Observer(), evaluates=False)
    )
    seconds = outcome.points[-1].step_s
    assert seconds is not None
    return seconds


DATA = torch.rand(4096, 4)


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    module: Any = types.ModuleType("empty")
    module.Knobs, module.OBJECTIVE, module.train = Knobs, cfg.Metric("loss", "min"), train
    sys.modules["empty.knobs"] = sys.modules["empty.train"] = module
    workload.SHIPPED["empty"] = "empty"
    torch.set_num_threads(1)
    seam(), plain()
    pairs = [(seam(), plain()) for _ in range(ROUNDS)]
    own = statistics.median(a - b for a, b in pairs)
    print(f"with the seam: {1e6 * statistics.median(a for a, _ in pairs):.0f} µs a step")
    print(f"plain PyTorch: {1e6 * statistics.median(b for _, b in pairs):.0f} µs a step")
    print(
        f"the seam's own: {1e6 * own:.0f} µs a step (median of {ROUNDS} turns); load {os.getloadavg()[0]:.1f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
