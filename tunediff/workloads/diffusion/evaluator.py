"""Evaluate a diffusion model: distance of generated to real images, validation loss."""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from tunediff.config.knobs import refuse
from tunediff.core.progress import Progress
from tunediff.data.images import Images
from tunediff.data.knobs import Data
from tunediff.distributed import World
from tunediff.evaluation import features
from tunediff.evaluation.generation import shares
from tunediff.evaluation.judge import Distances, Judge
from tunediff.workloads.diffusion.knobs import DiffusionEvaluation
from tunediff.workloads.diffusion.process import Diffusion, Predict
from tunediff.workloads.diffusion.sampling import generate
from tunediff.workloads.diffusion.validation import Losses, Validation

CHECKED = 128
"""Images that are also drawn in float32, where `evaluation.precision` is another format."""
LIMIT = 0.02
"""`precision_shift` from which all images are drawn in float32: about two seeds' difference."""


class Scores(Distances, Losses):
    """The result of an evaluation. The entries of `Losses` are absent if
    `evaluation.validation_images` is 0, and `precision_shift` where `evaluation.precision` is fp32.
    Where that is above `LIMIT`, the distances are those of images in float32."""


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
            "evaluation.precision: 'tf32' needs a GPU, and this is a CPU; allowed: fp32, bf16",
        )
        self._protocol, self._world = evaluation, world
        self._shape = images.pixels.shape[1:]
        of_judge = {
            name: getattr(evaluation, name) for name in ("extractor", "weights_path", "batch_size")
        }
        self.judge = judge_of(DiffusionEvaluation(**of_judge), images, world)
        self._checked: weakref.ref[object] | None = None  # the network whose shift is known
        self._shift = 0.0
        self._validation = None
        if evaluation.validation_images:
            self._validation = Validation(data, evaluation, images, world)

    def __call__(
        self,
        predict: Predict,
        diffusion: Diffusion,
        *,
        should_stop: Callable[[], bool] | None = None,
        last: bool = True,
    ) -> Scores:
        """Return the scores of `evaluation.images` generated images, and the validation loss.

        `predict`: a network in evaluation mode. `last`: whether these scores count in the end. What
        `evaluation.precision` changes is measured for the first and the last scores of a network,
        and is taken to be the same between them.

        Raises, on all ranks at once, `NonFiniteError` (a ValueError) if images, features or errors
        are not finite, and `EvaluationStoppedError` if `should_stop()` was true before the end.
        """
        draw = functools.partial(self._draw, predict, diffusion, should_stop)
        given, float32 = self._protocol, dataclasses.replace(self._protocol, precision="fp32")
        known = self._checked is not None and self._checked() is predict
        check = given != float32 and (last or not known)
        if known and not check and self._shift > LIMIT:
            given = float32
        scores = draw(given, check)
        if check:
            self._shift, self._checked = scores["precision_shift"], weakref.ref(predict)
        if check and self._shift > LIMIT:
            self._warn(given.precision)
            scores = draw(float32, False)
        if self._protocol != float32:
            scores["precision_shift"] = self._shift
        losses: Losses = {}
        if self._validation is not None:
            losses = self._validation(predict, diffusion, self._protocol.precision, LIMIT)
        return {**scores, **losses}

    def _draw(
        self,
        predict: Predict,
        diffusion: Diffusion,
        should_stop: Callable[[], bool] | None,
        protocol: DiffusionEvaluation,
        check: bool,
    ) -> Distances:
        """Return the distances of generated images; `check`: also the shift by precision."""
        count, world = protocol.images, self._world
        turns, _ = shares(count, world.size, protocol.batch_size)
        steps = turns * protocol.sampling_steps(diffusion.steps)

        def first_exact() -> Tensor:
            exact, some = dataclasses.replace(protocol, precision="fp32"), min(count, CHECKED)
            batches = generate(predict, diffusion, exact, self._shape, some, world.device)
            return torch.cat([batch for _, batch in batches])

        with Progress(f"sampling {count:,} images", steps, "steps") as progress:
            batches = generate(
                predict, diffusion, protocol, self._shape, count, world.device,
                rank=world.rank, world=world.size, should_stop=should_stop, progress=progress.step,
            )  # fmt: skip
            images = (batch for _, batch in batches)
            return self.judge(images, count, first_exact if check else None)

    def _warn(self, precision: str) -> None:
        if self._world.main:
            print(
                f"WARNING: evaluation.precision: {precision} shifts this distance by"
                f" {self._shift:.1%}, more than {LIMIT:.0%}: all images are drawn again in"
                " float32",
                file=sys.stderr,
                flush=True,
            )


@functools.lru_cache(maxsize=3)
def judge_of(evaluation: DiffusionEvaluation, images: Images, world: World) -> Judge:
    """Return the judge of these images, built once per process and extractor.

    Extractor and reference stay on the device; others' would be in later trials' peak memory.
    """
    extractor = features.build(evaluation, images, world.device)
    return Judge(images, extractor, world, evaluation.batch_size)
