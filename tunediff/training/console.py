"""What `tunediff.train` shows of a training: lines, pictures, TensorBoard curves."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter
from torch import Tensor

from tunediff.config import Workload
from tunediff.core import text
from tunediff.core.point import Point
from tunediff.core.progress import EventLines
from tunediff.core.trial_record import REFUSED
from tunediff.training.observer import Recorder, Shown


class ConsoleRecorder(Recorder):
    """Journal, pictures, curves over samples, and a line per evaluation on stdout."""

    def __init__(
        self,
        folder: Path,
        workload: Workload,
        done: int | None,
        signals: Sequence[int],
        lines: EventLines,
    ) -> None:
        """`done`: samples at the last evaluation of an interrupted training; curves beyond it are
        drawn anew. `lines`: where evaluations are reported."""
        super().__init__(folder, signals)
        purge = None if done is None else done + 1
        self._workload, self._pictures, self._lines = workload, set[str](), lines
        self._curves = SummaryWriter(str(folder / "tensorboard"), flush_secs=30, purge_step=purge)

    def about(self, facts: Mapping[str, Any]) -> None:
        super().about(facts)
        for line in facts.get("summary", ()):
            print(line, file=sys.stderr)

    def scalars(self, values: Mapping[str, Any], group: str = "train") -> None:
        for name, value in values.items():
            if name not in ("samples", "index", "fraction") and isinstance(value, int | float):
                self._curves.add_scalar(f"{group}/{name}", value, int(values["samples"]))

    def show(self, name: str, what: Shown) -> None:
        super().show(name, what)
        if isinstance(what, Tensor):
            self._pictures.add(name)

    def point(self, point: Point) -> bool:
        if not self.journal.point(point):
            return True
        self.scalars(point.flat, "evaluation")
        for name in self._pictures:  # one of each evaluation stays
            copy = self.folder / name / f"{point.index:04d}.png"
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(self.folder / f"{name}.png", copy)
        metric = self._workload.objective
        value = (
            f"{point.get('label', metric.label or metric.name)}"
            f" {text.number(point.get(metric.name))}"
        )
        rate = f"loss {text.number(point.loss)}  {point.samples_per_s:.0f} {self._workload.unit}/s"
        if (breaks := point.graph_breaks) and point.index == 1:
            pieces = text.pluralize(breaks, "break")
            print(f"WARNING: torch.compile made graphs in pieces: {pieces}", file=sys.stderr)
        if (capture := point.capture or "").startswith(REFUSED) and point.index == 1:
            print(f"WARNING: compile.capture: {capture}", file=sys.stderr)
        self._lines.say(f"{point.train_s:8.1f} s  {value}  {rate}", timed=False)
        return True

    def close(self) -> None:
        """Put all on disk."""
        with contextlib.suppress(OSError):  # of a full disk, which the journal says with its file
            self._curves.close()
