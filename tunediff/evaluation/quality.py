"""Metrics of many images of a finished model, too slow for evaluations in a training."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from tunediff.data.images import Images
from tunediff.distributed import World
from tunediff.evaluation.distance import FeatureStatistics, Reference, frechet, kernel_distance
from tunediff.evaluation.features import Extractor
from tunediff.evaluation.names import KINDS
from tunediff.evaluation.reference import real_features, reference
from tunediff.training.precision import evaluation_precision

FEATURES = 10_000
"""Most feature vectors kept of a set, for metrics of pairs: KID, precision, recall."""
SPLITS = 10
NEIGHBOURS = 3


class Value(NamedTuple):
    """One metric of one set of images."""

    value: float | None
    """None where there are too few images to say anything."""
    images: int
    """Number of generated images."""
    within_sd: float | None = None
    """Standard deviation over subsets (KID) or splits (IS) of these images, not over seeds."""


@dataclasses.dataclass(frozen=True, eq=False)
class Real:
    """Statistics and features of the real images, for the metrics that are computed."""

    reference: Reference | None
    """Of all real images."""
    features: Tensor | None
    """float32 [≤ 10,000, d]: of the first of a fixed shuffle."""

    @classmethod
    def of(
        cls,
        images: Images,
        extractor: Extractor,
        device: torch.device | str,
        batch_size: int,
        kinds: Collection[str],
    ) -> Real:
        """Read them from the cache folder or compute them; `kinds` are keys of `names.KINDS`."""
        options, of_all, features = (images, extractor, device, batch_size), None, None
        if "fd" in kinds:
            of_all = reference(*options)
        if {"kid", "pr"} & set(kinds):
            features = real_features(*options, FEATURES)
        return cls(of_all, features)


class Quality:
    """The metrics of n images added in batches, in any order, by one process or several."""

    def __init__(
        self,
        extractor: Extractor,
        n: int,
        device: torch.device | str,
        kinds: Collection[str] = tuple(KINDS),
    ) -> None:
        """`n` of at least 8; `kinds` are keys of `names.KINDS`."""
        self._extractor, self._device, self._kinds = extractor, torch.device(device), set(kinds)
        self._n = n
        self._statistics = FeatureStatistics(extractor.dim, device) if "fd" in kinds else None
        count = min(n, FEATURES) if {"kid", "pr"} & self._kinds else 0
        # Every rank fills in the rows of its own images; the sum over ranks has them all.
        self._features = torch.zeros(count, extractor.dim, device=device)
        self._logits = torch.zeros(n if "is" in kinds else 0, extractor.classes, device=device)

    def update(self, start: int, images: Tensor) -> None:
        """Add images start, start + 1, …, uint8 [B, C, H, W]. Raises `NonFiniteError`."""
        features, logits = self._extractor.with_logits(images)
        if self._statistics is not None:
            self._statistics.update(features)
        for rows, batch in ((self._features, features), (self._logits, logits)):
            rows[start : start + len(batch)] = batch[: max(0, len(rows) - start)]

    def merge(self, world: World) -> None:
        """Sum the statistics over ranks; every rank must call it, after its last image."""
        if self._statistics is not None:
            self._statistics.merge(world)
        for rows in (self._features, self._logits):
            if rows.numel():
                world.sum(rows)

    def values(self, real: Real) -> dict[str, Value]:
        """Return the metrics of the chosen kinds, by the names in `names.KINDS`."""
        metrics: dict[str, Value] = {}
        count = len(self._features)
        with torch.no_grad(), evaluation_precision(self._device):
            if self._statistics is not None:
                assert real.reference is not None
                metrics["frechet"] = Value(frechet(self._statistics, real.reference), self._n)
            if "kid" in self._kinds:
                assert real.features is not None
                mean, sd = kernel_distance(self._features, real.features) or (None, None)
                metrics["kid"] = Value(mean, count, sd)
            if "is" in self._kinds:
                mean, sd = inception_score(self._logits) or (None, None)
                metrics["inception_score"] = Value(mean, self._n, sd)
            if "pr" in self._kinds:
                assert real.features is not None
                precision, recall = precision_recall(self._features, real.features) or (None, None)
                metrics |= {"precision": Value(precision, count), "recall": Value(recall, count)}
        return metrics


def inception_score(logits: Tensor) -> tuple[float, float] | None:
    """Return mean and standard deviation, over 10 splits in order, of exp of the mean KL divergence
    of p(y|x) from p(y) (Salimans et al. 2016, arXiv 1606.03498, §4) for logits [n, classes], as
    torch-fidelity computes it; None for fewer than 10 images, or without classes."""
    if len(logits) < SPLITS or not logits.shape[1]:
        return None
    from torch_fidelity.metric_isc import isc_features_to_metric

    metrics = isc_features_to_metric(logits, splits=SPLITS, shuffle=False)
    return metrics["inception_score_mean"], metrics["inception_score_std"]


def precision_recall(generated: Tensor, real: Tensor) -> tuple[float, float] | None:
    """Return the shares of generated features [n, d] in the real manifold, and of real ones [m, d]
    in the generated one (Kynkäänniemi et al. 2019, arXiv 1904.06991, k = 3), as torch-fidelity
    computes them; None for 3 or fewer of either.

    A manifold is made of spheres around its features that reach to the third-nearest other one.
    Here the features are those of the Fréchet distance; the paper and torch-fidelity's default take
    VGG16's, which give other numbers.
    """
    if min(len(generated), len(real)) <= NEIGHBOURS:
        return None
    from torch_fidelity.metric_prc import prc_features_to_metric

    options = {"prc_neighborhood": NEIGHBOURS, "prc_batch_size": 2500}
    metrics = prc_features_to_metric(generated, real, save_cpu_ram=True, verbose=False, **options)
    return metrics["precision"], metrics["recall"]
