"""The section `data` of workloads that learn from images. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from tunediff.config.knobs import Bool, File, Fixed, Int, Refusal, Str, section

DIGITS = {
    "data.name": "digits",
    "data.image_size": 8,
    "data.channels": 1,
    "data.horizontal_flip": False,
    "data.split": "all",
}
"""Knobs of the embedded digits."""


@section
class Data:
    """Which real images are learned."""

    name: Annotated[Literal["digits", "cifar10", "images"], Fixed()] = "cifar10"
    """`digits`: 1,797 images of 8×8 that ship inside scikit-learn. `cifar10`: torchvision's copy,
    downloaded on first use. `images`: any folder or `.zip` of PNG/JPEG files, flat or in class
    folders, given by `data.path`."""
    path: Annotated[Str | None, Fixed(), File()] = None
    """Folder or `.zip` with the images (`images`), or where a copy of CIFAR-10 is, or will be
    stored (`cifar10`)."""
    split: Annotated[Literal["train", "test", "all"], Fixed()] = "train"
    """Part to train on. Without the folders `train/` and `test/` every image belongs to `train`."""
    image_size: Annotated[Int, Ge(4), Le(1024), Fixed()] = 32
    """Side of the square images in pixels; larger or smaller files are resized (bicubic, centre
    crop)."""
    channels: Annotated[Literal[1, 3], Fixed()] = 3
    """Channels of an image: 1 grey, 3 RGB; files are converted."""
    horizontal_flip: Bool = True
    """Mirror each image left to right with probability ½. Wrong for digits and text."""
    max_images: Annotated[Annotated[Int, Ge(2)] | None, Fixed()] = None
    """Learn only the first so many images of a fixed shuffle; null: all."""

    def check(self, config: Any) -> None:
        if self.name == "images" and self.path is None:
            raise Refusal(
                "data.path", "data.name = images needs a folder or .zip of images: data.path=FOLDER"
            )
        if self.name == "digits" and (self.channels, self.horizontal_flip) != (1, False):
            name = "data.channels" if self.channels != 1 else "data.horizontal_flip"
            why = "digits are grey and a mirrored digit is not a digit"
            raise Refusal(name, f"{why} (data.channels = 1, horizontal_flip = false)")
