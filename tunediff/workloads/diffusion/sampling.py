"""Images drawn from a model, such that image number i does not depend on batch size or number of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Protocol

import torch
from PIL import Image
from torch import Tensor

from tunediff.data.loader import mix
from tunediff.evaluation.distance import NonFiniteError
from tunediff.workloads.diffusion.knobs import Evaluation

Predict = Callable[[Tensor, Tensor], Tensor]
"""(x_t [B, C, H, W], t int64 [B]) → the network's output [B, C, H, W]."""
Progress = Callable[[int, int, Tensor], None]
"""(k, number of steps, x [B, C, H, W]): called after sampling step k = 0, 1, … of a batch."""


class Process(Protocol):
    """The sampler of a diffusion process: `tunediff.workloads.diffusion.process.Diffusion`."""

    def sample(
        self,
        predict: Predict,
        noise: Tensor,
        *,
        sampler: Literal["ddpm", "ddim"],
        steps: int,
        skip: Literal["linear", "quadratic"],
        eta: float,
        step_noise: Callable[[int], Tensor],
        progress: Progress | None,
    ) -> Tensor:
        """x0 [B, C, H, W] in [−1, 1] from initial noise; `step_noise(k)` is the noise added in step k."""
        ...


class Noise:
    """Standard normal noise by image number: the same for an image in whatever batch, process or run it is drawn."""

    BLOCK = 64  # images per generator: small enough to start anywhere, large enough to be cheap

    def __init__(self, seed: int, shape: tuple[int, int, int], device: torch.device | str) -> None:
        self._seed, self._shape, self._device = seed, tuple(shape), device

    def initial(self, start: int, stop: int) -> Tensor:
        """float32 [stop − start, C, H, W]: x_T of images start…stop−1."""
        return self._draw("initial", start, stop)

    def step(self, k: int, start: int, stop: int) -> Tensor:
        """float32 [stop − start, C, H, W]: what sampling step k adds to these images."""
        return self._draw(k, start, stop)

    def _draw(self, purpose: int | str, start: int, stop: int) -> Tensor:
        # On the CPU: a GPU's generator gives other numbers on other devices.
        first = start // self.BLOCK
        blocks = []
        for block in range(first, -(-stop // self.BLOCK)):
            generator = torch.Generator().manual_seed(mix("noise", self._seed, purpose, block))
            blocks.append(torch.randn(self.BLOCK, *self._shape, generator=generator))
        offset = first * self.BLOCK
        return torch.cat(blocks)[start - offset : stop - offset].to(self._device)


def generate(
    predict: Predict,
    diffusion: Process,
    evaluation: Evaluation,
    shape: tuple[int, int, int],
    n: int,
    device: torch.device | str,
    *,
    rank: int = 0,
    world: int = 1,
    autocast: torch.dtype | None = None,
    should_stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Images 0…n−1, this rank's share of them: (number of the first, uint8 [b, C, H, W]) per batch.

    The ranks take batches in turn. All batches have one size, the largest up to `evaluation.batch_size` that spreads n
    evenly: a compiled network is not compiled again for a smaller last batch. `autocast` is the number format of
    `predict`; the sampler itself computes in float32. Ends early when `should_stop()` holds. `progress` is called after
    every sampling step of every batch. Raises `NonFiniteError`.
    """
    device = torch.device(device)
    noise = Noise(evaluation.seed, shape, device)
    _, size = shares(n, world, evaluation.batch_size)

    def plain(x: Tensor, t: Tensor) -> Tensor:
        context = contextlib.nullcontext() if autocast is None else torch.autocast(device.type, autocast)
        with context:
            return predict(x, t).float()

    for start in range(rank * size, n, world * size):
        if should_stop is not None and should_stop():
            return
        stop = start + size

        def step_noise(k: int, start: int = start, stop: int = stop) -> Tensor:
            return noise.step(k, start, stop)

        with torch.no_grad():
            x0 = diffusion.sample(
                plain,
                noise.initial(start, stop),
                sampler=evaluation.sampler,
                steps=evaluation.steps,
                skip=evaluation.skip,
                eta=evaluation.eta,
                step_noise=step_noise,
                progress=progress,
            )
        if not torch.isfinite(x0).all():
            raise NonFiniteError(f"non-finite values in generated images {start}…{stop - 1}")
        yield start, to_uint8(x0[: n - start])


def shares(n: int, world: int, batch_size: int) -> tuple[int, int]:
    """(batches of the busiest rank, images in each): the largest batch up to `batch_size` that spreads n evenly."""
    turns = -(-n // (world * batch_size))
    return turns, -(-n // (world * turns))


def to_uint8(x: Tensor) -> Tensor:
    """[−1, 1] to 0…255, rounded to the nearest; what lies outside is clipped."""
    return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def write_files(images: Tensor, start: int, total: int, folder: Path) -> None:
    """0000.png, 0001.png, …: images uint8 [b, C, H, W], the first of which is number `start` of `total`."""
    digits = max(4, len(str(total - 1)))
    for number, picture in enumerate(images.permute(0, 2, 3, 1).cpu().numpy(), start):
        image = Image.fromarray(picture.squeeze(2) if picture.shape[2] == 1 else picture)
        image.save(folder / f"{number:0{digits}}.png")
