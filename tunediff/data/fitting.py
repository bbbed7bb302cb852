"""What is done to image files to make them images of one size and colour, in words. Imports no torch."""

from __future__ import annotations

import errno
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from tunediff.data.knobs import Data

LEAST_SIDE = 4
"""Pixels that `data.image_size` takes at least."""
_TURNED = (5, 6, 7, 8)
"""Values of the EXIF tag 0x0112, orientation, that swap width and height (EXIF 2.3, 4.6.4)."""


class UnusableError(ValueError):
    """A file that is not to be decoded, with the reason."""


class Seen(NamedTuple):
    """A file as it was before it was fitted."""

    width: int
    height: int
    mode: str = "L"
    """Pillow's name for the kind of its pixels."""
    transparent: bool = False

    @classmethod
    def of(cls, image: Image.Image) -> Seen:
        """An image that was opened and read."""
        width, height = image.size
        if "exif" in image.info and image.getexif().get(0x0112) in _TURNED:
            width, height = height, width
        return cls(width, height, image.mode, image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info)


def reason(error: Exception) -> str:
    """Why a file is no image among the others, as its owner would say it."""
    said = str(error)
    if isinstance(error, UnusableError):
        return said
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
    if isinstance(error, EOFError) or "truncated" in said or "Truncated" in said:
        return "cut short"
    return f"damaged ({said.splitlines()[0] if said else type(error).__name__})"


def notes(seen: Sequence[Seen], data: Data) -> list[str]:
    """Sentences on the images that lose their edges, change their size and their colours."""
    side, count, said = data.image_size, f"of {len(seen):,}", []
    if lost := [1 - min(one[:2]) / max(one[:2]) for one in seen if one.width != one.height]:
        said.append(
            f"cropped: {len(lost):,} {count} are not square and lose their edges, up to {max(lost):.0%} of a side"
        )
    if changed := sorted({one[:2] for one in seen if min(one[:2]) != side}, key=lambda size: size[0] * size[1]):
        resized = sum(min(one[:2]) != side for one in seen)
        sizes = " … ".join(f"{width}×{height}" for width, height in dict.fromkeys((changed[0], changed[-1])))
        said.append(f"resized: {resized:,} {count}, from {sizes} to {side}×{side}")
    if small := [min(one[:2]) for one in seen if min(one[:2]) < side]:
        least = max(LEAST_SIDE, min(small))
        smaller = sum(one < least for one in small)
        hint = f"data.image_size={least} enlarges {f'{smaller:,} still' if smaller else 'none'}"
        said.append(
            f"WARNING: enlarged: {len(small):,} {count} are smaller than {side} pixels and become blurred; {hint}"
        )
    if kinds := Counter(kind for one in seen for kind in _conversions(one, data.channels)):
        said.append(f"converted: {', '.join(f'{number:,} {kind}' for kind, number in kinds.most_common())}")
    return said


def _conversions(one: Seen, channels: int) -> Iterator[str]:
    grey = one.mode in ("1", "L", "LA") or one.mode.startswith(("I", "F"))
    if one.mode.startswith("I"):
        yield "of 16 bits to 8"
    if one.transparent:
        yield "without their transparency"
    if one.mode in ("P", "PA"):
        yield "of a palette"
    elif grey and channels == 3:
        yield "grey to RGB"
    elif not grey and channels == 1:
        yield "colour to grey"
    elif one.mode not in ("RGB", "RGBA") and not grey:
        yield f"{one.mode} to RGB"
