"""Write a search for TensorBoard, into `tensorboard/` of its folder.

Steps are samples, and the relative time is training seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from tunediff.core import text
from tunediff.core.point import Point
from tunediff.integrations.services import Run, RunEnd, numbers

# tensorboardX imports torch where it finds it: seconds, and half a gigabyte in a process that has
# no use for it.
_torch = sys.modules.get("torch")
sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
try:
    from tensorboardX import SummaryWriter
    from tensorboardX.summary import hparams
finally:
    if _torch is None:
        del sys.modules["torch"]


GROUP = "evaluation"
"""Group of the scalars, as `train` writes them."""


class TensorboardRuns:
    """One folder of event files for every run."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._writers = folder / "tensorboard", dict[str, SummaryWriter]()

    def send(
        self, run: Run, points: Sequence[Point], pictures: Mapping[str, Path], end: RunEnd | None
    ) -> None:
        writer = self._writer(run, points)
        for point in points:
            for name, value in numbers(point).items():
                tag = name if "/" in name else f"{GROUP}/{name}"
                writer.add_scalar(tag, value, point.samples, walltime=run.at(point))
        last = points[-1] if points else None
        for name, path in pictures.items():
            pixels = np.asarray(Image.open(path).convert("RGB"))
            when = run.at(last) if last is not None else None
            writer.add_image(
                name, pixels, last.samples if last else 0, walltime=when, dataformats="HWC"
            )
        if end is not None:
            self._end(writer, run, end)
        writer.flush()
        if end is not None:
            self._writers.pop(run.id).close()

    def close(self) -> None:
        """Close all files."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, run: Run, points: Sequence[Point]) -> SummaryWriter:
        """Return the open writer of a run; where an earlier process was killed, what it wrote
        beyond is purged."""
        if run.id not in self._writers:
            folder = self._folder / run.name
            purge = points[0].samples if points and folder.exists() else None
            suffix = (  # names have whole seconds, and files are read in their order
                f".{time.time_ns()}"
            )
            self._writers[run.id] = writer = SummaryWriter(
                str(folder), purge_step=purge, filename_suffix=suffix
            )
            values = {name: _plain(value) for name, value in run.config.items()}
            experiment, begin, _ = hparams(values, {f"{GROUP}/{run.objective}": None})
            for part in (experiment, begin):
                writer.file_writer.add_summary(part)
        return self._writers[run.id]

    @staticmethod
    def _end(writer: SummaryWriter, run: Run, end: RunEnd) -> None:
        words = {"status": end.status, "reason": end.reason, **end.summary}
        lines = [
            f"- {name}: {text.number(value)}"
            for name, value in words.items()
            if value not in ("", None)
        ]
        writer.add_text("result", "\n".join(lines), walltime=end.time)
        writer.file_writer.add_summary(hparams({}, {})[2])


def _plain(value: object) -> object:
    return value if isinstance(value, str | bool | int | float) else json.dumps(value, default=str)
