"""What a step by each optimizer costs: its CPU seconds over those of a step by AdamW, forward and backward included.

`python benchmarks/optimizers.py [digits|cifar10] [knob=value …]`: one thread; the optimizers take turns step by step on
networks of their own, so that whatever else the machine does reaches all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tunediff import config as cfg
from tunediff.training import ema, optimizer
from tunediff.workloads.diffusion.unet import network

NAMES = ("adamw", "muon", "adam", "sgd")
ROUNDS = 15


def training(config: Any) -> Any:
    """Return a function that makes one training step, and its number of parameters."""
    torch.manual_seed(0)
    knobs, batch = config.knobs, config.loader.batch_size
    net = network(knobs).train()
    own = optimizer.build(knobs.optimizer, batch, net)
    average = ema.average(knobs.ema, own, net)
    x = torch.randn(batch, knobs.data.channels, knobs.data.image_size, knobs.data.image_size)
    t = torch.randint(knobs.process.steps, (batch,))

    def step() -> tuple[float, float]:
        """Return CPU seconds of the whole step, and of update and average."""
        began = time.process_time()
        (net(x, t) - x).square().mean().backward()
        middle = time.process_time()
        own.step()
        own.zero_grad(set_to_none=True)
        average.update(net, 0.5, 0.001)
        ended = time.process_time()
        return ended - began, ended - middle

    return step, sum(parameter.numel() for parameter in net.parameters())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="digits")
    parser.add_argument("knobs", nargs="*")
    options = parser.parse_args()
    base = cfg.named(Path(options.config), options.knobs)
    torch.set_num_threads(1)
    steps, parameters = {}, 0
    for name in NAMES:
        steps[name], parameters = training(cfg.override(base, {"optimizer.name": name}))
    for step in steps.values():
        step()
    rounds = [{name: step() for name, step in steps.items()} for _ in range(ROUNDS)]
    print(
        f"{options.config}: {parameters:,} parameters, batch {base.loader.batch_size}, torch {torch.__version__}"
    )
    print(
        "| optimizer | step / step of AdamW | update and average, share of the step |\n|---|---|---|"
    )
    for name in NAMES:
        ratio = statistics.median(turn[name][0] / turn["adamw"][0] for turn in rounds)
        share = statistics.median(turn[name][1] / turn[name][0] for turn in rounds)
        print(f"| `{name}` | {ratio:.3f} | {100 * share:.1f} % |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
