"""What a training leaves in its folder: points in the journal, pictures and tables beside it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.helpers import digits as baseline
from tunediff.data import images as data
from tunediff.data.images import Images
from tunediff.training.observer import image_grid


@pytest.fixture
def digits() -> Images:
    return data.load(baseline().data)


def test_grid_is_large_enough_to_read(digits: Images, tmp_path: Path) -> None:
    image_grid(digits.pixels[:20], tmp_path / "new" / "grid.png")
    with Image.open(tmp_path / "new" / "grid.png") as sheet:
        assert sheet.size == (8 * 34 + 2, 3 * 34 + 2)
        assert sheet.mode == "L"
        cell = np.asarray(sheet)[2:34, 36:68]
    assert (cell[::4, ::4] == digits.pixels[1, 0].numpy()).all()
    assert (cell[3::4, 3::4] == digits.pixels[1, 0].numpy()).all()


def test_grid_of_colours_and_few_images(tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (3, 3, 40, 40), dtype=torch.uint8)
    image_grid(pixels, tmp_path / "grid.png", scale=2)
    with Image.open(tmp_path / "grid.png") as sheet:
        assert sheet.size == (3 * 82 + 2, 84)
        assert sheet.getpixel((2, 2)) == tuple(pixels[0, :, 0, 0].tolist())


@pytest.mark.parametrize("bad", [torch.zeros(2, 1, 4, 4), torch.zeros(0, 1, 4, 4, dtype=torch.uint8)])
def test_grid_refuses_what_is_no_image(bad: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="images must be uint8"):
        image_grid(bad, tmp_path / "grid.png")
    assert not list(tmp_path.iterdir())
