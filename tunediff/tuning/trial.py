"""The driver of one trial: what Ray Tune starts. It imports no torch: its slot's workers do the training."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.result import RESULT_DUPLICATE

from tunediff import config as cfg
from tunediff.config import Systems, Values
from tunediff.core import trial_record as record
from tunediff.core.environment import DISK_FAULTS
from tunediff.core.files import write_text
from tunediff.core.journal import Journal
from tunediff.core.point import Point
from tunediff.core.progress import DOING
from tunediff.core.trial_record import End
from tunediff.search_space import SearchSpace
from tunediff.training.crowding import name_other_processes
from tunediff.tuning import cluster, messages
from tunediff.tuning.messages import Job, Lost, Plan, WorkerGroupSpec, drawn, get
from tunediff.tuning.pool import PATIENCE_S, Allocation
from tunediff.tuning.resources import Placement

ATTEMPTS = 2
"""Worker groups that a trial may lose: a killed worker is not the configuration's fault, a second one is suspicious."""

LOSSES = 3
"""Nodes that a trial may lose without notice: that is not the configuration's fault either, unless it repeats."""

STALLED_S = 900.0
"""Seconds without progress after which a final evaluation no longer postpones the deadline of its trial."""
START_S = 600.0
"""Seconds after which workers that have not started on this machine are killed and started again; on a cluster they may
wait for a node."""

Reported = dict[str, float]
"""A point for Tune's scheduler and pages: its numbers by their flat names, and the `objective`."""


class Driver(tune.Trainable):  # type: ignore[misc]
    """Run one trial after the other in one process, as starting a process takes seconds; each `step` is one point.

    A scheduler that stops a trial calls no further `step`: the slot notices at the next trial, or at the end.
    """

    def setup(self, config: Mapping[str, Any], plan: Plan) -> None:
        self._plan = plan
        self.reset_config(config)

    def reset_config(self, new_config: Mapping[str, Any]) -> bool:
        self._points = points(new_config, self._plan)
        return True

    def step(self) -> Reported:
        return next(self._points, {"done": True, RESULT_DUPLICATE: True})  # the end brings no numbers of its own


def points(params: Mapping[str, Any], plan: Plan) -> Iterator[Reported]:
    """Run one trial on its slot and yield every point for Tune, until the trial has ended.

    `params`: the drawn knobs by dotted name, `trial` (its name), `slot` and `place`. A driver that is started again
    after a kill attaches to the running job, or finds in the journal that all is done. The workers train on after a
    point when the next one is requested.
    """
    values = drawn(params)
    allocation = Allocation(params["slot"], Placement.of(params["place"]))
    yield from run_trial_on_slot(params["trial"], plan.configuration(values), values, allocation, plan)


def run_trial_on_slot(
    name: str, config: Systems, values: Values, allocation: Allocation, plan: Plan
) -> Iterator[Reported]:
    """Run one trial on its slot and yield every point that it reports.

    `values`: the drawn knobs, for its journal.
    The trial's journal stays without an `end` event if one of its nodes is lost; the caller then allocates other nodes
    and calls this again (see `record.was_lost`). Raises `OSError` when the disk is full.
    """
    # ---- a trial that has ended before is only reported
    folder = plan.experiment / "trials" / name
    if (trial := record.read_trial(folder)) is not None and trial.finished:
        yield from (reported(point, plan) for point in trial.points)
        return

    # ---- attempts: each hands the job to the slot once
    journal, slot = Journal(folder), get(f"{plan.slots}{allocation.slot}")
    deadline, lost_places = time.monotonic() + plan.deadline_s, _lost(folder)
    lost, losses = len(lost_places), sum(not loss.get("draining") for loss in lost_places)
    for attempt in range(1, ATTEMPTS + 1):
        journal.start(config, values, plan.budget.of(config.devices).seconds, int(name[1:]), plan.budget.unit)
        key = f"{name}/{lost}.{attempt}" if lost else f"{name}/{attempt}"
        serial = ray.get(slot.submit.remote(job_of(name, key, folder, config, allocation.place, plan)))
        ended = yield from _until_ended(slot, serial, deadline, plan, folder, allocation.place)

        # ---- a lost node or a full disk: no end, the trial goes on later
        if isinstance(ended, Lost) and (draining := cluster.draining(allocation.place.nodes)):
            journal.write("lost", nodes=draining, reason=_short(ended.reason), draining=True)
            return
        if isinstance(ended, Lost) and (gone := cluster.gone(allocation.place.nodes)) and losses + 1 < LOSSES:
            journal.write("lost", nodes=gone, reason=_short(ended.reason))
            return
        if isinstance(ended, Lost) and (why := _disk_fault(ended)) is not None:
            journal.write("unwritable", reason=why)  # a disk too full for a checkpoint has room for a line
            raise OSError(why)  # the trial has no end, and the search stops

        # ---- an end, of the workers or because they died too often
        if (end := ended if isinstance(ended, End) else _after_loss(ended, attempt, config)) is None:
            continue
        if (written := record.read_trial(folder)) is None or not written.finished:  # the worker could not write it
            messages.end(folder, end)
        return


def settled(folder: Path, points: int, patience_s: float = 60.0) -> record.TrialRecord | None:
    """Return the record of a trial, and wait up to `patience_s` for the end of one that has all of its `points`.

    A scheduler may end a trial at its last point, a moment before its worker has written the end.
    """
    until = time.monotonic() + patience_s
    while (trial := record.read_trial(folder)) is not None and not trial.finished:
        if len(trial.points) < points or time.monotonic() > until:
            break
        time.sleep(0.05)
    return trial


def _lost(folder: Path) -> list[record.Line]:
    """Return the journal's `lost` events: one for every placement that the trial had to leave."""
    return [event for event in record.events(folder) if event["event"] == "lost"]


def job_of(name: str, key: str, folder: Path, config: Systems, place: Placement, plan: Plan) -> Job:
    """Return the job for the workers of one attempt; `key` identifies the attempt."""
    return Job(
        name=name, key=key, folder=folder, config=cfg.to_dict(config), budget=plan.budget.of(config.devices),
        kind=WorkerGroupSpec.of(config, place),
        fresh=plan.fresh or config.compile.active,  # caches of compilation outlive a trial
        evaluates=plan.evaluates, keeps=plan.evaluates, profile_steps=plan.profile_steps, final=plan.final,
    )  # fmt: skip


def _until_ended(
    slot: Any, serial: str, deadline: float, plan: Plan, folder: Path, place: Placement
) -> Generator[Reported, None, End | Lost]:
    """Yield the points of a job and return how it ended; `deadline`: on the monotonic clock, in seconds."""
    cursor, waiting = 0, Waiting(folder, place)
    while True:
        event = ray.get(slot.event.remote(serial, cursor))
        if isinstance(event, End | Lost):  # also after the deadline
            return event

        # ---- nothing happened for a while: are the workers and their nodes there?
        if event is None:
            if place.nodes and (gone := cluster.gone(place.nodes)):
                ray.get(slot.kill.remote(why := f"node {', '.join(gone)} is gone"))
                return Lost(why)
            if (missing_s := ray.get(slot.missing_s.remote())) > 0:  # not the configuration's fault
                leaving = cluster.draining(place.nodes)  # workers that have started watch this themselves
                if leaving or (missing_s > START_S and not place.nodes):
                    why = f"its workers did not start within {START_S:.0f} s"
                    why = f"node {', '.join(leaving)} is draining" if leaving else why
                    ray.get(slot.kill.remote(why))
                    return Lost(why)
                waiting.tell(missing_s)
                deadline = time.monotonic() + plan.deadline_s  # counts from the start of the workers

        # ---- give up a trial that is past its deadline
        if time.monotonic() > deadline and not (plan.final and _advances(folder)):
            if (trial := record.read_trial(folder)) is not None and trial.end is not None:
                return trial.end  # written a moment ago, and on its way here
            ray.get(slot.kill.remote("past its deadline"))
            return End("timeout", f"not done after {plan.deadline_s:.0f} s of wall-clock")

        # ---- report a point; the workers train on once Tune asks for the next one
        if event is not None:
            cursor += 1
            yield reported(event, plan)
            ray.get(slot.let_go_on.remote(serial, event.index))


def _advances(folder: Path) -> bool:
    """Return whether the work in a trial has reported progress lately; a final evaluation may outlast the deadline."""
    with contextlib.suppress(OSError):
        return time.time() - (folder / DOING).stat().st_mtime < STALLED_S
    return False


class Waiting:
    """Report, in the journal and for the console, what a group of workers waits for longer than a minute."""

    def __init__(self, folder: Path, place: Placement) -> None:
        self._folder, self._place, self._told = folder, place, False

    def tell(self, waited_s: float) -> None:
        """Report it once, if the group has waited long enough."""
        if waited_s < PATIENCE_S or self._told:
            return
        self._told = True
        lacking = cluster.lacks(self._place)
        Journal(self._folder).write("waiting", waited_s=waited_s, what=lacking)
        with contextlib.suppress(OSError):
            progress = {"part": "waiting", "since": time.time() - waited_s, "work": lacking}
            write_text(self._folder / DOING, json.dumps(progress))


def _disk_fault(lost: Lost) -> str | None:
    """Return the disk's error if the workers died of one; None: they died of something else."""
    reason = _short(lost.reason)
    return next((os.strerror(code) for code in DISK_FAULTS if os.strerror(code) in reason), None)


def _after_loss(lost: Lost, attempt: int, config: Systems) -> End | None:
    """Return the end of a trial whose workers died; None: try again."""
    reason = _short(lost.reason)
    if "outofmemory" in reason.lower().replace(" ", ""):
        return name_other_processes(End("oom", reason, memory=_ray_memory_mib(lost.reason, config.parallel.workers)))
    return End("error", f"the workers died {ATTEMPTS} times: {reason}") if attempt == ATTEMPTS else None


def _ray_memory_mib(reason: str, workers: int) -> dict[str, float]:
    """Return who held the memory of a node when Ray killed a worker for it, as `End.memory` has it; {}: unknown.

    Ray names the killed worker's memory only: the workers of a trial are taken to need the same.
    """
    node = re.search(r"was ([\d.]+)GB used / ([\d.]+)GB limit", reason)
    killed = re.findall(r"actual memory used=([\d.]+)GB", reason)
    if node is None or not killed:
        return {}
    used, total = float(node[1]), float(node[2])
    own = min(used, workers * sum(map(float, killed)) / len(killed))
    return {"total_mib": 1024 * total, "demand_mib": 1024 * own, "others_mib": 1024 * (used - own)}


def reported(point: Point, plan: Plan | SearchSpace) -> Reported:
    """Return a point for Tune: a metric that is not finite is the worst value."""
    numbers = {name: value for name, value in point.flat.items() if isinstance(value, int | float)}
    worst = math.inf if plan.mode == "min" else -math.inf
    value = numbers[plan.metric]
    return {**numbers, "objective": value if math.isfinite(value) else worst}


def _short(reason: str) -> str:
    """Return the informative line of a Ray error, which has pages; with the next line if it ends in a colon."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["no reason given"]
    telling = [i for i, line in enumerate(lines) if "Error" in line or re.search("died|killed", line.lower())]
    at = telling[-1] if telling else len(lines) - 1
    return " ".join(lines[at : at + 1 + lines[at].endswith(":")])[:300]
