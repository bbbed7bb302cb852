"""Networks whose features are compared: what ships, a classifier of the very images, Inception."""

import dataclasses
import hashlib
import json
import logging
import math
import os
import pickle
import random
import re
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

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
from tunediff.data.images import Images
from tunediff.data.knobs import Data
from tunediff.evaluation import features, weights
from tunediff.evaluation.distance import FeatureStatistics, Reference, frechet
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


# ------------------------------------------------------------------------------------ classifier, random network, Inception
# --------------------------------------------------------------------------------------------------------- classifier
@pytest.fixture(scope="module")
def classifier(digits: Images) -> features.Classifier:
    return features.Classifier(digits, "cpu")


def test_classifier_knows_the_digits(digits: Images, classifier: features.Classifier) -> None:
    assert (classifier.name, classifier.label, classifier.dim) == ("classifier", "FD (classifier)", 64)
    found, logits = classifier.with_logits(digits.pixels[:200])
    assert (found.shape, found.dtype, found.requires_grad) == ((200, 64), torch.float32, False)
    assert torch.equal(found, classifier(digits.pixels[:200]))
    assert logits.shape == (200, classifier.classes) == (200, 10)
    assert (logits.argmax(1) == digits.labels[:200]).double().mean() > 0.95


def test_features_of_a_classifier_do_not_depend_on_the_batch_or_the_trial(
    digits: Images, classifier: features.Classifier
) -> None:
    whole = classifier(digits.pixels[:40])
    assert torch.allclose(whole[7:9], classifier(digits.pixels[7:9]), atol=1e-5)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(classifier(digits.pixels[:40]), whole)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_random_network_judges_without_labels(digits: Images) -> None:
    unlabelled = dataclasses.replace(digits, labels=None, class_names=())
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    network = features.Random(unlabelled, "cpu")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert (network.name, network.label, network.classes) == ("random", "FD (random network)", 0)
    found, logits = network.with_logits(digits.pixels[:40])
    assert (found.shape, logits.shape) == ((40, network.dim), (40, 0))
    assert torch.allclose(found[7:9], network(digits.pixels[7:9]), atol=1e-5)
    assert features.Random(unlabelled, "cpu").digest == network.digest
    assert network.dim == weights.length(Evaluation(extractor="random"), 8) == 160
    fewer = dataclasses.replace(unlabelled, pixels=digits.pixels[:500])
    assert features.Random(fewer, "cpu").digest != network.digest, "it is scaled by these very images"


def test_random_network_orders_noise_blur_and_missing_digits(digits: Images) -> None:
    """Each step away from the real images is farther than the one before, as it is with Inception (Heusel et al. 2017,
    fig. 3)."""
    network, half = features.Random(digits, "cpu"), len(digits) // 2
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    real, other = digits.pixels[order[:half]], digits.pixels[order[half:]]
    classes = digits.labels[order[half:]]
    noise = torch.randn(other.shape, generator=torch.Generator().manual_seed(1))
    blurred = torch.nn.functional.avg_pool2d(other.float(), 3, 1, 1)

    def distance(images: Tensor) -> float:
        sides = []
        for pixels in (real, images):
            sides.append(FeatureStatistics(network.dim, "cpu"))
            sides[-1].update(network(pixels.round().clamp(0, 255).to(torch.uint8)))
        return frechet(sides[1], Reference.of(sides[0], torch.zeros(0, network.dim)))

    for steps in (
        [other, other + 8 * noise, other + 24 * noise, other + 72 * noise],
        [other, 0.8 * other + 0.2 * blurred, 0.5 * other + 0.5 * blurred, blurred],
        [other, other[classes < 8], other[classes < 5], other[classes < 2]],
    ):
        distances = [distance(images) for images in steps]
        assert distances == sorted(distances)
        assert distances[-1] > 5 * distances[0]


@pytest.mark.nightly  # trains it once more
def test_classifier_is_reproducible_and_leaves_no_trace(
    digits: Images, classifier: features.Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEDIFF_CACHE", str(tmp_path))
    torch.manual_seed(123)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            again = features.Classifier(digits, "cpu")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert again.digest == classifier.digest
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_second_classifier_comes_from_the_cache(
    digits: Images, classifier: features.Classifier, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(list(cache.glob(f"classifier-{digits.digest[:16]}-*-2.safetensors"))) == 1
    again = features.Classifier(digits, "cpu")
    assert again.digest == classifier.digest
    assert torch.equal(again(digits.pixels[:9]), classifier(digits.pixels[:9]))
    assert not trainings(caplog)


def trainings(caplog: pytest.LogCaptureFixture) -> int:
    return sum("of held-out images right" in message for message in caplog.messages)


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, poor_judge: None) -> Path:
    """An empty cache folder, and classifiers that are hardly trained."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("TUNEDIFF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cached_classifier_is_of_the_labels(digits: Images, quick: Path, caplog: pytest.LogCaptureFixture) -> None:
    relabelled = dataclasses.replace(digits, labels=digits.labels.flip(0))
    more_classes = dataclasses.replace(digits, class_names=(*digits.class_names, "none"))
    found = [features.Classifier(images, "cpu").digest for images in [digits, relabelled, more_classes] * 2]
    assert found[:3] == found[3:]
    assert len(set(found)) == trainings(caplog) == 3


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (28, 1), (32, 3), (64, 3)])
def test_networks_made_from_images_take_any_size(quick: Path, size: int, channels: int) -> None:
    pixels = torch.arange(20 * channels * size**2).view(20, channels, size, size).to(torch.uint8)
    images = Images("any", pixels, torch.arange(20) % 5, tuple("abcde"), (), "0" * 64)
    found, logits = features.Classifier(images, "cpu").with_logits(pixels)
    assert (found.shape, logits.shape) == ((20, 64), (20, 5))
    assert features.Random(images, "cpu").dim == weights.length(Evaluation(extractor="random"), size)


def test_unlabelled_images_are_refused(digits: Images, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.extractor: 'classifier'"):
        features.Classifier(dataclasses.replace(digits, labels=None), "cpu")
    for index in range(2):
        (tmp_path / f"{index}.png").write_bytes(b"")
    unlabelled = Data(name="images", path=str(tmp_path), split="all")
    with pytest.raises(ConfigError, match=r"evaluation\.extractor"):
        weights.check(unlabelled, Evaluation(extractor="classifier"))


# ---------------------------------------------------------------------------------------------------------- Inception
@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, internet: Any) -> Path:
    """An empty torch hub and no network; returns where the weights would be."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    internet(urllib.error.URLError("no route"))
    return tmp_path / "torch" / "hub" / "checkpoints" / weights.FILE_NAME


def inception(path: Path | None = None) -> Evaluation:
    return Evaluation(weights_path=None if path is None else str(path))


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as torch-fidelity publishes it, but with untrained weights."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.setattr("torch_fidelity.feature_extractor_inceptionv3.load_state_dict_from_url", lambda *_, **__: None)
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda *_, **__: None)
        network = FeatureExtractorInceptionV3("any", ["2048"])
    path = tmp_path_factory.mktemp("weights") / "inception.pth"
    torch.save(network.state_dict(), path)
    return path


def test_the_url_is_that_of_torch_fidelity() -> None:
    from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

    assert weights.URL == URL_INCEPTION_V3
    assert f"-{weights.DIGEST_PREFIX}.pth" in weights.FILE_NAME
    assert str(weights.hub_dir()) == os.path.abspath(torch.hub.get_dir())


def test_offline_names_both_ways(offline: Path) -> None:
    with pytest.raises(ConfigError, match=rf"evaluation\.weights_path.*{offline}.*no route|no route.*{offline}"):
        weights.check(Data(), inception())


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets this be the content of the published weights."""
    return lambda content: monkeypatch.setattr(weights, "DIGEST_PREFIX", hashlib.sha256(content).hexdigest()[:8])


def test_download_is_verified_and_put_in_place(offline: Path, internet: Any, reference: Any) -> None:
    internet(content := b"weights")
    with pytest.raises(ConfigError, match="what arrived has sha256"):
        weights.check(Data(), inception())
    assert not offline.exists()
    reference(content)
    weights.check(Data(), inception())
    assert offline.read_bytes() == content
    internet(AssertionError("downloaded again"))
    assert weights.find(inception()).label == "FID"
    offline.write_bytes(b"half a downl")
    internet(content)
    assert weights.find(inception()).label == "FID", "a damaged copy is fetched again"


def test_only_the_reference_weights_make_a_fid(tmp_path: Path, reference: Any) -> None:
    path = tmp_path / "own.pth"
    path.write_bytes(b"own weights")
    found = weights.find(inception(path))
    assert found.label == "FD (inception, own weights)"
    assert found.digest == hashlib.sha256(b"own weights").hexdigest()
    reference(b"own weights")
    assert weights.find(inception(path)).label == "FID"


def test_inception_features_and_logits_are_those_of_torch_fidelity(random_weights: Path, digits: Images) -> None:
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    state = torch.get_rng_state()
    extractor = features.build(inception(random_weights), digits, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert (extractor.name, extractor.label) == ("inception-v3-compat", "FD (inception, own weights)")
    assert extractor.digest == hashlib.sha256(random_weights.read_bytes()).hexdigest()
    layer = FeatureExtractorInceptionV3.get_default_feature_layer_for_metric("isc")
    other = FeatureExtractorInceptionV3("any", [layer], feature_extractor_weights_path=str(random_weights))
    images = digits.pixels[:2].repeat(1, 3, 1, 1)
    found, logits = extractor.with_logits(images)
    assert (found.shape, found.dtype, logits.shape) == ((2, extractor.dim), torch.float32, (2, extractor.classes))
    assert torch.allclose(found, extractor(digits.pixels[:2]), atol=1e-5), "grey becomes RGB"
    assert torch.allclose(logits, other(images)[0], atol=1e-5)
    assert logits.std() > 0


class Intruder:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.environ["INTRUDER"],)


@pytest.mark.parametrize("kind", ["code", "tensor", "other network", "text"])
def test_foreign_weights_are_refused_and_run_no_code(
    kind: str, tmp_path: Path, digits: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTRUDER", str(tmp_path / "intruder"))
    path = tmp_path / "weights.pth"
    if kind == "code":
        path.write_bytes(pickle.dumps(Intruder(), protocol=2))
    elif kind == "text":
        path.write_text("no weights")
    else:
        torch.save(torch.zeros(3) if kind == "tensor" else {"layer.weight": torch.zeros(3)}, path)
    with pytest.raises(ConfigError, match=r"evaluation\.weights_path: .*does not hold the weights"):
        features.build(inception(path), digits, "cpu")
    assert not (tmp_path / "intruder").exists()
