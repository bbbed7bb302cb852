"""What can be set of a classifier, besides what every training has. Imports no torch."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field

from tunediff.config import systems
from tunediff.config.knobs import (
    EvaluationProtocol,
    Fixed,
    Float,
    Int,
    Refusal,
    Str,
    nearest,
    section,
)
from tunediff.config.workload import Metric
from tunediff.core.environment import install_command
from tunediff.core.point import Quantity
from tunediff.data import sources
from tunediff.data.knobs import DIGITS, Data
from tunediff.training import knobs as optimizers

SHIPPED = ("resnet18", "resnext29", "convnet")
"""Networks of our own."""
LIBRARIES = ("timm", "torchvision")
"""Whose networks can be named as well: `timm/NAME`."""


@section
class ClassifierModel:
    """The network; its input channels and its classes are those of the data."""

    name: Str = "resnet18"
    """`resnet18` (He et al. 2015, arXiv 1512.03385) and `resnext29` (Xie et al. 2017, arXiv
    1611.05431) as for 32×32: a 3×3 stem, no pooling before the first block.
    `convnet`: three convolutions, for 8×8 digits.
    `torchvision/NAME` (for RGB) and `timm/NAME` (the extra `timm`): theirs, random weights."""
    width: Annotated[Int, Ge(1), Le(1024)] = 64
    """Channels of the first stage, which the others are multiples of; in `resnext29` of each group
    of it."""
    cardinality: Annotated[Int, Ge(1), Le(256)] = 8
    """`resnext29`: groups of its 3×3 convolutions; 8×64d by default."""

    def check(self, config: Any) -> None:
        library, slash, _ = self.name.partition("/")
        if library not in (LIBRARIES if slash else SHIPPED):
            allowed = [*SHIPPED, *(f"{name}/NAME" for name in LIBRARIES)]
            raise Refusal("model.name", nearest(self.name, allowed))
        if library == "timm" and importlib.util.find_spec("timm") is None:
            raise Refusal("model.name", f"timm is not installed; run: {install_command('timm')}")

    def not_effective(self, config: Any, device: str) -> Iterator[tuple[str, str]]:
        if self.cardinality != ClassifierModel().cardinality and self.name != "resnext29":
            yield "model.cardinality", "only resnext29 has groups"
        if self.width != ClassifierModel().width and "/" in self.name:
            yield "model.width", "networks of libraries have a width of their own"


@section
class Regularization:
    """What keeps the network from learning images by heart, besides `data.horizontal_flip` and
    weight decay."""

    crop_padding: Annotated[Int, Ge(0), Le(64)] = 4
    """Random crop: black pixels on every side, of which a window of the image's own size is cut at
    random; 0: none."""
    label_smoothing: Annotated[Float, Ge(0.0), Lt(1.0)] = 0.0
    """Share of the probability that is spread evenly over all classes (Szegedy et al. 2015, arXiv
    1512.00567)."""


# ---- optimizers
@section
class _Customary:
    """What is usual for classifiers, in place of what is usual for diffusion models."""

    lr: Annotated[Float, Gt(0.0), Le(10.0)] = 1.0e-3
    weight_decay: Annotated[Float, Ge(0.0), Le(1.0)] = 0.05
    warmup: Annotated[Float, Ge(0.0), Le(1.0)] = 0.05
    clip_norm: Annotated[Float, Gt(0.0), Le(1000.0)] | None = None
    decay: Literal["constant", "linear", "cosine", "one_cycle"] = "cosine"


@section
class ClassifierSgd(_Customary, optimizers.Sgd):
    __doc__ = optimizers.Sgd.__doc__
    lr: Annotated[Float, Gt(0.0), Le(10.0)] = 0.1
    weight_decay: Annotated[Float, Ge(0.0), Le(1.0)] = 5.0e-4


@section
class ClassifierAdamW(_Customary, optimizers.AdamW):
    __doc__ = optimizers.AdamW.__doc__


@section
class ClassifierMuon(_Customary, optimizers.Muon):
    __doc__ = optimizers.Muon.__doc__


@section
class ClassifierAdam(_Customary, optimizers.Adam):
    __doc__ = optimizers.Adam.__doc__
    weight_decay: Annotated[Float, Ge(0.0), Le(1.0)] = 5.0e-4


Optimizer = Annotated[
    ClassifierSgd | ClassifierAdamW | ClassifierMuon | ClassifierAdam, Field(discriminator="name")
]


# ---- all of it
@section
class ClassifierEvaluation(systems.EvaluationSection):
    """How a classifier is judged: on the test split where there is one, otherwise on a fifth that
    is never learned."""

    images: Annotated[Annotated[Int, Ge(2)] | None, EvaluationProtocol()] = None
    """Held-out images at most, the first of a fixed shuffle; null: all."""
    batch_size: Annotated[Int, Ge(1), Le(65536)] = 256
    """Held-out images classified at once on each worker."""


@section
class Knobs:
    """The training of a classifier."""

    data: Data = dataclasses.field(default_factory=Data)
    model: ClassifierModel = dataclasses.field(default_factory=ClassifierModel)
    optimizer: Optimizer = dataclasses.field(default_factory=ClassifierSgd)
    regularization: Regularization = dataclasses.field(default_factory=Regularization)
    evaluation: Annotated[ClassifierEvaluation, Fixed()] = dataclasses.field(
        default_factory=ClassifierEvaluation
    )


UNIT = "images"
OBJECTIVE = Metric("accuracy", "max", "accuracy")
QUANTITIES = {
    "accuracy": Quantity(
        "accuracy", "", "share of held-out images that are classified right, 0 to 1"
    ),
    "validation_loss": Quantity(
        "validation loss", "", "mean cross-entropy of held-out images in nats, not smoothed"
    ),
}
MEMORY_FREE = (*optimizers.MEMORY_FREE_OPTIMIZER, "regularization.label_smoothing")
"""Knobs that change no more than a few MiB of device memory."""

PRESETS: dict[str, dict[str, Any]] = {
    "cifar10_classifier": {},
    "images_classifier": {"data.name": "images"},
    "digits_classifier": {
        **DIGITS,
        "model.name": "convnet",
        "model.width": 16,
        "regularization.crop_padding": 0,
        "optimizer.lr": 0.05,
        "loader.workers": 0,
    },
}


def check_files(knobs: Knobs, evaluates: bool) -> None:
    """Refuse missing data, data without classes and networks that a library has not. Raises
    `ConfigError`."""
    from tunediff.workloads.classification import libraries, sets

    sources.check(knobs.data)
    libraries.check(knobs.model.name, knobs.data, sets.classes(knobs.data))


def evaluation_protocol(config: Any) -> str:
    """Return what the objective is, in a sentence without its full stop."""
    images = config.evaluation.images
    held_out = "all" if images is None else f"at most {images:,}"
    return f"share of {held_out} held-out images that are classified right"
