"""Send a search to MLflow: a parent run for the search, a nested run per trial; the server is
`MLFLOW_TRACKING_URI`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

# A call that fails is repeated with the next look at the journals: the client need not try for
# minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

import mlflow
from mlflow.entities import Metric, Param, RunTag
from PIL import Image

from tunediff.core.point import Point
from tunediff.integrations.services import Run, RunEnd, is_number, numbers, project

ID = "tunediff.id"
"""Tag by which a run is found again."""
KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tag of an experiment that lets the pages show trainings instead of traces."""
MOST_PARAMS, MOST_METRICS = 100, 1000
"""What one request may hold."""
LONGEST, LONGEST_NAME = 500, 250
"""Characters of a parameter, and of any name, that every store takes."""


class MlflowRuns:
    """The runs of a search, found by a tag, so that a resumed search continues them.

    A metric that is sent again, with equal step and time, is stored once.
    """

    def __init__(self, folder: Path) -> None:
        self._client, self._runs = mlflow.MlflowClient(), dict[str, str]()
        self._experiment = ""

    def send(
        self, run: Run, points: Sequence[Point], pictures: Mapping[str, Path], end: RunEnd | None
    ) -> None:
        opened = self._opened(run)
        metrics = [
            Metric(_allowed(name), value, round(1000 * run.at(point)), point.samples)
            for point in points
            for name, value in numbers(point).items()
        ]
        for begin in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(opened, metrics=metrics[begin : begin + MOST_METRICS])
        for name, path in pictures.items():
            step, when = (
                (points[-1].samples, round(1000 * run.at(points[-1]))) if points else (0, None)
            )
            key = re.sub(r"[^\w.\- ]", "_", name, flags=re.ASCII)  # a part of a file name there
            self._client.log_image(opened, Image.open(path), key=key, step=step, timestamp=when)
        if end is not None:
            self._end(opened, end)

    def close(self) -> None:
        """Do nothing: every call has waited for the server."""

    def _end(self, opened: str, end: RunEnd) -> None:
        when = round(1000 * end.time)
        words = {"status": end.status, "reason": end.reason, **end.summary}
        values = {name: value for name, value in words.items() if is_number(value)}
        texts = {
            name: str(value)
            for name, value in words.items()
            if name not in values and value not in ("", None)
        }
        self._client.log_batch(
            opened, metrics=[Metric(_allowed(name), float(value), when, 0) for name, value in values.items()],
            tags=[RunTag(_allowed(name), value) for name, value in texts.items()],
        )  # fmt: skip
        for path in end.files:
            self._client.log_artifact(opened, str(path))
        self._client.set_terminated(opened, "FAILED" if end.failed else "FINISHED", when)

    def _opened(self, run: Run) -> str:
        """Return the server's id of a run, which is begun where the server has none of this id."""
        if run.id not in self._runs:
            found = self._find(run.id)
            identifier, known = (
                (str(found.info.run_id), found.data.params) if found else (self._create(run), {})
            )
            # A run that was found may lack knobs: the server may have failed when they were to
            # follow.
            params = {_allowed(name): str(value)[:LONGEST] for name, value in run.config.items()}
            missing = [Param(name, value) for name, value in params.items() if name not in known]
            for begin in range(0, len(missing), MOST_PARAMS):
                self._client.log_batch(identifier, params=missing[begin : begin + MOST_PARAMS])
            self._client.update_run(identifier, status="RUNNING")
            self._runs[run.id] = identifier
        return self._runs[run.id]

    def _find(self, identifier: str) -> mlflow.entities.Run | None:
        if not self._experiment:
            name = project("MLFLOW_EXPERIMENT_NAME")
            experiment = self._client.get_experiment_by_name(name)
            self._experiment = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(name, tags=KIND)
            )
        runs = self._client.search_runs(
            [self._experiment], f"tags.`{ID}` = '{identifier}'", max_results=1
        )
        return runs[0] if runs else None

    def _create(self, run: Run) -> str:
        tags = {
            ID: run.id,
            "search": run.search,
            "kind": run.kind,
            "mlflow.source.name": "tunediff",
        }
        if run.kind != "search" and (parent := self._find(run.search_id)):
            tags["mlflow.parentRunId"] = parent.info.run_id
        begun = self._client.create_run(self._experiment, round(1000 * run.started), tags, run.name)
        return str(begun.info.run_id)


def _allowed(name: str) -> str:
    """Return a name with `_` for what MLflow refuses in names of metrics, parameters and tags:
    `recall@5`."""
    name = re.sub(r"[^\w.\-/ :]", "_", name)[:LONGEST_NAME]
    # MLflow may use it as a path, which must not have another form: `a//b`, `../a`
    is_path = all(part.strip(".") for part in name.split("/")) and not name.startswith("..")
    return name if is_path else re.sub(r"[./]", "_", name)
