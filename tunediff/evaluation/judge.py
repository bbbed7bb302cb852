"""Compare any generator's images with real ones, at every evaluation of a training."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TypedDict

import torch
from torch import Tensor

from tunediff.core.errors import EvaluationStoppedError
from tunediff.data.images import Images
from tunediff.distributed import World
from tunediff.evaluation.distance import (
    FeatureStatistics,
    NonFiniteError,
    frechet,
    kernel_distance,
    refuse_non_finite,
)
from tunediff.evaluation.features import Extractor
from tunediff.evaluation.reference import reference
from tunediff.training.precision import evaluation_precision

GRID_IMAGES = 64
KID_IMAGES = 2000


class Distances(TypedDict):
    """How far generated images are from the real ones."""

    frechet: float
    """Fréchet distance of the generated images to the real ones; lower is better."""
    kid: float | None
    """Kernel distance of up to 2,000 images a side; None with fewer than 64 on either."""
    evaluation_images: int
    """N, generated images."""
    label: str
    """Name of the Fréchet distance: FID, or FD and the extractor."""


class Judge:
    """Judges generators against one set of real images. All ranks call it together."""

    last_images: Tensor
    """uint8 [≤ 64, C, H, W] on the CPU: the first images of the last evaluation, on every rank."""

    def __init__(
        self, images: Images, extractor: Extractor, world: World, batch_size: int = 256
    ) -> None:
        """`batch_size`: real images at a time, if the cache does not hold their features."""
        self._world, self.extractor = world, extractor
        self.reference = reference(images, extractor, world.device, batch_size)

    def __call__(self, batches: Iterable[Tensor], count: int | None = None) -> Distances:
        """Return the distances of this rank's images uint8 [b, C, H, W] and others' to real ones.

        All batches but the last are of one size, and rank r's are numbers r, r + ranks, …: then the
        result does not depend on the number of ranks beyond rounding. They are drawn in float32 and
        without gradients. Raises, on all ranks at once, `NonFiniteError` if features are not finite
        or `batches` raises it, and `EvaluationStoppedError` if there are fewer than `count` images.
        """
        world = self._world
        statistics, images, features = self._of_rank(batches)
        statistics.merge(world)
        judged = statistics.count
        if count is not None and judged < count:
            raise EvaluationStoppedError(f"evaluation stopped after {judged} of {count} images")
        distance = frechet(statistics, self.reference)
        self.last_images = _by_number(world.gather(images))[:GRID_IMAGES]
        first = _by_number(world.gather(features))[:KID_IMAGES].to(world.device)
        kid = kernel_distance(first, self.reference.features)
        return {
            "frechet": world.agree(distance),
            "kid": None if kid is None else world.agree(kid[0]),
            "evaluation_images": judged,
            "label": self.extractor.label,
        }

    def _of_rank(
        self, batches: Iterable[Tensor]
    ) -> tuple[FeatureStatistics, list[Tensor], list[Tensor]]:
        """Return the statistics of this rank's images, and of the first ones images for the grid
        and features for KID."""
        world, failure = self._world, ""
        statistics = FeatureStatistics(self.extractor.dim, world.device)
        images, features = list[Tensor](), list[Tensor]()
        try:
            # Whatever number format a trial trains in, all are judged in float32.
            with torch.no_grad(), evaluation_precision(world.device):
                for batch in batches:
                    batch_features = self.extractor(batch)
                    statistics.update(batch_features)
                    if sum(map(len, images)) * world.size < GRID_IMAGES:
                        images.append(batch.cpu())
                    if sum(map(len, features)) * world.size < KID_IMAGES:
                        features.append(batch_features.cpu())
        except NonFiniteError as error:
            failure = str(error)
        refuse_non_finite(failure, world)
        return statistics, images, features


def _by_number(of_ranks: list[list[Tensor]]) -> Tensor:
    """Join all ranks' parts by image number: the first of every rank, then the second, …"""
    turns = itertools.zip_longest(*of_ranks)
    return torch.cat([part for turn in turns for part in turn if part is not None])
