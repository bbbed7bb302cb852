"""Services for tracking experiments, by name.

A service is imported when its class is made, in the process that speaks to it.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff.core import text
from tunediff.core.point import Point
from tunediff.integrations.mlflow_runs import MlflowRuns
from tunediff.integrations.tracked_run import Run, RunEnd, numbers, project


class WandbRuns:
    """Weights & Biases: a run per trial, grouped by search; its files are in `wandb/` of the
    search's folder. `WANDB_MODE=offline` writes files only."""

    package = "wandb"

    def __init__(self, folder: Path) -> None:
        self._wandb = importlib.import_module("wandb")
        self._folder, self._runs = folder, dict[str, Any]()

    def send(
        self, run: Run, points: Sequence[Point], pictures: Mapping[str, Path], end: RunEnd | None
    ) -> None:
        if run.id not in self._runs:
            self._runs[run.id] = self._begin(run)
        opened = self._runs[run.id]
        images = {name: self._wandb.Image(str(path)) for name, path in pictures.items()}
        for point in points:
            of_now = images if point is points[-1] else {}
            opened.log({**numbers(point), **of_now}, step=point.index, commit=True)
        if end is None:
            return
        if not points and images:
            opened.log(images)
        for path in end.files:
            opened.log({path.stem: self._wandb.Html(str(path))})
        opened.summary.update({"status": end.status, "reason": end.reason, **end.summary})
        opened.finish(exit_code=int(end.failed))
        del self._runs[run.id]

    def close(self) -> None:
        for opened in self._runs.values():
            opened.mark_preempting()  # a run of the same id continues it
            opened.finish(exit_code=1)

    def _begin(self, run: Run) -> Any:
        quiet = self._wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_machine_info=True,
        )
        opened = self._wandb.init(
            project=project("WANDB_PROJECT"),
            name=run.name,
            group=run.search,
            job_type=run.kind,
            id=run.id,
            resume="allow",
            reinit="create_new",
            dir=str(self._folder),
            config=dict(run.config),
            settings=quiet,
        )
        opened.define_metric("train_s")
        opened.define_metric("*", step_metric="train_s")
        return opened


class TrackioRuns:
    """Trackio's local database, or the Space or server that its own variables name.

    It has one open run, so each is opened for what is sent and closed again.
    """

    package = "trackio"

    def __init__(self, folder: Path) -> None:
        self._trackio = importlib.import_module("trackio")

    def send(
        self, run: Run, points: Sequence[Point], pictures: Mapping[str, Path], end: RunEnd | None
    ) -> None:
        name = run.name if run.kind in ("search", "training") else f"{run.search}/{run.name}"
        self._trackio.init(
            project=project("TRACKIO_PROJECT"),
            name=name,
            group=run.search,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        images = {key: self._trackio.Image(str(path)) for key, path in pictures.items()}
        for point in points:
            of_now = images if point is points[-1] else {}
            self._trackio.log({**numbers(point), **of_now}, step=point.index)
        if end is not None:
            self._trackio.log({**end.values, **(images if not points else {})})
            for path in end.files:
                self._trackio.save(str(path))
        self._trackio.finish()

    def close(self) -> None:
        """Do nothing: every run is closed."""


class TensorboardRuns:
    """Event files for TensorBoard, a folder per run in `tensorboard/` of the search's folder.

    Steps are samples, and the relative time is training seconds.
    """

    package = "tensorboardX"

    def __init__(self, folder: Path) -> None:
        # It imports torch where it finds it: seconds, and half a gigabyte, of no use here.
        torch = sys.modules.get("torch")
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        try:
            self._tensorboard = importlib.import_module("tensorboardX")
            self._hparams = importlib.import_module("tensorboardX.summary").hparams
        finally:
            if torch is None:
                del sys.modules["torch"]
        self._folder, self._writers = folder / "tensorboard", dict[str, Any]()

    def send(
        self, run: Run, points: Sequence[Point], pictures: Mapping[str, Path], end: RunEnd | None
    ) -> None:
        writer = self._writer(run, points)
        for point in points:
            for name, value in numbers(point).items():
                tag = name if "/" in name else f"evaluation/{name}"  # as `train` writes them
                writer.add_scalar(tag, value, point.samples, walltime=run.at(point))
        samples, when = (points[-1].samples, run.at(points[-1])) if points else (0, None)
        for name, path in pictures.items():
            writer.add_image(name, _pixels(path), samples, walltime=when, dataformats="HWC")
        if end is not None:
            lines = [f"- {name}: {text.number(value)}" for name, value in end.values.items()]
            writer.add_text("result", "\n".join(lines), walltime=end.time)
            writer.file_writer.add_summary(self._hparams({}, {})[2])
            self._writers.pop(run.id).close()
        else:
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, run: Run, points: Sequence[Point]) -> Any:
        """Return a run's open writer; what a killed process wrote beyond `points` goes."""
        if run.id not in self._writers:
            folder = self._folder / run.name
            # Names of event files have whole seconds, and are read in their order.
            self._writers[run.id] = writer = self._tensorboard.SummaryWriter(
                str(folder),
                purge_step=points[0].samples if points and folder.exists() else None,
                filename_suffix=f".{time.time_ns()}",
            )
            plain = (str, bool, int, float)
            knobs = {
                name: value if isinstance(value, plain) else json.dumps(value, default=str)
                for name, value in run.config.items()
            }
            experiment, begin, _ = self._hparams(knobs, {f"evaluation/{run.objective}": None})
            for part in (experiment, begin):
                writer.file_writer.add_summary(part)
        return self._writers[run.id]


def _pixels(path: Path) -> Any:
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB"))


SERVICES: dict[str, Any] = {
    "wandb": WandbRuns,
    "mlflow": MlflowRuns,
    "trackio": TrackioRuns,
    "tensorboard": TensorboardRuns,
}
"""The classes by the names that `--track` takes; `package`: what has to be installed."""
