"""Load images as one uint8 tensor: the digits, CIFAR-10, or a folder or zip of files, decoded and
fitted to one size and colour."""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import io
import json
import logging
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps
from torch import Tensor

from tunediff.core import machine
from tunediff.core.progress import Progress
from tunediff.data import sources
from tunediff.data.cache import cache_dir, locked, once
from tunediff.data.items import Prepare, Uniform
from tunediff.data.knobs import Data

PART = 256
"""Files that a thread decodes at a time."""
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")

Pixels = npt.NDArray[np.uint8]


def decode_files(
    data: Data, path: Path, names: Sequence[str]
) -> tuple[Pixels, npt.NDArray[np.bool_]]:
    """Decode files of a folder or zip: pixels, and which of the files hold an image.

    Raises `OSError` for a file that a disk or its permissions do not let read.
    """
    archive = zipfile.ZipFile(path) if path.is_file() else None
    shape = (len(names), data.channels, data.image_size, data.image_size)
    pixels, readable = np.zeros(shape, np.uint8), np.zeros(len(names), np.bool_)

    def decode(part: range) -> int:
        for index in part:
            try:
                name = names[index]
                content = archive.read(name) if archive else (path / name).read_bytes()
                with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
                    pixels[index] = _fit(image, data)
                readable[index] = True
            except Exception as error:  # of damaged files Pillow and zipfile raise nearly any
                # Of Pillow's errors about damaged files none has a number
                if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
                    raise
        return len(part)

    every = range(len(names))
    parts = [every[start : start + PART] for start in every[::PART]]
    work = Progress("reading image files", len(names), "files")
    # Pillow decodes without Python's lock
    with work as progress, ThreadPoolExecutor(machine.cores()) as pool:
        for count in pool.map(decode, parts):
            progress.more(count)
    return pixels, readable


def _fit(image: Image.Image, data: Data) -> Pixels:
    """Return a decoded file, uint8 [C, H, W]: upright, in `data`'s colours, resized, cropped."""
    if "exif" in image.info:
        image = ImageOps.exif_transpose(image)
    # 16 bits per pixel, of which Pillow's conversion would clip the upper half.
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    # A palette may hold transparency, which only this mode can express.
    if image.mode == "P":
        image = image.convert("RGBA")
    image = image.convert("RGB" if data.channels == 3 else "L")  # transparency is dropped
    size = (data.image_size, data.image_size)
    if image.size != size:
        image = ImageOps.fit(image, size, Image.Resampling.BICUBIC)
    return np.asarray(image, np.uint8).reshape(*size, -1).transpose(2, 0, 1)


def fit_all(pixels: Pixels, data: Data) -> Pixels:
    """Return uint8 [N, C, H, W] from [N, h, w] or [N, h, w, 3]."""
    if pixels.shape[1:] == (data.image_size, data.image_size, 3) and data.channels == 3:
        return pixels.transpose(0, 3, 1, 2)
    return np.stack([_fit(Image.fromarray(array), data) for array in pixels])


log = logging.getLogger(__name__)

_CACHE_VERSION = 4  # raise it when the same file would decode to other pixels

Decoded = tuple[Pixels, npt.NDArray[np.bool_]]
"""Pixels of files, and which of them hold an image."""


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
    skipped: tuple[str, ...]
    """Files that were found and hold no image."""
    digest: str
    """sha256 of shape and pixels, hex: equal for equal images in equal order."""

    @property
    def summary(self) -> list[str]:
        """Return lines about the set: how many images, what was skipped, and why."""
        side, count = self.pixels.shape[-1], len(self.skipped)
        lines = [f"data: {len(self):,} images at {side}×{side} ({self.name})"]
        if count:
            shown = ", ".join(self.skipped[:5]) + ", …" * (count > 5)
            lines.append(f"skipped {count:,} of {count + len(self):,} files, no images: {shown}")
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
    skipped: Iterable[str] = (),
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

    parts = {"train": [True], "test": [False], "all": [True, False]}[data.split]
    with locked(root / "cifar10"):
        if not sources.holds_cifar10(root):
            sources.require_cifar10_server(data)
            log.info("downloading CIFAR-10 (163 MiB) into %s", root)
        sets: list[Any] = [CIFAR10(str(root), train=train, download=True) for train in parts]
    pixels = np.concatenate([part.data for part in sets])  # [N, 32, 32, 3]
    labels = np.concatenate([np.asarray(part.targets) for part in sets])
    chosen = _chosen(len(pixels), data.max_images)
    fitted = fit_all(pixels[chosen], data)
    return _images("cifar10", fitted, labels[chosen], sets[0].classes)


# ---- image files
def _files(data: Data, listing: sources.Listing) -> Images:
    chosen = _chosen(len(listing.names), data.max_images)
    names = np.asarray(listing.names)[chosen]

    def read(path: Path) -> Decoded:
        with np.load(path, allow_pickle=False) as stored:
            return stored["pixels"], stored["readable"]

    pixels, readable = once(
        _cache(data, listing),
        read,
        lambda: decode_files(data, listing.path, names.tolist()),
        lambda file, decoded: np.savez(file, pixels=decoded[0], readable=decoded[1]),
    )
    skipped = sorted([*listing.skipped, *names[~readable].tolist()])
    if (count := int(readable.sum())) < 2:
        why = f"{count} readable images; allowed: at least 2 (skipped: {'; '.join(skipped[:3])})"
        sources.refuse("path", listing.path, why)
    if count < len(names):
        pixels, chosen = pixels[readable], chosen[readable]
    labels = None if listing.labels is None else np.asarray(listing.labels)[chosen]
    return _images(f"{data.name} {listing.path}", pixels, labels, listing.class_names, skipped)


def _cache(data: Data, listing: sources.Listing) -> Path:
    setting = [_CACHE_VERSION, listing.stamp, data.split]
    setting += [data.image_size, data.channels, data.max_images]
    key = hashlib.sha256(json.dumps(setting).encode()).hexdigest()[:16]
    return cache_dir() / f"images-{key}.npz"
