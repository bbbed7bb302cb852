"""What the driver of a trial and the ranks that train it exchange. Imports neither torch nor Ray.

    driver                      mailbox of a slot              each rank
    start(job)  ─────────────►  job, its serial  ───────────►  take(done)
    event(serial, cursor)  ◄──  events  ◄────────────────────  post(serial, point, end or loss)
    go_on, stop  ────────────►  commands  ──────────────────►  command(serial, seen)

The ranks are threads of this process (`local.py`) or workers of Ray Train (`group.py`); each trains
a job in a process of its own, which is forked from a template.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from tunediff.core.errors import Failure
from tunediff.core.outcomes import Status
from tunediff.core.point import Point
from tunediff.core.template import TemplateError, TemplateRun
from tunediff.core.trial_record import End
from tunediff.tuning.backend import Event
from tunediff.tuning.templates import Templates
from tunediff.tuning.trial_spec import TrialSpec

POLL_S = 10.0
"""Seconds after which a waiting method returns None: lost callers leave no request."""
STOP_S = 60.0
"""Grace period after a stop request; then the process is killed."""
KILL_S = 1.0
"""Seconds that a rank has to end by itself in, such as one that writes why it failed."""
Command = int | Literal["stop", "kill"]
"""Train on after the point of this index; end at the point that was reported; end at once."""
T = TypeVar("T")


class Mailbox:
    """A slot's job, events and commands; one job at a time, for callers in any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.job: TrialSpec | None = None
        self.serial = ""
        """Of the job; random, so that a slot that was restarted never reuses one."""
        self._events: list[Event] = []
        self._go_on = 0  # index of the last point after which training may go on
        self._stopped = set[str]()  # serials of jobs that were given up while they waited
        self._began, self.taken = 0.0, False
        self.has_idle_rank = False
        """Whether a rank has nothing to do."""

    # ---- for the driver
    def start(self, job: TrialSpec) -> str:
        """Take a job and return its serial, that of the same job where it runs already."""
        with self._changed:
            if self.runs(job):
                return self.serial
            self.give_up()
            self.job, self.serial, self._events = job, uuid.uuid4().hex, []
            self._go_on, self._began, self.taken, self.has_idle_rank = (
                0,
                time.monotonic(),
                False,
                False,
            )
            self._changed.notify_all()
            return self.serial

    def runs(self, job: TrialSpec) -> bool:
        """Return whether this very attempt at a trial runs."""
        return self.running and self.job is not None and self.job.attempt == job.attempt

    @property
    def running(self) -> bool:
        """Return whether the job has not ended."""
        return self.job is not None and (not self._events or isinstance(self._events[-1], Point))

    def event(self, serial: str, cursor: int) -> Event | None:
        """Return event number `cursor` of a job as soon as it happens."""

        def next_event() -> Event | None:
            if serial != self.serial:
                return Failure("its slot was restarted")
            return self._events[cursor] if cursor < len(self._events) else None

        return self._wait(next_event)

    def go_on(self, serial: str, index: int) -> None:
        """Let the job train on after point `index`."""
        with self._changed:
            if serial == self.serial:
                self._go_on = max(self._go_on, index)
                self._changed.notify_all()

    def stop(self, why: str | Failure) -> None:
        """Kill the job."""
        with self._changed:
            if self.running:
                self._events.append(Failure(why) if isinstance(why, str) else why)
                self._changed.notify_all()

    def give_up(self) -> None:
        """End an unwanted job: it stops at a point that waits for a decision, or is killed."""
        with self._changed:
            last = self._events[-1] if self._events else None
            if isinstance(last, Point) and last.index > self._go_on:
                self._stopped.add(self.serial)
            self.stop("its trial was given up")

    def missing_s(self) -> float:
        """Return for how many seconds no rank has taken the job; 0: one has."""
        return 0.0 if self.taken or not self.running else time.monotonic() - self._began

    # ---- for the ranks
    def take(self, done: str) -> tuple[str, TrialSpec] | None:
        """Return the next job with its serial; `done`: that of a rank's last job."""

        def next_job() -> tuple[str, TrialSpec] | None:
            if self.job is None or not self.running or self.serial == done:
                self.has_idle_rank = True
                return None
            self.taken = True
            return self.serial, self.job

        return self._wait(next_job)

    def post(self, serial: str, event: Event) -> None:
        """Pass an event to the driver; after the end of the job nothing counts."""
        with self._changed:
            if serial == self.serial and self.running:
                self._events.append(event)
                self._changed.notify_all()

    def command(self, serial: str, seen: int) -> Command | None:
        """Return what a rank does next; `seen`: index of the last point it has passed."""

        def next_command() -> Command | None:
            if serial in self._stopped:
                return "stop"
            last = self._events[-1] if self._events else None
            failed = isinstance(last, Failure) or (
                isinstance(last, End) and last.status in (Status.OOM, Status.ERROR)
            )
            if serial != self.serial or failed:  # the other ranks wait for one that failed
                return "kill"
            return self._go_on if self._go_on > seen else None

        return self._wait(next_command)

    def _wait(self, ready: Callable[[], T]) -> T:
        """Return the first result of `ready` that is not None, or None after `POLL_S`."""
        with self._changed:
            return self._changed.wait_for(ready, POLL_S)


# ---- one rank
class RankMailbox(Protocol):
    """A mailbox as a rank has it, in the process of the mailbox or far from it."""

    def post(self, serial: str, event: Event) -> None:
        """See `Mailbox.post`."""

    def command(self, serial: str, seen: int) -> Command | None:
        """See `Mailbox.command`."""


def train(
    job: TrialSpec,
    serial: str,
    mailbox: RankMailbox,
    templates: Templates,
    variables: Mapping[str, str],
) -> None:
    """Train a job as one of its ranks: pass reports on, and commands of the driver.

    A process that dies ends the job, and nothing else. `variables`: of the environment, see
    `Templates.train`.
    """
    runs, over = list[TemplateRun](), threading.Event()

    def obey() -> None:
        with contextlib.suppress(Exception):
            _obey(job, serial, mailbox, runs, templates, over)
        if not over.is_set():  # no mailbox answers: nobody wants the result
            templates.kill()

    threading.Thread(target=obey, daemon=True, name=f"commands for {job.name}").start()
    try:
        templates.train(job, variables, lambda run, event: mailbox.post(serial, event), runs.append)
    except TemplateError as error:
        mailbox.post(serial, error.failure)
    finally:
        over.set()


def _obey(
    job: TrialSpec,
    serial: str,
    mailbox: RankMailbox,
    runs: Sequence[TemplateRun],
    templates: Templates,
    over: threading.Event,
) -> None:
    """Do what the driver says until the run is over."""
    seen = 0
    while not over.is_set():
        command = mailbox.command(serial, seen)
        if over.is_set() or command is None:
            continue
        if isinstance(command, int):
            seen = command
            if command < job.points:  # after the last one there is nothing to decide
                runs[-1].send("go")
            continue
        if command == "stop":
            runs[-1].send("stop")
        if not over.wait(STOP_S if command == "stop" else KILL_S):
            templates.kill()
            over.wait(KILL_S)
