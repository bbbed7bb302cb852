"""Observers of a training that write down what they hear."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tunediff.core.files import write_atomically, write_csv
from tunediff.core.journal import Journal
from tunediff.core.outcomes import CaptureOutcome
from tunediff.core.point import Point
from tunediff.training.engine import Observer as Observer
from tunediff.training.engine import Shown as Shown


class Recorder(Observer):
    """Write points to a journal and what is shown to files beside it."""

    def __init__(self, folder: Path, stop_requests: Sequence[object] = ()) -> None:
        super().__init__(stop_requests)
        self.folder, self.journal = folder, Journal(folder)

    def restarted(self, reason: str) -> None:
        if self.journal.restarted(reason):
            reason = reason or "it has no checkpoint"
            print(
                f"WARNING: {self.folder.name} starts from the beginning: {reason}", file=sys.stderr
            )

    def point(self, point: Point) -> bool:
        self.journal.point(point)  # on disk before anything else is done with it
        return True

    def about(self, facts: Mapping[str, Any]) -> None:
        self.journal.write("about", **facts)

    def captured(self, outcome: CaptureOutcome, reason: str) -> None:
        self.journal.write("decision", rule="capture", outcome=outcome, reason=reason)

    def show(self, name: str, what: Shown) -> None:
        if isinstance(what, Tensor):
            image_grid(what, self.folder / f"{name}.png")
            return
        rows = zip(*(map(float, column) for column in what.values()), strict=True)
        write_csv(self.folder / f"{name}.csv", what, rows, digits=6)


def image_grid(images: Tensor, path: Path, columns: int = 8, scale: int | None = None) -> None:
    """Write images uint8 [n, C, H, W], C = 1 or 3, row by row as one PNG.

    Each pixel becomes `scale`×`scale`; null: as many as make an image at least 32 pixels wide.
    Raises ValueError for no images, `OSError` if the file cannot be written.
    """
    if images.dtype != torch.uint8 or images.dim() != 4 or not len(images):
        raise ValueError(
            f"images must be uint8 [n, C, H, W], not {images.dtype} {list(images.shape)}"
        )
    from torchvision.utils import make_grid  # takes a second

    enlarge = scale or max(1, -(-32 // min(images.shape[2:])))
    enlarged = images.cpu().repeat_interleave(enlarge, 2).repeat_interleave(enlarge, 3)
    sheet = make_grid(enlarged, columns, pad_value=255)[: images.shape[1]]
    image = Image.fromarray(sheet.permute(1, 2, 0).squeeze(2).numpy())
    write_atomically(path, lambda file: image.save(file, "PNG"))
