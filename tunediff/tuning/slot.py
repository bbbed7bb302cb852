"""A slot runs one trial at a time in a group of Ray Train workers.

Starting workers takes longer than a short trial. So a group stays, and its workers take one job
after the other from their slot; each job trains in processes of its own, which the workers start. A
job that needs another `WorkerGroupSpec`, or that follows a fault of several ranks, gets another
group. The slot itself is an actor that imports no torch; trial drivers (Tune) and
workers (Train) both call it, and each may die and be started again:

    driver                       slot                        workers of the group
    submit(job)  ─────────────►  job, its serial
                                 take(generation, done)  ◄─  ask for the next job
    event(serial, cursor)  ◄───  events  ◄─────────────────  post(serial, point, end or loss)
    let_go_on(serial, index)  ►  decisions  ──────────────►  decision(serial, index)
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ray

from tunediff.core.point import Point
from tunediff.tuning import cluster
from tunediff.tuning.cluster import beside, own_cluster
from tunediff.tuning.group import run_group
from tunediff.tuning.messages import Assignment, Decision, Event, Lost
from tunediff.tuning.resources import Placement
from tunediff.tuning.trial_spec import TrialSpec, WorkerGroupSpec

# a long poll returns None after this long, so that no request of a lost caller stays for ever
POLL_S = 10.0
T = TypeVar("T")


class Slot:
    """The actor that hands jobs of trial drivers to workers, and the workers' events to the
    drivers.

    Methods are coroutines of one actor, so that code between two `await`s is not interrupted.
    `_turn` is held by what starts or ends a group; `_changed` wakes the long polls.
    """

    def __init__(self, name: str, storage: str, here: str) -> None:
        """`storage`: absolute folder of Ray Train's own files; `here`: folder that the workers work
        in."""
        self._name, self._storage, self._here = name, storage, here
        self._changed, self._turn = asyncio.Condition(), asyncio.Lock()
        self._job: TrialSpec | None = None
        self._serial = ""  # of the current job; random, so that a restarted slot never reuses one
        self._submits = (
            0  # how often a driver came: one that was restarted keeps the serial of its trial
        )
        self._events: list[Event] = []
        self._ended = True
        self._decisions: set[int] = set()  # indices of the points after which training may go on
        self._dropped: set[str] = set()
        self._waiting_for: int | None = (
            None  # index of the point whose decision the workers wait for
        )
        self._generation = ""
        self._group: Any = None  # the task that runs TorchTrainer.fit()
        self._group_spec, self._group_ends = WorkerGroupSpec(0), False
        self._arrived, self._started = (
            False,
            0.0,
        )  # whether its workers have started, and when they were requested
        self._retired: set[str] = set()  # generations of groups that were asked to leave

    def __repr__(self) -> str:
        job = self._job.name if self._job is not None and not self._ended else "idle"
        return f"Slot({self._name}, {job})"

    async def warm(self, spec: WorkerGroupSpec, workload: str) -> None:
        """Start a group before there is a job of this workload for it."""
        async with self._turn:
            if self._group is None:
                self._start(spec, workload)

    async def note(self, line: str) -> None:
        """Log a line. The dashboard's table of tasks shows the name that the caller gives to this
        call."""
        print(line, file=sys.stderr, flush=True)  # the log that the actor's page opens with

    # ---- for trial drivers
    async def submit(self, job: TrialSpec) -> str:
        """Take a job and return its serial. A driver that was restarted is attached to its running
        job."""
        async with self._turn:
            self._submits += 1
            # ---- the same job again, or an earlier one whose driver is gone
            if self._job is not None and not self._ended:
                if self._job.attempt == job.attempt:
                    return self._serial
                await self._abandon()

            # ---- a group that fits the job
            if self._group is None or self._group_spec != job.group or self._group_ends:
                await self._retire()
                self._start(job.group, job.workload)

            # ---- hand it to the workers
            async with self._changed:
                self._serial = uuid.uuid4().hex
                self._job, self._events, self._decisions, self._ended = job, [], set(), False
                self._waiting_for = None
                self._changed.notify_all()
            return self._serial

    async def event(self, serial: str, cursor: int) -> Event | None:
        """Return event number `cursor` of the job as soon as it happens; None after `POLL_S`."""

        def next_event() -> Event | None:
            if serial != self._serial:
                return Lost("its slot was restarted")
            return self._events[cursor] if cursor < len(self._events) else None

        return await self._wait(next_event)

    async def let_go_on(self, serial: str, index: int) -> None:
        """Let the workers train on after point `index`. A scheduler that stops a trial ends its
        driver instead."""
        async with self._changed:
            if serial == self._serial:
                self._decisions.add(index)
                self._changed.notify_all()

    async def kill(self, reason: str) -> None:
        """End the group at once: its workers may hang."""
        async with self._turn:
            await self._kill(reason)

    async def missing_s(self) -> float:
        """Return for how many seconds the group's workers have been starting; 0: they have
        started."""
        return 0.0 if self._arrived or self._group is None else time.monotonic() - self._started

    async def free(self, after_s: float) -> None:
        """Release the devices for other slots `after_s` from now, unless another job comes by then.

        Called when the job is over or its trial was stopped early.
        """
        submits = self._submits
        await asyncio.sleep(after_s)
        async with self._turn:
            if submits == self._submits and self._group is not None:
                if not self._ended:
                    await self._abandon()
                await self._retire()

    async def close(self) -> None:
        """Let the group leave, if it is idle; end it otherwise."""
        async with self._turn:
            if self._ended:
                await self._retire()
            else:
                await self._kill("the search ends")

    # ---- for workers
    async def take(self, generation: str, done: str) -> Assignment | None:
        """Return the next job, or the order to leave for a group that was replaced; None after
        `POLL_S`: ask again.

        `done`: serial of the last job of these workers, which they do not get twice.
        """
        self._arrived = self._arrived or generation == self._generation

        def next_assignment() -> Assignment | None:
            if generation in self._retired or generation != self._generation:
                return Assignment()
            if self._job is not None and not self._ended and self._serial != done:
                return Assignment(self._serial, self._job)
            return None

        return await self._wait(next_assignment)

    async def post(self, serial: str, event: Event, workers_end: bool = False) -> None:
        """Pass an event to the driver: a point, after which the workers ask for the `decision`, the
        job's end, or a loss. `workers_end`: whether a fault ends the workers right after it, so
        that the next job needs others.
        """
        async with self._changed:
            if serial != self._serial or self._ended:
                return
            self._events.append(event)
            self._ended = not isinstance(event, Point)
            self._group_ends = self._group_ends or workers_end
            self._waiting_for = event.index if isinstance(event, Point) else None
            self._changed.notify_all()

    async def decision(self, serial: str, index: int) -> Decision | None:
        """Return whether to train on after point `index`; None after `POLL_S`: ask again."""

        def decided() -> Decision | None:
            if serial in self._dropped:
                return "stop"
            if serial != self._serial:
                return "unknown"
            return "go" if index in self._decisions else None

        answer: Decision | None = await self._wait(decided)
        if answer is not None and serial == self._serial:
            self._waiting_for = None
        return answer

    # ---- the group
    def _start(self, spec: WorkerGroupSpec, workload: str) -> None:
        self._generation = uuid.uuid4().hex[:8]
        self._group_spec, self._group_ends = spec, False
        self._arrived, self._started = False, time.monotonic()
        task = ray.remote(run_group).options(
            num_cpus=0,
            max_retries=0,
            name=f"workers of {self._name}, group {self._generation}",
            label_selector=beside(),
            runtime_env={"env_vars": own_cluster()},
        )
        self._group = task.remote(
            self._name, self._generation, spec, workload, self._storage, self._here
        )
        self._watching = asyncio.ensure_future(self._watch(self._generation, self._group))

    async def _watch(self, generation: str, group: Any) -> None:
        """Wait until a group has ended; its job is lost unless the group was asked to leave."""
        reason = "the worker group ended"
        try:
            await group
        except Exception as error:  # the trial's driver gets the reason
            reason = _reason(error)
        async with self._changed:
            if generation == self._generation:
                self._group = None
                if generation not in self._retired:
                    self._lose(reason)
            self._changed.notify_all()

    def _lose(self, reason: str) -> None:
        """Report the current job, if there is one, as lost."""
        if not self._ended:
            self._events.append(Lost(reason))
            self._ended = True

    async def _abandon(self) -> None:
        """Drop the job, whose driver is gone. Workers of a trial that was stopped early wait for a
        decision and get "stop"; busy ones are killed."""
        async with self._changed:
            waiting = self._waiting_for is not None
            self._dropped.add(self._serial)
            self._lose("its trial was given up")
            self._changed.notify_all()
        if not waiting:
            await self._kill("its trial was given up")

    async def _retire(self) -> None:
        """Let the group leave when its workers ask for the next job, and wait until its resources
        are free.

        A group that has not left after a minute is killed.
        """
        group = self._group
        if group is None:
            return
        async with self._changed:
            self._retired.add(self._generation)
            self._changed.notify_all()
        try:
            await asyncio.wait_for(asyncio.shield(self._gone(group)), timeout=60)
        except TimeoutError:
            await self._kill("it did not leave")

    async def _kill(self, reason: str) -> None:
        """End the group, report its job as lost for `reason`, and wait until it has ended."""
        group = self._group
        if group is None:
            return
        async with self._changed:
            self._retired.add(self._generation)
            self._lose(reason)
            self._changed.notify_all()
        ray.cancel(group, force=True)  # its controller and workers belong to it and end with it
        await self._gone(group)

    async def _gone(self, group: Any) -> None:
        """Wait until `_watch` has seen the end of a group."""
        while self._group is group:
            async with self._changed:
                await self._changed.wait()

    async def _wait(self, ready: Callable[[], T | None]) -> T | None:
        """Return the first result of `ready` that is not None, or None after `POLL_S`."""
        until = time.monotonic() + POLL_S
        async with self._changed:
            while (answer := ready()) is None and (left := until - time.monotonic()) > 0:
                try:
                    await asyncio.wait_for(self._changed.wait(), timeout=left)
                except TimeoutError:
                    return None
            return answer


def _reason(error: Exception) -> str:
    """Return Ray's message, with the class and message of its controller's error, whose class Ray
    leaves out."""
    inner = getattr(getattr(error, "cause", error), "controller_failure", None)
    return str(error) if inner is None else f"{error}\n{type(inner).__name__}: {inner}"


class RaySlot:
    """The actor of a slot, as a `SlotClient`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def submit(self, job: TrialSpec) -> str:
        return str(ray.get(self._actor.submit.remote(job)))

    def event(self, serial: str, cursor: int) -> Event | None:
        event: Event | None = ray.get(self._actor.event.remote(serial, cursor))
        return event

    def let_go_on(self, serial: str, index: int) -> None:
        ray.get(self._actor.let_go_on.remote(serial, index))

    def kill(self, reason: str) -> None:
        ray.get(self._actor.kill.remote(reason))

    def missing_s(self) -> float:
        return float(ray.get(self._actor.missing_s.remote()))

    def gone(self, nodes: Sequence[str]) -> list[str]:
        return cluster.gone(nodes)

    def draining(self, nodes: Sequence[str]) -> list[str]:
        return cluster.draining(nodes)

    def lacks(self, place: Placement) -> str:
        return cluster.lacks(place)
