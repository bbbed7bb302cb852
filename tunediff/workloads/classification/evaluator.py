"""Measure a classifier on held-out images: accuracy, loss and the confusion of classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunediff.core.errors import EvaluationStoppedError
from tunediff.core.progress import Progress
from tunediff.core.trial_record import NotFiniteError
from tunediff.data.images import Images, in_unit_range
from tunediff.distributed import World
from tunediff.training.precision import evaluation_precision


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

    def __call__(
        self, model: nn.Module, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Return `accuracy`, the share classified right, and `validation_loss` in nats.

        In float32; the model is in evaluation mode and computes no gradients, as in every function
        of `evaluate_with`. Raises, on all ranks at once, `NotFiniteError`, and
        `EvaluationStoppedError` if `should_stop()` was true before all images were classified.
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
            if world.any(should_stop()):
                raise EvaluationStoppedError(f"evaluation stopped after {start} of {count} images")
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
