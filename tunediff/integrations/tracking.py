"""Track a search with a service for experiments: `--track wandb|mlflow|trackio|tensorboard`.

A thread of the search follows its journals. `tracking.json` in the folder of the search says what
has been sent, so that a resumed search goes on with the same runs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tunediff.analysis.journals import Following
from tunediff.core.environment import install_command
from tunediff.core.errors import ConfigError
from tunediff.core.files import write_text
from tunediff.core.listeners import Activity, Listener
from tunediff.core.outcomes import Status
from tunediff.core.trial_record import TrialRecord, read_trial
from tunediff.integrations.background import Background
from tunediff.integrations.services import SERVICES, Run, TrackedRun, numbers
from tunediff.tuning import sessions

SENT = "tracking.json"
"""File in the folder of the search: by service and run, the points sent and whether it ended."""
EVERY_S, PATIENCE_S = 2.0, 60.0
"""Seconds between two looks at the journals; seconds for the rest at the end of the search."""


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
