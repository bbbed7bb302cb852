"""Networks that turn images into the feature vectors whose distribution is compared.

To add one: a class as `Extractor`, its name in `Evaluation.extractor`, a line in `build`.
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
from typing import Any, Protocol

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunediff.config import ConfigError
from tunediff.core.progress import Progress
from tunediff.data.cache import cache_dir, once
from tunediff.data.images import Images
from tunediff.evaluation import networks, weights
from tunediff.evaluation.knobs import Evaluation
from tunediff.training.precision import evaluation_precision
from tunediff.training.weights import refused

log = logging.getLogger(__name__)

_VERSION = 2  # raise it when network or training change
_SEED = 0
STEPS, _BATCH, _PEAK_LR = 400, 64, 4e-3
_PIXELS = 2**21  # at once: about 1 GiB of activations
_CPU = torch.device("cpu")


class Extractor(Protocol):
    """The interface of a feature network."""

    name: str
    """Short name for files: "inception-v3-compat", "cifar10-resnet", "random"."""
    label: str
    """Name of these features' Fréchet distance; "FID" only with FID's network and weights."""
    digest: str
    """Hex digest of the weights: features with different digests are not comparable."""
    dim: int
    """d, length of a feature vector."""
    classes: int
    """K, number of classes of the network; 0 without classes."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return features float32 [B, d] of images uint8 [B, C, H, W], on one device."""
        return self.with_logits(images)[0]

    def with_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [B, d] and logits of the classes [B, K], both float32, in one pass."""
        ...


def resized(images: Tensor, side: int, device: torch.device) -> Tensor:
    """Return images uint8 [B, C, H, W] as RGB of this side on the device, float32 0…255."""
    values = images.to(device).float().expand(-1, 3, -1, -1)
    if images.shape[-2:] == (side, side):
        return values
    return F.interpolate(values, (side, side), mode="bicubic", antialias=True).clamp(0, 255)


# ---- networks made from the learned images
class Classifier(Extractor):
    """64 features of a small network trained to tell the learned images' classes.

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
        classes = repr((images.labels.tolist(), len(images.class_names)))
        key = f"{images.digest[:16]}-{hashlib.sha256(classes.encode()).hexdigest()[:16]}"
        path = cache_dir() / f"classifier-{key}-{_VERSION}.safetensors"
        trained = once(
            path,
            lambda path: _read(path, images),
            lambda: _train(images),
            lambda file, tensors: file.write(safetensors.torch.save(tensors)),
        )
        self._device, self._network = torch.device(device), _network(images)
        self._network.load_state_dict(trained)
        self._network.requires_grad_(False).eval().to(device)
        self.classes = len(images.class_names)
        self.digest = _digest(trained)

    def with_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), evaluation_precision(self._device):
            features: Tensor = self._network.features(images.to(self._device))
            logits: Tensor = self._network.head(features)
        return features, logits


class Random(Extractor):
    """The classifier's network, untrained: the mean of every activation of all layers.

    It needs no labels, no download and no time. Networks with random weights compare sets of images
    that are far from ImageNet better than trained ones do (Naeem et al. 2020, arXiv 2002.09797).
    Only the scale of the layers comes from the images: a first part of them gives the means and
    variances of their normalization. On CIFAR-10, 2,000 images a side, its distance grew with
    noise, from a standard deviation of 10/255 on, blur, wrong colours and shuffled patches; it sees
    classes less than `Classifier` does: without five of ten classes the distance is 2 times that of
    two halves of the set, with `Classifier` 13 times (docs/results/2026-11-methods.md).
    """

    name = "random"
    label = "FD (random network)"
    classes = 0

    def __init__(self, images: Images, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._layers = _network(images).body.requires_grad_(False)
        for layer in self._layers:
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 1.0  # running statistics become those of the one batch below
        self._chunk = max(8, _PIXELS // images.pixels[0, 0].numel())
        # A fixed shuffle, since files are sorted by class.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(_SEED))
        first = images.pixels[order[: min(self._chunk, 1000)]]
        with torch.no_grad(), evaluation_precision(_CPU), _one_thread():
            self.dim = self._features(first).shape[1]
        self._layers.eval()
        self.digest = _digest(self._layers.state_dict())
        self._layers.to(device)

    def with_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        parts = torch.split(images, self._chunk)
        with torch.no_grad(), evaluation_precision(self._device):
            features = torch.cat([self._features(part.to(self._device)) for part in parts])
        return features, features[:, :0]

    def _features(self, images: Tensor) -> Tensor:
        values, means = images.float() / 127.5 - 1, []
        for layer in self._layers:
            values = layer(values)
            if isinstance(layer, nn.SiLU):
                means.append(values.mean((2, 3)))
        return torch.cat(means, 1)


def _digest(tensors: dict[str, Tensor]) -> str:
    content = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        content.update(name.encode() + tensor.numpy().tobytes())
    return content.hexdigest()


# ---- the network and its training
class _SmallNetwork(nn.Module):
    """Convolutions down to 8×8 pixels or less, three more, a mean, and a linear layer."""

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        strides = [1]
        while size > 8:
            strides.append(2)
            size = (size + 1) // 2
        widths = [channels] + [32] * len(strides) + [64, 64]
        layers: list[nn.Module] = []
        for (before, after), stride in zip(
            itertools.pairwise(widths), [*strides, 1, 2], strict=True
        ):
            convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(after), nn.SiLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(64, classes)

    def features(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.body(images.float() / 127.5 - 1).mean((2, 3))
        return pooled

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits


def _network(images: Images) -> _SmallNetwork:
    """Return the untrained network for these images; torch's generators are not changed."""
    _, channels, side, _ = images.pixels.shape
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_SEED)
        return _SmallNetwork(channels, side, max(1, len(images.class_names)))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: more sum in another order, and wait for each other on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _read(path: Path, images: Images) -> dict[str, Tensor]:
    """Read a trained classifier. Raises if the file does not hold the network for these images."""
    tensors = safetensors.torch.load(path.read_bytes())
    _network(images).load_state_dict(tensors)
    return tensors


def _train(images: Images) -> dict[str, Tensor]:
    """Train the classifier for a fixed number of steps, and measure it on a held-out tenth.

    AdamW; the learning rate rises for 50 steps, then falls linearly: a few seconds on a CPU.
    """
    assert images.labels is not None
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(_SEED)
    order = torch.randperm(len(images), generator=generator)
    held_out, learned = order.tensor_split([max(1, len(images) // 10)])
    network = _network(images)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_PEAK_LR, weight_decay=1e-2)
    work = Progress("training the classifier that judges", STEPS, "steps")
    with work as progress, torch.enable_grad(), evaluation_precision(_CPU), _one_thread():
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = _PEAK_LR * min((step + 1) / 50, 1 - step / STEPS)
            batch = learned[torch.randint(len(learned), (_BATCH,), generator=generator)]
            logits, labels = network(images.pixels[batch]), images.labels[batch]
            loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            progress.step()
        network.eval()
        with torch.no_grad():
            parts = [network(images.pixels[rows]) for rows in torch.split(held_out, 256)]
    accuracy = (torch.cat(parts).argmax(1) == images.labels[held_out]).double().mean().item()
    message = "classifier for %s: %.1f %% of held-out images right, %.1f s"
    log.info(message, images.name, 100 * accuracy, time.perf_counter() - started)
    return {name: tensor.contiguous() for name, tensor in network.state_dict().items()}


# ---- trained networks
class Inception(Extractor):
    """The 2048 pooled features of FID's Inception, as in torch-fidelity (Heusel et al. 2017).

    Its logits lack the last layer's bias, as those of public Inception Scores do.
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
        tensors, outputs = io.BytesIO(), [str(self.dim), "logits_unbiased"]
        try:
            torch.save(torch.load(file.path, map_location="cpu", weights_only=True), tensors)
            tensors.seek(0)
            with torch.random.fork_rng(devices=[]):  # building layers draws initial weights
                network: Any = FeatureExtractorInceptionV3(
                    self.name, outputs, feature_extractor_weights_path=tensors
                )
        except Exception as error:  # a file of any other kind fails in as many ways
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"evaluation.weights_path: {str(file.path)!r} is not allowed: it does not hold the"
                f" weights of torch-fidelity's Inception network ({reason}); allowed: a copy of"
                f" {weights.FILE_NAME}"
            ) from None
        self._network = network.to(device)

    def with_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        images = images.expand(-1, 3, -1, -1)  # grey becomes RGB
        with torch.no_grad(), evaluation_precision(self._device):
            outputs = [self._network(chunk) for chunk in torch.split(images, self._CHUNK)]
        features, logits = zip(*outputs, strict=True)
        return torch.cat(features), torch.cat(logits)


class Resnet(Extractor):
    """The pooled features of a ResNet-18 that `classification` has trained on CIFAR-10.

    It needs no download and no labels. Grey becomes RGB; images of other sides are resized to
    32×32, bicubic and antialiased as the files of a set are (bilinear: 8 of 100 fewer right from
    16×16). Of CIFAR-10's held-out images it classifies 85.5 % right, 81.1 % of them in grey, 79.1 %
    from 24×24, 59.7 % from 16×16.
    """

    name = "cifar10-resnet"
    classes = 10
    _CHUNK = 256  # images at once

    def __init__(self, trained: weights.Trained, device: torch.device | str) -> None:
        """Raises `ConfigError` if the file does not hold the weights of this network."""
        self.label, self.digest, self._device = trained.label, trained.digest, torch.device(device)
        self.dim = 8 * trained.width
        with torch.device("meta"):
            network = networks.resnet18(trained.width, 3, self.classes)
        stored = safetensors.torch.load_file(trained.path)
        for name, tensor in stored.items():  # 16-bit numbers, and counts of batches
            stored[name] = tensor.float() if tensor.is_floating_point() else tensor
        with refused(f"evaluation.weights_path: {trained.path}"):
            network.load_state_dict(stored, assign=True)
        network.to(memory_format=torch.channels_last)  # 1.5 times as fast on a CPU
        network.requires_grad_(False).eval().to(device)
        self._body, self._head = network[:-1], network[-1]

    def with_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), evaluation_precision(self._device):
            parts = [
                self._body(resized(part, 32, self._device) / 127.5 - 1)
                for part in torch.split(images, self._CHUNK)
            ]
            features = torch.cat(parts)
            logits: Tensor = self._head(features)
        return features, logits


def build(evaluation: Evaluation, images: Images, device: torch.device | str) -> Extractor:
    """Return `evaluation.extractor` on `device`; `classifier`, `random` use `images`.

    Raises `ConfigError` if weights or labels are missing.
    """
    if evaluation.extractor == "inception":
        return Inception(weights.find(evaluation), device)
    if evaluation.extractor == "cifar10-resnet":
        return Resnet(weights.trained(evaluation), device)
    return (Classifier if evaluation.extractor == "classifier" else Random)(images, device)
