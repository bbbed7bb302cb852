"""Decode image files, and fit images to one size and colour. Imports no torch."""

from __future__ import annotations

import errno
import io
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from tunediff.core import machine
from tunediff.core.progress import Progress
from tunediff.data.knobs import Data

PART = 256
"""Files that are decoded at a time; more are divided among processes, one on each core."""
_LARGEST_FILE = 256 * 2**20  # bytes; an entry of a zip may claim any size
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")

Pixels = npt.NDArray[np.uint8]


class UnusableError(ValueError):
    """A file that is not decoded, with the reason."""


def decode_files(data: Data, path: Path, names: Sequence[str]) -> tuple[Pixels, list[str]]:
    """Decode files of a folder or zip: pixels, and why each file is skipped, '' if it is not.

    Small files cost more in Python than in Pillow, so that threads would wait for each other: other
    processes decode. Raises `OSError` for a file that a disk or its permissions do not let read.
    """
    parts = [names[start : start + PART] for start in range(0, len(names), PART)]
    count = min(machine.cores(), len(parts))
    pixels = np.empty((len(names), data.channels, data.image_size, data.image_size), np.uint8)
    reasons = [""] * len(names)
    with Progress("reading image files", len(names), "files") as progress:

        def take(first: int) -> None:
            """Take every `count`th part from a process of its own, or decode it here."""
            mine = range(first, len(parts), count)
            job = (data, path, [parts[index] for index in mine])
            decoded = _elsewhere(job) if count > 1 else _decoded(*job)
            for index, (of_part, why) in zip(mine, decoded, strict=True):
                rows = slice(index * PART, index * PART + len(why))
                pixels[rows], reasons[rows] = of_part, why
                progress.more(len(why))

        with ThreadPoolExecutor(count) as pool:
            for _ in pool.map(take, range(count)):
                pass
    return pixels, reasons


def _elsewhere(job: tuple[Data, Path, list[Sequence[str]]]) -> Iterator[tuple[Pixels, list[str]]]:
    """Yield what `_decoded` yields, from a process that shares nothing with this one."""
    command = [sys.executable, "-m", __name__]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pickle.dump(job, process.stdin)
        process.stdin.close()
        for _ in job[2]:
            answer = pickle.load(process.stdout)
            if isinstance(answer, Exception):
                raise answer
            yield answer


def _decoded(
    data: Data, path: Path, parts: Iterable[Sequence[str]]
) -> Iterator[tuple[Pixels, list[str]]]:
    """Yield pixels and reasons of each part of the files."""
    archive = zipfile.ZipFile(path) if path.is_file() else None
    side = data.image_size
    for names in parts:
        pixels, reasons = np.zeros((len(names), data.channels, side, side), np.uint8), list[str]()
        for index, name in enumerate(names):
            try:
                content = io.BytesIO(_content(archive, path, name))
                with Image.open(content, formats=_FORMATS) as image:
                    pixels[index] = _fit(image, data)
                reasons.append("")
            except Exception as error:  # of damaged files Pillow and zipfile raise nearly any
                # Of Pillow's errors about damaged files none has a number
                if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
                    raise
                reasons.append(_reason(error))
        yield pixels, reasons


def _reason(error: Exception) -> str:
    """Return why a file was skipped, as a phrase that follows a count: `3 cut short`."""
    message = str(error)
    if isinstance(error, UnidentifiedImageError):  # names an object in memory
        return "without an image inside (no PNG, JPEG, WebP or BMP)"
    if "truncated" in message.lower():  # names numbers of bytes
        return "cut short"
    if isinstance(error, UnusableError):
        return message
    return f"damaged ({type(error).__name__})"


def _content(archive: zipfile.ZipFile | None, path: Path, name: str) -> bytes:
    """Return the bytes of a file in a zip or folder. Raises `UnusableError`."""
    size = archive.getinfo(name).file_size if archive else (path / name).stat().st_size
    if not size:
        raise UnusableError("empty")
    if size > _LARGEST_FILE:
        raise UnusableError(f"larger than {_LARGEST_FILE >> 20} MiB")
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


def main() -> None:
    """Decode the files of the job on stdin; write each part to stdout."""
    try:
        for part in _decoded(*pickle.load(sys.stdin.buffer)):
            pickle.dump(part, sys.stdout.buffer, protocol=5)
            sys.stdout.buffer.flush()
    except Exception as error:  # whoever asked raises it
        pickle.dump(error, sys.stdout.buffer)


if __name__ == "__main__":
    main()
