"""What every evaluation of a classifier finds: how many held-out images it gets right, and which not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunediff.core.progress import Progress
from tunediff.core.trial_record import NotFiniteError
from tunediff.data.images import Images, in_unit_range
from tunediff.distributed import World
from tunediff.training.precision import evaluation_precision


class Judge:
    """Judges models by the same held-out images. All ranks call it together and get the same numbers."""

    def __init__(self, held_out: Images, batch_size: int, world: World) -> None:
        """`held_out` with labels; `batch_size`: images at once on each rank."""
        assert held_out.labels is not None
        self._pixels, self._labels, self._names = held_out.pixels, held_out.labels, held_out.class_names
        self._batch_size, self._world = batch_size, world
        self._scaled = in_unit_range(flip=False)
        self.table: dict[str, list[float]] = {}
        """Of the last evaluation, a row for each class: its number, its images, the share of them that is right, and
        how many of them were taken for which class."""

    @torch.no_grad()
    def __call__(self, model: nn.Module, should_stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """`accuracy`, the share of images that are right, and `validation_loss`, their mean cross-entropy in nats.

        In float32 and evaluation mode. Raises, on all ranks at once, `NotFiniteError`, and TimeoutError if
        `should_stop()` held before all images were seen.
        """
        world, count, size = self._world, len(self._labels), self._batch_size
        predicted = torch.zeros(count, dtype=torch.int64, device=world.device)
        losses = torch.zeros(count, dtype=torch.float64, device=world.device)
        for buffer in model.buffers():  # batch statistics differ between ranks: those of rank 0 are saved
            world.first(buffer)
        training = model.training
        model.eval()
        try:
            # Every rank fills in rows of its own, in as many batches as every other has; the sum is the whole.
            work = Progress("held-out images", count)
            for start in range(0, count, world.size * size):
                work.more(world.size * size * (start > 0))
                if world.any(should_stop()):
                    raise TimeoutError(f"evaluation stopped after {start} of {count} images")
                rows = torch.arange(start + world.rank * size, start + (world.rank + 1) * size)
                logits, labels = self._logits(model, rows.clamp(max=count - 1))
                rows = rows[rows < count].to(world.device)
                predicted[rows] = logits.argmax(1)[: len(rows)]
                losses[rows] = F.cross_entropy(logits, labels, reduction="none")[: len(rows)].double()
        finally:
            model.train(training)
        predicted, losses = world.sum(predicted).cpu(), world.sum(losses).cpu()
        if not torch.isfinite(losses).all():
            raise NotFiniteError("outputs for held-out images are not finite")
        self.table = self._confusion(predicted)
        return {
            "accuracy": (predicted == self._labels).sum().item() / count,
            "validation_loss": losses.mean().item(),
        }

    def _logits(self, model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [b, classes] and labels [b] of some of the images."""
        pixels, labels = self._pixels[rows].to(self._world.device), self._labels[rows].to(self._world.device)
        with evaluation_precision(self._world.device):
            return model(self._scaled(pixels, lambda purpose: torch.empty(0))).float(), labels

    def _confusion(self, predicted: Tensor) -> dict[str, Any]:
        width = len(self._names)
        matrix = torch.bincount(self._labels * width + predicted, minlength=width * width).view(width, width)
        images, right = matrix.sum(1), matrix.diag()
        taken = {f"as {name}": column.tolist() for name, column in zip(self._names, matrix.T, strict=True)}
        share = (right / images.clamp(min=1)).tolist()
        return {"class": list(range(width)), "images": images.tolist(), "right": share, **taken}
