"""Statistics and features of the real images, computed once per set, extractor and machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tunediff.core.progress import Progress
from tunediff.data.cache import cache_dir, once
from tunediff.data.images import Images
from tunediff.evaluation.distance import FeatureStatistics, Reference
from tunediff.evaluation.features import Extractor

KID_FEATURES = 2000
"""Real images whose features are kept for the kernel distance."""
_VERSION = 1  # raise it when the same images and extractor would give other numbers


def reference(
    images: Images, extractor: Extractor, device: torch.device | str, batch_size: int
) -> Reference:
    """Return the statistics of all `images`, on `device`, from the cache or computed."""

    def read(path: Path) -> Reference:
        stored = _read(path, min(len(images), KID_FEATURES), extractor.dim)
        return Reference(count=int(stored.pop("count")), **stored)

    def compute() -> Reference:
        statistics = FeatureStatistics(extractor.dim, device)
        selected = torch.zeros(len(images), dtype=torch.bool)
        selected[_shuffled(len(images))[:KID_FEATURES]] = True
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
