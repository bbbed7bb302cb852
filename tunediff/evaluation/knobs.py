"""The section `evaluation` of workloads that generate images, and the names of their metrics.

Imports no torch: unknown ones are refused at once.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from tunediff.config import systems
from tunediff.config.knobs import EvaluationProtocol, File, Int, Refusal, Str, section

PRETRAINED = {
    "inception": "Inception",
    "cifar10-resnet": "a network for 32×32",
}
"""Extractors with trained weights, which say nothing about images under 16 pixels, and what these
are in a message. The others are made from the images that are learned."""


@section
class Evaluation(systems.EvaluationSection):
    """How a generator of images is judged."""

    extractor: Annotated[
        Literal["inception", "cifar10-resnet", "classifier", "random"],
        EvaluationProtocol(),
    ] = "inception"
    """`inception`: FID's network with its reference weights (downloaded by torch-fidelity, or from
    `evaluation.weights_path`). `cifar10-resnet`: a ResNet-18 that was trained on CIFAR-10 and comes
    with this package, offline. `classifier`: a small network trained on the labelled data itself,
    offline. `random`: that network as its weights were drawn, for images without labels or network.
    Only the first makes an FID."""
    weights_path: Annotated[Str | None, File(), EvaluationProtocol()] = None
    """`inception`: file with its weights (weights-inception-2015-12-05-6726825d.pth); null:
    torch-fidelity's download. `cifar10-resnet`: weights.safetensors of a training of
    `cifar10_classifier`; null: those in this package."""
    images: Annotated[Int, Ge(8), Le(1000000)] = 2048
    """N, images generated per evaluation. A Fréchet distance is biased by about c/N: compare only
    equal N."""
    batch_size: Annotated[Int, Ge(1), Le(65536)] = 256
    """Images sampled and extracted at once on each worker."""
    seed: Annotated[Int, Ge(0)] = 0
    """Seed of the initial noise, the same for every trial."""

    def check(self, config: Any) -> None:
        data = getattr(config, "data", None)  # a user's own workload may have no such section
        if self.extractor in PRETRAINED and getattr(data, "image_size", 16) < 16:
            why = (
                f"{PRETRAINED[self.extractor]} says nothing about images under 16 pixels; use"
                " classifier or random"
            )
            raise Refusal("evaluation.extractor", why)


# ---- metrics
KINDS: dict[str, tuple[str, ...]] = {
    "fd": ("frechet",),
    "kid": ("kid",),
    "is": ("inception_score",),
    "pr": ("precision", "recall"),
}
"""Values of `--metrics`, and the metrics that each computes."""


STRAIGHT = 4
"""Images per feature above which a Fréchet distance's bias is about c/N."""


def caution(label: str, images: int, dim: int) -> str:
    """Return the caution for a Fréchet distance of so few images for `dim` features, or ''.

    An estimated covariance has at most N − 1 ranks: below `dim` + 1 images it is singular (Chong &
    Forsyth 2020, arXiv 1911.07023, on the bias that remains above).
    """
    if images >= STRAIGHT * dim:
        return ""
    singular = f", its covariance of {dim:,} features is singular" if images <= dim else ""
    return (
        f"{label} over {images:,} images: biased high{singular}; compare it only with others over"
        f" {images:,}"
    )


def name_of(value: str, label: str) -> str:
    """Return a metric's name in a table; `label`: that of the features' Fréchet distance.

    FID, KID and IS stand for Inception with its reference weights; everything else names its
    extractor. Precision and recall always do: published ones use another network (VGG16).
    """
    _, _, extractor = label.partition(" ")
    return {
        "frechet": label,
        "kid": f"KID {extractor}".rstrip(),
        "inception_score": f"IS {extractor}".rstrip(),
        "precision": f"precision {extractor or '(inception)'}",
        "recall": f"recall {extractor or '(inception)'}",
    }[value]
