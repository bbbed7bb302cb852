"""Networks of torchvision and timm by name, fitted to channels, classes and side."""

from __future__ import annotations

import textwrap

import torch
from torch import nn

from tunediff.config import ConfigError
from tunediff.config.knobs import nearest
from tunediff.data.knobs import Data


def check(model: str, data: Data, classes: int) -> None:
    """Refuse unknown names, and networks that do not fit the images. Raises `ConfigError`.

    `model`: `model.name`. The network is built and run on the meta device: nothing is computed.
    """
    library, slash, name = model.partition("/")
    if not slash:
        return
    refused, side = f"model.name: {model!r} is not allowed", data.image_size
    if name not in (known := names(library)):
        allowed = textwrap.shorten(nearest(name, known), 300)
        raise ConfigError(f"{refused}: {library} has no such network; {allowed}")
    try:
        with torch.device("meta"), torch.no_grad():
            network = build(library, name, data, classes).eval()
            shape = network(torch.empty(1, data.channels, side, side)).shape
    except Exception as error:  # anything, in code that is not ours
        why = f"it does not take images of {data.channels}×{side}×{side}"
        raise ConfigError(f"{refused}: {why} ({type(error).__name__}: {error})") from None
    if shape != (1, classes):
        found = f"{list(shape)} for an image, where [1, {classes}] is needed"
        raise ConfigError(f"{refused}: it gives {found}")


def names(library: str) -> list[str]:
    """Return the classifiers of a library that output one tensor of logits, sorted."""
    if library == "timm":
        import timm

        return list(timm.list_models())
    from torchvision import models

    several = ("googlenet", "inception_v3")  # these also output logits of auxiliary classifiers
    return [name for name in models.list_models(module=models) if name not in several]


def build(library: str, name: str, data: Data, classes: int) -> nn.Module:
    """Return the network with random weights; those of torchvision take RGB alone."""
    network: nn.Module
    if library == "timm":
        import timm

        # Networks with learned positions need to know the side, others do not take it.
        fixed = timm.get_pretrained_cfg(name).fixed_input_size
        side = {"img_size": data.image_size} if fixed else {}
        network = timm.create_model(name, in_chans=data.channels, num_classes=classes, **side)
        return network
    from torchvision import models

    side = {"image_size": data.image_size} if name.startswith("vit_") else {}
    network = models.get_model(name, weights=None, num_classes=classes, **side)
    return network
