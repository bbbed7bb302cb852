"""Find extractors' weights. Imports no torch: missing ones are refused at the start."""

from __future__ import annotations

import dataclasses
import http.client
import json
import logging
import math
import os
import shutil
import urllib.request
from pathlib import Path
from typing import NoReturn

from safetensors import SafetensorError, safe_open

from tunediff.config import ConfigError
from tunediff.core.files import sha256, write_atomically
from tunediff.data.cache import cache_dir, locked
from tunediff.data.knobs import Data
from tunediff.data.sources import has_labels
from tunediff.evaluation.knobs import Evaluation

log = logging.getLogger(__name__)

FILE_NAME = "weights-inception-2015-12-05-6726825d.pth"
URL = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{FILE_NAME}"
"""Inception weights of FID's TensorFlow graph, published by torch-fidelity (91 MiB)."""
DIGEST_PREFIX = "6726825d"
"""First digits of the file's sha256, which its name ends with."""
TIMEOUT_S = 15.0
"""Seconds without an answer after which a download fails."""
SHIPPED = Path(__file__).with_name("cifar10-resnet.safetensors")
"""16-bit weights of a training of `cifar10_classifier`: docs/explanation/evaluation.md."""


def check(data: Data, evaluation: Evaluation) -> None:
    """Refuse an extractor that cannot be built; downloads missing Inception weights.

    Raises `ConfigError` naming the key and every alternative.
    """
    if evaluation.extractor == "inception":
        find(evaluation)
    elif evaluation.extractor == "cifar10-resnet":
        trained(evaluation)
    elif evaluation.extractor == "classifier" and not has_labels(data):
        refuse_unlabelled()


def refuse_unlabelled() -> NoReturn:
    """Raise the `ConfigError` for a classifier without classes."""
    raise ConfigError(
        "evaluation.extractor: 'classifier' is not allowed: it is trained on the classes of the"
        " images, and these have none; allowed: random, which needs neither labels nor network,"
        " inception, or images in class folders"
    )


def length(evaluation: Evaluation, image_size: int) -> int:
    """Return d, the features' length; `random` has all layers': more for larger images.

    Raises `ConfigError`.
    """
    if evaluation.extractor == "cifar10-resnet":
        return 8 * trained(evaluation).width
    halvings = math.ceil(math.log2(max(1.0, image_size / 8)))
    fixed = {"inception": 2048, "classifier": 64}
    return fixed.get(evaluation.extractor, 160 + 32 * halvings)


def describe(evaluation: Evaluation) -> str:
    """Return what a sentence about the distance adds for an extractor that is neither FID's nor
    made of classes; '' for those. Raises `ConfigError`."""
    if evaluation.extractor == "cifar10-resnet":
        return f", in the features of {trained(evaluation).description}"
    if evaluation.extractor == "random":
        return ", in the features of an untrained network"
    return ""


def _refuse(path: Path, why: str, allowed: str) -> NoReturn:
    raise ConfigError(f"evaluation.weights_path: {str(path)!r} {why}; allowed: {allowed}") from None


def _given(evaluation: Evaluation) -> Path | None:
    if evaluation.weights_path is None:
        return None
    return Path(evaluation.weights_path).expanduser().absolute()


# ---- digests
def _readable(path: Path, allowed: str) -> str:
    try:
        return sha256(path)
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}", allowed)


# ---- Inception
@dataclasses.dataclass(frozen=True)
class Weights:
    """A file of Inception weights."""

    path: Path
    digest: str
    """sha256 of the file, hex."""

    @property
    def label(self) -> str:
        """Return the name of a Fréchet distance that is measured with them."""
        return "FID" if self.digest.startswith(DIGEST_PREFIX) else "FD (inception, own weights)"


def find(evaluation: Evaluation) -> Weights:
    """Return `evaluation.weights_path`'s weights, else torch hub's, downloaded if needed.

    Raises `ConfigError`.
    """
    if (path := _given(evaluation)) is not None:
        allowed = f"a file of Inception weights such as {FILE_NAME}, or null to download it"
        return Weights(path, _readable(path, allowed))
    path = hub_dir() / "checkpoints" / FILE_NAME
    with locked(path):
        if not (path.is_file() and sha256(path).startswith(DIGEST_PREFIX)):
            _download(path)
        return Weights(path, sha256(path))


def hub_dir() -> Path:
    """Return torch.hub's folder, by its own rules: $TORCH_HOME, else $XDG_CACHE_HOME/torch, else
    ~/.cache/torch. Without a home folder it is in the cache folder."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("TORCH_HOME") or os.path.join(caches, "torch")
    try:
        return Path(folder).expanduser().absolute() / "hub"
    except RuntimeError:  # a container whose user is any number
        return cache_dir() / "hub"


def _download(path: Path) -> None:
    log.info("downloading the Inception weights (91 MiB) to %s", path)
    try:
        with urllib.request.urlopen(URL, timeout=TIMEOUT_S) as response:
            write_atomically(path, lambda file: shutil.copyfileobj(response, file))
        if not (digest := sha256(path)).startswith(DIGEST_PREFIX):
            path.unlink()
            raise OSError(f"what arrived has sha256 {digest[:8]}…, not {DIGEST_PREFIX}…")
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(
            f"evaluation.weights_path: None is not allowed: the Inception weights are not at {path}"
            f" and cannot be downloaded from {URL} ({error}); allowed: run once with a network, or"
            f" set evaluation.weights_path to a copy of {FILE_NAME}; offline evaluation.extractor ="
            " random judges any images, classifier labelled ones"
        ) from None


# ---- the ResNet of CIFAR-10
@dataclasses.dataclass(frozen=True)
class Trained:
    """A ResNet-18 that `classification` has trained on CIFAR-10, as its file describes."""

    path: Path
    digest: str
    """sha256 of the file, hex."""
    width: int
    """Channels of the first stage; the last has 8 times as many, which are the features."""
    accuracy: float
    """Share of CIFAR-10's held-out images that it classifies right, 0 to 1."""
    train_s: float
    samples: int
    """Images trained on in these seconds."""

    @property
    def label(self) -> str:
        """Return its Fréchet distance's name: `FD (cifar10-resnet, 88 %)`, rounded down.

        Weights of others add the first digits of their digest: no two trainings end alike.
        """
        digest = "" if self.digest == sha256(SHIPPED) else f", {self.digest[:6]}"
        return f"FD (cifar10-resnet, {math.floor(100 * self.accuracy + 1e-9)} %{digest})"

    @property
    def description(self) -> str:
        """Return what it is and how it was trained, in half a sentence."""
        right = f"right on {100 * self.accuracy:.1f} % of CIFAR-10's held-out images"
        record = f"{self.train_s / 60:.3g} minutes of training on {self.samples:,} images"
        network = f"a ResNet-18 of width {self.width}, {right} after {record}"
        return f"{network} (weights {self.digest[:8]})"


_RESNET = {
    "data.name": "cifar10",
    "data.image_size": 32,
    "data.channels": 3,
    "model.name": "resnet18",
}


def trained(evaluation: Evaluation) -> Trained:
    """Return `evaluation.weights_path`'s network, else ours. Raises `ConfigError`."""
    path = _given(evaluation) or SHIPPED
    allowed = (
        "weights.safetensors of a finished training of cifar10_classifier with model.name ="
        " resnet18, or null"
    )
    digest = _readable(path, allowed)
    try:
        with safe_open(path, "np") as file:
            about = file.metadata() or {}
        config, last = json.loads(about["config"]), json.loads(about["result"])
        others = [name for name, value in _RESNET.items() if config[name] != value]
        why = ", ".join(f"its {name} is {config[name]}" for name in others)
        if not others:
            return Trained(
                path,
                digest,
                width=int(config["model.width"]),
                accuracy=float(last["accuracy"]),
                train_s=float(last["train_s"]),
                samples=int(last["samples"]),
            )
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        why = f"it does not say how it was trained ({type(error).__name__}: {error})"
    _refuse(path, f"is not allowed: {why}", allowed)
