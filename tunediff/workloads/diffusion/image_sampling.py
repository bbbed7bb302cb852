"""Generate images; image number i depends on neither batch size nor processes.

The samplers of training's timesteps are in `timesteps/`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tunediff.evaluation.distance import NonFiniteError
from tunediff.evaluation.generation import ImageNoise, shares
from tunediff.training.number_formats import Format
from tunediff.training.precision import evaluation_precision
from tunediff.workloads.diffusion.knobs import DiffusionEvaluation
from tunediff.workloads.diffusion.process import Diffusion, OnStep, Predict


def generate(
    predict: Predict,
    diffusion: Diffusion,
    evaluation: DiffusionEvaluation,
    shape: Sequence[int],
    n: int,
    device: torch.device | str,
    *,
    precision: Format = "fp32",
    rank: int = 0,
    world: int = 1,
    should_stop: Callable[[], bool] | None = None,
    progress: OnStep | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield this rank's share of images 0…n−1: (first number, uint8 [b, C, H, W]).

    The ranks take batches in turn, all of one size (see `shares`): a compiled network is not
    compiled again for a smaller last batch. `precision` is the number format of `predict`, "fp32"
    leaving it as it is; the sampler itself computes in float32. Ends early when
    `should_stop()` is true. Raises `NonFiniteError`.
    """
    device = torch.device(device)
    noise = ImageNoise(evaluation.seed, shape, device)
    _, size = shares(n, world, evaluation.batch_size)
    for start in range(rank * size, n, world * size):
        if should_stop is not None and should_stop():
            return
        stop = start + size
        x0 = diffusion.sample(
            _in_float32(predict, device, precision),
            noise.initial(start, stop),
            sampler=evaluation.sampler,
            steps=evaluation.steps,
            skip=evaluation.skip,
            eta=evaluation.eta,
            step_noise=functools.partial(noise.step, start=start, stop=stop),
            progress=progress,
        )
        if not torch.isfinite(x0).all():
            raise NonFiniteError(f"non-finite values in generated images {start}…{stop - 1}")
        yield start, to_uint8(x0[: n - start])


def _in_float32(predict: Predict, device: torch.device, precision: Format) -> Predict:
    """Return `predict` with a float32 result, computed in another number format if it is given."""

    def predict_float32(x: Tensor, t: Tensor) -> Tensor:
        as_is = contextlib.nullcontext()
        with as_is if precision == "fp32" else evaluation_precision(device, precision):
            return predict(x, t).float()

    return predict_float32


def to_uint8(x: Tensor) -> Tensor:
    """Map [−1, 1] to 0…255, rounded to the nearest; clip what lies outside."""
    return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
