"""What each timestep sampler and weighting costs per training step: `python benchmarks/samplers.py [--config digits]`.

Runs the real training loop with every method in turn, several rounds interleaved, and times the calls into sampler,
weighting and objective. The share is taken against the other seconds of the same run, so it does not depend on how
fast the machine is at the moment. Prints a table; --out FILE keeps it with hardware and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tunediff import cli
from tunediff import config as cfg
from tunediff.core import environment
from tunediff.core.clock import Budget
from tunediff.distributed import World, alone
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.trial import run
from tunediff.workloads.diffusion import timesteps, weighting
from tunediff.workloads.diffusion.objective import DiffusionLoss

TIMED = {
    timesteps.TimestepSampler: ("sample", "update", "before_step", "after_step"),
    weighting.StaticWeighting: ("weights", "learning_loss"),
    DiffusionLoss: ("refresh",),
}


class Stopwatch:
    """Seconds inside the timed calls, those that call each other counted once."""

    def __init__(self, world: World) -> None:
        self.seconds, self._depth, self._world = 0.0, 0, world
        self.engine: Engine | None = None

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, timed; waits for the device at both ends."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if (
                self._depth or self.engine is None or self.engine.warming_up
            ):  # the first step is done twice
                return method(*args, **kwargs)
            self._depth += 1
            self._world.synchronize()
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._world.synchronize()
                self.seconds += time.perf_counter() - start
                self._depth -= 1

        return timed


def patch(watch: Stopwatch) -> None:
    """Time every class that is used."""
    kinds: list[type] = [
        *timesteps.KINDS.values(),
        weighting.StaticWeighting,
        weighting.UncertaintyWeighting,
        DiffusionLoss,
    ]
    for kind in kinds:
        names = next(names for base, names in TIMED.items() if issubclass(kind, base))
        for name in names:
            setattr(kind, name, watch.around(getattr(kind, name)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="knob=value")
    parser.add_argument(
        "--config", type=Path, default=Path("digits"), help="file or workload (default: digits)"
    )
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps per run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()
    base = cfg.named(args.config, ["evaluation.points=1", *args.words])
    unions = ("timesteps.name", "weighting.name")
    methods = {name: {union: name} for union in unions for name in base.schema.knobs[union].choices}
    world = alone()
    watch = Stopwatch(world)
    patch(watch)
    rounds_by_method: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for _ in range(args.rounds):
        for name, knobs in methods.items():
            config = cfg.override(base, knobs)
            watch.seconds = 0.0
            budget = Budget(samples=args.steps * config.loader.batch_size)
            watch.engine = Engine(config, budget, world, Observer(), evaluates=False)
            outcome = run(watch.engine)
            steps, spent = outcome.steps, outcome.seconds["train"] + outcome.seconds["data_wait"]
            rounds_by_method[name].append((watch.seconds / steps, (spent - watch.seconds) / steps))
    load = os.getloadavg()[0]
    lines = [f"{'method':20} {'µs/step':>9} {'% of the rest of a step':>25}"]
    table = {}
    for name, rounds in rounds_by_method.items():
        shares = [100 * mine / rest for mine, rest in rounds]
        table[name] = {
            "us_per_step": 1e6 * statistics.median(mine for mine, _ in rounds),
            "share_percent": shares,
        }
        spread = f"{min(shares):.2f} … {max(shares):.2f}"
        lines.append(
            f"{name:20} {table[name]['us_per_step']:9.0f} {statistics.median(shares):10.2f}  ({spread})"
        )
    rest_ms = 1e3 * statistics.median(
        rest for rounds in rounds_by_method.values() for _, rest in rounds
    )
    lines.append(
        f"the rest of a step: {rest_ms:.2f} ms at batch {base.loader.batch_size}; load average {load:.1f}"
    )
    print("\n".join(lines))
    if args.out is not None:
        content = {"command": sys.argv, "table": table, "rest_ms": rest_ms, "load_average": load}
        content |= {"device": str(world.device), "torch_threads": torch.get_num_threads()}
        args.out.write_text(json.dumps(content | {"environment": environment.describe()}, indent=1))
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
