"""Run configurations seed after seed on one slot until their difference is decided: confirming runs and `compare`.

This needs no Tune: nothing is drawn and no run is stopped early. The runs use the workers that have started already,
and one run at a time has the machine.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tunediff import config as cfg
from tunediff.analysis import failed
from tunediff.config import Systems, Values
from tunediff.core import trial_record as record
from tunediff.core.environment import unwritable
from tunediff.core.trial_record import TrialRecord
from tunediff.tuning import trial
from tunediff.tuning.dashboard import Listener, tell_all
from tunediff.tuning.messages import Plan
from tunediff.tuning.pool import Allocation, Pool
from tunediff.tuning.sessions import StoppedError


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration, whose seed is that of its first round, and the drawn knobs for its journals."""

    config: Systems
    drawn: Values


def name_of(place: int, number: int, candidates: int) -> str:
    """Return the name of the trial of the candidate at `place` in round `number`, both from 0.

    Round by round: t0000, t0001, …
    """
    return f"t{number * candidates + place:04d}"


def run(
    folder: Path,
    candidates: Sequence[Candidate],
    most: int,
    plan: Plan,
    pool: Pool,
    listeners: Sequence[Listener],
    over: Callable[[], bool],
) -> None:
    """Run the unfinished runs of at most `most` rounds, until `over()` before a round. The baseline comes first.

    Every other round runs in the opposite order, so that a machine that slows down favours no candidate. A candidate
    whose run fails is out, and without the baseline there is nothing to compare with. Raises `StoppedError` when the
    folder cannot be written.
    """
    out: set[int] = set()
    for number in range(most):
        if 0 in out or len(candidates) - len(out) < 2 or over():
            return
        places = range(len(candidates))
        for place in reversed(places) if number % 2 else places:
            if place not in out and failed(
                _run(folder, candidates[place], place, number, len(candidates), plan, pool, listeners)
            ):
                out.add(place)


def _run(
    folder: Path, candidate: Candidate, place: int, number: int, candidates: int, plan: Plan, pool: Pool,
    listeners: Sequence[Listener],
) -> TrialRecord:  # fmt: skip
    """Run one trial unless its journal has its end already; return its record."""
    name, seed = name_of(place, number, candidates), candidate.config.seed + number
    if (trial_record := record.read_trial(folder / "trials" / name)) is not None and trial_record.finished:
        return trial_record
    config, values = cfg.override(candidate.config, {"seed": seed}), {**candidate.drawn, "seed": seed}

    tell_all(listeners, "start", name, values)
    try:
        while True:
            allocation = _allocate(pool, config.parallel.workers, config.parallel.together)
            for point in trial.run_trial_on_slot(name, config, values, allocation, plan):
                tell_all(listeners, "point", name, {**point, "slot": allocation.slot})
            pool.give(allocation.slot)
            if not record.was_lost(folder / "trials" / name):
                break
    except OSError as error:
        raise StoppedError(f"{folder} cannot be written: {unwritable(folder) or error}") from None
    tell_all(listeners, "end", name, values)
    trial_record = record.read_trial(folder / "trials" / name)
    assert trial_record is not None
    return trial_record


def _allocate(pool: Pool, size: int, together: bool) -> Allocation:
    """Return the devices for so many workers; wait until the nodes have room for them."""
    while (allocation := pool.take(size, together=together)) is None:
        time.sleep(1.0)
    return allocation
