"""Track a search with a service for experiments: `--track wandb|mlflow|trackio|tensorboard`.

A process beside the search follows the journals, which are its queue: what the service did not take
stays there, and is sent later. `tracking.jsonl` in the folder of the search says what has been
sent, so that a resumed search goes on with the same runs and sends nothing twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff.analysis import journals
from tunediff.analysis.following import Following
from tunediff.core.environment import install_command
from tunediff.core.errors import ConfigError
from tunediff.core.listeners import Activity, Listener, Say
from tunediff.core.trial_record import TrialRecord, read_trial
from tunediff.integrations.companion import Attempts, Companion, Facts, Sync, follow
from tunediff.integrations.services import SERVICES
from tunediff.integrations.tracked_run import Run, RunEnd, Service
from tunediff.tuning import sessions

SENT, LOG = "tracking.jsonl", "tracking.log"
"""Files in the folder of a search: what was sent, and what the service's package printed."""
MAX_FAILING_S = 5.0
"""Seconds of failing trials until the others wait: refusals are quick, timeouts not."""


# ---- in the search
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
    if activity.track is None:
        return
    output = activity.folder / LOG
    facts = Facts(
        activity.folder,
        f"--track {activity.track}",
        service=activity.track,
        objective=activity.objective,
        settings=activity.settings,
    )
    rest = f"not everything was sent ({output}); to send the rest: {activity.resume}"
    yield Companion(__name__, facts, output, rest, _last_words)


def _last_words(result: Mapping[str, Any]) -> str:
    """Return the numbers and texts of a result as JSON."""
    plain = (str, bool, int, float)
    return json.dumps({key: value for key, value in result.items() if isinstance(value, plain)})


# ---- in the process
class SentLog:
    """What a service has taken, by run id: number of points, and the end; a line each."""

    def __init__(self, folder: Path, service: str) -> None:
        self._path, self._service = folder / SENT, service
        self.points, self.ended = dict[str, int](), set[str]()
        self.search_id = ""
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # torn by a kill
                self._read(json.loads(line))
        if not self.search_id:
            self._write({"search_id": uuid.uuid4().hex[:12]})

    def note(self, run: str, points: int, ended: bool) -> None:
        """Note what the service has of a run."""
        self._write({"service": self._service, "run": run, "points": points, "ended": ended})

    def _read(self, line: Mapping[str, Any]) -> None:
        self.search_id = line.get("search_id", self.search_id)
        if line.get("service") == self._service:
            self.points[line["run"]] = line["points"]
            (self.ended.add if line["ended"] else self.ended.discard)(line["run"])

    def _write(self, line: Mapping[str, Any]) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")
        self._read(line)


class Tracker:
    """Sends what the journals have and the service has not."""

    def __init__(self, facts: Facts, service: Service, say: Say) -> None:
        self._facts, self._service = facts, service
        later = "the search goes on, and its results are sent later"
        self._attempts = Attempts(facts, later, say)
        self._sent = SentLog(facts.folder, facts.service)
        self._followed: dict[Path, Following] = {}

    def sync(self, words: str = "", last: bool = False) -> bool:
        """Send what is new; return whether the service has everything.

        `last`: the search is over, with a result in `words` unless it was stopped; then the service
        is tried once more, and closed.
        """

        def send() -> None:
            refusal = self._send_all(json.loads(words) if words else None)
            if last:
                self._service.close()
            if refusal is not None:
                raise refusal

        return self._attempts.attempt(send, last)

    def _send_all(self, result: Mapping[str, Any] | None) -> Exception | None:
        """Send every run with something new; return the first error, which blocks no other.

        Raises the error of a service that seems to be gone; see `MAX_FAILING_S`.
        """
        folder, failing_s = self._facts.folder, 0.0
        refusal: Exception | None = None
        if (training := read_trial(folder)) is not None:  # of `tunediff train`: one run
            self._send_trial(folder, dataclasses.replace(training, name=folder.name), "training")
            return None
        for search in [folder, *sessions.confirming_folders(folder)]:
            following = self._followed.setdefault(search, Following(search))
            following.read()
            for trial in following.trials:
                begun = time.monotonic()
                try:
                    self._send_trial(search, trial)
                except Exception as error:
                    failing_s += time.monotonic() - begun
                    if failing_s > MAX_FAILING_S:
                        raise
                    refusal = refusal or error
        if result is not None:
            report = folder / "report.html"
            files = (report,) if report.exists() else ()
            end = RunEnd("ok", "", time.time(), result, files)
            self._service.send(self._search_run(), [], _pictures(folder), end)
        return refusal

    def _send_trial(self, search: Path, trial: TrialRecord, kind: str = "trial") -> None:
        """Send what is new of a trial of `search`; each restart from the first step is a run."""
        folder = search / "trials" / trial.name if kind == "trial" else search
        prefix = (
            "" if search == self._facts.folder else f"{search.relative_to(self._facts.folder)}/"
        )
        kind = "confirming" if prefix else kind
        numbers = range(2, len(trial.restarts) + 2)
        names = [trial.name, *(f"{trial.name}.{number}" for number in numbers)]
        *earlier, run = (self._trial_run(prefix + name, kind, trial) for name in names)
        for before, reason in zip(earlier, trial.restarts, strict=True):
            if before.id in self._sent.points and before.id not in self._sent.ended:
                why = f"started from the beginning: {reason or 'no checkpoint'}"
                self._send(before, [], {}, RunEnd("restarted", why, trial.last_written))
        new = trial.points[self._sent.points.get(run.id, 0) :]
        end = _end(trial, self._facts.objective)
        # A training may go on after an end, such as lack of memory: then there are new points.
        if new or (end and run.id not in self._sent.ended) or run.id not in self._sent.points:
            self._send(run, new, _pictures(folder) if new else {}, end)

    def _send(
        self, run: Run, new: Sequence[Any], pictures: Mapping[str, Path], end: RunEnd | None
    ) -> None:
        search = self._search_run()
        if run.kind != "training" and search.id not in self._sent.points:
            # The run of the search comes first: others belong to it.
            self._service.send(search, [], {}, None)
            self._sent.note(search.id, 0, False)
        self._service.send(run, new, pictures, end)
        self._sent.note(run.id, self._sent.points.get(run.id, 0) + len(new), end is not None)

    def _search_run(self) -> Run:
        """Return the run of the search as a whole."""
        facts, identifier = self._facts, self._sent.search_id
        periods = journals.sessions(facts.folder)
        started = min((period.begin for period in periods), default=time.time())
        name = facts.folder.name
        return Run(
            "search", name, name, identifier, identifier, facts.objective, facts.settings, started
        )

    def _trial_run(self, name: str, kind: str, trial: TrialRecord) -> Run:
        facts, search_id = self._facts, self._sent.search_id
        side = {"side": trial.drawn["side"]} if "side" in trial.drawn else {}
        identifier = f"{search_id}-{name.replace('/', '-')}"
        return Run(
            kind,
            name,
            facts.folder.name,
            identifier,
            search_id,
            facts.objective,
            trial.config | side,
            trial.started,
        )


def _end(trial: TrialRecord, objective: str) -> RunEnd | None:
    """Return how a trial ended; None: it has not."""
    if trial.end is None:
        return None
    value = trial.value(objective)
    result = {} if value is None else {f"final_{objective}": value}
    return RunEnd(trial.end.status, trial.remarks, trial.ended, result)


def _pictures(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.png"))}


class _Prepared:
    """Imports and opens a service, now or, where that fails, when it is used."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._service: Service | None = None
        with contextlib.suppress(Exception):  # is raised again when there is something to send
            self._opened()

    def _opened(self) -> Service:
        self._service = self._service or SERVICES[self._name](self._folder)
        return self._service

    def send(self, *content: Any) -> None:
        self._opened().send(*content)

    def close(self) -> None:
        if self._service is not None:
            self._service.close()


def _prepare(facts: Facts, say: Say) -> Sync:
    return Tracker(facts, _Prepared(facts.service, facts.folder), say).sync


if __name__ == "__main__":
    follow(_prepare)
