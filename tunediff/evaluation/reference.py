"""The real images' side of every distance, computed once per set, extractor and machine."""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tunediff.data.cache import cache_dir, keep, locked
from tunediff.data.images import Images
from tunediff.evaluation.distance import FeatureStatistics, Reference
from tunediff.evaluation.features import Extractor

log = logging.getLogger(__name__)

KID_FEATURES = 2000
"""Real images whose features are kept for the kernel distance."""
_VERSION = 1  # raise it when the same images and extractor would give other numbers


def reference(images: Images, extractor: Extractor, device: torch.device | str, batch_size: int) -> Reference:
    """Statistics of all `images`, on `device`: read from the cache folder, or computed and put there."""
    path = cache_path(images, extractor)
    with locked(path):
        found = _read(path, extractor.dim)
        if found is None:
            found = _compute(images, extractor, device, batch_size).to("cpu")
            arrays = {name: getattr(found, name).numpy() for name in ("mean", "cov", "root", "features")}
            keep(path, lambda file: np.savez(file, count=np.int64(found.count), **arrays))
    return found.to(device)


def real_features(
    images: Images, extractor: Extractor, device: torch.device | str, batch_size: int, count: int
) -> Tensor:
    """Features float32 [≤ count, d], on `device`, of the first `count` images of a fixed shuffle.

    Read from the cache folder, or computed and put there.
    """
    chosen = _shuffled(len(images))[:count]
    path = cache_path(images, extractor, f"features{len(chosen)}")
    with locked(path):
        found = _read_features(path, len(chosen), extractor.dim)
        if found is None:
            log.info("features of %d real images with %s", len(chosen), extractor.name)
            parts = torch.split(chosen, batch_size)
            found = torch.cat([extractor(images.pixels[part].to(device)).float() for part in parts]).cpu()
            array = found.numpy()
            keep(path, lambda file: np.savez(file, features=array))
    return found.to(device)


def cache_path(images: Images, extractor: Extractor, kind: str = "reference") -> Path:
    """The file for this reference: its name holds everything the numbers depend on."""
    parts = [images.digest[:16], str(len(images)), extractor.name, extractor.digest[:16], str(_VERSION)]
    return cache_dir() / f"{kind}-{'-'.join(parts)}.npz"


def _shuffled(count: int) -> Tensor:
    """Numbers of all images in an order that never changes: files are sorted by class."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def _compute(images: Images, extractor: Extractor, device: torch.device | str, batch_size: int) -> Reference:
    log.info("features of %d real images with %s", len(images), extractor.name)
    statistics = FeatureStatistics(extractor.dim, device)
    kept = torch.zeros(len(images), dtype=torch.bool)
    kept[_shuffled(len(images))[:KID_FEATURES]] = True
    features = []
    for batch, keeps in zip(torch.split(images.pixels, batch_size), torch.split(kept, batch_size), strict=True):
        found = extractor(batch.to(device))
        statistics.update(found)
        features.append(found[keeps.to(device)])
    return Reference.of(statistics, torch.cat(features).float())


def _read(path: Path, dim: int) -> Reference | None:
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as stored:
            found = Reference(
                mean=torch.from_numpy(stored["mean"]),
                cov=torch.from_numpy(stored["cov"]),
                root=torch.from_numpy(stored["root"]),
                count=int(stored["count"]),
                features=torch.from_numpy(stored["features"]),
            )
        if found.cov.shape != (dim, dim):
            raise ValueError(f"holds features of another length than {dim}")
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        log.warning("%s: cannot be read and is computed again: %s", path, error)
        return None
    return found


def _read_features(path: Path, count: int, dim: int) -> Tensor | None:
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as stored:
            found = torch.from_numpy(stored["features"])
        if found.shape != (count, dim):
            raise ValueError(f"holds {list(found.shape)} numbers, not {[count, dim]}")
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        log.warning("%s: cannot be read and is computed again: %s", path, error)
        return None
    return found
