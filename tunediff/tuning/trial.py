"""Drive one trial through its slot and report its points. Imports neither torch nor Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import time
from collections.abc import Generator, Iterator
from pathlib import Path

from tunediff.analysis import seconds_of
from tunediff.config.systems import with_more_passes
from tunediff.core import trial_record as record
from tunediff.core.environment import DISK_FAULTS, unwritable
from tunediff.core.files import write_text
from tunediff.core.journal import Journal
from tunediff.core.point import Point
from tunediff.core.progress import DOING
from tunediff.core.target import TIME_TO_TARGET
from tunediff.core.trial_record import End
from tunediff.search_space import SearchSpace
from tunediff.tuning.backend import Lost, Slot
from tunediff.tuning.pool import PATIENCE_S
from tunediff.tuning.resources import Placement
from tunediff.tuning.trial_spec import TrialSpec

ATTEMPTS = 2
"""Attempts at a trial: the first loss is nobody's fault, the second one ends it."""

LOSSES = 3
"""Losses of a node without notice that count as the configuration's fault."""

STALLED_S = 900.0
"""Seconds without progress after which an evaluation postpones no deadline."""
START_S = 600.0
"""Seconds after which workers here that have not started are killed; clusters may wait."""

NOT_YET_S = 1e9
"""Seconds to a target that is not met yet: Ray's log warns of every infinite number."""
SPEC = "spec"
"""Key of the `TrialSpec` in Tune's parameters of a trial, beside its drawn knobs."""

Reported = dict[str, float]
"""A point for Tune's scheduler and pages: its numbers by their flat names, and the `objective`."""


def run_trial_on_slot(spec: TrialSpec, slot: Slot) -> Iterator[Reported]:
    """Run one trial on its slot and yield its points; asking for the next lets it train on.

    The trial's journal stays without an `end` event if one of its nodes is lost; the caller then
    calls this again with others (see `record.was_lost`). Raises `OSError` when the disk is full.
    """
    # ---- a trial that has ended before is only reported
    folder, place = spec.folder, spec.group.place
    if (trial := record.read_trial(folder)) is not None and trial.finished:
        yield from (reported(point, spec) for point in trial.points)
        return

    # ---- attempts: each hands the job to the slot once
    deadline, events = time.monotonic() + spec.deadline_s, list(record.events(folder))
    lost_places = [event for event in events if event["event"] == "lost"]
    passes = [event["passes"] for event in events if event["event"] == "passes"]
    spec = spec.with_passes(passes[-1]) if passes else spec
    lost = len(lost_places)
    deaths = list[str]()
    for attempt in range(1, ATTEMPTS + 1):
        journal = spec.begin()
        key = f"{spec.name}/{lost}.{attempt}" if lost else f"{spec.name}/{attempt}"
        key += f"x{passes[-1]}" if passes else ""
        serial = slot.start(dataclasses.replace(spec, attempt=key))
        ended = yield from _until_ended(slot, serial, deadline, spec)

        # ---- a lost node or a full disk: no end, the trial goes on later
        if isinstance(ended, Lost) and (gone := slot.gone(place.nodes)) and lost + 1 < LOSSES:
            journal.write("lost", nodes=gone, reason=short_reason(ended.reason))
            return
        if isinstance(ended, Lost) and (why := _disk_fault(ended, folder)) is not None:
            # a disk too full for a checkpoint has room for a line
            journal.write("unwritable", reason=why)
            raise OSError(why)  # the trial has no end, and the search stops

        # ---- memory ran out in the first steps: in a fresh process a smaller micro-batch may fit
        if _ran_out(ended, folder) and (more := with_more_passes(spec.config)) is not None:
            why = short_reason(ended.reason)
            journal.write("passes", passes=more.loader.accumulation, reason=why)
            yield from run_trial_on_slot(spec, slot)
            return

        # ---- an end: of the workers, who may have written it, or because they died too often
        end = ended if isinstance(ended, End) else _after_loss(ended, deaths)
        if (written := record.read_trial(folder)) is None or not written.finished:
            if end is None:
                journal.write("died", reason=deaths[-1])
                continue
            Journal(folder).end_trial(end)
        return


def _ran_out(ended: End | Lost, folder: Path) -> bool:
    """Return whether memory ran out before the first point of a trial."""
    trial = record.read_trial(folder)
    is_oom = ended.status == "oom" if isinstance(ended, End) else _names_memory(ended.reason)
    return is_oom and trial is not None and not trial.points


def _names_memory(reason: str) -> bool:
    return "outofmemory" in short_reason(reason).lower().replace(" ", "")


def settled(folder: Path, points: int, patience_s: float = 60.0) -> record.TrialRecord | None:
    """Return a trial's record; wait up to `patience_s` for the end of one with all `points`.

    A scheduler may end a trial at its last point, a moment before its worker has written the end.
    """
    until = time.monotonic() + patience_s
    while (trial := record.read_trial(folder)) is not None and not trial.finished:
        if len(trial.points) < points or time.monotonic() > until:
            break
        time.sleep(0.05)
    return trial


def _until_ended(
    slot: Slot, serial: str, deadline: float, spec: TrialSpec
) -> Generator[Reported, None, End | Lost]:
    """Yield a job's points and return how it ended; `deadline`: monotonic seconds."""
    cursor, place, waiting_noted = 0, spec.group.place, False
    while True:
        event = slot.event(serial, cursor)
        if isinstance(event, End | Lost):  # also after the deadline
            return event

        # ---- nothing happened for a while: are the workers and their nodes there?
        if event is None:
            missing_s = slot.missing_s()
            if why := _unreachable(slot, place, missing_s):
                slot.stop(why)
                return Lost(why)
            if missing_s > 0:  # not the configuration's fault
                if missing_s >= PATIENCE_S and not waiting_noted:
                    _note_waiting(spec.folder, place, missing_s)
                    waiting_noted = True
                # counts from the start of the workers
                deadline = time.monotonic() + spec.deadline_s

        # ---- give up a trial that is past its deadline
        late_s = time.monotonic() - deadline
        if late_s > 0 and not _is_late_by_evaluations(spec, late_s):
            if (trial := record.read_trial(spec.folder)) is not None and trial.end is not None:
                return trial.end  # written a moment ago, and on its way here
            slot.stop("past its deadline")
            return End(
                "timeout",
                f"not done after {spec.deadline_s:.0f} s of wall-clock{_beside_evaluations(spec)}",
            )

        # ---- report a point; the workers train on once Tune asks for the next one
        if event is not None:
            cursor += 1
            yield reported(event, spec)
            slot.go_on(serial, event.index)


def _is_late_by_evaluations(spec: TrialSpec, late_s: float) -> bool:
    """Return whether evaluations excuse a trial that is `late_s` past its deadline.

    Evaluations that count towards the deadline may not, but for a final one that reports progress.
    """
    part, age_s = _doing(spec.folder)
    advances = age_s < STALLED_S and part == "evaluation"
    if spec.counts_evaluations:
        return bool(spec.final) and advances
    trial = record.read_trial(spec.folder)
    judged_s = seconds_of(trial).get("evaluation", 0.0) if trial is not None else 0.0
    # An evaluation is followed by a checkpoint, and only then by the point whose seconds count it.
    return late_s < judged_s or advances or (age_s < STALLED_S and part == "checkpoint")


def _beside_evaluations(spec: TrialSpec) -> str:
    """Return what a late trial's wall-clock leaves out, or why its evaluation counts."""
    if spec.counts_evaluations:
        return ""
    part, _ = _doing(spec.folder)
    if part != "evaluation":
        return " beside its evaluations"
    return (
        f", and its evaluation has reported no progress for {STALLED_S:.0f} s: budget.deadline"
        " allows more"
    )


def _doing(folder: Path) -> tuple[str, float]:
    """Return the part of its time in which a trial is, and the seconds since its progress.

    Returns an empty part where that is unknown.
    """
    with contextlib.suppress(OSError, ValueError):
        age_s = time.time() - (folder / DOING).stat().st_mtime
        return json.loads((folder / DOING).read_text()).get("part", ""), age_s
    return "", math.inf


def _unreachable(slot: Slot, place: Placement, missing_s: float) -> str:
    """Return why workers starting for `missing_s` (0: started) will not work, or ''."""
    if gone := slot.gone(place.nodes):
        return f"node {', '.join(gone)} is gone"
    late = missing_s > START_S and not place.nodes
    return f"its workers did not start within {START_S:.0f} s" if late else ""


def _note_waiting(folder: Path, place: Placement, waited_s: float) -> None:
    """Write to the journal and for the console what a group waits for."""
    resources = ", ".join(f"{value:g} {name}" for name, value in place.resources.items())
    lacking = f"there is no room yet for workers of {resources}, or they start"
    Journal(folder).write("waiting", waited_s=waited_s, what=lacking)
    with contextlib.suppress(OSError):
        progress = {"part": "waiting", "since": time.time() - waited_s, "work": lacking}
        write_text(folder / DOING, json.dumps(progress))


def _disk_fault(lost: Lost, folder: Path) -> str | None:
    """Return the disk's error in the trial's folder of which its workers died, or None.

    The full disk may be another one of their node, such as that of `/tmp`.
    """
    reason = short_reason(lost.reason)
    why = next((os.strerror(code) for code in DISK_FAULTS if os.strerror(code) in reason), None)
    # A disk that is too full for a checkpoint may have room for the probe.
    is_ours = why is None or str(folder) in lost.reason or unwritable(folder) is not None
    return why if is_ours else None


def _after_loss(lost: Lost, deaths: list[str]) -> End | None:
    """Return the end of a trial whose workers died; None: try again. Adds to `deaths`."""
    deaths.append(reason := short_reason(lost.reason))
    if _names_memory(reason):
        return End("oom", reason)
    # The first death may be the cause of the next ones.
    reasons = "; then: ".join(dict.fromkeys(deaths))
    died = End("error", f"the workers died {ATTEMPTS} times: {reasons}", process_died=True)
    return died if len(deaths) == ATTEMPTS else None


def reported(point: Point, objective: TrialSpec | SearchSpace) -> Reported:
    """Return a point for Tune: numbers and the objective; `NOT_YET_S` before a target is met."""
    numbers = {name: value for name, value in point.flat.items() if isinstance(value, int | float)}
    return {**numbers, "objective": {TIME_TO_TARGET: NOT_YET_S, **numbers}[objective.metric]}


def short_reason(reason: str) -> str:
    """Return the informative line of a Ray error, with the next one after a colon."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["no reason given"]
    telling = [
        i
        for i, line in enumerate(lines)
        if "Error" in line or re.search("died|killed", line.lower())
    ]
    at = telling[-1] if telling else len(lines) - 1
    return " ".join(lines[at : at + 1 + lines[at].endswith(":")])[:300]
