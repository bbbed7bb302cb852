"""The loop of whatever runs on this machine or on a cluster: ask, run, tell.

`run` drives searches without Ray, confirming runs, and comparisons of workloads and of commands. In
a search on Ray, Tune drives the same `Dispatcher` through `searcher.Searcher`, with a scheduler
that stops trials early. Ask and tell (`api/ask_tell.py`) is the loop turned round. Imports no Ray.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from tunediff.core import trial_record as record
from tunediff.core.listeners import Listeners
from tunediff.core.trial_record import TrialRecord
from tunediff.tuning.backend import Backend, Interrupted, Reported
from tunediff.tuning.trial_spec import TrialSpec


class Proposer(Protocol):
    """Decides what runs next, and learns how it ended."""

    def ask(self) -> TrialSpec | None:
        """Return the next trial, whose journal has begun; None: there is none now."""

    def tell(self, spec: TrialSpec, trial_record: TrialRecord, wall_s: float) -> None:
        """Take note of how a trial ended, after `wall_s` on its slot."""


class Dispatcher:
    """Gives slots to a proposer's trials, first to those that wait or lost their node."""

    def __init__(
        self, proposer: Proposer, backend: Backend, results_may_add_trials: bool = False
    ) -> None:
        """`results_may_add_trials`: whether a proposer without a trial is asked again as soon as
        another one has ended."""
        self._proposer, self._backend, self._pool = proposer, backend, backend.devices
        self._results_may_add_trials = results_may_add_trials
        self._waiting: list[TrialSpec] = []
        self._started_at: dict[str, float] = {}  # monotonic, of every trial that runs
        self._exhausted = False

    @property
    def is_over(self) -> bool:
        """Return whether no further trial will come; one that runs may yet lose its node."""
        may_come_back = self._pool.unsteady or self._results_may_add_trials
        return self._exhausted and not self._waiting and not (self._started_at and may_come_back)

    def start(self) -> TrialSpec | None:
        """Return the next trial with its place; None: no room now, or no trial."""
        if not self._pool.room():
            return None
        spec = self._waiting.pop(0) if self._waiting else None
        if spec is None and not self._exhausted:
            spec = self._proposer.ask()
        if spec is None:
            self._exhausted = True
            return None
        group = spec.group
        if (allocation := self._pool.take(group.size, together=group.together)) is None:
            self._waiting.insert(0, spec)
            return None
        self._started_at[spec.name] = time.monotonic()
        return spec.on(allocation)

    def finish(
        self, spec: TrialSpec, settle: Callable[[TrialSpec], object] = lambda spec: None
    ) -> bool:
        """Free a trial's devices, tell its proposer the outcome; return whether it is over.

        One that has lost its node starts again. `settle` writes an end that the journal may lack.
        """
        self._pool.give(spec.slot)
        wall_s = time.monotonic() - self._started_at.pop(spec.name)
        settle(spec)
        self._backend.release(spec)
        if record.was_lost(spec.folder):
            self._waiting.insert(0, spec)
            return False
        self._proposer.tell(spec, record.read_begun(spec.folder), wall_s)
        self._exhausted = self._exhausted and not self._results_may_add_trials
        return True


def run(proposer: Proposer, backend: Backend, listeners: Listeners, most: int = 1) -> None:
    """Run a proposer's trials, at most `most` at the same time, until it has no more.

    A thread follows each of them. What one raises ends the others: `OSError` on a full disk.
    """
    dispatcher = Dispatcher(proposer, backend, results_may_add_trials=True)
    running, announced = dict[str, TrialSpec](), set[str]()
    threads = list[threading.Thread]()
    reports = queue.SimpleQueue[tuple[str, Reported | None, BaseException | None]]()
    interrupted = threading.Event()

    def check() -> bool:
        if interrupted.is_set():
            raise Interrupted
        return False

    def follow(spec: TrialSpec) -> None:
        failure: BaseException | None = None
        try:
            for point in backend.run(spec, check):
                reports.put((spec.name, point, None))
        except BaseException as error:
            failure = error
        reports.put((spec.name, None, failure))

    try:
        while True:
            # ---- start trials while there is room
            while len(running) < most and (spec := dispatcher.start()) is not None:
                running[spec.name] = spec
                if spec.name not in announced:
                    announced.add(spec.name)
                    listeners.tell("start", spec.name, record.read_begun(spec.folder).drawn)
                name = f"run {spec.name}"
                threads.append(threading.Thread(target=follow, args=[spec], daemon=True, name=name))
                threads[-1].start()

            # ---- nothing runs: all is done, or no node has room yet
            if not running:
                if dispatcher.is_over:
                    return
                time.sleep(1.0)
                continue

            # ---- pass on what happens next: a failure, a point or an end
            name, point, failure = reports.get()
            if failure is not None:
                raise failure
            if point is not None:
                listeners.tell("point", name, {**point, "slot": running[name].slot})
            elif dispatcher.finish(spec := running.pop(name)):
                listeners.tell("end", name, record.read_begun(spec.folder).drawn)
    finally:
        interrupted.set()
        for thread in threads:
            thread.join(backend.interrupt_s)
