"""Services for tracking experiments, by name, and what each is sent of a search.

A service is imported when its class is made, in the process that speaks to it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tunediff.core import text
from tunediff.core.point import Point

PROJECT = "tunediff"
"""Default name of the project or experiment at a service."""
_FIRST = {
    *("loss", "train_s", "device_s", "samples", "samples_per_s", "steps", "index"),
    *("peak_memory_mib", "energy_wh"),
}
"""What services show first, with what the evaluation returned; other numbers are in the group
`system`."""
_SUCCESSES = ("ok", "pruned", "skipped")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run at a service: a trial, or the search as a whole, under which the trials are."""

    kind: str
    """`search`, `trial`, `confirming` for a confirming run, or `training` for one outside any
    search."""
    name: str
    """`t0003`, `confirm/t0003`; of the search its name."""
    search: str
    id: str
    """Unique, also among searches of one name; of the characters that every service allows."""
    search_id: str
    objective: str
    config: Mapping[str, Any]
    """Knobs by dotted name."""
    started: float
    """Unix time."""

    def at(self, point: Point) -> float:
        """Return the Unix time of a point at which services draw it: its training seconds after the
        start."""
        return self.started + point.train_s


@dataclasses.dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    status: str
    reason: str
    time: float
    """Unix time."""
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: tuple[Path, ...] = ()

    @property
    def failed(self) -> bool:
        """Return whether the service shows it as a failure."""
        return self.status not in _SUCCESSES

    @property
    def values(self) -> dict[str, Any]:
        """Return status, reason and summary, without what is empty."""
        values = {"status": self.status, "reason": self.reason, **self.summary}
        return {name: value for name, value in values.items() if value not in ("", None)}


class Service(Protocol):
    """Sends runs to one service; any exception means that it may be tried again."""

    def send(
        self, run: Run, points: Sequence[Point], pictures: Mapping[str, Path], end: RunEnd | None
    ) -> None:
        """Send the new points of a run, which is begun or continued, its pictures as they are now,
        and how it ended."""

    def close(self) -> None:
        """Wait until the service has everything."""


def numbers(point: Point) -> dict[str, float]:
    """Return the finite numbers of a point by name; those about the machine as `system/…`."""
    first = {*_FIRST, *point.metrics}
    values = {name: float(value) for name, value in point.flat.items() if _is_number(value)}
    return {name if name in first else f"system/{name}": value for name, value in values.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _project(variable: str) -> str:
    """Return the project that the service's own variable names, or the default."""
    return os.environ.get(variable) or PROJECT


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
            project=_project("WANDB_PROJECT"),
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
            project=_project("TRACKIO_PROJECT"),
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
        """Return the open writer of a run; what a killed process wrote beyond `points` is
        purged."""
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


class MlflowRuns:
    """MLflow: a parent run for the search, a nested run per trial; `MLFLOW_TRACKING_URI` names the
    server.

    Runs are found again by a tag, so that a resumed search continues them. A metric that is sent
    again, with equal step and time, is stored once.
    """

    package = "mlflow"
    ID = "tunediff.id"
    """Tag by which a run is found again."""
    MAX_PARAMS, MAX_METRICS, MAX_VALUE, MAX_NAME = 100, 1000, 500, 250
    """What one request holds; characters of a parameter, and of a name, that every store takes."""

    def __init__(self, folder: Path) -> None:
        # A call that fails is repeated at the next look: the client need not try for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = importlib.import_module("mlflow").MlflowClient()
        self._experiment, self._runs = "", dict[str, str]()

    def send(
        self, run: Run, points: Sequence[Point], pictures: Mapping[str, Path], end: RunEnd | None
    ) -> None:
        from PIL import Image

        opened, metric = self._opened(run), self._entities.Metric
        metrics = [
            metric(_mlflow_name(name), value, round(1000 * run.at(point)), point.samples)
            for point in points
            for name, value in numbers(point).items()
        ]
        for begin in range(0, len(metrics), self.MAX_METRICS):
            self._client.log_batch(opened, metrics=metrics[begin : begin + self.MAX_METRICS])
        step, when = (0, None)
        if points:
            step, when = points[-1].samples, round(1000 * run.at(points[-1]))
        for name, path in pictures.items():
            key = re.sub(r"[^\w.\- ]", "_", name, flags=re.ASCII)  # becomes a part of a file name
            self._client.log_image(opened, Image.open(path), key=key, step=step, timestamp=when)
        if end is not None:
            self._end(opened, end)

    def close(self) -> None:
        """Do nothing: every call has waited for the server."""

    def _end(self, opened: str, end: RunEnd) -> None:
        when, metrics, tags = round(1000 * end.time), [], []
        for name, value in end.values.items():
            if _is_number(value):
                metrics.append(self._entities.Metric(_mlflow_name(name), float(value), when, 0))
            else:
                tags.append(self._entities.RunTag(_mlflow_name(name), str(value)))
        self._client.log_batch(opened, metrics=metrics, tags=tags)
        for path in end.files:
            self._client.log_artifact(opened, str(path))
        self._client.set_terminated(opened, "FAILED" if end.failed else "FINISHED", when)

    def _opened(self, run: Run) -> str:
        """Return the server's id of a run, which is begun where the server has none of this id."""
        if run.id not in self._runs:
            earlier = self._find(run.id)
            identifier = str(earlier.info.run_id) if earlier else self._create(run)
            # A run that was found may lack knobs: the server may have failed before they came.
            stored = earlier.data.params if earlier else {}
            knobs = {_mlflow_name(name): str(value) for name, value in run.config.items()}
            missing = [
                self._entities.Param(name, value[: self.MAX_VALUE])
                for name, value in knobs.items()
                if name not in stored
            ]
            for begin in range(0, len(missing), self.MAX_PARAMS):
                self._client.log_batch(identifier, params=missing[begin : begin + self.MAX_PARAMS])
            self._client.update_run(identifier, status="RUNNING")
            self._runs[run.id] = identifier
        return self._runs[run.id]

    def _find(self, identifier: str) -> Any:
        if not self._experiment:
            name = _project("MLFLOW_EXPERIMENT_NAME")
            # The tag lets MLflow's pages show trainings instead of traces.
            kind = {"mlflow.experimentKind": "custom_model_development"}
            experiment = self._client.get_experiment_by_name(name)
            self._experiment = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(name, tags=kind)
            )
        query = f"tags.`{self.ID}` = '{identifier}'"
        runs = self._client.search_runs([self._experiment], query, max_results=1)
        return runs[0] if runs else None

    def _create(self, run: Run) -> str:
        tags = {self.ID: run.id, "search": run.search, "kind": run.kind}
        tags["mlflow.source.name"] = "tunediff"
        if run.kind != "search" and (parent := self._find(run.search_id)):
            tags["mlflow.parentRunId"] = parent.info.run_id
        begun = self._client.create_run(self._experiment, round(1000 * run.started), tags, run.name)
        return str(begun.info.run_id)


def _mlflow_name(name: str) -> str:
    """Return a name with `_` for what MLflow refuses in names of metrics, parameters and tags:
    `recall@5`."""
    name = re.sub(r"[^\w.\-/ :]", "_", name)[: MlflowRuns.MAX_NAME]
    # MLflow may use it as a path, which must not have another form: `a//b`, `../a`
    is_path = all(part.strip(".") for part in name.split("/")) and not name.startswith("..")
    return name if is_path else re.sub(r"[./]", "_", name)


SERVICES: dict[str, Any] = {
    "wandb": WandbRuns,
    "mlflow": MlflowRuns,
    "trackio": TrackioRuns,
    "tensorboard": TensorboardRuns,
}
"""The classes by the names that `--track` takes; `package`: what has to be installed."""
