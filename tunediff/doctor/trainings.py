"""Short trainings for the doctor, on any device: of a small U-Net, and of the diffusion workload as it is."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tunediff import config as cfg
from tunediff.clock import Budget
from tunediff.config import Systems
from tunediff.distributed import World
from tunediff.points import Point
from tunediff.training import compilation
from tunediff.training import optimizer as adam
from tunediff.training.observer import Observer
from tunediff.training.trial import Outcome, Trial, run
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.train import squared_errors
from tunediff.workloads.diffusion.unet import Block, flops_per_sample, network

STEPS = 10
SMALL = {
    "model.channels": 16, "model.norm_groups": 4, "model.multipliers": [1, 2], "model.dropout": 0.0,
    "loader.batch_size": 8, "loader.workers": 0, "data.max_images": 256, "evaluation.points": 1,
    "optimizer.warmup": 0.0, "optimizer.lr": 1e-3, "optimizer.implementation": "for_loop", "process.steps": 100,
    "precision.conv_tf32": False,
}  # fmt: skip
"""In IEEE float32, which stock PyTorch does not compute a GPU's convolutions in."""
CPU = World(0, 1, torch.device("cpu"))


def small(**changes: Any) -> Systems:
    """A U-Net for the digits that trains in milliseconds; knobs with two underscores for a dot."""
    plain = cfg.override(cfg.baseline("digits"), SMALL)
    changed: Systems = cfg.override(plain, {name.replace("__", "."): value for name, value in changes.items()})
    return changed


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """So small a network is faster on one core than on several, above all where others use them too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a training left."""

    loss: float
    """Mean of its steps."""
    says: Tensor
    """The noise that the network finds in the same images after it, computed in float32 on the CPU: [n, 1, 8, 8]. Its
    weights say less: Adam moves those whose gradient is next to nothing by the sign of rounding errors."""
    outcome: Outcome
    graphs: list[int]
    """How many torch.compile had made after each step."""


class EnoughError(Exception):
    """The training has got as far as it should."""


class Watch(Observer):
    """Calls `after_step` after every optimizer step and `at_point` at every point."""

    def __init__(self, after_step: Callable[[], object] | None = None, at_point: Callable[[], object] | None = None):
        super().__init__()
        self._after_step, self._at_point = after_step, at_point

    def stepped(self) -> None:
        if self._after_step is not None:
            self._after_step()

    def point(self, point: Point) -> bool:
        if self._at_point is not None:
            self._at_point()
        return True


@functools.cache
def rows(channels: int = 1, side: int = 8, steps: int = 100, count: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    """Images, noise and timesteps that are part of the data: two devices draw other numbers from one seed."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, channels, side, side, generator=generator).round() * 2 - 1
    noise = torch.randn(images.shape, generator=generator)
    return images, noise, torch.randint(steps, (count,), generator=generator)


def learn(trial: Trial) -> None:
    """Train the U-Net of its configuration on `rows` of its size."""
    knobs = trial.knobs
    unet, process = network(knobs), Diffusion(knobs.process, trial.device)
    trial.prepare(unet, blocks=Block, flops_per_sample=flops_per_sample(knobs.model, knobs.data))
    optimizer = adam.build(knobs.optimizer, trial.config.loader.batch_size, unet.parameters(), [])
    trial.keep(network=unet, optimizer=optimizer)
    data = rows(knobs.data.channels, knobs.data.image_size, knobs.process.steps)
    for x0, noise, t in trial.batches(data):
        trial.forward_backward((process.add_noise(x0, noise, t), t), (noise,), squared_errors)
        trial.update(optimizer, clip_norm=knobs.optimizer.clip_norm)


@one_thread()
def trained(config: Systems, world: World, steps: int = STEPS, kind: type[Trial] = Trial) -> Trained:
    """`learn` for so many steps, and what it says then. Raises what it raises."""
    outcome, counts = short(config, world, steps, kind)
    return Trained(outcome.points[-1].loss, says(config, outcome.model.state_dict()), outcome, counts)


def short(
    config: Systems, world: World, steps: int, kind: type[Trial] = Trial, after_step: Callable[[], object] | None = None
) -> tuple[Outcome, list[int]]:
    """`learn` for so many steps; with it `Trained.graphs`. Raises what it raises, and `after_step` does."""
    counts: list[int] = []

    def stepped() -> None:
        counts.append(compilation.graphs())
        if after_step is not None:
            after_step()

    with compilation.cold_cache(config.compile):
        trial = kind(config, Budget(steps=steps), world, Watch(stepped), evaluates=False)
        try:
            learn(trial)
        finally:
            trial.close()
            if config.compile.active:
                torch.compiler.reset()
    return trial.outcome(), counts


@torch.no_grad()
def says(config: Systems, weights: Mapping[str, Tensor]) -> Tensor:
    """See `Trained.says`; of weights on any device."""
    unet, process = network(config.knobs), Diffusion(config.knobs.process, CPU.device)
    unet.load_state_dict({name: one.cpu().contiguous() for name, one in weights.items()})
    images, noise, t = (column[:64] for column in rows())
    said: Tensor = unet.eval()(process.add_noise(images, noise, t), t)
    return said


@one_thread()
def diffusion(
    config: Systems, world: World, steps: int, folder: Path | None = None, observer: Observer | None = None,
    kind: type[Trial] = Trial,
) -> Tensor:  # fmt: skip
    """What the averaged weights of the diffusion workload itself say after so many steps: see `Trained.says`."""
    trial = kind(config, Budget(steps=steps), world, observer or Observer(), folder=folder, evaluates=False)
    return says(config, run(trial).model.state_dict())


def apart(found: Tensor, expected: Tensor) -> float:
    """How far what two trainings say is apart, as a part of what the second says: untrained networks say 0."""
    return float((found - expected).norm() / expected.norm())
