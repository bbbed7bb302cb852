"""Track a search with a service for experiments: `--track wandb|mlflow|trackio|tensorboard`.

A thread of the search follows its journals. `tracking.json` in the folder of the search says what
has been sent, so that a resumed search goes on with the same runs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunediff.analysis.following import Following
from tunediff.core.environment import install_command
from tunediff.core.errors import ConfigError
from tunediff.core.files import write_text
from tunediff.core.listeners import Activity, Listener, Say
from tunediff.core.trial_record import TrialRecord, read_trial
from tunediff.integrations.services import SERVICES, Run, TrackedRun, numbers
from tunediff.tuning import sessions

log = logging.getLogger(__name__)

SENT = "tracking.json"
"""File in the folder of the search: by service and run, the points sent and whether it ended."""
EVERY_S, RETRY_S = 2.0, 15.0
"""Seconds between two looks at the journals; seconds until a service that failed is tried again."""
SILENT_S, PATIENCE_S = 5.0, 60.0
"""Seconds at the end of the search until the user is told of the wait, and until it ends."""


def check(service: str | None) -> None:
    """Raise `ConfigError` for a service that does not exist or whose package is absent."""
    if service is None:
        return
    if service not in SERVICES:
        names = ", ".join(SERVICES)
        raise ConfigError(f"--track: {service!r} is not allowed; allowed: one of {names}")
    if importlib.util.find_spec(package := SERVICES[service].package) is None:
        install = install_command(service)
        raise ConfigError(f"--track: {service}: {package} is not installed; run: {install}")


def listeners(activity: Activity) -> Iterator[Listener]:
    """Yield the tracker of an activity that asks for one."""
    if activity.track is not None:
        yield Tracker(activity)


class Tracker(Listener):
    """Sends what the journals have and the service has not, in a thread that nothing waits for."""

    def __init__(self, activity: Activity) -> None:
        self._activity, self._service = activity, str(activity.track)
        self._run_class = SERVICES[self._service]
        self._path = activity.folder / SENT
        self._state = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._search_id = self._state.setdefault("id", uuid.uuid4().hex[:12])
        self._sent: dict[str, tuple[int, bool]] = self._state.setdefault(self._service, {})
        self._open = dict[str, TrackedRun]()
        self._followed = dict[Path, Following]()
        self._result: Mapping[str, Any] | None = None
        self._ended = threading.Event()
        self._failed = self._spoken = False

    def search_begin(self, say: Say) -> None:
        self._say = say
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def search_end(self, result: Callable[[], Mapping[str, Any]] | None) -> None:
        """Send the rest, for a while; say where something is left."""
        self._result = None if result is None else result()
        self._ended.set()
        self._thread.join(SILENT_S)
        option = f"--track {self._service}"
        if self._thread.is_alive():
            self._say(f"{option}: sending the rest; Ctrl-C leaves it for later")
            self._thread.join(PATIENCE_S)
        if self._thread.is_alive() or self._failed:
            self._say(f"{option}: not everything was sent; this sends it: {self._activity.resume}")

    def _work(self) -> None:
        while not self._ended.wait(RETRY_S if self._failed else EVERY_S):
            self._failed = not self._send_all()
        self._failed = not self._send_all()
        if self._result is not None:
            self._failed |= not self._attempt(self._send_search, dict(self._result))
        for run in self._open.values():
            self._attempt(run.close)

    def _send_all(self) -> bool:
        """Send what is new of every run; return whether the service took all of it."""
        folder = self._activity.folder
        if (training := read_trial(folder)) is not None:  # of `tunediff train`: one run
            training = dataclasses.replace(training, name=folder.name)
            return self._attempt(self._send_trial, folder, training, "training")
        taken = True
        for search in [folder, *sessions.confirming_folders(folder)]:
            following = self._followed.setdefault(search, Following(search))
            following.read()
            kind = "trial" if search == folder else "confirming"
            for trial in following.trials:
                taken &= self._attempt(self._send_trial, search, trial, kind)
        return taken

    def _attempt(self, send: Callable[..., object], *content: Any) -> bool:
        """Return whether `send` succeeded; its first error is said."""
        try:
            send(*content)
        except Exception as error:
            if not self._spoken:
                self._spoken = True
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                self._say(f"--track {self._service}: {why}; the search goes on, and is sent later")
            log.debug("the service's error", exc_info=True)
            return False
        return True

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
            run.end({"status": trial.end.status, "reason": trial.remarks} | final, [])
            del self._open[name]
        self._note(name, len(trial.points), trial.end is not None)

    def _send_search(self, result: dict[str, Any]) -> None:
        """Send the run of the search as a whole, which has its result and its page."""
        if read_trial(self._activity.folder) is not None:  # a training is its only run
            return
        name, page = self._activity.folder.name, self._activity.folder / "report.html"
        plain = {
            key: value for key, value in result.items() if isinstance(value, str | int | float)
        }
        run = self._opened(name, "search", self._activity.settings)
        run.end({"status": "ok"} | plain, [page] if page.exists() else [])
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
