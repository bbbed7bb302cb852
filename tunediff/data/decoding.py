"""Decode image files, and fit images to one size and colour. Imports no torch."""

from __future__ import annotations

import errno
import io
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from tunediff.core import machine
from tunediff.core.progress import Progress
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
