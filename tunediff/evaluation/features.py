"""Networks that turn images into the feature vectors whose distribution is compared.

To add one: a class with the members of `Extractor`, its name in `Evaluation.extractor`, and a line
in `build`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunediff.config import ConfigError
from tunediff.core.progress import Progress
from tunediff.data.cache import cache_dir, once
from tunediff.data.images import Images
from tunediff.evaluation import networks, weights
from tunediff.evaluation.efficientnet import EfficientNetLite0
from tunediff.evaluation.extractor import Extractor
from tunediff.evaluation.knobs import Evaluation
from tunediff.training.precision import evaluation_precision
from tunediff.training.weights import check_fit

log = logging.getLogger(__name__)


def build(evaluation: Evaluation, images: Images, device: torch.device | str) -> Extractor:
    """Return the extractor of `evaluation.extractor` on `device`.

    Raises `ConfigError` if weights or labels are missing.
    """
    if evaluation.extractor == "inception":
        return Inception(weights.find(evaluation), device)
    if evaluation.extractor == "cifar10-resnet":
        return Resnet(weights.trained(evaluation), device)
    if evaluation.extractor == "efficientnet-lite0":
        return EfficientNetLite0(weights.imagenet(evaluation), device)
    return (
        Classifier(images, device)
        if evaluation.extractor == "classifier"
        else Random(images, device)
    )


# ---- Inception
class Inception(Extractor):
    """The 2048 pooled features of FID's Inception network, as torch-fidelity builds it (Heusel et
    al. 2017).

    Its logits are those without the last layer's bias, which the public Inception Scores are
    computed from.
    """

    name = "inception-v3-compat"
    dim = 2048
    classes = 1008
    _CHUNK = 64  # images of 299×299 at once: about 1 GiB of activations

    def __init__(self, file: weights.Weights, device: torch.device | str) -> None:
        """Raises `ConfigError` if the file holds anything but the tensors of this network."""
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        self.label, self.digest, self._device = file.label, file.digest, torch.device(device)
        # torch-fidelity unpickles its file without restriction, which would run code hidden in a
        # foreign one. So the file is read here as plain tensors, and torch-fidelity gets those.
        tensors = io.BytesIO()
        try:
            torch.save(torch.load(file.path, map_location="cpu", weights_only=True), tensors)
            tensors.seek(0)
            with torch.random.fork_rng(devices=[]):  # building layers draws initial weights
                self._network: Any = FeatureExtractorInceptionV3(
                    self.name,
                    [str(self.dim), "logits_unbiased"],
                    feature_extractor_weights_path=tensors,
                )
        except Exception as error:  # a file of any other kind fails in as many ways
            reason = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            raise ConfigError(
                f"evaluation.weights_path: {str(file.path)!r} is not allowed: it does not hold the"
                f" weights of torch-fidelity's Inception network ({reason}); allowed: a copy of"
                f" {weights.FILE_NAME}"
            ) from None
        self._network.to(self._device)

    def with_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        images = images.expand(-1, 3, -1, -1)  # grey becomes RGB
        with torch.no_grad(), evaluation_precision(self._device):
            outputs = [self._network(chunk) for chunk in torch.split(images, self._CHUNK)]
        return torch.cat([features for features, _ in outputs]), torch.cat(
            [logits for _, logits in outputs]
        )


# ---- CIFAR-10's own
class Resnet(Extractor):
    """The pooled features of a ResNet-18 that our own `classification` workload has trained on
    CIFAR-10.

    It needs no download and no labels. Grey becomes RGB; images of other sides are resized to
    32×32, bicubic and antialiased as the files of a set are (bilinear: 8 of 100 fewer right from
    16×16). Of CIFAR-10's held-out images it classifies 85.5 % right, 81.1 % of them in grey, 79.1 %
    from 24×24, 59.7 % from 16×16.
    """

    name = "cifar10-resnet"
    classes = 10
    _SIDE = 32
    _CHUNK = 256  # images at once

    def __init__(self, trained: weights.Trained, device: torch.device | str) -> None:
        """Raises `ConfigError` if the file does not hold the weights of this network."""
        self.label, self.digest, self._device = trained.label, trained.digest, torch.device(device)
        with torch.device("meta"):
            network = networks.resnet18(trained.width, 3, self.classes)
        stored = safetensors.torch.load_file(trained.path)
        check_fit(stored, network, f"evaluation.weights_path: {trained.path}")
        tensors = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in stored.items()
        }
        network.load_state_dict(tensors, assign=True)
        network.to(memory_format=torch.channels_last)  # 1.5 times as fast on a CPU
        network.requires_grad_(False).eval().to(self._device)
        self._body, self._head = network[:-1], network[-1]
        self.dim = 8 * trained.width

    def with_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), evaluation_precision(self._device):
            features = torch.cat(
                [self._body(self._fit(part)) for part in torch.split(images, self._CHUNK)]
            )
            logits: Tensor = self._head(features)
        return features, logits

    def _fit(self, images: Tensor) -> Tensor:
        values, sides = (
            images.to(self._device).float().expand(-1, 3, -1, -1),
            (self._SIDE, self._SIDE),
        )
        if images.shape[-2:] != sides:
            values = F.interpolate(values, sides, mode="bicubic", antialias=True).clamp(0, 255)
        return values / 127.5 - 1


# ---- classifier
class Classifier(Extractor):
    """64 features of a small network trained to tell the classes of the very images that are
    learned.

    It needs no download. Training is seeded and runs on one CPU thread: the same images and classes
    give the same weights, bit for bit on the same kind of machine, whatever the state of torch's
    generators; they are kept in the cache folder.
    """

    name = "classifier"
    label = "FD (classifier)"
    dim = 64

    def __init__(self, images: Images, device: torch.device | str) -> None:
        """Raises `ConfigError` if the images have no classes."""
        if images.labels is None:
            weights.refuse_unlabelled()
        classes = hashlib.sha256(
            repr((images.labels.tolist(), len(images.class_names))).encode()
        ).hexdigest()
        path = (
            cache_dir() / f"classifier-{images.digest[:16]}-{classes[:16]}-{_VERSION}.safetensors"
        )
        trained = once(path, lambda path: _read(path, images), lambda: _train(images), _write)
        self._device = torch.device(device)
        self._network = _network(images)
        self._network.load_state_dict(trained.tensors)
        self._network.requires_grad_(False).eval().to(self._device)
        self.classes = len(images.class_names)
        self.accuracy = trained.accuracy
        """Share of a held-out tenth of the images that is classified right."""
        self.digest = _digest(trained.tensors)

    def with_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), evaluation_precision(self._device):
            features: Tensor = self._network.features(images.to(self._device))
            logits: Tensor = self._network.head(features)
        return features, logits


# ---- random
class Random(Extractor):
    """The classifier's network without its training: every activation's mean over the picture, of
    all layers.

    It needs no labels, no download and no time. Networks with random weights compare sets of images
    that are far from ImageNet better than trained ones do (Naeem et al. 2020, arXiv 2002.09797).
    Only the scale of the layers comes from the images: a first part of them gives the means and
    variances of their normalization. On CIFAR-10, 2,000 images a side, its distance grew with
    noise, from a standard deviation of 10/255 on, blur, wrong colours and shuffled patches; to
    classes it is blinder than `Classifier`: without five of ten, 2 times that of two halves, not 13
    (docs/results/2026-11-methods.md).
    """

    name = "random"
    label = "FD (random network)"
    classes = 0

    def __init__(self, images: Images, device: torch.device | str) -> None:
        self._device, self._layers = (
            torch.device(device),
            _network(images).body.requires_grad_(False),
        )
        for layer in self._layers:
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 1.0  # running statistics become those of the one batch below
        order = torch.randperm(
            len(images), generator=torch.Generator().manual_seed(_SEED)
        )  # files are sorted by class
        self._most = max(8, _PIXELS // images.pixels[0, 0].numel())
        with torch.no_grad(), evaluation_precision(torch.device("cpu")), _one_thread():
            self.dim = self._features(images.pixels[order[: min(self._most, 1000)]]).shape[1]
        self._layers.eval()
        self.digest = _digest(self._layers.state_dict())
        self._layers.to(self._device)

    def with_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), evaluation_precision(self._device):
            features = torch.cat(
                [self._features(part.to(self._device)) for part in torch.split(images, self._most)]
            )
        return features, features[:, :0]

    def _features(self, images: Tensor) -> Tensor:
        values, means = images.float() / 127.5 - 1, []
        for layer in self._layers:
            values = layer(values)
            if isinstance(layer, nn.SiLU):
                means.append(values.mean((2, 3)))
        return torch.cat(means, 1)


_PIXELS = 2**21  # at once: about 1 GiB of activations


def _digest(tensors: dict[str, Tensor]) -> str:
    """Return the sha256 of all tensors and their names."""
    content = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        content.update(name.encode() + tensor.numpy().tobytes())
    return content.hexdigest()


# ---- their network


_VERSION = 1  # raise it when network or training change
_SEED = 0
_STEPS, _BATCH, _PEAK_LR = 400, 64, 4e-3


class _Trained(NamedTuple):
    tensors: dict[str, Tensor]
    accuracy: float


class _Network(nn.Module):
    """Convolutions down to at most 8×8 pixels, three more, an average over the picture, and a
    linear read-out."""

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        strides = [1]
        while size > 8:
            strides.append(2)
            size = (size + 1) // 2
        widths = [channels] + [32] * len(strides) + [64, 64]
        strides += [1, 2]
        layers = []
        for (before, after), stride in zip(itertools.pairwise(widths), strides, strict=True):
            layers += [
                nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.SiLU(),
            ]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(64, classes)

    def features(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.body(images.float() / 127.5 - 1).mean((2, 3))
        return pooled

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits


def _network(images: Images) -> _Network:
    """Return the untrained network for these images; torch's generators are not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_SEED)
        return _Network(
            images.pixels.shape[1], images.pixels.shape[2], max(1, len(images.class_names))
        )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: more would sum in another order, and on busy cores wait for each other for
    minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _read(path: Path, images: Images) -> _Trained:
    """Read a trained classifier. Raises if the file does not hold the network for these images."""
    tensors = safetensors.torch.load(path.read_bytes())
    trained = _Trained(tensors, tensors.pop("accuracy").item())
    _network(images).load_state_dict(trained.tensors)
    return trained


def _write(file: BinaryIO, trained: _Trained) -> None:
    file.write(
        safetensors.torch.save(trained.tensors | {"accuracy": torch.tensor(trained.accuracy)})
    )


def _train(images: Images) -> _Trained:
    """Train the classifier: AdamW with a linearly falling learning rate for a fixed number of
    steps."""
    assert images.labels is not None
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(_SEED)
    order = torch.randperm(len(images), generator=generator)
    held_out, learned = order.tensor_split([max(1, len(images) // 10)])
    network = _network(images)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_PEAK_LR, weight_decay=1e-2)
    work = Progress("training the classifier that judges", _STEPS, "steps")
    with (
        work as progress,
        torch.enable_grad(),
        evaluation_precision(torch.device("cpu")),
        _one_thread(),
    ):
        for step in range(_STEPS):
            for group in optimizer.param_groups:
                group["lr"] = _PEAK_LR * min((step + 1) / 50, 1 - step / _STEPS)
            batch = learned[torch.randint(len(learned), (_BATCH,), generator=generator)]
            loss = F.cross_entropy(
                network(images.pixels[batch]), images.labels[batch], label_smoothing=0.1
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            progress.step()
        network.eval()
        with torch.no_grad():
            predicted = torch.cat(
                [network(images.pixels[part]).argmax(1) for part in torch.split(held_out, 256)]
            )
    accuracy = (predicted == images.labels[held_out]).double().mean().item()
    seconds = time.perf_counter() - started
    log.info(
        "classifier for %s: %.1f %% of held-out images right, %.1f s",
        images.name,
        100 * accuracy,
        seconds,
    )
    return _Trained(
        {name: tensor.contiguous() for name, tensor in network.state_dict().items()}, accuracy
    )
