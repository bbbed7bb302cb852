"""Propose runs seed after seed until a difference is decided: confirming, comparing.

Nothing is drawn and no run is stopped early. One run at a time has the machine, or all equal
devices of it have one each (`at_once`): in waves, of which each ends before the next one begins, so
that every run has a concurrent neighbour.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tunediff import config as cfg
from tunediff.analysis.outcome import failed
from tunediff.config import Systems, Values
from tunediff.core import trial_record as record
from tunediff.core.disk import EDITED_MEANWHILE
from tunediff.core.journal import Journal
from tunediff.core.listeners import Listeners
from tunediff.core.trial_record import TrialRecord
from tunediff.tuning import loop
from tunediff.tuning.at_once import DeviceRotation
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


class Rounds:
    """Proposes unfinished runs of up to `max_rounds` rounds until `over()`, baseline first.

    A candidate whose run fails is out, and without the baseline there is nothing to compare with.
    The order of a round is that of `DeviceRotation`.

    With several devices, a wave is as many rounds as they have room for; where a round has more
    runs than there are devices, it is the next runs in line, so that every run has a concurrent
    neighbour.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        max_rounds: int,
        make: Callable[..., TrialSpec],
        over: Callable[[], bool],
        at_once: int = 1,
    ) -> None:
        """`make` returns the run of a name, a configuration, and `run_device`, the number of its
        device where several run at the same time; `at_once`: how many do."""
        self._candidates, self._max_rounds, self._make = candidates, max_rounds, make
        self._over, self._rotation = over, DeviceRotation(len(candidates), at_once)
        self.at_once = at_once
        self._eliminated: set[int] = set()
        self._running: set[int] = set()
        self._ended: list[tuple[TrialSpec, TrialRecord]] = []
        self._begun, self._pending = 0, list[int]()
        """Rounds that have begun, and the candidates that the last one of them lacks."""
        self._proposals = self._propose()

    def ask(self) -> TrialSpec | None:
        """Return the next run; None when it is decided, or while a wave runs."""
        return next(self._proposals, None)

    def tell(self, spec: TrialSpec, trial_record: TrialRecord, wall_s: float = 0.0) -> None:
        """Take note of a run that has ended; it is settled once no other one runs."""
        self._running.discard(spec.number)
        self._ended.append((spec, trial_record))
        while self._ended and not self._running:
            self.settle(*self._ended.pop(0))

    def settle(self, spec: TrialSpec, trial_record: TrialRecord) -> None:
        """Take a candidate out whose run has failed."""
        if failed(trial_record):
            self._eliminated.add(spec.number % len(self._candidates))

    def _propose(self) -> Iterator[TrialSpec | None]:
        looked = -1
        while True:
            while self._running:
                yield None
            if self._nothing_to_compare():  # a failure in the middle of a round ends it there
                return
            self._pending = [i for i in self._pending if i not in self._eliminated]
            if not self._pending and looked < self._begun:
                looked = self._begun
                if looked == self._max_rounds or self._over():
                    return
            yield from self._unfinished(self._next_wave())

    def _next_wave(self) -> list[tuple[int, int]]:
        """Return the runs (candidate, round) that begin together."""
        together, wave = self._rotation.is_a_round_together, list[tuple[int, int]]()
        remaining = len(self._candidates) - len(self._eliminated)
        if together:
            room = self._rotation.groups * len(self._candidates)
        elif remaining > self.at_once:
            room = self.at_once
        else:  # failures have left as few that whole rounds are together from the next one on
            room = len(self._pending) or self.at_once // remaining * remaining
        while room and (self._pending or self._begun < self._max_rounds):
            if not self._pending:
                self._pending = self._rotation.order(self._begun)
                self._begun += 1
            if (i := self._pending.pop(0)) not in self._eliminated:
                wave.append((i, self._begun - 1))
            elif not together:  # else its device stays free, and the others' are the same
                continue
            room -= 1
        return wave

    def _unfinished(self, wave: Sequence[tuple[int, int]]) -> Iterator[TrialSpec]:
        """Take note of the runs of a wave that have ended, and propose the others."""
        devices = self._rotation.devices(wave)
        runs = [self._run(*run, device) for run, device in zip(wave, devices, strict=True)]
        if self.at_once > 1:
            together = dict[int, list[TrialSpec]]()
            for (_, number), (spec, *_) in zip(wave, runs, strict=True):
                key = number if self._rotation.is_a_round_together else 0
                together.setdefault(key, []).append(spec)
            for specs in together.values():
                _restart_interrupted(specs)
        for (i, _), (spec, config, drawn) in zip(wave, runs, strict=True):
            if self._nothing_to_compare():
                return
            trial_record = record.read_trial(spec.folder)
            if trial_record is not None and trial_record.finished:
                self.tell(spec, trial_record)
            elif i not in self._eliminated:
                self._running.add(spec.number)
                spec.begin(config, drawn)
                yield spec

    def _nothing_to_compare(self) -> bool:
        return 0 in self._eliminated or len(self._candidates) - len(self._eliminated) < 2

    def _run(self, i: int, number: int, run_device: int) -> tuple[TrialSpec, Systems, Values]:
        config, drawn = self._candidates[i]
        seed = {"seed": config.seed + number}
        name, config = name_of(i, number, len(self._candidates)), cfg.override(config, seed)
        return self._make(name, config, run_device=run_device), config, {**drawn, **seed}


def _restart_interrupted(together: Sequence[TrialSpec]) -> None:
    """Let all runs that are at the same time begin again where one of them was interrupted: one
    that goes on alone would have no neighbour. A failure stays one."""
    records = [record.read_trial(spec.folder) for spec in together]
    if all(one is not None and one.finished for one in records):
        return
    for spec, trial_record in zip(together, records, strict=True):
        if trial_record is not None and not failed(trial_record):
            (spec.folder / record.CHECKPOINT).unlink(missing_ok=True)
            Journal(spec.folder).restarted("runs at the same time were interrupted")


def run(folder: Path, rounds: Rounds, backend: Backend, listeners: Listeners) -> None:
    """Run rounds on started workers. Raises `StoppedError` if `folder` is unwritable."""
    with writing_to(folder):
        loop.run(rounds, backend, listeners, rounds.at_once)


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn an `OSError` inside into a `StoppedError` that says why it cannot go on."""
    try:
        yield
    except OSError as error:
        why = f"cannot be written: {error.strerror or error}"
        if error.errno == EDITED_MEANWHILE:
            why = (
                f"would mix two programs: {error.filename} was edited meanwhile; put it back, or"
                " resume with --force if no run reads it"
            )
        raise StoppedError(f"{folder} {why}") from error
