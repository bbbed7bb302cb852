"""Decode image files, and fit images to one size and colour."""

from __future__ import annotations

import contextlib
import io
import zipfile
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from tunediff.core import machine
from tunediff.core.progress import Progress
from tunediff.data import fitting
from tunediff.data.knobs import Data

_LARGEST_FILE = 256 * 2**20  # bytes; an entry of a zip may claim any size
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")

Pixels = npt.NDArray[np.uint8]


def decode_files(
    data: Data, path: Path, names: list[str], unread: list[str]
) -> tuple[Pixels, list[fitting.Seen | str]]:
    """Decode files of a folder or zip: pixels, and what each file was or why it is skipped.

    Files that can perhaps be read another time are added to `unread`.
    """
    pixels = np.zeros((len(names), data.channels, data.image_size, data.image_size), np.uint8)
    archive = zipfile.ZipFile(path) if path.is_file() else None

    def decode(index: int) -> fitting.Seen | str:
        try:
            content = io.BytesIO(_content(archive, path, names[index]))
            with Image.open(content, formats=_FORMATS) as image:
                pixels[index] = _fit(image, data)
                return fitting.Seen.of(image)
        except Exception as error:  # a damaged file makes Pillow and zipfile raise nearly anything
            if fitting.is_temporary(error):
                unread.append(names[index])
            return fitting.reason(error)

    results = []
    pool = ThreadPool(machine.cores())  # Pillow and zlib release the interpreter lock
    work = Progress("reading image files", len(names), "files")
    with archive or contextlib.nullcontext(), pool, work as progress:
        for result in pool.imap(decode, range(len(names)), chunksize=8):
            results.append(result)
            progress.step()
    return pixels, results


def _content(archive: zipfile.ZipFile | None, path: Path, name: str) -> bytes:
    """Return the bytes of a file in a zip or folder. Raises `UnusableError`."""
    size = archive.getinfo(name).file_size if archive else (path / name).stat().st_size
    if not size:
        raise fitting.UnusableError("empty")
    if size > _LARGEST_FILE:
        raise fitting.UnusableError(f"larger than {_LARGEST_FILE >> 20} MiB")
    return archive.read(name) if archive else (path / name).read_bytes()


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
