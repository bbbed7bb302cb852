"""Describe how image files were changed to one size and colour. Imports no torch."""

from __future__ import annotations

import errno
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from tunediff.data.knobs import Data

MIN_SIDE = 4
"""Pixels that `data.image_size` takes at least."""
_TURNED = (5, 6, 7, 8)
"""Values of the EXIF tag 0x0112, orientation, that swap width and height (EXIF 2.3, 4.6.4)."""


class UnusableError(ValueError):
    """A file that is not decoded, with the reason."""


class Seen(NamedTuple):
    """Size and colours of an image file before it was resized and converted."""

    width: int
    height: int
    mode: str = "L"
    """Pillow's name for the kind of its pixels."""
    transparent: bool = False

    @classmethod
    def of(cls, image: Image.Image) -> Seen:
        """Describe an image that was opened and read."""
        width, height = image.size
        if "exif" in image.info and image.getexif().get(0x0112) in _TURNED:
            width, height = height, width
        transparent = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
        return cls(width, height, image.mode, transparent)


def reason(error: Exception) -> str:
    """Return why a file was skipped, as a phrase that follows a count: `3 cut short`."""
    message = str(error)
    if isinstance(error, UnusableError):
        return message
    if isinstance(error, UnidentifiedImageError):
        return "without an image inside (no PNG, JPEG, WebP or BMP)"
    if isinstance(error, FileNotFoundError):
        return "linked to a file that is not there"
    if isinstance(error, Image.DecompressionBombError):
        return "of too many pixels"
    if isinstance(error, zipfile.BadZipFile | zlib.error):
        return "damaged in the archive"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM):
        return "without permission to read"
    if isinstance(error, EOFError) or "truncated" in message or "Truncated" in message:
        return "cut short"
    return f"damaged ({message.splitlines()[0] if message else type(error).__name__})"


def is_temporary(error: Exception) -> bool:
    """Return whether a file may be readable later: permission, disk fault, lack of memory.

    Pillow's errors about damaged files have no number. A link to nothing may lead somewhere later.
    """
    if isinstance(error, OSError):
        return error.errno is not None and not isinstance(error, FileNotFoundError)
    return isinstance(error, MemoryError)


def notes(seen: Sequence[Seen], data: Data) -> list[str]:
    """Return sentences about the images that are cropped, resized or converted."""
    side, total, sentences = data.image_size, f"of {len(seen):,}", []
    sizes = [image[:2] for image in seen]
    if lost := [1 - min(size) / max(size) for size in sizes if size[0] != size[1]]:
        sentences.append(
            f"cropped: {len(lost):,} {total} are not square and lose their edges, up to"
            f" {max(lost):.0%} of a side"
        )
    if changed := [size for size in sizes if min(size) != side]:
        by_area = sorted(changed, key=lambda size: (size[0] * size[1], size))
        ends = dict.fromkeys((by_area[0], by_area[-1]))
        range_ = " … ".join(f"{width}×{height}" for width, height in ends)
        sentences.append(f"resized: {len(changed):,} {total}, from {range_} to {side}×{side}")
    if small := [min(size) for size in changed if min(size) < side]:
        least = max(MIN_SIDE, min(small))
        smaller = sum(image < least for image in small)
        hint = f"data.image_size={least} enlarges {f'{smaller:,} still' if smaller else 'none'}"
        sentences.append(
            f"WARNING: enlarged: {len(small):,} {total} are smaller than {side} pixels and become"
            f" blurred; {hint}"
        )
    if kinds := Counter(kind for image in seen for kind in _conversions(image, data.channels)):
        counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.most_common())
        sentences.append(f"converted: {counts}")
    return sentences


def _conversions(image: Seen, channels: int) -> Iterator[str]:
    grey = image.mode in ("1", "L", "LA") or image.mode.startswith(("I", "F"))
    if image.mode.startswith("I"):
        yield "of 16 bits to 8"
    if image.transparent:
        yield "without their transparency"
    if image.mode in ("P", "PA"):
        yield "of a palette"
    elif grey and channels == 3:
        yield "grey to RGB"
    elif not grey and channels == 1:
        yield "colour to grey"
    elif image.mode not in ("RGB", "RGBA") and not grey:
        yield f"{image.mode} to RGB"
