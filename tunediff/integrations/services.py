"""Services for tracking experiments, by name.

The package of a service is imported when its first run is opened.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tunediff.core.outcomes import Status
from tunediff.core.point import Point

PROJECT = "tunediff"
"""Default name of the project or experiment at a service."""
_FIRST = {"loss", "train_s", "device_s", "samples", "samples_per_s", "steps", "peak_memory_mib"}
"""Numbers that services show first, with the evaluation's; others: group `system`."""
_SUCCESSES = (Status.OK, Status.PRUNED, Status.SKIPPED)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run at a service: a trial, or the search as a whole."""

    kind: str
    """`search`, `trial`, `confirming` (a confirming run) or `training` outside a search."""
    name: str
    """`t0003`, `confirm/t0003`; of the search its name."""
    folder: Path
    """Folder of the search."""
    id: str
    """Unique, also among searches of one name; of the characters that every service allows."""
    config: Mapping[str, Any]
    """Knobs by dotted name."""


class TrackedRun(Protocol):
    """An open run of one service. Any method may raise what the service raises."""

    package: ClassVar[str]

    def __init__(self, run: Run) -> None: ...

    def log(self, values: Mapping[str, float], samples: int) -> None:
        """Send a point."""

    def image(self, path: Path, samples: int) -> None:
        """Send a picture."""

    def end(self, values: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Send status and result of the run, and close it."""

    def close(self) -> None:
        """Close a run that may go on later."""


class WandbRun:
    """Weights & Biases: runs grouped by search; files in `wandb/` of the search's folder.

    `WANDB_MODE=offline` writes files only.
    """

    package: ClassVar[str] = "wandb"

    def __init__(self, run: Run) -> None:
        self._wandb = importlib.import_module("wandb")
        self._run = self._wandb.init(
            project=_project("WANDB_PROJECT"),
            name=run.name,
            group=run.folder.name,
            job_type=run.kind,
            id=run.id,
            resume="allow",
            reinit="create_new",
            dir=str(run.folder),
            config=dict(run.config),
            settings={
                "silent": True,
                "console": "off",
                "x_disable_stats": True,
                "init_timeout": 30,
            },
        )
        self._run.define_metric("*", step_metric="train_s")

    def log(self, values: Mapping[str, float], samples: int) -> None:
        self._run.log(dict(values), step=samples)

    def image(self, path: Path, samples: int) -> None:
        self._run.log({path.stem: self._wandb.Image(str(path))}, step=samples)

    def end(self, values: Mapping[str, Any], files: Sequence[Path]) -> None:
        for path in files:
            self._run.log({path.stem: self._wandb.Html(str(path))})
        self._run.summary.update(dict(values))
        self._run.finish(exit_code=int(values["status"] not in _SUCCESSES))

    def close(self) -> None:
        self._run.mark_preempting()  # a run of the same id continues it
        self._run.finish(exit_code=1)


class TrackioRun:
    """Trackio's local database, or the Space or server that its own variables name."""

    package: ClassVar[str] = "trackio"

    def __init__(self, run: Run) -> None:
        self._trackio = importlib.import_module("trackio")
        group = run.folder.name
        self._run = self._trackio.init(
            project=_project("TRACKIO_PROJECT"),
            name=run.name if run.kind in ("search", "training") else f"{group}/{run.name}",
            group=group,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, values: Mapping[str, float], samples: int) -> None:
        self._run.log(dict(values), step=samples)

    def image(self, path: Path, samples: int) -> None:
        self._run.log({path.stem: self._trackio.Image(str(path))}, step=samples)

    def end(self, values: Mapping[str, Any], files: Sequence[Path]) -> None:
        self._run.log(dict(values))
        self._run.finish()

    def close(self) -> None:
        self._run.finish()


class MlflowRun:
    """MLflow: a run per trial in one experiment, with the search as tag `search`."""

    package: ClassVar[str] = "mlflow"

    def __init__(self, run: Run) -> None:
        mlflow = importlib.import_module("mlflow")
        self._client, self._entities = mlflow.MlflowClient(), mlflow.entities
        name = _project("MLFLOW_EXPERIMENT_NAME")
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self._client.create_experiment(name)
        found = self._client.search_runs([place], f"tags.`tunediff.id` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {"tunediff.id": run.id, "search": run.folder.name, "kind": run.kind}
        self._id = self._client.create_run(place, tags=tags, run_name=run.name).info.run_id
        params = [self._entities.Param(*item) for item in _strings(run.config).items()]
        for begin in range(0, len(params), 100):  # a server takes no more at once
            self._client.log_batch(self._id, params=params[begin : begin + 100])

    def log(self, values: Mapping[str, float], samples: int) -> None:
        when = round(1000 * values["train_s"])  # the axis of relative time: training seconds
        metrics = [
            self._entities.Metric(_mlflow_name(name), value, when, samples)
            for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def image(self, path: Path, samples: int) -> None:
        self._client.log_artifact(self._id, str(path), f"images/{samples}")

    def end(self, values: Mapping[str, Any], files: Sequence[Path]) -> None:
        tags = [self._entities.RunTag(*item) for item in _strings(values).items()]
        self._client.log_batch(self._id, tags=tags)
        for path in files:
            self._client.log_artifact(self._id, str(path))
        failed = values["status"] not in _SUCCESSES
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")

    def close(self) -> None:
        """Leave the run open: it may go on."""


class TensorboardRun:
    """Event files, a folder per run in `tensorboard/` of the search's folder; steps: samples."""

    package: ClassVar[str] = "tensorboardX"

    def __init__(self, run: Run) -> None:
        tensorboard = importlib.import_module("tensorboardX")
        # Names of event files have whole seconds, and are read in their order.
        self._writer = tensorboard.SummaryWriter(
            str(run.folder / "tensorboard" / run.name), filename_suffix=f".{time.time_ns()}"
        )
        self._writer.add_text("knobs", _list(run.config))

    def log(self, values: Mapping[str, float], samples: int) -> None:
        for name, value in values.items():
            tag = name if "/" in name else f"evaluation/{name}"  # as `train` writes them
            self._writer.add_scalar(tag, value, samples)
        self._writer.flush()

    def image(self, path: Path, samples: int) -> None:
        import numpy as np
        from PIL import Image

        pixels = np.asarray(Image.open(path).convert("RGB"))
        self._writer.add_image(path.stem, pixels, samples, dataformats="HWC")

    def end(self, values: Mapping[str, Any], files: Sequence[Path]) -> None:
        self._writer.add_text("result", _list(values))
        self._writer.close()

    def close(self) -> None:
        self._writer.close()


SERVICES: dict[str, type[TrackedRun]] = {
    "wandb": WandbRun,
    "mlflow": MlflowRun,
    "trackio": TrackioRun,
    "tensorboard": TensorboardRun,
}
"""The classes by the names that `--track` takes; `package`: what has to be installed."""


def numbers(point: Point) -> dict[str, float]:
    """Return the finite numbers of a point by name; those about the machine as `system/…`."""
    values = {
        name: float(value)
        for name, value in point.flat.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    first = {*_FIRST, *point.metrics}
    return {name if name in first else f"system/{name}": value for name, value in values.items()}


def _project(variable: str) -> str:
    """Return the project that the service's own variable names, or the default."""
    return os.environ.get(variable) or PROJECT


def _list(values: Mapping[str, Any]) -> str:
    """Return values as a list in Markdown."""
    return "\n".join(f"- {name}: {value}" for name, value in values.items())


def _strings(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as MLflow takes parameters and tags."""
    return {_mlflow_name(name): str(value)[:5000] for name, value in values.items() if value != ""}


def _mlflow_name(name: str) -> str:
    """Return a name with `_` for what MLflow refuses in names, such as `recall@5`."""
    return re.sub(r"[^\w.\- /]", "_", name)[:250]
