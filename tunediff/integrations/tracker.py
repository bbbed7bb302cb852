"""The process that sends a search to a tracking service, beside the search: it follows the
journals.

The journals are its queue: what the service did not take stays there, and is sent later.
`tracking.jsonl` in the folder of the search says what has been sent, so that a resumed search goes
on with the same runs and sends nothing twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff.analysis import journals
from tunediff.analysis.following import Following
from tunediff.core.point import Point
from tunediff.core.trial_record import TrialRecord, read_trial
from tunediff.integrations import companion, services
from tunediff.integrations.companion import Attempts, Facts, Say
from tunediff.integrations.services import Run, RunEnd, Service
from tunediff.tuning import sessions

SENT = "tracking.jsonl"
FAILING_S = 5.0
"""Seconds that trials may take to fail before the others are left for later: a refusal is quick, a
timeout is not."""


@dataclasses.dataclass(frozen=True)
class TrackedSearch(Facts):
    """What the tracker is told of the search; the rest is in the journals."""

    service: str
    objective: str
    config: Mapping[str, Any]
    """What the search's own run has for knobs."""


class SentLog:
    """What a service has taken, by the id of a run: how many points, and whether the end; one line
    per change."""

    def __init__(self, folder: Path, service: str) -> None:
        self._path, self._service = folder / SENT, service
        self.points, self.ended = dict[str, int](), set[str]()
        self.search_id = ""
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # torn by a kill
                self._take(json.loads(line))
        if not self.search_id:
            self._write({"search_id": uuid.uuid4().hex[:12]})

    def take(self, run: str, points: int, ended: bool) -> None:
        """Note what the service has of a run."""
        self._write({"service": self._service, "run": run, "points": points, "ended": ended})

    def _take(self, line: Mapping[str, Any]) -> None:
        self.search_id = line.get("search_id", self.search_id)
        if line.get("service") == self._service:
            self.points[line["run"]] = line["points"]
            (self.ended.add if line["ended"] else self.ended.discard)(line["run"])

    def _write(self, line: Mapping[str, Any]) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")
        self._take(line)


class Tracker:
    """Sends what the journals have and the service has not."""

    def __init__(self, facts: TrackedSearch, service: Service, say: Say) -> None:
        self._facts, self._service = facts, service
        later = "the search goes on, and its results are sent later"
        self._attempts = Attempts(f"--track {facts.service}", later, say, facts.late_s)
        self._sent = SentLog(facts.folder, facts.service)
        self._followed: dict[Path, Following] = {}

    def sync(self, verdict: Mapping[str, Any] | None = None, last: bool = False) -> bool:
        """Send what is new; return whether the service has everything. After a failure it is left
        alone for a while.

        `last`: the search is over, perhaps with a `verdict`; then the service is tried once more,
        and closed.
        """

        def send() -> None:
            refused = self._send_all(verdict)
            if last:
                self._service.close()
            if refused is not None:
                raise refused

        return self._attempts.attempt(send, last)

    def _send_all(self, verdict: Mapping[str, Any] | None) -> Exception | None:
        """Send every run that has something new; return the first error of a trial, which does not
        block the others.

        Raises the error of a service that seems to be gone; see `FAILING_S`.
        """
        folder, failing_s = self._facts.folder, 0.0
        refused: Exception | None = None
        if (
            training := read_trial(folder)
        ) is not None:  # of `tunediff train`, whose folder is that of one run
            self._send_trial(folder, dataclasses.replace(training, name=folder.name), "training")
            return None
        for place in [folder, *sessions.confirming_folders(folder)]:
            following = self._followed.setdefault(place, Following(place))
            following.read()
            for trial in following.trials:
                begun = time.monotonic()
                try:
                    self._send_trial(place, trial)
                except Exception as error:
                    failing_s += time.monotonic() - begun
                    if failing_s > FAILING_S:
                        raise
                    refused = refused or error
        if verdict is not None:
            report = folder / "report.html"
            end = RunEnd("ok", "", time.time(), verdict, (report,) if report.exists() else ())
            self._service.send(self._search(), [], _pictures(folder), end)
        return refused

    def _send_trial(self, place: Path, trial: TrialRecord, kind: str = "trial") -> None:
        """Send what is new of a trial of the search in `place`. Each restart from the first step is
        a run of its own.

        `kind`: `trial`, or `training` for one that has `place` to itself.
        """
        prefix = f"{place.relative_to(self._facts.folder)}/" if place != self._facts.folder else ""
        names = [
            prefix + trial.name,
            *(f"{prefix}{trial.name}.{n}" for n in range(2, len(trial.restarts) + 2)),
        ]
        *earlier, run = (self._run(name, "confirming" if prefix else kind, trial) for name in names)
        for before, reason in zip(earlier, trial.restarts, strict=True):
            if before.id in self._sent.points and before.id not in self._sent.ended:
                why = f"started from the beginning: {reason or 'no checkpoint'}"
                self._send(before, [], {}, RunEnd("restarted", why, trial.last_written))
        new, end = (
            trial.points[self._sent.points.get(run.id, 0) :],
            _end(trial, self._facts.objective),
        )
        # A training may go on after an end, as one that ran out of memory: then there are new
        # points.
        if new or (end and run.id not in self._sent.ended) or run.id not in self._sent.points:
            pictures = place if kind == "training" else place / "trials" / trial.name
            self._send(run, new, _pictures(pictures) if new else {}, end)

    def _send(
        self, run: Run, new: list[Point], pictures: Mapping[str, Path], end: RunEnd | None
    ) -> None:
        search = self._search()
        if (
            run.kind != "training" and search.id not in self._sent.points
        ):  # the run of the search comes first: others belong to it
            self._service.send(search, [], {}, None)
            self._sent.take(search.id, 0, False)
        self._service.send(run, new, pictures, end)
        self._sent.take(run.id, self._sent.points.get(run.id, 0) + len(new), end is not None)

    def _search(self) -> Run:
        """Return the run of the search as a whole."""
        facts, own = self._facts, self._sent.search_id
        begun = min(
            (session.begin for session in journals.sessions(facts.folder)), default=time.time()
        )
        return Run(
            "search", facts.folder.name, facts.folder.name, own, own, facts.objective, facts.config, begun,
            facts.folder,
        )  # fmt: skip

    def _run(self, name: str, kind: str, trial: TrialRecord) -> Run:
        own = self._sent.search_id
        return Run(
            kind, name, self._facts.folder.name, f"{own}-{name.replace('/', '-')}",
            own, self._facts.objective, trial.config | _side(trial), trial.started, self._facts.folder,
        )  # fmt: skip


def _side(trial: TrialRecord) -> dict[str, Any]:
    """Return the side of a comparison that a trial is a run of."""
    return {"side": trial.drawn["side"]} if "side" in trial.drawn else {}


def _end(trial: TrialRecord, objective: str) -> RunEnd | None:
    """Return how a trial ended; None: it has not."""
    if trial.end is None:
        return None
    value = trial.value(objective)
    result = {} if value is None else {f"final_{objective}": value}
    return RunEnd(trial.end.status, trial.remarks, trial.ended, result)


def _pictures(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.png"))}


# ---- process
class _Prepared:
    """Imports and opens a service, now or, where that fails, when it is used."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._service: Service | None = None
        with contextlib.suppress(
            Exception
        ):  # is raised again, and said, when there is something to send
            self._opened()

    def _opened(self) -> Service:
        self._service = self._service or services.make(self._name, self._folder)
        return self._service

    def send(
        self, run: Run, points: Sequence[Point], pictures: Mapping[str, Path], end: RunEnd | None
    ) -> None:
        self._opened().send(run, points, pictures, end)

    def close(self) -> None:
        if self._service is not None:
            self._service.close()


def main() -> None:
    """Follow the journals of the search whose facts are the argument; exit with 0 if all was
    sent."""
    say = companion.begin()
    facts = TrackedSearch.of(sys.argv[1])
    tracker = Tracker(facts, _Prepared(facts.service, facts.folder), say)
    companion.follow(
        lambda verdict, last: tracker.sync(json.loads(verdict or "null"), last), facts.patience_s
    )


if __name__ == "__main__":
    main()
