"""Ask a search for trials and tell it their results: `tunediff.open_study`.

The folder, the journals and the proposals are those of `tunediff.run_search`; only the training is
the caller's.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunediff.analysis import journals
from tunediff.api import notebook, search_setup
from tunediff.api.calls import Knobs, called, folder, plain, words
from tunediff.api.options import SearchOptions
from tunediff.api.search import Search
from tunediff.config import ConfigError, Values, configuration_of
from tunediff.core import files, journal, remote, text
from tunediff.core import trial_record as record
from tunediff.core.listeners import Listeners
from tunediff.core.lock import exclusive_lock
from tunediff.core.logs import errors_only
from tunediff.core.options import allow
from tunediff.core.outcomes import Status
from tunediff.core.point import QUANTITIES, Point
from tunediff.core.progress import log_exceptions
from tunediff.core.target import TIME_TO_TARGET
from tunediff.core.trial_record import RESERVED, WORDS, End, TrialRecord
from tunediff.report.listener import LISTENERS
from tunediff.search_space import SearchSpace
from tunediff.tuning import confirming, experiment, resources, sessions
from tunediff.tuning.optuna_proposer import OptunaProposer
from tunediff.tuning.stopping import early_stopping
from tunediff.tuning.trial import reported
from tunediff.tuning.trial_spec import TrialSpec

log = logging.getLogger(__name__)

MEASURED = QUANTITIES.keys() - {"train_s", "fraction"}
"""Names in every curves.csv that a caller may measure; the others follow from `time_s`."""


class AskedTrial:
    """A trial that the caller runs: its knobs and budget, and where evaluations are reported."""

    def __init__(self, study: AskTellStudy, spec: TrialSpec, begun: TrialRecord) -> None:
        """Made by `AskTellStudy.ask`."""
        self._study, self._spec, self._began = study, spec, time.monotonic()
        self.name, self.number = spec.name, spec.number
        """Its name in the search, such as `t0003`, and its number there; 0 is the baseline."""
        self.drawn = dict(begun.drawn)
        """The search's knobs by dotted name; of a repeated run also its `seed`."""
        self.config: Any = configuration_of(begun)
        """The complete configuration: `config.seed`, `config.loader`, `config.knobs` …"""
        self.knobs: Any = self.config.knobs
        """The workload's `Knobs`, as `train(trial)` reads them."""
        self.budget_s = spec.budget.seconds
        """The training seconds that it has."""

    def report(self, value: float, time_s: float | None = None, **measured: float) -> bool:
        """Write an evaluation to the journal; return whether the search's early stopping would end
        the trial here, or it has met its target.

        Args:
            value: The objective; in a search with a target, the metric that is to reach it.
            time_s: Training seconds so far. Default: wall-clock since `ask`.
            measured: What else was measured, by the names in curves.csv: `samples`, `steps`,
                `peak_memory_mib` …

        Raises `TunediffError` for values that are not finite, and where the trial has ended.
        """
        return self._study._report(self, value, time_s, measured)

    def _points(self) -> list[Point]:
        """Return the evaluations in its journal: one that could not be written is none."""
        trial_record = record.read_trial(self._spec.folder)
        return trial_record.points if trial_record is not None else []

    def __repr__(self) -> str:
        return f"AskedTrial({self.name}, {text.knobs(self.drawn) or 'baseline'})"


class AskTellStudy:
    """A search whose trials the caller runs: ask, train, tell; a context manager.

    It is the loop of `tuning/loop.py` turned round: `ask` starts a trial, `report` passes a point
    on, `tell` ends it. Several trials may be under way, also in threads, of the process that opened
    it, which alone asks, tells and closes.
    """

    def __init__(self, folder: Path, space: SearchSpace) -> None:
        """Made by `open_study`; takes the folder's lock."""
        self.folder, self.space = folder, space
        self._lock, self._running = threading.RLock(), dict[str, AskedTrial]()
        self._exhausted = self._closed = False
        with contextlib.ExitStack() as stack:
            stack.enter_context(exclusive_lock(folder))
            storage = str(files.address_of(folder.parent) or folder.parent)
            again = f"tunediff.open_study(name={folder.name!r}, storage={storage!r}).close()"
            self._listeners = Listeners(*LISTENERS)
            activity = search_setup.activity("ask", folder, self.space, again)
            stack.enter_context(self._listeners.opened(activity, log.warning))
            before_s = sessions.all_spent_s(folder)
            command = f"{sessions.ASKED}(name={folder.name!r})"
            # After the end of the session, which depends on what still runs.
            stack.callback(self._running.clear)
            stack.enter_context(sessions.recorded_session(folder, command, self._is_over))
            with self._checked():
                device = resources.local().device
                self._proposer = OptunaProposer(self.space, folder, before_s, device=device)
                stack.callback(
                    log_exceptions, "the study", self._proposer.study.write, folder / "study.db"
                )
            # Trials that have not ended begin again: their points are void.
            ended = [trial for trial in record.read_trials(folder) if trial.finished]
            self._stopping = early_stopping(self.space, ended)
            stack.callback(self._refuse_from_now)
            self._open = stack.pop_all()

    @property
    def search(self) -> Search:
        """Return its results so far, as `tunediff.open_search` does."""
        return Search(self.folder)

    def ask(self) -> AskedTrial | None:
        """Return the next trial; None where a limit is reached or nothing new is left.

        Trials that were asked for and not told before the study was closed come first, from the
        beginning.
        """
        with self._checked():
            spec = self._proposer.ask()
            self._exhausted = spec is None
            if spec is None:
                return None
            journal.Journal(spec.folder).restarted()
            self._running[spec.name] = trial = AskedTrial(
                self, spec, record.read_begun(spec.folder)
            )
            self._listeners.tell("start", spec.name, trial.drawn)
            return trial

    def tell(
        self, trial: AskedTrial, value: float | None = None, *, status: str | None = None,
        reason: str = "",
        time_s: float | None = None, **measured: float,
    ) -> None:  # fmt: skip
        """End a trial.

        Args:
            trial: From `ask`.
            value: The objective at its end, or the metric of a target, without which the trial
                fails. Default: the one that was reported last. Not finite: it has diverged.
            status: `ok` (the default with a value), `pruned`, `oom`, `nan`, `timeout`, `missed`
                or `error`.
            reason: Why it failed, for the report.
            time_s, measured: As `AskedTrial.report` takes them.

        Raises `TunediffError` for what is not allowed; the trial then goes on.
        """
        with self._checked(trial):
            value = plain(value)
            diverged = isinstance(value, float) and not math.isfinite(value)
            status = status or (Status.NAN if diverged else Status.OK)
            allowed = [name for name in Status if name not in (Status.SKIPPED, Status.UNFINISHED)]
            allow(status in allowed, "status", status, ", ".join(allowed))
            if value is not None and (status == Status.OK or not diverged):
                # The same once more, after an error, is no further evaluation.
                told = {self._value_name: value, **measured}
                told |= {"train_s": time_s} if time_s is not None else {}
                last = trial._points()[-1:]
                if not any(all(p.get(key) == plain(told[key]) for key in told) for p in last):
                    self._report(trial, value, time_s, measured, ended=True)
            self._end(trial, Status(status), reason)

    def close(self) -> None:
        """Release the study; a trial that was not told is asked for again after reopening."""
        self._open.close()

    def __enter__(self) -> AskTellStudy:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def __repr__(self) -> str:
        return f"AskTellStudy({str(self.folder)!r})"

    # ---- inside
    @property
    def _value_name(self) -> str:
        """Return the name of the values that are reported and told."""
        target = self.space.target
        return self.space.metric if target is None else target.metric

    def _refuse_from_now(self) -> None:
        with self._lock:  # after what another thread has begun
            self._closed = True

    def _is_over(self) -> bool:
        """Return whether nothing is left to run. Raises `ConfigError`, `OSError` for journals."""
        over = self._exhausted or confirming.complete(self.folder, self.space)
        return over and not self._running

    @contextlib.contextmanager
    def _checked(self, trial: AskedTrial | None = None) -> Iterator[None]:
        """Keep threads apart; refuse a trial that does not run, or a study that is lost."""
        with self._lock, errors_only("optuna"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if trial is not None and self._running.get(trial.name) is not trial:
                ended = "does not run: it has ended, or its study was closed"
                raise ConfigError(f"{trial.name}: {ended}")
            if self._closed:
                again = f"tunediff.open_study(name={self.folder.name!r}) goes on with it"
                raise ConfigError(f"{self.folder.name}: the study was closed; {again}")
            yield

    def _report(
        self, trial: AskedTrial, value: float, time_s: float | None, measured: Values,
        ended: bool = False,
    ) -> bool:  # fmt: skip
        with self._checked(trial):
            measured = {name: plain(number) for name, number in measured.items()}
            point = self._point(trial, plain(value), plain(time_s), measured, ended)
            journal.Journal(trial._spec.folder).point(point)
            sessions.alive(self.folder)
            self._listeners.tell("point", trial.name, point.flat)
            result = reported(point, self.space)
            if self.space.target is not None:
                return TIME_TO_TARGET in point
            return self._stopping is not None and self._stopping.stops(trial._spec, result)

    def _point(
        self, trial: AskedTrial, value: float, time_s: float | None, measured: Values, ended: bool
    ) -> Point:
        """Return an evaluation as a point. Raises `ConfigError` for what no journal can hold."""
        taken = (RESERVED | {*WORDS, self._value_name}) - MEASURED
        names = f"{', '.join(sorted(MEASURED))}, and names of your own"
        for name in taken.intersection(measured):
            allow(False, "measured", name, names)
        finite = "a finite number; study.tell(trial, status='nan') ends what has diverged"
        train_s = time.monotonic() - trial._began if time_s is None else time_s
        for name, number in {"value": value, "time_s": train_s, **measured}.items():
            allow(isinstance(number, int | float) and math.isfinite(number), name, number, finite)
        points, budget_s = trial._points(), trial.budget_s
        index, least_s = (points[-1].index + 1, points[-1].train_s) if points else (1, 0.0)
        allowed = f"training seconds so far, at least {least_s:g}"
        allow(train_s >= least_s, "time_s", train_s, allowed)
        point = {"device_s": train_s * trial.config.devices, "samples": 0, "steps": index}
        if (samples := float(measured.get("samples", 0))) and train_s:
            point["samples_per_s"] = samples / train_s
        if budget_s:
            point["fraction"] = min(1.0, train_s / budget_s)
        point |= {**measured, "index": index, "train_s": train_s, self._value_name: value}
        seconds_to_target = trial._spec.seconds_to_target
        met_s = seconds_to_target and seconds_to_target([*points, Point.of(point)], ended=ended)
        point |= {} if met_s is None else {TIME_TO_TARGET: met_s}
        return Point.of(point)

    def _end(self, trial: AskedTrial, status: Status, reason: str) -> None:
        """Write a trial's end, report it to the proposer. Raises `ConfigError` without a result."""
        spec, target, points = trial._spec, self.space.target, trial._points()
        last = points[-1] if points else None
        if status == Status.OK and target is not None and last and TIME_TO_TARGET not in last:
            status, reason = Status.MISSED, target.missed
        for metric in (self.space.metric, self.space.cost):
            if status == Status.OK and metric is not None and (last is None or metric not in last):
                missing = "is missing: an objective of the search; report it"
                raise ConfigError(f"{trial.name}: {metric} {missing}")
        seconds = {"train": last.train_s} if last is not None else {}
        end = End(status, reason, seconds, last.steps if last is not None else 0)
        journal.Journal(spec.folder).end(end)
        self._proposer.tell(spec, record.read_begun(spec.folder), time.monotonic() - trial._began)
        self._listeners.tell("end", trial.name, trial.drawn)
        del self._running[spec.name]  # last: what a full disk refuses is told again


def open_study(
    workload: Any = None, *knobs: Knobs, name: str | None = None,
    storage: str | Path = files.STORAGE,
    trials: int | None = None, budget: str | float | None = None, unit: str | None = None,
    total: str | float | None = None, seed: int | None = None, warm_start: str | None = None,
    target: str | None = None,
) -> AskTellStudy:  # fmt: skip
    """Begin a search whose trials the caller runs, or go on with an existing `name`.

    It proposes what `run_search` would propose for the same file and seed. Nothing is trained and
    no Ray is started.

    Args:
        workload, knobs, name, storage, trials, budget, unit, total, seed, warm_start, target: As
            `run_search` takes them.

    Raises:
        TunediffError: Something is not allowed.

    Example:
        >>> with tunediff.open_study("digits", trials=8, budget="5s") as study:
        ...     while (trial := study.ask()) is not None:
        ...         study.tell(trial, value=measure(trial.config))
    """
    place = folder(storage)
    with called():
        remote.check(place)
        if name is not None:
            remote.pull(place / name)
        exists = workload is None and not knobs and name is not None and (place / name).exists()
        named = [] if workload is None else [notebook.named(workload, place)]
        options = SearchOptions(
            words=[*named, *words(knobs)], name=None if exists else name,
            resume=name if exists else None,
            storage=place, trials=trials, budget=budget, unit=unit, total=total,
            confirm=None if exists else 0, seed=seed, warm_start=warm_start, target=target,
        )  # fmt: skip
        request = search_setup.requested(options, engine=False)
        space = request.space
        if request.content is not None:
            space = experiment.create(request.folder, space, request.content)
        elif journals.sessions(request.folder) and not search_setup.is_asked(request.folder):
            again = text.command("search", "--resume", request.folder.name, storage=place)
            raise ConfigError(
                f"{name}: is a search that runs its trials itself, and stays one: {again}"
            )
        return AskTellStudy(request.folder, space)
