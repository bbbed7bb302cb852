"""The driver of one trial: what Ray Tune starts. It imports no torch: its slot's workers do the training."""

from __future__ import annotations

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
from tunediff import record
from tunediff.config import Systems, Values
from tunediff.environment import DISK_FAULTS
from tunediff.record import End, Point
from tunediff.space import SearchSpace
from tunediff.tuning.messages import Job, Kind, Lost, Plan, drawn, get

ATTEMPTS = 2
"""Worker groups a trial may use up: a killed worker is not the configuration's fault, a second one is suspicious."""

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
    yield from follow(params["trial"], plan.configuration(values), values, plan.slots[params["slot"]], plan)


def follow(
    name: str, config: Systems, values: Values, slot_name: str, plan: Plan
) -> Iterator[Reported]:  # fmt: skip
    """`points`, of a configuration of whatever workload; `values`: what its journal says was drawn."""
    folder = plan.experiment / "trials" / name
    if (known := record.read_trial(folder)) is not None and known.finished:
        yield from (reported(point, plan) for point in known.points)
        return
    journal, slot, deadline = record.Journal(folder), get(slot_name), time.monotonic() + plan.deadline_s
    for attempt in range(1, ATTEMPTS + 1):
        journal.start(config, values, plan.budget.seconds, int(name[1:]))
        serial = ray.get(slot.submit.remote(job_of(name, attempt, folder, config, plan)))
        ended = yield from _until_ended(slot, serial, deadline, plan, folder)
        if (end := ended if isinstance(ended, End) else _after_loss(ended, attempt)) is None:
            continue
        if (written := record.read_trial(folder)) is None or not written.finished:  # the worker could not write it
            journal.end(end)
        return


def job_of(name: str, attempt: int, folder: Path, config: Systems, plan: Plan) -> Job:
    """What the workers get to do."""
    return Job(
        name=name, key=f"{name}/{attempt}", folder=folder, config=cfg.to_dict(config), budget=plan.budget,
        kind=Kind.of(config), fresh=plan.fresh or config.compile.active,  # caches of compilation outlive a trial
        evaluates=plan.evaluates, keeps=plan.evaluates, profile_steps=plan.profile_steps, final=plan.final,
    )  # fmt: skip


def _until_ended(
    slot: Any, serial: str, deadline: float, plan: Plan, folder: Path
) -> Generator[Reported, None, End | Lost]:
    """Yield the points of a job and return how it ended; `deadline`: on the monotonic clock, in seconds."""
    cursor = 0
    while True:
        event = ray.get(slot.event.remote(serial, cursor))
        if isinstance(event, End | Lost):  # an end that came late is an end all the same
            return event
        if time.monotonic() > deadline:
            if (known := record.read_trial(folder)) is not None and known.end is not None:
                return known.end  # written a moment ago, and on its way here
            ray.get(slot.kill.remote("past its deadline"))
            return End("timeout", f"not done after {plan.deadline_s:.0f} s of wall-clock")
        if event is not None:
            cursor += 1
            yield reported(event, plan)
            ray.get(slot.let_go_on.remote(serial, event.index))


def _after_loss(lost: Lost, attempt: int) -> End | None:
    """What it means that the workers died; None: try again. Raises `OSError` where it was the disk's fault."""
    reason = _short(lost.reason)
    if any(os.strerror(code) in reason for code in DISK_FAULTS):
        raise OSError(reason)  # the trial has no end, and the search looks at the disk
    if "outofmemory" in reason.lower().replace(" ", ""):
        return End("oom", reason)
    return End("error", f"the workers died {ATTEMPTS} times: {reason}") if attempt == ATTEMPTS else None


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
