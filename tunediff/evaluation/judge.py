"""Compare generated images with real ones: at every evaluation of a training (`Judge`), or many of
a finished model by all metrics (`Quality`). Statistics and features of the real images are computed
once per set, extractor and machine. Evaluations draw in the fastest number format that scores as
float32 does (`choose_format`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from tunediff.core.progress import Progress
from tunediff.data.cache import cache_dir, once
from tunediff.data.images import Images
from tunediff.distributed import World
from tunediff.evaluation.distance import (
    FeatureStatistics,
    NonFiniteError,
    Reference,
    frechet,
    kernel_distance,
    refuse_non_finite,
)
from tunediff.evaluation.features import Extractor
from tunediff.evaluation.knobs import KINDS
from tunediff.training.number_formats import Format, FormatChoice
from tunediff.training.precision import evaluation_precision

SHARE = 0.1
"""Part of a score's noise that a format may change it by."""
_PARTS = 8  # of the images, for the jackknife
GRID_IMAGES = 64
KID_IMAGES = 2000
"""Images of each side whose features the kernel distance of a training compares."""
FEATURES = 10_000
"""Most feature vectors kept of a set, for metrics of pairs: KID, precision, recall."""
SPLITS = 10
NEIGHBOURS = 3
_VERSION = 1  # raise it when the same images and extractor would give other numbers


# ---- the real images
def reference(
    images: Images, extractor: Extractor, device: torch.device | str, batch_size: int
) -> Reference:
    """Return the statistics of all `images`, on `device`, from the cache or computed."""

    def read(path: Path) -> Reference:
        stored = _read(path, min(len(images), KID_IMAGES), extractor.dim)
        return Reference(count=int(stored.pop("count")), **stored)

    def compute() -> Reference:
        statistics = FeatureStatistics(extractor.dim, device)
        selected = torch.zeros(len(images), dtype=torch.bool)
        selected[_shuffled(len(images))[:KID_IMAGES]] = True
        features = []
        with Progress(f"features of real images ({extractor.name})", len(images)) as progress:
            parts = (torch.split(rows, batch_size) for rows in (images.pixels, selected))
            for batch, of_batch in zip(*parts, strict=True):
                batch_features = extractor(batch.to(device))
                statistics.update(batch_features)
                features.append(batch_features[of_batch.to(device)])
                progress.more(len(batch))
        return Reference.of(statistics, torch.cat(features).float()).to("cpu")

    path = cache_path(images, extractor)
    return once(path, read, compute, lambda file, new: np.savez(file, **vars(new))).to(device)


def real_features(
    images: Images, extractor: Extractor, device: torch.device | str, batch_size: int, count: int
) -> Tensor:
    """Return features float32 [≤ count, d] of the first `count` of a fixed shuffle; cached."""
    indices = _shuffled(len(images))[:count]

    def compute() -> Tensor:
        features = []
        with Progress(f"features of real images ({extractor.name})", len(indices)) as progress:
            for part in torch.split(indices, batch_size):
                features.append(extractor(images.pixels[part].to(device)).float())
                progress.more(len(part))
        return torch.cat(features).cpu()

    path = cache_path(images, extractor, f"features{len(indices)}")
    return once(
        path,
        lambda path: _read(path, len(indices), extractor.dim)["features"],
        compute,
        lambda file, features: np.savez(file, features=features),
    ).to(device)


def cache_path(images: Images, extractor: Extractor, kind: str = "reference") -> Path:
    """Return the cache file of this reference; its name holds everything the numbers depend on."""
    of_images = f"{images.digest[:16]}-{len(images)}"
    of_extractor = f"{extractor.name}-{extractor.digest[:16]}"
    return cache_dir() / f"{kind}-{of_images}-{of_extractor}-{_VERSION}.npz"


def _shuffled(count: int) -> Tensor:
    """Return the indices of all images in a fixed random order: files are sorted by class."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def _read(path: Path, count: int, dim: int) -> dict[str, Tensor]:
    """Read a cache file. Raises ValueError if it does not hold `count` features of length `dim`."""
    with np.load(path, allow_pickle=False) as stored:
        tensors = {name: torch.from_numpy(array) for name, array in stored.items()}
    if (shape := list(tensors["features"].shape)) != [count, dim]:
        raise ValueError(f"holds {shape} numbers, not {[count, dim]}")
    return tensors


# ---- in a training
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

    def __call__(self, batches: Iterable[Tensor]) -> Distances:
        """Return the distances of this rank's images uint8 [b, C, H, W] and others' to real ones.

        All batches but the last are of one size, and rank r's are numbers r, r + ranks, …: then the
        result does not depend on the number of ranks beyond rounding. They are drawn in float32 and
        without gradients. Raises, on all ranks at once, `NonFiniteError` if features are not finite
        or `batches` raises it.
        """
        world = self._world
        statistics, images, features = self._of_rank(batches)
        statistics.merge(world)
        distance = frechet(statistics, self.reference)
        self.last_images = _by_number(world.gather(images))[:GRID_IMAGES]
        first = _by_number(world.gather(features))[:KID_IMAGES].to(world.device)
        kid = kernel_distance(first, self.reference.features)
        return {
            "frechet": world.agree(distance),
            "kid": None if kid is None else world.agree(kid[0]),
            "evaluation_images": statistics.count,
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


# ---- of a finished model
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
        """Read them from the cache folder or compute them; `kinds` are keys of `knobs.KINDS`."""
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
        """`n` of at least 8; `kinds` are keys of `knobs.KINDS`."""
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
        """Return the metrics of the chosen kinds, by the names in `knobs.KINDS`."""
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


# ---- number formats
class Drawn(NamedTuple):
    """What a network gives in one format, from the same noise as in the others."""

    features: Tensor
    """float32 [n, d] of generated images."""
    errors: Tensor
    """float64 [m]: the validation errors of a batch; m = 0 without a validation."""
    seconds: float


def choose_format(
    draw: Callable[[Format], Drawn], among: Sequence[Format], reference: Reference, images: int
) -> FormatChoice:
    """Return the fastest format whose scores differ from float32's by less than `SHARE` of their
    noise; `images`: N of the evaluations, which a score's noise falls with.

    The noise is that of the images drawn, which a training's seeds add to: of the Fréchet distance
    by a jackknife over parts of them (Efron & Stein 1981), of the validation loss its standard
    error. A format that gives numbers that are not finite is left out.
    """
    exact = draw("fp32")
    scores, noise = scores_of(exact, reference), noise_of(exact, reference, images)
    seconds: dict[str, float] = {"fp32": exact.seconds}
    shifts: dict[str, float] = {"fp32": 0.0}
    for name in among:
        if name == "fp32":
            continue
        try:
            drawn = draw(name)
            found = scores_of(drawn, reference)
        except NonFiniteError:
            continue
        differences = [abs(a - b) for a, b in zip(found, scores, strict=True)]
        relative = [a / max(b, 1e-12) for a, b in zip(differences, noise, strict=True)]
        seconds[name], shifts[name] = drawn.seconds, max(relative)
    allowed = [name for name in among if shifts.get(name, SHARE) < SHARE]
    fastest = min(allowed, key=seconds.__getitem__)
    return {"precision": fastest, "seconds": seconds, "shifts": shifts}


def scores_of(drawn: Drawn, reference: Reference) -> list[float]:
    """Return the Fréchet distance and, if there are errors, their mean. Raises NonFiniteError."""
    if not torch.isfinite(drawn.errors).all():
        raise NonFiniteError("non-finite errors on the validation images")
    statistics = FeatureStatistics(drawn.features.shape[1], drawn.features.device)
    statistics.update(drawn.features)
    means = [drawn.errors.mean().item()] if len(drawn.errors) else []
    return [frechet(statistics, reference), *means]


def noise_of(drawn: Drawn, reference: Reference, images: int) -> list[float]:
    """Return the standard deviation of each of the scores, of an evaluation of `images`."""
    parts, left_out = drawn.features.chunk(_PARTS), []
    for part in range(len(parts)):
        rest = torch.cat([*parts[:part], *parts[part + 1 :]])
        left_out.append(scores_of(drawn._replace(features=rest), reference)[0])
    spread = torch.tensor(left_out, dtype=torch.float64).std(correction=0).item()
    deviation = spread * math.sqrt(len(parts) - 1)
    of_distance = deviation * math.sqrt(len(drawn.features) / images)
    errors = drawn.errors
    of_means = [(errors.std() / math.sqrt(len(errors))).item()] if len(errors) else []
    return [of_distance, *of_means]
