"""What every evaluation of a training finds: the distance of drawn images to the real ones, the validation loss."""

from __future__ import annotations

from collections.abc import Callable

from tunediff.data.images import Images
from tunediff.data.knobs import Data
from tunediff.distributed import World
from tunediff.evaluation import features
from tunediff.evaluation.judge import Distances, Judge
from tunediff.progress import Progress
from tunediff.workloads.diffusion.knobs import Evaluation
from tunediff.workloads.diffusion.process import Diffusion, Predict
from tunediff.workloads.diffusion.sampling import generate, shares
from tunediff.workloads.diffusion.validation import Losses, Validation


class Scores(Distances, Losses):
    """What an evaluation found; the entries of `Losses` are absent if `evaluation.validation_images` is 0."""


class Evaluator:
    """Judges models against one set of real images. Built once, called at every evaluation point.

    All ranks call it together and all get the same numbers, which do not depend on their number beyond rounding.
    """

    def __init__(self, data: Data, evaluation: Evaluation, images: Images, world: World) -> None:
        """Builds or reads extractor and reference, loads the images of the validation loss. Raises `ConfigError`."""
        self._protocol, self._world = evaluation, world
        self._shape = images.pixels.shape[1:]
        extractor = features.build(evaluation, images, world.device)
        self.judge = Judge(images, extractor, world, evaluation.batch_size)
        self._validation = Validation(data, evaluation, images, world) if evaluation.validation_images else None

    def __call__(
        self, predict: Predict, diffusion: Diffusion, *, should_stop: Callable[[], bool] | None = None
    ) -> Scores:
        """Scores of `evaluation.images` images drawn with `predict`, a network in evaluation mode, and its validation
        loss.

        Raises, on all ranks at once, `NonFiniteError` (a ValueError) if images, features or errors are not finite, and
        TimeoutError if `should_stop()` held before all images were drawn.
        """
        n, world = self._protocol.images, self._world
        turns, _ = shares(n, world.size, self._protocol.batch_size)
        steps = self._protocol.passes(diffusion.steps)
        with Progress(f"sampling {n:,} images", turns * steps, "steps") as progress:
            drawn = generate(
                predict, diffusion, self._protocol, self._shape, n, world.device,
                rank=world.rank, world=world.size, should_stop=should_stop, progress=progress.step,
            )  # fmt: skip
            distances = self.judge((batch for _, batch in drawn), n)
        losses: Losses = {} if self._validation is None else self._validation(predict, diffusion)
        return {**distances, **losses}
