"""Load images as one uint8 tensor: the digits, CIFAR-10, or a folder or zip of files."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tunediff.data import sources
from tunediff.data.cache import cache_dir, locked, once
from tunediff.data.decoding import Pixels, decode_files, fit_all
from tunediff.data.items import Prepare, Uniform
from tunediff.data.knobs import Data

log = logging.getLogger(__name__)

_CACHE_VERSION = 3  # raise it when the same file would decode to other pixels


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """A set of images in memory, shared by all users in the process: do not write to it."""

    name: str
    """`data.name`, and the file or folder where there is one."""
    pixels: Tensor
    """uint8 [N, C, H, W], 0…255."""
    labels: Tensor | None
    """int64 [N], class numbers from 0; None without classes."""
    class_names: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    """(file, reason) of every file that was found and is not among the images."""
    digest: str
    """sha256 of shape and pixels, hex: equal for equal images in equal order."""

    @property
    def summary(self) -> list[str]:
        """Return lines about the set: how many images, what was skipped, and why."""
        side, reasons = self.pixels.shape[-1], dict[str, list[str]]()
        for name, reason in self.skipped:
            reasons.setdefault(reason, []).append(name)
        lines = [f"data: {len(self):,} images at {side}×{side} ({self.name})"]
        if self.skipped:
            named = "; ".join(
                f"{len(names):,} {reason}: {', '.join(names[:3])}{', …' * (len(names) > 3)}"
                for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1]))
            )
            total = len(self.skipped) + len(self)
            lines.append(f"skipped {len(self.skipped):,} of {total:,} files: {named}")
        return lines

    def __len__(self) -> int:
        return len(self.pixels)


def in_unit_range(flip: bool) -> Prepare:
    """Return the map of bytes to training images: float32 in [−1, 1]; `flip`: half mirrored."""

    def prepare(pixels: Tensor, uniform: Uniform) -> Tensor:
        # A copy, for a batch may be prepared again.
        batch = pixels.to(torch.float32, copy=True).div_(127.5).sub_(1.0)
        if not flip:
            return batch
        mirrored = (uniform("flip") < 0.5).to(batch.device, non_blocking=True)
        return torch.where(mirrored[:, None, None, None], batch.flip(-1), batch)

    return prepare


def load(data: Data) -> Images:
    """Return the images that `data` describes; the last two sets stay in memory.

    Raises `ConfigError` for an impossible path, split or download, or fewer than two images.
    """
    # Mirroring is the loader's: the set is the same.
    return load_source(dataclasses.replace(data, horizontal_flip=False), sources.find(data))


@functools.lru_cache(maxsize=2)
def load_source(data: Data, source: sources.Listing | Path | None) -> Images:
    """Load a set; `source`, from `sources.find`, is part of the key: files may have changed."""
    if source is None:
        return _digits(data)
    return _cifar10(data, source) if isinstance(source, Path) else _files(data, source)


def _images(
    name: str,
    pixels: Pixels,
    labels: npt.NDArray[np.int64] | None,
    class_names: Iterable[str] = (),
    skipped: Iterable[tuple[str, str]] = (),
) -> Images:
    pixels = np.ascontiguousarray(pixels)
    content = hashlib.sha256(repr(pixels.shape).encode())
    content.update(pixels.data)
    return Images(
        name=name,
        pixels=torch.from_numpy(pixels),
        labels=None if labels is None else torch.from_numpy(labels.astype(np.int64)),
        class_names=tuple(class_names),
        skipped=tuple(skipped),
        digest=content.hexdigest(),
    )


def _chosen(count: int, max_images: int | None) -> npt.NDArray[np.int64]:
    """Return the learned images' indices, ascending: all, or `max_images` of a fixed shuffle."""
    order = np.random.RandomState(0).permutation(count)
    return np.sort(order[:max_images]).astype(np.int64)


# ---- digits
def _digits(data: Data) -> Images:
    """Load scikit-learn's digits: grey levels 0…16, scaled to 0…255."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    chosen = _chosen(len(pixels), data.max_images)
    fitted = fit_all(pixels[chosen], data)
    names = [str(name) for name in digits.target_names]
    return _images("digits", fitted, digits.target[chosen], names)


# ---- CIFAR-10
def _cifar10(data: Data, root: Path) -> Images:
    """Load torchvision's CIFAR-10, downloaded into `root` where missing, with its checksums."""
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity

    parts = {"train": [True], "test": [False], "all": [True, False]}[data.split]

    def read(download: bool) -> list[Any]:
        return [CIFAR10(str(root), train=train, download=download) for train in parts]

    with locked(root / "cifar10"):
        try:
            try:
                sets = read(download=False)
            except RuntimeError:  # missing, damaged, or not unpacked yet
                if not check_integrity(str(root / CIFAR10.filename), CIFAR10.tgz_md5):
                    sources.require_cifar10_server(data)
                    log.info("downloading CIFAR-10 (163 MiB) into %s", root)
                sets = read(download=True)
        except (OSError, RuntimeError, EOFError, HTTPException) as error:
            sources.refuse_cifar10(data, error)
    pixels = np.concatenate([part.data for part in sets])  # [N, 32, 32, 3]
    labels = np.concatenate([np.asarray(part.targets) for part in sets])
    chosen = _chosen(len(pixels), data.max_images)
    fitted = fit_all(pixels[chosen], data)
    return _images("cifar10", fitted, labels[chosen], sets[0].classes)


# ---- image files
def _files(data: Data, listing: sources.Listing) -> Images:
    name = f"{data.name} {listing.path}"

    def read(path: Path) -> Images:
        with np.load(path, allow_pickle=False) as stored:
            texts = json.loads(str(stored["texts"]))
            labels = stored["labels"] if texts["class_names"] else None
            skipped = [(file, why) for file, why in texts["skipped"]]
            return _images(name, stored["pixels"], labels, texts["class_names"], skipped)

    def write(file: BinaryIO, images: Images) -> None:
        texts = {part: getattr(images, part) for part in ("class_names", "skipped")}
        labels = images.labels if images.labels is not None else torch.zeros(0, dtype=torch.int64)
        np.savez(file, pixels=images.pixels, labels=labels, texts=np.array(json.dumps(texts)))

    images = once(_cache(data, listing), read, lambda: _decode(name, data, listing), write)
    if len(images) < 2:
        shown = "; ".join(f"{name}: {reason}" for name, reason in images.skipped[:3])
        why = f"{len(images)} readable images; allowed: at least 2 (skipped: {shown})"
        sources.refuse("path", listing.path, why)
    return images


def _cache(data: Data, listing: sources.Listing) -> Path:
    setting = [_CACHE_VERSION, listing.stamp, data.split]
    setting += [data.image_size, data.channels, data.max_images]
    key = hashlib.sha256(json.dumps(setting).encode()).hexdigest()[:16]
    return cache_dir() / f"images-{key}.npz"


def _decode(name: str, data: Data, listing: sources.Listing) -> Images:
    """Decode the chosen files of a listing; those that cannot be decoded are noted as skipped."""
    chosen: list[int] = _chosen(len(listing.names), data.max_images).tolist()
    names = [listing.names[index] for index in chosen]
    pixels, reasons = decode_files(data, listing.path, names)
    readable = [index for index, why in enumerate(reasons) if not why]
    failed = [(name, why) for name, why in zip(names, reasons, strict=True) if why]
    labels = None
    if listing.labels is not None:
        labels = np.asarray([listing.labels[chosen[index]] for index in readable], np.int64)
    return _images(
        name,
        pixels[readable] if failed else pixels,
        labels,
        listing.class_names,
        sorted([*listing.skipped, *failed]),
    )
