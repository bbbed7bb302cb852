"""Where the Inception weights come from. Imports no torch, so that missing ones are refused before anything starts."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import http.client
import logging
import os
import shutil
import urllib.request
from pathlib import Path

from tunediff.config import ConfigError
from tunediff.data.cache import locked
from tunediff.data.knobs import Data
from tunediff.data.sources import has_labels
from tunediff.evaluation.knobs import Evaluation
from tunediff.files import write_atomically

log = logging.getLogger(__name__)

URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
"""Inception weights of FID's original TensorFlow graph, converted and published by torch-fidelity (91 MiB)."""
FILE_NAME = URL.rpartition("/")[2]
DIGEST_PREFIX = "6726825d"
"""First digits of the file's sha256, which its name ends with."""
TIMEOUT_S = 15.0
"""Longest silence of the network before a download counts as failed."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """A file of Inception weights."""

    path: Path
    digest: str
    """sha256 of the file, hex."""

    @property
    def label(self) -> str:
        """What a Fréchet distance measured with them may be called."""
        return "FID" if self.digest.startswith(DIGEST_PREFIX) else "FD (inception, own weights)"


def check(data: Data, evaluation: Evaluation) -> None:
    """Refuse an extractor that cannot be built, before any training starts; fetches missing Inception weights.

    Raises `ConfigError` naming the key and every way out.
    """
    if evaluation.extractor == "inception":
        find(evaluation)
    elif evaluation.extractor == "classifier" and not has_labels(data):
        refuse_unlabelled()


def refuse_unlabelled() -> None:
    """Raise the `ConfigError` for a classifier without classes."""
    raise ConfigError(
        "evaluation.extractor: 'classifier' is not allowed: it is trained on the classes of the images, and these have "
        "none; allowed: random, which needs neither labels nor network, inception, or images in class folders"
    )


def find(evaluation: Evaluation) -> Weights:
    """The weights of `evaluation.weights_path`, else torch hub's copy, else a fresh download into torch hub.

    Raises `ConfigError`.
    """
    if evaluation.weights_path is not None:
        path = Path(evaluation.weights_path).expanduser().absolute()
        try:
            return Weights(path, _sha256(path))
        except OSError as error:
            raise ConfigError(
                f"evaluation.weights_path: {str(path)!r} cannot be read: {error.strerror}; "
                f"allowed: a file of Inception weights such as {FILE_NAME}, or null to download it"
            ) from None
    path = hub_dir() / "checkpoints" / FILE_NAME
    with locked(path):
        if not path.is_file() or not _sha256(path).startswith(DIGEST_PREFIX):
            _download(path)
        return Weights(path, _sha256(path))


def hub_dir() -> Path:
    """torch.hub's folder, found by its own rules: $TORCH_HOME, else $XDG_CACHE_HOME/torch, else ~/.cache/torch."""
    home = os.environ.get("TORCH_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "torch")
    return Path(home).expanduser().absolute() / "hub"


def _download(path: Path) -> None:
    log.info("downloading the Inception weights (91 MiB) to %s", path)
    try:
        with urllib.request.urlopen(URL, timeout=TIMEOUT_S) as response:
            write_atomically(path, lambda file: shutil.copyfileobj(response, file))
        if not (digest := _sha256(path)).startswith(DIGEST_PREFIX):
            path.unlink()
            raise OSError(f"what arrived has sha256 {digest[:8]}…, not {DIGEST_PREFIX}…")
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(
            f"evaluation.weights_path: None is not allowed: the Inception weights are not at {path} and cannot be "
            f"downloaded from {URL} ({error}); allowed: run once with a network, or set evaluation.weights_path to a "
            f"copy of {FILE_NAME}; offline evaluation.extractor = random judges any images, classifier labelled ones"
        ) from None


def _sha256(path: Path) -> str:
    status = path.stat()
    return _sha256_of(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _sha256_of(path: Path, size: int, modified: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
