"""The validation loss: the ε-error on fixed images, timesteps and noise, which no sampler or
weighting changes.

Training losses of two trials with other timesteps or weights cannot be compared; these numbers can.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Literal, TypedDict

import torch
from torch import Tensor

from tunediff.config import ConfigError
from tunediff.core.progress import Progress
from tunediff.data.images import Images, load
from tunediff.data.items import mix
from tunediff.data.knobs import Data
from tunediff.distributed import World
from tunediff.evaluation.distance import NonFiniteError
from tunediff.evaluation.generation import ImageNoise, shares
from tunediff.training.precision import evaluation_precision
from tunediff.workloads.diffusion.knobs import VALIDATION_BINS as BINS
from tunediff.workloads.diffusion.knobs import DiffusionEvaluation
from tunediff.workloads.diffusion.process import Diffusion, Predict, equal_bins

log = logging.getLogger(__name__)
Format = Literal["fp32", "tf32", "bf16"]
FP32: Format = "fp32"


class Losses(TypedDict, total=False):
    """The result of a validation."""

    validation_loss: float
    """Mean squared error of ε̂ per pixel, under timesteps uniform over the chain. It depends on the
    noise levels: compare only models of one path, schedule and chain length; `validation_mse` is by
    log-SNR."""
    validation_mse: list[float | None]
    """The same within each of 10 bins of log-SNR, from high to low noise; None for a bin without a
    timestep."""
    validation_log_snr: list[float]
    """The bins' 11 edges, rising, in log(ᾱ/(1−ᾱ)). The outer bins hold all that lies beyond ±12 as
    well."""
    validation_split: str
    """Split of the images: `test`, held out; otherwise the split that is learned."""


class Validation:
    """Measures models on one set of images. Built once, called by all ranks together at every
    evaluation point.

    Each image is seen once in each bin, at a timestep of that bin. All ranks get the same numbers,
    which do not depend on their number or on the batch size beyond rounding.
    """

    def __init__(
        self, data: Data, evaluation: DiffusionEvaluation, images: Images, world: World
    ) -> None:
        """Take `evaluation.validation_images` of the test split if that is not learned, else of
        `images`."""
        self._world, self._batch_size = world, evaluation.batch_size
        self.pixels, self.split = _held_out(data, images, evaluation.validation_images)
        """uint8 [N, C, H, W] on the CPU, and the split they come from."""

    def __call__(
        self,
        predict: Predict,
        diffusion: Diffusion,
        precision: Format = "fp32",
        limit: float = 0.0,
    ) -> Losses:
        """Return the errors of `predict`, a network in evaluation mode.

        The error of an image is the mean of (ε̂ − ε)² over its pixels; ε̂ is the noise that the
        network's output implies, so that models of all paths and predictions are measured alike.
        `precision`: number format of the network, float32 after all if it changes the mean error of
        the first batch by more than the share `limit`. Raises `NonFiniteError` on all ranks at
        once.
        """
        bins, edges = equal_bins(diffusion.log_snr, BINS)
        members = [(bins == b).nonzero().squeeze(1) for b in range(BINS)]
        filled = [b for b in range(BINS) if len(members[b])]
        count, width, device = len(self.pixels), len(filled), self._world.device
        spread = [_spread(members[b], count, b) for b in filled]
        timesteps = torch.stack(spread, dim=1).flatten()  # image by image, [N · filled bins]
        noises = ImageNoise(mix("validation"), self.pixels.shape[1:], device)

        # One item per image and bin. Every rank fills in some items; the sum over ranks has all.
        total = count * width
        errors = torch.zeros(total, dtype=torch.float64, device=device)
        _, size = shares(total, self._world.size, self._batch_size)

        def errors_of(start: int, precision: Format) -> Tensor:
            """Return the errors of a batch of items, float64."""
            # The last batch is filled up with the last item: one size, as in sampling.
            items = torch.arange(start, start + size).clamp(max=total - 1)
            x0 = self.pixels[items // width].to(device).float().div_(127.5).sub_(1.0)
            t = timesteps[items].to(device)
            noise = noises.initial(start, start + size)
            x_t = diffusion.add_noise(x0, noise, t)
            with evaluation_precision(device, precision):
                output = predict(x_t, t).float()
            predicted = diffusion.predict_noise(output, x_t, t)
            return (predicted - noise).square().flatten(1).mean(1).double()

        with (
            Progress("validation loss", total // self._world.size, "passes") as progress,
            torch.no_grad(),
            evaluation_precision(device),
        ):
            if precision != "fp32":  # all ranks look at the same batch
                exact, faster = (errors_of(0, one).mean() for one in (FP32, precision))
                precision = precision if (faster - exact).abs() <= limit * exact else FP32
            for start in range(self._world.rank * size, total, self._world.size * size):
                errors[start : start + size] = errors_of(start, precision)[: total - start]
                progress.more(size)
        self._world.sum(errors)
        if not torch.isfinite(errors).all():
            raise NonFiniteError("non-finite errors on the validation images")

        per_bin: list[float | None] = [None] * BINS
        loss = 0.0
        for b, values in zip(filled, errors.view(count, width).T.tolist(), strict=True):
            per_bin[b] = mean = math.fsum(values) / count
            loss += len(members[b]) / diffusion.steps * mean
        return {
            "validation_loss": loss,
            "validation_mse": per_bin,
            "validation_log_snr": edges,
            "validation_split": self.split,
        }


def _spread(members: Tensor, count: int, b: int) -> Tensor:
    """Return a timestep of `members` for each of `count` images, int64: evenly spread, shuffled
    over the images."""
    generator = torch.Generator().manual_seed(mix("validation timesteps", b))
    position = torch.randperm(count, generator=generator)
    return members[(2 * position + 1) * len(members) // (2 * count)]


def _held_out(data: Data, images: Images, count: int) -> tuple[Tensor, str]:
    """Return (the first images of the validation set, uint8 [≤ count, C, H, W], their split)."""
    if data.split == "train":
        try:
            held_out = load(dataclasses.replace(data, split="test", max_images=max(2, count)))
            return held_out.pixels[:count], "test"
        except ConfigError as error:  # a folder with train/ only
            log.info("the validation loss is measured on learned images: %s", error)
    # A fixed shuffle: files are sorted by class.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images.pixels[order[:count]], data.split
