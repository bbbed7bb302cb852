"""Drive one trial through its slot and report its points. Imports neither torch nor Ray."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator

from tunediff.core import trial_record as record
from tunediff.core.disk import is_full
from tunediff.core.errors import Failure
from tunediff.core.journal import Journal
from tunediff.core.outcomes import Status
from tunediff.core.point import Point
from tunediff.core.progress import DOING
from tunediff.core.target import TIME_TO_TARGET
from tunediff.core.trial_record import End
from tunediff.search_space import SearchSpace
from tunediff.tuning.backend import Reported, Slot
from tunediff.tuning.resources import Placement
from tunediff.tuning.trial_spec import TrialSpec

ATTEMPTS = 2
"""Attempts at a trial: the first loss is nobody's fault, the second one ends it."""

LOSSES = 3
"""Losses of a node without notice that count as the configuration's fault."""

START_S = 600.0
"""Seconds after which workers here that have not started are killed; clusters may wait."""

NOT_YET_S = 1e9
"""Seconds to a target that is not met yet: Ray's log warns of every infinite number."""
OOM = "OutOfMemoryError"
"""The class of torch's error, and of Ray's for a process that it ended for its memory."""
SPEC = "spec"
"""Key of the `TrialSpec` in Tune's parameters of a trial."""


def run_trial_on_slot(
    spec: TrialSpec, slot: Slot, check: Callable[[], bool] = lambda: False
) -> Iterator[Reported]:
    """Run one trial on its slot and yield its points; asking for the next lets it train on.

    `check` raises `Interrupted` where nobody wants the trial any more; see `Backend.run`.

    The trial's journal stays without an `end` event if one of its nodes is lost; the caller then
    calls this again with others (see `record.was_lost`). Raises `OSError` when the disk is full.
    """
    # ---- a trial that has ended before is only reported
    folder, place = spec.folder, spec.group.place
    if (trial := record.read_trial(folder)) is not None and trial.finished:
        yield from (reported(point, spec) for point in trial.points)
        return

    # ---- attempts: each hands the job to the slot once
    deadline = time.monotonic() + spec.deadline_s
    lost = sum(event["event"] == "lost" for event in record.events(folder))
    deaths, journal = list[str](), Journal(folder)
    for attempt in range(1, ATTEMPTS + 1):
        (folder / DOING).unlink(missing_ok=True)  # of an attempt that was killed
        if attempt > 1 or record.was_lost(folder):  # the first one was begun by the proposer
            journal.write("start")
        key = f"{spec.name}/{lost}.{attempt}" if lost else f"{spec.name}/{attempt}"
        serial = slot.start(dataclasses.replace(spec, attempt=key))
        ended = yield from _until_ended(slot, serial, deadline, spec, check)

        # ---- a lost node or a full disk: no end, the trial goes on later
        if isinstance(ended, Failure):
            if (gone := slot.gone(place.nodes)) and lost + 1 < LOSSES:
                journal.write("lost", nodes=gone, reason=str(ended))
                return
            if is_full(folder, ended):
                # a disk too full for a checkpoint has room for a line
                journal.write("fault", kind="disk", **vars(ended))
                raise ended.system_error  # the trial has no end, and the search stops

        # ---- an end: of the workers, who may have written it, or because they died too often
        end = ended if isinstance(ended, End) else _after_loss(ended, deaths)
        if (written := record.read_trial(folder)) is None or not written.finished:
            if end is None:
                journal.write("fault", kind="process", **vars(ended))
                continue
            journal.end_trial(end)
        return


def _until_ended(
    slot: Slot, serial: str, deadline: float, spec: TrialSpec, check: Callable[[], bool]
) -> Generator[Reported, None, End | Failure]:
    """Yield a job's points and return how it ended; `deadline`: monotonic seconds."""
    cursor, place = 0, spec.group.place
    while True:
        event = slot.event(serial, cursor)
        check()  # what has ended with the loop is no fault of the trial
        if isinstance(event, End | Failure):  # also after the deadline
            return event

        # ---- nothing happened for a while: are the workers and their nodes there?
        if event is None:
            missing_s = slot.missing_s()
            if why := _unreachable(slot, place, missing_s):
                slot.stop(why)
                return Failure(why)
            if missing_s > 0:  # not the configuration's fault
                # counts from the start of the workers
                deadline = time.monotonic() + spec.deadline_s

        # ---- give up a trial that is past its deadline
        if time.monotonic() > deadline:
            if (trial := record.read_trial(spec.folder)) is not None and trial.end is not None:
                return trial.end  # written a moment ago, and on its way here
            slot.stop("past its deadline")
            return End(Status.TIMEOUT, f"not done after {spec.deadline_s:.0f} s of wall-clock")

        # ---- report a point; the workers train on once Tune asks for the next one
        if event is not None:
            cursor += 1
            yield reported(event, spec)
            slot.go_on(serial, event.index)


def _unreachable(slot: Slot, place: Placement, missing_s: float) -> str:
    """Return why workers starting for `missing_s` (0: started) will not work, or ''."""
    if gone := slot.gone(place.nodes):
        return f"node {', '.join(gone)} is gone"
    late = missing_s > START_S and not place.nodes
    return f"its workers did not start within {START_S:.0f} s" if late else ""


def _after_loss(lost: Failure, deaths: list[str]) -> End | None:
    """Return the end of a trial whose workers died; None: try again. Adds to `deaths`."""
    deaths.append(str(lost))
    if lost.error == OOM:
        return End(Status.OOM, str(lost))
    # The first death may be the cause of the next ones.
    reasons = "; then: ".join(dict.fromkeys(deaths))
    died = End(Status.ERROR, f"the workers died {ATTEMPTS} times: {reasons}", process_died=True)
    return died if len(deaths) == ATTEMPTS else None


def reported(point: Point, objective: TrialSpec | SearchSpace) -> Reported:
    """Return a point for Tune: numbers, and the `objective`; `NOT_YET_S` before a target is met."""
    numbers = {name: value for name, value in point.flat.items() if isinstance(value, int | float)}
    return {**numbers, "objective": {TIME_TO_TARGET: NOT_YET_S, **numbers}[objective.metric]}
