"""Evaluate a diffusion model: images that it generates, their distance to real ones, and the
validation loss: the ε-error on fixed images, t and noise, for every objective.

Training losses of two trials with other timesteps or weights cannot be compared; these numbers can.
Image number i depends on neither batch size nor processes. The samplers of training's timesteps are
in `timesteps/`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tunediff.config import ConfigError
from tunediff.config.knobs import refuse
from tunediff.core.progress import Progress
from tunediff.data.images import Images, load
from tunediff.data.items import mix
from tunediff.data.knobs import Data
from tunediff.distributed import World
from tunediff.evaluation import features
from tunediff.evaluation.distance import NonFiniteError
from tunediff.evaluation.generation import ImageNoise, shares
from tunediff.evaluation.judge import Drawn, Judge, choose_format
from tunediff.training import number_formats
from tunediff.training.number_formats import CHECKED, Format, FormatChoice
from tunediff.training.precision import evaluation_precision
from tunediff.workloads.diffusion.knobs import VALIDATION_BINS as BINS
from tunediff.workloads.diffusion.knobs import DiffusionEvaluation
from tunediff.workloads.diffusion.process import Diffusion, OnStep, Predict, equal_bins

log = logging.getLogger(__name__)


# ---- images
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
    progress: OnStep | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield this rank's share of images 0…n−1: (first number, uint8 [b, C, H, W]).

    The ranks take batches in turn, all of one size (see `shares`): a compiled network is not
    compiled again for a smaller last batch. `precision` is the number format of `predict`, "fp32"
    leaving it as it is; the sampler itself computes in float32. Raises `NonFiniteError`.
    """
    device = torch.device(device)
    noise = ImageNoise(evaluation.seed, shape, device)
    _, size = shares(n, world, evaluation.batch_size)
    for start in range(rank * size, n, world * size):
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


# ---- the validation loss
class Validation:
    """Measures models on one set of images. All ranks call it at every evaluation.

    Each image is seen once in each bin of log-SNR that has timesteps, at one of them. All ranks get
    the same numbers, which do not depend on their number or on the batch size beyond rounding.
    """

    def __init__(self, pixels: Tensor, diffusion: Diffusion, world: World, batch_size: int) -> None:
        """`pixels`: uint8 [N, C, H, W] on the CPU."""
        bins, self._edges = equal_bins(diffusion.log_snr, BINS)
        self._members = [(bins == b).nonzero().squeeze(1) for b in range(BINS)]
        self._filled = [b for b in range(BINS) if len(self._members[b])]
        self._pixels, self._diffusion, self._world = pixels, diffusion, world
        self._total = len(pixels) * len(self._filled)
        _, self._size = shares(self._total, world.size, batch_size)
        spread = [_spread(self._members[b], len(pixels), b) for b in self._filled]
        self._timesteps = torch.stack(spread, dim=1).flatten()
        self._noises = ImageNoise(mix("validation"), pixels.shape[1:], world.device)

    def __call__(self, predict: Predict, precision: Format = "fp32") -> dict[str, Any]:
        """Return the errors of `predict`, a network in evaluation mode.

        `validation_loss`: mean squared error of ε̂ per pixel, under timesteps uniform over the
        chain. It depends on the noise levels: compare only models of one process.
        `validation_mse`: the same within 10 bins of log-SNR, high to low noise; None: no timestep
        in it. `validation_log_snr`: the bins' 11 rising edges in log(ᾱ/(1−ᾱ)); outer bins include
        all beyond ±12.

        The error of an image is the mean of (ε̂ − ε)² over its pixels; ε̂ is the noise that the
        network's output implies, so that all models are measured alike. `precision`: number format
        of the network. Raises `NonFiniteError` on all ranks at once.
        """
        world, total, size = self._world, self._total, self._size
        errors = torch.zeros(total, dtype=torch.float64, device=world.device)
        with (
            Progress("validation loss", total // world.size, "passes") as progress,
            torch.no_grad(),
            evaluation_precision(world.device),
        ):
            for start in range(world.rank * size, total, world.size * size):
                found = self.errors(predict, start, precision)
                errors[start : start + size] = found[: total - start]
                progress.more(size)
        world.sum(errors)
        if not torch.isfinite(errors).all():
            raise NonFiniteError("non-finite errors on the validation images")

        # Means of the errors, by bin and in all
        count, per_bin, loss = len(self._pixels), list[float | None]([None] * BINS), 0.0
        by_bin = errors.view(count, len(self._filled)).T.tolist()
        for b, values in zip(self._filled, by_bin, strict=True):
            per_bin[b] = mean = math.fsum(values) / count
            loss += len(self._members[b]) / self._diffusion.steps * mean
        return {
            "validation_loss": loss,
            "validation_mse": per_bin,
            "validation_log_snr": self._edges,
        }

    def errors(self, predict: Predict, start: int, precision: Format) -> Tensor:
        """Return the errors of a batch, float64 [b]: of images × bins from `start` on."""
        # The last batch is filled up with the last item: one size, as in sampling.
        items = torch.arange(start, start + self._size).clamp(max=self._total - 1)
        images, device = self._pixels[items // len(self._filled)], self._world.device
        x0 = images.to(device).float().div_(127.5).sub_(1.0)
        t = self._timesteps[items].to(device)
        noise = self._noises.initial(start, start + self._size)
        x_t = self._diffusion.add_noise(x0, noise, t)
        with evaluation_precision(device, precision):
            output = predict(x_t, t).float()
        predicted = self._diffusion.predict_noise(output, x_t, t)
        return (predicted - noise).square().flatten(1).mean(1).double()


def _spread(members: Tensor, count: int, b: int) -> Tensor:
    """Return timesteps of `members` for `count` images, int64: evenly spread, shuffled."""
    generator = torch.Generator().manual_seed(mix("validation timesteps", b))
    position = torch.randperm(count, generator=generator)
    return members[(2 * position + 1) * len(members) // (2 * count)]


def held_out(data: Data, images: Images, count: int) -> tuple[Tensor, str]:
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


# ---- both
class Evaluator:
    """Judges models against one set of real images. Built once, called at every evaluation point.

    All ranks call it and get the same numbers, which depend on their number by rounding only.
    """

    def __init__(
        self, data: Data, evaluation: DiffusionEvaluation, images: Images, world: World
    ) -> None:
        """Build or read extractor and reference, load validation images. Raises `ConfigError`."""
        refuse(
            evaluation.precision == "tf32" and world.device.type != "cuda",
            "evaluation.precision: 'tf32' needs a GPU, and this is a CPU; allowed: auto, fp32,"
            " bf16",
        )
        self._protocol, self._world = evaluation, world
        self._shape = images.pixels.shape[1:]
        extractor = features.build(evaluation, images, world.device)
        self.judge = Judge(images, extractor, world, evaluation.batch_size)
        self._held_out = None
        if evaluation.validation_images:
            self._held_out = held_out(data, images, evaluation.validation_images)
        self._format: Format | None = None  # not chosen yet
        if evaluation.precision != "auto":
            self._format = evaluation.precision

    def __call__(self, predict: Predict, diffusion: Diffusion) -> dict[str, Any]:
        """Return `Distances` of `evaluation.images` generated images, and what `Validation` returns
        with the split of its images, unless `evaluation.validation_images` is 0.

        `predict`: a network in evaluation mode, of which the first decides what
        `evaluation.precision: auto` is, unless `decide` was called.

        Raises, on all ranks at once, `NonFiniteError` (a ValueError) if images, features or errors
        are not finite.
        """
        self.decide(predict, diffusion)
        precision = self._format or "fp32"
        protocol, world = self._protocol, self._world
        count, (turns, _) = (
            protocol.images,
            shares(protocol.images, world.size, protocol.batch_size),
        )
        steps = turns * protocol.sampling_steps(diffusion.steps)
        with Progress(f"sampling {count:,} images", steps, "steps") as progress:
            batches = generate(
                predict, diffusion, protocol, self._shape, count, world.device, precision=precision,
                rank=world.rank, world=world.size, progress=progress.step,
            )  # fmt: skip
            scores = self.judge(batch for _, batch in batches)
        if self._held_out is None:
            return {**scores}
        pixels, split = self._held_out
        validation = Validation(pixels, diffusion, world, protocol.batch_size)
        return {**scores, **validation(predict, precision), "validation_split": split}

    def decide(self, predict: Predict, diffusion: Diffusion) -> FormatChoice | None:
        """Decide what `auto` is on this device, by rank 0's times; return what was measured.

        None where nothing is to be measured, or it was before.
        """
        among = number_formats.formats(self._world.device.type)
        if self._format is not None or len(among) == 1:
            self._format = self._format or among[0]
            return None
        draw = functools.partial(self._drawn, predict, diffusion)
        judge, images = self.judge, self._protocol.images
        with torch.no_grad(), evaluation_precision(self._world.device):
            measured = choose_format(draw, among, judge.reference, images)
        choice: FormatChoice = self._world.tell(measured)
        self._format = choice["precision"]
        return choice

    def _drawn(self, predict: Predict, diffusion: Diffusion, precision: Format) -> Drawn:
        """Draw and judge the first images in a format, the same on all ranks; time it."""
        world, count = self._world, min(self._protocol.images, CHECKED)
        drawn = Drawn(torch.empty(0), torch.empty(0), 0.0)
        for _ in range(2):  # the first one loads kernels and captures passes
            world.synchronize()
            began = time.perf_counter()
            batches = generate(
                predict, diffusion, self._protocol, self._shape, count, world.device,
                precision=precision,
            )  # fmt: skip
            found = torch.cat([self.judge.extractor(batch) for _, batch in batches])
            errors = found.new_zeros(0, dtype=torch.float64)
            if self._held_out is not None:
                batch_size = self._protocol.batch_size
                validation = Validation(self._held_out[0], diffusion, world, batch_size)
                errors = validation.errors(predict, 0, precision)
            world.synchronize()
            drawn = Drawn(found, errors, time.perf_counter() - began)
        return drawn
