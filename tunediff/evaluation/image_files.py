"""Files that hold generated images: a sheet, an array or a folder. Imports torch late."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tunediff.config import ConfigError
from tunediff.config.knobs import refuse
from tunediff.core import text

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.distributed import World


def check_output(path: Path | None, *suffixes: str) -> None:
    """Refuse an --out that exists, or has a wrong suffix. Raises `ConfigError`."""
    if path is None:
        return
    ends = f"a name that ends in {' or '.join(suffixes)}, or a folder"
    shown = text.truncate(repr(str(path)), 60)
    refuse(path.suffix not in ("", *suffixes), f"--out: {shown} is not allowed; allowed: {ends}")
    if path.exists() and (path.suffix or not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"--out: {path} exists; allowed: a new file, or a new or empty folder")


class ImageStore:
    """Stores images as they are generated: in a file each, or all ranks' in one array."""

    def __init__(self, path: Path | None, n: int, world: World) -> None:
        """Prepare for `n` images of all ranks; a `path` without suffix is a folder."""
        self._path, self._count, self._world = path, n, world
        self._folder = path if path is not None and not path.suffix else None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._array: Tensor | None = None

    def add(self, start: int, images: Tensor) -> None:
        """Store images start, start + 1, …, uint8 [b, …]."""
        import torch

        if self._folder is not None:
            write_files(images, start, self._count, self._folder)
            return
        if self._array is None:
            self._array = torch.zeros(self._count, *images.shape[1:], dtype=torch.uint8)
        self._array[start : start + len(images)] = images.cpu()

    def gather(self) -> Tensor | None:
        """Return all images, uint8 [n, …] on the CPU, or None if written. All ranks call it."""
        import torch

        if self._folder is not None:
            return None
        # A rank without images, of more ranks than batches, learns the shape from the others.
        shapes = self._world.gather(None if self._array is None else tuple(self._array.shape))
        shape = next(shape for shape in shapes if shape is not None)
        array = torch.zeros(shape, dtype=torch.uint8) if self._array is None else self._array
        # Every rank filled in the rows of its images; the sum has all.
        return self._world.sum(array.to(self._world.device)).cpu()

    def write(self) -> None:
        """Write the file, if it is to be one. All ranks call it."""
        if (images := self.gather()) is not None and self._world.main and self._path is not None:
            write_images(images, self._path)


def write_images(images: Tensor, path: Path, columns: int = 8) -> None:
    """Write uint8 [n, C, H, W] as a sheet, or as arr_0 [n, H, W, C] of a .npz. Raises `OSError`."""
    import numpy as np

    from tunediff.core.files import write_atomically
    from tunediff.training.observer import image_grid

    if path.suffix == ".npz":
        array = images.permute(0, 2, 3, 1).numpy()
        write_atomically(path, lambda file: np.savez(file, array))
    else:
        image_grid(images, path, columns)


def write_files(images: Tensor, start: int, total: int, folder: Path) -> None:
    """Write 0000.png, …: images uint8 [b, C, H, W] from number `start` of `total` on."""
    from PIL import Image

    digits = max(4, len(str(total - 1)))
    for number, picture in enumerate(images.permute(0, 2, 3, 1).cpu().numpy(), start):
        image = Image.fromarray(picture.squeeze(2) if picture.shape[2] == 1 else picture)
        image.save(folder / f"{number:0{digits}}.png")
