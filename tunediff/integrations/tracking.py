"""Track a search with a service for experiments: `--track wandb|mlflow|trackio|tensorboard`.

A thread of the search follows its journals. `tracking.json` in the folder of the search says what
has been sent, so that a resumed search goes on with the same runs. The package of a service is
imported when its first run is opened.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import math
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tunediff.analysis.journals import Following
from tunediff.core.environment import install_command
from tunediff.core.errors import ConfigError
from tunediff.core.files import write_text
from tunediff.core.listeners import Activity, Listener
from tunediff.core.outcomes import Status
from tunediff.core.point import Point
from tunediff.core.trial_record import TrialRecord, read_trial
from tunediff.integrations.background import Background
from tunediff.tuning import sessions

SENT = "tracking.json"
"""File in the folder of the search: by service and run, the points sent and whether it ended."""
EVERY_S, PATIENCE_S = 2.0, 60.0
"""Seconds between two looks at the journals; seconds for the rest at the end of the search."""
PROJECT = "tunediff"
"""Default name of the project or experiment at a service."""
_FIRST = {"loss", "train_s", "device_s", "samples", "samples_per_s", "steps", "peak_memory_mib"}
"""Numbers that services show first, with the evaluation's; others: group `system`."""
_SUCCESSES = (Status.OK, Status.PRUNED, Status.SKIPPED)


# ---- services
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
        self._service = importlib.import_module("wandb")
        self._run = self._service.init(
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
        self._run.log({path.stem: self._service.Image(str(path))}, step=samples)

    def end(self, values: Mapping[str, Any], files: Sequence[Path]) -> None:
        for path in files:
            self._run.log({path.stem: self._service.Html(str(path))})
        self._run.summary.update(dict(values))
        self._run.finish(exit_code=int(values["status"] not in _SUCCESSES))

    def close(self) -> None:
        self._run.mark_preempting()  # a run of the same id continues it
        self._run.finish(exit_code=1)


class TrackioRun(WandbRun):
    """Trackio's local database, or the Space or server that its own variables name."""

    package: ClassVar[str] = "trackio"

    def __init__(self, run: Run) -> None:
        self._service = importlib.import_module("trackio")
        group = run.folder.name
        self._run = self._service.init(
            project=_project("TRACKIO_PROJECT"),
            name=run.name if run.kind in ("search", "training") else f"{group}/{run.name}",
            group=group,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

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


# ---- the listener
def check(service: str | None) -> None:
    """Raise `ConfigError` for a service whose package is absent."""
    if service and importlib.util.find_spec(package := SERVICES[service].package) is None:
        install = install_command(service)
        raise ConfigError(f"--track: {service}: {package} is not installed; run: {install}")


def listeners(activity: Activity) -> Iterator[Listener]:
    """Yield the tracker of an activity that asks for one."""
    if activity.track is not None:
        yield Tracker(activity)


class Tracker(Background):
    """Sends what the journals have and the service has not."""

    def __init__(self, activity: Activity) -> None:
        super().__init__(f"--track {activity.track}", activity.resume, EVERY_S, PATIENCE_S)
        self._activity, self._run_class = activity, SERVICES[str(activity.track)]
        self._path = activity.folder / SENT
        self._state = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._search_id = self._state.setdefault("id", uuid.uuid4().hex[:12])
        self._sent: dict[str, tuple[int, bool]] = self._state.setdefault(activity.track, {})
        self._open = dict[str, TrackedRun]()
        self._followed = dict[Path, Following]()

    def send(self, last: bool) -> None:
        """Send what is new of every run; an error of one does not keep the others."""
        errors = list[Exception]()
        for search, trial, kind in self._trials():
            try:
                self._send_trial(search, trial, kind)
            except Exception as error:
                errors.append(error)
        if last:
            if self._result is not None:
                self._send_search(self._result)
            for run in self._open.values():
                run.close()
        if errors:
            raise errors[0]

    def _trials(self) -> Iterator[tuple[Path, TrialRecord, str]]:
        """Yield all trials with their search and kind; a training outside a search is one."""
        folder = self._activity.folder
        if (training := read_trial(folder)) is not None:
            yield folder, dataclasses.replace(training, name=folder.name), "training"
            return
        for search in [folder, *sessions.confirming_folders(folder)]:
            following = self._followed.setdefault(search, Following(search))
            following.read()
            for trial in following.trials:
                yield search, trial, "trial" if search == folder else "confirming"

    def _send_trial(self, search: Path, trial: TrialRecord, kind: str) -> None:
        """Send what is new of a trial of `search`; each restart from the first step is a run."""
        folder = search if kind == "training" else search / "trials" / trial.name
        name = f"{trial.name}.{len(trial.restarts) + 1}" if trial.restarts else trial.name
        if kind == "confirming":
            name = f"{search.relative_to(self._activity.folder)}/{name}"
        sent, ended = self._sent.get(name, (-1, False))
        new = trial.points[max(sent, 0) :]
        # A training may go on after an end, such as lack of memory: then there are new points.
        if sent >= 0 and not new and ended == (trial.end is not None):
            return
        side = {"side": trial.drawn["side"]} if "side" in trial.drawn else {}
        run = self._opened(name, kind, trial.config | side)
        for point in new:
            run.log(numbers(point), point.samples)
        if new:
            for path in sorted(folder.glob("*.png")):
                run.image(path, new[-1].samples)
        if trial.end is not None:
            value = trial.value(self._activity.objective)
            final = {} if value is None else {f"final_{self._activity.objective}": value}
            run.end({"status": trial.end.status, "reason": trial.reason} | final, [])
            del self._open[name]
        self._note(name, len(trial.points), trial.end is not None)

    def _send_search(self, result: Mapping[str, Any]) -> None:
        """Send the run of the search as a whole, which has its result and its page."""
        if read_trial(self._activity.folder) is not None:  # a training is its only run
            return
        name, page = self._activity.folder.name, self._activity.folder / "report.html"
        plain = {
            key: value for key, value in result.items() if isinstance(value, str | int | float)
        }
        run = self._opened(name, "search", self._activity.settings)
        run.end({"status": Status.OK} | plain, [page] if page.exists() else [])
        del self._open[name]

    def _opened(self, name: str, kind: str, config: Mapping[str, Any]) -> TrackedRun:
        if name not in self._open:
            identifier = f"{self._search_id}-{name.replace('/', '-')}"
            folder = self._activity.folder
            run = Run(kind, name, folder, identifier, dict(config))
            self._open[name] = self._run_class(run)
        return self._open[name]

    def _note(self, name: str, points: int, ended: bool) -> None:
        self._sent[name] = points, ended
        write_text(self._path, json.dumps(self._state))
