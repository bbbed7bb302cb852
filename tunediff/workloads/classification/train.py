"""Train a classifier: an ordinary loop on `Trial`; its network, and how it is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunediff.core.progress import Progress
from tunediff.core.trial_record import NotFiniteError
from tunediff.data.images import Images, in_unit_range, load
from tunediff.data.items import Prepare, Uniform
from tunediff.distributed import World
from tunediff.evaluation import networks
from tunediff.training import optimizer as optimizers
from tunediff.training.precision import evaluation_precision
from tunediff.training.trial import Trial
from tunediff.workloads.classification import libraries, sets
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
            metrics = evaluator(net)
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


# ---- the evaluation
class HeldOutEvaluator:
    """Measures models on held-out images. All ranks call it and get the same numbers."""

    def __init__(self, held_out: Images, batch_size: int, world: World) -> None:
        """`held_out` with labels; `batch_size`: images at once on each rank."""
        assert held_out.labels is not None
        self._pixels, self._labels = held_out.pixels, held_out.labels
        self._names, self._batch_size, self._world = held_out.class_names, batch_size, world
        self._scaled = in_unit_range(flip=False)
        self.table: dict[str, list[float]] = {}
        """Of the last evaluation, a row for each class: its number, its images, the share of them
        that is classified right, and how many of them were classified as which class."""

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return `accuracy`, the share classified right, and `validation_loss` in nats.

        In float32; the model is in evaluation mode and computes no gradients, as in every function
        of `evaluate_with`. Raises, on all ranks at once, `NotFiniteError`.
        """
        world, count, size = self._world, len(self._labels), self._batch_size
        predicted = torch.zeros(count, dtype=torch.int64, device=world.device)
        losses = torch.zeros(count, dtype=torch.float64, device=world.device)
        # Batch statistics differ between ranks: those of rank 0 are saved.
        for buffer in model.buffers():
            world.first(buffer)
        # Every rank fills some rows, in equally many batches; the sum over ranks is complete.
        work = Progress("held-out images", count)
        for start in range(0, count, world.size * size):
            work.more(world.size * size * (start > 0))
            rows = torch.arange(start + world.rank * size, start + (world.rank + 1) * size)
            logits, labels = self._logits(model, rows.clamp(max=count - 1))
            rows = rows[rows < count].to(world.device)
            predicted[rows] = logits.argmax(1)[: len(rows)]
            losses[rows] = F.cross_entropy(logits, labels, reduction="none")[: len(rows)].double()
        predicted, losses = world.sum(predicted).cpu(), world.sum(losses).cpu()
        if not torch.isfinite(losses).all():
            raise NotFiniteError("outputs for held-out images are not finite")
        self.table = self._confusion(predicted)
        accuracy = (predicted == self._labels).sum().item() / count
        return {"accuracy": accuracy, "validation_loss": losses.mean().item()}

    def _logits(self, model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, float32 [b, classes], and labels [b] of these images."""
        device = self._world.device
        pixels, labels = self._pixels[rows].to(device), self._labels[rows].to(device)
        with evaluation_precision(device):
            return model(self._scaled(pixels, lambda purpose: torch.empty(0))).float(), labels

    def _confusion(self, predicted: Tensor) -> dict[str, Any]:
        width = len(self._names)
        pairs = torch.bincount(self._labels * width + predicted, minlength=width * width)
        matrix = pairs.view(width, width)  # a row for each true class
        images, right = matrix.sum(1), matrix.diag()
        table = {
            "class": list(range(width)),
            "images": images.tolist(),
            "right": (right / images.clamp(min=1)).tolist(),
        }
        columns = zip(self._names, matrix.T, strict=True)
        return table | {f"as {name}": column.tolist() for name, column in columns}
