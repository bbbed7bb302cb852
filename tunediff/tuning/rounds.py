"""Propose configurations seed after seed until their difference is decided: confirming runs and
comparisons.

Nothing is drawn and no run is stopped early. One run at a time has the machine, or all equal
shares of it have one each (`at_once`). `Rounds` is also what comparisons of commands ask, which
start each run themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tunediff import config as cfg
from tunediff.analysis.outcome import failed
from tunediff.config import Systems, Values
from tunediff.core import trial_record as record
from tunediff.core.environment import unwritable
from tunediff.core.listeners import Listeners
from tunediff.core.trial_record import TrialRecord
from tunediff.tuning import loop
from tunediff.tuning.backend import Backend
from tunediff.tuning.sessions import StoppedError
from tunediff.tuning.trial_spec import TrialSpec

Candidate = tuple[Systems, Values]
"""A configuration, whose seed is that of its first round, and the drawn knobs for its journals."""


def name_of(i: int, number: int, candidates: int) -> str:
    """Return the name of the trial of candidate `i` in round `number`, both from 0.

    Round by round: t0000, t0001, …
    """
    return f"t{number * candidates + i:04d}"


class Proposed(Protocol):
    """What a round proposes: a run in a folder."""

    @property
    def folder(self) -> Path: ...
    @property
    def number(self) -> int: ...


R = TypeVar("R", bound=Proposed)


class Rounds(Generic[R]):
    """Proposes the unfinished runs of at most `max_rounds` rounds, until `over()` before a round.
    The baseline comes first.

    Every other round runs in the opposite order, so that a machine that slows down favours no
    candidate. A candidate whose run fails is out, and without the baseline there is nothing to
    compare with.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        max_rounds: int,
        make: Callable[[str, Any, Values], R],
        over: Callable[[], bool],
        at_once: int = 1,
    ) -> None:
        """`make` returns the run of a name, a configuration and its drawn knobs; `at_once`: how
        many run at the same time. With several, each wave of rounds ends before the next one."""
        self._candidates, self._max_rounds, self._make = candidates, max_rounds, make
        self._over, self._wave = over, max(1, at_once // len(candidates))
        self.at_once = at_once
        self._out: set[int] = set()
        self._open: set[int] = set()
        self._ended: list[tuple[R, TrialRecord | None]] = []
        self._proposals = self._propose()

    def ask(self) -> R | None:
        """Return the next run; None when it is decided, or while a wave runs."""
        return next(self._proposals, None)

    def tell(self, spec: R, trial_record: TrialRecord | None, wall_s: float = 0.0) -> None:
        """Take note of a run that has ended; it is settled once no other one runs."""
        self._open.discard(spec.number)
        self._ended.append((spec, trial_record))
        while self._ended and not self._open:
            self.settle(*self._ended.pop(0))

    def settle(self, spec: R, trial_record: TrialRecord | None) -> None:
        """Take a candidate out whose run has failed."""
        assert trial_record is not None
        if failed(trial_record):
            self._out.add(spec.number % len(self._candidates))

    def _propose(self) -> Iterator[R | None]:
        candidates = range(len(self._candidates))
        for number in range(self._max_rounds):
            wave, within = divmod(number, self._wave)
            while self._open and not within:
                yield None
            if self._nothing_to_compare() or (not within and self._over()):
                return
            for i in reversed(candidates) if wave % 2 else candidates:
                if self._nothing_to_compare():  # a failure in the middle of a round ends it there
                    return
                if i in self._out:
                    continue
                spec = self._spec(i, number)
                trial_record = record.read_trial(spec.folder)
                if trial_record is not None and trial_record.finished:
                    self.tell(spec, trial_record)
                else:
                    self._open.add(spec.number)
                    yield spec

    def _nothing_to_compare(self) -> bool:
        return 0 in self._out or len(self._candidates) - len(self._out) < 2

    def _spec(self, i: int, number: int) -> R:
        config, drawn = self._candidates[i]
        seed = {"seed": config.seed + number}
        name = name_of(i, number, len(self._candidates))
        return self._make(name, cfg.override(config, seed), {**drawn, **seed})


def run(folder: Path, rounds: Rounds[TrialSpec], backend: Backend, listeners: Listeners) -> None:
    """Run rounds on the workers that have started already. Raises `StoppedError` if `folder` cannot
    be written."""
    with writing_to(folder):
        loop.run(rounds, backend, listeners, rounds.at_once > 1)


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn an `OSError` inside into a `StoppedError` that says why `folder` cannot be written."""
    try:
        yield
    except OSError as error:
        raise StoppedError(f"{folder} cannot be written: {unwritable(folder) or error}") from None
