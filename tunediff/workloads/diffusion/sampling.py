"""Images drawn from a model, such that image number i does not depend on batch size or number of processes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from tunediff.data.loader import mix
from tunediff.evaluation.distance import NonFiniteError
from tunediff.training.precision import evaluation_precision
from tunediff.workloads.diffusion.knobs import Evaluation
from tunediff.workloads.diffusion.process import Diffusion, Predict, Progress


class Noise:
    """Standard normal noise by image number: the same for an image in whatever batch, process or run it is drawn."""

    BLOCK = 64  # images per generator: small enough to start anywhere, large enough to be cheap

    def __init__(self, seed: int, shape: Sequence[int], device: torch.device | str) -> None:
        self._seed, self._shape, self._device = seed, tuple(shape), torch.device(device)

    def initial(self, start: int, stop: int) -> Tensor:
        """float32 [stop − start, C, H, W]: x_T of images start…stop−1."""
        return self.step("initial", start, stop)

    def step(self, k: int | str, start: int, stop: int) -> Tensor:
        """float32 [stop − start, C, H, W]: what sampling step k adds to these images."""
        # On the CPU: a GPU's generator gives other numbers on other devices. From page-locked memory, so that the host
        # goes on to the next step, and draws its noise, while the GPU computes.
        first = start // self.BLOCK
        blocks = []
        for block in range(first, -(-stop // self.BLOCK)):
            generator = torch.Generator().manual_seed(mix("noise", self._seed, k, block))
            blocks.append(torch.randn(self.BLOCK, *self._shape, generator=generator))
        offset = first * self.BLOCK
        whole = torch.cat(blocks)[start - offset : stop - offset]
        cuda = self._device.type == "cuda"
        return (whole.pin_memory() if cuda else whole).to(self._device, non_blocking=cuda)


def generate(
    predict: Predict,
    diffusion: Diffusion,
    evaluation: Evaluation,
    shape: Sequence[int],
    n: int,
    device: torch.device | str,
    *,
    rank: int = 0,
    world: int = 1,
    should_stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Images 0…n−1, this rank's share of them: (number of the first, uint8 [b, C, H, W]) per batch.

    The ranks take batches in turn, all of one size (see `shares`): a compiled network is not compiled again for a
    smaller last batch. `evaluation.precision` is the number format of `predict`, "fp32" leaving it as it is; the
    sampler itself computes in float32. Ends early when `should_stop()` holds. Raises `NonFiniteError`.
    """
    device = torch.device(device)
    noise = Noise(evaluation.seed, shape, device)
    _, size = shares(n, world, evaluation.batch_size)

    def plain(x: Tensor, t: Tensor) -> Tensor:
        as_is = evaluation.precision == "fp32"
        with contextlib.nullcontext() if as_is else evaluation_precision(device, evaluation.precision):
            return predict(x, t).float()

    how = {name: getattr(evaluation, name) for name in ("sampler", "steps", "skip", "eta")}
    for start in range(rank * size, n, world * size):
        if should_stop is not None and should_stop():
            return
        stop = start + size
        step_noise = functools.partial(noise.step, start=start, stop=stop)
        with torch.no_grad():
            x0 = diffusion.sample(plain, noise.initial(start, stop), step_noise=step_noise, progress=progress, **how)
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
