"""Networks that turn images into the feature vectors whose distribution is compared.

To add one: a class as `Extractor`, its name in `Evaluation.extractor`, a line in `build`.
"""

from __future__ import annotations

import io
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from tunediff.config import ConfigError
from tunediff.data.images import Images
from tunediff.evaluation import networks, weights
from tunediff.evaluation.extractor import Extractor, resized
from tunediff.evaluation.image_networks import Classifier as Classifier
from tunediff.evaluation.image_networks import Random
from tunediff.evaluation.knobs import Evaluation
from tunediff.training.precision import evaluation_precision
from tunediff.training.weights import refused


def build(evaluation: Evaluation, images: Images, device: torch.device | str) -> Extractor:
    """Return `evaluation.extractor` on `device`; `classifier`, `random` use `images`.

    Raises `ConfigError` if weights or labels are missing.
    """
    if evaluation.extractor == "inception":
        return Inception(weights.find(evaluation), device)
    if evaluation.extractor == "cifar10-resnet":
        return Resnet(weights.trained(evaluation), device)
    return (Classifier if evaluation.extractor == "classifier" else Random)(images, device)


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
