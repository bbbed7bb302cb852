"""Files that hold generated images. Imports torch late."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tunediff.config import ConfigError
from tunediff.config.knobs import refuse
from tunediff.core import text

if TYPE_CHECKING:
    from torch import Tensor


def check_output(path: Path | None, suffix: str) -> None:
    """Refuse an --out that exists, or has a wrong suffix. Raises `ConfigError`."""
    if path is None:
        return
    shown = text.truncate(repr(str(path)), 60)
    allowed = f"a name that ends in {suffix}, or a folder"
    refuse(path.suffix not in ("", suffix), f"--out: {shown} is not allowed; allowed: {allowed}")
    if path.exists() and (path.suffix or not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"--out: {path} exists; allowed: a new file, or a new or empty folder")


def write_files(images: Tensor, start: int, total: int, folder: Path) -> None:
    """Write 0000.png, …: images uint8 [b, C, H, W] from number `start` of `total` on."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    digits = max(4, len(str(total - 1)))
    for number, picture in enumerate(images.permute(0, 2, 3, 1).cpu().numpy(), start):
        image = Image.fromarray(picture.squeeze(2) if picture.shape[2] == 1 else picture)
        image.save(folder / f"{number:0{digits}}.png")
