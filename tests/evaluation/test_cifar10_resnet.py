"""The extractor that our own classifier workload has trained: what ships, and what `evaluation.weights_path` may name."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers import commands_in_this_process
from tunediff import config as cfg
from tunediff import train
from tunediff.config import ConfigError
from tunediff.data.knobs import Data
from tunediff.evaluation import features, weights
from tunediff.evaluation.knobs import Evaluation


def of(path: Path | None = None) -> Evaluation:
    return Evaluation(extractor="cifar10-resnet", weights_path=None if path is None else str(path))


@pytest.fixture(scope="module")
def shipped() -> features.Resnet:
    return features.Resnet(weights.trained(of()), "cpu")


def waves(side: int = 32) -> Tensor:
    """uint8 [6, 3, side, side]: waves of several lengths, directions and colours, the same at every side."""
    y, x = torch.meshgrid(*[(torch.arange(side) + 0.5) / side] * 2, indexing="ij")
    turns = torch.tensor([[1, 0], [0, 2], [1, 1], [2, -1], [3, 2], [0, 4]]).double()
    phases = 2 * math.pi * (turns[:, :1, None] * y + turns[:, 1:, None] * x)
    colours = torch.stack([torch.sin(phases + shift) for shift in (0.0, 1.0, 2.5)], 1)
    return (127.5 + 120 * colours).round().to(torch.uint8)


# -------------------------------------------------------------------------------------------------------- what ships
def test_the_shipped_file_says_how_good_it_is(shipped: features.Resnet) -> None:
    with safe_open(weights.SHIPPED, "np") as file:
        about = file.metadata()
    config, result = json.loads(about["config"]), json.loads(about["result"])
    assert 0.8 <= result["accuracy"] < 1, "of held-out images"
    assert sum(tensor.numel() for tensor in load_file(weights.SHIPPED).values()) < 2e6
    assert shipped.label == f"FD (cifar10-resnet, {str(result['accuracy'])[2:4]} %)"
    assert shipped.digest == hashlib.sha256(weights.SHIPPED.read_bytes()).hexdigest()
    assert (shipped.name, shipped.dim, shipped.classes) == ("cifar10-resnet", 128, 10)
    assert weights.length(of(), 32) == shipped.dim
    assert (config["model.width"], config["data.split"], result["train_s"] > 60) == (16, "train", True)
    assert json.loads(about["environment"])["versions"]["torch"]
    assert not any(str(value).startswith("/") for value in config.values()), "no path of the machine it was made on"


def test_features_are_those_that_were_recorded(shipped: features.Resnet) -> None:
    """Anything that changes them, a resize or a scale of the pixels, would make old distances wrong in silence."""
    found = shipped(waves())
    assert (found.shape, found.dtype, found.requires_grad) == ((6, 128), torch.float32, False)
    means = [0.220175, 0.353866, 0.191391, 0.225373, 0.293531, 0.272597]
    assert found.mean(1).tolist() == pytest.approx(means, rel=1e-4)
    assert found[2, :5].tolist() == pytest.approx([0.188135, 0.02045, 0.0843963, 0.069171, 0.190372], rel=1e-3)
    means = [0.222171, 0.355258, 0.192305, 0.224844, 0.287904, 0.271812]
    assert shipped(waves(16)).mean(1).tolist() == pytest.approx(means, rel=1e-4)


def test_features_do_not_depend_on_the_batch_or_the_trial(
    shipped: features.Resnet, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = waves().repeat(50, 1, 1, 1)  # more than are extracted at once
    whole, logits = shipped.with_logits(images)
    assert logits.shape == (300, 10)
    assert torch.allclose(whole[254:259], shipped(images[254:259]), atol=1e-5)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(shipped(images), whole)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("side", [16, 24, 64])
def test_other_sides_are_resized_as_pillow_does_and_grey_becomes_rgb(shipped: features.Resnet, side: int) -> None:
    """Its bicubic filter is antialiased too; it rounds to bytes, which is what may differ."""
    images = waves(side)
    files = [
        Image.fromarray(image.permute(1, 2, 0).numpy()).resize((32, 32), Image.Resampling.BICUBIC) for image in images
    ]
    resized = torch.stack([torch.from_numpy(np.array(file)).permute(2, 0, 1) for file in files])
    found, expected = shipped(images), shipped(resized)
    assert (found - expected).norm() < 0.02 * expected.norm()
    grey = images[:, :1]
    assert torch.equal(shipped(grey), shipped(grey.repeat(1, 3, 1, 1)))


def test_images_under_16_pixels_are_refused_with_the_configuration() -> None:
    with pytest.raises(
        ConfigError, match="evaluation.extractor: 'cifar10-resnet' is not allowed: .*16 pixels; use classi"
    ):
        cfg.override(cfg.baseline("digits"), {"evaluation.extractor": "cifar10-resnet"})
    small = {"evaluation.extractor": "cifar10-resnet", "data.image_size": 16, "data.channels": 1}
    assert cfg.override(cfg.baseline("cifar10"), small).evaluation.extractor == "cifar10-resnet"


# ------------------------------------------------------------------------------------------------ weights of one's own
WORDS = ["model.width=2", "loader.workers=0", "loader.batch_size=10", "evaluation.points=1"]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `tunediff.train` leaves of a training on images that pass for CIFAR-10."""
    folder = tmp_path_factory.mktemp("own")
    for split in ("train", "test"):
        for label in range(10):
            path = folder / "set" / split / str(label) / "0.png"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (32, 32), (25 * label, 0, 0)).save(path)
    words = ["--config", "cifar10_classifier", "--samples", "20", "--out", str(folder / "run")]
    with commands_in_this_process():
        assert train.main([*words, f"data.path={folder / 'set'}", *WORDS]) == 0
    return folder / "run" / "weights.safetensors"


def test_what_the_classifier_workload_trains_is_a_ruler(own: Path) -> None:
    weights.check(Data(), of(own))
    assert weights.trained(of(shutil.copy(weights.SHIPPED, own.parent / "copy"))).label == weights.trained(of()).label
    found = features.build(of(own), None, "cpu")  # needs no images
    digest = hashlib.sha256(own.read_bytes()).hexdigest()
    assert re.fullmatch(rf"FD \(cifar10-resnet, \d+ %, {digest[:6]}\)", found.label)
    assert (found.digest, found.dim, weights.length(of(own), 32)) == (digest, 16, 16)
    assert found(waves()).shape == (6, 16)
    assert weights.trained(of(own)).samples == 20


def changed(own: Path, path: Path, knobs: dict[str, object], **texts: str | None) -> Path:
    """The same weights in `path`, whose file says something else of their training; None: nothing of that name."""
    with safe_open(own, "np") as file:
        about = file.metadata()
    about |= {"config": json.dumps(json.loads(about["config"]) | knobs)} | texts
    save_file(load_file(own), path, metadata={name: text for name, text in about.items() if text is not None})
    return path


@pytest.mark.parametrize(
    ("knobs", "texts", "key"),
    [
        ({}, {"config": None}, "config"), ({}, {"result": '{"accuracy": 0.9}'}, "train_s"), ({}, {"config": "torn"}, "JSON"),
        ({"data.name": "images"}, {}, "data.name"), ({"model.name": "convnet"}, {}, "model.name"),
    ],
)  # fmt: skip
def test_files_that_tell_of_another_network_are_refused(
    own: Path, tmp_path: Path, knobs: dict[str, object], texts: dict[str, str | None], key: str
) -> None:
    path = changed(own, tmp_path / "other.safetensors", knobs, **texts)
    with pytest.raises(ConfigError, match=f"evaluation.weights_path: '{path}' is not allowed: .*{key}"):
        weights.check(Data(), of(path))


def test_files_that_are_none_are_refused(own: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no weights")
    for path in (tmp_path / "text", tmp_path / "gone", tmp_path):
        with pytest.raises(ConfigError, match=f"evaluation.weights_path: '{path}'"):
            weights.check(Data(), of(path))
    wider = changed(own, tmp_path / "wider.safetensors", {"model.width": 4})
    with pytest.raises(ConfigError, match=rf"evaluation.weights_path: {wider}: .*0\.weight"):
        features.build(of(wider), None, "cpu")
