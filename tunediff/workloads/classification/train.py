"""Train a classifier: an ordinary loop on `Trial`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunediff.data.images import in_unit_range, load
from tunediff.data.items import Prepare, Uniform
from tunediff.evaluation import networks
from tunediff.training import optimizer as optimizers
from tunediff.training.trial import Trial
from tunediff.workloads.classification import libraries, sets
from tunediff.workloads.classification.evaluator import HeldOutEvaluator
from tunediff.workloads.classification.knobs import Knobs

__all__ = ["network", "train"]


def train(trial: Trial) -> None:
    """Learn to classify images; all ranks call it."""
    knobs: Knobs = trial.knobs
    net = network(knobs)
    trial.prepare(net, blocks=networks.Block, flops_per_sample=flops_per_sample(knobs))
    batch_size = trial.config.loader.batch_size
    optimizer = optimizers.build(knobs.optimizer, batch_size, net)
    trial.keep(network=net, optimizer=optimizer)

    # ---- data and evaluation
    data, all_images = sets.learned(knobs.data), load(knobs.data)
    digest, summary = all_images.digest, all_images.summary
    trial.about(data=data.name, samples=len(data), digest=digest, summary=summary)
    if trial.evaluates:
        held_out = sets.held_out(knobs.data, knobs.evaluation.images)
        evaluator = HeldOutEvaluator(held_out, knobs.evaluation.batch_size, trial.world)

        def evaluate() -> dict[str, Any]:
            metrics = evaluator(net, trial.should_stop)
            trial.show("confusion", evaluator.table)
            return {**metrics}

        trial.evaluate_with(evaluate)

    # ---- train
    assert data.labels is not None
    smoothing = knobs.regularization.label_smoothing

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing)

    prepare = augmented(knobs.data.horizontal_flip, knobs.regularization.crop_padding)
    for images, labels in trial.batches((data.pixels, data.labels), prepare):
        optimizers.set_learning_rate(optimizer, knobs.optimizer, batch_size, trial.progress)
        trial.forward_backward((images,), (labels,), loss_of)
        if trial.sync_gradients:
            trial.update(optimizer, clip_norm=knobs.optimizer.clip_norm)


# ---- the network
def network(knobs: Knobs) -> nn.Module:
    """Return `model.name` for the data's channels, side and classes, random weights."""
    model, channels, classes = knobs.model, knobs.data.channels, sets.classes(knobs.data)
    library, slash, name = model.name.partition("/")
    if slash:
        return libraries.build(library, name, knobs.data, classes)
    if model.name == "resnext29":
        return networks.resnext29(model.cardinality, model.width, channels, classes)
    build: Callable[[int, int, int], nn.Module] = getattr(networks, model.name)
    return build(model.width, channels, classes)


def flops_per_sample(knobs: Knobs) -> float:
    """Return an image's operations in a training step: three forward passes'.

    The backward pass takes two products for each one of the forward pass (model FLOPs of PaLM,
    arXiv 2204.02311, appendix B). Products and convolutions only, as torch's own counter has them.
    """
    from torch.utils.flop_counter import FlopCounterMode

    side, counter = knobs.data.image_size, FlopCounterMode(display=False)
    with torch.device("meta"), torch.no_grad(), counter:  # shapes suffice
        network(knobs).eval()(torch.empty(1, knobs.data.channels, side, side))
    return 3.0 * float(counter.get_total_flops())


# ---- the images
def augmented(flip: bool, padding: int) -> Prepare:
    """Return the map of bytes and labels to a batch: crops, mirrored, float32 in [−1, 1]."""
    scaled = in_unit_range(flip)

    def prepare(batch: tuple[Tensor, Tensor], uniform: Uniform) -> tuple[Tensor, Tensor]:
        pixels, labels = batch
        return scaled(crop(pixels, padding, uniform) if padding else pixels, uniform), labels

    return prepare


def crop(pixels: Tensor, padding: int, uniform: Uniform) -> Tensor:
    """Cut a random window of each image [B, C, H, W] within black borders of `padding`."""
    b, c, height, width = (torch.arange(size, device=pixels.device) for size in pixels.shape)

    def first(axis: str) -> Tensor:
        drawn = (uniform(f"crop {axis}") * (2 * padding + 1)).long().clamp_(max=2 * padding)
        return drawn.to(pixels.device, non_blocking=True)[:, None]

    rows, columns = first("row") + height, first("column") + width  # [B, H], [B, W]
    rows, columns = rows[:, None, :, None], columns[:, None, None, :]
    return F.pad(pixels, (padding,) * 4)[b[:, None, None, None], c[:, None, None], rows, columns]
