import pytest
import torch
from PIL import Image


@pytest.fixture(autouse=True)
def _repeatable(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.setenv("TUNEDIFF_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    """`folder("train/red/0.png", …)`: a folder with these images, each of the colour that its own folder names."""

    def made(*names):
        for name in names:
            path = tmp_path / "set" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            colour = path.parent.name if path.parent.name in ("red", "green", "blue") else "black"
            Image.new("RGB", (8, 8), colour).save(path)
        return str(tmp_path / "set")

    return made
