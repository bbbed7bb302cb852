"""What a training leaves in its folder: points in the journal, pictures and tables beside it."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import tunediff
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


# --------------- the room trains anything: it knows nothing of a workload, and one file alone speaks to other processes
PACKAGE = Path(tunediff.__file__).parent
WORDS = ("noise", "noisy", "timestep", "u-net", "unet", "fid", "frechet", "fréchet", "diffusion", "denois")


def sources(*rooms):
    return [path for room in rooms for path in sorted((PACKAGE / room).rglob("*.py"))]


def parts(word):
    """`step_noise`, `UNet` and `test-FID` in the parts they are made of, and whole."""
    pieces = re.findall(r"[A-ZÀ-Ý]?[a-zà-ÿ]+|[A-ZÀ-Ý]+", word)
    return {word.lower(), *(piece.lower() for piece in pieces)}


def test_training_has_no_word_of_a_workload():
    for path in sources("training"):
        words = {part for word in re.findall(r"[\w-]+", path.read_text()) for part in parts(word)}
        assert {word for word in words if word.startswith(WORDS)} <= {"fidelity"}, path


def collectives(tree):
    """Names of torch.distributed that a file uses, but those that say who is there or begin and end the group."""
    allowed = {"init_process_group", "destroy_process_group", "is_available", "is_initialized", "is_nccl_available"}
    allowed |= {"get_backend"}
    names = {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "torch.distributed"}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            yield from (alias.name for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names and node.attr not in allowed:
            yield node.attr


ENGINES = {"default_hooks", "init_device_mesh", "FSDPModule", "MixedPrecisionPolicy", "fully_shard", "DTensor",
           "distribute_tensor", "PipelineStage", "Schedule1F1B", "ScheduleGPipe"}  # fmt: skip
"""What torch has of parallel strategies: only `training/strategies` makes them."""


def test_only_world_speaks_to_other_processes():
    for path in {*sources(".")} - {PACKAGE / "distributed.py"}:
        allowed = ENGINES if path.parent == PACKAGE / "training" / "strategies" else set()
        assert set(collectives(ast.parse(path.read_text()))) <= allowed, path
