"""Send a search to MLflow."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff.core.point import Point
from tunediff.integrations.tracked_run import Run, RunEnd, is_number, numbers, project


class MlflowRuns:
    """MLflow: a run per search, a nested one per trial; `MLFLOW_TRACKING_URI`: its server.

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
            if is_number(value):
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
            name = project("MLFLOW_EXPERIMENT_NAME")
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
    """Return a name with `_` for what MLflow refuses in names, such as `recall@5`."""
    name = re.sub(r"[^\w.\-/ :]", "_", name)[: MlflowRuns.MAX_NAME]
    # MLflow may use it as a path, which must not have another form: `a//b`, `../a`
    is_path = all(part.strip(".") for part in name.split("/")) and not name.startswith("..")
    return name if is_path else re.sub(r"[./]", "_", name)
