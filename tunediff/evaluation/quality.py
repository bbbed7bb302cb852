"""Metrics of many images of a finished model, too slow for evaluations in a training."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tunediff.data.images import Images
from tunediff.distributed import World
from tunediff.evaluation.distance import FeatureStatistics, Reference, frechet, kernel_distance
from tunediff.evaluation.extractor import Extractor
from tunediff.evaluation.names import KINDS, STRAIGHT
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
    images: int | None
    """Number of generated images; None for the limit of infinitely many."""
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
        # Statistics of the first quarter, of the second, and of the second half.
        self._stops = [n // 4, n // 2, n]
        self._parts = [
            FeatureStatistics(extractor.dim, device) for _ in self._stops if "fd" in kinds
        ]
        count = min(n, FEATURES) if {"kid", "pr"} & self._kinds else 0
        # Every rank fills in the rows of its own images; the sum over ranks has them all.
        self._features = torch.zeros(count, extractor.dim, device=device)
        self._logits = torch.zeros(n if "is" in kinds else 0, extractor.classes, device=device)

    def update(self, start: int, images: Tensor) -> None:
        """Add images start, start + 1, …, uint8 [B, C, H, W]. Raises `NonFiniteError`."""
        features, logits = self._extractor.with_logits(images)
        first = 0
        # Without a distance there are no parts.
        for stop, part in zip(self._stops, self._parts, strict=False):
            last = min(max(stop - start, 0), len(features))
            if last > first:
                part.update(features[first:last])
                first = last
        for rows, batch in ((self._features, features), (self._logits, logits)):
            rows[start : start + len(batch)] = batch[: max(0, len(rows) - start)]

    def merge(self, world: World) -> None:
        """Sum the statistics over ranks; every rank must call it, after its last image."""
        for part in self._parts:
            part.merge(world)
        for rows in (self._features, self._logits):
            if rows.numel():
                world.sum(rows)

    def values(self, real: Real) -> dict[str, Value]:
        """Return the metrics of the chosen kinds, by the names in `names.KINDS`."""
        metrics: dict[str, Value] = {}
        count = len(self._features)
        with torch.no_grad(), evaluation_precision(self._device):
            if self._parts:
                assert real.reference is not None
                seen, distances = FeatureStatistics(self._extractor.dim, self._device), []
                for part in self._parts:
                    seen.include(part)
                    distances.append(frechet(seen, real.reference))
                names = ("frechet_quarter", "frechet_half", "frechet")
                metrics |= zip(names, map(Value, distances, self._stops), strict=True)
                # With fewer images per feature the bias is not about 1/N: see `extrapolated`.
                straight = self._stops[0] >= STRAIGHT * self._extractor.dim
                limit = extrapolated(self._stops, distances) if straight else None
                metrics["frechet_infinite"] = Value(limit, None)
            if "kid" in self._kinds:
                assert real.features is not None
                mean, sd = kernel_distance(self._features, real.features) or (None, None)
                metrics["kid"] = Value(mean, count, sd)
            if "is" in self._kinds:
                mean, sd = inception_score(self._logits) or (None, None)
                metrics["inception_score"] = Value(mean, self._stops[-1], sd)
            if "pr" in self._kinds:
                assert real.features is not None
                precision, recall = precision_recall(self._features, real.features) or (None, None)
                metrics |= {"precision": Value(precision, count), "recall": Value(recall, count)}
        order = [name for names in KINDS.values() for name in names]
        return {name: metrics[name] for name in order if name in metrics}


def extrapolated(counts: list[int], distances: list[float]) -> float:
    """Return the Fréchet distance of infinitely many images: the value at 1/N = 0 of a straight
    line in 1/N (Chong & Forsyth 2020, arXiv 1911.07023, §3.2).

    The bias is about c/N with c depending on the model, so that equal N do not make it equal.
    Theirs is a fit through 15 random subsets; this one, by least squares as well, goes through the
    distances of these few. It is too low where the smallest count is not many times the length d of
    a feature vector: for Gaussians with d = 256 and a true distance of 5.4, counts up to 16·d gave
    5.0 and up to 4·d gave 3.5 (the distance itself 8.0 and 16.8).
    """
    return float(np.polyfit(1 / np.asarray(counts, float), np.asarray(distances, float), 1)[1])


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
