"""Evaluate a diffusion model: distance of generated to real images, validation loss."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from tunediff.config.knobs import refuse
from tunediff.core.progress import Progress
from tunediff.data.images import Images
from tunediff.data.knobs import Data
from tunediff.distributed import World
from tunediff.evaluation import features, number_format
from tunediff.evaluation.generation import shares
from tunediff.evaluation.judge import Distances, Judge
from tunediff.evaluation.number_format import Drawn
from tunediff.training import number_formats
from tunediff.training.number_formats import CHECKED, Format, FormatChoice
from tunediff.training.precision import evaluation_precision
from tunediff.workloads.diffusion.image_sampling import generate
from tunediff.workloads.diffusion.knobs import DiffusionEvaluation
from tunediff.workloads.diffusion.process import Diffusion, Predict
from tunediff.workloads.diffusion.validation import Losses, Validation


class Scores(Distances, Losses):
    """The result of an evaluation. The entries of `Losses` are absent if
    `evaluation.validation_images` is 0."""


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
        of_judge = {
            name: getattr(evaluation, name) for name in ("extractor", "weights_path", "batch_size")
        }
        self.judge = judge_of(DiffusionEvaluation(**of_judge), images, world)
        self._validation = None
        if evaluation.validation_images:
            self._validation = Validation(data, evaluation, images, world)
        self._format: Format | None = None  # not chosen yet
        if evaluation.precision != "auto":
            self._format = evaluation.precision

    def __call__(
        self,
        predict: Predict,
        diffusion: Diffusion,
        *,
        should_stop: Callable[[], bool] | None = None,
    ) -> Scores:
        """Return the scores of `evaluation.images` generated images, and the validation loss.

        `predict`: a network in evaluation mode, of which the first decides what
        `evaluation.precision: auto` is, unless `decide` was called.

        Raises, on all ranks at once, `NonFiniteError` (a ValueError) if images, features or errors
        are not finite, and `EvaluationStoppedError` if `should_stop()` was true before the end.
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
                rank=world.rank, world=world.size, should_stop=should_stop, progress=progress.step,
            )  # fmt: skip
            scores = self.judge((batch for _, batch in batches), count)
        losses: Losses = {}
        if self._validation is not None:
            losses = self._validation(predict, diffusion, precision)
        return {**scores, **losses}

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
            measured = number_format.choose(draw, among, judge.reference, images)
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
            if self._validation is not None:
                errors = self._validation.first_errors(predict, diffusion, precision)
            world.synchronize()
            drawn = Drawn(found, errors, time.perf_counter() - began)
        return drawn


@functools.lru_cache(maxsize=3)
def judge_of(evaluation: DiffusionEvaluation, images: Images, world: World) -> Judge:
    """Return the judge of these images, built once per process and extractor.

    Extractor and reference stay on the device; others' would be in later trials' peak memory.
    """
    extractor = features.build(evaluation, images, world.device)
    return Judge(images, extractor, world, evaluation.batch_size)
