"""The loop of searches, confirming runs, comparisons: ask, run on a slot, tell.

`run` goes through it by itself. In a search Ray Tune does, through the hooks that
`searcher.Searcher` adapts, with a scheduler that stops trials early. Imports no Ray.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Protocol

from tunediff.core import trial_record as record
from tunediff.core.listeners import Listeners
from tunediff.core.trial_record import TrialRecord
from tunediff.tuning import trial
from tunediff.tuning.at_once import AtOnce, OneByOne, Running
from tunediff.tuning.backend import Backend
from tunediff.tuning.trial_spec import TrialSpec


class Proposer(Protocol):
    """Decides what runs next, and learns how it ended."""

    def ask(self) -> TrialSpec | None:
        """Return the next trial; None: there is none, and it is not asked again."""

    def tell(self, spec: TrialSpec, trial_record: TrialRecord | None, wall_s: float) -> None:
        """Take note of how a trial ended, after `wall_s` on its slot; no record: it never began."""


class Dispatcher:
    """Gives slots to a proposer's trials, first to those that wait or lost their node."""

    def __init__(
        self,
        proposer: Proposer,
        backend: Backend,
        reconsiders: bool = False,
    ) -> None:
        """`reconsiders`: runs decide on further ones."""
        self._proposer, self._backend, self._pool = proposer, backend, backend.devices
        self._reconsiders = reconsiders
        self._waiting: list[TrialSpec] = []
        self._began: dict[str, float] = {}  # on the monotonic clock, of every trial that runs
        self._exhausted = False

    @property
    def over(self) -> bool:
        """Return whether no further trial will come; one that runs may yet lose its node."""
        return (
            self._exhausted
            and not self._waiting
            and not (self._began and (self._pool.unsteady or self._reconsiders))
        )

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
        parallel = spec.config.parallel
        if (allocation := self._pool.take(parallel.workers, together=parallel.together)) is None:
            self._waiting.insert(0, spec)
            return None
        self._began[spec.name] = time.monotonic()
        return spec.on(allocation)

    def finish(
        self, spec: TrialSpec, settle: Callable[[TrialSpec], object] = lambda spec: None
    ) -> bool:
        """Free a trial's devices, tell its proposer the outcome; return whether it is over.

        One that has lost its node starts again. `settle` writes an end that the journal may lack.
        """
        self._pool.give(spec.slot)
        wall_s = time.monotonic() - self._began.pop(spec.name)
        settle(spec)
        self._backend.release(spec)
        if record.was_lost(spec.folder):
            self._waiting.insert(0, spec)
            return False
        self._proposer.tell(spec, record.read_trial(spec.folder), wall_s)
        self._exhausted = self._exhausted and not self._reconsiders
        return True


def run(proposer: Proposer, backend: Backend, listeners: Listeners, at_once: bool = False) -> None:
    """Run a proposer's trials, `at_once` or one by one. Raises `OSError` on a full disk."""
    dispatcher = Dispatcher(proposer, backend, reconsiders=at_once)
    announced, specs = set[str](), dict[str, TrialSpec]()
    running: Running[str, trial.Reported] = AtOnce() if at_once else OneByOne()
    while True:
        while (at_once or not specs) and (spec := dispatcher.start()) is not None:
            specs[spec.name] = spec
            if spec.name not in announced:
                announced.add(spec.name)
                listeners.tell("start", spec.name, spec.drawn)
            slot = backend.slot(spec)
            running.start(spec.name, functools.partial(trial.run_trial_on_slot, spec, slot))
        if not specs:
            if dispatcher.over:
                return
            time.sleep(1.0)  # the nodes have no room for it yet
            continue
        name, point = running.next()
        if point is not None:
            listeners.tell("point", name, {**point, "slot": specs[name].slot})
        elif dispatcher.finish(spec := specs.pop(name)):
            listeners.tell("end", name, spec.drawn)
