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
from tunediff.core import record
from tunediff.core.environment import DISK_FAULTS
from tunediff.core.files import write_text
from tunediff.core.point import Point
from tunediff.core.progress import DOING
from tunediff.core.record import End
from tunediff.search_space import SearchSpace
from tunediff.training.crowding import name_other_processes
from tunediff.tuning import cluster, messages
from tunediff.tuning.messages import Job, Lost, Plan, WorkerGroupSpec, drawn, get
from tunediff.tuning.pool import PATIENCE_S, Allocation
from tunediff.tuning.resources import Placement

ATTEMPTS = 2
"""Worker groups a trial may use up: a killed worker is not the configuration's fault, a second one is suspicious."""

LOSSES = 3
"""Nodes that a trial may lose without notice: that is not the configuration's fault either, unless it comes again and
again."""

START_S = 600.0
"""After which workers that have not started on this machine are given up, and started again; on a cluster they may wait
for a node."""

Reported = dict[str, float]
"""What Tune's scheduler and pages get of a point: its numbers by their flat names, and the `objective`."""


class Driver(tune.Trainable):  # type: ignore[misc]
    """One trial after the other in the same process, as starting one takes seconds; each `step` is one point.

    A scheduler that stops a trial asks for no further step: the slot learns of it from the next trial, or at the end.
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
    """Hand the trial to its slot and yield its points for Tune, until it ended one way or another.

    `params`: the drawn knobs by dotted name, `trial` (its name) and `slot`. A driver that is started again after a
    kill attaches to the running job, or finds in the journal that all is done. To ask for the point after the next one
    is to let the workers train on.
    """
    values = drawn(params)
    seat = Allocation(params["slot"], Placement.of(params["place"]))
    yield from follow(params["trial"], plan.configuration(values), values, seat, plan)


def follow(name: str, config: Systems, values: Values, seat: Allocation, plan: Plan) -> Iterator[Reported]:
    """`points`, of a configuration of whatever workload; `values`: what its journal says was drawn.

    It has no end where a node of its seat was lost: whoever gave the seat gives it another one; see `record.was_lost`.
    """
    folder = plan.experiment / "trials" / name
    if (known := record.read_trial(folder)) is not None and known.finished:
        yield from (reported(point, plan) for point in known.points)
        return
    journal, slot = record.Journal(folder), get(f"{plan.slots}{seat.slot}")
    deadline, places = time.monotonic() + plan.deadline_s, _lost(folder)
    lost, losses = len(places), sum(not one.get("draining") for one in places)
    for attempt in range(1, ATTEMPTS + 1):
        journal.start(config, values, plan.budget.of(config.devices).seconds, int(name[1:]), plan.budget.unit)
        key = f"{name}/{lost}.{attempt}" if lost else f"{name}/{attempt}"
        serial = ray.get(slot.submit.remote(job_of(name, key, folder, config, seat.place, plan)))
        ended = yield from _until_ended(slot, serial, deadline, plan, folder, seat.place)
        if isinstance(ended, Lost) and (draining := cluster.draining(seat.place.nodes)):
            journal.write("lost", nodes=draining, reason=_short(ended.reason), draining=True)
            return
        if isinstance(ended, Lost) and (gone := cluster.gone(seat.place.nodes)) and losses + 1 < LOSSES:
            journal.write("lost", nodes=gone, reason=_short(ended.reason))
            return
        if isinstance(ended, Lost) and (why := _disk_fault(ended)) is not None:
            journal.write("unwritable", reason=why)  # a disk too full for a checkpoint has room for a line
            raise OSError(why)  # the trial has no end, and the search stops
        if (end := ended if isinstance(ended, End) else _after_loss(ended, attempt, config)) is None:
            continue
        if (written := record.read_trial(folder)) is None or not written.finished:  # the worker could not write it
            messages.end(folder, end)
        return


def settled(folder: Path, points: int, patience_s: float = 60.0) -> record.TrialRecord | None:
    """The record; a scheduler may end a trial at its last point, of so many, a moment before its worker has written
    the end."""
    until = time.monotonic() + patience_s
    while (known := record.read_trial(folder)) is not None and not known.finished:
        if len(known.points) < points or time.monotonic() > until:
            break
        time.sleep(0.05)
    return known


def _lost(folder: Path) -> list[record.Line]:
    """What its journal says of every place that the trial had to leave."""
    return [event for event in record.events(folder) if event["event"] == "lost"]


def job_of(name: str, key: str, folder: Path, config: Systems, place: Placement, plan: Plan) -> Job:
    """What the workers get to do."""
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
        if isinstance(event, End | Lost):  # an end that came late is an end all the same
            return event
        if event is None:
            if place.nodes and (gone := cluster.gone(place.nodes)):
                ray.get(slot.kill.remote(why := f"node {', '.join(gone)} is gone"))
                return Lost(why)
            if (missing_s := ray.get(slot.missing_s.remote())) > 0:  # no fault of the configuration's
                leaving = cluster.draining(place.nodes)  # workers that are there have heard of it themselves
                if leaving or (missing_s > START_S and not place.nodes):
                    why = f"its workers did not start within {START_S:.0f} s"
                    why = f"node {', '.join(leaving)} is draining" if leaving else why
                    ray.get(slot.kill.remote(why))
                    return Lost(why)
                waiting.tell(missing_s)
                deadline = time.monotonic() + plan.deadline_s
        if time.monotonic() > deadline:
            if (known := record.read_trial(folder)) is not None and known.end is not None:
                return known.end  # written a moment ago, and on its way here
            ray.get(slot.kill.remote("past its deadline"))
            return End("timeout", f"not done after {plan.deadline_s:.0f} s of wall-clock")
        if event is not None:
            cursor += 1
            yield reported(event, plan)
            ray.get(slot.let_go_on.remote(serial, event.index))


class Waiting:
    """Tells, in the journal and for the console, for what a group of workers waits longer than a minute."""

    def __init__(self, folder: Path, place: Placement) -> None:
        self._folder, self._place, self._told = folder, place, False

    def tell(self, waited_s: float) -> None:
        """It has waited for so many seconds."""
        if waited_s < PATIENCE_S or self._told:
            return
        self._told = True
        what = cluster.lacks(self._place)
        record.Journal(self._folder).write("waiting", waited_s=waited_s, what=what)
        with contextlib.suppress(OSError):
            told = {"part": "waiting", "since": time.time() - waited_s, "work": what}
            write_text(self._folder / DOING, json.dumps(told))


def _disk_fault(lost: Lost) -> str | None:
    """What the disk refused, where the workers died of that; None: they did not."""
    reason = _short(lost.reason)
    return next((os.strerror(code) for code in DISK_FAULTS if os.strerror(code) in reason), None)


def _after_loss(lost: Lost, attempt: int, config: Systems) -> End | None:
    """What it means that the workers died; None: try again."""
    reason = _short(lost.reason)
    if "outofmemory" in reason.lower().replace(" ", ""):
        return name_other_processes(End("oom", reason, memory=_ray_memory_mib(lost.reason, config.parallel.workers)))
    return End("error", f"the workers died {ATTEMPTS} times: {reason}") if attempt == ATTEMPTS else None


def _ray_memory_mib(reason: str, workers: int) -> dict[str, float]:
    """Return who held the memory of a node when Ray killed a worker for it, as `End.memory` has it; {}: not told.

    The workers of a trial need about as much each.
    """
    node = re.search(r"was ([\d.]+)GB used / ([\d.]+)GB limit", reason)
    killed = re.findall(r"actual memory used=([\d.]+)GB", reason)
    if node is None or not killed:
        return {}
    used, total = float(node[1]), float(node[2])
    own = min(used, workers * sum(map(float, killed)) / len(killed))
    return {"total_mib": 1024 * total, "demand_mib": 1024 * own, "others_mib": 1024 * (used - own)}


def reported(point: Point, plan: Plan | SearchSpace) -> Reported:
    """A point for Tune."""
    numbers = {name: value for name, value in point.flat.items() if isinstance(value, int | float)}
    worst = math.inf if plan.mode == "min" else -math.inf
    value = numbers[plan.metric]
    return {**numbers, "objective": value if math.isfinite(value) else worst}


def _short(reason: str) -> str:
    """The telling line of a Ray error, which brings pages; with the next one where it only announces that."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["no reason given"]
    telling = [i for i, line in enumerate(lines) if "Error" in line or re.search("died|killed", line.lower())]
    at = telling[-1] if telling else len(lines) - 1
    return " ".join(lines[at : at + 1 + lines[at].endswith(":")])[:300]
